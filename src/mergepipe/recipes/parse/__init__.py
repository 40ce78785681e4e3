"""The user's YAML, parsed into frozen values with every problem named."""
