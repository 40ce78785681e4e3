"""Training checkpoint formats, one a module; none knows another."""
