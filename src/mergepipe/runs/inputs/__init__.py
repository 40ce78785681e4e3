"""The inputs of a run, opened, paired and checked."""
