"""Verify a snapshot, a packed expert or a composite against what was recorded when it was written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mergepipe.core.flags import public_call
from mergepipe.engine.work import EngineOptions
from mergepipe.errors import RecipeError, UnsupportedError
from mergepipe.jobs.examination import Examination, damage_of, examine
from mergepipe.jobs.replay import cause_of_change, rebuild_tensors, sampled_tensors
from mergepipe.jobs.snapshots import find_published, with_inputs_found
from mergepipe.options import RunOptions, VerifyOptions, catalog_home, engine_options
from mergepipe.recipes.model_location import locate_model
from mergepipe.reports import ByteProgress, Damage, ProgressCallback, VerifyReport
from mergepipe.snapshots.manifest import is_composite, read_composite
from mergepipe.snapshots.staging import temporary_folder
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


@public_call(VerifyOptions)
def verify(
    snapshot: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> VerifyReport:
    """Read a whole snapshot and compare every block, digest and file with its manifest; damage is in the report.

    A packed expert is decoded, and every block compared with the digest of the original.

    Args:
        snapshot: its directory, where it is in a bucket or repository, its sid, or first digits of it.
        options: `VerifyOptions`: how much is made again, threads, memory, the catalog's home, where sids are looked up.
    """
    started = time.perf_counter()
    made = VerifyOptions.of(options, fields)
    engine = engine_options(made)
    store = Stores()
    path, is_pack = find_published(snapshot, made.home, store)
    if is_pack:
        if made.deep_fraction > 0:
            raise RecipeError.of("option.conflict", "--deep", f"{snapshot} is a packed expert", "leave it out")
        from mergepipe.jobs.pack import verify_pack

        base = None if made.base is None else locate_model(store, made.base)
        return verify_pack(path, base=base, threads=engine.threads, on_progress=on_progress)
    if made.base is not None:
        raise RecipeError.of("option.conflict", "--base", f"{snapshot} is not a packed expert", "leave it out")
    if is_composite(store, path):
        if made.deep_fraction > 0:
            message = "a composite of tailor cannot be recomputed from its sources"
            raise UnsupportedError.of("snapshot.composite", path, message, "verify it without --deep")
        return _verify_composite(store, path, engine.threads, on_progress)
    examination = examine(store, path, engine.threads, on_progress)
    if made.deep_fraction > 0 and not examination.manifest.files:
        raise UnsupportedError.of("model.unsupported", path, "is the record of a GGUF file", "verify it without --deep")
    names = sampled_tensors(examination.manifest, made.deep_fraction) if made.deep_fraction > 0 else ()
    if names:
        examination = replace(examination, manifest=with_inputs_found(examination.manifest, store, catalog_home(made)))
    replayed = tuple(_replayed(store, examination, names, engine)) if names else ()
    return VerifyReport(
        path=path.as_reported,
        sid=examination.manifest.sid,
        files=len(examination.manifest.files) + len(examination.manifest.sidecars),
        tensors=len(examination.manifest.tensors),
        blocks=sum(map(len, examination.scan.blocks)),
        read_bytes=examination.scan.n_bytes,
        seconds=time.perf_counter() - started,
        damages=(*examination.damages, *replayed),
        notices=examination.notices,
        replayed=names,
        replayed_bytes=sum(t.nbytes for t in examination.layout.tensors if t.name in set(names)),
    )


def _replayed(
    store: Store, examination: Examination, names: tuple[str, ...], engine: EngineOptions
) -> Iterator[Damage]:
    """Recompute tensors from the inputs, and compare them with the manifest."""
    by_name = {tensor.name: (file, tensor) for file in examination.layout.files for tensor in file.tensors}
    with temporary_folder("verify") as work:
        for made in rebuild_tensors(store, examination.manifest, names, work, engine):
            file, tensor = by_name[made.digest.name]
            if made.digest.root != tensor.root:
                message = f"recomputed from the inputs, it differs: {cause_of_change(examination.manifest)}"
                start, stop = tensor.offset, tensor.offset + tensor.nbytes
                yield Damage("replay", file.name, tensor.name, start, stop, message)


def _verify_composite(store: Store, path: Location, threads: int, on_progress: ProgressCallback | None) -> VerifyReport:
    """Read every file of a composite and compare it with the manifest."""
    started = time.perf_counter()
    record = read_composite(store, path)
    files = record.files
    damages: list[Damage] = []
    progress = ByteProgress(on_progress, "verify", sum(file.size_bytes for file in files))
    with ThreadPoolExecutor(max(2, threads), "mergepipe-verify") as pool:
        for file, damage in zip(files, pool.map(lambda recorded: damage_of(store, path, recorded), files), strict=True):
            if damage is not None:
                damages.append(damage)
            progress.add(file.size_bytes)
    return VerifyReport(
        path=path.as_reported,
        sid=record.sid,
        files=len(files),
        tensors=0,
        blocks=len(files),
        read_bytes=progress.done_bytes,
        seconds=time.perf_counter() - started,
        damages=tuple(damages),
        notices=(),
    )
