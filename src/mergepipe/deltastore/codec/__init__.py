"""Blocks as codes: what an expert changes of its base, encoded and decoded. `block` is the way in."""
