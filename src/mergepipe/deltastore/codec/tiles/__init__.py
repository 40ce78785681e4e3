"""Tile-by-tile loops between bf16 values and codes with residuals."""
