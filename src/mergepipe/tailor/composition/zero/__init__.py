"""DeepSpeed ZeRO checkpoints composed for another number of ranks."""
