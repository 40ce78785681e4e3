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
PUBLISHING_PANEL = "What the output says of its inputs"
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
        raise RecipeError.of("option.invalid", name, f"{shown_number(seed)} was given", "give an integer of 64 bits")
    return seed


def _read_share(text: str, name: str) -> float:
    from mergepipe.planning.budget import parse_fraction

    return parse_fraction(text, name, "option.invalid")


def _read_number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RecipeError.of("option.invalid", name, f"'{text}' is no number", "give one such as 0.5") from None


def _check_finite(name: str, number: float) -> None:
    if not math.isfinite(number):
        raise RecipeError.of("option.invalid", name, f"{number:g} was given", "give a finite number, such as 0.5")


def _check_fraction(name: str, fraction: float) -> None:
    if not 0.0 <= fraction <= 1.0:
        raise LimitError.of("option.out-of-range", name, f"{fraction:g} was given", "give a share from 0 to 1")


def _needs(name: str, other: str) -> MergePipeError:
    return RecipeError.of("option.conflict", name, "has no meaning by itself", f"add {other}")


# --- flags of options that several classes have ---

THREADS = Flag(
    "Compute threads.",
    metavar="N",
    default="one per processor",
    panel=MACHINE_PANEL,
    check=lambda name, value: positive(name, whole(name, value), MAX_THREADS),
)
HOME = Flag(
    "Where the catalog is.", metavar="DIR", default="$MERGEPIPE_HOME, else the user data folder", panel=WORK_PANEL
)
NO_CATALOG = Flag("Use no catalog, and record nothing in it.", panel=WORK_PANEL)
FORCE = Flag("Replace OUT, if mergepipe made it.")
APPLY_MEMORY_BYTES = 512 << 20
"""Buffers of an adapter's application: more would not make it faster."""
BUDGET = Flag(
    "Read at most this from the experts: a share of what reading all would cost (25%, 0.25) or bytes (4GiB).",
    metavar="BUDGET",
    default="everything is read",
    panel=BUDGET_PANEL,
)
EVALUATE = Flag(
    "Run this command on each merge, without a shell; the last number that it prints is the loss. {} stands for the "
    "merge's folder, which comes last without. loss:FILE is the mean loss on a text.",
    metavar="CMD",
)
SHARD_SIZE = Flag("Largest output file, e.g. 5GB.", name="--shard-size", metavar="SIZE", default="5GB")
STRICT = Flag("Refuse a recipe with a notice, a plan that reads nothing of an expert, and reads beyond a budget.")
BLOCK_ELEMENTS = Flag(
    "Elements of a block, a multiple of 16384.",
    metavar="N",
    default="262144",
    panel=RARE_PANEL,
    check=lambda _, value: block_elements_of(value),
)
BASE_PLACE = Flag("Where the base of a packed expert is now.", metavar="BASE", default="where it was")
WEIGHTS = Flag(
    "One for each ADAPTER, in order.", name="--weight", metavar="W", default="1", read=_read_number, check=_check_finite
)
LARGEST_RANK = Flag("Largest rank of a module.", metavar="R", check=positive)


@dataclass(frozen=True, kw_only=True)
class MachineOptions(Options):
    """Options of using the machine, and of the home folder. None of them changes a byte of a result.

    `memory_bytes` caps buffers. `home` is the folder of the catalog and of statistics.
    """

    threads: int | None = option(None, THREADS)
    memory_bytes: int | None = option(
        None,
        "Cap on buffers, e.g. 4GiB.",
        metavar="SIZE",
        default="4GiB, or half of the RAM if less",
        panel=MACHINE_PANEL,
    )
    home: str | Path | None = option(None, HOME)
    connections: int = option(
        CONNECTIONS,
        "Requests for remote files at once.",
        metavar="N",
        panel=RARE_PANEL,
        check=partial(positive, most=MAX_CONNECTIONS),
    )


@dataclass(frozen=True, kw_only=True)
class RunOptions(MachineOptions):
    """Options of using the machine and the catalog. None of them changes a byte of a result."""

    catalog: bool = option(True, NO_CATALOG)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Options):
    """Options of reading a recipe."""

    allow_dropped: tuple[str, ...] = option(
        (),
        "Leave out tensors of this name that an expert has and the base has not. May be given again.",
        metavar="GLOB",
    )
    strict: bool = option(False, STRICT)
    lenient: bool = option(
        False,
        "Take misspelt names for such without effect, and shares like 40 as 1, as mergekit does.",
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

    Without `select` a sample is read; by norm where weights are renormalised, or the rule cannot be sampled and all
    experts were analyzed or packed. Statistics of another grid than `block_elements` are carried over.
    """

    select: str | None = option(
        None,
        f"What to read: {', '.join(Policy)}.",
        metavar="POLICY",
        default="sample, where that can be",
        panel=BUDGET_PANEL,
        choices=tuple(Policy),
    )
    where_omitted: str = option(
        OnOmit.KEEP.value,
        "Where an expert is omitted, keep the weights of the others, or renormalize them (linear).",
        metavar="RULE",
        panel=BUDGET_PANEL,
        choices=tuple(OnOmit),
    )
    min_density: float | None = option(
        None,
        "Let densities of TIES and DARE fall to this under a tight budget.",
        metavar="SHARE",
        default="they stay",
        panel=RARE_PANEL,
        read=_read_share,
        check=share,
    )
    block_elements: int | None = option(None, BLOCK_ELEMENTS)
    importance: str | Path | None = option(
        None,
        "Of a sample: draw important tensors more often. A JSON object of numbers by tensor, safetensors "
        "with one number a tensor or an element, or a training checkpoint (second moments).",
        metavar="PATH",
        panel=RARE_PANEL,
    )
    seed: int = option(
        0,
        "Seed of the random operators, and of --select sample and random.",
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
    """Options of making an output of a plan: those of `RunOptions`, and what is written how.

    On a cluster `threads` and `memory_bytes` are those of one task, every node reaches the inputs and the output, and
    files are smaller where nodes would have none to make. `shard_bytes` is the same for all parts of an output.
    """

    force: bool = option(False, FORCE)
    strict: bool = option(False, "Refuse to read again beyond the budget what an interrupted run lost.")
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
        "A base model on the Hub for the model card: org/name, or MODEL=org/name. May be given several times.",
        name="--base-model-id",
        metavar="ID",
        panel=PUBLISHING_PANEL,
    )
    resume: bool | None = option(
        None, "Resume an interrupted run of the same merge to OUT.", default="if there is one", panel=WORK_PANEL
    )
    executor: str = option(
        ExecutorName.THREADS.value,
        "Who makes OUT's files: threads of this process, or ray, tasks on a cluster.",
        metavar="NAME",
        panel=PARTS_PANEL,
        choices=tuple(ExecutorName),
    )
    address: str | None = option(
        None,
        "The Ray cluster.",
        metavar="HOST:PORT",
        default="the one that runs here, else one on this machine alone",
        panel=PARTS_PANEL,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and self.executor != ExecutorName.RAY:
            message = "only a Ray cluster has one"
            raise RecipeError.of("option.conflict", "--address", message, "add --executor ray")


@dataclass(frozen=True, kw_only=True)
class MergeOptions(OutputOptions, PlanOptions):
    """Options of `merge`: those of `OutputOptions`, those of `PlanOptions` for a budget, and what is merged.

    Args:
        card: write the model card.
        tokenizer: copy the tokenizer's files; those that the recipe asks for are written in any case.
        mergekit_config: write the recipe as `mergekit_config.yml`, too, where the Hub looks for it.
    """

    budget: str | float | None = option(None, BUDGET)
    target_loss: float | None = option(
        None,
        "Merge under 5, 10, 25, 50 and 100 % in turn, until the loss that --evaluate prints is at most X; publish "
        "that merge alone.",
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
            message = "tries budgets in turn, and looks at each merge in a folder of this machine"
            hint = "leave out --budget, and merge into a folder without --executor"
            raise RecipeError.of("option.conflict", "--target-loss", message, hint)


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(MachineOptions):
    """Options of `analyze`.

    What `text` tells is the sum of absolute gradient times delta of each tensor over all experts, for `importance` of
    `PlanOptions`; the base lies in a folder then.
    """

    densities: tuple[float, ...] = option(
        (),
        "Work out this magnitude cut too; may be given several times.",
        name="--density",
        metavar="SHARE",
        read=_read_share,
        check=share,
    )
    block_elements: int | None = option(None, BLOCK_ELEMENTS)
    text: str | Path | None = option(
        None,
        "Also measure which tensors matter to this text, by the gradient of BASE. Takes transformers, and 8 bytes "
        "of memory a parameter.",
        metavar="FILE",
    )
    importance_out: str | Path | None = option(
        None, "For --text: write that to FILE, for `merge --importance`.", metavar="FILE"
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
        None, "Where two outputs fit at a time.", metavar="DIR", default="for temporary files"
    )
    evaluate: str | None = option(None, EVALUATE)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(MachineOptions):
    """Options of `search`: how values are tried, and how merges are evaluated. Trials lie where temporary files go."""

    evaluate: str | None = option(None, EVALUATE)
    trials: int = option(50, "How many merges to try.", metavar="N", check=positive)
    trial_timeout: float | None = option(
        None, "Give an evaluation up after so long.", metavar="SECONDS", check=positive
    )
    rungs: tuple[str, ...] = option(
        (), "Merge each trial under this budget first; the best third goes on. Repeat.", name="--rung", metavar="BUDGET"
    )
    objectives: tuple[str, ...] = option(
        (),
        "A name in the JSON object that CMD prints last, NAME or NAME:max. Repeat.",
        name="--objective",
        metavar="NAME",
    )
    sampler: str = option("tpe", "How values are proposed.", metavar="NAME", choices=("tpe", "cmaes", "random"))
    resume: bool = option(False, "Go on with the study beside the output.")


@dataclass(frozen=True, kw_only=True)
class PackOptions(Options):
    """Options of `pack`. With a `chain`, so many stores at most are decoded to restore one."""

    chain: int | None = option(
        None,
        "EXPERTs are checkpoints of one run in order: pack each on the one before, every N-th on BASE.",
        metavar="N",
        check=positive,
    )
    strict: bool = option(False, "Refuse a base that is hardly an expert's, or one of several.")
    threads: int | None = option(None, THREADS)
    home: str | Path | None = option(None, HOME)


@dataclass(frozen=True, kw_only=True)
class UnpackOptions(Options):
    """Options of reading a packed expert: `base` is where its base is now, `threads` decode."""

    base: str | Path | None = option(None, BASE_PLACE)
    threads: int | None = option(None, THREADS)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(RunOptions):
    """Options of `verify`. `deep_fraction` is the share of the bytes that is made again from the inputs."""

    base: str | Path | None = option(None, BASE_PLACE)
    deep_fraction: float = option(
        0.0,
        "Make this share again from the inputs too, and compare, e.g. 5%.",
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
    strict: bool = option(False, "Refuse what has a notice.")
    allow_unapplied: tuple[str, ...] = option(
        (), "Leave out modules of this name, which BASE lacks. May be given again.", metavar="GLOB"
    )
    tokenizer_of: str | None = option(
        None,
        "The tokenizer and chat template that OUT gets.",
        name="--tokenizer",
        metavar="base|adapter",
        default="the one next to ADAPTER, if it fits",
        choices=("base", "adapter"),
    )


@dataclass(frozen=True, kw_only=True)
class AdapterOptions(Options):
    """Options of making an adapter: what is replaced and recorded, and what its card says of its base."""

    force: bool = option(False, FORCE)
    base_model_id: str | None = option(None, "The base on the Hub.", metavar="ID")
    home: str | Path | None = option(None, HOME)
    catalog: bool = option(True, NO_CATALOG)


@dataclass(frozen=True, kw_only=True)
class MergeLoraOptions(AdapterOptions):
    """Options of `merge_lora`. Operators by default keep all ranks that the result has."""

    method: str = option(
        "cat", "cat: exact, ranks add up; svd: cut to --rank; or an operator of recipes.", metavar="METHOD"
    )
    rank: int | None = option(None, LARGEST_RANK)
    weights: tuple[float, ...] = option((), WEIGHTS)
    density: float | None = option(
        None, "The density of ties, dare_ties and the like.", metavar="SHARE", read=_read_share, check=share
    )
    seed: int = option(0, "Seed of operators that draw.", metavar="N")


@dataclass(frozen=True, kw_only=True)
class ExtractLoraOptions(AdapterOptions):
    """Options of `extract_lora`. One of `rank` and `energy` is needed; with both, `rank` is the limit."""

    rank: int | None = option(None, LARGEST_RANK)
    energy: float | None = option(
        None, "Keep this share of each matrix's square sum.", metavar="SHARE", read=_read_share, check=share
    )
    save_modules: bool = option(False, "Store embeddings, output heads, norms and biases that changed in full.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is None and self.energy is None:
            message, hint = "neither a rank nor an energy is given", "give --rank 32 or --energy 0.9"
            raise RecipeError.of("option.missing", "--rank", message, hint)


@dataclass(frozen=True, kw_only=True)
class PushOptions(Options):
    """Options of `push`."""

    create: bool = option(False, "Create the repository on the Hub, unless it is there.")
    private: bool = option(False, "Create it as a private one.")
    message: str | None = option(None, "The message of the commit.", metavar="TEXT")
    home: str | Path | None = option(None, HOME)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.private and not self.create:
            raise _needs("--private", "--create")


# --- training checkpoints ---

SCHEMES = ("sma", "ema", "wma", "decay-linear", "decay-cosine", "decay-1-sqrt")
STRATEGIES = ("parity", "filter", "paper-parity", "paper-filter", "latest")
STATE_FROM = Flag("Take scheduler, random states and step from this one.", metavar="CKPT")
EXPORT = Flag(
    "universal: write a DeepSpeed universal checkpoint (of ZeRO ones), for any number of ranks.",
    metavar="FORMAT",
    choices=("universal",),
)


@dataclass(frozen=True, kw_only=True)
class TailorOptions(Options):
    """Options of what tailor writes: what is compared with the sources before publishing, memory, what is replaced."""

    self_check: str = option(
        "sampled", "Compare with the sources: sampled, full or off.", metavar="HOW", choices=("sampled", "full", "off")
    )
    memory_bytes: int = option(256 << 20, "Cap on buffers.", metavar="SIZE", default="256MiB")
    force: bool = option(False, FORCE)


@dataclass(frozen=True, kw_only=True)
class ComposeOptions(TailorOptions):
    """Options of `tailor.api.compose`. Without `state_from` the newest checkpoint that has state gives it."""

    state_from: str | Path | None = option(None, STATE_FROM)
    export: str | None = option(None, EXPORT)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(TailorOptions):
    """Options of the model that tailor makes. Where only float32 masters are stored, weights are of that dtype."""

    dtype: str | None = option(None, "Of a model: float32, bfloat16 or float16.", metavar="DTYPE", default="as stored")
    config: str | Path | None = option(None, "Of a model: take configuration and tokenizer from here.", metavar="DIR")
    adapter_config: str | Path | None = option(
        None, "Of a LoRA in CKPT: its adapter_config.json.", metavar="FILE", default="the one in CKPT or next to it"
    )
    lora_alpha: float | None = option(
        None, "Of a LoRA in CKPT without a configuration: scale by this over its rank.", metavar="A",
        check=_check_finite,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions):
    """Options of `tailor.api.export`."""

    adapter: bool = option(False, "Write the LoRA in CKPT, as PEFT reads it, and no model.")


@dataclass(frozen=True, kw_only=True)
class AverageOptions(ModelOptions):
    """Options of `tailor.api.average`."""

    weights: str | tuple[float, ...] = option(
        "sma", f"{', '.join(SCHEMES)}, or numbers: 1,2,3.", metavar="HOW", choices=SCHEMES, is_open=True
    )
    alpha: float | None = option(
        None, "Of ema: a checkpoint's weight against those before it.", metavar="A", default="0.2"
    )
    optimizer: str = option(
        "none",
        "none: write a model; last, average: a checkpoint to resume from, with these moments.",
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
    """Return the number of compute threads, the default for None, if the address space has room for them."""
    n_threads = positive(
        "--threads", default_threads() if threads is None else whole("--threads", threads), MAX_THREADS
    )
    from mergepipe.kernels.compiled import check_address_space

    check_address_space(n_threads)
    return n_threads


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
