"""Tensors that are computed from stored ones: adapters, stacked experts, vocabulary rows."""
