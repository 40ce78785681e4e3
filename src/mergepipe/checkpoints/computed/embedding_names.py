"""Recognise the names that architectures give to tensors with one row per token."""

from __future__ import annotations

import re

_NAME = re.compile(
    r"(?:^|\.)((?:embed_tokens|wte|word_embeddings?|tok_embeddings|token_embeddings?|embed_in|embed_out|shared"
    r"|lm_head|output|vocab_projector|predictions|predictions\.decoder)\.(?:weight|bias))$"
)


def embedding_ending(name: str) -> str | None:
    """Return the suffix of a name that marks an embedding or an output head; None if there is none.

    Its number of rows decides: `output.weight`, for one, is a usual name for other tensors too.
    """
    found = _NAME.search(name)
    return found[1] if found else None
