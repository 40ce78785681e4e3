"""View what one rank of any training engine holds: states of parameters by element ranges, tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.core.blocks import DType, Span
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import UnsupportedError
from mergepipe.tailor.checkpoint import FP32, WEIGHT, Framework
from mergepipe.tailor.selection import ModelUnits, Unit, model_units

# --- inspect a torch model inside any wrapper: its tensors by name, and which names are aliases ---


_WRAPPERS = ("module", "_orig_mod")
_WRAPPER_CLASSES = frozenset({"DistributedDataParallel", "DataParallel", "OptimizedModule", "DeepSpeedEngine"})


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """`stored` are the tensors of the model's state, aliases left out; `tied` maps an alias to its owner."""

    stored: dict[str, Any]
    tied: dict[str, str]
    names: dict[int, str]  # by id of the parameter

    def name_of(self, parameter: Any) -> str:
        """Return the name of an optimizer's parameter."""
        if id(parameter) not in self.names:
            raise UnsupportedError.of(
                "training.unsupported", "the optimizer", "has a parameter the model has not",
                "build the optimizer from this model's parameters",
            )  # fmt: skip
        return self.names[id(parameter)]


def unwrapped(model: Any) -> Any:
    """Return the model inside DDP, DeepSpeed and torch.compile."""
    while type(model).__name__ in _WRAPPER_CLASSES:
        model = next(getattr(model, name) for name in _WRAPPERS if hasattr(model, name))
    return model


def module_tensors(model: Any) -> ModuleTensors:
    """Collect the tensors of a model that is not wrapped."""
    if hasattr(model, "peft_config"):
        raise UnsupportedError.of("training.unsupported", type(model).__name__, "adapter models are not saved in parts")
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = names.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return ModuleTensors(stored, tied, names)


# --- view what one rank of any training engine holds: states of parameters by element ranges ---


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LocalShard:
    """The elements `span` of the flattened `parameter`'s state `kind`, as this rank holds them now.

    `read` copies their bytes to the host (uint8); `sample(n)` copies at most n of them, evenly spread (float32).
    """

    parameter: str
    kind: str
    dtype: DType
    span: Span
    read: Callable[[], NDArray[np.uint8]]
    sample: Callable[[int], NDArray[np.float32]]

    @property
    def nbytes(self) -> int:
        return self.span.n_elements * self.dtype.itemsize

    def copied(self) -> LocalShard:
        """Return the shard with its values of now, whatever the engine does next; it is sampled no more."""
        content = self.read().copy()
        return replace(self, read=lambda: content)


@dataclass(frozen=True, slots=True)
class LocalCounter:
    """A step counter: the parameters it serves, and its value when read."""

    parameters: tuple[str, ...]
    read: Callable[[], float]

    def copied(self) -> LocalCounter:
        """Return the counter with its value of now."""
        value = self.read()
        return replace(self, read=lambda: value)


@dataclass(frozen=True, slots=True)
class EngineView:
    """One rank's view of an engine between two steps.

    Everything but `shards` and `writes_counters` is the same on every rank; fields as in `PartialManifest`.
    """

    origin: str
    framework: Framework
    stage: int | None
    world_size: int
    parameters: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]
    flat_groups: tuple[tuple[str, ...], ...]
    options: tuple[Mapping[str, JsonValue], ...]
    counters: tuple[LocalCounter, ...]
    shards: tuple[LocalShard, ...]
    writes_counters: bool

    @property
    def units(self) -> ModelUnits:
        return model_units(self.parameters, self.tied)

    def shards_of(self, names: Iterable[str]) -> Iterator[LocalShard]:
        """Return this rank's shards of the named parameters."""
        wanted = frozenset(names)
        return (shard for shard in self.shards if shard.parameter in wanted)

    def copied(self, names: Iterable[str]) -> EngineView:
        """Return the view with the values of now, of the named parameters alone, as a thread of its own may read it."""
        shards = tuple(shard.copied() for shard in self.shards_of(names))
        return replace(self, counters=tuple(counter.copied() for counter in self.counters), shards=shards)

    def weight_shards(self) -> Iterator[LocalShard]:
        """Return each parameter's most precise weights: the masters, where it has them."""
        mastered = {shard.parameter for shard in self.shards if shard.kind == FP32}
        for shard in self.shards:
            if shard.kind == FP32 or (shard.kind == WEIGHT and shard.parameter not in mastered):
                yield shard

    def local_bytes(self) -> dict[Unit, int]:
        """Sum the bytes of each unit on this rank."""
        units = self.units
        home = {name: unit for unit, names in units.parameters.items() for name in names}
        local_bytes = dict.fromkeys(units.parameters, 0)
        for shard in self.shards:
            local_bytes[home[shard.parameter]] += shard.nbytes
        return local_bytes


class Ranks(Protocol):
    """The processes that train together."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def gather(self, value: Value) -> list[Value]:
        """Gather a small value of every rank, in order of ranks, on every rank. Blocks until all ranks have called."""
        ...

    def for_another_thread(self) -> Ranks:
        """Return the same processes for a thread that gathers beside this one. Called on every rank together."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """A process that trains alone."""

    rank: int = 0
    world_size: int = 1

    def gather(self, value: Value) -> list[Value]:
        return [value]

    def for_another_thread(self) -> Ranks:
        return self
