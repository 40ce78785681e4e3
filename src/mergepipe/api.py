"""The public calls: each makes the value of its options, runs one job, and returns a report.

Making models: `check`, `merge`.
Under a budget: `analyze`, `plan`, `store_plan`, `run`, `explain`, `sweep`, `search`.
On many machines: `run_part`, `parts_status`.
Packing experts: `pack`, `unpack`. Adapters: `apply_lora`, `merge_lora`, `extract_lora`. Reading models: `load_file`.
Merges that are not written: `merged_tensors`, `load_model`, `merge_into`.
Looking after snapshots: `list_snapshots`, `show`, `lineage`, `diff`, `verify`, `repair`, `replay`,
`push`, `gc`.
The catalog: `catalog_stats`, `rebuild_catalog`.

A call with `**fields` takes each field of its options as a keyword, too; a keyword counts more than the field of the
same name in `options`. `mergepipe.options` says what each does. `on_progress` is called about ten times a second, from
the calling thread. A `recipe` is a YAML file, or its content as a mapping, with paths relative to the working
directory; `home` is the catalog's home, where sids are looked up. Every call raises `MergePipeError`, with all problems
that were found, see `mergepipe.errors`, and leaves nothing behind but what a later run can resume.

Jobs are imported when they are called, so that importing this module costs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mergepipe.core.units import positive
from mergepipe.errors import MergePipeError, RecipeError
from mergepipe.options import (
    APPLY_MEMORY_BYTES,
    SWEEP_BUDGETS,
    AnalyzeOptions,
    ApplyLoraOptions,
    CheckOptions,
    ExecutorName,
    ExtractLoraOptions,
    MergeLoraOptions,
    MergeOptions,
    OutputOptions,
    PackOptions,
    PlanOptions,
    PushOptions,
    RunOptions,
    SearchOptions,
    SweepOptions,
    UnpackOptions,
    VerifyOptions,
    catalog_home,
    default_memory_bytes,
    engine_options,
    home_of,
    place_of_packs,
    threads_of,
)
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from datetime import date

    from mergepipe.catalog.snapshots import CatalogStats, LineageNode, RebuildReport
    from mergepipe.core.flags import Options
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
        SearchReport,
        SnapshotDiff,
        SnapshotReport,
        SweepReport,
        UnpackReport,
        VerifyReport,
    )

_RECIPE_LINE = re.compile(r"^recipe:\d+ \S+?(: |$)")


# --- making models ---


def check(
    recipe: str | Path | Mapping[str, object], *, options: CheckOptions | None = None, **fields: Any
) -> CheckReport:
    """Validate a recipe and its inputs without reading any tensor data."""
    made = CheckOptions.of(options, fields)
    from mergepipe.jobs.plan import check_recipe
    from mergepipe.recipes.fields import Strictness

    return check_recipe(_recipe(recipe), made.shard_bytes, made.allow_dropped, Strictness(made.strict, made.lenient))


def merge(
    recipe: str | Path | Mapping[str, object],
    out: str | Path,
    *,
    options: OutputOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> MergeReport:
    """Merge as the recipe says and publish the result at `out`, complete or not at all.

    `out` is a folder, one file (its name ends in .safetensors or .gguf, and its record is a folder beside it), a prefix
    of a bucket (`s3://bucket/prefix`, `gs://`, `az://`), which must hold nothing yet, or a repository of the Hub
    (`hf://org/name`). Without a `budget` all experts are read in full. With one, a plan is made and run. With a
    `target_loss` budgets are tried until it is met; `tried` of the report tells what each read and gave.

    Args:
        options: what is merged and how; the fields of `MergeOptions` are keywords, too: `budget="25%"`, `seed=7`.
    """
    made = MergeOptions.of(options, fields)
    from mergepipe.runs.work import merge_settings

    settings = merge_settings(made, out, on_progress)
    on_cluster = made.executor == ExecutorName.RAY
    if made.budget is None and made.target_loss is None and not on_cluster:
        from mergepipe.jobs.merge import run_merge

        return run_merge(_recipe(recipe), settings)
    from mergepipe.jobs.evaluate import TARGET_BUDGETS, merge_to_target, parse_evaluation
    from mergepipe.jobs.merge import run_budgeted
    from mergepipe.jobs.plan import plan_request

    first_budget = made.budget if made.target_loss is None else TARGET_BUDGETS[0]
    request = plan_request(first_budget, made, everything=first_budget is None)
    if made.target_loss is not None and made.evaluate is not None:
        if settings.destination is not None:
            message, hint = "looks at each merge in a folder of this machine", "merge into a folder"
            raise RecipeError.of("option.conflict", "--target-loss", message, hint)
        return merge_to_target(_recipe(recipe), request, settings, parse_evaluation(made.evaluate), made.target_loss)
    if on_cluster:
        from mergepipe.jobs.merge_on_ray import run_merge_on_ray

        return run_merge_on_ray(_recipe(recipe), request, made, settings)
    return run_budgeted(_recipe(recipe), request, settings)


# --- planning under a budget ---


def analyze(
    base: str | Path,
    experts: Sequence[str | Path],
    *,
    options: Options | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> AnalyzeReport:
    """Read experts once against their base, and keep for each a file of what plans are made from.

    The files lie in the home folder and are named by the contents of expert and base: a copy of one in the home folder
    of another machine, or next to the model as `mergepipe.stats`, serves there. What is on record is not read again.

    Args:
        options: `AnalyzeOptions`: what is measured, threads, memory, the home folder.
    """
    made = AnalyzeOptions.of(options, fields)
    threads_of(made.threads)  # before anything compiled is loaded
    from mergepipe.jobs.analyze import run_analysis

    return run_analysis(Location.of(base), [Location.of(expert) for expert in experts], made, on_progress)


def plan(
    recipe: str | Path | Mapping[str, object],
    budget: str | float | None = None,
    *,
    everything: bool = False,
    options: PlanOptions | None = None,
    **fields: Any,
) -> Plan:
    """Decide what a merge reads under a budget, from statistics, and from headers and indices of the inputs.

    Reads no tensor data.

    Args:
        budget: bytes to be read from expert files at most (`4GiB`), or a share of what reading all would cost (`25%`,
            0.25); 0 reads nothing of the experts.
        everything: plan the full merge, without a budget: for `run_part`.
        options: how the budget is spent.
    """
    made = PlanOptions.of(options, fields)
    from mergepipe.jobs.plan import plan_recipe, plan_request

    request = plan_request(budget, made, everything=everything)
    return plan_recipe(_recipe(recipe), request, home_of(made.home))


def store_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan to a file, complete or not at all; only another plan is replaced.

    Raises:
        OutputError: `output.not-ours`, something else stands there.
        StorageError, NotFoundError: it cannot be written there.
    """
    from mergepipe.planning.plan import write_plan

    write_plan(plan, Path(path))


def run(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> MergeReport:
    """Run a plan, given or stored, and publish the result at `out`; refused if an input changed since it was made.

    Args:
        options: `OutputOptions`: threads, memory and the catalog, and what is written how.
    """
    made, decided = OutputOptions.of(options, fields), _plan_value(plan)
    from mergepipe.runs.work import run_settings

    settings = run_settings(made, decided.seed, out, on_progress)
    if made.executor == ExecutorName.RAY:
        from mergepipe.jobs.merge_on_ray import run_plan_on_ray

        return run_plan_on_ray(decided, made, settings)
    from mergepipe.jobs.merge import run_plan

    return run_plan(decided, settings)


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
    from mergepipe.jobs.parts import PartChoice, check_part
    from mergepipe.jobs.parts import run_part as run_one
    from mergepipe.runs.work import run_settings

    number, n_parts = (None, 1) if part is None else check_part(*part)
    decided = _plan_value(plan)
    settings = run_settings(made, decided.seed, out, on_progress)
    return run_one(decided, PartChoice(number, n_parts, finishes=part is None), settings)


def parts_status(plan: Plan | str | Path, out: str | Path, *, n_parts: int | None = None) -> PartsStatus:
    """Return the progress of an output that `run_part` makes; with `n_parts` also the parts that are missing."""
    from mergepipe.jobs.parts import parts_status as status_of

    if n_parts is not None:
        positive("--parts", n_parts)
    decided = _plan_value(plan)
    place = Location.of(out)
    return status_of(decided, place.local_path if place.is_local else place, n_parts)


def explain(
    subject: Plan | str | Path,
    *,
    tensor: str | None = None,
    masks: str | Path | None = None,
    home: str | Path | None = None,
) -> Explanation:
    """Explain which experts contribute to which blocks of a plan or a snapshot, and why; reads no tensor data.

    Args:
        subject: a plan, given or stored, or a snapshot: its directory, its sid, or first digits of it.
        tensor: a shell pattern (`model.layers.0.*`); the tensors it matches are explained block by block.
        masks: of a snapshot: the directory to create for a mask of each expert, which the merged model and the base
            restore it with. This reads the merged weights, the base's and the experts'.
    """
    from mergepipe.jobs.explain import explain_subject, explanation_of, with_masks
    from mergepipe.planning.plan import Plan as PlanValue

    if isinstance(subject, PlanValue):
        explained = explanation_of(Path(), subject, None, tensor)
    else:
        explained = explain_subject(str(subject), tensor, home_of(home))
    return explained if masks is None else with_masks(explained, Path(masks), home_of(home))


def sweep(
    recipe: str | Path | Mapping[str, object],
    budgets: Sequence[str] = SWEEP_BUDGETS,
    *,
    options: Options | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> SweepReport:
    """Merge in full and under each budget, and measure bytes, time, and what is lost; nothing is recorded.

    Each budget gives the bytes of the merge under it. What is lost is the distance from the full merge, with `random`
    as a second policy, but for samples, of which it tells nothing; with `evaluate` it is the loss too.

    Args:
        options: `SweepOptions`: how each budget is spent, what is measured, threads, memory, the home folder.
    """
    made = SweepOptions.of(options, fields)
    if not budgets:
        raise RecipeError.of("option.invalid", "--budgets", "none is given", "give some, such as 10%,50%")
    from mergepipe.jobs.sweep import run_sweep

    return run_sweep(_recipe(recipe), budgets, made, on_progress)


def search(
    recipe: str | Path | Mapping[str, object],
    out: str | Path,
    evaluate: Callable[[Any], float] | str | None = None,
    *,
    loads_models: bool = False,
    options: SearchOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> SearchReport:
    """Search the values of a recipe that are written `{search: [low, high]}` or `{search: [a, b, c]}`.

    Each trial is a merge, evaluated by the function, which gets its folder and returns a loss, or by the command (see
    `SearchOptions`). With `loads_models` the function gets a model of transformers in the place of a folder, as
    `load_model` makes it, and trials write nothing. A trial whose merge or evaluation fails is marked, and the search
    goes on. The study lies beside the output, in a file of its name and `.study`; the best merge is published as `out`.

    Raises:
        RecipeError: nothing is to be searched, or options that do not fit together.
        OutputError: there is a study of an earlier search, or of another recipe.
        LimitError: every trial fails.
        UnsupportedError: optuna is not installed.
    """
    if isinstance(evaluate, str):
        evaluate, fields = None, {**fields, "evaluate": evaluate}
    made = SearchOptions.of(options, fields)
    from mergepipe.jobs.search import run_search

    return run_search(_recipe(recipe), Path(out), evaluate, made, on_progress, loads_models=loads_models)


# --- packing experts ---


def pack(
    base: str | Path | Sequence[str | Path] | None,
    experts: Sequence[str | Path],
    out: str | Path,
    *,
    options: PackOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> PackReport:
    """Pack each expert into a store `out/NAME`, bit for bit; one that is there already is left as it is.

    With `out` in a bucket the stores grow in `home`, which needs room for those of eight experts, and are uploaded when
    they are complete; each is visible there with its header, which is written last.

    All are read in one pass with the base, eight at a time. Every element is decoded again and compared while it is
    packed. An interrupted run is resumed. `on_progress` tells the bytes of experts that are packed.

    Of several bases each expert is packed relative to the nearest one, found from samples: 0.1 % of its bytes, or
    128 KiB. A base that is hardly an expert's is a notice to `on_progress` before anything is written.

    Memory: 100 MiB for reading and as much for what is encoded, 8 MiB an expert, some 6 MiB a thread, whatever the size
    of the models.

    Args:
        base: full weights, or several candidates; a packed expert, too. None packs the models on their own (exponents
            coded, sign and mantissa as they are).
        experts: full weights in safetensors files, fine-tuned from `base`.

    Raises:
        RecipeError: two experts of one name.
        MismatchError: `base.mismatch`, refused by `strict`.
        UnsupportedError: an expert that is no full weights in safetensors files.
        OutputError, ConflictError, StorageError: the store cannot go there, or an input changed. A store is published
            whole or not at all.
    """
    made = PackOptions.of(options, fields)
    threads_of(made.threads)  # before anything compiled is loaded
    from mergepipe.jobs.pack import pack_chain, pack_experts

    models = [base] if isinstance(base, str | Path) else base
    bases = None if models is None else [Location.of(model) for model in models]
    paths = [Location.of(expert) for expert in experts]
    pack_models = pack_experts if made.chain is None else pack_chain
    return pack_models(bases, paths, place_of_packs(out), made, on_progress)


def unpack(
    path: str | Path,
    out: str | Path,
    *,
    options: UnpackOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> UnpackReport:
    """Write the files that the store in `path` was made from into the new directory `out`, byte for byte.

    Every block is compared with the digest of the original. `on_progress` tells the bytes of tensors that are restored.

    Raises:
        NotFoundError: the store, or its base.
        MismatchError: another base.
        CorruptError: the store is damaged.
        OutputError, StorageError: the files cannot go there; nothing was published.
    """
    made = UnpackOptions.of(options, fields)
    n_threads = threads_of(made.threads)  # before anything compiled is loaded
    from mergepipe.jobs.pack import unpack_store

    base = _location(made.base)
    return unpack_store(Location.of(path), Path(out), base=base, threads=n_threads, on_progress=on_progress)


def load_file(
    path: str | Path, *, base: str | Path | None = None, framework: str = "numpy", threads: int | None = None
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

    return load_tensors(Location.of(path), base=_location(base), framework=framework, threads=n_threads)


def merged_tensors(
    recipe: str | Path | Mapping[str, object],
    *,
    framework: str = "numpy",
    only: Collection[str] | None = None,
    options: OutputOptions | None = None,
    **fields: Any,
) -> Iterator[tuple[str, Any]]:
    """Yield what `merge` would write, `(name, tensor)` in the order of its files, bit for bit; nothing is written.

    The inputs are opened and the budget is planned when it is called, tensors are made while they are taken. Memory:
    that of a merge (`memory`), and three tensors. `load_weights` of vLLM and SGLang takes such an iterator, with
    `framework="torch"`.

    Args:
        only: names of the tensors that are wanted; default, all.

    Raises:
        MergePipeError: as `merge`; of what is found while tensors are made, from the iterator.
    """
    from mergepipe.jobs.load import tensors_of
    from mergepipe.jobs.merged_tensors import OpenedMerge

    tensors_of(framework)
    merge = OpenedMerge(_recipe(recipe), MergeOptions.of(options, fields))

    def made() -> Iterator[tuple[str, Any]]:
        with merge:
            yield from merge.tensors(framework, only)

    return made()


def load_model(
    recipe: str | Path | Mapping[str, object],
    *,
    torch_dtype: Any = None,
    device_map: Any = None,
    options: OutputOptions | None = None,
    **fields: Any,
) -> Any:
    """Return a model of transformers with the merged tensors, as `from_pretrained` of a written merge would.

    Args:
        torch_dtype: the parameters' dtype; default, the merge's.
        device_map: as of `from_pretrained`; default, the processor.

    Raises:
        UnsupportedError: `extra.missing` without torch and transformers; `model.unsupported`, an architecture that
            transformers does not have. Code of a model is not run.
    """
    from mergepipe.jobs.merged_tensors import OpenedMerge
    from mergepipe.jobs.merged_tensors import load_model as load

    with OpenedMerge(_recipe(recipe), MergeOptions.of(options, fields)) as merge:
        return load(merge, torch_dtype, device_map)


def merge_into(
    model: Any,
    recipe: str | Path | Mapping[str, object],
    *,
    only: Collection[str] | None = None,
    changed_from: str | Path | Mapping[str, object] | None = None,
    options: OutputOptions | None = None,
    **fields: Any,
) -> int:
    """Write merged tensors into the parameters of a torch module that have the same names; return how many.

    Args:
        only: names of the tensors to write; default, all.
        changed_from: the recipe that the model holds: only tensors that `recipe` makes otherwise are written.
        options: as of `merge`, by keywords too; the same for both recipes.

    Raises:
        MismatchError: a parameter is missing, or has another shape.
        MergePipeError: as `merge`. Tensors that were written until then stay.
    """
    made = MergeOptions.of(options, fields)
    from mergepipe.jobs.merged_tensors import OpenedMerge, changed_names
    from mergepipe.jobs.merged_tensors import merge_into as write

    with OpenedMerge(_recipe(recipe), made) as merge:
        if changed_from is not None:
            with OpenedMerge(_recipe(changed_from), made) as before:
                changed = changed_names(before, merge)
            only = changed if only is None else changed & set(only)
        return write(model, merge, only)


# --- adapters ---


def apply_lora(
    base: str | Path,
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    options: OutputOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> MergeReport:
    """Add LoRA adapters to `base` and publish the result at `out`, complete or not at all: a merge of `base+adapter`.

    One adapter at weight 1 gives what PEFT's `merge_and_unload` gives; several, or other weights, the base plus the
    weighted sum of what each changes. Sums are taken in float32 and rounded once. Memory: 512 MiB of buffers, or
    `memory_bytes` of the options.

    Args:
        options: `ApplyLoraOptions`: weights, dtype, threads, memory, shards, publishing.

    Raises:
        MismatchError: an adapter changes what the base lacks, or two store one module in full.
    """
    made = ApplyLoraOptions.of(options, fields)
    from mergepipe.runs.adapters import apply_recipe

    recipe = apply_recipe(str(base), [str(adapter) for adapter in adapters], made.weights, made.dtype)
    memory_bytes = made.memory_bytes or min(APPLY_MEMORY_BYTES, default_memory_bytes())
    merging = made.common(MergeOptions, allow_dropped=made.allow_unapplied, memory_bytes=memory_bytes)
    try:
        return merge(recipe, out, options=merging, on_progress=on_progress)
    except MergePipeError as error:  # the lines of a recipe that nobody wrote tell nothing
        problems = (replace(problem, where=_RECIPE_LINE.sub("", problem.where)) for problem in error.problems)
        raise type(error)(*problems) from error


def merge_lora(
    adapters: Sequence[str | Path], out: str | Path, *, options: MergeLoraOptions | None = None, **fields: Any
) -> MergeLoraReport:
    """Merge LoRA adapters of one base into one adapter in the new directory `out`, as PEFT reads it; no base is read.

    `cat` is exact: the factors stand side by side, and ranks add up. `svd` is the best approximation of the same sum of
    a rank. Any operator of recipes (`linear`, `ties`, `dare_ties`, ...) merges the cores of the deltas in bases that
    all adapters share, which loses nothing of a delta, and what comes out is cut to `rank`, if there is one.
    In place of the adapters stands a recipe (`.yml`) of such an operator, with `output: adapter`: its filters and
    gradients hold for the modules of the adapters.

    Raises:
        RecipeError: options that do not fit together.
        MismatchError: adapters of different bases, or two that store one module in full.
        UnsupportedError: DoRA, whose delta depends on the base.
    """
    made = MergeLoraOptions.of(options, fields)
    from mergepipe.jobs.merge_lora import merge_lora_adapters

    return merge_lora_adapters([str(adapter) for adapter in adapters], Path(out), made)


def extract_lora(
    base: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    options: ExtractLoraOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> ExtractLoraReport:
    """Write the LoRA adapter that brings `base` closest to `model` into the new directory `out`, as PEFT reads it.

    Every matrix of the difference is decomposed by itself (truncated SVD) and written before the next is read. The
    report names the error that is left, tensor by tensor, and what a LoRA cannot hold. `on_progress` tells the bytes
    of tensors that are done.

    Raises:
        RecipeError: a rank or an energy out of its range, or neither.
        MismatchError: nothing differs.
    """
    made = ExtractLoraOptions.of(options, fields)
    from mergepipe.jobs.extract_lora import extract_lora_adapter

    return extract_lora_adapter(Location.of(base), Location.of(model), Path(out), made, on_progress=on_progress)


# --- looking after snapshots ---


def list_snapshots(
    *,
    contained: str | Path | None = None,
    operator: str | None = None,
    since: date | None = None,
    home: str | Path | None = None,
) -> tuple[SnapshotReport, ...]:
    """List the snapshots that the catalog knows, newest first.

    Args:
        contained: only those that this model is in, directly or through snapshots that they were made from: its path,
            that of a file in it, its name, its address on the Hub (`hf://org/name`, with or without a commit), or seven
            or more first digits of a commit, a content digest or a sid.
        operator: only those that this operator made.
        since: only those that were made on this day (UTC) or later.
    """
    from mergepipe.runs import snapshots

    reference = None if contained is None else str(contained)
    return snapshots.list_snapshots(home_of(home), contained=reference, operator=operator, since=since)


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
    """
    from mergepipe.jobs.diff import compare_snapshots

    first, second = _snapshot_location(a, home).local_path, _snapshot_location(b, home).local_path
    return compare_snapshots(first, second, reads_tensors=reads_tensors, on_progress=on_progress)


def verify(
    snapshot: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> VerifyReport:
    """Read a whole snapshot and compare every block, digest and file with its manifest; damage is in the report.

    A packed expert is decoded, and every block compared with the digest of the original.

    Args:
        snapshot: its directory, where it is in a bucket or repository, its sid, or first digits of it.
        options: `VerifyOptions`: how much is made again, threads, memory, the catalog's home, where sids are looked up.
    """
    started = perf_counter()
    made = VerifyOptions.of(options, fields)
    threads = threads_of(made.threads)  # before anything compiled is loaded
    pack = _pack_location(snapshot)
    if pack is not None:
        from mergepipe.jobs.pack import verify_pack

        return verify_pack(pack, base=_location(made.base), threads=threads, started=started, on_progress=on_progress)
    if made.base is not None:
        raise RecipeError.of("option.conflict", "--base", f"{snapshot} is no packed expert", "leave it out")
    from mergepipe.jobs.verify import verify_snapshot

    path, home, fraction = _snapshot_location(snapshot, made.home), catalog_home(made), made.deep_fraction
    return verify_snapshot(path, engine_options(made), fraction, home, started=started, on_progress=on_progress)


def repair(
    snapshot: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> RepairReport:
    """Make what is damaged in a snapshot again from its inputs, and write exactly that; see `verify`."""
    started = perf_counter()
    made = RunOptions.of(options, fields)
    engine = engine_options(made)  # before anything compiled is loaded
    from mergepipe.jobs.repair import repair_snapshot

    path, home = _snapshot_location(snapshot, made.home).local_path, catalog_home(made)
    return repair_snapshot(path, engine, home, started=started, on_progress=on_progress)


def replay(
    snapshot: str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> MergeReport:
    """Make a snapshot again at `out` from its manifest alone: the same bytes, or an error that says why not.

    Args:
        snapshot: see `verify`.
        options: `OutputOptions`: threads, memory and the catalog, and `force`.
    """
    made = OutputOptions.of(options, fields)
    from mergepipe.jobs.replay import replay_snapshot
    from mergepipe.runs.work import run_settings

    settings = run_settings(made, 0, out, on_progress)
    return replay_snapshot(_snapshot_location(snapshot, made.home), settings)


def push(
    snapshot: str | Path,
    destination: str,
    *,
    options: PushOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> PushReport:
    """Publish a snapshot or a packed expert on the Hub or in a bucket, visible there whole or not at all.

    What is uploaded when a push fails stays for the next try. `on_progress` is called after each file.

    Args:
        snapshot: its directory, or the sid of a snapshot, or first digits of it.
        destination: `hf://org/name[@branch][/folder]`, `s3://bucket/prefix`, `gs://` or `az://`; `org/name` is one of
            the Hub unless there is such a path.
    """
    made = PushOptions.of(options, fields)
    from mergepipe.jobs.push import push_destination, push_snapshot

    path = _pack_location(snapshot) or _snapshot_location(snapshot, made.home)
    return push_snapshot(path.local_path, push_destination(destination), made, on_progress)


def gc(roots: Sequence[str | Path] = (), *, dry_run: bool = False, home: str | Path | None = None) -> GcReport:
    """Remove staging of dead runs, next to known snapshots and under `roots`, and catalog rows of what is gone."""
    from mergepipe.jobs.gc import collect_garbage

    return collect_garbage(home_of(home), [Location.of(root).local_path for root in roots], dry_run=dry_run)


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
    """
    from mergepipe.catalog.catalog import rebuild

    return rebuild(home_of(home), [Path(root) for root in roots])


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


def _location(place: str | Path | None) -> Location | None:
    return None if place is None else Location.of(place)
