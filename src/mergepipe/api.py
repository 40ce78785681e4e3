"""The public calls: each checks its arguments, runs one job, and returns a report.

Making models: `check`, `merge`.
Under a budget: `analyze`, `plan`, `store_plan`, `run`, `explain`, `sweep`.
On many machines: `run_part`, `parts_status`.
Packing experts: `pack`, `unpack`. Reading models: `load_file`.
Looking after snapshots: `list_snapshots`, `show`, `lineage`, `diff`, `verify`, `repair`, `replay`,
`push`, `gc`.
The catalog: `catalog_stats`, `rebuild_catalog`.

Jobs are imported when they are called, so that importing this module costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from dataclasses import replace as changed
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from mergepipe.core.bounds import positive
from mergepipe.errors import LimitError, RecipeError
from mergepipe.options import (
    APPLY_MEMORY_BYTES,
    DEFAULT_SHARD_BYTES,
    SWEEP_BUDGETS,
    ExecutorName,
    MergeOptions,
    OutputOptions,
    PlanOptions,
    RunOptions,
    block_elements_of,
    catalog_home,
    default_memory_bytes,
    engine_options,
    home_of,
    needed_home,
    options_as,
    place_of_packs,
    threads_of,
)
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from datetime import date

    from mergepipe.catalog.rows import CatalogStats, LineageNode, RebuildReport
    from mergepipe.jobs.load import LoadedTensors
    from mergepipe.planning.plan import Plan
    from mergepipe.recipes.yaml_source import RecipeText
    from mergepipe.reports import (
        AnalyzeReport,
        CheckReport,
        Explanation,
        ExtractLoraReport,
        GcReport,
        MergeLoraReport,
        MergeReport,
        PackReport,
        PartReport,
        PartsStatus,
        ProgressCallback,
        PushReport,
        RepairReport,
        SnapshotDiff,
        SnapshotReport,
        SweepReport,
        UnpackReport,
        VerifyReport,
    )


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _with_options(
    kind: type[RunOptions | MergeOptions | PlanOptions],
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a call say where an argument belongs that is a field of its `options`."""
    options = {field.name for field in fields(kind)}

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        own = set(signature(function).parameters)

        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs.keys() & options - own:
                written = f"options=mergepipe.{kind.__name__}({name}={kwargs[name]!r})"
                raise TypeError(f"{function.__name__}() takes '{name}' as one of its options: write {written}")
            return function(*args, **kwargs)

        return call

    return decorated


# --- making models ---


def check(
    recipe: str | Path | Mapping[str, object],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    allow_dropped: Sequence[str] = (),
    strict: bool = False,
    lenient: bool = False,
) -> CheckReport:
    """Validate a recipe and its inputs without reading any tensor data.

    Args:
        recipe: a YAML file, or its content as a mapping, with paths relative to the working directory.
        shard_bytes, allow_dropped, strict, lenient: see `MergeOptions`.

    Raises:
        MergePipeError: every problem found, in one error.
    """
    MergeOptions(shard_bytes=shard_bytes, strict=strict, lenient=lenient)  # checked as those of a merge
    from mergepipe.jobs.check import check_recipe
    from mergepipe.recipes.fields import Strictness

    return check_recipe(_recipe(recipe), shard_bytes, allow_dropped, Strictness(strict, lenient))


@_with_options(MergeOptions)
def merge(
    recipe: str | Path | Mapping[str, object],
    out: str | Path,
    *,
    budget: str | float | None = None,
    force: bool = False,
    seed: int | None = None,
    options: MergeOptions | None = None,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Merge as the recipe says and publish the result at `out`, complete or not at all.

    `out` is a folder, or a prefix of a bucket (`s3://bucket/prefix`, `gs://`, `az://`), which must hold nothing yet.
    Without a `budget` all experts are read in full. With one, a plan is made and run. With a `target_loss` in the
    options budgets are tried until it is met; `tried` of the report tells what each read and gave.

    Args:
        recipe: see `check`.
        budget, force, seed: fields of `options` that stand for themselves; what is given here counts.
        options: what is merged and how; default `MergeOptions()`.
        on_progress: called about ten times a second, from the calling thread.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind but what a later run can resume.
    """
    started = time.perf_counter()
    options = options_as(MergeOptions, options, budget=budget, force=force or None, seed=seed)
    from mergepipe.runs.settings import cluster_request, merge_settings, output_place

    place, settings = output_place(out, merge_settings(options), options.home)
    cluster = cluster_request(options)
    if options.budget is None and options.target_loss is None and cluster is None:
        from mergepipe.jobs.merge import run_merge

        return run_merge(_recipe(recipe), place, settings, started=started, on_progress=on_progress)
    from mergepipe.jobs.evaluate import TARGET_BUDGETS, merge_to_target, parse_evaluation
    from mergepipe.jobs.merge import run_budgeted
    from mergepipe.jobs.plan import plan_request

    first_budget = options.budget if options.target_loss is None else TARGET_BUDGETS[0]
    request = plan_request(
        first_budget, options.plan, seed=options.seed, allow_dropped=options.allow_dropped, strict=options.strict,
        everything=first_budget is None,
    )  # fmt: skip
    if options.target_loss is not None and options.evaluate is not None:
        if settings.destination is not None:
            message, hint = "looks at each merge in a folder of this machine", "merge into a folder"
            raise RecipeError.of("option.conflict", "--target-loss", message, hint)
        return merge_to_target(
            _recipe(recipe), place, request, settings, parse_evaluation(options.evaluate), options.target_loss,
            started=started, on_progress=on_progress,
        )  # fmt: skip
    if cluster is not None:
        from mergepipe.jobs.merge_on_ray import run_merge_on_ray

        return run_merge_on_ray(
            _recipe(recipe), place, request, cluster, settings, started=started, on_progress=on_progress
        )
    return run_budgeted(_recipe(recipe), place, request, settings, started=started, on_progress=on_progress)


# --- planning under a budget ---


@_with_options(RunOptions)
def analyze(
    base: str | Path,
    experts: Sequence[str | Path],
    *,
    densities: Sequence[float] = (),
    block_elements: int | None = None,
    text: str | Path | None = None,
    importance_to: str | Path | None = None,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
) -> AnalyzeReport:
    """Read experts once against their base, and keep for each a file of what plans are made from.

    The files lie in the home folder and are named by the contents of expert and base: a copy of one in the home folder
    of another machine, or beside the model as `mergepipe.stats`, serves there. What is on record is not read again.

    Args:
        densities: shares whose exact magnitude cuts are wanted beside the common ones.
        block_elements: elements of a block; default 256 Ki.
        text: a file of text that tells which tensors matter: the sums of absolute gradient times delta of each tensor,
            over all experts, go to `importance_to`, for `importance` of `PlanOptions`. Needs transformers, a base in a
            folder, and 8 bytes of memory for each of its parameters.
        importance_to: the file, JSON, that is written for `text`; what stands there is replaced.
        options: threads, memory, the home folder.
        on_progress: see `merge`.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    started = time.perf_counter()
    options = options or RunOptions()
    if any(not 0.0 < density <= 1.0 for density in densities):
        raise RecipeError.of("option.invalid", "--density", "a density is in (0, 1]", "give shares such as 0.2")
    if (text is None) != (importance_to is None):
        option, other = ("--importance-out", "--text FILE") if text is None else ("--text", "--importance-out FILE")
        raise RecipeError.of("option.conflict", option, "has no meaning by itself", f"add {other}")
    from mergepipe.jobs.analyze import AnalysisRequest, run_analysis
    from mergepipe.operators.statistics import COMMON_DENSITIES

    request = AnalysisRequest(
        base=Location.of(base),
        experts=tuple(Location.of(expert) for expert in experts),
        home=needed_home(options, "an analysis"),
        block_elements=block_elements_of(block_elements),
        densities=tuple(sorted({*COMMON_DENSITIES, *densities})),
    )
    if text is not None and importance_to is not None:
        from mergepipe.jobs.text_importance import write_text_importance

        n_threads, out = threads_of(options.threads), Path(importance_to)
        write_text_importance(request.base.local_path, request.experts, Location.of(text), out, n_threads)
    return run_analysis(request, engine_options(options), started=started, on_progress=on_progress)


@_with_options(PlanOptions)
def plan(
    recipe: str | Path | Mapping[str, object],
    budget: str | float | None = None,
    *,
    everything: bool = False,
    seed: int = 0,
    home: str | Path | None = None,
    allow_dropped: Sequence[str] = (),
    options: PlanOptions | None = None,
) -> Plan:
    """Decide what a merge reads under a budget, from the catalog, and from headers and indices of the inputs.

    Reads no tensor data.

    Args:
        recipe: see `check`.
        budget: bytes to be read from expert files at most (`4GiB`), or a share of what reading all would cost (`25%`,
            0.25); 0 reads nothing of the experts.
        everything: plan the full merge, without a budget: for `run_part`.
        seed: seed of the random operators and of the policy `random`.
        home: the catalog's home.
        allow_dropped: see `MergeOptions`.
        options: how the budget is spent; default `PlanOptions()`.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.plan import plan_recipe, plan_request

    options = options or PlanOptions()
    request = plan_request(budget, options, seed=seed, allow_dropped=allow_dropped, everything=everything)
    return plan_recipe(_recipe(recipe), request, home_of(home))


def store_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file, complete or not at all; only another plan is replaced.

    Raises:
        OutputError: `output.not-ours`, something else stands there.
        StorageError, NotFoundError: it cannot be written there.
    """
    from mergepipe.planning.plan import write_plan

    write_plan(plan, Path(path))


@_with_options(OutputOptions)
def run(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    force: bool = False,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Run a plan, given or stored, and publish the result at `out`; refused if an input changed since it was made.

    Args:
        force, on_progress: see `merge`.
        options: threads, memory and the catalog; of `OutputOptions` also what is written how.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing is left behind but what a later run can resume.
    """
    started = time.perf_counter()
    from mergepipe.runs.settings import cluster_request, output_place, run_settings

    output, value = options_as(OutputOptions, options, force=force or None), _plan_value(plan)
    place, settings = output_place(out, run_settings(output, value.seed), output.home)
    cluster = cluster_request(output)
    if cluster is not None:
        from mergepipe.jobs.merge_on_ray import run_plan_on_ray

        return run_plan_on_ray(value, place, cluster, settings, started=started, on_progress=on_progress)
    from mergepipe.jobs.merge import run_plan

    return run_plan(value, place, settings, started=started, on_progress=on_progress)


@_with_options(OutputOptions)
def run_part(
    plan: Plan | str | Path,
    out: str | Path,
    part: tuple[int, int] | None = None,
    *,
    finish: bool = False,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
) -> PartReport:
    """Make one part of a plan's output, on any machine that reaches the inputs and `out`.

    Parts can be made in any order, at once, and again: what is done is left as it is, what an interrupted worker lost
    is read again. Whoever completes the last one publishes the output; the same bytes as `run`.

    Args:
        part: (2, 7) is the second of seven parts: output files, dealt out by bytes. None only finishes.
        finish: says so too; not with a `part`, of which the last one finishes.
        options: as of `run`, without `resume`. `shard_bytes` must be the same for all parts. What the output says of
            its inputs follows the call that publishes it.

    Raises:
        MergePipeError: see `mergepipe.errors`; `parts.busy`, another process is making the part under the same budget.
    """
    started = time.perf_counter()
    output = options_as(OutputOptions, options)
    if output.executor != ExecutorName.THREADS:
        hint = "give one of the two: a cluster makes all parts"
        raise RecipeError.of("option.conflict", "--executor", "a part is made by this process", hint)
    if output.resume is not None:
        message = "a part that is run again takes what is done, and reads again what was lost"
        raise RecipeError.of("option.conflict", "--resume" if output.resume else "--no-resume", message, "leave it out")
    from mergepipe.jobs.parts import PartChoice, check_part
    from mergepipe.jobs.parts import run_part as run_one
    from mergepipe.runs.settings import output_place, run_settings

    if finish and part is not None:
        message = "finishes what others made, and a part is made: whoever makes the last one finishes"
        raise RecipeError.of("option.conflict", "--finish", message, "leave out --finish, or --part")
    number, n_parts = (None, 1) if part is None else check_part(*part)
    decided = _plan_value(plan)
    place, settings = output_place(out, run_settings(output, decided.seed), output.home)
    choice = PartChoice(number, n_parts, finishes=part is None)
    return run_one(decided, place, choice, settings, started=started, on_progress=on_progress)


def parts_status(plan: Plan | str | Path, out: str | Path, *, n_parts: int | None = None) -> PartsStatus:
    """Tell how far an output is that `run_part` makes; with `n_parts` also which of so many parts are missing.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.parts import parts_status as status_of

    if n_parts is not None:
        positive("--parts", n_parts)
    decided = _plan_value(plan)
    place = Location.of(out)
    return status_of(decided, place.local_path if place.is_local else place, n_parts)


def explain(subject: Plan | str | Path, *, tensor: str | None = None, home: str | Path | None = None) -> Explanation:
    """Tell which experts are where in a plan or a snapshot, and why; reads no tensor data.

    Args:
        subject: a plan, given or stored, or a snapshot: its directory, its sid, or first digits of it.
        tensor: a shell pattern (`model.layers.0.*`); the tensors it matches are explained block by block.
        home: the catalog's home, where sids are looked up.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.explain import explain_subject, explanation_of
    from mergepipe.planning.plan import Plan as PlanValue

    if isinstance(subject, PlanValue):
        return explanation_of(Path(), subject, None, tensor)
    return explain_subject(str(subject), tensor, home_of(home))


@_with_options(RunOptions)
def sweep(
    recipe: str | Path | Mapping[str, object],
    budgets: Sequence[str] = SWEEP_BUDGETS,
    *,
    seed: int = 0,
    work: str | Path | None = None,
    evaluate: str | None = None,
    allow_dropped: Sequence[str] = (),
    plan: PlanOptions | None = None,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
) -> SweepReport:
    """Merge in full and under each budget, and measure bytes, time, and what is lost; nothing is recorded.

    Each budget gives the bytes of the merge under it. What is lost is the distance from the full merge, with `random`
    beside `select`, but for samples, of which it tells nothing; with `evaluate` it is the loss too.

    Args:
        recipe: see `check`.
        budgets, seed: see `plan`.
        work: where outputs lie while they are measured, two at a time; default, where temporary files go.
        evaluate: a command, run without a shell, that prints a loss as the last number of its output. `{}` in it stands
            for the folder of a merge, which comes last without.
        allow_dropped: see `MergeOptions`.
        plan: how each budget is spent; default `PlanOptions()`.
        options: threads, memory, the catalog's home.
        on_progress: see `merge`.

    Raises:
        MergePipeError: see `mergepipe.errors`; no output is left behind.
    """
    if not budgets:
        raise RecipeError.of("option.invalid", "--budgets", "none is given", "give some, such as 10%,50%")
    from mergepipe.jobs.plan import plan_request
    from mergepipe.jobs.sweep import run_sweep, sweep_request
    from mergepipe.runs.settings import run_settings

    options = options or RunOptions()
    planned = plan_request("100%", plan or PlanOptions(), seed=seed, allow_dropped=allow_dropped)
    place = None if work is None else Path(work)
    request = sweep_request(budgets, planned, needed_home(options, "a sweep"), place, evaluate)
    settings = run_settings(options_as(OutputOptions, options), seed)
    settings = changed(settings, allow_dropped=planned.allow_dropped)
    return run_sweep(_recipe(recipe), request, settings, on_progress)


# --- packing experts ---


def pack(
    base: str | Path | Sequence[str | Path] | None,
    experts: Sequence[str | Path],
    out: str | Path,
    *,
    chain: int | None = None,
    strict: bool = False,
    threads: int | None = None,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> PackReport:
    """Pack each expert into a store `out/NAME`, bit for bit; one that is there already is left as it is.

    With `out` in a bucket the stores grow in `home`, which needs room for those of eight experts, and are uploaded when
    they are complete; each is visible there with its header, which is written last.

    All are read in one pass with the base, eight at a time. Every element is decoded again and compared while it is
    packed. An interrupted run is resumed.

    Of several bases each expert is packed relative to the nearest one, found from samples: 0.1 % of its bytes, or
    128 KiB. A base that is hardly an expert's is a notice to `on_progress` before anything is written.

    Memory: 100 MiB for reading, 16 MiB an expert, some 6 MiB a thread, whatever the size of the models.

    Args:
        base: full weights, or several candidates; a packed expert, too. None packs the models on their own (exponents
            coded, sign and mantissa as they are).
        experts: full weights in safetensors files, fine-tuned from `base`.
        chain: `experts` are checkpoints of one run in order: pack each relative to the one before as packed, and every
            `chain`-th relative to what the chain begins on. So many stores at most are decoded to restore one.
        strict: refuse a base that is hardly an expert's, or that was not told from another candidate.
        threads: encoding threads; default, one per processor.
        home: the catalog's home.
        on_progress: called from the calling thread with the bytes of experts that are packed.

    Raises:
        RecipeError: two experts of one name.
        MismatchError: `base.mismatch`, refused by `strict`.
        UnsupportedError: an expert that is no full weights in safetensors files.
        OutputError, ConflictError, StorageError: the store cannot go there, or an input changed. A store is published
            whole or not at all.
    """
    n_threads = threads_of(threads)  # before anything compiled is loaded
    from mergepipe.deltastore.checkpoint import MOST_DEPTH
    from mergepipe.jobs.pack import pack_chain, pack_experts

    models = [base] if isinstance(base, str | Path) else base
    bases = None if models is None else [Location.of(model) for model in models]
    paths = [Location.of(expert) for expert in experts]
    place = place_of_packs(out)
    if chain is None:
        return pack_experts(
            bases, paths, place, home_of(home), strict=strict, threads=n_threads, on_progress=on_progress
        )
    if bases is None or len(bases) != 1 or not place.is_local:
        message = "needs one base, named, and a folder of this machine"
        raise RecipeError.of("option.conflict", "--chain", message, "name what the first checkpoint is packed on")
    return pack_chain(
        bases[0], paths, place, home_of(home), length=positive("--chain", chain, MOST_DEPTH), strict=strict,
        threads=n_threads, on_progress=on_progress,
    )  # fmt: skip


def unpack(
    path: str | Path,
    out: str | Path,
    *,
    base: str | Path | None = None,
    threads: int | None = None,
    on_progress: ProgressCallback | None = None,
) -> UnpackReport:
    """Write the files that the store in `path` was made from into the new directory `out`, byte for byte.

    Every block is compared with the digest of the original.

    Args:
        base: where the base is now, if not where it was.
        threads: decoding threads; default, one per processor.
        on_progress: called from the calling thread with the bytes of tensors that are restored.

    Raises:
        NotFoundError: the store, or its base.
        MismatchError: another base.
        CorruptError: the store is damaged.
        OutputError, StorageError: the files cannot go there; nothing was published.
    """
    n_threads = threads_of(threads)  # before anything compiled is loaded
    from mergepipe.jobs.unpack import unpack_store

    place = None if base is None else Location.of(base)
    return unpack_store(Location.of(path), Path(out), base=place, threads=n_threads, on_progress=on_progress)


def load_file(
    path: str | Path,
    *,
    base: str | Path | None = None,
    framework: str = "numpy",
    threads: int | None = None,
) -> LoadedTensors:
    """Open a packed expert, or any checkpoint that merges read, as a mapping from names to tensors.

    A tensor is read when it is asked for, and not kept. Those of a packed expert are decoded in memory with the base,
    which must be there; nothing is written.

    Args:
        path: a packed expert, a model's directory, one file of weights, a snapshot; here, in a bucket or on the Hub.
        base: where the base of a packed expert is now, if not where it was.
        framework: `numpy`: arrays, bfloat16 and float8 as float32, which holds their values exactly; `torch`: tensors
            on the host in the dtype that is stored.
        threads: decoding threads; default, one per processor.

    Raises:
        RecipeError: another framework, or a base for what needs none.
        NotFoundError: the model, or the base of a packed expert.
        MismatchError: another base.
        UnsupportedError: an adapter or differences from a base: merge them first.
        CorruptError, StorageError: from opening it.
    """
    n_threads = threads_of(threads)  # before anything compiled is loaded
    from mergepipe.jobs.load import load_tensors

    place = None if base is None else Location.of(base)
    return load_tensors(Location.of(path), base=place, framework=framework, threads=n_threads)


@_with_options(OutputOptions)
def apply_lora(
    base: str | Path,
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    weights: Sequence[float] = (),
    dtype: str | None = None,
    strict: bool = False,
    allow_unapplied: Sequence[str] = (),
    options: OutputOptions | None = None,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Add LoRA adapters to `base` and publish the result at `out`, complete or not at all: a merge of `base+adapter`.

    One adapter at weight 1 gives what PEFT's `merge_and_unload` gives; several, or other weights, the base plus the
    weighted sum of what each changes. Sums are taken in float32 and rounded once. Memory: 512 MiB of buffers, or
    `memory_bytes` of the options.

    Args:
        weights: one for each adapter; default 1.
        dtype: of the output; default that of the base, tensor by tensor.
        strict: refuse what has a notice.
        allow_unapplied: patterns (`*`, `?`, `[...]`) of modules that an adapter may have and the base not.
        options: threads, memory, shards, publishing.

    Raises:
        MismatchError: an adapter changes what the base lacks, or two store one module in full.
        MergePipeError: see `mergepipe.errors`; nothing is left behind but what a later run can resume.
    """
    from mergepipe.runs.lora.apply import apply_recipe

    recipe = apply_recipe(str(base), [str(adapter) for adapter in adapters], weights, dtype)
    output = options_as(OutputOptions, options)
    merging = options_as(
        MergeOptions, output, strict=strict, allow_dropped=tuple(allow_unapplied),
        memory_bytes=output.memory_bytes or min(APPLY_MEMORY_BYTES, default_memory_bytes()),
    )  # fmt: skip
    return merge(recipe, out, options=merging, on_progress=on_progress)


def merge_lora(
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    method: str = "cat",
    rank: int | None = None,
    weights: Sequence[float] = (),
    density: float | None = None,
    seed: int = 0,
) -> MergeLoraReport:
    """Merge LoRA adapters of one base into one adapter in the new directory `out`, as PEFT reads it; no base is read.

    `cat` is exact: the factors stand side by side, and ranks add up. `svd` is the best approximation of the same sum of
    a rank. Any operator of recipes (`linear`, `ties`, `dare_ties`, ...) merges the cores of the deltas in bases that
    all adapters share, which loses nothing of a delta, and what comes out is cut to `rank`, if there is one.

    Args:
        method: `cat`, `svd`, or the name of an operator.
        rank: the largest rank of a module; of operators by default all that the result has.
        weights: one for each adapter; default 1.
        density: of operators that trim.
        seed: of operators that draw.

    Raises:
        RecipeError: options that do not fit together.
        MismatchError: adapters of different bases, or two that store one module in full.
        UnsupportedError: DoRA, whose delta depends on the base.
        MergePipeError: see `mergepipe.errors`; nothing is written.
    """
    if rank is not None:
        positive("--rank", rank)
    from mergepipe.jobs.merge_lora import MergeLoraRequest, check_request, merge_lora_adapters

    request = MergeLoraRequest(method, rank, tuple(weights) or (1.0,) * len(adapters), density, seed)
    check_request(request, len(adapters))
    return merge_lora_adapters([str(adapter) for adapter in adapters], Path(out), request)


def extract_lora(
    base: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    rank: int | None = None,
    energy: float | None = None,
    save_modules: bool = False,
    base_model_id: str | None = None,
    on_progress: ProgressCallback | None = None,
) -> ExtractLoraReport:
    """Write the LoRA adapter that brings `base` closest to `model` into the new directory `out`, as PEFT reads it.

    Every matrix of the difference is decomposed by itself (truncated SVD) and written before the next is read. The
    report names the error that is left, tensor by tensor, and what a LoRA cannot hold.

    Args:
        rank: the largest rank of a matrix.
        energy: the share of each matrix's square sum that is kept, in (0, 1]; the ranks follow. One of the two is
            needed; with both, `rank` is the limit.
        save_modules: store embeddings, output heads and norms that changed in full (`modules_to_save`).
        base_model_id: the base on the Hub; known without for models of the Hub and its local cache.
        on_progress: called from the calling thread with the bytes of tensors that are done.

    Raises:
        RecipeError: a rank or an energy out of its range, or neither.
        MismatchError: nothing differs.
        MergePipeError: see `mergepipe.errors`.
    """
    if rank is None and energy is None:
        raise RecipeError.of(
            "option.missing", "--rank", "neither a rank nor an energy is given", "give --rank 32 or --energy 0.9"
        )
    if energy is not None and not 0.0 < energy <= 1.0:
        raise RecipeError.of("option.invalid", "--energy", f"{energy:g} was given", "give a share in (0, 1]")
    if rank is not None:
        positive("--rank", rank)
    from mergepipe.jobs.extract_lora import ExtractRequest, extract_lora_adapter
    from mergepipe.runs.model_card import parse_base_model_ids

    stated = parse_base_model_ids(() if base_model_id is None else (base_model_id,)).of_merge
    request = ExtractRequest(rank, energy, save_modules, stated[0] if stated else None)
    return extract_lora_adapter(Location.of(base), Location.of(model), Path(out), request, on_progress=on_progress)


# --- looking after snapshots ---


def list_snapshots(
    *,
    contained: str | Path | None = None,
    operator: str | None = None,
    since: date | None = None,
    until: date | None = None,
    home: str | Path | None = None,
) -> tuple[SnapshotReport, ...]:
    """List the snapshots that the catalog knows, newest first.

    Args:
        contained: only those that this model is in, directly or through snapshots that they were made from: its path,
            that of a file in it, its name, its address on the Hub (`hf://org/name`, with or without a commit), or seven
            or more first digits of a commit, a content digest or a sid.
        operator: only those that this operator made.
        since, until: only those that were made between these days (UTC), both included.
        home: the catalog's home.
    """
    from mergepipe.runs import snapshots

    reference = None if contained is None else str(contained)
    return snapshots.list_snapshots(home_of(home), contained=reference, operator=operator, since=since, until=until)


def show(snapshot: str | Path, *, home: str | Path | None = None) -> SnapshotReport:
    """Look a snapshot up by its directory, its sid, or at least four first digits of it.

    Raises:
        NotFoundError, RecipeError: no snapshot is known by that name, or several are.
    """
    from mergepipe.runs.snapshots import show_snapshot

    return show_snapshot(str(snapshot), home_of(home))


def lineage(snapshot: str | Path, *, down: bool = False, home: str | Path | None = None) -> tuple[LineageNode, ...]:
    """Trace all that went into a snapshot through all generations: a tree in preorder. Raises as `show` does.

    Args:
        down: trace what was made from the snapshot instead. The bytes of a node are those that it read of its parent.
        home: the catalog's home.
    """
    from mergepipe.runs.snapshots import trace_lineage

    return trace_lineage(str(snapshot), home_of(home), down=down)


def diff(
    a: str | Path,
    b: str | Path,
    *,
    reads_tensors: bool = True,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> SnapshotDiff:
    """Compare two snapshots: recipes, settings, inputs, coverage, and tensors with the norms of what differs.

    Args:
        a, b: snapshots: their directories, sids, or first digits of them.
        reads_tensors: work out the norms; without, only manifests are read.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.diff import compare_snapshots

    first, second = _snapshot_path(a, home), _snapshot_path(b, home)
    return compare_snapshots(first, second, reads_tensors=reads_tensors, on_progress=on_progress)


@_with_options(RunOptions)
def verify(
    snapshot: str | Path,
    *,
    deep_fraction: float = 0.0,
    base: str | Path | None = None,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
) -> VerifyReport:
    """Read a whole snapshot and compare every block, digest and file with its manifest; damage is in the report.

    A packed expert is decoded, and every block compared with the digest of the original.

    Args:
        snapshot: its directory, where it is in a bucket or repository, its sid, or first digits of it.
        deep_fraction: make tensors with this share of the bytes again from the inputs and compare.
        base: where the base of a packed expert is now, if not where it was.
        options: threads, memory, the catalog's home, where sids are looked up.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing could be verified.
    """
    started = time.perf_counter()
    options = options or RunOptions()
    if not 0.0 <= deep_fraction <= 1.0:
        raise LimitError.of(
            "option.out-of-range", "--sample", f"{deep_fraction:g} was given", "give a share from 0 to 1"
        )
    threads = threads_of(options.threads)  # before anything compiled is loaded
    pack, place = _pack_location(snapshot), None if base is None else Location.of(base)
    if pack is not None:
        from mergepipe.jobs.unpack import verify_pack

        return verify_pack(pack, base=place, threads=threads, started=started, on_progress=on_progress)
    if base is not None:
        raise RecipeError.of("option.conflict", "--base", f"{snapshot} is no packed expert", "leave it out")
    from mergepipe.jobs.verify import verify_snapshot

    engine, path = engine_options(options), _snapshot_location(snapshot, options.home)
    return verify_snapshot(path, engine, deep_fraction, catalog_home(options), started=started, on_progress=on_progress)


@_with_options(RunOptions)
def repair(
    snapshot: str | Path, *, options: RunOptions | None = None, on_progress: ProgressCallback | None = None
) -> RepairReport:
    """Make what is damaged in a snapshot again from its inputs, and write exactly that.

    Args:
        snapshot, options: see `verify`.

    Raises:
        MergePipeError: see `mergepipe.errors`; something could not be made again.
    """
    started = time.perf_counter()
    options = options or RunOptions()
    from mergepipe.jobs.repair import repair_snapshot

    engine, path = engine_options(options), _snapshot_path(snapshot, options.home)
    return repair_snapshot(path, engine, catalog_home(options), started=started, on_progress=on_progress)


@_with_options(RunOptions)
def replay(
    snapshot: str | Path,
    out: str | Path,
    *,
    force: bool = False,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
) -> MergeReport:
    """Make a snapshot again at `out` from its manifest alone: the same bytes, or an error that says why not.

    Args:
        snapshot: see `verify`.
        force, on_progress: see `merge`.
        options: threads, memory and the catalog.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing was published.
    """
    started = time.perf_counter()
    from mergepipe.jobs.replay import replay_snapshot
    from mergepipe.runs.settings import output_place, run_settings

    output = options_as(OutputOptions, options, force=force or None)
    place, settings = output_place(out, run_settings(output, 0), output.home)
    path = _snapshot_location(snapshot, output.home)
    return replay_snapshot(path, place, settings, started=started, on_progress=on_progress)


def push(
    snapshot: str | Path,
    destination: str,
    *,
    create: bool = False,
    private: bool = False,
    message: str | None = None,
    home: str | Path | None = None,
    on_progress: ProgressCallback | None = None,
) -> PushReport:
    """Publish a snapshot or a packed expert on the Hub or in a bucket, visible there whole or not at all.

    Args:
        snapshot: its directory, or the sid of a snapshot, or first digits of it.
        destination: `hf://org/name[@branch][/folder]`, `s3://bucket/prefix`, `gs://` or `az://`; `org/name` is one of
            the Hub unless there is such a path.
        create: create the repository on the Hub, unless it is there; `private` as a private one.
        message: the message of the commit.
        home: the catalog's home, where sids are looked up.
        on_progress: called from the calling thread after each file.

    Raises:
        MergePipeError: see `mergepipe.errors`; nothing was published, and what is uploaded stays for the next try.
    """
    started = time.perf_counter()
    if private and not create:
        raise RecipeError.of("option.conflict", "--private", "it has no meaning by itself", "add --create")
    from mergepipe.jobs.push import PushRequest, push_destination, push_snapshot

    pack, request = _pack_location(snapshot), PushRequest(create, private, message or "")
    path = _snapshot_path(snapshot, home) if pack is None else pack.local_path
    return push_snapshot(path, push_destination(destination), request, started=started, on_progress=on_progress)


def gc(roots: Sequence[str | Path] = (), *, dry_run: bool = False, home: str | Path | None = None) -> GcReport:
    """Remove staging of dead runs, beside known snapshots and under `roots`, and catalog rows of what is gone.

    A root may be a prefix of a bucket: what unfinished uploads left there is removed.

    Raises:
        MergePipeError: see `mergepipe.errors`.
    """
    from mergepipe.jobs.gc import collect_garbage

    return collect_garbage(home_of(home), [Location.of(root) for root in roots], dry_run=dry_run)


# --- the catalog ---


def catalog_stats(*, home: str | Path | None = None) -> CatalogStats:
    """Count what the catalog holds.

    Raises:
        NotFoundError: there is none.
    """
    from mergepipe.runs.snapshots import catalog_statistics

    return catalog_statistics(home_of(home))


def rebuild_catalog(roots: Sequence[str | Path] = (), *, home: str | Path | None = None) -> RebuildReport:
    """Make the catalog again from the manifests under `roots` and at known paths.

    Raises:
        NotFoundError: a root does not exist.
        MergePipeError: the catalog cannot be used or replaced.
    """
    from mergepipe.catalog.rebuild import rebuild

    return rebuild(home_of(home), [Path(root) for root in roots])


def _snapshot_path(snapshot: str | Path, home: str | Path | None) -> Path:
    from mergepipe.runs.snapshots import find_snapshot_path

    return find_snapshot_path(str(snapshot), home_of(home))


def _pack_location(snapshot: str | Path) -> Location | None:
    """Return where a packed expert is; None if it is something else."""
    from mergepipe.checkpoints.packed import is_packed
    from mergepipe.storage.stores import Stores

    location, store = Location.of(snapshot), Stores()
    return location if is_packed(store, location) else None


def _snapshot_location(snapshot: str | Path, home: str | Path | None) -> Location:
    from mergepipe.runs.snapshots import find_snapshot

    return find_snapshot(str(snapshot), home_of(home))


def _plan_value(plan: Plan | str | Path) -> Plan:
    """Return a plan as it is, or read the stored one."""
    from mergepipe.jobs.plan import read_plan
    from mergepipe.planning.plan import Plan as PlanValue
    from mergepipe.storage.stores import Stores

    return plan if isinstance(plan, PlanValue) else read_plan(Stores(), Location.of(plan))


def _recipe(recipe: str | Path | Mapping[str, object]) -> Location | RecipeText:
    """Return where a recipe is, or the text of one that is given as a mapping."""
    if not isinstance(recipe, Mapping):
        return Location.of(recipe)
    from mergepipe.recipes.yaml_source import recipe_text

    return recipe_text(recipe, Location.local(Path.cwd()))
