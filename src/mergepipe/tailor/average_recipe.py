"""Parse what is to be averaged into one frozen value, and weigh the checkpoints by a scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

from mergepipe.core.blocks import BF16, DTYPES_BY_RECIPE_NAME, F16, F32, DType
from mergepipe.core.escaping import yaml_document
from mergepipe.errors import NotFoundError, RecipeError, did_you_mean
from mergepipe.recipes.fields import DocumentReader, Findings
from mergepipe.recipes.references import read_reference
from mergepipe.recipes.yaml_source import Value, read_yaml
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location

# --- schemes of averaging: the weight of each checkpoint of a run, from the oldest to the newest. Pure ---


DEFAULT_ALPHA = 0.2
_NEXT_TO_NOTHING = 1e-8


def _simple(count: int, _alpha: float) -> tuple[float, ...]:
    """Equal weights."""
    return (1.0,) * count


def _exponential(count: int, alpha: float) -> tuple[float, ...]:
    """`M_i <- alpha theta_i + (1 - alpha) M_(i-1)` from `M_1 = theta_1` on."""
    return tuple((alpha if place else 1.0) * (1 - alpha) ** (count - 1 - place) for place in range(count))


def _linear_weights(count: int, _alpha: float) -> tuple[float, ...]:
    """`w_i = i`: the newest counts most."""
    return tuple(float(place + 1) for place in range(count))


def _decay_shaped(remaining: Callable[[float], float]) -> Callable[[int, float], tuple[float, ...]]:
    """Merge coefficients of a learning rate that decays as `remaining` does, from 1 at 0 to 0 at 1.

    With the rate's share w_i of the i-th interval between checkpoints, `c_j = w_j - w_(j+1)`, `w_0 = 1`, and 0 after
    the last. A linear decay gives equal weights.
    """

    def weights(count: int, _alpha: float) -> tuple[float, ...]:
        shares = [*(remaining(place / count) for place in range(count)), 0.0]
        return tuple(a - b for a, b in pairwise(shares))

    return weights


SCHEMES: Mapping[str, Callable[[int, float], tuple[float, ...]]] = MappingProxyType({
    "sma": _simple,
    "ema": _exponential,
    "wma": _linear_weights,
    "decay-linear": _decay_shaped(lambda t: 1 - t),
    "decay-cosine": _decay_shaped(lambda t: (1 + math.cos(math.pi * t)) / 2),
    "decay-1-sqrt": _decay_shaped(lambda t: 1 - math.sqrt(t)),
})  # fmt: skip


def scheme_weights(scheme: str, count: int, alpha: float = DEFAULT_ALPHA) -> tuple[float, ...]:
    """Return the weights of `count` checkpoints from the oldest to the newest; they sum to 1.

    Source: simple, exponential and weighted averages as in PMA (Li et al. 2025, arXiv 2505.12082); weights shaped as a
    learning-rate decay as in WSM (Tian et al. 2025, arXiv 2507.17634: `w_i = sum_(j >= i) c_j`, solved for c).
    """
    if scheme not in SCHEMES:
        raise RecipeError.of(
            "option.invalid", "--weights", f"'{scheme}' is not known", did_you_mean(scheme, list(SCHEMES))
        )
    if not 0 < alpha <= 1:
        raise RecipeError.of("option.invalid", "--alpha", f"{alpha:g} was given", "give a number above 0, at most 1")
    return normalised(SCHEMES[scheme](count, alpha), "--weights")


def normalised(weights: Sequence[float], where: str) -> tuple[float, ...]:
    """Divide weights by their sum."""
    total = sum(weights)  # that of huge numbers is infinite, where fsum would raise
    if not math.isfinite(total) or abs(total) < _NEXT_TO_NOTHING:
        raise RecipeError.of(
            "option.invalid", where, f"the weights {', '.join(f'{w:g}' for w in weights[:8])} sum to {total:g}",
            "give finite numbers whose sum is not 0",
        )  # fmt: skip
    exact_total = math.fsum(weights)
    return tuple(weight / exact_total for weight in weights)


# --- parse what is to be averaged: the command's options or a recipe with the key `average`, into one frozen value ---


AVERAGE_KEY = "average"
RECIPE_KEYS = ("checkpoints", "weights", "alpha", "optimizer", "dtype", "config")
_OUT_DTYPES = (F32, BF16, F16)


class OptimizerState(StrEnum):
    """What becomes of the optimizer's state."""

    NONE = "none"  # weights alone, as a model for inference
    LAST = "last"  # a checkpoint to resume from, with the moments of the newest
    AVERAGE = "average"  # the same, with averaged moments


@dataclass(frozen=True, slots=True)
class AverageRequest:
    """Checkpoints to average; one alone is made a model as it is.

    `weights` are a scheme's name or one number a checkpoint, in the order given. `alpha` is for `ema`; None is the
    default. `dtype` and `config` (which lends configuration and tokenizer) are
    for models; None is what the newest has.
    """

    checkpoints: tuple[Location, ...]
    weights: str | tuple[float, ...] = "sma"
    alpha: float | None = None
    optimizer: OptimizerState = OptimizerState.NONE
    dtype: DType | None = None
    config: Location | None = None

    @property
    def is_model(self) -> bool:
        """Whether a model is made, and no checkpoint to resume from."""
        return self.optimizer is OptimizerState.NONE

    def to_yaml(self) -> str:
        """The request as a recipe; paths are absolute."""
        content: dict[str, object] = {"checkpoints": [str(path) for path in self.checkpoints]}
        content["weights"] = self.weights if isinstance(self.weights, str) else list(self.weights)
        alpha = DEFAULT_ALPHA if self.alpha is None else self.alpha
        content |= {"alpha": alpha} if self.weights == "ema" else {}
        content["optimizer"] = self.optimizer.value
        content |= {"dtype": self.dtype.recipe_name} if self.dtype is not None else {}
        content |= {"config": str(self.config)} if self.config is not None else {}
        return yaml_document({AVERAGE_KEY: content}, width=120)


def out_dtype(name: str | None, where: str) -> DType | None:
    """Return the dtype of that name."""
    names = [dtype.recipe_name for dtype in _OUT_DTYPES]
    if name is not None and name not in names:
        raise RecipeError.of("option.invalid", where, f"'{name}' is not known", did_you_mean(name, names))
    return None if name is None else DTYPES_BY_RECIPE_NAME[name]


def weights_of(text: str) -> str | tuple[float, ...]:
    """Read `--weights`: a scheme's name, or numbers separated by commas."""
    if text in SCHEMES:
        return text
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise RecipeError.of(
            "option.invalid",
            "--weights",
            f"'{text[:80]}' is neither a scheme nor numbers",
            did_you_mean(text, list(SCHEMES)),
        ) from None


def load_average(path: Location, store: Store) -> AverageRequest | None:
    """Read a recipe that averages; None where it composes."""
    source = read_yaml(path.absolute(), store)
    if not isinstance(source.root, dict) or AVERAGE_KEY not in source.root:
        return None
    reader = DocumentReader(source, Findings(RecipeError, NotFoundError), store)
    reader.refuse_unknown_keys(source.root, (AVERAGE_KEY,), ())
    entry = source.root[AVERAGE_KEY]
    if not isinstance(entry, dict):
        reader.wrong_kind(entry, (AVERAGE_KEY,), "a mapping with the key 'checkpoints'")
        reader.findings.raise_any()
        raise AssertionError("raised above")
    reader.refuse_unknown_keys(entry, RECIPE_KEYS, (AVERAGE_KEY,))
    request = _request(reader, entry)
    reader.findings.raise_any()
    return request


def _request(reader: DocumentReader, entry: dict[str, Value]) -> AverageRequest:
    listed = entry.get("checkpoints")
    if not isinstance(listed, list):
        reader.wrong_kind(listed, (AVERAGE_KEY, "checkpoints"), "a list of checkpoints")
    values = listed if isinstance(listed, list) else []
    paths = [_location(reader, value, "checkpoints", index) for index, value in enumerate(values)]
    lender = entry.get("config")
    return AverageRequest(
        tuple(path for path in paths if path is not None),
        _weights(reader, entry.get("weights")),
        _alpha(reader, entry.get("alpha")),
        _optimizer(reader, entry.get("optimizer")),
        out_dtype(_text(reader, entry, "dtype"), "dtype"),
        None if lender is None else _location(reader, lender, "config"),
    )


def _location(reader: DocumentReader, value: Value, *key: str | int) -> Location | None:
    reference = read_reference(reader, value, (AVERAGE_KEY, *key))
    return None if reference is None else reference.path.normal()


def _text(reader: DocumentReader, entry: dict[str, Value], key: str) -> str | None:
    return reader.text(entry[key], (AVERAGE_KEY, key)) if entry.get(key) is not None else None


def _weights(reader: DocumentReader, value: Value) -> str | tuple[float, ...]:
    if value is None:
        return "sma"
    if isinstance(value, str):
        return weights_of(value)
    numbers = [_number(n) for n in value] if isinstance(value, list) else []
    known = [n for n in numbers if n is not None]
    if not numbers or len(known) < len(numbers):
        reader.wrong_kind(value, (AVERAGE_KEY, "weights"), "the name of a scheme or a list of numbers")
    return tuple(known)


def _alpha(reader: DocumentReader, value: Value) -> float | None:
    alpha = _number(value)
    if alpha is None and value is not None:
        reader.wrong_kind(value, (AVERAGE_KEY, "alpha"), "a number")
    return alpha


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _optimizer(reader: DocumentReader, value: Value) -> OptimizerState:
    text = None if value is None else reader.text(value, (AVERAGE_KEY, "optimizer"))
    return OptimizerState.NONE if text is None else optimizer_state(text)


def optimizer_state(text: str) -> OptimizerState:
    """Read `--optimizer`."""
    names: Sequence[str] = [state.value for state in OptimizerState]
    if text not in names:
        raise RecipeError.of("option.invalid", "--optimizer", f"'{text}' is not known", did_you_mean(text, names))
    return OptimizerState(text)
