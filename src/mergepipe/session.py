"""The public Python API: merge and check, each returning a typed report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mergepipe.errors import LimitError, RecipeError, did_you_mean

if TYPE_CHECKING:
    from mergepipe.engine.execute import EngineOptions
    from mergepipe.plan import Plan
    from mergepipe.reports import AnalyzeReport, CheckReport, MergeReport, ProgressCallback
    from mergepipe.workflows.merging import MergeSettings
    from mergepipe.workflows.planning import PlanRequest

DEFAULT_SHARD_BYTES = 5_000_000_000
DEFAULT_POLICY = "norm"
C = TypeVar("C", bound=StrEnum)


def default_memory_bytes() -> int:
    """The default cap on buffers: the lesser of 4 GiB and half of the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 << 30, physical // 2)


def default_threads() -> int:
    """One compute thread per processor this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check(recipe: str | Path, *, shard_bytes: int = DEFAULT_SHARD_BYTES) -> CheckReport:
    """Validate a recipe and its inputs without reading any tensor data.

    Raises:
        MergePipeError: every problem found, in one error.
    """
    from mergepipe.engine.execute import plan_output
    from mergepipe.storage.local import LocalStore
    from mergepipe.workflows.merging import check_report, open_inputs

    _positive("--shard-size", shard_bytes)
    inputs = open_inputs(Path(recipe), LocalStore())
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
    select: str = DEFAULT_POLICY,
    on_omit: str = "keep",
    adjust_min_density: float | None = None,
    home: str | Path | None = None,
    catalog: bool = True,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Merge as the recipe says and publish the result at `out`, complete or not at all.

    With a `budget` no more than that is read from expert files: a plan is made and run.

    Args:
        threads: compute threads; default, one per processor.
        memory_bytes: cap on buffers; default `default_memory_bytes()`.
        seed: seed of the random operators.
        force: replace a snapshot that is already at `out`.
        shard_bytes: largest output file, in bytes of tensor data.
        budget, select, on_omit, adjust_min_density: see `plan`.
        home: the catalog's home; default $MERGEPIPE_HOME, else the platform's user data folder.
        catalog: use the catalog, and record statistics and the snapshot in it.
        on_progress: called about ten times a second, from the calling thread.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind.
    """
    started = time.perf_counter()
    from mergepipe.workflows.merging import run_merge

    settings = _merge_settings(threads, memory_bytes, seed, home, catalog=catalog, force=force, shard_bytes=shard_bytes)
    if budget is None:
        return run_merge(Path(recipe), Path(out), settings, started=started, on_progress=on_progress)
    from mergepipe.workflows.planning import run_budgeted

    request = _plan_request(budget, select, on_omit, adjust_min_density, None)
    return run_budgeted(Path(recipe), Path(out), request, settings, started=started, on_progress=on_progress)


def plan(
    recipe: str | Path,
    budget: str,
    *,
    select: str = DEFAULT_POLICY,
    on_omit: str = "keep",
    adjust_min_density: float | None = None,
    seed: int = 0,
    block_elements: int | None = None,
    home: str | Path | None = None,
) -> Plan:
    """Decide what a merge reads under a budget, from the catalog and the inputs' headers; reads no tensor data.

    Args:
        budget: bytes to be read from expert files at most (`4GiB`), or a share of what reading all would cost (`25%`).
        select: the policy: norm, conflict, stratified or random.
        on_omit: `keep` the coefficients where an expert is omitted, or `renormalize` them (linear).
        adjust_min_density: let densities of TIES and DARE fall to this under a tight budget; None leaves them.
        seed: seed of the random operators and of the policy `random`.
        block_elements: elements of a block; default 256 Ki. Statistics of another grid are not used.
        home: the catalog's home.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.workflows.planning import plan_recipe

    request = _plan_request(budget, select, on_omit, adjust_min_density, block_elements, seed)
    return plan_recipe(Path(recipe), request, _home(home), seed)


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
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Run a plan, given or stored, and publish the result at `out`; refused if an input changed since it was made.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind.
    """
    started = time.perf_counter()
    from mergepipe.plan import Plan as PlanValue
    from mergepipe.workflows.planning import read_plan, run_plan

    value = plan if isinstance(plan, PlanValue) else read_plan(Path(plan))
    settings = _merge_settings(
        threads, memory_bytes, value.seed, home, catalog=catalog, force=force, shard_bytes=shard_bytes
    )
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
    on_progress: ProgressCallback | None = None,
) -> AnalyzeReport:
    """Read experts once against their base and record in the catalog what plans are made from.

    What the catalog already knows of unchanged files is not read again; an interrupted analysis goes on where it was.

    Args:
        home: the catalog's home; default $MERGEPIPE_HOME, else the platform's user data folder.
        probe_fraction: read only this share of every block and estimate; 0 reads everything.
        densities: shares whose exact magnitude cuts are wanted beside the common ones.
        block_elements: elements of a block; default 256 Ki.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    started = time.perf_counter()
    from mergepipe.blocks import DEFAULT_BLOCK_ELEMENTS
    from mergepipe.statistics import COMMON_DENSITIES
    from mergepipe.workflows.analyzing import AnalysisOptions, run_analysis

    if not 0.0 <= probe_fraction <= 1.0:
        raise RecipeError.of("option.probe", "--probe", f"{probe_fraction:g} was given", "give a share from 0 to 1")
    if any(not 0.0 < density <= 1.0 for density in densities):
        raise RecipeError.of("option.density", "--density", "a density is in (0, 1]", "give shares such as 0.2")
    options = AnalysisOptions(
        block_elements or DEFAULT_BLOCK_ELEMENTS,
        tuple(sorted({*COMMON_DENSITIES, *densities})),
        probe_fraction,
    )
    return run_analysis(
        Path(base),
        [Path(expert) for expert in experts],
        _home(home),
        options,
        _engine_options(threads, memory_bytes),
        started=started,
        on_progress=on_progress,
    )


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
        engine=_engine_options(threads, memory_bytes),
        seed=seed,
        force=force,
        shard_bytes=_positive("--shard-size", shard_bytes),
        home=_home(home) if catalog else None,
    )


def _plan_request(
    budget: str,
    select: str,
    on_omit: str,
    adjust_min_density: float | None,
    block_elements: int | None,
    seed: int = 0,
) -> PlanRequest:
    from mergepipe.blocks import DEFAULT_BLOCK_ELEMENTS
    from mergepipe.budget_request import parse_budget
    from mergepipe.planner.problem import AdjustPolicy, OnOmit, PlanOptions, Policy
    from mergepipe.workflows.planning import PlanRequest

    if adjust_min_density is not None and not 0.0 < adjust_min_density <= 1.0:
        raise RecipeError.of("option.density", "--min-density", f"{adjust_min_density:g} was given", "it is in (0, 1]")
    adjust = None if adjust_min_density is None else AdjustPolicy(adjust_min_density)
    return PlanRequest(
        parse_budget(budget),
        _choice("--select", select, Policy),
        PlanOptions(_choice("--on-omit", on_omit, OnOmit), adjust, seed),
        block_elements or DEFAULT_BLOCK_ELEMENTS,
    )


def _choice(option: str, value: str, choices: type[C]) -> C:
    try:
        return choices(value)
    except ValueError:
        hint = did_you_mean(value, [each.value for each in choices])
        raise RecipeError.of("option.choice", option, f"'{value}' was given", hint) from None


def _home(home: str | Path | None) -> Path:
    from mergepipe.catalog.home import resolve_home

    return resolve_home(Path(home) if home is not None else None)


def _engine_options(threads: int | None, memory_bytes: int | None) -> EngineOptions:
    from mergepipe.engine.execute import EngineOptions

    return EngineOptions(
        _positive("--threads", threads if threads is not None else default_threads()),
        _positive("--memory", memory_bytes if memory_bytes is not None else default_memory_bytes()),
    )


def _positive(option: str, value: int) -> int:
    if value < 1:
        raise LimitError.of("option.not-positive", option, f"{value} was given", "give a number above zero")
    return value
