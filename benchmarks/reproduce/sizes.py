"""The sizes that parts are measured at: a family's shape, its numbers of experts, and how often each merge runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from support.families import DEMO, QWEN3_0_6B, TINY, Architecture, FamilyShape, family_bytes

SHAPES: Mapping[str, FamilyShape] = {
    "8b": FamilyShape(4096, 32, 32, 8, 128, 14336, 128256, tied=False, architecture=Architecture.LLAMA),
    "3b": FamilyShape(3072, 28, 24, 8, 128, 8192, 128256, tied=True, architecture=Architecture.LLAMA),
    "1.7b": replace(QWEN3_0_6B, hidden=2048, intermediate=6144),
    "0.6b": QWEN3_0_6B,
    "small": replace(QWEN3_0_6B, layers=4, vocab=16000),
    "demo": DEMO,
    "tiny": TINY,
}
"""`8b` is Llama-3.1-8B, `3b` Llama-3.2-3B, `1.7b`, `0.6b` are Qwen3's, `small` has 4 of 28 layers of the latter, with a
tenth of its words."""
_KS = (2, 4, 8, 12, 16, 20)


@dataclass(frozen=True, slots=True)
class Size:
    """A name of `SHAPES`, the numbers of experts that are merged, and repeats of each timed merge."""

    name: str
    shape: str
    ks: tuple[int, ...]
    repeats: int

    @property
    def is_toy(self) -> bool:
        """Whether parts only show that they run: with fewer points."""
        return self.name == "toy"

    @property
    def n_experts(self) -> int:
        return max(self.ks)

    @property
    def model_bytes(self) -> int:
        return family_bytes(SHAPES[self.shape], 0)

    @property
    def family_bytes(self) -> int:
        return family_bytes(SHAPES[self.shape], self.n_experts)

    def up_to(self, n_experts: int | None) -> Size:
        """Leave out the numbers of experts above `n_experts`, which a small disk may not hold."""
        return self if n_experts is None else replace(self, ks=tuple(k for k in self.ks if k <= n_experts))

    def to_json(self) -> Mapping[str, Any]:
        return {**asdict(self), "ks": list(self.ks), "model_bytes": self.model_bytes}


def k_at_most(ks: Sequence[int], wanted: int) -> int:
    """Return the largest number of experts up to `wanted`; the smallest there is if none is so small."""
    return max((k for k in ks if k <= wanted), default=min(ks))


SIZES: Mapping[str, Size] = {
    size.name: size
    for size in (
        Size("toy", "tiny", (2,), 1),
        Size("demo", "demo", (4, 10), 1),
        Size("small", "small", _KS, 1),
        Size("0.6b", "0.6b", _KS, 3),
        Size("1.7b", "1.7b", (2, 4), 3),
        Size("8b", "8b", (2,), 1),
    )
}
