"""What a composition is asked for: recipes, strategies and logs, and the source of each parameter."""
