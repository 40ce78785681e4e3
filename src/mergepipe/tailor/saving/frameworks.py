"""View what a rank of training holds; alone of `saving`, wrap torch and transformers, which are imported lazily."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.inert_pickle import TORCH_DTYPES
from mergepipe.core.blocks import DType, Span
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import MergePipeError, NotFoundError, UnsupportedError
from mergepipe.tailor.checkpoint import FP32, WEIGHT
from mergepipe.tailor.formats.partial import PartialManifest
from mergepipe.tailor.selection import ModelUnits, Unit, model_units

# --- inspect a torch model inside any wrapper: its tensors by name, and which names are aliases ---


_WRAPPERS = ("module", "_orig_mod")
_WRAPPER_CLASSES = frozenset({"DistributedDataParallel", "DataParallel", "OptimizedModule", "DeepSpeedEngine"})


def unwrapped(model: Any) -> Any:
    """Return the model inside DDP, DeepSpeed and torch.compile."""
    while type(model).__name__ in _WRAPPER_CLASSES:
        model = next(getattr(model, name) for name in _WRAPPERS if hasattr(model, name))
    return model


def module_tensors(model: Any) -> tuple[dict[str, Any], dict[str, str], Callable[[Any], str]]:
    """Collect the tensors of a model that is not wrapped.

    Returns those of its state without aliases, the owner of each alias, and what names an optimizer's parameter.
    """
    if hasattr(model, "peft_config"):
        raise unsupported_training(type(model).__name__, "adapter models are not saved in parts")
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = names.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}

    def name_of(parameter: Any) -> str:
        if id(parameter) not in names:
            message = "has a parameter that the model lacks"
            raise unsupported_training("the optimizer", message, "build the optimizer from this model's parameters")
        return names[id(parameter)]

    return stored, tied, name_of


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
class EngineView:
    """One rank's view of an engine between two steps.

    `layout` is the manifest of a partial save of it, the same on every rank; what is saved, and its shards, are put
    into it then. `counters` read the step counters that it lists.
    """

    layout: PartialManifest
    counters: tuple[Callable[[], float], ...]
    shards: tuple[LocalShard, ...]
    writes_counters: bool

    @property
    def units(self) -> ModelUnits:
        return model_units(self.layout.parameters, self.layout.tied)

    def saving(self, units: Sequence[Unit], step: int) -> EngineView:
        """Return what a save of some units at `step` holds of the view."""
        of_unit = self.units.parameters
        names = {name for unit in units for name in of_unit[unit]}
        served = (tuple(name for name in counted if name in names) for counted in self.layout.counters)
        counters = {counted: read for counted, read in zip(served, self.counters, strict=True) if counted}
        layout = replace(self.layout, step=step, units=tuple(map(str, units)), counters=tuple(counters))
        shards = tuple(shard for shard in self.shards if shard.parameter in names)
        return replace(self, layout=layout, shards=shards, counters=tuple(counters.values()))

    def copied(self) -> EngineView:
        """Return the view with the values of now, for a thread of its own."""
        counters = tuple(partial(float, read()) for read in self.counters)
        return replace(self, shards=tuple(shard.copied() for shard in self.shards), counters=counters)

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


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that train together, as one of them sees them: one alone, or those of a torch.distributed group."""

    rank: int = 0
    world_size: int = 1
    group: Any = None

    def gather(self, value: Value) -> list[Value]:
        """Gather a small value of every rank, in order of ranks, on every rank. Blocks until all ranks have called."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def for_another_thread(self) -> Ranks:
        """Return the same processes for a thread that gathers beside this one. Called on every rank together.

        They get a group of their own: two threads in one group would take each other's messages.
        """
        if self.world_size == 1:
            return self
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo"))


def unsupported_training(where: str, message: str, hint: str = "") -> MergePipeError:
    """Make the error for a run that is not saved in parts."""
    return UnsupportedError.of("training.unsupported", where, message, hint)


def current_ranks() -> Ranks:
    """Return the ranks of torch.distributed where it is running, else this process alone."""
    import torch.distributed as dist

    is_running = dist.is_available() and dist.is_initialized()
    return Ranks(dist.get_rank(), dist.get_world_size()) if is_running else Ranks()


def tensor_of_bytes(raw: NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]) -> Any:
    """A tensor on the host over the memory of its elements' bytes, which nothing else may change."""
    import torch

    name = next(name for name, known in TORCH_DTYPES.items() if known is dtype)
    return torch.from_numpy(raw).view(getattr(torch, name)).reshape(shape)


def local_shard(parameter: str, kind: str, span: Span, tensor: Any) -> LocalShard:
    """A shard that reads `tensor`, which must hold exactly the elements of `span`."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise unsupported_training(f"{kind} of {parameter}", f"tensors of dtype {name} are not saved")

    def read() -> NDArray[np.uint8]:
        """The elements on the host: a copy unless they lie there contiguously already."""
        import torch

        raw: NDArray[np.uint8] = tensor.detach().reshape(-1).to("cpu").contiguous().view(torch.uint8).numpy()
        return raw

    def sample(n_elements: int) -> NDArray[np.float32]:
        flat = tensor.detach().reshape(-1)
        stride = max(1, -(-flat.numel() // n_elements))
        return np.array(flat[::stride].float().to("cpu").numpy(), np.float32)

    return LocalShard(parameter, kind, TORCH_DTYPES[name], span, read, sample)


def scalar_options(group: Mapping[str, Any]) -> dict[str, JsonValue]:
    """The options of an optimizer's parameter group that JSON can hold; one-element tensors as numbers."""
    options: dict[str, JsonValue] = {}
    for key, value in group.items():
        plain = float(value) if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value
        if isinstance(plain, tuple) and all(isinstance(number, int | float) for number in plain):
            options[key] = list(plain)
        elif plain is None or isinstance(plain, bool | int | float | str):
            options[key] = plain
    return options


def save_random_state(path: Path) -> None:
    """Write this process's random states as the Trainer does."""
    import torch

    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        is_alone = current_ranks().world_size == 1
        states["cuda"] = torch.cuda.random.get_rng_state() if is_alone else torch.cuda.random.get_rng_state_all()
    torch.save(states, path)


def restore_random_state(folder: Path) -> None:
    """Restore this process's random states from a checkpoint written by `save_partial`, or a composite of such."""
    import torch

    ranks = current_ranks()
    path = folder / f"rng_state_{ranks.rank}.pth"
    if not path.is_file():
        raise NotFoundError.of("checkpoint.incomplete", folder, f"holds no random states of rank {ranks.rank}")
    rebuild = np.empty(0, np.uint32).__reduce__()[0]  # with these types numpy's random state is pickled
    with torch.serialization.safe_globals([rebuild, np.ndarray, np.dtype, type(np.dtype(np.uint32))]):
        states = torch.load(path, weights_only=True)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        one = isinstance(states["cuda"], torch.Tensor)
        torch.cuda.set_rng_state(states["cuda"]) if one else torch.cuda.set_rng_state_all(states["cuda"])


def save_object(value: object, path: Path) -> None:
    """`torch.save`."""
    import torch

    torch.save(value, path)


def save_distributed(model: Any, optimizer: Any, state: Mapping[str, Any], folder: Path) -> None:
    """Write model, optimizer and `state` as torch.distributed.checkpoint does, on all ranks together."""
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    weights, states = get_state_dict(model, optimizer)
    save({**state, "model": weights, "optim": states}, checkpoint_id=str(folder))


def save_distributed_state(model: Any, optimizer: Any, state: Mapping[str, Any], folder: Path) -> None:
    """Write the optimizer's options and `state` in the form of `save_distributed`, without tensors. One rank alone."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save

    groups = get_optimizer_state_dict(model, optimizer)["param_groups"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it saves in a single process
        save({**state, "optim": {"param_groups": groups}}, checkpoint_id=str(folder), no_dist=True)
