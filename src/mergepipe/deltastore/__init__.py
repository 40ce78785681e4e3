"""The delta store: an expert kept as what it changes of its base, bit for bit, readable in levels."""
