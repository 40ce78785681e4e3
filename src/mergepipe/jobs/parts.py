"""Make an output in parts: one part of a plan, the finishing of the output, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergepipe.core.outcome import published_but
from mergepipe.core.units import positive
from mergepipe.engine.work import Observer, Part, split, split_sizes
from mergepipe.errors import ConflictError, MergePipeError, NotFoundError, OutputError, RecipeError
from mergepipe.jobs.merge import MergeRun
from mergepipe.options import ExecutorName, OutputOptions, RunOptions
from mergepipe.planning.plan import Plan
from mergepipe.reports import MergeReport, PartReport, PartsStatus, Progress, ProgressCallback, ShardStatus
from mergepipe.runs.inputs import Inputs
from mergepipe.runs.parts import MadeParts, PartsWorker, PlannedOutput, open_output
from mergepipe.runs.progress import Resume
from mergepipe.runs.snapshots import is_snapshot_of
from mergepipe.runs.stored_plan import read_plan
from mergepipe.runs.work import CatalogLink, MergeSettings, run_settings
from mergepipe.snapshots.manifest import FILE_SUFFIXES
from mergepipe.snapshots.object_upload import check_apart
from mergepipe.snapshots.parts import Account, Claimant, PartsPlace
from mergepipe.snapshots.parts_places import job_at, parts_place
from mergepipe.snapshots.staging import check_free_space, check_target
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.owner import is_alive
from mergepipe.storage.stores import Stores

_PUBLISHED_ELSEWHERE = ("output.exists", "output.changed")
_FINISHED_ELSEWHERE = ("parts.gone", "output.busy", "parts.missing")


@dataclass(frozen=True, slots=True)
class PartChoice:
    """Part `number` of `n_parts`, from 1; or none, to finish only. With `finishes` the output must be finished.

    Unless it `publishes`, that is left to others even where the part is the last one.
    """

    number: int | None
    n_parts: int
    finishes: bool = False
    publishes: bool = True

    def __str__(self) -> str:
        return "" if self.number is None else f"{self.number}/{self.n_parts}"


def parse_part(text: str) -> tuple[int, int]:
    """Read `2/7` as a part."""
    number, slash, count = text.partition("/")
    if slash and all(word.isascii() and word.isdigit() and len(word) < 7 for word in (number, count)):
        return check_part(int(number), int(count))
    raise _not_a_part(text)


def check_part(number: int, n_parts: int) -> tuple[int, int]:
    """Return the numbers of a part if there can be one."""
    if 1 <= number <= n_parts:
        return number, n_parts
    raise _not_a_part(f"{number}/{n_parts}")


def experts_of_part(experts: Sequence[str], text: str | None) -> Sequence[str]:
    """Return the experts that a part of a job on many machines takes; all without a part."""
    if text is None:
        return experts
    number, n_parts = parse_part(text)
    if number <= len(experts):
        return experts[number - 1 :: n_parts]
    message = f"part {text} of {len(experts)} experts has none"
    raise RecipeError.of(
        "option.invalid", "--part", message, f"use at most {len(experts)} parts: an expert is one whole"
    )


def _not_a_part(text: str) -> MergePipeError:
    return RecipeError.of("option.invalid", "--part", f"'{text[:40]}' was given", "write the second of 7 parts as 2/7")


def run_part(
    plan: Plan | str | Path,
    out: str | Path,
    part: tuple[int, int] | None = None,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> PartReport:
    """Make one part of a plan's output, on any machine that reaches the inputs and `out`.

    Parts can be made in any order, at once, and again: what is done is left as it is, what an interrupted worker lost
    is read again. Whoever completes the last one publishes the output; the same bytes as `run`.

    Args:
        part: (2, 7) is the second of seven parts: output files, dealt out by bytes. None only finishes.
        options: as of `run`, without `resume`. `shard_bytes` must be the same for all parts. What the output says of
            its inputs follows the call that publishes it.

    Raises:
        MergePipeError: among others `parts.busy`, another process is making the part under the same budget.
    """
    made = OutputOptions.of(options, fields)
    if made.executor != ExecutorName.THREADS:
        hint = "give one of the two: a cluster makes all parts"
        raise RecipeError.of("option.conflict", "--executor", "a part is made by this process", hint)
    if made.resume is not None:
        message = "a part that is run again takes what is done, and reads again what was lost"
        raise RecipeError.of("option.conflict", "--resume" if made.resume else "--no-resume", message, "leave it out")
    number, n_parts = (None, 1) if part is None else check_part(*part)
    decided = read_plan(plan)
    settings = run_settings(made, decided.seed, out, on_progress)
    return make_part_of(decided, PartChoice(number, n_parts, finishes=part is None), settings)


def make_part_of(plan: Plan, choice: PartChoice, settings: MergeSettings) -> PartReport:
    """Make the shards of one part that are not done; whoever completes the last one finishes the output."""
    run = _PartRun(plan, choice, settings)
    return run.report((), (), is_published=True) if run.is_published() else run.make_and_finish()


class _PartRun:
    """One run of one part."""

    def __init__(self, plan: Plan, choice: PartChoice, settings: MergeSettings) -> None:
        self._plan = plan
        self._out = settings.place
        self._choice = choice
        self._settings = settings
        self._store: Store = Stores()
        self._total_bytes = 1
        self._parts: PartsPlace | None = None
        self._worker: PartsWorker | None = None
        self._merge: MergeReport | None = None

    def is_published(self) -> bool:
        """Whether the output of this plan is there."""
        return is_snapshot_of(self._out, self._plan.digest)

    def make_and_finish(self) -> PartReport:
        """Make the part, then finish the output if nothing is missing."""
        planned = open_output(self._plan, self._settings.shard_bytes, self._store)
        self._settings.base_model_ids.check_names(planned.inputs.leaf_models)
        check_output(self._out, planned.inputs, force=self._settings.force)
        self._parts = parts = parts_place(self._out, planned.job(self._out), self._settings.out)
        made, done_shards = tuple[int, ...](), tuple[int, ...]()
        try:
            part = self._part(planned)
            if self._choice.number is None and not parts.exists:
                raise _nothing_made(parts)
            parts.open()
            if self.is_published():  # between looking and making the place
                parts.remove()
                return self.report((), (), is_published=True)
            done_shards = tuple(shard for shard in part.shards if parts.done(shard) is not None)
            made = self._make(planned, parts, Part(tuple(shard for shard in part.shards if shard not in done_shards)))
            if self._choice.publishes:
                self._finish_if_complete(planned, parts)
            is_published = self._merge is not None or self.is_published()
            report = self.report(made, done_shards, is_published=is_published)
        except (ConflictError, OutputError) as error:  # others may finish it at any moment, also before the report
            if error.code not in ("parts.gone", *_PUBLISHED_ELSEWHERE) or not self.is_published():
                raise
            report = self.report(made, done_shards, is_published=True)
        if report.is_published and report.merge is None:
            parts.remove()  # what this run wrote after who finished it had removed it
        return report

    def _part(self, planned: PlannedOutput) -> Part:
        if self._choice.number is None:
            return Part(())
        return split(planned.output, self._choice.n_parts)[self._choice.number - 1]

    def _make(self, planned: PlannedOutput, parts: PartsPlace, part: Part) -> tuple[int, ...]:
        """Make shards; those that another process is making are left to the end, as an error."""
        sizes = [parts.job.shards[shard][1] for shard in part.shards]
        own_bytes = sum(sizes)
        check_free_space(self._settings.out, own_bytes if isinstance(self._out, Path) else max(sizes, default=0))
        all_bytes = sum(nbytes for _, nbytes in parts.job.shards)
        resolution = planned.inputs.resolution
        whole_bytes = resolution.base_bytes + self._plan.planned_bytes
        self._total_bytes = own_bytes + (whole_bytes * own_bytes // all_bytes if all_bytes else 0)
        observer = Observer(lambda _: self._tick())
        self._worker = self._worker_of(planned, parts, self._store, observer)
        self._tick()
        made: list[int] = []
        refused: list[ConflictError] = []
        for shard in part.shards:
            try:
                self._worker.make(shard)
                made.append(shard)
            except ConflictError as error:
                if error.code != "parts.busy":
                    raise
                refused.append(error)
        if refused:
            raise ConflictError(*(problem for error in refused for problem in error.problems))
        return tuple(made)

    def _worker_of(self, planned: PlannedOutput, parts: PartsPlace, store: Store, observer: Observer) -> PartsWorker:
        plan = self._plan
        is_strict = self._settings.strictness.strict
        claimant = Claimant(parts, str(self._choice), plan.limit_bytes, plan.planned_bytes, is_strict)
        return PartsWorker(planned, claimant, store, self._settings.engine, observer)

    def _finish_if_complete(self, planned: PlannedOutput, parts: PartsPlace) -> None:
        """Publish the output if all shards are done; without `--finish` nothing else is an error."""
        try:
            self._finish(planned, parts)
        except (NotFoundError, ConflictError, OutputError) as error:
            is_there = error.code in _PUBLISHED_ELSEWHERE and self.is_published()
            if self._choice.finishes or not (is_there or error.code in _FINISHED_ELSEWHERE):
                raise

    def _finish(self, planned: PlannedOutput, parts: PartsPlace) -> None:
        store = Stores()  # counts what all workers read, this one among them
        made = MadeParts(parts, self._plan, planned.output, store.ledger)
        inputs = self._worker_of(planned, parts, store, Observer()).with_shared_facts(read_missing=False)
        settings = replace(self._settings, resume=Resume.NEVER)
        with published_but(self._out):
            link = CatalogLink(settings.home)
            self._merge = MergeRun(inputs, self._plan, settings, store, link).publish(made=made)
            parts.remove()

    def _tick(self) -> None:
        if self._settings.on_progress is not None:
            self._settings.on_progress(Progress("merge", self._store.ledger.total_bytes(), self._total_bytes, (), 0))

    def report(self, made: Iterable[int], reused: Iterable[int], *, is_published: bool) -> PartReport:
        """Report what this run did: the shards that it made, and those that were there."""
        parts, usage = self._parts, Usage() if self._worker is None else self._worker.usage
        names = [name for name, _ in parts.job.shards] if parts else []
        n_shards = len(names)
        done = n_shards if is_published or parts is None else len(parts.recorded_shards())
        return PartReport(
            out=self._out,
            part=str(self._choice),
            made_shards=tuple(names[shard] for shard in made),
            found_shards=tuple(names[shard] for shard in reused),
            done_shards=done,
            n_shards=n_shards,
            base_bytes=usage[Purpose.BASE],
            expert_bytes=usage.expert_bytes,
            output_bytes=usage[Purpose.OUTPUT],
            seconds=time.perf_counter() - self._settings.started,
            is_published=is_published,
            merge=self._merge,
        )


def check_output(out: Path | Location, inputs: Inputs, *, force: bool) -> None:
    """Refuse a place at which an output cannot be published."""
    paths = [checkpoint.path for checkpoint in inputs.checkpoints]
    if out.suffix in FILE_SUFFIXES:
        hint = f"write {out.parent / out.stem}"
        raise OutputError.of("output.place", out, "is the name of one file, which is not made in parts", hint)
    if isinstance(out, Path):
        check_target(out, paths, force=force)
        return
    if out.scheme == HUB_SCHEME:
        hint = "make it in a folder or a bucket, then `mergepipe push` it"
        raise OutputError.of("output.place", out, "takes no output that is made in parts", hint)
    check_apart(out, paths)


def parts_status(plan: Plan | str | Path, out: str | Path, *, n_parts: int | None = None) -> PartsStatus:
    """Return the progress of an output that `run_part` makes; with `n_parts` also the parts that are missing."""
    if n_parts is not None:
        positive("--parts", n_parts)
    decided, location = read_plan(plan), Location.of(out)
    place = location.local_path if location.is_local else location
    published = is_snapshot_of(place, decided.digest)
    job = job_at(place, decided.digest)
    if job is None and not published:
        message = "no part of it was made by this plan"
        raise NotFoundError.of("parts.none", place, message, "check PLAN and OUT, or make a part with `mergepipe run`")
    parts = None if job is None else parts_place(place, job, Path())
    account = Account() if parts is None else parts.account()
    shards = () if parts is None else tuple(_shard_status(parts, account, i) for i in range(len(parts.job.shards)))
    missing: tuple[int, ...] = ()
    if n_parts is not None and not published:
        dealt = split_sizes([shard.size_bytes for shard in shards], n_parts)
        missing = tuple(
            number for number, part in enumerate(dealt, 1) if any(shards[i].state != "done" for i in part.shards)
        )
    return PartsStatus(
        out=place, is_published=published, shards=shards, read_bytes=account.expert_bytes,
        planned_bytes=decided.planned_bytes, limit_bytes=decided.limit_bytes, n_parts=n_parts, missing_parts=missing,
    )  # fmt: skip


def _shard_status(parts: PartsPlace, account: Account, shard: int) -> ShardStatus:
    name, nbytes = parts.job.shards[shard]
    claims = account.of(shard)
    part = claims[-1].part if claims else ""
    if parts.done(shard) is not None:
        return ShardStatus(name, nbytes, "done", part)
    if not claims:
        return ShardStatus(name, nbytes, "open")
    claim = claims[-1]
    alive = claim.is_open and is_alive(claim.owner, parts.age_seconds(claim.name))
    return ShardStatus(name, nbytes, "reading" if alive else "interrupted", part, str(claim.owner))


def _nothing_made(parts: PartsPlace) -> MergePipeError:
    message = f"no part of it is made: there is no {parts.path.name}"
    return NotFoundError.of("parts.missing", parts.out, message, "make its parts first: --part 1/1 makes everything")
