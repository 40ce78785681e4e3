"""Writes models into a folder as the cache of the Hugging Face tools lays them out."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path


def git_blob_id(content: bytes) -> str:
    """The name that git gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def write_hub_cache(
    folder: Path, model: str, commit: str, files: Mapping[str, bytes], refs: Sequence[str] = ("main",)
) -> None:
    """Add a commit with some of its files, and the branches that lead to it; `.safetensors` are large files."""
    root = folder / f"models--{model.replace('/', '--')}"
    (root / "blobs").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        is_large = name.endswith(".safetensors")
        blob = root / "blobs" / (hashlib.sha256(content).hexdigest() if is_large else git_blob_id(content))
        blob.write_bytes(content)
        link = root / "snapshots" / commit / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for ref in refs:
        (root / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (root / "refs" / ref).write_text(commit)
