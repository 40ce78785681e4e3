"""Compositions: units of several checkpoints copied into one that can be resumed."""
