"""Run merges under a budget: sampled experts, measured speeds, counted coverage, a verdict."""
