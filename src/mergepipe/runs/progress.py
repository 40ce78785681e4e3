"""Log the progress of a merge, and resume an interrupted one: what is durable stays, what was lost is read again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from mergepipe.core.records import encode
from mergepipe.core.strict_json import digest_of
from mergepipe.core.units import format_bytes, plural
from mergepipe.engine.work import OutputPlan
from mergepipe.errors import LimitError, NotFoundError, StorageError
from mergepipe.planning.plan import Plan
from mergepipe.runs.budget import planned_cost
from mergepipe.runs.inputs import Inputs
from mergepipe.snapshots import work_log as work_log
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.snapshots.staging import CONTENT_NAME, Staging, kept_note
from mergepipe.snapshots.work_log import (
    WORTH_KEEPING,
    FileUse,
    LoggedWork,
    MergeState,
    Record,
    WorkLog,
    forget_work_log,
    merge_state,
    read_work_log,
    usage_of,
    uses_of,
)
from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger, Purpose, Usage
from mergepipe.storage.output import sync_directory

READ_AHEAD_BYTES = 16 << 20
"""How far a record of reads is ahead of them: what a run that is killed may be charged too much."""
NOTHING_KEPT: Final = "the same command starts from the beginning"
READS_KEPT: Final = (
    "expert bytes that were read count when this output is made again; `--no-resume` or `mergepipe gc` forget them"
)
_EARLIER: Final = "(earlier runs)"


def run_key(inputs: Inputs, plan: Plan | None, output: OutputPlan, seed: int) -> str:
    """Digest everything that must be equal for one run to resume another."""
    return digest_of({
        **inputs.state,
        "seed": seed,
        "plan": None if plan is None else plan.digest,
        "tasks": [[task.name, task.action.value, task.dtype.name, list(task.shape)] for task in output.tasks],
        "shards": [[shard.name, shard.file_bytes, len(shard.tensors)] for shard in output.shards],
    })  # fmt: skip


class MergeProgress:
    """The durable progress of one merge, a `DurableProgress`, and what was read for it. Used from many threads.

    The budget bounds what the plan reads, in each run; what a crash lost is read again by the next one, and counted.
    To tell how much, a record of reads is written ahead of them, without waiting for the disk: the end of the process
    loses none of it, a loss of power at most what was read since the last unit.
    """

    def __init__(
        self,
        key: str,
        output: OutputPlan,
        plan: Plan | None,
        ledger: Ledger,
        *,
        resume: bool | None = None,
        is_strict: bool = False,
    ) -> None:
        """`resume` an interrupted run: if it is the same merge (None), or refuse (True); False forgets what it read.

        `is_strict` refuses to go beyond the budget.
        """
        self._key = key
        self._output = output
        self._plan = plan
        self._ledger = ledger
        self._before = Usage()
        self._resume = resume
        self._is_strict = is_strict
        self._share_bytes = 0 if plan is None else plan.planned_bytes
        self._announced_bytes = 0  # expert bytes that the log tells of
        self._recorded_at = time.monotonic()
        self._lock = threading.Lock()
        self._directory: Path | None = None
        self._log: WorkLog | None = None
        self.done: tuple[TensorDigest, ...] = ()
        self.n_durable = 0
        self._most_expert_bytes = self.remaining_bytes
        self.attempt: int | None = None
        self.sent: dict[str, str] = {}
        self.n_runs = 1
        self.earlier_expert_bytes = 0
        self.notices: list[str] = []

    @classmethod
    def of_part(cls, key: str, output: OutputPlan, plan: Plan, ledger: Ledger, share_bytes: int) -> MergeProgress:
        """Return the progress of a part, which has a share of the plan; what `ledger` has counted is of others."""
        progress = cls(key, output, plan, ledger)
        progress._before = ledger.usage()
        progress._share_bytes = progress._most_expert_bytes = share_bytes
        return progress

    # --- what earlier runs left ---

    def can_continue(self, directory: Path, is_sent: Callable[[str, str], bool] | None = None) -> bool:
        """Decide whether to resume the run in a staging directory; if so, prepare its files.

        `is_sent` tells whether a shard of some digest is where it was sent to. What earlier runs of this
        merge read is charged to the ledger, whether their work is resumed or not.
        """
        logged = None if self._resume is False else read_work_log(directory)
        state = None if logged is None or logged.key != self._key else merge_state(logged)
        if logged is None:
            refusal = "there is no interrupted run"
        elif state is None:
            refusal = "the interrupted run was another merge, or its inputs have changed"
        else:
            refusal = self._refusal(directory, logged, state, is_sent)
        if refusal and self._resume:
            hint = "run without --resume to start over"
            raise NotFoundError.of("resume.nothing", directory, f"nothing to resume: {refusal}", hint)
        self._directory = directory
        if logged is None or state is None:
            forget_work_log(directory)
            if logged is not None:
                self.notices.append(f"started over, since {refusal}")
            return False
        self._check_budget(directory, state.expert_bytes, 0 if refusal else len(state.digests))
        self.n_runs, self.attempt = logged.n_runs + 1, state.attempt
        if refusal:
            self._log = WorkLog(directory, self._key, logged)
            self._log.restart()
            self._charge((), state.expert_bytes)
            if state.expert_bytes:
                counted = f"earlier runs may have read {state.expert_bytes} expert bytes, which are read again"
                self.notices.append(f"started over, since {refusal}: {counted}")
            return False
        self._log = WorkLog(directory, self._key, logged)
        self.done, self.n_durable, self.sent = state.digests, len(state.digests), dict(state.sent)
        self.remove_undurable()
        self._charge(state.usage, state.expert_bytes)
        self.notices.append(
            f"resumed an interrupted run at {self.durable_share:.0%}: {self._durable_bytes} of {self._output_bytes} "
            f"bytes in {self.n_durable} of {len(self._output.tasks)} tensors were durable"
        )
        return True

    def _refusal(
        self, directory: Path, logged: LoggedWork, state: MergeState, is_sent: Callable[[str, str], bool] | None
    ) -> str:
        """Return the reason why logged work cannot be resumed; empty if it can."""
        digests = state.digests
        names = [task.name for task in self._output.tasks[: len(digests)]]
        if not digests or [digest.name for digest in digests] != names:
            return "it was stopped before any of its tensors was durable"
        if logged.content is None or work_log.content_identity(directory) != logged.content:
            return "its output no longer exists"
        for name, nbytes in self._durable_files(len(digests)).items():
            path = directory / CONTENT_NAME / name
            if not path.is_file() or path.stat().st_size < nbytes:
                return f"{name} is shorter than it was"
        for name, digest in state.sent.items():
            if is_sent is None or not is_sent(name, digest):
                return f"{name} is not where it was uploaded any more"
        return ""

    def remove_undurable(self) -> None:
        """Remove everything but the durable bytes of the first tensors."""
        owned.keep_only(self.directory / CONTENT_NAME, self._durable_files(self.n_durable))

    def _durable_files(self, n_tensors: int) -> dict[str, int]:
        """Return the files that hold the first `n_tensors`, with the bytes of header and those tensors in each."""
        sizes: dict[str, int] = {}
        for shard in self._output.shards:
            if n_tensors <= 0:
                break
            durable_tensors = shard.tensors[:n_tensors]
            n_tensors -= len(durable_tensors)
            sizes[shard.name] = len(shard.header) + sum(spec.nbytes for spec in durable_tensors)
        return sizes

    def _check_budget(self, directory: Path, earlier_bytes: int, n_durable: int) -> None:
        """Refuse, if the merge is strict, what all runs together would read beyond the budget."""
        limit_bytes = None if self._plan is None else self._plan.limit_bytes
        needed_bytes = self._bytes_after(n_durable)
        if not self._is_strict or limit_bytes is None or earlier_bytes + needed_bytes <= limit_bytes:
            return
        left_bytes, read = max(0, limit_bytes - earlier_bytes), format_bytes(earlier_bytes)
        message = f"earlier runs may have read {read} of {format_bytes(limit_bytes)} for this output, which leaves"
        message += f" {format_bytes(left_bytes)}; {format_bytes(needed_bytes)} are needed"
        hint = "leave out --strict to let it exceed the budget"
        raise LimitError.of("resume.budget", directory, message, hint)

    @property
    def remaining_bytes(self) -> int:
        """The expert bytes that are still to be read, once."""
        return self._bytes_after(self.n_durable)

    def _bytes_after(self, n_durable: int) -> int:
        """Return the expert bytes that are still to be read, once, when the first tensors are durable."""
        if self._plan is None:
            return sum(source.nbytes for task in self._output.tasks[n_durable:] for source in task.experts)
        return self._share_bytes - planned_cost(self._plan, self._output.tasks[:n_durable])

    def _charge(self, usage: Sequence[FileUse], expert_bytes: int) -> None:
        """Charge the bytes of earlier runs: by file where recorded, the other expert bytes as one sum."""
        self.earlier_expert_bytes = self._announced_bytes = expert_bytes
        self._most_expert_bytes = expert_bytes + self.remaining_bytes
        if self._ledger.expert_limit_bytes is not None:
            self._ledger.expert_limit_bytes += expert_bytes
        for file, purpose, nbytes in usage:
            self._ledger.charge(file, purpose, nbytes)
        rest = expert_bytes - usage_of(usage).expert_bytes
        if rest:
            self._ledger.charge(_EARLIER, Purpose.EXPERT, rest)

    @property
    def durable_share(self) -> float:
        """The share of the output's tensors that is durable and recorded as such, by bytes."""
        return self._durable_bytes / self._output_bytes if self._output_bytes else 0.0

    @property
    def _durable_bytes(self) -> int:
        return sum(task.output_bytes for task in self._output.tasks[: self.n_durable])

    @property
    def _output_bytes(self) -> int:
        return sum(task.output_bytes for task in self._output.tasks)

    # --- during the run ---

    def is_due(self, pending_bytes: int) -> bool:
        """Whether to record now: after `UNIT_BYTES` or `UNIT_SECONDS`."""
        now = time.monotonic()
        if pending_bytes < work_log.UNIT_BYTES and now < self._recorded_at + work_log.UNIT_SECONDS:
            return False
        self._recorded_at = now
        return True

    def note(self, digests: Sequence[TensorDigest]) -> None:
        """Record that the next tensors are durable, and what was used until now. Called by the writer."""
        sync_directory(self.directory / CONTENT_NAME)
        self._append({"kind": "unit", "tensors": encode(tuple(digests)), "usage": uses_of(self.usage)}, is_durable=True)
        self.n_durable += len(digests)

    def _append(self, record: Record, *, is_durable: bool) -> None:
        with self._lock:
            if self._log is None:
                self._log = WorkLog(self.directory, self._key)
        self._log.append(record, is_durable=is_durable)

    @property
    def directory(self) -> Path:
        """The staging directory that it works in."""
        if self._directory is None:
            raise ValueError("not in a staging directory")
        return self._directory

    def note_sent(self, shard: str, digest: str) -> None:
        """Record that a finished shard lies elsewhere, where it is found by `digest`."""
        self.sent[shard] = digest
        self._append({"kind": "sent", "shard": shard, "digest": digest}, is_durable=True)

    def give_up(self) -> None:
        """Record that no run resumes what was made, since others may change it from here on."""
        self.n_durable = 0
        self._append(work_log.begin_record(self._key), is_durable=True)

    def note_attempt(self, attempt: int) -> None:
        """Record as which attempt at a part this run goes on."""
        self.attempt = attempt
        self._append({"kind": "claim", "attempt": attempt}, is_durable=False)

    def _announce(self, expert_bytes: int) -> None:
        """Record expert bytes before they are read. Called by the ledger, with its lock held."""
        expert_bytes -= self._before.expert_bytes
        if expert_bytes > self._announced_bytes:
            ahead_bytes = min(expert_bytes + READ_AHEAD_BYTES, self._most_expert_bytes)
            self._announced_bytes = max(expert_bytes, ahead_bytes)
            self._append({"kind": "read", "expert_bytes": self._announced_bytes}, is_durable=False)

    @property
    def usage(self) -> Usage:
        """Bytes used for the output, by earlier runs and this one."""
        return self._ledger.usage() - self._before

    @contextlib.contextmanager
    def recorded(self, staging: Staging) -> Iterator[None]:
        """Log the run in `staging`; if it is interrupted, keep what can be resumed.

        If a run under a plan ends without a result, the record of its reads stays.
        """
        self._directory = staging.directory
        self._ledger.before_expert_read = self._announce
        try:
            yield
        except BaseException as error:
            if staging.path.is_dir():  # else it was published
                self._keep(staging, error)
            raise
        finally:
            self._ledger.before_expert_read = None
            if self._log is not None:
                self._log.close()

    def _keep(self, staging: Staging, error: BaseException) -> None:
        """After a failure keep the work if it can be resumed, else the record of what was read, if there is one.

        That of a part is kept by its claim.
        """
        is_continuable = bool(self.n_durable) and isinstance(error, WORTH_KEEPING)
        is_part = self.attempt is not None
        if not is_continuable and (self._plan is None or not self._announced_bytes or is_part):
            if isinstance(error, KeyboardInterrupt) and not is_part:
                error.add_note(NOTHING_KEPT)
            return
        with contextlib.suppress(StorageError, OSError):  # then the run counts as killed, which is equivalent
            self._append({"kind": "stop", "usage": uses_of(self.usage)}, is_durable=True)
        with contextlib.suppress(StorageError, OSError):
            if is_continuable:
                self.remove_undurable()
            else:
                owned.remove_tree(staging.path)
        staging.keep()
        note = kept_note(staging.out, self.durable_share) if is_continuable else READS_KEPT
        if not is_part and note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    # --- after it ---

    def facts(self) -> dict[str, int]:
        """Return for the manifest what is told of earlier runs; their bytes are part of what was realized."""
        facts = {"earlier_runs": self.n_runs - 1, "earlier_runs_expert_bytes": self.earlier_expert_bytes}
        return {name: number for name, number in facts.items() if number}

    def excess_notices(self) -> tuple[str, ...]:
        """Tell by how much all runs together went beyond the budget, if they did."""
        limit_bytes = None if self._plan is None else self._plan.limit_bytes
        used_bytes = self._ledger.usage().expert_bytes
        if not limit_bytes or used_bytes <= limit_bytes:
            return ()
        runs = f"over {plural(self.n_runs, 'run')}"
        return (f"{used_bytes / limit_bytes:.2f} x the budget was read {runs}: what a crash lost was read again",)
