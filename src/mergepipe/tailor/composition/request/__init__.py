"""Describe the composition that a user asks for: recipes, strategies and logs, and the source of each parameter."""
