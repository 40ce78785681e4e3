"""Snapshots: manifest, layout, shards, block digests, staging and publishing."""
