"""Commands that look after published snapshots."""
