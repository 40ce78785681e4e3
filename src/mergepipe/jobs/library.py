"""List and verify the packed experts of a folder."""

from __future__ import annotations

import math
import time

from mergepipe.deltastore.checkpoint import OpenedStore, read_store
from mergepipe.deltastore.codec.levels import Level
from mergepipe.deltastore.header import HEADER_NAME
from mergepipe.deltastore.library import member_places, shared_bytes
from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.jobs.unpack import verify_pack
from mergepipe.reports import Damage, LibraryMember, LibraryReport, ProgressCallback, VerifyReport
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


def list_library(folder: Location) -> LibraryReport:
    """Describe the packed experts in a folder; see `api.list_packed`.

    Raises:
        NotFoundError: there is no such folder, or no packed expert in it.
        StorageError: the folder cannot be read.
    """
    store = Stores()
    members: list[OpenedStore] = []
    problems: list[str] = []
    for place in _places(store, folder):
        try:
            members.append(read_store(store, place))
        except MergePipeError as error:
            problems.append(str(error))
    shared, stored_bytes = shared_bytes(members)
    listed = tuple(_member(opened, nbytes) for opened, nbytes in zip(members, shared, strict=True))
    return LibraryReport(folder, listed, stored_bytes, tuple(problems))


def verify_library(
    folder: Location,
    *,
    base: Location | None,
    threads: int,
    started: float,
    on_progress: ProgressCallback | None,
) -> VerifyReport:
    """Verify every packed expert in a folder as `verify_pack` does; one that cannot be opened is damaged.

    Raises:
        NotFoundError: there is no such folder, or no packed expert in it.
        StorageError: the folder cannot be read.
    """
    reports: list[VerifyReport] = []
    damages: list[Damage] = []
    for place in _places(Stores(), folder):
        try:
            report = verify_pack(place, base=base, threads=threads, started=started, on_progress=on_progress)
        except MergePipeError as error:
            problem = error.problems[0]
            message = f"{problem.where}: {problem.message}"
            damages.append(Damage("pack", f"{place.name}/{HEADER_NAME}", "", 0, 0, message))
        else:
            reports.append(report)
            damages += [
                Damage(d.kind, f"{place.name}/{d.file}", d.tensor, d.start, d.stop, d.message) for d in report.damages
            ]
    return VerifyReport(
        path=folder,
        sid="library",
        files=sum(report.files for report in reports),
        tensors=sum(report.tensors for report in reports),
        blocks=sum(report.blocks for report in reports),
        read_bytes=sum(report.read_bytes for report in reports),
        seconds=time.perf_counter() - started,
        damages=tuple(damages),
        notices=(),
    )


def _places(store: Store, folder: Location) -> tuple[Location, ...]:
    places = member_places(store, folder)
    if not places:
        raise NotFoundError.of(
            "library.not-found", folder, "holds no packed expert", "name the folder that they are in"
        )
    return places


def _member(opened: OpenedStore, shared: int) -> LibraryMember:
    header = opened.header
    squared_norm = opened.index.errors(Level.NOTHING, 0, len(opened.index.rows)).sum()
    return LibraryMember(
        store=opened.root,
        base=header.base,
        tensor_bytes=sum(tensor.nbytes for tensor in header.tensors),
        store_bytes=sum(file.size_bytes for file in opened.fingerprints),
        shared_bytes=shared,
        delta_norm=math.sqrt(squared_norm),
    )
