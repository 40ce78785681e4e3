"""What a selection loses against the full merge."""
