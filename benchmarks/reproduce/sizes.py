"""The sizes that parts are measured at: a family's shape, its numbers of experts, and how often each merge runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.make_family import SHAPES
from support.families import family_bytes

_KS = (2, 4, 8, 12, 16, 20)


@dataclass(frozen=True, slots=True)
class Size:
    """A shape of `make_family`, the numbers of experts that are merged, and repeats of each timed merge."""

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

    def k_at_most(self, wanted: int) -> int:
        """Return the largest number of experts up to `wanted`; the smallest there is if none is so small."""
        return max((k for k in self.ks if k <= wanted), default=min(self.ks))


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
