"""Speed and memory claims, each with its baseline and the I/O floor in the same run."""
