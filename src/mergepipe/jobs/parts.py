"""Make an output in parts: one part of a plan, the finishing of the output, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergepipe.core.flags import public_call, several
from mergepipe.core.outcome import published_but, warn_of
from mergepipe.core.units import positive, whole
from mergepipe.engine.observer import Observer
from mergepipe.engine.output_parts import split, split_sizes
from mergepipe.errors import ConflictError, MergePipeError, NotFoundError, OutputError, RecipeError
from mergepipe.jobs.merge_run import MergeRun
from mergepipe.jobs.snapshots import is_snapshot_of
from mergepipe.options import ExecutorName, MergeOptions, OutputOptions, RunOptions
from mergepipe.planning.plan import Plan
from mergepipe.reports import MergeReport, PartReport, PartsStatus, Progress, ProgressCallback, ShardStatus
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs
from mergepipe.runs.merge_settings import MergeSettings, merge_settings
from mergepipe.runs.parts import MadeParts, PartsWorker, PlannedOutput, open_output
from mergepipe.runs.stored_plan import read_plan
from mergepipe.snapshots.manifest import FILE_SUFFIXES
from mergepipe.snapshots.object_upload import check_apart
from mergepipe.snapshots.parts import Account, Claimant, PartsPlace
from mergepipe.snapshots.parts_places import job_at, parts_place, remove_left_parts
from mergepipe.snapshots.staging import check_free_space, check_target, remove_left_staging
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.owners import is_alive
from mergepipe.storage.stores import Stores

_PUBLISHED_ELSEWHERE = ("output.exists", "output.changed")
_FINISHED_ELSEWHERE = ("parts.gone", "output.busy", "parts.missing")


def parse_part(part: Any) -> tuple[int, int]:
    """Read a part as callers write it: `2/7` as on the command line, or the two numbers."""
    if not isinstance(part, str):
        numbers = [whole("--part", number) for number in several(part)]
        if len(numbers) != 2:
            raise _not_a_part(str(part))
        return check_part(*numbers)
    number, slash, count = part.partition("/")
    if slash and all(word.isascii() and word.isdigit() and len(word) < 7 for word in (number, count)):
        return check_part(int(number), int(count))
    raise _not_a_part(part)


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


@public_call(OutputOptions)
def run_part(
    plan: Plan | str | Path,
    out: str | Path,
    part: tuple[int, int] | str | None = None,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> PartReport:
    """Make one part of a plan's output, on any machine that reaches the inputs and `out`.

    Parts can be made in any order, at once, and again: what is done is left as it is, what an interrupted worker lost
    is read again. Whoever completes the last one publishes the output; the same bytes as `run`.

    Args:
        part: (2, 7) or "2/7" is the second of seven parts: output files, dealt out by bytes. None only finishes.
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
        message = "a part that is run again keeps finished files and reads again what was lost"
        raise RecipeError.of("option.conflict", "--resume" if made.resume else "--no-resume", message, "leave it out")
    numbers = None if part is None else parse_part(part)
    decided = read_plan(plan)
    settings = merge_settings(made.common(MergeOptions, seed=decided.seed), out, on_progress)
    report = make_part_of(decided, numbers, settings)
    warn_of(decided.recipe_notices)
    return report


def make_part_of(
    plan: Plan, numbers: tuple[int, int] | None, settings: MergeSettings, *, publishes: bool = True
) -> PartReport:
    """Make the shards of one part that are not done; whoever completes the last one finishes the output.

    Without a part this only finishes, and it is an error if that cannot be. Unless it `publishes`, that is left to
    others even where the part is the last one.
    """
    check_parts_place(settings.place)
    out, part, store = settings.place, "" if numbers is None else f"{numbers[0]}/{numbers[1]}", Stores()
    parts: PartsPlace | None = None
    worker: PartsWorker | None = None
    merge: MergeReport | None = None
    made, done, total_bytes = list[int](), tuple[int, ...](), 1

    def is_there() -> bool:
        return is_snapshot_of(out, plan.digest)

    def tick() -> None:
        if settings.on_progress is not None:
            settings.on_progress(Progress("merge", store.ledger.total_bytes(), total_bytes))

    def report(*, is_published: bool) -> PartReport:
        usage = Usage() if worker is None else worker.usage
        names = [name for name, _ in parts.job.shards] if parts else []
        return PartReport(
            out=out,
            part=part,
            made_shards=tuple(names[shard] for shard in made),
            found_shards=tuple(names[shard] for shard in done),
            done_shards=len(names) if is_published or parts is None else len(parts.recorded_shards()),
            n_shards=len(names),
            base_bytes=usage[Purpose.BASE],
            expert_bytes=usage.expert_bytes,
            output_bytes=usage[Purpose.OUTPUT],
            seconds=time.perf_counter() - settings.started,
            is_published=is_published,
            merge=merge,
        )

    if is_there():
        remove_left_parts(out, plan.digest)
        if isinstance(out, Path):
            remove_left_staging(out)
        return report(is_published=True)
    planned = open_output(plan, settings.options.shard_bytes, store)
    settings.base_model_ids.check_names(planned.inputs.source_models)
    check_output(out, planned.inputs, force=settings.options.force)
    parts = parts_place(out, planned.job(out), settings.out)
    claimant = Claimant(parts, part, plan.limit_bytes, plan.planned_bytes, settings.options.strict)
    try:
        shards = () if numbers is None else split(planned.output, numbers[1])[numbers[0] - 1].shards
        if numbers is None and not parts.exists:
            message = f"no part of it is made: there is no {parts.path.name}"
            hint = "run its parts first: --part 1/1 makes everything"
            raise NotFoundError.of("parts.missing", parts.out, message, hint)
        parts.open()
        if is_there():  # between looking and making the place
            parts.remove()
            return report(is_published=True)
        done = tuple(shard for shard in shards if parts.done(shard) is not None)
        missing = [shard for shard in shards if shard not in done]
        sizes, all_bytes = [parts.job.shards[shard][1] for shard in missing], sum(size for _, size in parts.job.shards)
        check_free_space(settings.out, sum(sizes) if isinstance(out, Path) else max(sizes, default=0))
        read_bytes = planned.inputs.resolution.base_bytes + plan.planned_bytes
        total_bytes = sum(sizes) + (read_bytes * sum(sizes) // all_bytes if all_bytes else 0)
        worker = PartsWorker(planned, claimant, store, settings.engine, Observer(tick))
        tick()
        made = _made_shards(worker, missing)
        if publishes:
            merge = _finished(planned, claimant, settings, is_needed=numbers is None)
        result = report(is_published=merge is not None or is_there())
    except (ConflictError, OutputError) as error:  # others may finish it at any moment, also before the report
        if error.code not in ("parts.gone", *_PUBLISHED_ELSEWHERE) or not is_there():
            raise
        result = report(is_published=True)
    if result.is_published and result.merge is None:
        parts.remove()  # what this run wrote after who finished it had removed it
    return result


def _made_shards(worker: PartsWorker, shards: Sequence[int]) -> list[int]:
    """Make shards; those that another process is making are left to the end, as an error."""
    made, refused = list[int](), list[ConflictError]()
    for shard in shards:
        try:
            worker.make(shard)
            made.append(shard)
        except ConflictError as error:
            if error.code != "parts.busy":
                raise
            refused.append(error)
    if refused:
        raise ConflictError(*(problem for error in refused for problem in error.problems))
    return made


def _finished(
    planned: PlannedOutput, claimant: Claimant, settings: MergeSettings, *, is_needed: bool
) -> MergeReport | None:
    """Publish the output if all shards are done; unless that `is_needed` nothing else is an error."""
    store, plan = Stores(), planned.plan  # the store counts what all workers read, this one among them
    try:
        made = MadeParts(claimant.parts, plan, planned.output, store.ledger)
        worker = PartsWorker(planned, claimant, store, settings.engine, Observer())
        inputs, link = worker.with_shared_facts(read_missing=False), CatalogLink(settings.home)
        with published_but(settings.place):
            run = MergeRun(inputs, plan, settings.begun_anew, store, link)
            report = run.publish(made=made)
            claimant.parts.remove()
            return report
    except (NotFoundError, ConflictError, OutputError) as error:
        is_there = error.code in _PUBLISHED_ELSEWHERE and is_snapshot_of(settings.place, plan.digest)
        if is_needed or not (is_there or error.code in _FINISHED_ELSEWHERE):
            raise
    return None


def check_parts_place(out: Path | Location) -> None:
    """Refuse a place that takes no output in parts by its name alone, before anything is read."""
    if out.suffix in FILE_SUFFIXES:
        hint = f"write {out.parent / out.stem}"
        raise OutputError.of("output.place", out, "is the name of one file, which is not made in parts", hint)
    if isinstance(out, Location) and out.scheme == HUB_SCHEME:
        hint = "make it in a folder or a bucket, then `mergepipe push` it"
        raise OutputError.of("output.place", out, "takes no output that is made in parts", hint)


def check_output(out: Path | Location, inputs: Inputs, *, force: bool) -> None:
    """Refuse a place at which an output cannot be published."""
    paths = [checkpoint.path for checkpoint in inputs.checkpoints]
    if isinstance(out, Path):
        check_target(out, paths, force=force)
    else:
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
