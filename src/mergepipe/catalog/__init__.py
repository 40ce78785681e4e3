"""The catalog: an embedded index of models, block statistics and snapshots that can always be made again."""
