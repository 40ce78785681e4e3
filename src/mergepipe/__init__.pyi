# Written by `python -m tools.stubs` from the functions and options.py; not edited by hand.

from collections.abc import (
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from mergepipe import (
    errors as errors,
    tailor as tailor,
)
from mergepipe.catalog.catalog import (
    Catalog as Catalog,
)
from mergepipe.catalog.snapshots import (
    CatalogStats as CatalogStats,
    LineageNode as LineageNode,
    RebuildReport as RebuildReport,
)
from mergepipe.cli.progress import (
    progress_bar as progress_bar,
)
from mergepipe.core.flags import (
    Options,
)
from mergepipe.errors import (
    MergePipeError as MergePipeError,
    MergePipeWarning as MergePipeWarning,
)
from mergepipe.jobs.diff import (
    diff as diff,
)
from mergepipe.jobs.explain import (
    explain as explain,
)
from mergepipe.jobs.load import (
    LoadedTensors as LoadedTensors,
    load_file as load_file,
)
from mergepipe.jobs.parts import (
    parts_status as parts_status,
)
from mergepipe.jobs.snapshots import (
    catalog_stats as catalog_stats,
    gc as gc,
    lineage as lineage,
    list_snapshots as list_snapshots,
    rebuild_catalog as rebuild_catalog,
    show as show,
)
from mergepipe.operators.custom import (
    operator as operator,
)
from mergepipe.options import (
    AnalyzeOptions as AnalyzeOptions,
    ApplyLoraOptions as ApplyLoraOptions,
    CheckLoraOptions as CheckLoraOptions,
    CheckOptions as CheckOptions,
    ConvertLoraOptions as ConvertLoraOptions,
    ExtractLoraOptions as ExtractLoraOptions,
    MergeLoraOptions as MergeLoraOptions,
    MergeOptions as MergeOptions,
    OutputOptions as OutputOptions,
    PackOptions as PackOptions,
    PlanOptions as PlanOptions,
    PushOptions as PushOptions,
    RunOptions as RunOptions,
    SearchOptions as SearchOptions,
    SweepOptions as SweepOptions,
    UnpackOptions as UnpackOptions,
    VerifyOptions as VerifyOptions,
)
from mergepipe.planning.plan import (
    Plan as Plan,
    store_plan as store_plan,
)
from mergepipe.reports import (
    AnalyzeReport as AnalyzeReport,
    CheckLoraReport as CheckLoraReport,
    CheckReport as CheckReport,
    ConvertLoraReport as ConvertLoraReport,
    Explanation as Explanation,
    ExtractLoraReport as ExtractLoraReport,
    GcReport as GcReport,
    MergeLoraReport as MergeLoraReport,
    MergeReport as MergeReport,
    PackReport as PackReport,
    PartReport as PartReport,
    PartsStatus as PartsStatus,
    Progress as Progress,
    ProgressCallback,
    PushReport as PushReport,
    RepairReport as RepairReport,
    SearchReport as SearchReport,
    SnapshotDiff as SnapshotDiff,
    SnapshotReport as SnapshotReport,
    SweepReport as SweepReport,
    UnpackReport as UnpackReport,
    VerifyReport as VerifyReport,
    WithoutReport as WithoutReport,
)
from pathlib import (
    Path,
)
from typing import (
    Any,
)

__version__: str
__all__: list[str]

def analyze(
    base: str | Path,
    experts: Sequence[str | Path],
    *,
    options: Options | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    densities: float | Sequence[float] = (),
    block_elements: int | None = None,
    text: str | Path | None = None,
    importance_out: str | Path | None = None,
) -> AnalyzeReport:
    """Read experts once against their base, and keep for each a file of what plans are made from.

    The files lie in the home folder and are named by the contents of expert and base: a copy of one in the home folder
    of another machine, or next to the model as `mergepipe.stats`, serves there. What is on record is not read again.

    Args:
        options: `AnalyzeOptions`: what is measured, threads, memory, the home folder.
    """

def apply_lora(
    base: str | Path,
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    options: OutputOptions | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    strict: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
    weights: float | Sequence[float] = (),
    dtype: str | None = None,
    rounding: str | None = None,
    allow_unapplied: str | Sequence[str] = (),
    adapter_names: str | Sequence[str] = (),
    tokenizer_of: str | None = None,
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

def check(
    recipe: str | Path | Mapping[str, object],
    *,
    options: CheckOptions | None = None,
    rounding: str | None = None,
    allow_dropped: str | Sequence[str] = (),
    strict: bool = False,
    lenient: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
) -> CheckReport:
    """Validate a recipe and its inputs without reading any tensor data."""

def check_lora(
    base: str | Path,
    adapter: str | Path,
    model: str | Path | None = None,
    *,
    options: CheckLoraOptions | None = None,
    on_progress: ProgressCallback | None = None,
    adapter_names: str | Sequence[str] = (),
    threads: int | None = None,
) -> CheckLoraReport:
    """Tell whether `model` is `base` with `adapter` applied; without a model whether the adapter fits the base.

    Every tensor of the model is compared with the exact result, rounded to the dtype in which the model is stored: see
    `checkpoints.stored_changes.measure` for the bound. Base and model are read once, those that disagree once or twice
    more to find out what they hold instead. Nothing is written. Memory: 64 MiB and the factors of a tensor for each
    thread, and 4 KiB for each matrix.

    Raises:
        MismatchError: nothing that the adapter changes is in the base, or in the model.
        CorruptError: with a model, factors hold infinities or NaN.
    """

def convert_lora(
    adapter: str | Path,
    out: str | Path,
    *,
    options: ConvertLoraOptions | None = None,
    force: bool = False,
    base_model_id: str | None = None,
    home: str | Path | None = None,
    catalog: bool = True,
    form: str = 'peft',
    base: str | Path | None = None,
    adapter_names: str | Sequence[str] = (),
    experts: str | None = None,
    unsloth_experts: bool = False,
) -> ConvertLoraReport:
    """Write `adapter` at `out` in another form: the delta of every module stays what it is.

    The form of `adapter` is recognised: a folder of PEFT, MLX or Tinker, a file of Kohya's scripts, diffusers or
    ComfyUI, or llama.cpp's GGUF. `out` is a folder, a prefix of a bucket or a repository of the Hub, where the adapter
    appears with a card and a record, complete or not at all. Where the form has no place for the scale of a module, it
    goes into its factor B, which keeps its dtype if that holds the product exactly, and is float32 else.

    Args:
        options: `ConvertLoraOptions`: the form, and the base, whose headers alone are read.

    Raises:
        UnsupportedError: the form cannot hold what the adapter has, or needs the base.
        MismatchError: the adapter does not fit the base.
    """

def extract_lora(
    base: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    options: ExtractLoraOptions | None = None,
    on_progress: ProgressCallback | None = None,
    force: bool = False,
    base_model_id: str | None = None,
    home: str | Path | None = None,
    catalog: bool = True,
    rank: int | None = None,
    energy: float | None = None,
    save_modules: bool = False,
) -> ExtractLoraReport:
    """Publish the LoRA adapter that brings `base` closest to `model` at `out`, as PEFT reads it.

    `out` is a folder, a prefix of a bucket or a repository of the Hub, where the adapter appears with a card and a
    record, complete or not at all. Every matrix of the difference is decomposed by itself (truncated SVD) and written
    before the next is read. The report names the error that is left, tensor by tensor, and what a LoRA cannot hold.
    `on_progress` tells the bytes of tensors that are done.

    Raises:
        RecipeError: a rank or an energy out of its range, or neither.
        MismatchError: nothing differs.
    """

def load_model(
    recipe: str | Path | Mapping[str, object],
    *,
    torch_dtype: Any = None,
    device_map: Any = None,
    options: OutputOptions | None = None,
    rounding: str | None = None,
    allow_dropped: str | Sequence[str] = (),
    strict: bool = False,
    lenient: bool = False,
    select: str | None = None,
    where_omitted: str = 'keep',
    min_density: float | None = None,
    block_elements: int | None = None,
    importance: str | Path | None = None,
    seed: int = 0,
    home: str | Path | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
    budget: str | float | None = None,
    target_loss: float | None = None,
    evaluate: str | None = None,
    card: bool = True,
    tokenizer: bool = True,
    mergekit_config: bool = True,
) -> Any:
    """Return a model of transformers with the merged tensors, as `from_pretrained` of a written merge would.

    Args:
        torch_dtype: the parameters' dtype; default, the merge's.
        device_map: as of `from_pretrained`; default, the processor.

    Raises:
        UnsupportedError: `extra.missing` without torch and transformers; `model.unsupported`, an architecture that
            transformers does not have. Code of a model is not run.
    """

def merge(
    recipe: str | Path | Mapping[str, object],
    out: str | Path,
    *,
    options: OutputOptions | None = None,
    on_progress: ProgressCallback | None = None,
    rounding: str | None = None,
    allow_dropped: str | Sequence[str] = (),
    strict: bool = False,
    lenient: bool = False,
    select: str | None = None,
    where_omitted: str = 'keep',
    min_density: float | None = None,
    block_elements: int | None = None,
    importance: str | Path | None = None,
    seed: int = 0,
    home: str | Path | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
    budget: str | float | None = None,
    target_loss: float | None = None,
    evaluate: str | None = None,
    card: bool = True,
    tokenizer: bool = True,
    mergekit_config: bool = True,
) -> MergeReport:
    """Merge the models of a recipe and publish the result at `out`, complete or not at all.

    `out` is a folder, one file (its name ends in .safetensors or .gguf, and its record is a folder next to it), a
    prefix of a bucket (`s3://bucket/prefix`, `gs://`, `az://`), which must hold nothing yet, or a repository of the Hub
    (`hf://org/name`). Without a `budget` all experts are read in full. With one, a plan is made and run. With a
    `target_loss` budgets are tried until it is met; `tried` of the report has the bytes and the loss of each.

    Args:
        options: what is merged and how; the fields of `MergeOptions` are keywords, too: `budget="25%"`, `seed=7`.
    """

def merge_into(
    model: Any,
    recipe: str | Path | Mapping[str, object],
    *,
    only: Collection[str] | None = None,
    changed_from: str | Path | Mapping[str, object] | None = None,
    options: OutputOptions | None = None,
    rounding: str | None = None,
    allow_dropped: str | Sequence[str] = (),
    strict: bool = False,
    lenient: bool = False,
    select: str | None = None,
    where_omitted: str = 'keep',
    min_density: float | None = None,
    block_elements: int | None = None,
    importance: str | Path | None = None,
    seed: int = 0,
    home: str | Path | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
    budget: str | float | None = None,
    target_loss: float | None = None,
    evaluate: str | None = None,
    card: bool = True,
    tokenizer: bool = True,
    mergekit_config: bool = True,
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

def merge_lora(
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    options: MergeLoraOptions | None = None,
    force: bool = False,
    base_model_id: str | None = None,
    home: str | Path | None = None,
    catalog: bool = True,
    method: str = 'cat',
    rank: int | None = None,
    weights: float | Sequence[float] = (),
    density: float | None = None,
    seed: int = 0,
) -> MergeLoraReport:
    """Merge LoRA adapters of one base into one adapter, published at `out` as PEFT reads it; no base is read.

    `out` is a folder, a prefix of a bucket or a repository of the Hub, where the adapter appears with a card and a
    record, complete or not at all. `cat` is exact: the factors stand side by side, and ranks add up. `svd` is the best
    approximation of the same sum of a rank. Any operator of recipes (`linear`, `ties`, `dare_ties`, ...) merges the
    cores of the deltas in bases that all adapters share, which loses nothing of a delta, and what comes out is cut to
    `rank`, if there is one. In place of the adapters stands a recipe (`.yml`) of such an operator, with
    `output: adapter`: its filters and gradients hold for the modules of the adapters.

    Raises:
        RecipeError: options that do not fit together.
        MismatchError: adapters of different bases, or two that store one module in full.
        UnsupportedError: DoRA, whose delta depends on the base.
    """

def merged_tensors(
    recipe: str | Path | Mapping[str, object],
    *,
    framework: str = 'numpy',
    only: Collection[str] | None = None,
    options: OutputOptions | None = None,
    rounding: str | None = None,
    allow_dropped: str | Sequence[str] = (),
    strict: bool = False,
    lenient: bool = False,
    select: str | None = None,
    where_omitted: str = 'keep',
    min_density: float | None = None,
    block_elements: int | None = None,
    importance: str | Path | None = None,
    seed: int = 0,
    home: str | Path | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
    budget: str | float | None = None,
    target_loss: float | None = None,
    evaluate: str | None = None,
    card: bool = True,
    tokenizer: bool = True,
    mergekit_config: bool = True,
) -> Iterator[tuple[str, Any]]:
    """Yield what `merge` would write, `(name, tensor)` in the order of its files, bit for bit; nothing is written.

    The inputs are opened and the budget is planned when it is called, tensors are made while they are taken. Memory:
    that of a merge (`memory_bytes`), and three tensors. `load_weights` of vLLM and SGLang takes such an iterator, with
    `framework="torch"`.

    Args:
        only: names of the tensors that are wanted; default, all.

    Raises:
        MergePipeError: as `merge`; of what is found while tensors are made, from the iterator.
    """

def pack(
    base: str | Path | Sequence[str | Path] | None,
    experts: Sequence[str | Path],
    out: str | Path,
    *,
    options: PackOptions | None = None,
    on_progress: ProgressCallback | None = None,
    chain: int | None = None,
    form: str = 'packs',
    strict: bool = False,
    threads: int | None = None,
    home: str | Path | None = None,
) -> PackReport:
    """Pack each expert into a store `out/NAME`, bit for bit; one that is there already is left as it is.

    With `form` "sparse" it is a patch instead: the values that differ and their positions, as TRL sends them to vLLM.

    With `out` in a bucket or on the Hub the stores grow in `home`, which needs room for those of eight experts, and are
    uploaded when they are complete. In a bucket each is visible with its header, which is written last, on the Hub by a
    commit of its own, where the files that it keeps name no paths of this machine.

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

def plan(
    recipe: str | Path | Mapping[str, object],
    budget: str | float | None = None,
    *,
    everything: bool = False,
    options: PlanOptions | None = None,
    rounding: str | None = None,
    allow_dropped: str | Sequence[str] = (),
    strict: bool = False,
    lenient: bool = False,
    select: str | None = None,
    where_omitted: str = 'keep',
    min_density: float | None = None,
    block_elements: int | None = None,
    importance: str | Path | None = None,
    seed: int = 0,
    home: str | Path | None = None,
) -> Plan:
    """Decide what a merge reads under a budget, from statistics, and from headers and indices of the inputs.

    Reads no tensor data.

    Args:
        budget: bytes to be read from expert files at most (`4GiB`), or a share of what reading all would cost (`25%`,
            0.25); 0 reads nothing of the experts.
        everything: plan the full merge, without a budget: for `run_part`.
        options: how the budget is spent.
    """

def push(
    snapshot: str | Path,
    destination: str,
    *,
    options: PushOptions | None = None,
    on_progress: ProgressCallback | None = None,
    create: bool = False,
    private: bool = False,
    message: str | None = None,
    home: str | Path | None = None,
) -> PushReport:
    """Publish a snapshot or a packed expert on the Hub or in a bucket, visible there whole or not at all.

    What is uploaded when a push fails stays for the next try. `on_progress` is called after each file.

    Args:
        snapshot: its directory, or the sid of a snapshot, or first digits of it.
        destination: `hf://org/name[@branch][/folder]`, `s3://bucket/prefix`, `gs://` or `az://`; `org/name` is one of
            the Hub unless there is such a path.
    """

def repair(
    snapshot: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    catalog: bool = True,
) -> RepairReport:
    """Make what is damaged in a snapshot again from its inputs, and write exactly that; see `verify`."""

def replay(
    snapshot: str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    strict: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
) -> MergeReport:
    """Make a snapshot again at `out` from its manifest alone: the same bytes, or an error that says why not.

    Args:
        snapshot: see `verify`.
        options: `OutputOptions`: threads, memory and the catalog, and `force`.
    """

def run(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    strict: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
) -> MergeReport:
    """Run a plan, given or stored, and publish the result at `out`; refused if an input changed since it was made.

    Args:
        options: `OutputOptions`: threads, memory and the catalog, and what is written how.
    """

def run_part(
    plan: Plan | str | Path,
    out: str | Path,
    part: tuple[int, int] | str | None = None,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    strict: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
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

def search(
    recipe: str | Path | Mapping[str, object],
    out: str | Path,
    evaluate: Callable[[Any], float] | str | None = None,
    *,
    loads_models: bool = False,
    options: SearchOptions | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    trials: int = 50,
    trial_timeout: float | None = None,
    rungs: str | Sequence[str] = (),
    objectives: str | Sequence[str] = (),
    sampler: str = 'tpe',
    resume: bool = False,
) -> SearchReport:
    """Search the values of a recipe that are written `{search: [low, high]}` or `{search: [a, b, c]}`.

    Each trial is a merge, evaluated by the function, which gets its folder and returns a loss, or by the command (see
    `SearchOptions`). With `loads_models` the function gets a model of transformers in the place of a folder, as
    `load_model` makes it, and trials write nothing. A trial whose merge or evaluation fails is marked, and the search
    goes on. The study lies beside the output, in a file of its name and `.study`; the best merge is published as `out`.

    Raises:
        RecipeError: nothing is to be searched, or options that do not fit together.
        OutputError: a study of an earlier search exists, or of another recipe.
        LimitError: every trial fails.
        UnsupportedError: optuna is not installed.
    """

def sweep(
    recipe: str | Path | Mapping[str, object],
    budgets: Sequence[str] = ('5%', '10%', '25%', '50%', '75%', '100%'),
    *,
    options: Options | None = None,
    on_progress: ProgressCallback | None = None,
    rounding: str | None = None,
    allow_dropped: str | Sequence[str] = (),
    strict: bool = False,
    lenient: bool = False,
    select: str | None = None,
    where_omitted: str = 'keep',
    min_density: float | None = None,
    block_elements: int | None = None,
    importance: str | Path | None = None,
    seed: int = 0,
    home: str | Path | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    connections: int = 32,
    work: str | Path | None = None,
    evaluate: str | None = None,
) -> SweepReport:
    """Merge in full and under each budget, and measure bytes, time, and what is lost; nothing is recorded.

    Each budget gives the bytes of the merge under it. What is lost is the distance from the full merge, with `random`
    as a second policy; for samples it says nothing, and is left out. With `evaluate` the loss is measured too.

    Args:
        options: `SweepOptions`: how each budget is spent, what is measured, threads, memory, the home folder.
    """

def unpack(
    path: str | Path,
    out: str | Path,
    *,
    options: UnpackOptions | None = None,
    on_progress: ProgressCallback | None = None,
    base: str | Path | None = None,
    threads: int | None = None,
) -> UnpackReport:
    """Write the files that the store in `path` was made from into the new directory `out`, byte for byte.

    Every block is compared with the digest of the original. Of a sparse patch the weights are restored, next to the
    other files of its base. `on_progress` tells the bytes of tensors that are restored.

    Raises:
        NotFoundError: the store, or its base.
        MismatchError: another base.
        CorruptError: the store is damaged.
        OutputError, StorageError: the files cannot go there; nothing was published.
    """

def verify(
    snapshot: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    catalog: bool = True,
    base: str | Path | None = None,
    deep_fraction: float = 0.0,
) -> VerifyReport:
    """Read a whole snapshot and compare every block, digest and file with its manifest; damage is in the report.

    A packed expert is decoded, and every block compared with the digest of the original.

    Args:
        snapshot: its directory, where it is in a bucket or repository, its sid, or first digits of it.
        options: `VerifyOptions`: how much is made again, threads, memory, the catalog's home, where sids are looked up.
    """

def without(
    expert: str | Path,
    snapshots: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    dry_run: bool = False,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    threads: int | None = None,
    memory: int | str | None = None,
    memory_bytes: int | None = None,
    home: str | Path | None = None,
    connections: int = 32,
    catalog: bool = True,
    force: bool = False,
    strict: bool = False,
    shard_size: int | str | None = None,
    shard_bytes: int | None = None,
    paths: str = 'relative',
    base_model_ids: str | Sequence[str] = (),
    resume: bool | None = None,
    executor: str = 'threads',
    address: str | None = None,
) -> WithoutReport:
    """Make snapshots again without a model, with all that was made from them, into folders in `out`, parents first.

    Each keeps its recipe, seed and budget, but for the entries of the model; snapshots that it was made from and that
    hold the model are made again before it. What cannot be made again is listed with the reason, and so is all that
    was made from it. The snapshots themselves stay as they are.

    Args:
        expert: the model, named as `list_snapshots` takes it.
        snapshots: see `verify`; the catalog must know them.
        dry_run: only say what would be read and written.
        options: `OutputOptions`: threads, memory and the catalog, and `force`.
    """
