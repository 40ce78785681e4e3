"""The recipe as frozen values: what the user asked for, validated and not yet tied to any tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mergepipe.blocks import DType
from mergepipe.operators.spec import OperatorSpec

Scalar: TypeAlias = float | bool


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One model a recipe names: `text` as written, `path` absolute, `parameters` as written (no defaults)."""

    text: str
    path: Path
    parameters: Mapping[str, Scalar]
    where: str

    def __post_init__(self) -> None:
        if not self.path.is_absolute():
            raise ValueError(f"not an absolute path: {self.path}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to merge and how. Models that are the same place on disk have equal paths; no two `models` have.

    `base` is what `base_model` names. It may be listed among `models` too.
    """

    path: Path
    source_text: str
    operator: OperatorSpec
    base: ModelInput | None
    models: tuple[ModelInput, ...]
    parameters: Mapping[str, Scalar]
    dtype: DType | None
    out_dtype: DType | None

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("a recipe names at least one model")

    def anchor(self) -> ModelInput:
        """The model the output starts from: `base_model`, else the first model. Read in full, not an expert."""
        return self.base if self.base is not None else self.models[0]

    def experts(self) -> tuple[ModelInput, ...]:
        """The models other than the anchor, in recipe order."""
        anchor_path = self.anchor().path
        return tuple(model for model in self.models if model.path != anchor_path)

    def listed_anchor(self) -> ModelInput | None:
        """The anchor as an entry of `models`, with its parameters; None if only `base_model` names it."""
        anchor_path = self.anchor().path
        return next((model for model in self.models if model.path == anchor_path), None)
