"""A parsed recipe held against opened checkpoints: one merge task for each output tensor."""
