"""Same recipe, same inputs: MergePipe and mergekit agree to one unit in the last place of the bf16 output."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from safetensors import safe_open

from mergepipe.core.blocks import BF16, F32
from support.families import TINY, TINY_LLAMA, FamilyPaths, FamilyShape, write_family

pytestmark = pytest.mark.peer

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
REQUIRED = "MERGEPIPE_REQUIRE_PEERS"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
SHAPES: dict[str, FamilyShape] = {"qwen3": TINY, "llama": TINY_LLAMA}
WEIGHTS = (0.5, 0.3, 0.4)
SIGNED_WEIGHTS = (0.6, -0.3, 0.5)
MAX_AMBIGUOUS_FRACTION = 1e-3
BLUR = 1e-5

Parameters = dict[str, float | bool]


@dataclass(frozen=True, slots=True)
class Case:
    """One recipe over the first `len(weights)` experts; no weights: the models carry none."""

    name: str
    method: str
    weights: tuple[float, ...] = ()
    density: float | None = None
    parameters: tuple[tuple[str, float | bool], ...] = ()
    has_base: bool = True
    n_experts: int = 0  # without weights: so many models that carry no parameters
    gamma: float | None = None
    dtype: str = "float32"  # of mergekit's arithmetic

    def recipe(self, family: FamilyPaths) -> dict[str, object]:
        """The recipe as a YAML value: bf16 output."""
        content: dict[str, object] = {"merge_method": self.method, "models": self._models(family)}
        if self.method not in ("linear", "passthrough") and self.has_base:
            content["base_model"] = str(family.base)
        if self.parameters:
            content["parameters"] = dict(self.parameters)
        return {**content, "dtype": self.dtype, "out_dtype": "bfloat16"}

    def _models(self, family: FamilyPaths) -> list[dict[str, object]]:
        if self.method == "slerp":
            return [{"model": str(family.base)}, {"model": str(family.experts[0])}]
        if self.method == "passthrough":
            return [{"model": str(family.experts[0])}]
        if self.n_experts:
            return [{"model": str(expert)} for expert in family.experts[: self.n_experts]]
        return [
            {"model": str(expert), "parameters": self._model_parameters(weight)}
            for expert, weight in zip(family.experts, self.weights, strict=False)
        ]

    def _model_parameters(self, weight: float) -> Parameters:
        given = {"weight": weight, "density": self.density, "gamma": self.gamma}
        return {name: value for name, value in given.items() if value is not None}


def _ties(
    name: str, density: float, *parameters: tuple[str, float | bool], weights: tuple[float, ...] = WEIGHTS
) -> Case:
    return Case(f"ties-{name}", "ties", weights, density, parameters)


CASES = (
    Case("linear", "linear", WEIGHTS),
    Case("linear-not-normalized", "linear", WEIGHTS, parameters=(("normalize", False),)),
    Case("task-arithmetic", "task_arithmetic", WEIGHTS),
    Case("task-arithmetic-normalized", "task_arithmetic", WEIGHTS, parameters=(("normalize", True),)),
    Case("task-arithmetic-lambda", "task_arithmetic", SIGNED_WEIGHTS, parameters=(("lambda", 1.7),)),
    _ties("density-0.2", 0.2),
    _ties("density-0.5", 0.5),
    _ties("density-1", 1.0),
    _ties("not-normalized", 0.2, ("normalize", False)),
    _ties("lambda", 0.5, ("lambda", 0.4)),
    _ties("negative-weight", 0.5, weights=SIGNED_WEIGHTS),
    _ties("negative-weight-not-normalized", 0.2, ("normalize", False), weights=SIGNED_WEIGHTS),
    Case("slerp-0", "slerp", parameters=(("t", 0.0),)),
    Case("slerp-0.3", "slerp", parameters=(("t", 0.3),)),
    Case("slerp-1", "slerp", parameters=(("t", 1.0),)),
    Case("passthrough", "passthrough"),
    _ties("rescale", 0.3, ("rescale", True)),
    Case("nuslerp", "nuslerp", WEIGHTS[:2]),
    Case("nuslerp-no-base", "nuslerp", WEIGHTS[:2], has_base=False),
    Case("nuslerp-rows", "nuslerp", WEIGHTS[:2], parameters=(("nuslerp_flatten", False),)),
    Case(
        "nuslerp-columns", "nuslerp", WEIGHTS[:2], parameters=(("nuslerp_flatten", False), ("nuslerp_row_wise", True))
    ),
    Case("multislerp", "multislerp", WEIGHTS),
    Case("multislerp-no-base", "multislerp", WEIGHTS, has_base=False),
    Case("multislerp-not-normalized", "multislerp", WEIGHTS, parameters=(("normalize_weights", False),)),
    Case("karcher", "karcher", n_experts=3, has_base=False),
    Case("karcher-base", "karcher", n_experts=3, parameters=(("max_iter", 3), ("tol", 1e-6))),
    Case("model-stock", "model_stock", n_experts=3),
    Case("model-stock-rows", "model_stock", n_experts=3, parameters=(("filter_wise", True),)),
    Case("breadcrumbs", "breadcrumbs", WEIGHTS, 0.6, gamma=0.05),
    Case("breadcrumbs-rescale", "breadcrumbs", WEIGHTS, 0.9, (("rescale", True),)),
    Case("breadcrumbs-narrow", "breadcrumbs", WEIGHTS, 0.97, gamma=0.5),
    Case("breadcrumbs-ties", "breadcrumbs_ties", SIGNED_WEIGHTS, 0.4, gamma=0.05),
    Case("breadcrumbs-ties-normalized", "breadcrumbs_ties", WEIGHTS, 0.4, (("normalize", True),), gamma=0.05),
    Case("sce", "sce", n_experts=3),
    Case("sce-top", "sce", n_experts=3, parameters=(("select_topk", 0.2),)),
    Case("ram", "ram", n_experts=3),
    Case("ram-epsilon", "ram", n_experts=3, parameters=(("epsilon", 1e-3),)),
    Case("ramplus", "ramplus_tl", n_experts=3, parameters=(("epsilon", 1e-3), ("r", 0.5))),
    Case("nearswap", "nearswap", n_experts=1, parameters=(("t", 2e-4),)),
    Case("arcee-fusion", "arcee_fusion", n_experts=1, dtype="float64"),
    Case("della-all", "della", WEIGHTS, 1.0),
)


@dataclass(frozen=True, slots=True)
class Peer:
    """One family, every case's recipe, and what mergekit made of it."""

    family: FamilyPaths
    directory: Path

    def recipe(self, case: Case) -> Path:
        return self.directory / f"{case.name}.yml"

    def merged(self, case: Case) -> Path:
        return self.directory / f"{case.name}-mergekit"


@pytest.fixture(scope="module", params=sorted(SHAPES))
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Peer:
    """Run mergekit once over all recipes of one family."""
    root = tmp_path_factory.mktemp(request.param)
    peer = Peer(write_family(root / "family", SHAPES[request.param], 3, seed=11, dtype=F32), root)
    for case in CASES:
        peer.recipe(case).write_text(yaml.safe_dump(case.recipe(peer.family), sort_keys=False))
    run_mergekit(root)
    return peer


def run_mergekit(recipes: Path) -> None:
    """Merge every recipe of a folder with mergekit; skip the test where it is not installed and need not be."""
    if not PEER_PYTHON.exists() and not os.environ.get(REQUIRED):
        pytest.skip("no .venv-peer: run `make test-peers`")
    command = [str(PEER_PYTHON), str(Path(__file__).with_name("run_mergekit.py")), str(recipes)]
    ran = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_merge__agrees_with_mergekit_to_one_bf16_ulp(peer: Peer, case: Case, tmp_path: Path) -> None:
    import mergepipe

    mergepipe.merge(peer.recipe(case), tmp_path / "out")
    ours, theirs = stored_bits(tmp_path / "out"), stored_bits(peer.merged(case))
    assert ours.keys() == theirs.keys()
    ambiguous = ambiguous_elements(case, peer.family)
    compared = {name: ~ambiguous[name] for name in ours}
    distances = {name: ulp_distance(ours[name], theirs[name])[compared[name]] for name in ours}
    assert {name: int(d.max(initial=0)) for name, d in distances.items() if d.max(initial=0) > 1} == {}
    assert sum(int(a.sum()) for a in ambiguous.values()) <= MAX_AMBIGUOUS_FRACTION * TINY.n_parameters()


def test_merge__changes_as_many_of_equal_differences_as_mergekit(tmp_path: Path) -> None:
    import mergepipe

    family = write_family(tmp_path / "family", TINY, 1, seed=11, dtype=BF16)  # rounded, so of few magnitudes
    recipe = tmp_path / "tied.yml"
    recipe.write_text(yaml.safe_dump(_ties("tied", 0.2, weights=(1.0,)).recipe(family)))
    run_mergekit(tmp_path)
    mergepipe.merge(recipe, tmp_path / "out")
    base, expert = stored_bits(family.base), stored_bits(family.experts[0])
    ours, theirs = (n_different(base, stored_bits(tmp_path / out)) for out in ("out", "tied-mergekit"))
    assert n_different(base, expert) > 2 * theirs > 0  # there is something to choose from
    assert abs(ours - theirs) <= 1e-3 * theirs


def n_different(first: dict[str, NDArray[np.uint16]], second: dict[str, NDArray[np.uint16]]) -> int:
    """How many elements of two models differ."""
    assert first.keys() == second.keys()
    return sum(int(np.count_nonzero(first[name] != second[name])) for name in first)


def test_ulp_distance__counts_representable_numbers_across_zero() -> None:
    values = np.array([0x3F80, 0x3F80, 0x0000, 0x0001, 0xBF80], np.uint16)
    others = np.array([0x3F80, 0x3F82, 0x8000, 0x8001, 0x3F80], np.uint16)
    assert ulp_distance(values, others).tolist() == [0, 2, 0, 2, 2 * 0x3F80]


def ulp_distance(first_N: NDArray[np.uint16], second_N: NDArray[np.uint16]) -> NDArray[np.int32]:
    """How many bf16 numbers lie between two, element by element; -0 is 0."""
    difference_N: NDArray[np.int32] = np.abs(_ordered(first_N) - _ordered(second_N))
    return difference_N


def _ordered(bits_N: NDArray[np.uint16]) -> NDArray[np.int32]:
    magnitude_N = (bits_N & 0x7FFF).astype(np.int32)
    magnitude_N[bits_N & 0x8000 != 0] *= -1
    return magnitude_N


def stored_bits(model: Path) -> dict[str, NDArray[np.uint16]]:
    """All tensors of a bf16 model, flat, as their bits."""
    tensors = _load(model)
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    return {name: tensor.view(np.uint16).ravel() for name, tensor in tensors.items()}


def ambiguous_elements(case: Case, family: FamilyPaths) -> dict[str, NDArray[np.bool_]]:
    """Elements at a TIES threshold that several elements share: which of them are kept is not defined.

    Both keep as many of them, but not the same; elsewhere there is nothing to choose. The importance by which
    arcee_fusion selects is a sum of differences of nearly equal logarithms: in float32 it is noise for small deltas, so
    mergekit is asked for float64, and only what rounding may put on either side is left out.
    """
    tensors = _load(family.base)
    base = {name: tensor.ravel() for name, tensor in tensors.items()}
    ambiguous = {name: np.zeros(tensor.size, np.bool_) for name, tensor in base.items()}
    if case.method == "arcee_fusion":
        models = _load(family.experts[0])
        return {name: _of_blurred_importance(tensors[name], models[name]) for name in base}
    if case.method != "ties" or case.density is None or case.density == 1:
        return ambiguous
    for expert in family.experts:
        for name, tensor in _load(expert).items():
            ambiguous[name] |= _at_shared_threshold(np.abs(tensor.ravel() - base[name]), case.density)
    return ambiguous


def _of_blurred_importance(base: NDArray[np.float32], model: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Elements whose importance would be on the other side of the threshold after a change by `BLUR`."""
    shares = [np.exp(x.astype(np.float64)) for x in (model, base)]
    p, q = (share / share.sum(axis=-1, keepdims=True) + 1e-8 for share in shares)
    importance_N = (np.abs(model - base) * np.sum(p * np.log(p / q), axis=-1, keepdims=True)).ravel()
    low, median, high = np.quantile(importance_N, [0.25, 0.5, 0.75], method="lower")
    threshold = median + 1.5 * (high - low)
    is_blurred_N: NDArray[np.bool_] = np.abs(importance_N - threshold) <= BLUR * threshold
    return is_blurred_N


def _at_shared_threshold(magnitudes_N: NDArray[np.float32], density: float) -> NDArray[np.bool_]:
    kept = int(density * magnitudes_N.size)
    threshold = np.partition(magnitudes_N, -kept)[-kept]
    is_shared = threshold > 0 and np.count_nonzero(magnitudes_N >= threshold) > kept
    return magnitudes_N == threshold if is_shared else np.zeros(magnitudes_N.size, np.bool_)


def _load(model: Path) -> dict[str, NDArray[np.float32]]:
    tensors: dict[str, NDArray[np.float32]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return tensors
