"""Compute tensors from stored ones: adapters, stacked experts, vocabulary rows."""
