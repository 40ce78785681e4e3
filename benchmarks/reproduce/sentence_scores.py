"""Embeddings of a sentence encoder on text of this machine, compared with those of another."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.local_text import gather

_TEXTS, _CHARACTERS = 60, 250


@cache
def _corpus() -> list[str]:
    """Pieces of prose."""
    domain = gather(1, general_characters=1)[1]
    prose = domain.heldout + domain.training
    pieces = [prose[start : start + _CHARACTERS] for start in range(0, len(prose), _CHARACTERS)][::2]
    return pieces[:: max(1, len(pieces) // _TEXTS)][:_TEXTS]


def mean_cosine(model: Path, reference: Path) -> float:
    """Return the mean cosine of a model's embeddings with those of `reference`."""
    return float((_embeddings(model) * _reference_embeddings(reference)).sum(axis=1).mean())


@cache
def _reference_embeddings(model: Path) -> NDArray[np.float32]:
    return _embeddings(model)


def _embeddings(model: Path) -> NDArray[np.float32]:
    """Return the normalised means over tokens of the last layer, a row a text."""
    import torch
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    encoder: Any = BertModel.from_pretrained(model, local_files_only=True).eval()
    with torch.inference_mode():
        batch = tokenizer(_corpus(), padding=True, truncation=True, max_length=256, return_tensors="pt")
        hidden, mask = encoder(**batch).last_hidden_state, batch["attention_mask"][..., None]
        means = (hidden * mask).sum(1) / mask.sum(1)
        rows: NDArray[np.float32] = torch.nn.functional.normalize(means, dim=1).numpy()
    return rows
