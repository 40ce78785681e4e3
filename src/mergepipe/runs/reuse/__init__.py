"""Reuse of earlier snapshots: blocks copied by key, and kept sums continued."""
