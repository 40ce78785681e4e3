"""Wrap torch and transformers for partial saving: the only module of `saving` that imports them, lazily."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.inert_values import TORCH_DTYPES
from mergepipe.core.blocks import DType, Span
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import MergePipeError, NotFoundError, UnsupportedError
from mergepipe.tailor.saving.engine_view import LocalShard, Ranks, SingleRank, Value


def trainer_callback_base() -> Any:
    """The class that the Trainer's callbacks derive from."""
    try:
        from transformers import TrainerCallback
    except ImportError as error:
        raise _not_installed("transformers") from error
    return TrainerCallback


def _not_installed(package: str) -> MergePipeError:
    return UnsupportedError.of("extra.missing", package, "is not installed", "install mergepipe[train]")


@dataclass(frozen=True, slots=True)
class TorchRanks:
    """The processes of torch.distributed's default group, or of another group of the same ones."""

    rank: int
    world_size: int
    group: Any = None

    def gather(self, value: Value) -> list[Value]:
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def for_another_thread(self) -> Ranks:
        """Make a group of its own: two threads in one group would take each other's messages."""
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo"))


def current_ranks() -> Ranks:
    """Return the ranks of torch.distributed where it is running, else this process alone."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return SingleRank()
    return TorchRanks(dist.get_rank(), dist.get_world_size())


def dtype_of(tensor: Any, where: str) -> DType:
    """The dtype of a tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in TORCH_DTYPES:
        raise UnsupportedError.of("training.unsupported", where, f"tensors of dtype {name} are not saved")
    return TORCH_DTYPES[name]


def tensor_bytes(tensor: Any) -> NDArray[np.uint8]:
    """The elements of a tensor on the host, as bytes: a copy unless it lies there contiguously already."""
    import torch

    on_host = tensor.detach().reshape(-1).to("cpu").contiguous()
    raw: NDArray[np.uint8] = on_host.view(torch.uint8).numpy()
    return raw


def tensor_of_bytes(raw: NDArray[np.uint8], dtype: DType, shape: tuple[int, ...]) -> Any:
    """A tensor on the host over the memory of its elements' bytes, which nothing else may change."""
    import torch

    name = next(name for name, known in TORCH_DTYPES.items() if known is dtype)
    return torch.from_numpy(raw).view(getattr(torch, name)).reshape(shape)


def tensor_sample(tensor: Any, n_elements: int) -> NDArray[np.float32]:
    """At most `n_elements` evenly spread elements as float32, copied."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, -(-flat.numel() // n_elements))
    return np.array(flat[::stride].float().to("cpu").numpy(), np.float32)


def local_shard(parameter: str, kind: str, span: Span, tensor: Any) -> LocalShard:
    """A shard that reads `tensor`, which must hold exactly the elements of `span`."""
    return LocalShard(
        parameter,
        kind,
        dtype_of(tensor, f"{kind} of {parameter}"),
        span,
        lambda: tensor_bytes(tensor),
        lambda n_elements: tensor_sample(tensor, n_elements),
    )


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
        is_alone = isinstance(current_ranks(), SingleRank)
        states["cuda"] = torch.cuda.random.get_rng_state() if is_alone else torch.cuda.random.get_rng_state_all()
    torch.save(states, path)


def restore_random_state(folder: Path) -> None:
    """Restore this process's random states from a checkpoint written by `save_partial`, or a composite of such.

    Raises:
        NotFoundError: it has none of this rank.
    """
    import torch

    ranks = current_ranks()
    path = folder / f"rng_state_{ranks.rank}.pth"
    if not path.is_file():
        raise NotFoundError.of("checkpoint.incomplete", folder, f"holds no random states of rank {ranks.rank}")
    with torch.serialization.safe_globals(_random_types()):
        states = torch.load(path, weights_only=True)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.random.set_rng_state(states["cpu"])
    if torch.cuda.is_available() and "cuda" in states:
        one = isinstance(states["cuda"], torch.Tensor)
        torch.cuda.set_rng_state(states["cuda"]) if one else torch.cuda.set_rng_state_all(states["cuda"])


def _random_types() -> list[Any]:
    """List the types in numpy's pickled random state, as the allow-list of a loader."""
    rebuild = np.empty(0, np.uint32).__reduce__()[0]
    return [rebuild, np.ndarray, np.dtype, type(np.dtype(np.uint32))]


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
