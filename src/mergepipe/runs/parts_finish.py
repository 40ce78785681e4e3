"""Finish an output whose shards are made: take them and what was read for them, and give them back on a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mergepipe.engine.work import MergeWork, Observer, OutputPlan, PartResult
from mergepipe.errors import NotFoundError
from mergepipe.planning.plan import Plan
from mergepipe.runs.merge_run import MadeOutput
from mergepipe.runs.progress import MergeProgress, Resume
from mergepipe.snapshots.parts_account import Readings, readings_in
from mergepipe.snapshots.parts_place import PartsPlace
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.staging import Staging
from mergepipe.storage.ledger import Ledger, Purpose, Usage
from mergepipe.storage.output import sync_directory

_KILLED: Final = "(interrupted workers)"
_N_NAMED: Final = 3


def made_output(parts: PartsPlace, plan: Plan, output: OutputPlan, ledger: Ledger) -> MadeOutput:
    """Return an output whose shards are all made, with all that was read for them."""
    _made_shards(parts)
    readings = readings_in(parts)
    killed = readings.unfinished_bytes
    usage = readings.usage + (
        Usage({Purpose.EXPERT: killed}, {(_KILLED, Purpose.EXPERT): killed}) if killed else Usage()
    )
    return MadeOutput(_MadeParts(parts, ledger, usage).take, _FinishProgress(parts, output, plan, ledger, readings))


@dataclass(frozen=True, slots=True)
class _MadeParts:
    """Takes all shards of an output made in parts, and counts in `ledger` what they took."""

    parts: PartsPlace
    ledger: Ledger
    usage: Usage

    def take(self, work: MergeWork, directory: Path, observer: Observer) -> PartResult:
        """Move the shards into a staging directory."""
        digests_of = _made_shards(self.parts)
        self.ledger.expert_limit_bytes = None  # each worker was held to its share
        self.ledger.add(self.usage)
        self.parts.mark_staging(directory.parent)
        for shard, layout in enumerate(work.output.shards):
            self.parts.give(shard, digests_of[shard], directory / layout.name)
            observer.on_progress(None)
        sync_directory(directory)
        return PartResult(digests_of, self.usage)


def _made_shards(parts: PartsPlace) -> dict[int, tuple[TensorDigest, ...]]:
    """Return the digests of all shards."""
    recorded = parts.recorded_shards()
    is_complete = len(recorded) == len(parts.job.shards)  # else none is read
    digests_of = {
        shard: parts.done(shard) if is_complete else () if shard in recorded else None
        for shard in range(len(parts.job.shards))
    }
    missing = [parts.job.shards[shard][0] for shard, digests in digests_of.items() if digests is None]
    if missing:
        more = f" and {len(missing) - _N_NAMED} more" if len(missing) > _N_NAMED else ""
        message = f"{len(missing)} of {len(digests_of)} shards are not made: {', '.join(missing[:_N_NAMED])}{more}"
        raise NotFoundError.of("parts.missing", parts.out, message, "run their parts (`mergepipe status` lists them)")
    return {shard: digests for shard, digests in digests_of.items() if digests is not None}


class _FinishProgress(MergeProgress):
    """The progress of an output whose parts are made: nothing is read, nothing is resumed, failures cost nothing."""

    def __init__(self, parts: PartsPlace, output: OutputPlan, plan: Plan, ledger: Ledger, readings: Readings) -> None:
        super().__init__("", output, plan, ledger, Resume.NEVER)
        self._parts = parts
        self.earlier_expert_bytes = readings.repeated_bytes
        self.n_runs = readings.n_attempts

    def can_continue(self, directory: Path, is_sent: Callable[[str, str], bool] | None = None) -> bool:
        """Take shards back that an interrupted run had moved; then begin anew."""
        self._parts.take_back(directory)
        return False

    @contextlib.contextmanager
    def recorded(self, staging: Staging) -> Iterator[None]:
        """Take shards back if the output is not published."""
        try:
            yield
        except BaseException:
            if staging.path.is_dir():
                self._parts.take_back(staging.directory)
            raise
