"""Training checkpoints: what they hold, and one resumable checkpoint out of parts of several."""
