"""Layouts of layers and experts, and names of embeddings."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from small_models import opened, random

from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.embedding_rows import embedding_ending
from mergepipe.checkpoints.stacked_experts import Stacked, in_layout_of, pieces_of
from mergepipe.core.blocks import F32, Span
from support.fetching import fetched
from support.model_folders import write_model

EXPERTS, INNER, HIDDEN = 3, 5, 4
Tensors = dict[str, NDArray[np.float32]]


def matrices() -> dict[tuple[int, str], NDArray[np.float32]]:
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {(e, r): random(*shapes[r], seed=10 * e + len(r)) for e in range(EXPERTS) for r in shapes}


def by_number() -> Tensors:
    """As Mixtral saves them."""
    names = {"gate": "w1", "up": "w3", "down": "w2"}
    block = "model.layers.0.block_sparse_moe"
    tensors = {f"{block}.experts.{e}.{names[r]}.weight": m for (e, r), m in matrices().items()}
    return {**tensors, f"{block}.gate.weight": random(EXPERTS, HIDDEN), "norm.weight": random(4)}


def by_role() -> Tensors:
    """As Qwen3-MoE saves them."""
    tensors = {f"model.layers.0.mlp.experts.{e}.{r}_proj.weight": m for (e, r), m in matrices().items()}
    return {**tensors, "model.layers.0.mlp.gate.weight": random(EXPERTS, HIDDEN), "norm.weight": random(4)}


def fused() -> Tensors:
    """As transformers 5 holds them."""
    m = matrices()
    return {
        "model.layers.0.mlp.experts.gate_up_proj": np.stack(
            [np.concatenate([m[e, "gate"], m[e, "up"]]) for e in range(EXPERTS)]
        ),
        "model.layers.0.mlp.experts.down_proj": np.stack([m[e, "down"] for e in range(EXPERTS)]),
        "model.layers.0.mlp.gate.weight": random(EXPERTS, HIDDEN),
        "norm.weight": random(4),
    }


LAYOUTS = {"number": by_number, "role": by_role, "fused": fused}


@pytest.mark.parametrize("of_base", LAYOUTS)
@pytest.mark.parametrize("of_expert", LAYOUTS)
def test_in_layout_of__every_layout_is_every_other(tmp_path: Path, of_base: str, of_expert: str) -> None:
    wanted = LAYOUTS[of_base]()
    base = opened(write_model(tmp_path / "base", wanted))
    expert = opened(write_model(tmp_path / "expert", LAYOUTS[of_expert]()), base)
    assert expert.tensors.keys() == wanted.keys()
    for name, values in wanted.items():
        assert np.array_equal(fetched(expert.tensors[name]), values), name
        assert expert.tensors[name].name == name
    is_stacked = {name for name, tensor in expert.tensors.items() if isinstance(tensor, Stacked)}
    assert len(is_stacked) == (2 if of_base == "fused" and of_expert != "fused" else 0)
    assert expert.tensor_bytes == base.tensor_bytes


@pytest.mark.parametrize("of_base", ["number", "fused"])
def test_in_layout_of__stacks_and_renames_experts_of_codes(tmp_path: Path, of_base: str) -> None:
    base, tensors = opened(write_model(tmp_path / "base", LAYOUTS[of_base]())), by_role()
    codes = {name: m.astype(ml_dtypes.float8_e4m3fn) for name, m in tensors.items() if ".experts." in name}
    scales = {f"{name}_scale": np.full(len(code), 0.5, np.float32) for name, code in codes.items()}
    plain = tensors | {name: code.astype(np.float32) / 2 for name, code in codes.items()}
    numbers = opened(write_model(tmp_path / "plain", plain), base)
    made = opened(write_model(tmp_path / "codes", {**tensors, **codes, **scales}), base)
    assert made.tensors.keys() == base.tensors.keys()
    for name, tensor in numbers.tensors.items():
        assert np.array_equal(fetched(made.tensors[name]), fetched(tensor)), name
        assert made.tensors[name].stored_dtype.name == ("BF16" if ".experts." in name else "F32")


def test_in_layout_of__leaves_what_does_not_fit(tmp_path: Path) -> None:
    base = opened(write_model(tmp_path / "base", fused()))
    lacking = {n: t for n, t in by_role().items() if "experts.1.up" not in n}
    expert = opened(write_model(tmp_path / "expert", lacking), base)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in expert.tensors
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in expert.tensors
    assert "model.layers.0.mlp.experts.down_proj" in expert.tensors
    other = {n: t if "gate_proj" not in n else t.T for n, t in by_role().items()}
    expert = opened(write_model(tmp_path / "other", other), base)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in expert.tensors


def test_in_layout_of__gives_the_same_checkpoint_where_nothing_differs(tmp_path: Path) -> None:
    base = opened(write_model(tmp_path / "base", by_role()))
    assert in_layout_of(base, base) is base


def test_pieces_of__bounds_what_a_shape_can_ask_for() -> None:
    assert pieces_of("m.mlp.experts.down_proj", (1 << 40, 0, 4)) == ()
    assert pieces_of("m.mlp.experts.gate_up_proj", (2, 3, 4)) == ()
    assert pieces_of("m.mlp.experts.gate_up_proj", (2, 4)) == ()
    assert len(pieces_of("m.mlp.experts.gate_up_proj", (2, 4, 4))) == 4


@given(st.lists(st.integers(0, 4 * 35), max_size=5), st.booleans())
def test_stacked__any_span_is_that_of_the_concatenation(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], is_mixed: bool
) -> None:
    root = tmp_path_factory.mktemp("s")
    parts: list[TensorEntry] = []
    for i in range(4):
        values = random(5, 7, seed=i).astype(np.float16 if is_mixed and i == 2 else np.float32)
        entry = opened(write_model(root / str(i), {"w": values})).tensors["w"]
        assert isinstance(entry, TensorEntry)
        parts.append(entry)
    stacked = Stacked("w", (4, 5, 7), tuple(parts))
    edges = sorted({0, 140, *cuts})
    expected = np.stack([fetched(part) for part in parts])
    assert np.array_equal(fetched(stacked, [Span(a, b) for a, b in pairwise(edges)]), expected)
    assert (stacked.dtype, stacked.is_unit, stacked.is_delta) == (F32, False, False)


def test_stacked__refuses_parts_that_do_not_make_it(tmp_path: Path) -> None:
    entry = opened(write_model(tmp_path / "m", {"w": random(2, 3)})).tensors["w"]
    assert isinstance(entry, TensorEntry)
    with pytest.raises(ValueError, match="are not"):
        Stacked("w", (3, 2, 3), (entry, entry))
    with pytest.raises(ValueError, match="different kinds"):
        Stacked("w", (2, 2, 3), (entry, replace(entry, is_delta=True)))


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("model.language_model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.bias", "lm_head.bias"),
        ("transformer.wte.weight", "wte.weight"),
        ("bert.embeddings.word_embeddings.weight", "word_embeddings.weight"),
        ("cls.predictions.bias", "predictions.bias"),
        ("cls.predictions.decoder.weight", "predictions.decoder.weight"),
        ("transformer.wpe.weight", None),
        ("bert.embeddings.position_embeddings.weight", None),
        ("model.layers.0.mlp.down_proj.weight", None),
        ("bert.encoder.layer.0.output.dense.weight", None),
        ("my_lm_head.weight", None),
    ],
)
def test_embedding_ending__knows_names_of_architectures(name: str, ending: str | None) -> None:
    assert embedding_ending(name) == ending
