"""Checkpoints: named tensors on storage, whatever format they are stored in."""
