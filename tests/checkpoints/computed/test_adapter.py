"""PEFT adapters against a base: names, scales, orientation, and each thing that is refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from small_models import lora, opened, product, random

from mergepipe.checkpoints.adapted_tensors import Adapted, LowRankDelta
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, TensorEntry
from mergepipe.errors import CorruptError, MergePipeError, MismatchError, NotFoundError, UnsupportedError
from mergepipe.runs.inputs import open_model
from mergepipe.storage.location import Location
from support.fetching import fetched
from support.model_folders import write_adapter, write_model
from support.named_models import named
from support.refusals import refuses
from support.stores import MetadataStore
from support.torch_bytes import View, torch_bytes

Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def base(tmp_path: Path) -> Checkpoint:
    tensors = {
        f"{Q}.weight": random(12, 12), f"{Q}.bias": random(12), f"{UP}.weight": random(20, 12),
        "model.embed_tokens.weight": random(30, 12), "lm_head.weight": random(30, 12),
    }  # fmt: skip
    return opened(write_model(tmp_path / "base", tensors))


def change(adapter: Checkpoint, name: str) -> NDArray[np.float32]:
    return fetched(adapter.tensors[name])


def test_open_adapter__gives_low_rank_deltas_under_the_names_of_the_base(tmp_path: Path, base: Checkpoint) -> None:
    factors = {**lora(Q, 12, 12), **lora(UP, 20, 12)}
    adapter = opened(write_adapter(tmp_path / "a", factors), base)
    assert (adapter.kind, sorted(adapter.tensors)) == (CheckpointKind.ADAPTER, [f"{UP}.weight", f"{Q}.weight"])
    for module in (Q, UP):
        np.testing.assert_allclose(change(adapter, f"{module}.weight"), 2.0 * product(factors, module), rtol=1e-5)
    assert [file.name for file in adapter.file_ids] == ["adapter_model.safetensors", "adapter_config.json"]


def test_open_adapter__reads_no_tensor_byte(tmp_path: Path, base: Checkpoint) -> None:
    path = write_adapter(tmp_path / "a", lora(Q, 12, 12))
    assert open_model(MetadataStore(), named(Location.local(path)), base).tensors.keys() == {f"{Q}.weight"}


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"lora_alpha": 3}, 0.75),
        ({"lora_alpha": 3, "use_rslora": True}, 1.5),
        ({"alpha_pattern": {"q_proj": 1}}, 0.25),
        ({"alpha_pattern": {"proj": 1, r"layers\.0\..*q_proj": 16}}, 4.0),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 12}}, 3.0),
        ({"alpha_pattern": {"v_proj": 1}}, 2.0),
        ({"r": 99, "rank_pattern": {"self_attn.(q_proj|v_proj)": 4}}, 2.0),
        ({"r": 99, "rank_pattern": {"q_proj": 4}, "use_rslora": True}, 8 / math.sqrt(4)),
        ({"some_new_option": None, "another": False, "bias": "none", "lora_dropout": 0.1}, 2.0),
    ],
)
def test_open_adapter__scales_as_configured(
    tmp_path: Path, base: Checkpoint, options: dict[str, Any], scale: float
) -> None:
    adapter = opened(write_adapter(tmp_path / "a", lora(Q, 12, 12), **options), base)
    delta = adapter.tensors[f"{Q}.weight"]
    assert isinstance(delta, LowRankDelta)
    assert delta.scale == scale


def test_open_adapter__takes_the_prefix_that_has_most_words_in_common_part_by_part(tmp_path: Path) -> None:
    rest, head = "layers.0.self_attn.q_proj", random(30, 12)
    shapes = {f"language_model.model.{rest}.weight": (12, 12), f"vision_tower.encoder.{rest}.weight": (20, 12)}
    tensors = {name: random(*shape) for name, shape in shapes.items()} | {"language_model.lm_head.weight": head}
    base = opened(write_model(tmp_path / "base", tensors))
    text, vision = lora(f"model.language_model.{rest}", 12, 12), lora(f"model.vision_tower.encoder.{rest}", 20, 12)
    assert opened(write_adapter(tmp_path / "a", text), base).tensors.keys() == {next(iter(shapes))}
    both = {**text, **vision, "lm_head.weight": head}
    assert opened(write_adapter(tmp_path / "b", both), base).tensors.keys() == tensors.keys()


@pytest.mark.parametrize(
    "form",
    [
        "base_model.model.{}.lora_{}.weight",  # PEFT, unsloth, LLaMA-Factory
        "base_model.model.{}.lora_{}.default.weight",  # a state of PEFT, as DeepSpeed's conversions leave it
        "base_model.model._orig_mod.{}.lora_{}.weight",  # compiled: axolotl
        "_fsdp_wrapped_module.base_model.model.{}.lora_{}.default.weight",  # FSDP: axolotl, LLaMA-Factory
        "base_model.model.model.language_{}.lora_{}.weight",  # a text model within another: unsloth
        "{}.lora_{}.weight",  # torchtune's checkpointer, and others that leave the prefix out
    ],
)
def test_open_adapter__takes_the_names_of_other_trainers(tmp_path: Path, base: Checkpoint, form: str) -> None:
    factors = lora(Q, 12, 12)
    path = write_adapter(tmp_path / "a", factors)
    renamed = {form.format(Q, side): factors[f"{Q}.lora_{side}.weight"] for side in "AB"}
    save_file(renamed, path / "adapter_model.safetensors")
    np.testing.assert_allclose(change(opened(path, base), f"{Q}.weight"), 2.0 * product(factors, Q), rtol=1e-5)


def test_open_adapter__takes_a_changed_prefix(tmp_path: Path, base: Checkpoint) -> None:
    factors = {**lora(f"wrapped.{Q}", 12, 12), **lora(f"wrapped.{UP}", 20, 12)}
    assert opened(write_adapter(tmp_path / "a", factors), base).tensors.keys() == {f"{Q}.weight", f"{UP}.weight"}
    bare = {**lora(Q.removeprefix("model."), 12, 12), **lora("lm_head", 30, 12)}
    assert opened(write_adapter(tmp_path / "b", bare), base).tensors.keys() == {f"{Q}.weight", "lm_head.weight"}


def test_open_adapter__does_not_guess_between_prefixes(tmp_path: Path) -> None:
    towers = {f"{tower}.layers.0.q.weight": random(12, 12) for tower in ("vision", "language")}
    base = opened(write_model(tmp_path / "base", towers))
    with pytest.raises(MismatchError, match=r"could be the base's 'vision.* or 'language|'language.* or 'vision"):
        opened(write_adapter(tmp_path / "a", lora("layers.0.q", 12, 12)), base)


def test_open_adapter__embeddings_are_transposed(tmp_path: Path, base: Checkpoint) -> None:
    up, down = random(12, 4), random(4, 30, seed=1)
    name = "model.embed_tokens"
    tensors = {f"{name}.lora_embedding_A": down, f"{name}.lora_embedding_B": up}
    adapter = opened(write_adapter(tmp_path / "a", tensors), base)
    np.testing.assert_allclose(change(adapter, f"{name}.weight"), 2 * (up @ down).T, rtol=1e-4, atol=1e-5)
    full = random(30, 12, seed=9)
    adapter = opened(write_adapter(tmp_path / "b", {**tensors, f"{name}.base_layer.weight": full}), base)
    assert isinstance(adapter.tensors[f"{name}.weight"], Adapted)
    np.testing.assert_allclose(change(adapter, f"{name}.weight"), full + 2 * (up @ down).T, rtol=1e-4, atol=1e-4)


def test_open_adapter__weights_stored_in_full_are_no_deltas(tmp_path: Path, base: Checkpoint) -> None:
    head, bias = random(30, 12, seed=3), random(12, seed=4)
    tensors = {**lora(Q, 12, 12), "lm_head.weight": head, f"{Q}.base_layer.bias": bias}
    adapter = opened(write_adapter(tmp_path / "a", tensors, bias="lora_only", modules_to_save=["lm_head"]), base)
    assert not adapter.tensors["lm_head.weight"].is_delta
    assert np.array_equal(change(adapter, "lm_head.weight"), head)
    assert np.array_equal(change(adapter, f"{Q}.bias"), bias)


TOKENS = "model.embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("lm_head.weight", "lm_head.weight"),
        (f"{Q}.lora_A.weight", f"{Q}.weight"),
        (TOKENS, "model.embed_tokens.weight"),
    ],
)
def test_open_adapter__values_that_are_no_numbers_are_refused_by_name(
    tmp_path: Path, base: Checkpoint, name: str, changed: str
) -> None:
    tensors = {**lora(Q, 12, 12), "lm_head.weight": random(30, 12), TOKENS: random(2, 12)}
    tensors[name].flat[3] = np.nan
    adapter = opened(write_adapter(tmp_path / "a", tensors, trainable_token_indices=[3, 7]), base)
    with pytest.raises(CorruptError, match=f"{re.escape(name)}' holds infinities or NaN"):
        fetched(adapter.tensors[changed])


def test_open_adapter__shapes_tell_how_a_layer_is_stored(tmp_path: Path) -> None:
    tensors = {"c_attn.weight": random(12, 36), "c_proj.weight": random(12, 12), "fc.weight": random(20, 12)}
    base = opened(write_model(tmp_path / "base", tensors))
    both = {**lora("c_attn", 36, 12), **lora("c_proj", 12, 12)}
    for option in (True, False):
        adapter = opened(write_adapter(tmp_path / f"{option}", both, fan_in_fan_out=option), base)
        for module in ("c_attn", "c_proj"):
            expected = 2 * product(both, module).T
            np.testing.assert_allclose(change(adapter, f"{module}.weight"), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedError, match=r"'c_proj.weight' is square.*its orientation is ambiguous"):
        opened(write_adapter(tmp_path / "c", {**both, **lora("fc", 20, 12)}), base)


@pytest.mark.parametrize("option", [True, False])
def test_open_adapter__squares_alone_follow_the_option(tmp_path: Path, base: Checkpoint, *, option: bool) -> None:
    factors = lora(Q, 12, 12)
    adapter = opened(write_adapter(tmp_path / "a", factors, fan_in_fan_out=option), base)
    expected = 2 * (product(factors, Q).T if option else product(factors, Q))
    np.testing.assert_allclose(change(adapter, f"{Q}.weight"), expected, rtol=1e-4, atol=1e-5)


def test_open_adapter__reads_pickled_weights(tmp_path: Path, base: Checkpoint) -> None:
    factors = lora(Q, 12, 12)
    path = write_adapter(tmp_path / "a", factors)
    (path / "adapter_model.safetensors").unlink()
    views = {f"base_model.model.{name}": View(value.ravel(), 0, value.shape) for name, value in factors.items()}
    (path / "adapter_model.bin").write_bytes(torch_bytes(views))
    adapter = opened(path, base)
    np.testing.assert_allclose(change(adapter, f"{Q}.weight"), 2 * product(factors, Q), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"peft_type": "OFT"}, UnsupportedError, "'OFT', only 'LORA', 'ADALORA', 'LOHA', 'LOKR', 'IA3' are read"),
        ({"peft_type": "LOKR"}, CorruptError, "has no counterpart"),
        ({"peft_type": "VERA"}, UnsupportedError, "the adapter is 'VERA'"),
        ({"use_dora": True}, CorruptError, f"is DoRA, and '{Q}' has no lora_magnitude_vector"),
        ({"init_lora_weights": "pissa_niter_4"}, UnsupportedError, "'pissa_niter_4', which changes the base weights"),
        ({"use_qalora": True}, UnsupportedError, "pools its inputs"),
        ({"target_parameters": "experts.w"}, CorruptError, "'target_parameters' must be a list of names"),
        ({"trainable_token_indices": [-1]}, CorruptError, "must be lists of rows, found [-1]"),
        ({"layer_replication": [[0, 2], [1, 3]]}, MismatchError, "the base has no layer 3"),
        ({"layer_replication": [[0, "2"]]}, CorruptError, "must be a list of ranges of layers"),
        ({"kasa_config": {"beta": 1}}, UnsupportedError, "kasa_config: KaSA, which takes singular values"),
        ({"new_config": {"beta": 1}}, UnsupportedError, "the option 'new_config' is not known"),
        ({"r": 0}, CorruptError, "the rank 'r' must be > 0"),
        ({"r": True}, CorruptError, "must be > 0, found True"),
        ({"lora_alpha": "8"}, CorruptError, "'lora_alpha' must be a number"),
        ({"fan_in_fan_out": 1}, CorruptError, "must be true or false"),
        ({"rank_pattern": [1]}, CorruptError, "'rank_pattern' must be an object"),
        ({"rank_pattern": {"(a+)+$": 4}}, UnsupportedError, "repeats what repeats already"),
        ({"alpha_pattern": {"[z-a]": 4}}, CorruptError, "is not a regular expression: bad character range"),
        ({"r": 5}, CorruptError, "the configured rank is 5"),
    ],
)
def test_open_adapter__refuses_by_name_what_is_no_plain_lora(
    tmp_path: Path, base: Checkpoint, options: dict[str, Any], error: type[MergePipeError], words: str
) -> None:
    path = write_adapter(tmp_path / "a", lora(Q, 12, 12), **options)
    with pytest.raises(error) as caught:
        opened(path, base)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({f"{Q}.lora_A.weight": random(4, 12)}, CorruptError, "has no counterpart, A or B"),
        ({f"{Q}.lora_A.weight": random(0), f"{Q}.lora_B.weight": random(0)}, CorruptError, "without gathering them"),
        ({**lora(Q, 12, 12), f"{Q}.lora_A.default.weight": random(4, 12, seed=5)}, CorruptError, "with two values"),
        ({**lora(Q, 12, 12), f"{Q}.lora_A.default.weight": random(3, 12)}, CorruptError, "are one tensor, with two"),
        (
            {"norm.weight": random(9), "norm.modules_to_save.default.weight": random(9, seed=5)},
            CorruptError,
            "'base_model.model.norm.weight' are one tensor",
        ),
        ({**lora(Q, 12, 12), f"{Q}.lora_magnitude_vector": random(11)}, CorruptError, "has 11 magnitudes for 12 rows"),
        ({**lora(UP, 20, 12), f"{UP}.lora_B.bias": random(20)}, MismatchError, f"'{UP}.bias' has no"),
        ({**lora(Q, 12, 12), f"{Q}.lora_E": random(4, 1)}, UnsupportedError, "'lora_E' is not read"),
        ({"layers.0.attn.q_proj.lora_a.weight": random(4, 12)}, UnsupportedError, "'lora_a' is not read"),  # torchtune
        ({f"{Q}.ia3_l": random(11, 1)}, MismatchError, f"scales 11 features, '{Q}.weight' is [12, 12]"),
        ({f"{Q}.token_adapter.trainable_tokens_delta": random(2, 12)}, CorruptError, "has 2 rows, for 0 tokens of 12"),
        ({"c.lora_A.weight": random(4, 3, 2, 2)}, UnsupportedError, "has shape [4, 3, 2, 2]"),
        (lora(Q, 13, 12), MismatchError, "make [13, 12], the base has [12, 12]"),
        (lora("model.layers.7.self_attn.q_proj", 12, 12), MismatchError, "has no counterpart in the base"),
        (
            {**lora(Q, 12, 12), "score.weight": random(2, 12)},
            MismatchError,
            "'score.weight' is the head of another task",
        ),
        ({f"{Q}.lora_A.weight": np.ones((4, 12), np.int32)}, UnsupportedError, "is I32"),
        ({**lora(Q, 12, 12), f"{UP}.weight": random(7, 12)}, MismatchError, "of shape [7, 12], the base has [20, 12]"),
    ],
)
def test_open_adapter__refuses_tensors_that_do_not_fit(
    tmp_path: Path, base: Checkpoint, tensors: dict[str, Any], error: type[MergePipeError], words: str
) -> None:
    with pytest.raises(error) as caught:
        opened(write_adapter(tmp_path / "a", tensors), base)
    assert words in str(caught.value)


def test_open_adapter__takes_equal_values_under_two_spellings_as_one(tmp_path: Path, base: Checkpoint) -> None:
    factors = lora(Q, 12, 12)
    twice = {**factors, f"{Q}.lora_A.default.weight": factors[f"{Q}.lora_A.weight"]}
    adapter = opened(write_adapter(tmp_path / "a", twice), base)
    np.testing.assert_allclose(change(adapter, f"{Q}.weight"), 2.0 * product(factors, Q), rtol=1e-5)


def test_open_adapter__says_which_file_is_missing(tmp_path: Path, base: Checkpoint) -> None:
    path = write_adapter(tmp_path / "a", lora(Q, 12, 12))
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(NotFoundError, match=r"holds neither adapter_model\.safetensors nor adapter_model\.bin"):
        opened(path, base)
    with pytest.raises(NotFoundError, match=r"is not an adapter: it has no adapter_config\.json"):
        opened(tmp_path / "base", base, adapter=tmp_path / "base")
    (path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(CorruptError, match="object is needed"):
        opened(path, base)


def test_open_model__an_adapter_needs_a_base(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", lora(Q, 12, 12))
    for place in (path, path / "adapter_model.safetensors"):
        with pytest.raises(UnsupportedError, match="is an adapter, but full weights are needed here"):
            opened(place)


def test_open_model__base_and_adapter_is_full_weights(tmp_path: Path, base: Checkpoint) -> None:
    factors = lora(Q, 12, 12)
    other = opened(write_model(tmp_path / "other", {n: random(*t.shape, seed=7) for n, t in base.tensors.items()}))
    both = opened(other.path.local_path, base, adapter=write_adapter(tmp_path / "a", factors))
    assert (both.kind, list(both.tensors)) == (CheckpointKind.FULL, list(other.tensors))
    expected = fetched(other.tensors[f"{Q}.weight"]) + 2 * product(factors, Q)
    np.testing.assert_allclose(fetched(both.tensors[f"{Q}.weight"]), expected, rtol=1e-4, atol=1e-4)
    assert all(isinstance(t, TensorEntry) for n, t in both.tensors.items() if n != f"{Q}.weight")
    assert len(both.files) == len(other.files) + 2
    assert all(file.location.local_path.stat().st_size == file.id.size_bytes for file in both.files)


def test_open_model__an_adapter_of_an_adapted_anchor_is_not_taken_for_one_of_its_base(tmp_path: Path) -> None:
    plain = write_model(tmp_path / "base", {f"{Q}.weight": random(12, 12)})
    first, second = (write_adapter(tmp_path / name, lora(Q, 12, 12)) for name in ("1", "2"))
    anchor = opened(plain, None, adapter=first)
    assert opened(plain, anchor, adapter=second).kind is CheckpointKind.FULL
    assert opened(plain, opened(plain), adapter=second).kind is CheckpointKind.ADAPTER


@pytest.mark.parametrize(
    ("tensors", "hint"),
    [
        (lora("lm_head", 30, 12), "use the result as an expert: the change goes into the embedding"),
        ({"lm_head.weight": random(30, 12)}, "with --allow-dropped 'lm_head.weight', which leaves the head out"),
    ],
)
def test_open_adapter__says_what_to_do_about_a_head_of_tied_weights(
    tmp_path: Path, tensors: dict[str, NDArray[np.float32]], hint: str
) -> None:
    tied = {f"{Q}.weight": random(12, 12), "model.embed_tokens.weight": random(30, 12)}
    with refuses(MismatchError, "adapter.mismatch") as caught:
        opened(write_adapter(tmp_path / "a", tensors), opened(write_model(tmp_path / "tied", tied)))
    assert caught.value.problems[0].hint.endswith(hint)
