"""Estimate the loss of a selection against the full merge."""
