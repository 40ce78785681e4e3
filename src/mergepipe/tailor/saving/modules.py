"""Inspect a torch model inside any wrapper: its tensors by name, and which names are aliases."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mergepipe.errors import UnsupportedError

_WRAPPERS = ("module", "_orig_mod")
_WRAPPER_CLASSES = frozenset({"DistributedDataParallel", "DataParallel", "OptimizedModule", "DeepSpeedEngine"})


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """`stored` are the tensors of the model's state, aliases left out; `tied` maps an alias to its owner."""

    stored: dict[str, Any]
    tied: dict[str, str]
    names: dict[int, str]  # by id of the parameter

    def name_of(self, parameter: Any) -> str:
        """Return the name of an optimizer's parameter.

        Raises:
            UnsupportedError: it is none of the model's.
        """
        if id(parameter) not in self.names:
            raise UnsupportedError.of(
                "train.parameter", "the optimizer", "has a parameter the model has not",
                "build the optimizer from this model's parameters",
            )  # fmt: skip
        return self.names[id(parameter)]


def unwrapped(model: Any) -> Any:
    """Return the model inside DDP, DeepSpeed and torch.compile."""
    while type(model).__name__ in _WRAPPER_CLASSES:
        model = next(getattr(model, name) for name in _WRAPPERS if hasattr(model, name))
    return model


def module_tensors(model: Any) -> ModuleTensors:
    """Collect the tensors of a model that is not wrapped.

    Raises:
        UnsupportedError: an adapter model, whose checkpoints hold only part of it.
    """
    if hasattr(model, "peft_config"):
        raise UnsupportedError.of("train.peft", type(model).__name__, "adapter models are not saved in parts")
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = names.setdefault(id(parameter), name)
        if owner != name:
            tied[name] = owner
    stored = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    return ModuleTensors(stored, tied, names)
