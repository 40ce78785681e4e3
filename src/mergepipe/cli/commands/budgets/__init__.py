"""Commands that plan what is read under a budget."""
