"""Commands that check recipes and merge."""
