"""Checkpoints, statistics and manifests for the catalog's tests: real small files, made-up contents."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from mergepipe.checkpoints.contract import Checkpoint, CheckpointFile, TensorEntry
from mergepipe.core.blocks import BF16, BlockGrid
from mergepipe.operators.statistics import BLOCK_RECORD, COMMON_DENSITIES, Cut, TensorStatistics
from mergepipe.snapshots.manifest import Coverage, InputRecord, Manifest, RealizedBytes
from mergepipe.storage.contract import Digested, FileId, version_of
from mergepipe.storage.location import Location
from support.public_names import MANIFEST_NAME

WEIGHTS_NAME = "model.safetensors"
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def make_statistics(
    seed: int,
    n_elements: int = 1000,
    block_elements: int = 256,
    densities: tuple[float, ...] = COMMON_DENSITIES,
    *,
    is_tied: bool = False,
) -> TensorStatistics:
    """Statistics of random bits: no compressor and no accident makes them equal."""
    rng = np.random.default_rng(seed)
    grid = BlockGrid(n_elements, block_elements)
    cuts_D3 = rng.integers(0, 2**32, (len(densities), 3), np.uint32)
    if not is_tied:
        cuts_D3[:, 1:] = Cut(0)[1:]
    return TensorStatistics(
        grid=grid,
        blocks_B=np.frombuffer(rng.bytes(BLOCK_RECORD.itemsize * grid.n_blocks), BLOCK_RECORD),
        densities_D=np.array(densities, np.float64),
        cuts_D3=cuts_D3,
        products_3=rng.standard_normal(3),
    )


def same_bits(a: TensorStatistics, b: TensorStatistics) -> bool:
    """Equality down to the bits of NaN."""
    return a.grid == b.grid and all(
        getattr(a, name).tobytes() == getattr(b, name).tobytes() and getattr(a, name).dtype == getattr(b, name).dtype
        for name in ("blocks_B", "densities_D", "cuts_D3", "products_3")
    )


def fingerprint_of(path: Path) -> FileId:
    status = path.stat()
    return FileId(path.name, status.st_size, version_of(path, status), f"{len(path.read_bytes()):032x}")


def make_checkpoint(directory: Path, content: bytes = b"weights", *, bare: bool = False) -> Checkpoint:
    """A checkpoint of two tensors over one real file; what is in the file does not matter to the catalog."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / WEIGHTS_NAME
    file.write_bytes(content)
    entries = (
        TensorEntry("a.weight", BF16, (10, 100), Location.local(file), 0, 2000),
        TensorEntry("b.weight", BF16, (24,), Location.local(file), 2000, 48),
    )
    return Checkpoint(
        path=Location.local(file if bare else directory),
        root=Location.local(directory),
        tensors={entry.name: entry for entry in entries},
        files=(CheckpointFile(Location.local(file), fingerprint_of(file)),),
        sidecars=(),
    )


def reopened(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint as its files are now."""
    files = [replace(file, id=fingerprint_of(file.location.local_path)) for file in checkpoint.files]
    return replace(checkpoint, files=tuple(files))


def rewrite(path: Path, content: bytes) -> None:
    """Change a file and make sure that its time moves."""
    before = path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def make_manifest(
    name: str, inputs: tuple[Path, ...] = (), *, plan_digest: str | None = None, coverage: Coverage | None = None
) -> Manifest:
    """A manifest of which the sid depends on `name`; the first of `inputs` is the base."""
    records = tuple(
        InputRecord(
            role="expert" if position else "base",
            model=f"./{path.name}",
            path=str(path),
            files=tuple(
                FileId(file.name, file.size_bytes, file.version, file.header_digest)
                for file in (fingerprint_of(path / WEIGHTS_NAME),)
            ),
            content_id=None,
            read_bytes=100 + position,
        )
        for position, path in enumerate(inputs)
    )
    return Manifest(
        version="0.1.0",
        operator="linear",
        recipe=f"# {name}\n",
        seed=0,
        inputs=records,
        files=(Digested(WEIGHTS_NAME, 1, "0" * 32),),
        tensors=(),
        dropped=(),
        realized=RealizedBytes(base=1, expert=2, analysis=3, metadata=4, output=5),
        plan_digest=plan_digest,
        plan=None,
        coverage=coverage,
        run={"seconds": 1.5},
        blocks=Digested("mergepipe.blocks", 1, "0" * 32),
    )


def publish(directory: Path, inputs: tuple[Path, ...] = ()) -> Manifest:
    """Write a snapshot as a merge leaves it: weights and a manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / WEIGHTS_NAME).write_bytes(directory.name.encode())
    manifest = make_manifest(directory.name, inputs)
    (directory / MANIFEST_NAME).write_bytes(manifest.to_json())
    return manifest
