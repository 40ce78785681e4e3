"""The catalog: a local SQLite index of models, block statistics and snapshots that can always be rebuilt."""
