"""Recipes: from YAML to one merge task for each output tensor."""
