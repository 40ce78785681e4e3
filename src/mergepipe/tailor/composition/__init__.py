"""Compose a resumable training checkpoint from units of several checkpoints."""
