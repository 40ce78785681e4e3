"""Commands on training checkpoints."""
