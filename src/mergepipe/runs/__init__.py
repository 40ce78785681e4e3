"""What every run of a merge shares: opened inputs, resuming, reuse, recording, small files."""
