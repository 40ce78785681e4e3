"""The options of the public calls: immutable values, checked when they are made, changed by `dataclasses.replace`.

Every default has its one owner here, or in the signature of the call. `threads_of` and its like fill in what depends on
the machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mergepipe.core.bounds import positive, shown_number
from mergepipe.errors import LimitError, RecipeError, UnsupportedError, did_you_mean
from mergepipe.planning.choices import OnOmit, Policy
from mergepipe.storage.location import OBJECT_SCHEMES, Location
from mergepipe.storage.traffic import CONNECTIONS, MAX_CONNECTIONS, RemoteSettings

if TYPE_CHECKING:
    from mergepipe.engine.work import EngineOptions

C = TypeVar("C", bound=StrEnum)

DEFAULT_SHARD_BYTES = 5_000_000_000
SWEEP_BUDGETS = ("5%", "10%", "25%", "50%", "75%", "100%")
MAX_THREADS = 1024
MAX_BLOCK_ELEMENTS = 1 << 40


class ExecutorName(StrEnum):
    """The executors of a merge: threads of this process, or tasks of a Ray cluster."""

    THREADS = "threads"  # of this process
    RAY = "ray"  # tasks of a Ray cluster


class PathStyle(StrEnum):
    """The form in which the files of a snapshot name local inputs."""

    RELATIVE = "relative"
    ABSOLUTE = "absolute"


@dataclass(frozen=True, slots=True, kw_only=True)
class _CommonOptions:
    """The options that every long call has."""

    threads: int | None = None
    memory_bytes: int | None = None
    home: str | Path | None = None
    catalog: bool = True
    connections: int = CONNECTIONS

    def __post_init__(self) -> None:
        positive("--connections", self.connections, MAX_CONNECTIONS)
        if self.threads is not None:
            positive("--threads", self.threads, MAX_THREADS)
        if self.memory_bytes is not None:
            positive("--memory", self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(_CommonOptions):
    """Options of using the machine and the catalog. None of them changes a byte of a result.

    Args:
        threads: compute threads; default, one per processor.
        memory_bytes: cap on buffers; default, the lesser of 4 GiB and half of the machine's memory.
        home: the catalog's directory; default $MERGEPIPE_HOME, else the platform's user data folder.
        catalog: use the catalog, and record in it what is published. `analyze` and `sweep` need it.
        connections: requests for remote files that are made at once.

    Raises:
        LimitError, RecipeError: a number that is not above zero, or too large.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of spending a budget.

    Args:
        select: what is read: `norm`, `sample`, `conflict` or `random`.
        where_omitted: `keep` the coefficients where an expert is omitted, or `renormalize` them (linear).
        min_density: let the densities of TIES and DARE fall to this under a tight budget; None leaves them.
        block_elements: elements of a block; default 256 Ki, 2 Mi where all experts are packed and none was analysed.
            Statistics of another grid are carried over.
        request_cost_bytes: gaps of fewer bytes between what is read of a remote expert are read too, and merged, in
            place of another request; by default 3 MB.
        importance: with `select="sample"`, what the probabilities of tensors follow, per element: a JSON object of
            names and numbers, one for each tensor as a whole; safetensors with one number a tensor or an element (such
            as absolute gradient times delta); or a training checkpoint, by its second moments.
        strict, lenient: as in `MergeOptions`; for merges those of `MergeOptions` count.

    Raises:
        LimitError, RecipeError: a name that is not known, or a number out of its range.
    """

    select: str = Policy.NORM.value
    where_omitted: str = OnOmit.KEEP.value
    min_density: float | None = None
    block_elements: int | None = None
    request_cost_bytes: int | None = None
    importance: str | Path | None = None
    strict: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        _check_strictness(strict=self.strict, lenient=self.lenient)
        if self.request_cost_bytes is not None:
            positive("--request-cost", self.request_cost_bytes)
        density = self.min_density
        if density is not None and not 0.0 < density <= 1.0:
            raise RecipeError.of("option.density", "--min-density", f"{density:g} was given", "it is in (0, 1]")
        if choice("--select", self.select, Policy) is not Policy.SAMPLE and self.importance is not None:
            message = f"has no effect with --select {self.select}"
            raise RecipeError.of("option.pair", "--importance", message, "add --select sample")
        choice("--where-omitted", self.where_omitted, OnOmit)
        if self.block_elements is not None:
            block_elements_of(self.block_elements)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions(_CommonOptions):
    """Options of `merge` beside the recipe and the budget.

    Args:
        threads, memory_bytes, home, catalog, connections: see `RunOptions`.
        plan: how a budget is spent; for merges with a `budget`.
        shard_bytes: largest output file, in bytes of tensor data; default 5 GB, on a cluster also less, so that all of
            its nodes have files to make.
        resume: resume an interrupted run of the same merge to the same output; by default where there is one.
        allow_dropped: patterns (`*.extra.*`) of tensors that an expert may have and the base not; they are left out.
        strict: refuse recipes with anything in them that has no effect, and plans that read
            nothing of an expert, instead of telling so in notices.
        lenient: take misspelt names of keys and parameters for such without effect, and shares that look like
            percentages (`density: 40`) as 1, as mergekit does, with warnings.
        card: write the model card.
        tokenizer: copy the tokenizer's files; those that the recipe asks for are written in any case.
        mergekit_config: write the recipe beside the model as `mergekit_config.yml`, too, where the Hub looks for it.
        executor: who makes the files: `threads` of this process, or tasks on a `ray` cluster, where `threads` and
            `memory_bytes` are those of one task, and every node reaches the inputs and the output.
        address: the Ray cluster; default, the one that runs on this machine, else one that is started for this merge.
        paths: how the snapshot's files name local inputs: `relative` to the recipe and the snapshot, or `absolute`.
        base_model_ids: ids on the Hub that the card names as base models: `org/name`, or `MODEL=org/name` for a model
            of the recipe. Those of models from the Hub and its local cache are known without.

    Raises:
        LimitError, RecipeError: a number out of its range, or two options that exclude each other.
    """

    plan: PlanOptions = field(default_factory=PlanOptions)
    shard_bytes: int | None = None
    resume: bool | None = None
    allow_dropped: tuple[str, ...] = ()
    strict: bool = False
    lenient: bool = False
    card: bool = True
    tokenizer: bool = True
    mergekit_config: bool = True
    executor: str = ExecutorName.THREADS.value
    address: str | None = None
    paths: str = PathStyle.RELATIVE.value
    base_model_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_strictness(strict=self.strict, lenient=self.lenient)
        _CommonOptions.__post_init__(self)  # `super()` does not know a class that was made again for its slots
        if self.shard_bytes is not None:
            positive("--shard-size", self.shard_bytes)
        executor_of(self.executor, self.address)
        choice("--paths", self.paths, PathStyle)


def default_memory_bytes() -> int:
    """Return the default cap on buffers: the lesser of 4 GiB and half of the machine's memory."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(4 << 30, physical // 2)


def default_threads() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_seed(seed: int) -> int:
    """Return `seed` if 64 bits hold it, signed or not.

    Raises:
        RecipeError: `option.seed`.
    """
    if not -(2**63) <= seed < 2**64:
        raise RecipeError.of("option.seed", "--seed", f"{shown_number(seed)} was given", "give an integer of 64 bits")
    return seed


def threads_of(threads: int | None) -> int:
    """Return the number of compute threads, the default for None, if the address space has room for them.

    Raises:
        LimitError: a number that is not above zero; `memory.address-space`, as `check_address_space`.
        RecipeError: more than `MAX_THREADS`.
    """
    n_threads = positive("--threads", default_threads() if threads is None else threads, MAX_THREADS)
    from mergepipe.kernels.address_space import check_address_space

    check_address_space(n_threads)
    return n_threads


def engine_options(options: RunOptions | MergeOptions) -> EngineOptions:
    """Return how to run the engine, with the machine's defaults for what was not given.

    Raises:
        LimitError: `memory.address-space`.
    """
    n_threads = threads_of(options.threads)
    from mergepipe.engine.work import EngineOptions

    memory_bytes = default_memory_bytes() if options.memory_bytes is None else options.memory_bytes
    return EngineOptions(n_threads, memory_bytes, RemoteSettings(options.connections))


def block_elements_of(value: int | None) -> int:
    """Return the elements of a block; 256 Ki for None.

    Raises:
        LimitError: no multiple of the block grain, or more than `MAX_BLOCK_ELEMENTS`.
    """
    from mergepipe.core.blocks import DEFAULT_BLOCK_ELEMENTS, GRAIN_ELEMENTS

    elements = DEFAULT_BLOCK_ELEMENTS if value is None else value
    if elements < 1 or elements % GRAIN_ELEMENTS or elements > MAX_BLOCK_ELEMENTS:
        hint = f"give a multiple of {GRAIN_ELEMENTS}, {MAX_BLOCK_ELEMENTS} at most"
        raise LimitError.of("option.block-elements", "block_elements", f"{shown_number(elements)} was given", hint)
    return elements


def choice(option: str, value: str, choices: type[C]) -> C:
    """Return the choice of that name.

    Raises:
        RecipeError: there is none; the message names `option`.
    """
    try:
        return choices(value)
    except ValueError:
        hint = did_you_mean(value, [member.value for member in choices])
        raise RecipeError.of("option.choice", option, f"'{value}' was given", hint) from None


def home_of(home: str | Path | None) -> Path:
    """Return the catalog's home; for None $MERGEPIPE_HOME or the platform's user data folder."""
    from mergepipe.catalog.home import resolve_home

    return resolve_home(Path(home) if home is not None else None)


def catalog_home(options: RunOptions | MergeOptions) -> Path | None:
    """Return the catalog's home; None where no catalog is wanted."""
    return home_of(options.home) if options.catalog else None


def needed_home(options: RunOptions, call: str) -> Path:
    """Return the catalog's home for a call that needs a catalog.

    Raises:
        RecipeError: `option.pair`, none is wanted.
    """
    if not options.catalog:
        raise RecipeError.of("option.pair", "catalog", f"{call} keeps what it learns there", "leave catalog=True")
    return home_of(options.home)


def _check_strictness(*, strict: bool, lenient: bool) -> None:
    if strict and lenient:
        message = "contradicts --lenient: it refuses entries without effect, which --lenient accepts"
        raise RecipeError.of("option.pair", "--strict", message, "give one of the two")


def executor_of(executor: str, address: str | None) -> ExecutorName:
    """Return who makes the files of an output.

    Raises:
        RecipeError: `option.choice`; `option.pair`, an address for none.
    """
    name = choice("--executor", executor, ExecutorName)
    if address is not None and name is not ExecutorName.RAY:
        raise RecipeError.of("option.pair", "--address", "only a Ray cluster has one", "add --executor ray")
    return name


def place_of_packs(place: str | Path) -> Location:
    """Return the folder, of this machine or of a bucket, that experts are packed into.

    Raises:
        UnsupportedError: `pack.remote`, the place is in a store of another kind.
    """
    location = Location.of(place)
    if not location.is_local and location.scheme not in OBJECT_SCHEMES:
        hint = "pack into a folder, then `mergepipe push` each store"
        raise UnsupportedError.of("pack.remote", location, "experts are packed into folders and buckets", hint)
    return location
