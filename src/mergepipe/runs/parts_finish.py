"""Take part in finishing an output whose shards are made: the account of what was read, and shards given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from mergepipe.engine.made_parts import MadeParts, made_shards
from mergepipe.engine.work import OutputPlan
from mergepipe.planning.plan import Plan
from mergepipe.runs.merge_run import MadeOutput
from mergepipe.runs.recovery.resume import MergeProgress, Resume
from mergepipe.snapshots.parts_account import readings_in
from mergepipe.snapshots.parts_place import PartsPlace
from mergepipe.snapshots.staging import Staging
from mergepipe.storage.ledger import Ledger, Purpose, Usage

_KILLED = "(interrupted workers)"


def made_output(parts: PartsPlace, plan: Plan, output: OutputPlan, ledger: Ledger) -> MadeOutput:
    """Return an output whose shards are all made, with all that was read for them."""
    made_shards(parts)
    readings = readings_in(parts)
    killed = readings.unfinished_bytes
    usage = readings.usage + (
        Usage({Purpose.EXPERT: killed}, {(_KILLED, Purpose.EXPERT): killed}) if killed else Usage()
    )
    executor = MadeParts(parts, ledger, usage, plan.limit_bytes)
    return MadeOutput(executor, _FinishProgress(parts, output, plan, ledger, killed, readings.forgiven_bytes))


class _FinishProgress(MergeProgress):
    """The progress of an output whose parts are made: nothing is read, nothing is resumed, failures cost nothing."""

    def __init__(
        self, parts: PartsPlace, output: OutputPlan, plan: Plan, ledger: Ledger, killed: int, forgiven: int
    ) -> None:
        super().__init__("", output, plan, ledger, Resume.NEVER)
        self._parts = parts
        self._forgiven_bytes = forgiven
        self.earlier_expert_bytes = killed

    @property
    def forgiven_expert_bytes(self) -> int:
        """Expert bytes of workers whose reading was forgotten by `--no-resume`."""
        return self._forgiven_bytes

    def can_continue(self, directory: Path) -> bool:
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
