"""Parse the user's YAML into frozen values, collecting every problem."""
