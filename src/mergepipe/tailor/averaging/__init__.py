"""Average the checkpoints of one run: weights by a scheme, one pass over all of them, a model or a checkpoint."""
