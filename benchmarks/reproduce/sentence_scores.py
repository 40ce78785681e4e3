"""Scores of a sentence encoder on text of this machine: retrieval of the other half of a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.local_text import gather

_TEXTS, _CHARACTERS = 60, 250


@dataclass(frozen=True, slots=True)
class SentenceScores:
    """Mean reciprocal rank of a text's second half among all, and the mean cosine to another model's embeddings."""

    reciprocal_rank: float
    cosine: float


@cache
def read_corpus() -> tuple[tuple[str, str], ...]:
    """Return neighbouring pieces of prose, in pairs."""
    domain = gather(1, general_characters=1)[1]
    prose = domain.heldout + domain.training
    pieces = [prose[start : start + _CHARACTERS] for start in range(0, len(prose), _CHARACTERS)]
    pairs = list(zip(pieces[::2], pieces[1::2], strict=False))
    return tuple(pairs[:: max(1, len(pairs) // _TEXTS)][:_TEXTS])


def score_model(model: Path, reference: Path | None) -> SentenceScores:
    """Score an encoder; the cosine is that with the embeddings of `reference`, 1 without one."""
    first, second = _embed_corpus(model)
    similarity = first @ second.T
    ranks = (similarity >= np.diag(similarity)[:, None]).sum(axis=1)
    cosine = 1.0
    if reference is not None and reference != model:
        cosine = float((first * _reference_embeddings(reference)).sum(axis=1).mean())
    return SentenceScores(float((1 / ranks).mean()), cosine)


@cache
def _reference_embeddings(model: Path) -> NDArray[np.float32]:
    return _embed_corpus(model)[0]


def _embed_corpus(model: Path) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    corpus = read_corpus()
    return _embed(model, [first for first, _ in corpus]), _embed(model, [second for _, second in corpus])


def _embed(model: Path, texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the normalised means over tokens of the last layer, a row a text."""
    import torch
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(model, local_files_only=True)
    encoder: Any = BertModel.from_pretrained(model, local_files_only=True).eval()
    rows = []
    with torch.inference_mode():
        for start in range(0, len(texts), 32):
            batch = tokenizer(
                list(texts[start : start + 32]), padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            hidden, mask = encoder(**batch).last_hidden_state, batch["attention_mask"][..., None]
            rows.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).numpy())
    return np.concatenate(rows).astype(np.float32)
