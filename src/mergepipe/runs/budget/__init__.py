"""What a budgeted run adds: sampled experts, measured speeds, counted coverage, a verdict."""
