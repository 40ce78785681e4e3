"""Adapters of PEFT that a training checkpoint holds beside its base weights, not merged into them."""

from __future__ import annotations

from mergepipe.checkpoints.stored_adapters import unmerged_names
from mergepipe.core.strict_json import shown
from mergepipe.core.units import plural
from mergepipe.errors import unsupported
from mergepipe.tailor.checkpoint import TrainingCheckpoint


def refuse_unmerged(source: TrainingCheckpoint) -> None:
    """Refuse weights that hold an adapter: loaders know none of its names, and an average of factors is no average.

    Raises:
        UnsupportedError: `checkpoint.unsupported`.
    """
    names = unmerged_names(source.weight_shapes)
    if names:
        message = f"holds an adapter that is not merged: {shown(names[0])} and {plural(len(names) - 1, 'more tensor')}"
        hint = "load it with peft, merge_and_unload(), and save the model"
        raise unsupported(source.path, message, hint)
