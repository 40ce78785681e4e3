"""Recognise the names that architectures give to tensors with one row per token."""

from __future__ import annotations

import re

_NAME = re.compile(
    r"(?:^|\.)((?:embed_tokens|wte|word_embeddings?|tok_embeddings|token_embeddings?|embed_in|embed_out|shared"
    r"|lm_head|output|vocab_projector|predictions|predictions\.decoder)\.(?:weight|bias))$"
)

# Output heads that a model with tied weights does not store: they are its embedding.
TIED_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


def embedding_ending(name: str) -> str | None:
    """Return the suffix of a name that marks an embedding or an output head; None if there is none.

    Its number of rows decides: `output.weight`, for one, is a usual name for other tensors too.
    """
    match = _NAME.search(name)
    return match[1] if match else None


def is_head(name: str) -> bool:
    """Whether a tensor is an output head, which models with tied weights may not store."""
    return any(name == head or name.endswith(f".{head}") for head in TIED_HEADS)
