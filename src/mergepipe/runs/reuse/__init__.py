"""Reuse of earlier snapshots: blocks copied by key."""
