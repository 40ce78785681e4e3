"""The public Python API: merge and check, each returning a typed report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.asked import (
    block_elements_asked,
    choice,
    engine_options,
    home_asked,
    seed_asked,
)
from mergepipe.bounds import positive
from mergepipe.errors import RecipeError

if TYPE_CHECKING:
    from mergepipe.catalog.rows import CatalogStats, LineageNode, RebuildReport
    from mergepipe.plan import Plan
    from mergepipe.reports import (
        AnalyzeReport,
        CheckReport,
        Explanation,
        MergeReport,
        ProgressCallback,
        SnapshotReport,
        SweepReport,
    )
    from mergepipe.workflows.merging import MergeSettings
    from mergepipe.workflows.planning import PlanRequest
    from mergepipe.workflows.resuming import Resume
    from mergepipe.workflows.speeds import PriceRequest

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
    from mergepipe.storage.local import LocalStore
    from mergepipe.workflows.checking import check_report
    from mergepipe.workflows.opening import open_inputs

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
        overlay: store only blocks that differ from the base, without reuse or resuming; see `keeping.materialise`.
        pack: pack the experts into this directory on the way, as `mergepipe.pack` would, so that they are read once;
            who cannot be is named in the report. Nothing is reused or resumed then. Not under a budget.
        allow_dropped: patterns (`*.extra.*`) of tensors that an expert may have and the base not; they are left out.
        on_progress: called about ten times a second, from the calling thread.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind but what a later run can go on with.
    """
    started = time.perf_counter()
    from mergepipe.workflows.merging import run_merge

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
    from mergepipe.workflows.planning import run_budgeted

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
    from mergepipe.workflows.planning import plan_recipe

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
    from mergepipe.plan import Plan as PlanValue
    from mergepipe.workflows.planning import read_plan, run_plan

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
    from mergepipe.statistics import COMMON_DENSITIES
    from mergepipe.workflows.analyzing import AnalysisOptions, run_analysis

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
    from mergepipe.workflows.plan_files import write_plan

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
    from mergepipe.plan import Plan as PlanValue
    from mergepipe.workflows.explaining import explain_subject, explanation_of

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
    from mergepipe.budget_request import parse_budget
    from mergepipe.workflows.sweeping import SweepBudget, run_sweep

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


def snapshots(*, home: str | Path | None = None) -> tuple[SnapshotReport, ...]:
    """Every snapshot the catalog knows, newest first."""
    from mergepipe.workflows.snapshots import list_snapshots

    return list_snapshots(home_asked(home))


def show(snapshot: str | Path, *, home: str | Path | None = None) -> SnapshotReport:
    """Look a snapshot up by its directory, its sid, or at least four first digits of it.

    Raises:
        NotFoundError, RecipeError: no snapshot is known by that name, or several are.
    """
    from mergepipe.workflows.snapshots import show_snapshot

    return show_snapshot(str(snapshot), home_asked(home))


def lineage(snapshot: str | Path, *, home: str | Path | None = None) -> tuple[LineageNode, ...]:
    """Trace all that went into a snapshot through all generations: a tree in preorder. Raises as `show` does."""
    from mergepipe.workflows.snapshots import trace_lineage

    return trace_lineage(str(snapshot), home_asked(home))


def catalog_stats(*, home: str | Path | None = None) -> CatalogStats:
    """Count what the catalog holds.

    Raises:
        NotFoundError: there is none.
    """
    from mergepipe.workflows.snapshots import catalog_statistics

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
    from mergepipe.workflows.merging import MergeSettings

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
    from mergepipe.workflows.resuming import Resume

    if asked is None:
        return Resume.AUTO
    return Resume.REQUIRED if asked else Resume.NEVER


def _price_request(price: str, storage_speed: str | None) -> PriceRequest:
    from mergepipe.budget_request import parse_speed
    from mergepipe.prices import Price
    from mergepipe.workflows.speeds import PriceRequest

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
    from mergepipe.budget_request import parse_budget
    from mergepipe.planner.problem import AdjustPolicy, OnOmit, PlanOptions, Policy
    from mergepipe.workflows.planning import PlanRequest

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
