"""Publish a merge in a bucket or on the Hub.

The output grows in a staging directory of this machine, as one for a folder does; each shard is uploaded when its last
tensor is durable, and then its space is given back: what is left of it is its size, by which the run can be resumed.
The next is made meanwhile where the disk has room for both.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.engine.work import OutputPlan
from mergepipe.runs.progress import MergeProgress
from mergepipe.snapshots.manifest import MANIFEST_NAME, Manifest
from mergepipe.snapshots.object_upload import LAST_NAMES, HubUpload, ObjectUpload, Upload, check_apart
from mergepipe.snapshots.shards import TensorDigest, file_digest_of
from mergepipe.snapshots.staging import SPARE_BYTES, Staging
from mergepipe.storage import owned
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.remote.objects import BucketFolder
from mergepipe.storage.remote.retry import FailureKind, RequestFailed


class RemoteOutput:
    """One output elsewhere: one shard after the other is uploaded, then small files, then the manifest.

    It is the `DurableProgress` of its own run: a `MergeProgress` whose finished shards are uploaded by one thread.
    Shards that were made in parts (`is_made`) lie there already.
    """

    def __init__(
        self, location: Location, output: OutputPlan, inputs: Sequence[Checkpoint], *, is_made: bool, force: bool
    ) -> None:
        """Refuse a place in or around one of the `inputs`; makes no request. `force` replaces an output of the Hub."""
        check_apart(location, [checkpoint.root for checkpoint in inputs])
        self._stop = threading.Event()
        self._upload: Upload
        if location.scheme == HUB_SCHEME:
            self._upload = HubUpload(location, force=force)
        else:
            self._upload = ObjectUpload(BucketFolder(location, self._check_stop), completes_parts=is_made)
        self._is_made = is_made
        self._shards = output.shards
        self._sizes = {shard.name: shard.file_bytes for shard in output.shards}
        self._ends = list(accumulate(len(shard.tensors) for shard in output.shards))
        self._roots: dict[str, str] = {}
        self._n_queued = 0
        self._pending: Future[None] | None = None

    @property
    def staged_bytes(self) -> int:
        """The disk space that the shards need: that of the largest one."""
        return max((shard.file_bytes for shard in self._shards), default=0)

    def has(self, shard: str, digest: str) -> bool:
        """Whether a shard that was sent with this digest is there."""
        return shard in self._sizes and self._upload.has(shard, digest, self._sizes[shard])

    @contextlib.contextmanager
    def claimed(self, staging: Staging, progress: MergeProgress) -> Iterator[None]:
        """Claim the place while the context lasts. Raises as `ObjectUpload.__enter__`."""
        self._staging, self._progress = staging, progress
        with self._upload:
            self._pool = ThreadPoolExecutor(1, "mergepipe-upload")
            try:
                self._add((made.name, made.root) for made in self.done)  # what an earlier run did not upload
                yield
            finally:
                self._stop.set()
                self._pool.shutdown(cancel_futures=True)

    @property
    def done(self) -> tuple[TensorDigest, ...]:
        """Tensors that an earlier run made durable."""
        return self._progress.done

    def is_due(self, pending_bytes: int) -> bool:
        """Whether to record now: when a whole shard waits for it, else as `MergeProgress` says."""
        waits = self._n_queued < len(self._shards) and pending_bytes >= self._shards[self._n_queued].file_bytes
        return self._progress.is_due(pending_bytes) or waits

    def note(self, digests: Sequence[TensorDigest]) -> None:
        """Record the tensors, then upload the shards that are complete; waits for that if the next has no room."""
        self._progress.note(digests)
        self._add((made.name, made.root) for made in digests)

    def publish(self, manifest: Manifest) -> None:
        """Upload all that is left, the manifest last."""
        if not self._is_made:
            self._add((tensor.name, tensor.blake3) for tensor in manifest.tensors[len(self._roots) :])
        self._wait()
        folder = self._staging.path
        small = (*manifest.sidecars, manifest.blocks)
        for record in sorted(small, key=lambda record: (record.name in LAST_NAMES, record.name)):
            self._upload.send(record.name, owned.read_file(folder / record.name, record.size_bytes), record.blake3)
        sizes = {file.name: file.size_bytes for file in manifest.files}
        sizes |= {record.name: record.size_bytes for record in small}
        self._upload.commit((folder / MANIFEST_NAME).read_bytes(), sizes)

    def _add(self, roots: Iterable[tuple[str, str]]) -> None:
        self._roots.update(roots)
        while self._n_queued < len(self._shards) and self._ends[self._n_queued] <= len(self._roots):
            self._wait()
            self._pending = self._pool.submit(self._send, self._n_queued)
            self._n_queued += 1
            free_bytes = shutil.disk_usage(self._staging.path).free - SPARE_BYTES
            if self._n_queued < len(self._shards) and self._shards[self._n_queued].file_bytes > free_bytes:
                self._wait()  # the next is not begun before that: see `ShardWriter`

    def _wait(self) -> None:
        """Wait for the upload that is under way; raises what it raised."""
        if self._pending is not None:
            self._pending.result()

    def _send(self, index: int) -> None:
        """Upload a shard, record that, and give its space back."""
        shard = self._shards[index]
        if shard.name in self._progress.sent:
            return
        path, digest = self._staging.path / shard.name, file_digest_of(shard, self._roots)
        self._progress.note_sent(shard.name, self._upload.send(shard.name, path, digest))
        owned.replace_by_hole(path)

    def _check_stop(self, nbytes: int) -> None:
        del nbytes
        if self._stop.is_set():
            raise RequestFailed(FailureKind.UNUSABLE, "the run has ended")
