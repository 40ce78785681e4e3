"""The options of the public calls: immutable values, checked when they are made, changed by `dataclasses.replace`.

Every option is declared here once: its field has the default, and the `Flag` that the command line, its help and the
reference pages are made from. `threads_of` and its like fill in what depends on the machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mergepipe.core.bounds import positive, shown_number
from mergepipe.core.flags import Flag, option
from mergepipe.errors import LimitError, RecipeError, UnsupportedError, did_you_mean
from mergepipe.planning.budget import OnOmit, Policy
from mergepipe.storage.contract import CONNECTIONS, MAX_CONNECTIONS, RemoteSettings
from mergepipe.storage.location import OBJECT_SCHEMES, Location

if TYPE_CHECKING:
    from mergepipe.engine.work import EngineOptions

C = TypeVar("C", bound=StrEnum)

DEFAULT_SHARD_BYTES = 5_000_000_000
SWEEP_BUDGETS = ("5%", "10%", "25%", "50%", "75%", "100%")
MAX_THREADS = 1024
MAX_BLOCK_ELEMENTS = 1 << 40

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


def _share(text: str, name: str) -> float:
    from mergepipe.planning.budget import parse_fraction

    return parse_fraction(text, name, "option.invalid")


THREADS = Flag("Compute threads.", metavar="N", default="one per processor", panel=MACHINE_PANEL)
HOME = Flag(
    "Where the catalog is.", metavar="DIR", default="$MERGEPIPE_HOME, else the user data folder", panel=WORK_PANEL
)
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
    "merge's folder, which comes last without.",
    metavar="CMD",
)
SEED = Flag("Seed of the random operators, and of --select sample and random.", metavar="N")
ALLOW_DROPPED = Flag(
    "Leave out tensors of this name that an expert has and the base has not. May be given again.", metavar="GLOB"
)
STRICT = Flag("Refuse a recipe with a notice, a plan that reads nothing of an expert, and reads beyond a budget.")
LENIENT = Flag(
    "Take misspelt names for such without effect, and shares like 40 as 1, as mergekit does.", panel=RARE_PANEL
)
BLOCK_ELEMENTS = Flag("Elements of a block, a multiple of 16384.", metavar="N", default="262144", panel=RARE_PANEL)
SHARD_SIZE = Flag("Largest output file, e.g. 5GB.", name="--shard-size", metavar="SIZE", default="5GB")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of using the machine and the catalog. None of them changes a byte of a result.

    `memory_bytes` caps buffers. `analyze` and `sweep` need the `catalog`.

    Raises:
        LimitError, RecipeError: a number that is not above zero, or too large.
    """

    threads: int | None = option(None, THREADS)
    memory_bytes: int | None = option(
        None,
        Flag(
            "Cap on buffers, e.g. 4GiB.",
            metavar="SIZE",
            default="4GiB, or half of the RAM if less",
            panel=MACHINE_PANEL,
        ),
    )
    home: str | Path | None = option(None, HOME)
    catalog: bool = option(True, Flag("Use no catalog, and record nothing in it.", panel=WORK_PANEL))
    connections: int = option(CONNECTIONS, Flag("Requests for remote files at once.", metavar="N", panel=RARE_PANEL))

    def __post_init__(self) -> None:
        positive("--connections", self.connections, MAX_CONNECTIONS)
        if self.threads is not None:
            positive("--threads", self.threads, MAX_THREADS)
        if self.memory_bytes is not None:
            positive("--memory", self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of spending a budget.

    Without `select` a sample is read; by norm where weights are renormalised, or the rule cannot be sampled and all
    experts were analyzed or packed. Statistics of another grid than `block_elements` are carried over. For merges
    `strict` and `lenient` of `MergeOptions` count.

    Raises:
        LimitError, RecipeError: a name that is not known, or a number out of its range.
    """

    select: str | None = option(
        None,
        Flag(
            f"What to read: {', '.join(Policy)}.",
            metavar="POLICY",
            default="sample, where that can be",
            panel=BUDGET_PANEL,
            choices=tuple(Policy),
        ),
    )
    where_omitted: str = option(
        OnOmit.KEEP.value,
        Flag(
            "Where an expert is omitted, keep the weights of the others, or renormalize them (linear).",
            metavar="RULE",
            panel=BUDGET_PANEL,
            choices=tuple(OnOmit),
        ),
    )
    min_density: float | None = option(
        None,
        Flag(
            "Let densities of TIES and DARE fall to this under a tight budget.",
            metavar="SHARE",
            default="they stay",
            panel=RARE_PANEL,
            read=_share,
        ),
    )
    block_elements: int | None = option(None, BLOCK_ELEMENTS)
    importance: str | Path | None = option(
        None,
        Flag(
            "Of a sample: draw important tensors more often. A JSON object of numbers by tensor, safetensors "
            "with one number a tensor or an element, or a training checkpoint (second moments).",
            metavar="PATH",
            panel=RARE_PANEL,
        ),
    )
    strict: bool = option(False, STRICT)
    lenient: bool = option(False, LENIENT)

    def __post_init__(self) -> None:
        _check_strictness(strict=self.strict, lenient=self.lenient)
        density = self.min_density
        if density is not None and not 0.0 < density <= 1.0:
            raise RecipeError.of("option.invalid", "--min-density", f"{density:g} was given", "it is in (0, 1]")
        policy = None if self.select is None else choice("--select", self.select, Policy)
        if self.importance is not None and policy not in (None, Policy.SAMPLE):
            message = f"has no effect with --select {self.select}"
            raise RecipeError.of("option.conflict", "--importance", message, "leave --select out")
        choice("--where-omitted", self.where_omitted, OnOmit)
        if self.block_elements is not None:
            block_elements_of(self.block_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions(RunOptions):
    """Options of making an output of a plan: those of `RunOptions`, and what is written how.

    Args:
        shard_bytes: largest output file, in bytes of tensor data; default 5 GB, on a cluster also less, so that all of
            its nodes have files to make. The same for all parts of an output.
        executor: who makes the files: `threads` of this process, or tasks on a `ray` cluster, where `threads` and
            `memory_bytes` are those of one task, and every node reaches the inputs and the output.

    Raises:
        LimitError, RecipeError: a number out of its range, or two options that exclude each other.
    """

    force: bool = option(False, FORCE)
    shard_bytes: int | None = option(None, SHARD_SIZE)
    paths: str = option(
        PathStyle.RELATIVE.value,
        Flag(
            "How the output's files name local inputs: relative or absolute.",
            metavar="STYLE",
            panel=RARE_PANEL,
            choices=tuple(PathStyle),
        ),
    )
    base_model_ids: tuple[str, ...] = option(
        (),
        Flag(
            "A base model on the Hub for the model card: org/name, or MODEL=org/name. May be given several times.",
            name="--base-model-id",
            metavar="ID",
            panel=PUBLISHING_PANEL,
        ),
    )
    resume: bool | None = option(
        None,
        Flag(
            "Resume an interrupted run of the same merge to OUT.",
            default="if there is one",
            panel=WORK_PANEL,
        ),
    )
    executor: str = option(
        ExecutorName.THREADS.value,
        Flag(
            "Who makes OUT's files: threads of this process, or ray, tasks on a cluster.",
            metavar="NAME",
            panel=PARTS_PANEL,
            choices=tuple(ExecutorName),
        ),
    )
    address: str | None = option(
        None,
        Flag(
            "The Ray cluster.",
            metavar="HOST:PORT",
            default="the one that runs here, else one on this machine alone",
            panel=PARTS_PANEL,
        ),
    )

    def __post_init__(self) -> None:
        RunOptions.__post_init__(self)  # `super()` does not know a class that was made again for its slots
        if self.shard_bytes is not None:
            positive("--shard-size", self.shard_bytes)
        choice("--paths", self.paths, PathStyle)
        executor_of(self.executor, self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions(OutputOptions):
    """Options of `merge`: those of `OutputOptions`, what is merged, and `plan`, how a budget is spent.

    Args:
        card: write the model card.
        tokenizer: copy the tokenizer's files; those that the recipe asks for are written in any case.
        mergekit_config: write the recipe beside the model as `mergekit_config.yml`, too, where the Hub looks for it.

    Raises:
        LimitError, RecipeError: a number out of its range, or two options that exclude each other.
    """

    budget: str | float | None = option(None, BUDGET)
    target_loss: float | None = option(
        None,
        Flag(
            "Merge under 5, 10, 25, 50 and 100 % in turn, until the loss that --evaluate prints is at most X; publish "
            "that merge alone.",
            metavar="X",
            panel=BUDGET_PANEL,
        ),
    )
    evaluate: str | None = option(
        None, replace(EVALUATE, help=f"For --target-loss. {EVALUATE.help}", panel=BUDGET_PANEL)
    )
    plan: PlanOptions = field(default_factory=PlanOptions)
    seed: int = option(0, SEED)
    allow_dropped: tuple[str, ...] = option((), ALLOW_DROPPED)
    strict: bool = option(False, STRICT)
    lenient: bool = option(False, LENIENT)
    card: bool = True
    tokenizer: bool = True
    mergekit_config: bool = True

    def __post_init__(self) -> None:
        OutputOptions.__post_init__(self)
        _check_strictness(strict=self.strict, lenient=self.lenient)
        check_seed(self.seed)
        if self.target_loss is None and self.evaluate is None:
            return
        if self.target_loss is None or self.evaluate is None:
            name, other = (
                ("--evaluate", "--target-loss X") if self.target_loss is None else ("--target-loss", "--evaluate CMD")
            )
            raise RecipeError.of("option.conflict", name, "has no meaning by itself", f"add {other}")
        if self.budget is not None or self.executor != ExecutorName.THREADS:
            message = "tries budgets in turn, and looks at each merge in a folder of this machine"
            hint = "leave out --budget, and merge into a folder without --executor"
            raise RecipeError.of("option.conflict", "--target-loss", message, hint)


Kind = TypeVar("Kind", bound=RunOptions)


def options_as(kind: type[Kind], options: RunOptions | None, **changes: object) -> Kind:
    """Return the options of a call as `kind`: those given, with the `changes` that are not None, else its defaults."""
    names = {declared.name for declared in fields(kind)} & {declared.name for declared in fields(options or kind)}
    values: dict[str, Any] = {} if options is None else {name: getattr(options, name) for name in names}
    return kind(**values | {name: value for name, value in changes.items() if value is not None})


def default_memory_bytes() -> int:
    """Return the default cap on buffers: the lesser of 4 GiB and half of the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 << 30, physical // 2)


def default_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_seed(seed: int) -> int:
    """Return `seed` if 64 bits hold it, signed or not."""
    if not -(2**63) <= seed < 2**64:
        raise RecipeError.of(
            "option.invalid", "--seed", f"{shown_number(seed)} was given", "give an integer of 64 bits"
        )
    return seed


def threads_of(threads: int | None) -> int:
    """Return the number of compute threads, the default for None, if the address space has room for them."""
    n_threads = positive("--threads", default_threads() if threads is None else threads, MAX_THREADS)
    from mergepipe.kernels.address_space import check_address_space

    check_address_space(n_threads)
    return n_threads


def engine_options(options: RunOptions) -> EngineOptions:
    """Return how to run the engine, with the machine's defaults for what was not given."""
    n_threads = threads_of(options.threads)
    from mergepipe.engine.work import EngineOptions

    memory_bytes = default_memory_bytes() if options.memory_bytes is None else options.memory_bytes
    return EngineOptions(n_threads, memory_bytes, RemoteSettings(options.connections))


def block_elements_of(value: int | None) -> int:
    """Return the elements of a block; 256 Ki for None."""
    from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, GRAIN_ELEMENTS

    elements = DEFAULT_BLOCK_ELEMENTS if value is None else value
    if elements < 1 or elements % GRAIN_ELEMENTS or elements > MAX_BLOCK_ELEMENTS:
        hint = f"give a multiple of {GRAIN_ELEMENTS}, {MAX_BLOCK_ELEMENTS} at most"
        raise LimitError.of("option.out-of-range", "block_elements", f"{shown_number(elements)} was given", hint)
    return elements


def choice(option: str, value: str, choices: type[C]) -> C:
    """Return the choice of that name."""
    try:
        return choices(value)
    except ValueError:
        hint = did_you_mean(value, [member.value for member in choices])
        raise RecipeError.of("option.invalid", option, f"'{value}' was given", hint) from None


def home_of(home: str | Path | None) -> Path:
    """Return the catalog's home; for None $MERGEPIPE_HOME or the platform's user data folder."""
    from mergepipe.catalog.home import resolve_home

    return resolve_home(Path(home) if home is not None else None)


def catalog_home(options: RunOptions) -> Path | None:
    """Return the catalog's home; None where no catalog is wanted."""
    return home_of(options.home) if options.catalog else None


def needed_home(options: RunOptions, call: str) -> Path:
    """Return the catalog's home for a call that needs a catalog."""
    if not options.catalog:
        raise RecipeError.of("option.conflict", "catalog", f"{call} keeps what it learns there", "leave catalog=True")
    return home_of(options.home)


def _check_strictness(*, strict: bool, lenient: bool) -> None:
    if strict and lenient:
        message = "contradicts --lenient: it refuses entries without effect, which --lenient accepts"
        raise RecipeError.of("option.conflict", "--strict", message, "give one of the two")


def executor_of(executor: str, address: str | None) -> ExecutorName:
    """Return who makes the files of an output."""
    name = choice("--executor", executor, ExecutorName)
    if address is not None and name is not ExecutorName.RAY:
        raise RecipeError.of("option.conflict", "--address", "only a Ray cluster has one", "add --executor ray")
    return name


def place_of_packs(place: str | Path) -> Location:
    """Return the folder, of this machine or of a bucket, that experts are packed into."""
    location = Location.of(place)
    if not location.is_local and location.scheme not in OBJECT_SCHEMES:
        hint = "pack into a folder, then `mergepipe push` each store"
        raise UnsupportedError.of("pack.unsupported", location, "experts are packed into folders and buckets", hint)
    return location
