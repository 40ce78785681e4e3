"""Push a snapshot, a composite or a packed expert to a bucket or to the Hub: visible there whole or not at all."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from mergepipe.core.flags import public_call
from mergepipe.deltastore.builder import PACK_MESSAGE, packed_names, published_store
from mergepipe.deltastore.checkpoint import read_store
from mergepipe.errors import RecipeError
from mergepipe.jobs.snapshots import find_published, refuse_elsewhere
from mergepipe.options import PushOptions
from mergepipe.recipes.model_location import resolve_model_name
from mergepipe.reports import ByteProgress, ProgressCallback, PushReport
from mergepipe.snapshots.manifest import is_composite
from mergepipe.snapshots.object_upload import HubUpload, ObjectUpload, OutputContent, Upload, published_snapshot
from mergepipe.storage.contract import Store
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.output_places import ELSEWHERE, output_place
from mergepipe.storage.remote.hub_commit import HubRepository
from mergepipe.storage.remote.objects import BucketFolder
from mergepipe.storage.stores import Stores


@public_call(PushOptions)
def push(
    snapshot: str | Path,
    destination: str,
    *,
    options: PushOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> PushReport:
    """Publish a snapshot or a packed expert on the Hub or in a bucket, visible there whole or not at all.

    What is uploaded when a push fails stays for the next try. `on_progress` is called after each file.

    Args:
        snapshot: its directory, or the sid of a snapshot, or first digits of it.
        destination: `hf://org/name[@branch][/folder]`, `s3://bucket/prefix`, `gs://` or `az://`; `org/name` is one of
            the Hub unless there is such a path.
    """
    started, made = time.perf_counter(), PushOptions.of(options, fields)
    name = resolve_model_name(destination, lambda path: Path(path).exists())
    target = output_place(name.remote or destination, ELSEWHERE)
    if target.scheme != HUB_SCHEME and (made.create or made.message is not None):
        option, message = "--create" if made.create else "--message", "only the Hub has repositories and commits"
        raise RecipeError.of("option.conflict", option, message, "leave it out, or push to org/name")
    refuse_elsewhere(snapshot)
    store = Stores()
    folder, is_pack = find_published(snapshot, made.home, store)
    path = folder.local_path
    if is_pack:
        opened = read_store(store, folder)
        message = PACK_MESSAGE
        output, sid = published_store(store, opened), opened.header.content_id
    else:
        read = _read_composite if is_composite(store, folder) else _read_snapshot
        output, sid, message = read(store, path)
    with _open_upload(target, output.record_name, made, message) as upload:
        output.send_by(upload, ByteProgress(on_progress, "push", output.total_bytes).add)
    return PushReport(
        snapshot=path,
        destination=target,
        sid=sid,
        files=len(output.objects) + 1,
        total_bytes=output.total_bytes,
        kept_bytes=upload.kept_bytes,
        commit=upload.commit_id if isinstance(upload, HubUpload) else "",
        seconds=time.perf_counter() - started,
    )


def _read_composite(store: Store, path: Path) -> tuple[OutputContent, str, str]:
    from mergepipe.tailor.composition import published_composite

    copy, output = published_composite(store, path)
    title = "Composite" if copy.average is None else "Average"
    return output, copy.sid, f"{title} of checkpoints (mergepipe {copy.version})"


def _read_snapshot(store: Store, path: Path) -> tuple[OutputContent, str, str]:
    copy, output = published_snapshot(store, path)
    return output, copy.sid, f"{copy.title} (mergepipe {copy.version})"


def _open_upload(destination: Location, name: str, options: PushOptions, message: str) -> Upload:
    if destination.scheme != HUB_SCHEME:
        return ObjectUpload(BucketFolder(destination), name)
    if options.create:
        HubRepository(destination).create(is_private=options.private)
    message = options.message or message
    return HubUpload(destination, name, force=True, message=message, packed_names=packed_names)
