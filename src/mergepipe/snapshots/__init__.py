"""Snapshots: manifest, shards, block digests, staging and publishing."""
