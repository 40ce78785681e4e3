"""Leaf values that every room uses: blocks and dtypes, JSON, sizes, bounds, escaping."""
