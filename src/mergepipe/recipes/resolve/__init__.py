"""Resolve a parsed recipe against opened checkpoints into one merge task per output tensor."""
