"""Run a merge: opened inputs, resuming, reuse, recording, small files."""
