"""File formats of checkpoints, one a module: strict readers of bytes that may lie."""
