"""Take shards that other processes have made, instead of making them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mergepipe.engine.work import SILENT, MergeWork, Observer, PartResult
from mergepipe.errors import NotFoundError
from mergepipe.snapshots.parts_place import PartsPlace
from mergepipe.snapshots.shards import DurableProgress, TensorDigest
from mergepipe.storage.ledger import Ledger, Usage
from mergepipe.storage.output import sync_directory

_NAMED = 3


@dataclass(frozen=True, slots=True)
class MadeParts:
    """An `Executor` that takes all shards of an output made in parts, and counts in `ledger` what they took."""

    parts: PartsPlace
    ledger: Ledger
    usage: Usage
    limit_bytes: int | None

    def run(
        self,
        work: MergeWork,
        directory: Path,
        observer: Observer = SILENT,
        progress: DurableProgress | None = None,
    ) -> PartResult:
        """See `Executor.run`."""
        digests_of = made_shards(self.parts)
        self.ledger.expert_limit_bytes = self.limit_bytes
        self.ledger.add(self.usage)
        self.parts.mark_staging(directory.parent)
        for shard, layout in enumerate(work.output.shards):
            self.parts.give(shard, digests_of[shard], directory / layout.name)
            observer.on_progress(None)
        sync_directory(directory)
        return PartResult(digests_of, self.usage)


def made_shards(parts: PartsPlace) -> dict[int, tuple[TensorDigest, ...]]:
    """Return the digests of all shards."""
    recorded = parts.recorded_shards()
    is_complete = len(recorded) == len(parts.job.shards)  # else none is read
    digests_of = {
        shard: parts.done(shard) if is_complete else () if shard in recorded else None
        for shard in range(len(parts.job.shards))
    }
    missing = [parts.job.shards[shard][0] for shard, digests in digests_of.items() if digests is None]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        message = f"{len(missing)} of {len(digests_of)} shards are not made: {', '.join(missing[:_NAMED])}{more}"
        raise NotFoundError.of("parts.missing", parts.out, message, "run their parts (`mergepipe status` lists them)")
    return {shard: digests for shard, digests in digests_of.items() if digests is not None}
