"""Resume an interrupted merge: check what it left, charge what it read, journal what becomes durable."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

import mergepipe
from mergepipe.core.canonical_json import digest_of
from mergepipe.engine.work import OutputPlan
from mergepipe.errors import CorruptError, LimitError, NotFoundError, StorageError
from mergepipe.planning.plan import Plan
from mergepipe.runs.budget.planned_cost import planned_cost
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.runs.recovery.read_account import ReadAccount, ReadTotals, read_totals
from mergepipe.snapshots.journal import JOURNAL_NAME, FileUse, Journal, JournalState, expert_bytes_of, read_journal
from mergepipe.snapshots.shards import ShardLayout, TensorDigest
from mergepipe.snapshots.staging import CONTENT_NAME, Staging, kept_note
from mergepipe.storage import owned
from mergepipe.storage.ledger import EXPERT_PURPOSES, Ledger, Purpose
from mergepipe.storage.output import sync_directory
from mergepipe.storage.owner import ACCOUNT_NAME

INTERVAL_BYTES = 1 << 30
"""About how much is written between two records, at most."""
INTERVAL_SECONDS = 1.0
"""How long after a record the next one is made: with the unfinished tensor, the work that a crash costs."""
FIRST_INTERVAL_FRACTION = 1 / 8
"""The share of an interval after which the first record is made; each further one waits twice as long, up to all."""
NOTED_BYTES = 16 << 20
"""Largest reservation without a budget, in an account that is not synchronised: what a kill may count too much."""
RESERVED_BYTES = 64 << 20
"""Largest reservation under a budget: the most that a crash wastes of it."""
RESERVED_FRACTION = 0.05
"""The same as a share of the budget, if that is less."""
_WORTH_KEEPING = (KeyboardInterrupt, SystemExit, MemoryError, StorageError)
ACCOUNT_KEPT = (
    "expert bytes that were read count against the budget when this output is made again; `--no-resume` or "
    "`mergepipe gc` forget them"
)
_EARLIER = "(earlier runs)"


class Resume(StrEnum):
    """Whether to resume an interrupted run, and whether its expert bytes count against the budget."""

    AUTO = "auto"  # resume the same merge, else start over
    REQUIRED = "required"  # resume, or refuse; what was read and is not in the output does not count
    NEVER = "never"  # start over with the whole budget


def run_key(inputs: Inputs, plan: Plan | None, output: OutputPlan, seed: int) -> str:
    """Digest everything that must be equal for one run to resume another."""
    return digest_of({
        "version": mergepipe.__version__,
        "recipe": inputs.recipe_text,
        "seed": seed,
        "plan": None if plan is None else plan.digest,
        "inputs": [
            [str(checkpoint.root), [[f.name, f.size_bytes, f.version, f.header_digest] for f in checkpoint.files]]
            for _, _, checkpoint in inputs.leaves()
        ],
        "alignment": None if inputs.alignment is None else inputs.alignment.digest,
        "tasks": [[task.name, task.action.value, task.dtype.name, list(task.shape)] for task in output.tasks],
        "shards": [[shard.name, shard.file_bytes, len(shard.tensors)] for shard in output.shards],
    })  # fmt: skip


class MergeProgress:
    """The durable progress of one merge: a `DurableProgress` that writes the journal. Used from many threads.

    The journal begins with the first record of durable tensors: before that there is nothing to resume. The account
    of expert bytes begins with the first read of one: they are reserved in it before they are read, so that whatever
    happens no read is forgotten, by this run or by those that follow it.
    """

    def __init__(
        self,
        key: str,
        output: OutputPlan,
        plan: Plan | None,
        ledger: Ledger,
        resume: Resume,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key
        self._output = output
        self._plan = plan
        self._ledger = ledger
        self._resume = resume
        self._clock = clock
        self._recorded_at = clock()
        self._interval_fraction = FIRST_INTERVAL_FRACTION
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._account: ReadAccount | None = None
        self._directory: Path | None = None
        self._totals = ReadTotals()
        self._reserved_bytes = 0
        self._most_expert_bytes = self._remaining_bytes(0)
        self._done: tuple[TensorDigest, ...] = ()
        self._noted = 0
        self._has_earlier_account = False
        self.earlier_expert_bytes = 0
        self.notices: list[str] = []

    # --- state of earlier runs ---

    @property
    def done(self) -> tuple[TensorDigest, ...]:
        """Tensors that an earlier run made durable, in output order."""
        return self._done

    def is_due(self, pending_bytes: int) -> bool:
        """Whether to record now: after `INTERVAL_SECONDS`, at first sooner, or `INTERVAL_BYTES`."""
        now = self._clock()
        if pending_bytes < INTERVAL_BYTES and now < self._recorded_at + self._interval_fraction * INTERVAL_SECONDS:
            return False
        self._recorded_at = now
        self._interval_fraction = min(1.0, 2 * self._interval_fraction)
        return True

    @property
    def durable_share(self) -> float:
        """The share of the output's tensors that is durable and recorded as such, by bytes."""
        return self._durable_bytes / self._output_bytes if self._output_bytes else 0.0

    @property
    def _durable_bytes(self) -> int:
        return sum(task.output_bytes for task in self._output.tasks[: self._noted])

    @property
    def _output_bytes(self) -> int:
        return sum(task.output_bytes for task in self._output.tasks)

    @property
    def forgiven_expert_bytes(self) -> int:
        """Expert bytes of earlier runs that do not count, because a run started over with the whole budget."""
        return self._totals.forgiven_bytes

    def can_continue(self, directory: Path) -> bool:
        """Decide whether to resume the run in a staging directory; if so, prepare its files.

        Reads of earlier runs are charged to the ledger, whether their work is resumed or not.
        """
        if self._resume is Resume.NEVER:
            self._forgive_earlier_reads(directory)
            return False
        totals = read_totals(directory)
        state = read_journal(directory / JOURNAL_NAME)
        refusal = "there is no interrupted run" if state is None else self._resume_refusal(directory, state)
        if refusal and self._resume is Resume.REQUIRED:
            hint = "run without --resume to start over"
            raise NotFoundError.of("resume.nothing", directory, f"nothing to resume: {refusal}", hint)
        usage = () if state is None else state.usage
        totals = replace(totals, expert_bytes=max(totals.expert_bytes, expert_bytes_of(usage)))
        n_durable = 0 if state is None or refusal else len(state.digests)
        excess_bytes = self._excess_bytes(totals.expert_bytes, n_durable)
        if excess_bytes and self._resume is not Resume.REQUIRED:
            self._refuse_excess(directory, totals.expert_bytes, excess_bytes, n_durable)
        if state is None or refusal:
            self._charge_earlier(directory, totals, ())
            if totals.expert_bytes:
                reason = refusal if state else "it was stopped before any of its tensors was durable"
                counted = f"earlier runs may have read {totals.expert_bytes} expert bytes, which count"
                self.notices.append(f"started over, since {reason}: {counted}")
            return False
        _remove_undurable(directory / CONTENT_NAME, self._output.shards, n_durable)
        self._resume_from(directory, state, totals, min(excess_bytes, totals.expert_bytes))
        return True

    def _forgive_earlier_reads(self, directory: Path) -> None:
        """Forgive the bytes that earlier runs read, and record so until this output is published."""
        try:
            totals = read_totals(directory)
        except CorruptError:
            owned.remove_file(directory / ACCOUNT_NAME)
            totals = ReadTotals()
        if totals == ReadTotals():
            return
        self._charge_earlier(directory, totals.forgiven(), ())
        self._open_account().record(self._totals)

    def _resume_refusal(self, directory: Path, state: JournalState) -> str:
        """Return the reason why an interrupted run cannot be resumed; empty if it can."""
        if state.key != self._key:
            return "the interrupted run was another merge, or its inputs have changed"
        if _identity(directory / CONTENT_NAME) != state.content:
            return "its output is gone"
        names = [task.name for task in self._output.tasks]
        if not state.digests or [digest.name for digest in state.digests] != names[: len(state.digests)]:
            return "none of its output is durable"
        for shard, nbytes in _durable_files(self._output.shards, len(state.digests)):
            path = directory / CONTENT_NAME / shard.name
            if not path.is_file() or path.stat().st_size < nbytes:
                return f"{shard.name} is shorter than it was"
        return ""

    def _excess_bytes(self, used_bytes: int, n_durable: int) -> int:
        """Return by how much the bytes already read and those still to be read exceed the budget."""
        if self._plan is None or self._plan.limit_bytes is None or not used_bytes:
            return 0
        return max(0, used_bytes + self._remaining_bytes(n_durable) - self._plan.limit_bytes)

    def _remaining_bytes(self, n_durable: int) -> int:
        """Return the expert bytes that are still to be read, once, when the first tensors are durable."""
        if self._plan is None:
            return sum(source.nbytes for task in self._output.tasks[n_durable:] for source in task.experts)
        durable_bytes = planned_cost(self._plan, self._output.tasks[:n_durable])
        return self._plan.planned_bytes - durable_bytes

    def _refuse_excess(self, directory: Path, used_bytes: int, excess_bytes: int, n_durable: int) -> None:
        budget = 0 if self._plan is None else self._plan.limit_bytes or 0
        needed_bytes = excess_bytes + budget - used_bytes
        message = (
            f"earlier runs may have read {used_bytes} of {budget} bytes for this output, which leaves "
            f"{max(0, budget - used_bytes)}; {needed_bytes} are needed"
        )
        hint = "--no-resume starts over with the whole budget"
        if n_durable:
            hint = f"--resume finishes it, without counting {excess_bytes} bytes that are read again; {hint}"
        raise LimitError.of("resume.budget", directory, message, hint)

    def _charge_earlier(self, directory: Path, totals: ReadTotals, usage: Sequence[FileUse]) -> None:
        """Charge the bytes of earlier runs: by file where recorded, the other expert bytes as one sum."""
        self._directory = directory
        self._totals = totals
        self._has_earlier_account = totals != ReadTotals()
        self.earlier_expert_bytes = self._reserved_bytes = totals.expert_bytes
        self._most_expert_bytes = totals.expert_bytes + self._remaining_bytes(self._noted)
        if self._plan is not None:
            planned = totals.expert_bytes + self._plan.planned_bytes
            earlier_limit = self._ledger.expert_limit_bytes or 0
            is_within = bool(usage) and self._plan.limit_bytes is not None
            limit = self._plan.budget_bytes if is_within else max(planned, earlier_limit)
            self._ledger.expert_limit_bytes = limit
        for file, purpose, nbytes in usage:
            self._ledger.charge(file, purpose, nbytes)
        rest = totals.expert_bytes - expert_bytes_of(usage)
        if rest:
            self._ledger.charge(_EARLIER, Purpose.EXPERT, rest)
        if totals.forgiven_bytes:
            self.notices.append(
                f"{totals.forgiven_bytes} expert bytes that earlier runs may have read are not counted against the "
                "budget, as --no-resume or --resume asked"
            )

    def _resume_from(self, directory: Path, state: JournalState, totals: ReadTotals, excess_bytes: int) -> None:
        self._done = state.digests
        self._noted = len(state.digests)
        self._journal = Journal(directory / JOURNAL_NAME, state)
        totals = ReadTotals(totals.expert_bytes - excess_bytes, totals.forgiven_bytes + excess_bytes)
        usage = _reduced(state.usage, expert_bytes_of(state.usage) - totals.expert_bytes)
        self._charge_earlier(directory, totals, usage)
        if excess_bytes:
            self._open_account().record(self._totals)
        self.notices.append(
            f"resumed an interrupted run at {self.durable_share:.0%}: {self._durable_bytes} of {self._output_bytes} "
            f"bytes in {self._noted} of {len(self._output.tasks)} tensors were durable"
        )

    # --- during the run ---

    @contextlib.contextmanager
    def recorded(self, staging: Staging) -> Iterator[None]:
        """Journal the run in `staging`; if it is interrupted, keep what can be resumed.

        If a run under a budget ends without a result, the account of its reads stays.
        """
        self._directory = staging.directory
        self._ledger.before_expert_read = self._reserve_expert_bytes
        try:
            yield
        except BaseException as error:
            if staging.path.is_dir():  # else it was published
                self._keep(staging, error)
            raise
        finally:
            self._ledger.before_expert_read = None
            if self._journal is not None:
                self._journal.close()
            if self._account is not None:
                self._account.close()

    def _keep(self, staging: Staging, error: BaseException) -> None:
        """After a failure keep the work if it can be resumed, else the account alone, if there is one."""
        is_continuable = bool(self._noted) and isinstance(error, _WORTH_KEEPING)
        has_account = self._has_earlier_account or (self._plan is not None and self._account is not None)
        if not (is_continuable or has_account):
            return
        with contextlib.suppress(StorageError, OSError):  # then the run counts as killed, which is equivalent
            if self._account is not None:
                self._account.record(self._totals)
        with contextlib.suppress(StorageError, OSError):
            if is_continuable:
                self._record_interruption(staging.path)
            else:
                _remove_work(staging.directory)
        staging.keep()
        note = kept_note(staging.out, self.durable_share) if is_continuable else ACCOUNT_KEPT
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)

    def note(self, digests: Sequence[TensorDigest]) -> None:
        """Record that the next tensors are durable. Called by the writer."""
        if self._directory is None:
            raise ValueError("not in a staging directory")
        sync_directory(self._directory / CONTENT_NAME)
        usage = self._usage()
        with self._lock:
            if self._journal is None:
                self._journal = _create_journal(self._directory, self._key)
            self._journal.note_durable(digests, usage)
            self._noted += len(digests)

    def _reserve_expert_bytes(self, expert_bytes: int) -> None:
        """Reserve expert bytes before they are read. Called by the ledger, with its lock held."""
        with self._lock:
            if expert_bytes > self._reserved_bytes:
                reserved = self._reservation(expert_bytes)
                self._open_account().record(replace(self._totals, expert_bytes=reserved))
                self._reserved_bytes = reserved
            self._totals = replace(self._totals, expert_bytes=expert_bytes)

    def _reservation(self, expert_bytes: int) -> int:
        """Return how far to reserve: a step ahead, but no more than this run still has to read."""
        budget = self._limit_bytes
        step = NOTED_BYTES if budget is None else min(RESERVED_BYTES, int(RESERVED_FRACTION * budget))
        return max(expert_bytes, min(expert_bytes + step, self._most_expert_bytes))

    @property
    def _limit_bytes(self) -> int | None:
        """What earlier runs and this one may read of experts; None where the account only records."""
        return None if self._plan is None else self._plan.limit_bytes

    def _open_account(self) -> ReadAccount:
        if self._directory is None:
            raise ValueError("not in a staging directory")
        if self._account is None:
            self._account = ReadAccount(self._directory, is_durable=self._limit_bytes is not None)
        return self._account

    def _record_interruption(self, content: Path) -> None:
        """Record the exact bytes used, and remove files that are not durable."""
        with self._lock:
            if self._journal is not None:
                self._journal.stop(self._usage())
        _remove_undurable(content, self._output.shards, self._noted)

    def _usage(self) -> tuple[FileUse, ...]:
        by_file = self._ledger.usage().by_file
        return tuple((file, purpose, nbytes) for (file, purpose), nbytes in sorted(by_file.items()))


def _reduced(usage: Sequence[FileUse], excess_bytes: int) -> tuple[FileUse, ...]:
    """Take `excess_bytes` off what was read of experts, file after file."""
    remaining = []
    for file, purpose, nbytes in usage:
        deducted_bytes = min(nbytes, max(0, excess_bytes)) if purpose in EXPERT_PURPOSES else 0
        excess_bytes -= deducted_bytes
        remaining.append((file, purpose, nbytes - deducted_bytes))
    return tuple(remaining)


def _remove_work(directory: Path) -> None:
    """Remove everything that cannot be resumed from a staging directory except the account."""
    with contextlib.suppress(FileNotFoundError):
        owned.remove_file(directory / JOURNAL_NAME)
    owned.remove_tree(directory / CONTENT_NAME)


def _create_journal(directory: Path, key: str) -> Journal:
    """Create the journal and make it and its directory entries durable."""
    identity = _identity(directory / CONTENT_NAME)
    if identity is None:
        raise StorageError.of("storage.io", directory / CONTENT_NAME, "is gone", "run again")
    journal = Journal(directory / JOURNAL_NAME)
    journal.begin(key, identity)
    sync_directory(directory)
    sync_directory(directory.parent)
    return journal


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _durable_files(shards: Sequence[ShardLayout], n_tensors: int) -> Iterator[tuple[ShardLayout, int]]:
    """Yield the files that hold the first `n_tensors`, with the bytes of header and those tensors in each."""
    for shard in shards:
        durable_tensors = shard.tensors[:n_tensors]
        if not durable_tensors:
            return
        n_tensors -= len(durable_tensors)
        yield shard, len(shard.header) + sum(spec.nbytes for spec in durable_tensors)


def _remove_undurable(content: Path, shards: Sequence[ShardLayout], n_tensors: int) -> None:
    """Remove everything but the durable bytes of the first `n_tensors`."""
    durable = {shard.name: nbytes for shard, nbytes in _durable_files(shards, n_tensors)}
    owned.keep_only(content, durable)
