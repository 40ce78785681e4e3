"""The public Python API: every call checks what it is given, runs one job, and returns a typed report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.core.bounds import positive
from mergepipe.errors import LimitError, RecipeError
from mergepipe.options import (
    block_elements_asked,
    choice,
    engine_options,
    home_asked,
    seed_asked,
    threads_asked,
)

if TYPE_CHECKING:
    from mergepipe.catalog.rows import CatalogStats, LineageNode, RebuildReport
    from mergepipe.jobs.plan import PlanRequest
    from mergepipe.planning.plan import Plan
    from mergepipe.reports import (
        AnalyzeReport,
        CheckReport,
        Explanation,
        GcReport,
        MaterialiseReport,
        MergeReport,
        ProgressCallback,
        RepairReport,
        SnapshotDiff,
        SnapshotReport,
        SweepReport,
        VerifyReport,
    )
    from mergepipe.runs.merge_run import MergeSettings
    from mergepipe.runs.resume import Resume
    from mergepipe.runs.speeds import PriceRequest

DEFAULT_DEEP_FRACTION = 0.05
DEFAULT_SHARD_BYTES = 5_000_000_000
SPARE_THREADS = 4
DEFAULT_POLICY = "norm"
DEFAULT_ON_OMIT = "keep"
DEFAULT_PRICE = "bytes"
SWEEP_BUDGETS = ("5%", "10%", "25%", "50%", "75%", "100%")


def check(
    recipe: str | Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES, allow_dropped: Sequence[str] = ()
) -> CheckReport:
    """Validate a recipe and its inputs without reading any tensor data.

    Args:
        shard_bytes, allow_dropped: see `merge`.

    Raises:
        MergePipeError: every problem found, in one error.
    """
    from mergepipe.engine.execute import plan_output
    from mergepipe.jobs.check import check_report
    from mergepipe.runs.inputs import open_inputs
    from mergepipe.storage.local import LocalStore

    positive("--shard-size", shard_bytes)
    inputs = open_inputs(Path(recipe), LocalStore(), allow_dropped)
    return check_report(inputs, plan_output(inputs.resolution.tasks, shard_bytes))


def merge(
    recipe: str | Path,
    out: str | Path,
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    seed: int = 0,
    force: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    budget: str | None = None,
    target_error: float | None = None,
    select: str = DEFAULT_POLICY,
    on_omit: str = DEFAULT_ON_OMIT,
    adjust_min_density: float | None = None,
    block_elements: int | None = None,
    price: str = DEFAULT_PRICE,
    storage_speed: str | None = None,
    home: str | Path | None = None,
    catalog: bool = True,
    statistics: bool | None = None,
    resume: bool | None = None,
    reuse: bool = True,
    keep_accumulators: bool = False,
    overlay: bool = False,
    pack: str | Path | None = None,
    allow_dropped: Sequence[str] = (),
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Merge as the recipe says and publish the result at `out`, complete or not at all.

    With a `budget` no more than that is read from expert files: a plan is made and run.

    Args:
        threads: compute threads; default, one per processor.
        memory_bytes: cap on buffers; default `default_memory_bytes()`.
        seed: seed of the random operators and of the policy `random`.
        force: replace a snapshot that is already at `out`.
        shard_bytes: largest output file, in bytes of tensor data.
        budget, target_error, select, on_omit, adjust_min_density, block_elements, price, storage_speed: see `plan`.
        home: the catalog's home; default $MERGEPIPE_HOME, else the platform's user data folder.
        catalog: use the catalog, and record the snapshot in it.
        statistics: let a merge in full gather on its way what `analyze` would read for; by default where there are
            at least `SPARE_THREADS` compute threads, because below that it costs time.
        resume: go on with an interrupted run of the same merge to `out`; by default where there is one.
        reuse: copy blocks that come out the same from earlier snapshots: no expert is read for them.
        keep_accumulators: keep the float32 sums of additive merges beside the snapshot, 4 bytes a parameter: a later
            merge with experts added at the end reads those alone. Not under a budget.
        overlay: store only blocks that differ from the base, without reuse or resuming; see `api.materialise`.
        pack: pack the experts into this directory on the way, as `mergepipe.pack` would, so that they are read once;
            who cannot be is named in the report. Nothing is reused or resumed then. Not under a budget.
        allow_dropped: patterns (`*.extra.*`) of tensors that an expert may have and the base not; they are left out.
        on_progress: called about ten times a second, from the calling thread.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind but what a later run can go on with.
    """
    started = time.perf_counter()
    from mergepipe.jobs.merge import run_merge

    settings = _merge_settings(threads, memory_bytes, seed, home, catalog=catalog, force=force, shard_bytes=shard_bytes)
    gathers = settings.engine.threads >= SPARE_THREADS if statistics is None else statistics
    settings = replace(
        settings,
        gathers=gathers,
        resume=_resume(resume).without_continuing if overlay else _resume(resume),
        reuse=reuse and not overlay,
        overlay=overlay,
        keeps_accumulators=keep_accumulators,
        allow_dropped=tuple(allow_dropped),
        pack=None if pack is None else Path(pack),
    )
    pricing = _price_request(price, storage_speed)
    if overlay:
        _refuse_with_overlay({"--keep-accumulators": keep_accumulators, "--resume": resume})
    is_planned = budget is not None or target_error is not None
    if pack is not None and (is_planned or resume):
        planned_by = "--target-error" if budget is None else "--budget"
        other, why = (planned_by, "which reads parts") if is_planned else ("--resume", "which reads what is left")
        message = f"packs what is read in full: it does not go with {other}, {why}"
        raise RecipeError.of("option.pair", "--pack", message, "run `mergepipe pack` by itself")
    if keep_accumulators and is_planned:
        message = "sums are kept, and gone on with, by merges in full alone"
        raise RecipeError.of("option.pair", "--keep-accumulators", message, "merge without --budget")
    if price != DEFAULT_PRICE and not is_planned:
        message = "a merge in full reads the same at any price"
        raise RecipeError.of("option.pair", "--price", message, "add --budget or --target-error")
    if not is_planned:
        return run_merge(Path(recipe), Path(out), settings, started=started, on_progress=on_progress)
    from mergepipe.jobs.plan import run_budgeted

    request = _plan_request(budget, select, on_omit, adjust_min_density, block_elements, seed, target_error)
    request = replace(request, allow_dropped=tuple(allow_dropped), reuse=settings.reuse, pricing=pricing)
    return run_budgeted(Path(recipe), Path(out), request, settings, started=started, on_progress=on_progress)


def plan(
    recipe: str | Path,
    budget: str | None = None,
    *,
    target_error: float | None = None,
    select: str = DEFAULT_POLICY,
    on_omit: str = DEFAULT_ON_OMIT,
    adjust_min_density: float | None = None,
    seed: int = 0,
    block_elements: int | None = None,
    price: str = DEFAULT_PRICE,
    storage_speed: str | None = None,
    home: str | Path | None = None,
    reuse: bool = True,
    allow_dropped: Sequence[str] = (),
) -> Plan:
    """Decide what a merge reads under a budget, from the catalog, and from headers and indices of the inputs.

    Reads no tensor data, but for measuring how fast the base is read where steps are priced by time for the first time.

    Args:
        budget: bytes to be read from expert files at most (`4GiB`), or a share of what reading all would cost (`25%`).
        target_error: spend no more of the budget (default: everything) than is expected to keep the result this close
            to the full merge, relative to what that changes.
        select: the policy: norm, conflict, stratified or random.
        on_omit: `keep` the coefficients where an expert is omitted, or `renormalize` them (linear).
        adjust_min_density: let densities of TIES and DARE fall to this under a tight budget; None leaves them.
        seed: seed of the random operators and of the policy `random`.
        block_elements: elements of a block; default 256 Ki, 2 Mi where all experts are packed and none was
            analysed. Statistics of another grid are not used.
        price: what a step is divided by: `bytes`, or `time`, the seconds to read and decode it on this machine.
        storage_speed: how fast experts are read (`200MB/s`); by default it is measured once, on the base's own files.
        home: the catalog's home.
        reuse: charge nothing for blocks that stand in earlier snapshots, and spend on others what that frees.
        allow_dropped: see `merge`.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.plan import plan_recipe

    request = _plan_request(budget, select, on_omit, adjust_min_density, block_elements, seed, target_error)
    pricing = _price_request(price, storage_speed)
    request = replace(request, allow_dropped=tuple(allow_dropped), reuse=reuse, pricing=pricing)
    return plan_recipe(Path(recipe), request, home_asked(home), seed)


def run(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    force: bool = False,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    home: str | Path | None = None,
    catalog: bool = True,
    resume: bool | None = None,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Run a plan, given or stored, and publish the result at `out`; refused if an input changed since it was made.

    `resume` is as in `merge`.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind but what a later run can go on with.
    """
    started = time.perf_counter()
    from mergepipe.jobs.plan import read_plan, run_plan
    from mergepipe.planning.plan import Plan as PlanValue

    value = plan if isinstance(plan, PlanValue) else read_plan(Path(plan))
    settings = _merge_settings(
        threads, memory_bytes, value.seed, home, catalog=catalog, force=force, shard_bytes=shard_bytes
    )
    settings = replace(settings, resume=_resume(resume))
    return run_plan(value, Path(out), settings, started=started, on_progress=on_progress)


def analyze(
    base: str | Path,
    experts: Sequence[str | Path],
    *,
    home: str | Path | None = None,
    probe_fraction: float = 0.0,
    densities: Sequence[float] = (),
    block_elements: int | None = None,
    threads: int | None = None,
    memory_bytes: int | None = None,
    pack: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> AnalyzeReport:
    """Read experts once against their base and record in the catalog what plans are made from.

    What the catalog already knows of unchanged files is not read again; an interrupted analysis goes on where it was.

    Args:
        home: the catalog's home; default $MERGEPIPE_HOME, else the platform's user data folder.
        probe_fraction: read only this share of every block and estimate; 0 reads everything.
        densities: shares whose exact magnitude cuts are wanted beside the common ones.
        block_elements: elements of a block; default 256 Ki.
        pack: pack the experts that are read in full into this directory on the way; see `merge`. Not with a probe.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    started = time.perf_counter()
    from mergepipe.jobs.analyze import AnalysisOptions, run_analysis
    from mergepipe.operators.statistics import COMMON_DENSITIES

    if not 0.0 <= probe_fraction <= 1.0:
        raise RecipeError.of("option.probe", "--probe", f"{probe_fraction:g} was given", "give a share from 0 to 1")
    if any(not 0.0 < density <= 1.0 for density in densities):
        raise RecipeError.of("option.density", "--density", "a density is in (0, 1]", "give shares such as 0.2")
    if pack is not None and probe_fraction:
        message = "packs what is read in full: it does not go with --probe, which reads parts"
        raise RecipeError.of("option.pair", "--pack", message, "run `mergepipe pack` by itself")
    options = AnalysisOptions(
        block_elements_asked(block_elements),
        tuple(sorted({*COMMON_DENSITIES, *densities})),
        probe_fraction,
        None if pack is None else Path(pack),
    )
    return run_analysis(
        Path(base),
        [Path(expert) for expert in experts],
        home_asked(home),
        options,
        engine_options(threads, memory_bytes),
        started=started,
        on_progress=on_progress,
    )


def store_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file, complete or not at all; only another plan is replaced.

    Raises:
        OutputError: `plan.not-a-plan`, something else stands there.
        StorageError, NotFoundError: it cannot be written there.
    """
    from mergepipe.planning.plan_file import write_plan

    write_plan(plan, Path(path))


def explain(subject: Plan | str | Path, *, tensor: str | None = None, home: str | Path | None = None) -> Explanation:
    """Tell which experts are where in a plan or a snapshot, and why; reads no tensor data.

    Args:
        subject: a plan, given or stored, or a snapshot: its directory, its sid, or first digits of it.
        tensor: a shell pattern (`model.layers.0.*`); the tensors it matches are told of block by block.
        home: the catalog's home, where sids are looked up.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.explain import explain_subject, explanation_of
    from mergepipe.planning.plan import Plan as PlanValue

    if isinstance(subject, PlanValue):
        return explanation_of(Path(), subject, None, tensor)
    return explain_subject(str(subject), tensor, home_asked(home))


def sweep(
    recipe: str | Path,
    budgets: Sequence[str] = SWEEP_BUDGETS,
    *,
    select: str = DEFAULT_POLICY,
    on_omit: str = DEFAULT_ON_OMIT,
    price: str = DEFAULT_PRICE,
    storage_speed: str | None = None,
    seed: int = 0,
    threads: int | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    work: str | Path | None = None,
    allow_dropped: Sequence[str] = (),
    on_progress: ProgressCallback | None = None,
) -> SweepReport:
    """Merge a recipe in full and under each budget, and measure error, bytes and time, with `random` beside `select`.

    Args:
        budgets, select, on_omit, price, storage_speed, seed: see `plan`.
        home: the catalog's home; the full merge fills it on its way.
        work: where outputs lie while they are measured, two at a time; default, where temporary files go.
        allow_dropped: see `merge`.

    Raises:
        MergePipeError: see `mergepipe.errors`; no output is left behind.
    """
    from mergepipe.jobs.sweep import SweepBudget, run_sweep
    from mergepipe.planning.budget import parse_budget

    if not budgets:
        raise RecipeError.of("budget.malformed", "--budgets", "none is given", "give some, such as 10%,50%")
    wanted = [SweepBudget(text.strip(), parse_budget(text, "--budgets")) for text in budgets]
    request = _plan_request(budgets[0], select, on_omit, None, None, seed)
    pricing = _price_request(price, storage_speed)
    request = replace(request, allow_dropped=tuple(allow_dropped), pricing=pricing)
    settings = _merge_settings(
        threads, memory_bytes, seed, home, catalog=True, force=False, shard_bytes=DEFAULT_SHARD_BYTES
    )
    settings = replace(settings, allow_dropped=request.allow_dropped)
    place = None if work is None else Path(work)
    return run_sweep(Path(recipe), wanted, request, settings, home_asked(home), place, on_progress)


def list_snapshots(*, home: str | Path | None = None) -> tuple[SnapshotReport, ...]:
    """Every snapshot the catalog knows, newest first."""
    from mergepipe.runs.snapshots import list_snapshots

    return list_snapshots(home_asked(home))


def show(snapshot: str | Path, *, home: str | Path | None = None) -> SnapshotReport:
    """Look a snapshot up by its directory, its sid, or at least four first digits of it.

    Raises:
        NotFoundError, RecipeError: no snapshot is known by that name, or several are.
    """
    from mergepipe.runs.snapshots import show_snapshot

    return show_snapshot(str(snapshot), home_asked(home))


def lineage(snapshot: str | Path, *, home: str | Path | None = None) -> tuple[LineageNode, ...]:
    """Trace all that went into a snapshot through all generations: a tree in preorder. Raises as `show` does."""
    from mergepipe.runs.snapshots import trace_lineage

    return trace_lineage(str(snapshot), home_asked(home))


def catalog_stats(*, home: str | Path | None = None) -> CatalogStats:
    """Count what the catalog holds.

    Raises:
        NotFoundError: there is none.
    """
    from mergepipe.runs.snapshots import catalog_statistics

    return catalog_statistics(home_asked(home))


def rebuild_catalog(roots: Sequence[str | Path] = (), *, home: str | Path | None = None) -> RebuildReport:
    """Make the catalog again from the manifests under `roots` and at known paths; sound statistics stay.

    Raises:
        NotFoundError: a root does not exist.
        MergePipeError: the catalog cannot be used or replaced.
    """
    from mergepipe.catalog.rebuild import rebuild

    return rebuild(home_asked(home), [Path(root) for root in roots])


def _merge_settings(
    threads: int | None,
    memory_bytes: int | None,
    seed: int,
    home: str | Path | None,
    *,
    catalog: bool,
    force: bool,
    shard_bytes: int,
) -> MergeSettings:
    from mergepipe.runs.merge_run import MergeSettings

    return MergeSettings(
        engine=engine_options(threads, memory_bytes),
        seed=seed_asked(seed),
        force=force,
        shard_bytes=positive("--shard-size", shard_bytes),
        home=home_asked(home) if catalog else None,
    )


def _refuse_with_overlay(given: Mapping[str, bool | None]) -> None:
    """Refuse options that an overlay gives no meaning."""
    for option in (option for option, value in given.items() if value):
        message = "has no meaning for an overlay, which holds no sums and is made at once or not at all"
        raise RecipeError.of("option.pair", option, message, "merge without --overlay")


def _resume(asked: bool | None) -> Resume:
    from mergepipe.runs.resume import Resume

    if asked is None:
        return Resume.AUTO
    return Resume.REQUIRED if asked else Resume.NEVER


def _price_request(price: str, storage_speed: str | None) -> PriceRequest:
    from mergepipe.planning.budget import parse_speed
    from mergepipe.runs.speeds import PriceRequest
    from mergepipe.storage.prices import Price

    chosen = choice("--price", price, Price)
    if storage_speed is not None and chosen is Price.BYTES:
        message = "by bytes no speed is looked at"
        raise RecipeError.of("option.pair", "--storage-speed", message, "add --price time")
    return PriceRequest(chosen, None if storage_speed is None else parse_speed(storage_speed))


def _plan_request(
    budget: str | None,
    select: str,
    on_omit: str,
    adjust_min_density: float | None,
    block_elements: int | None,
    seed: int = 0,
    target_error: float | None = None,
) -> PlanRequest:
    from mergepipe.jobs.plan import PlanRequest
    from mergepipe.planning.budget import parse_budget
    from mergepipe.planning.problem import AdjustPolicy, OnOmit, PlanOptions, Policy

    if adjust_min_density is not None and not 0.0 < adjust_min_density <= 1.0:
        raise RecipeError.of("option.density", "--min-density", f"{adjust_min_density:g} was given", "it is in (0, 1]")
    if target_error is not None and not target_error >= 0:
        raise RecipeError.of("option.error", "--target-error", f"{target_error:g} was given", "it is 0 or more")
    if budget is None and target_error is None:
        raise RecipeError.of("budget.missing", "--budget", "nothing says what may be read", "give one, such as 25%")
    adjust = None if adjust_min_density is None else AdjustPolicy(adjust_min_density)
    return PlanRequest(
        parse_budget(budget if budget is not None else "100%"),
        choice("--select", select, Policy),
        PlanOptions(choice("--on-omit", on_omit, OnOmit), adjust, seed_asked(seed), target_error),
        None if block_elements is None else block_elements_asked(block_elements),
    )


def verify(
    snapshot: str | Path,
    *,
    deep_fraction: float = 0.0,
    threads: int | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Read a whole snapshot and hold every block, digest and file against its manifest; damage is in the report.

    Args:
        snapshot: its directory, its sid, or first digits of it.
        deep_fraction: make tensors with this share of the bytes again from the inputs and compare.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing could be verified.
    """
    started = time.perf_counter()
    from mergepipe.jobs.verify import verify_snapshot

    if not 0.0 <= deep_fraction <= 1.0:
        raise LimitError.of("option.sample", "--sample", f"{deep_fraction:g} was given", "give a share from 0 to 1")
    engine = engine_options(threads, memory_bytes)
    path = _path(snapshot, home)
    return verify_snapshot(path, engine, deep_fraction, started=started, on_progress=on_progress)


def repair(
    snapshot: str | Path,
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> RepairReport:
    """Make what is damaged in a snapshot again from its inputs, and write exactly that.

    Raises:
        MergePipeError: see `mergepipe.errors`; something could not be made again.
    """
    started = time.perf_counter()
    from mergepipe.jobs.repair import repair_snapshot

    engine = engine_options(threads, memory_bytes)
    return repair_snapshot(_path(snapshot, home), engine, started=started, on_progress=on_progress)


def replay(
    snapshot: str | Path,
    out: str | Path,
    *,
    threads: int | None = None,
    memory_bytes: int | None = None,
    force: bool = False,
    home: str | Path | None = None,
    catalog: bool = True,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Make a snapshot again at `out` from its manifest alone: the same bytes, or an error that says why not.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing was published.
    """
    started = time.perf_counter()
    from mergepipe.jobs.replay import replay_snapshot
    from mergepipe.runs.merge_run import MergeSettings

    settings = MergeSettings(
        engine=engine_options(threads, memory_bytes),
        seed=0,
        force=force,
        shard_bytes=1,
        home=home_asked(home) if catalog else None,
    )
    path = _path(snapshot, home)
    return replay_snapshot(path, Path(out), settings, started=started, on_progress=on_progress)


def materialise(
    overlay: str | Path,
    out: str | Path | None = None,
    *,
    base: str | Path | None = None,
    threads: int | None = None,
    force: bool = False,
    home: str | Path | None = None,
    catalog: bool = True,
    on_progress: ProgressCallback | None = None,
) -> MaterialiseReport:
    """Make the whole snapshot that an overlay stands for, every block compared with its digest on the way.

    Args:
        overlay: its directory, its sid, or first digits of it.
        out: the directory to create; without it the snapshot replaces the overlay, which needs `force`.
        base: the directory in which the base's files are by now; default, where they were.
        force: replace a snapshot that is already there.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing was published.
    """
    started = time.perf_counter()
    n_threads = threads_asked(threads)
    from mergepipe.jobs.materialise import MaterialiseSettings, materialise_overlay

    path = _path(overlay, home)
    settings = MaterialiseSettings(
        n_threads,
        force,
        home_asked(home) if catalog else None,
        Path(base) if base is not None else None,
    )
    return materialise_overlay(
        path, path if out is None else Path(out), settings, started=started, on_progress=on_progress
    )


def diff(
    a: str | Path,
    b: str | Path,
    *,
    reads_tensors: bool = True,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> SnapshotDiff:
    """Compare two snapshots: recipes, settings, inputs, coverage, and tensors with the norms of what differs.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.diff import compare_snapshots

    return compare_snapshots(_path(a, home), _path(b, home), reads_tensors=reads_tensors, on_progress=on_progress)


def gc(roots: Sequence[str | Path] = (), *, dry_run: bool = False, home: str | Path | None = None) -> GcReport:
    """Remove staging of dead runs, beside known snapshots and under `roots`, and catalog rows of what is gone.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.gc import collect_garbage

    return collect_garbage(home_asked(home), [Path(root) for root in roots], dry_run=dry_run)


def _path(snapshot: str | Path, home: str | Path | None) -> Path:
    from mergepipe.runs.snapshots import find_snapshot_path

    return find_snapshot_path(str(snapshot), home_asked(home))
