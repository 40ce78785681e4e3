"""Verify a composite of tailor: every written file, by its digest."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from mergepipe.errors import MergePipeError
from mergepipe.reports import Damage, Progress, ProgressCallback, VerifyReport
from mergepipe.snapshots.composite import read_composite
from mergepipe.snapshots.layout import file_digest
from mergepipe.storage.contract import Store
from mergepipe.storage.file_version import Digested
from mergepipe.storage.location import Location


def verify_composite(
    store: Store, path: Location, threads: int, *, started: float, on_progress: ProgressCallback | None
) -> VerifyReport:
    """Read every file of a composite and compare it with the manifest."""
    record = read_composite(store, path)
    files = record.files
    damages: list[Damage] = []
    done, total = 0, sum(file.size_bytes for file in files)
    with ThreadPoolExecutor(max(2, threads), "mergepipe-verify") as pool:
        for file, damage in zip(files, pool.map(lambda recorded: damage_of(store, path, recorded), files), strict=True):
            done += file.size_bytes
            damages.extend([damage] if damage is not None else [])
            if on_progress is not None:
                on_progress(Progress("verify", done, total))
    return VerifyReport(
        path=path.local_path if path.is_local else path,
        sid=record.sid,
        files=len(files),
        tensors=0,
        blocks=len(files),
        read_bytes=done,
        seconds=time.perf_counter() - started,
        damages=tuple(damages),
        notices=(),
    )


def damage_of(store: Store, directory: Location, file: Digested) -> Damage | None:
    """Compare a file of a composite with its recorded size and digest; return the damage, None if both agree."""
    try:
        size, digest = file_digest(store, directory / file.name, file.size_bytes)
    except MergePipeError as error:
        return Damage("missing", file.name, "", 0, file.size_bytes, error.problems[0].message)
    if size != file.size_bytes:
        first, last = sorted((size, file.size_bytes))
        return Damage("size", file.name, "", first, last, f"has {size} bytes, {file.size_bytes} were written")
    if digest != file.blake3:
        return Damage("small-file", file.name, "", 0, file.size_bytes, "is not what was written")
    return None
