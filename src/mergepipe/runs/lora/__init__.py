"""LoRA adapters as inputs and outputs: recipes that apply them, truncated decompositions, the files that PEFT reads."""
