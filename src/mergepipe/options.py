"""The options of the public calls: immutable values, checked when they are made, changed by `dataclasses.replace`.

Every option is declared here once: its field has the default, the check, and the `Flag` that the command line, its help
and the reference pages are made from. A call takes the value as `options`, and each field as a keyword too.
`threads_of` and its like fill in what depends on the machine.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mergepipe.core.flags import Flag, Options, option
from mergepipe.core.rounding import RoundingMode
from mergepipe.core.units import positive, share, shown_number, whole
from mergepipe.errors import LimitError, MergePipeError, RecipeError
from mergepipe.planning.budget import OnOmit, Policy
from mergepipe.storage.contract import CONNECTIONS, MAX_CONNECTIONS
from mergepipe.storage.output_places import output_place

if TYPE_CHECKING:
    from mergepipe.engine.work import EngineOptions
    from mergepipe.recipes.fields import Strictness

DEFAULT_SHARD_BYTES = 5_000_000_000
SWEEP_BUDGETS = ("5%", "10%", "25%", "50%", "75%", "100%")
MAX_THREADS = 1024
MAX_BLOCK_ELEMENTS = 1 << 30  # counts in a block have 32 bits

BUDGET_PANEL = "Under a budget"
WORK_PANEL = "Catalog and earlier work"
PUBLISHING_PANEL = "What the output says about its inputs"
MACHINE_PANEL = "Machine"
PARTS_PANEL = "Many machines"
RARE_PANEL = "Rarely needed"


class ExecutorName(StrEnum):
    """The executors of a merge: threads of this process, or tasks of a Ray cluster."""

    THREADS = "threads"  # of this process
    RAY = "ray"  # tasks of a Ray cluster


class PathStyle(StrEnum):
    """The form in which the files of a snapshot name local inputs."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"


def check_seed(seed: int, name: str = "--seed") -> int:
    """Return `seed` if 64 bits hold it, signed or not."""
    if not -(2**63) <= whole(name, seed) < 2**64:
        raise RecipeError.of("option.invalid", name, f"{shown_number(seed)} was given", "give a 64-bit integer")
    return seed


def _read_share(text: str, name: str) -> float:
    from mergepipe.planning.budget import parse_fraction

    return parse_fraction(text, name, "option.invalid")


def _read_number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RecipeError.of(
            "option.invalid", name, f"'{text}' is not a number", "give a number, such as 0.5"
        ) from None


def _check_finite(name: str, number: float) -> None:
    if not math.isfinite(number):
        raise RecipeError.of("option.invalid", name, f"{number:g} was given", "give a finite number, such as 0.5")


def _check_fraction(name: str, fraction: float) -> None:
    if not 0.0 <= fraction <= 1.0:
        raise LimitError.of("option.out-of-range", name, f"{fraction:g} was given", "give a share from 0 to 1")


def _needs(name: str, other: str) -> MergePipeError:
    return RecipeError.of("option.conflict", name, f"only works together with {other}", f"add {other}")


# --- flags of options that several classes have ---

THREADS = Flag(
    "Compute threads.",
    metavar="N",
    default="one per processor",
    panel=MACHINE_PANEL,
    check=lambda name, value: positive(name, whole(name, value), MAX_THREADS),
)
HOME = Flag(
    "The folder of the catalog.", metavar="DIR", default="$MERGEPIPE_HOME, else the user data folder", panel=WORK_PANEL
)
NO_CATALOG = Flag("Do not use the catalog, and record nothing in it.", panel=WORK_PANEL)
FORCE = Flag("Replace an existing OUT that MergePipe made.")
APPLY_MEMORY_BYTES = 512 << 20
"""Buffers of an adapter's application: more would not make it faster."""
BUDGET = Flag(
    "Read at most this much from the experts: a share of a full read (25%, 0.25), or bytes (4GiB).",
    metavar="BUDGET",
    default="everything is read",
    panel=BUDGET_PANEL,
)
EVALUATE = Flag(
    "Run this command on each merge, without a shell; the last number it prints is the loss. {} is replaced by the "
    "merge's folder; without {} the folder is the last argument. loss:FILE is the mean loss on a text.",
    metavar="CMD",
)
SHARD_SIZE = Flag("Largest output file, e.g. 5GB.", name="--shard-size", metavar="SIZE", default="5GB")
STRICT = Flag("Refuse recipes with notices, plans that read nothing from an expert, and reads beyond the budget.")
BLOCK_ELEMENTS = Flag(
    "Elements per block, a multiple of 16384.",
    metavar="N",
    default="262144; samples of local files 32768",
    panel=RARE_PANEL,
    check=lambda _, value: block_elements_of(value),
)
ROUNDING = Flag(
    "How results are rounded to the output's dtype: to the nearest value, or stochastically, which keeps changes that "
    "are smaller than a step of the dtype on average.",
    metavar="HOW",
    default="nearest",
    choices=tuple(RoundingMode),
)
BASE_PLACE = Flag("Where the base of a packed expert is now.", metavar="BASE", default="the recorded path")
WEIGHTS = Flag(
    "The weight of an ADAPTER; repeat it for each one, in order.",
    name="--weight",
    metavar="W",
    default="1",
    read=_read_number,
    check=_check_finite,
)
RENAME = Flag(
    "Read OLD in the adapter's names, one or more parts between dots, as NEW. May be given several times.",
    name="--rename",
    metavar="OLD=NEW",
)
LARGEST_RANK = Flag("Largest rank of a module.", metavar="R", check=positive)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options):
    """Options for using the machine, and for the home folder. None of them changes a byte of a result.

    `memory_bytes` caps buffers. `home` is the folder of the catalog and of statistics.
    """

    threads: int | None = option(None, THREADS)
    memory_bytes: int | None = option(
        None,
        "Limit on the memory of buffers, e.g. 4GiB.",
        metavar="SIZE",
        default="4GiB, or half of the RAM if less",
        panel=MACHINE_PANEL,
    )
    home: str | Path | None = option(None, HOME)
    connections: int = option(
        CONNECTIONS,
        "Concurrent requests for remote files.",
        metavar="N",
        panel=RARE_PANEL,
        check=partial(positive, most=MAX_CONNECTIONS),
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(MachineOptions):
    """Options for using the machine and the catalog. None of them changes a byte of a result."""

    catalog: bool = option(True, NO_CATALOG)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    """Options of reading a recipe. `rounding` is what the recipe does not say of it."""

    rounding: str | None = option(None, replace(ROUNDING, default="as RECIPE says"))

    allow_dropped: tuple[str, ...] = option(
        (),
        "Leave out tensors with this name that an expert has and the base lacks. May be given several times.",
        metavar="GLOB",
    )
    strict: bool = option(False, STRICT)
    lenient: bool = option(
        False,
        "Ignore misspelt names, and read shares like 40 as 1, as mergekit does; both with a warning.",
        panel=RARE_PANEL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strict and self.lenient:
            message = "contradicts --lenient: it refuses entries without effect, which --lenient accepts"
            raise RecipeError.of("option.conflict", "--strict", message, "give one of the two")

    @property
    def strictness(self) -> Strictness:
        """How a recipe is read."""
        from mergepipe.recipes.fields import Strictness

        return Strictness(self.strict, self.lenient)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(RecipeOptions):
    """Options of `check`."""

    shard_bytes: int | None = option(None, SHARD_SIZE)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(RecipeOptions):
    """Options of planning a merge under a budget.

    Without `select` a sample is read, the same whatever was analyzed. If weights are renormalised, or the rule cannot
    be sampled and all experts are packed, blocks are read by norm. Statistics with another block size than
    `block_elements` are converted.
    """

    select: str | None = option(
        None,
        f"What to read: {', '.join(Policy)}.",
        metavar="POLICY",
        default="sample, if possible",
        panel=BUDGET_PANEL,
        choices=tuple(Policy),
    )
    where_omitted: str = option(
        OnOmit.KEEP.value,
        "Where an expert is omitted: keep the weights of the others, or renormalize them (linear).",
        metavar="RULE",
        panel=BUDGET_PANEL,
        choices=tuple(OnOmit),
    )
    min_density: float | None = option(
        None,
        "Let a tight budget lower the densities of TIES and DARE to this.",
        metavar="SHARE",
        default="not lowered",
        panel=RARE_PANEL,
        read=_read_share,
        check=share,
    )
    block_elements: int | None = option(None, BLOCK_ELEMENTS)
    importance: str | Path | None = option(
        None,
        "For samples: draw important tensors more often. PATH is a JSON object of numbers by tensor, safetensors with "
        "one number per tensor or per element, or a training checkpoint (its second moments).",
        metavar="PATH",
        panel=RARE_PANEL,
    )
    seed: int = option(
        0,
        "Seed of the random operators, and of --select sample and --select random.",
        metavar="N",
        check=lambda name, seed: check_seed(seed, name),
    )
    home: str | Path | None = option(None, HOME)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.importance is not None and self.select not in (None, Policy.SAMPLE):
            message = f"has no effect with --select {self.select}"
            raise RecipeError.of("option.conflict", "--importance", message, "leave --select out")


@dataclass(frozen=True, kw_only=True)
class OutputOptions(RunOptions):
    """Options for making an output from a plan: those of `RunOptions`, and what is written, and how.

    On a cluster `threads` and `memory_bytes` are per task, every node must reach the inputs and the output, and files
    are made smaller if some nodes would otherwise have none. `shard_bytes` must be the same for all parts of an output.
    """

    force: bool = option(False, FORCE)
    strict: bool = option(False, "Refuse to exceed the budget by reading again what an interrupted run lost.")
    shard_bytes: int | None = option(None, SHARD_SIZE)
    paths: str = option(
        PathStyle.RELATIVE.value,
        "How the output's files name local inputs: relative or absolute.",
        metavar="STYLE",
        panel=RARE_PANEL,
        choices=tuple(PathStyle),
    )
    base_model_ids: tuple[str, ...] = option(
        (),
        "Hub id of a base model, for the model card: org/name, or MODEL=org/name. May be given several times.",
        name="--base-model-id",
        metavar="ID",
        panel=PUBLISHING_PANEL,
    )
    resume: bool | None = option(
        None, "Resume an interrupted run of the same merge into OUT.", default="if there is one", panel=WORK_PANEL
    )
    executor: str = option(
        ExecutorName.THREADS.value,
        "What computes OUT's files: threads of this process, or ray, tasks on a cluster.",
        metavar="NAME",
        panel=PARTS_PANEL,
        choices=tuple(ExecutorName),
    )
    address: str | None = option(
        None,
        "The Ray cluster.",
        metavar="HOST:PORT",
        default="the cluster of this machine, else a new one on this machine only",
        panel=PARTS_PANEL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.executor != ExecutorName.RAY:
            message = "only works together with --executor ray"
            raise RecipeError.of("option.conflict", "--address", message, "add --executor ray")


@dataclass(frozen=True, kw_only=True)
class MergeOptions(OutputOptions, PlanOptions):
    """Options of `merge`: those of `OutputOptions`, those of `PlanOptions` for a budget, and what is merged.

    Args:
        card: write the model card.
        tokenizer: copy the tokenizer's files; a tokenizer that the recipe sets is always written.
        mergekit_config: also write the recipe as `mergekit_config.yml`, where the Hub looks for it.
    """

    budget: str | float | None = option(None, BUDGET)
    target_loss: float | None = option(
        None,
        "Merge under budgets of 5, 10, 25, 50 and 100 % in turn, until the loss that --evaluate prints is at most X; "
        "publish only that merge.",
        metavar="X",
        panel=BUDGET_PANEL,
        check=_check_finite,
    )
    evaluate: str | None = option(
        None, replace(EVALUATE, help=f"For --target-loss. {EVALUATE.help}", panel=BUDGET_PANEL)
    )
    strict: bool = option(False, STRICT)
    card: bool = True
    tokenizer: bool = True
    mergekit_config: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target_loss is None:
            if self.evaluate is not None:
                raise _needs("--evaluate", "--target-loss X")
            return
        if self.evaluate is None:
            raise _needs("--target-loss", "--evaluate CMD")
        if self.budget is not None or self.executor != ExecutorName.THREADS:
            message = "tries budgets in turn, and evaluates each merge in a folder of this machine"
            hint = "leave out --budget, and merge into a folder without --executor"
            raise RecipeError.of("option.conflict", "--target-loss", message, hint)


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(MachineOptions):
    """Options of `analyze`.

    `text` measures for each tensor the sum of absolute gradient times delta over all experts, for `importance` of
    `PlanOptions`; the base must then be in a folder.
    """

    densities: tuple[float, ...] = option(
        (),
        "Also compute the magnitude threshold for this density; may be given several times.",
        name="--density",
        metavar="SHARE",
        read=_read_share,
        check=share,
    )
    block_elements: int | None = option(None, BLOCK_ELEMENTS)
    text: str | Path | None = option(
        None,
        "Also measure which tensors matter for this text, by the gradient of BASE. Needs transformers, and 8 bytes "
        "of memory per parameter.",
        metavar="FILE",
    )
    importance_out: str | Path | None = option(
        None, "With --text: write the result to FILE, for `merge --importance`.", metavar="FILE"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.text is None) != (self.importance_out is None):
            pair = ("--importance-out", "--text FILE") if self.text is None else ("--text", "--importance-out FILE")
            raise _needs(*pair)


@dataclass(frozen=True, kw_only=True)
class SweepOptions(MachineOptions, PlanOptions):
    """Options of `sweep`: those of `PlanOptions` for each budget, and what is measured."""

    work: str | Path | None = option(
        None, "A folder with space for two outputs.", metavar="DIR", default="the folder for temporary files"
    )
    evaluate: str | None = option(None, EVALUATE)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(MachineOptions):
    """Options of `search`: how values are tried, and how merges are evaluated. Trials are temporary files."""

    evaluate: str | None = option(None, EVALUATE)
    trials: int = option(50, "How many merges to try.", metavar="N", check=positive)
    trial_timeout: float | None = option(None, "Stop an evaluation after this time.", metavar="SECONDS", check=positive)
    rungs: tuple[str, ...] = option(
        (),
        "Merge each trial under this budget first; the best third goes to the next rung. May be given several times.",
        name="--rung",
        metavar="BUDGET",
    )
    objectives: tuple[str, ...] = option(
        (),
        "A name in the JSON object that CMD prints last, NAME or NAME:max. May be given several times.",
        name="--objective",
        metavar="NAME",
    )
    sampler: str = option("tpe", "How values are proposed.", metavar="NAME", choices=("tpe", "cmaes", "random"))
    resume: bool = option(False, "Continue the study next to OUT.")


@dataclass(frozen=True, kw_only=True)
class PackOptions(Options):
    """Options of `pack`. With a `chain` of N, at most N stores are decoded to restore one."""

    chain: int | None = option(
        None,
        "EXPERTs are checkpoints of one run, in order: pack each relative to the one before, every N-th to BASE.",
        metavar="N",
        check=positive,
    )
    form: str = option(
        "packs",
        "packs: the smallest, read in levels; sparse: changed values and positions, as TRL sends them to vLLM.",
        name="--to",
        metavar="packs|sparse",
        choices=("packs", "sparse"),
    )
    strict: bool = option(False, "Refuse an expert whose base is uncertain.")
    threads: int | None = option(None, THREADS)
    home: str | Path | None = option(None, HOME)


@dataclass(frozen=True, kw_only=True)
class UnpackOptions(Options):
    """Options of reading a packed expert: `base` is where its base is now, `threads` decode."""

    base: str | Path | None = option(None, BASE_PLACE)
    threads: int | None = option(None, THREADS)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(RunOptions):
    """Options of `verify`. `deep_fraction` is the share of the bytes that is recomputed from the inputs."""

    base: str | Path | None = option(None, BASE_PLACE)
    deep_fraction: float = option(
        0.0,
        "Also recompute this share of the bytes from the inputs, and compare, e.g. 5%.",
        name="--deep",
        metavar="SHARE",
        default="nothing",
        read=_read_share,
        check=_check_fraction,
    )


@dataclass(frozen=True, kw_only=True)
class ApplyLoraOptions(OutputOptions):
    """Options of `apply_lora`: those of `OutputOptions`, and what is added."""

    weights: tuple[float, ...] = option((), WEIGHTS)
    dtype: str | None = option(None, "The output's dtype.", metavar="DTYPE", default="that of BASE")
    rounding: str | None = option(None, ROUNDING)
    strict: bool = option(False, "Turn notices into errors.")
    allow_unapplied: tuple[str, ...] = option(
        (), "Leave out modules with this name that BASE lacks. May be given several times.", metavar="GLOB"
    )
    adapter_names: tuple[str, ...] = option((), RENAME)
    tokenizer_of: str | None = option(
        None,
        "The tokenizer and chat template that OUT gets.",
        name="--tokenizer",
        metavar="base|adapter",
        default="the one next to ADAPTER, if it fits",
        choices=("base", "adapter"),
    )


@dataclass(frozen=True, kw_only=True)
class CheckLoraOptions(Options):
    """Options of `check_lora`."""

    adapter_names: tuple[str, ...] = option((), RENAME)
    threads: int | None = option(None, THREADS)


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Options):
    """Options for making an adapter: what is replaced and recorded, and the base that its card names."""

    force: bool = option(False, FORCE)
    base_model_id: str | None = option(None, "Hub id of the base model, for the model card.", metavar="ID")
    home: str | Path | None = option(None, HOME)
    catalog: bool = option(True, NO_CATALOG)


@dataclass(frozen=True, kw_only=True)
class MergeLoraOptions(AdapterOptions):
    """Options of `merge_lora`. By default operators keep the full rank of the result."""

    method: str = option(
        "cat", "cat: exact, ranks add up; svd: truncate to --rank; or a merge method of recipes.", metavar="METHOD"
    )
    rank: int | None = option(None, LARGEST_RANK)
    weights: tuple[float, ...] = option((), WEIGHTS)
    density: float | None = option(
        None, "The density of ties, dare_ties and similar methods.", metavar="SHARE", read=_read_share, check=share
    )
    seed: int = option(0, "Seed of the random operators.", metavar="N")


@dataclass(frozen=True, kw_only=True)
class ConvertLoraOptions(AdapterOptions):
    """Options of `convert_lora`. Of the base only headers and the configuration are read."""

    form: str = option(
        "peft",
        "The form to write.",
        name="--to",
        metavar="FORM",
        choices=("peft", "vllm", "sglang", "mlx", "kohya", "comfyui", "diffusers", "gguf"),
    )
    base: str | Path | None = option(
        None, "The base of ADAPTER, for names that depend on it.", metavar="BASE", default="the adapter's own names"
    )
    adapter_names: tuple[str, ...] = option((), RENAME)
    experts: str | None = option(
        None,
        "Write experts as transformers 5 stacks them, or one by one as before.",
        metavar="stacked|single",
        default="as in ADAPTER",
        choices=("stacked", "single"),
    )
    unsloth_experts: bool = option(
        False,
        "B of stacked experts has the columns of each expert side by side, as older versions of unsloth saved it.",
    )


@dataclass(frozen=True, kw_only=True)
class ExtractLoraOptions(AdapterOptions):
    """Options of `extract_lora`. One of `rank` and `energy` is needed; with both, `rank` is the limit."""

    rank: int | None = option(None, LARGEST_RANK)
    energy: float | None = option(
        None, "Keep this share of each matrix's squared norm.", metavar="SHARE", read=_read_share, check=share
    )
    save_modules: bool = option(False, "Store changed embeddings, output heads, norms and biases in full.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is None and self.energy is None:
            message, hint = "neither a rank nor an energy is given", "give --rank 32 or --energy 0.9"
            raise RecipeError.of("option.missing", "--rank", message, hint)


@dataclass(frozen=True, kw_only=True)
class PushOptions(Options):
    """Options of `push`."""

    create: bool = option(False, "Create the repository on the Hub if it does not exist.")
    private: bool = option(False, "Create it as a private repository.")
    message: str | None = option(None, "The commit message.", metavar="TEXT")
    home: str | Path | None = option(None, HOME)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private and not self.create:
            raise _needs("--private", "--create")


# --- training checkpoints ---

SCHEMES = ("sma", "ema", "wma", "decay-linear", "decay-cosine", "decay-1-sqrt")
STRATEGIES = ("parity", "filter", "paper-parity", "paper-filter", "latest")
STATE_FROM = Flag("Take scheduler, random states and step from this checkpoint.", metavar="CKPT")
EXPORT = Flag(
    "universal: write ZeRO checkpoints as a DeepSpeed universal checkpoint, for any number of ranks.",
    metavar="FORMAT",
    choices=("universal",),
)


@dataclass(frozen=True, kw_only=True)
class TailorOptions(Options):
    """Options for the outputs of tailor: the comparison with the sources before publishing, memory, replacing."""

    self_check: str = option(
        "sampled",
        "Compare OUT with the sources: sampled, full or off.",
        metavar="HOW",
        choices=("sampled", "full", "off"),
    )
    memory_bytes: int = option(256 << 20, "Limit on the memory of buffers.", metavar="SIZE", default="256MiB")
    force: bool = option(False, FORCE)


@dataclass(frozen=True, kw_only=True)
class ComposeOptions(TailorOptions):
    """Options of `tailor.api.compose`. Without `state_from` the state comes from the newest checkpoint that has one."""

    state_from: str | Path | None = option(None, STATE_FROM)
    export: str | None = option(None, EXPORT)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(TailorOptions):
    """Options of the model that tailor writes. If only float32 masters are stored, the weights are float32."""

    dtype: str | None = option(
        None, "Dtype of the model: float32, bfloat16 or float16.", metavar="DTYPE", default="as stored"
    )
    rounding: str | None = option(None, ROUNDING)
    config: str | Path | None = option(
        None, "Folder to take the model's configuration and tokenizer from.", metavar="DIR"
    )
    adapter_config: str | Path | None = option(
        None, "If CKPT has a LoRA: its adapter_config.json.", metavar="FILE", default="the one in CKPT or next to it"
    )
    lora_alpha: float | None = option(
        None, "If CKPT has a LoRA without a configuration: scale it by A divided by its rank.", metavar="A",
        check=_check_finite,
    )  # fmt: skip
    strict: bool = option(False, "Refuse a model whose weights are not those of its architecture.")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions):
    """Options of `tailor.api.export`."""

    adapter: bool = option(False, "Write only the LoRA in CKPT, in PEFT's format, and no model.")


@dataclass(frozen=True, kw_only=True)
class AverageOptions(ModelOptions):
    """Options of `tailor.api.average`."""

    weights: str | tuple[float, ...] = option(
        "sma", f"{', '.join(SCHEMES)}, or numbers: 1,2,3.", metavar="HOW", choices=SCHEMES, is_open=True
    )
    alpha: float | None = option(
        None, "For ema: a checkpoint's weight relative to those before it.", metavar="A", default="0.2"
    )
    optimizer: str = option(
        "none",
        "none: write a model; last or average: write a resumable checkpoint with the last or the averaged moments.",
        metavar="WHAT",
        choices=("none", "last", "average"),
    )


def default_memory_bytes() -> int:
    """Return the default cap on buffers: the lesser of 4 GiB and half of the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 << 30, physical // 2)


def default_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(threads: int | None) -> int:
    """Return the number of compute threads; the default for None."""
    wanted = default_threads() if threads is None else whole("--threads", threads)
    return positive("--threads", wanted, MAX_THREADS)


def engine_options(options: MachineOptions) -> EngineOptions:
    """Return how to run the engine, with the machine's defaults for what was not given."""
    n_threads = threads_of(options.threads)
    from mergepipe.engine.work import EngineOptions

    memory_bytes = default_memory_bytes() if options.memory_bytes is None else options.memory_bytes
    return EngineOptions(n_threads, memory_bytes, positive("--connections", options.connections, MAX_CONNECTIONS))


def block_elements_of(value: int | None) -> int:
    """Return the elements of a block; 256 Ki for None."""
    from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, GRAIN_ELEMENTS

    elements = DEFAULT_BLOCK_ELEMENTS if value is None else value
    if elements < 1 or elements % GRAIN_ELEMENTS or elements > MAX_BLOCK_ELEMENTS:
        hint = f"give a multiple of {GRAIN_ELEMENTS}, {MAX_BLOCK_ELEMENTS} at most"
        raise LimitError.of("option.out-of-range", "block_elements", f"{shown_number(elements)} was given", hint)
    return elements


HOME_VARIABLE = "MERGEPIPE_HOME"


def home_of(
    home: str | Path | None, environment: Mapping[str, str] | None = None, platform: str = sys.platform
) -> Path:
    """Return the catalog's home, absolute; nothing is created.

    A `home` has precedence over $MERGEPIPE_HOME, which has precedence over the platform's user data folder. Empty
    texts count as unset, as does an $XDG_DATA_HOME that is not absolute. The environment is by default that of the
    process.

    Raises:
        OutputError: `output.place`, it is not a folder of this machine.
    """
    environment = os.environ if environment is None else environment
    configured = home or environment.get(HOME_VARIABLE, "")
    if configured:
        return _absolute(output_place(configured).local_path)
    data = Path("~/Library/Application Support")
    if platform != "darwin":
        stated = Path(environment.get("XDG_DATA_HOME", ""))
        data = stated if stated.is_absolute() else Path("~/.local/share")
    return _absolute(data) / "mergepipe"


def _absolute(path: Path) -> Path:
    return Path(os.path.abspath(path.expanduser()))  # noqa: PTH100 - resolves `..` but keeps links, as the user wrote them


def catalog_home(options: RunOptions) -> Path | None:
    """Return the catalog's home; None where no catalog is wanted."""
    return home_of(options.home) if options.catalog else None
