"""Select the candidates that are read: the order of a policy, cut to a budget."""
