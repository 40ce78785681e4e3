"""Goes on with an interrupted merge: recognises what it left, counts what it read, notes what is durable meanwhile."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path

import mergepipe
from mergepipe.blocks import BlockGrid, Span
from mergepipe.budget import Ledger, Purpose
from mergepipe.canonical import digest_of
from mergepipe.cost import block_cost_bytes
from mergepipe.engine.execute import OutputPlan
from mergepipe.engine.segments import at_level
from mergepipe.errors import LimitError, NotFoundError, StorageError
from mergepipe.journal import JOURNAL_NAME, FileUse, Journal, JournalState, expert_bytes_of, read_journal
from mergepipe.plan import Plan, PlannedTensor
from mergepipe.publish import CONTENT_NAME, Staging
from mergepipe.readers.base import Readable, TensorEntry, Unchanged
from mergepipe.recipe.tasks import MergeTask
from mergepipe.storage.output import sync_directory
from mergepipe.workflows.opening import Inputs
from mergepipe.writer import ShardLayout, TensorDigest

INTERVAL_BYTES = 1 << 30
"""About how much is written between two records: what a crash costs at most, beside the tensor that was open."""
RESERVED_BYTES = 64 << 20
"""How much is reserved at a time under a budget: what a crash wastes of it at most."""
_WORTH_KEEPING = (KeyboardInterrupt, SystemExit, MemoryError, StorageError)
KEPT = "what was written is kept: the same command goes on with it, `mergepipe gc` removes it"
_UNCOUNTED = "(an interrupted run)"


class Resume(StrEnum):
    """Whether to go on with what an interrupted run left."""

    AUTO = "auto"  # where it is the same merge, else begin anew
    REQUIRED = "required"
    NEVER = "never"


def run_key(inputs: Inputs, plan: Plan | None, output: OutputPlan, seed: int) -> str:
    """What has to be the same for one run to go on with what another wrote."""
    return digest_of({
        "version": mergepipe.__version__,
        "recipe": inputs.recipe_text,
        "seed": seed,
        "plan": None if plan is None else plan.digest,
        "inputs": [
            [str(checkpoint.root), [[f.name, f.size_bytes, f.mtime_ns, f.header_digest] for f in checkpoint.files]]
            for _, _, checkpoint in inputs.leaves()
        ],
        "alignment": None if inputs.alignment is None else inputs.alignment.digest,
        "tasks": [[task.name, task.action.value, task.dtype.name, list(task.shape)] for task in output.tasks],
        "shards": [[shard.name, shard.file_bytes, len(shard.tensors)] for shard in output.shards],
    })  # fmt: skip


class MergeProgress:
    """The durable progress of one merge: a `DurableProgress` that writes the journal. Used from many threads.

    The journal begins with the first record of durable tensors: before that there is nothing to go on with. From then
    on expert bytes are reserved in it before they are read, so that whatever happens no read is forgotten.
    """

    def __init__(self, key: str, output: OutputPlan, plan: Plan | None, ledger: Ledger, resume: Resume) -> None:
        self._key = key
        self._output = output
        self._plan = plan
        self._ledger = ledger
        self._resume = resume
        self._lock = threading.Lock()
        self._journal: Journal | None = None
        self._directory: Path | None = None
        self._expert_bytes = 0
        self._reserved_bytes = 0
        self._done: tuple[TensorDigest, ...] = ()
        self._noted = 0
        self.notices: list[str] = []

    # --- what was there ---

    @property
    def done(self) -> tuple[TensorDigest, ...]:
        """The tensors that an earlier run made durable, in output order."""
        return self._done

    @property
    def interval_bytes(self) -> int:
        """About how many bytes are written between two records."""
        return INTERVAL_BYTES

    def can_continue(self, directory: Path) -> bool:
        """Whether to go on with what is in a staging directory; if so, it is made ready for that.

        Raises:
            NotFoundError: `resume.nothing`, resuming was asked for and there is nothing to go on with.
            LimitError: `resume.budget`, it was asked for, and the budget does not cover what is left to be read.
        """
        if self._resume is Resume.NEVER:
            return False
        state = read_journal(directory / JOURNAL_NAME)
        refusal = "there is no interrupted run" if state is None else self._refusal(directory, state)
        if refusal or state is None:
            if self._resume is Resume.REQUIRED:
                hint = "run without --resume to begin anew"
                raise NotFoundError.of("resume.nothing", directory, f"nothing to go on with: {refusal}", hint)
            return False
        if not self._is_affordable(directory, state):
            return False
        _tidy(directory / CONTENT_NAME, self._output.shards, len(state.digests))
        self._take_over(directory, state)
        return True

    def _refusal(self, directory: Path, state: JournalState) -> str:
        """Why what is there is of no use; empty if it is."""
        if state.key != self._key:
            return "the interrupted run was another merge, or its inputs have changed"
        if _identity(directory / CONTENT_NAME) != state.content:
            return "what it had written is gone"
        names = [task.name for task in self._output.tasks]
        if not state.digests or [digest.name for digest in state.digests] != names[: len(state.digests)]:
            return "nothing that it had written is durable"
        for shard, nbytes in _durable_files(self._output.shards, len(state.digests)):
            path = directory / CONTENT_NAME / shard.name
            if not path.is_file() or path.stat().st_size < nbytes:
                return f"{shard.name} is shorter than it was"
        return ""

    def _is_affordable(self, directory: Path, state: JournalState) -> bool:
        """Whether the budget covers what may have been read and what is left."""
        if self._plan is None:
            return True
        used = expert_bytes_of(state.usage) + state.uncounted_expert_bytes
        left = self._plan.planned_bytes - _planned_cost(self._plan, self._output.tasks[: len(state.digests)])
        budget = self._plan.budget_bytes
        if used + left <= budget:
            return True
        message = (
            f"{used} of {budget} bytes may have been read before the interruption, {left} are left to be read: "
            f"{used + left - budget} too many"
        )
        if self._resume is Resume.REQUIRED:
            hint = "begin anew with --no-resume, or with a larger budget"
            raise LimitError.of("resume.budget", directory, message, hint)
        self.notices.append(f"began anew, for the budget does not cover going on: {message}")
        return False

    def _take_over(self, directory: Path, state: JournalState) -> None:
        self._directory = directory
        self._done = state.digests
        self._noted = len(state.digests)
        self._journal = Journal(directory / JOURNAL_NAME, state)
        self._ledger.expert_limit_bytes = None if self._plan is None else self._plan.budget_bytes
        for file, purpose, nbytes in state.usage:
            self._ledger.charge(file, purpose, nbytes)
        if state.uncounted_expert_bytes:
            self._ledger.charge(_UNCOUNTED, Purpose.EXPERT, state.uncounted_expert_bytes)
        self._expert_bytes = self._reserved_bytes = expert_bytes_of(self._usage())
        written = sum(task.output_bytes for task in self._output.tasks[: self._noted])
        self.notices.append(
            f"went on with an interrupted run: {written} of {sum(t.output_bytes for t in self._output.tasks)} bytes "
            f"in {self._noted} of {len(self._output.tasks)} tensors were durable"
        )

    # --- on the way ---

    @contextlib.contextmanager
    def recorded(self, staging: Staging) -> Iterator[None]:
        """Write the journal of what happens in `staging`; if it is interrupted, let it be kept to be continued."""
        self._directory = staging.directory
        self._ledger.before_expert_read = self._cover
        try:
            yield
        except BaseException as error:
            if self._noted and isinstance(error, _WORTH_KEEPING) and staging.path.is_dir():
                with contextlib.suppress(StorageError, OSError):  # then it counts as killed, which is as good
                    self._stop(staging.path)
                staging.keep()
                if KEPT not in getattr(error, "__notes__", ()):
                    error.add_note(KEPT)
            raise
        finally:
            self._ledger.before_expert_read = None
            if self._journal is not None:
                self._journal.close()

    def note(self, digests: Sequence[TensorDigest]) -> None:
        """Record that the next tensors are durable; called by the writer."""
        if self._directory is None:
            raise ValueError("not in a staging directory")
        sync_directory(self._directory / CONTENT_NAME)
        usage = self._usage()
        with self._lock:
            if self._journal is None:
                self._journal = _begin(self._directory, self._key)
                self._reserve(self._journal, self._expert_bytes)
            self._journal.note_durable(digests, usage)
            self._noted += len(digests)

    def _cover(self, expert_bytes: int) -> None:
        """Reserve expert bytes before they are read; called by the ledger, which is locked."""
        with self._lock:
            self._expert_bytes = expert_bytes
            if self._journal is not None and expert_bytes > self._reserved_bytes:
                self._reserve(self._journal, expert_bytes)

    def _reserve(self, journal: Journal, expert_bytes: int) -> None:
        if self._plan is None:  # nothing to be spared: for the account only
            self._reserved_bytes = expert_bytes + INTERVAL_BYTES
        else:
            self._reserved_bytes = min(expert_bytes + RESERVED_BYTES, max(expert_bytes, self._plan.budget_bytes))
        journal.reserve(self._reserved_bytes)

    def _stop(self, content: Path) -> None:
        """Record what was read exactly, and give back the space of what is not durable."""
        with self._lock:
            if self._journal is not None:
                self._journal.stop(self._usage())
        _tidy(content, self._output.shards, self._noted)

    def _usage(self) -> tuple[FileUse, ...]:
        by_file = self._ledger.usage().by_file
        return tuple((file, purpose, nbytes) for (file, purpose), nbytes in sorted(by_file.items()))


def _begin(directory: Path, key: str) -> Journal:
    """Make the journal, durable with all that leads to it."""
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
    """The files that the first `n_tensors` stand in, and how many bytes of each these and its header are."""
    for shard in shards:
        own = shard.tensors[:n_tensors]
        if not own:
            return
        n_tensors -= len(own)
        yield shard, len(shard.header) + sum(spec.nbytes for spec in own)


def _tidy(content: Path, shards: Sequence[ShardLayout], n_tensors: int) -> None:
    """Remove everything but what is durable of the first `n_tensors`."""
    durable = {shard.name: nbytes for shard, nbytes in _durable_files(shards, n_tensors)}
    for path in content.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in durable:
            path.unlink()
        else:
            os.truncate(path, durable[path.name])


def _planned_cost(plan: Plan, tasks: Sequence[MergeTask]) -> int:
    """What the plan charges for reading the experts of some tasks, block by block."""
    planned = {tensor.name: tensor for tensor in plan.tensors}
    return sum(_tensor_cost(plan, planned[task.name], task) for task in tasks if task.name in planned)


def _tensor_cost(plan: Plan, planned: PlannedTensor, task: MergeTask) -> int:
    grid = BlockGrid(planned.n_elements, plan.block_elements)
    reused = {block for start, stop, _ in planned.reused for block in range(start, stop)}
    cost = 0
    for source, access in zip(task.experts, planned.access, strict=True):
        if isinstance(source, Unchanged):
            continue
        read = (block for start, stop in access.blocks for block in range(start, stop))
        levels = {block: level for start, stop, level in access.levels for block in range(start, stop)}
        spans = defaultdict[int, list[Span]](list)
        for block in (block for block in read if block not in reused):
            spans[levels.get(block, 0)].append(grid.span(block))
        cost += sum(_source_cost(at_level(source, level), own) for level, own in spans.items())
    return cost


def _source_cost(source: Readable, spans: Sequence[Span]) -> int:
    if isinstance(source, TensorEntry):
        return sum(block_cost_bytes(source, span) for span in spans)
    return sum(source.cost_bytes(span) for span in (spans[:1] if source.is_unit else spans))
