"""Tiny checkpoints with tokenizers, written to disk, and their embeddings as they are fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mergepipe.checkpoints.contract import Checkpoint, Readable, TensorEntry
from mergepipe.checkpoints.open_files import open_files
from mergepipe.core.blocks import Span
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.ranges import PAGE_BYTES, aligned_buffer, round_up
from support.local_models import open_local

WIDTH = 8
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def fast_tokenizer(tokens: Sequence[str], added: Mapping[str, int] | None = None) -> dict[str, object]:
    """A word-level tokenizer: token n has the id n."""
    records = [
        {
            "id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for token, index in (added or {}).items()
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": records, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {token: n for n, token in enumerate(tokens)}, "unk_token": tokens[0]},
    }  # fmt: skip


def embedding(n_rows: int, seed: int, dtype: str = "float32") -> NDArray[np.generic]:
    return np.random.default_rng(seed).standard_normal((n_rows, WIDTH)).astype(dtype)


def write_model(
    directory: Path,
    tokens: Sequence[str],
    *,
    seed: int,
    n_rows: int | None = None,
    added: Mapping[str, int] | None = None,
    dtype: str = "float32",
    has_tokenizer: bool = True,
) -> Checkpoint:
    """An embedding, a head and a norm, with rows for all tokens or `n_rows`."""
    directory.mkdir(parents=True)
    rows = len({*tokens, *(added or {})}) if n_rows is None else n_rows
    save_file(
        {EMBED: embedding(rows, seed, dtype), HEAD: embedding(rows, seed + 1000, dtype), "norm.weight": np.ones(WIDTH)},
        directory / "model.safetensors",
    )
    (directory / "config.json").write_text(json.dumps({"vocab_size": rows}))
    if has_tokenizer:
        (directory / "tokenizer.json").write_text(json.dumps(fast_tokenizer(tokens, added), ensure_ascii=False))
    return open_local(directory)


def values_of(tensor: Readable) -> NDArray[np.float64]:
    """Everything a tensor holds, stored or computed."""
    numpy_dtype = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}[tensor.dtype.name]
    with open_files(LocalStore(), {entry.file for entry in tensor.stored}) as files:
        if isinstance(tensor, TensorEntry):
            raw = bytes(LocalStore().read_metadata(tensor.file, tensor.offset, tensor.nbytes))
        else:
            out = aligned_buffer(round_up(tensor.n_elements * tensor.dtype.itemsize, PAGE_BYTES))
            n_bytes = tensor.n_elements * tensor.dtype.itemsize
            tensor.opened(files)(Span(0, tensor.n_elements), out[:n_bytes], Purpose.EXPERT)
            raw = out[:n_bytes].tobytes()
    return np.frombuffer(raw, np.dtype(numpy_dtype)).reshape(tensor.shape).astype(np.float64)
