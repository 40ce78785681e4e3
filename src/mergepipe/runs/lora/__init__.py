"""Extract LoRA adapters: truncated decompositions of deltas, and the files that PEFT reads."""
