"""Adapters, deltas and pickled weights from strangers: a typed error or a sound checkpoint, nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.stored_adapters import AdapterConfig, read_adapter_config
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.runs.inputs import open_model
from mergepipe.storage.contract import ADAPTER_CONFIG_BYTES
from mergepipe.storage.location import Location
from support.named_models import named
from support.safetensors_bytes import file_bytes, record
from support.stores import InMemoryStore, MetadataStore
from support.torch_bytes import Call, torch_bytes
from support.torch_bytes import Named as GlobalName

T = TypeVar("T")

PATH = Location.parse("adapter_config.json")
KEYS = st.sampled_from(
    ["peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=6,
)


def outcome(call: Callable[[], T]) -> T | MergePipeError:
    """What a call gives, or the typed error it ends in; any other error fails the test."""
    try:
        return call()
    except MergePipeError as error:
        return error


def parsed(content: bytes) -> AdapterConfig:
    return read_adapter_config(InMemoryStore({PATH: content}), PATH)


@given(st.dictionaries(KEYS, VALUES))
def test_read_adapter_config__survives_any_values(config: dict[str, object]) -> None:
    found = outcome(lambda: parsed(json.dumps({"peft_type": "LORA", **config}).encode()))
    if isinstance(found, AdapterConfig):
        assert found.rank_of("a.b") > 0
    else:
        assert (len(str(found).splitlines()), len(str(found)) < 1000) == (1, True)


@given(st.text(alphabet="ab.^$|()[]*+?{}\\d-,1", max_size=40))
def test_read_adapter_config__tries_no_pattern_that_runs_for_long(pattern: str) -> None:
    config = outcome(lambda: parsed(json.dumps({"peft_type": "LORA", "rank_pattern": {pattern: 3}}).encode()))
    if isinstance(config, AdapterConfig):  # a pattern that explodes would not come back from this
        assert config.rank_of("a" * 250 + "." + "ab" * 100 + "!") in (3, 8)


@pytest.mark.parametrize(
    "pattern", ["(a*)*b", "(a|aa)+$", "(.*)(.*)(.*)(.*)x", "(?:a+)+", "(a|a)(a|a)(a|a)b", r"(a)\1*", "a" * 300]
)
def test_read_adapter_config__refuses_patterns_that_could_explode(pattern: str) -> None:
    with pytest.raises(UnsupportedError, match="too complex"):
        parsed(json.dumps({"peft_type": "LORA", "alpha_pattern": {pattern: 1}}).encode())


def test_read_adapter_config__does_not_read_what_is_too_long() -> None:
    store = InMemoryStore({PATH: b"{" + b" " * ADAPTER_CONFIG_BYTES + b"}"})
    with pytest.raises(CorruptError, match="at most"):
        read_adapter_config(store, PATH)
    assert store.reads == []


def base_at(folder: Path) -> Path:
    folder.mkdir()
    header = {"m.q.weight": record(0, 64, shape=[4, 4]), "m.k.weight": record(64, 128, shape=[4, 4])}
    (folder / "model.safetensors").write_bytes(file_bytes(header, bytes(128)))
    return folder


NAMES = st.sampled_from(
    ["m.q.lora_A.weight", "m.q.lora_B.weight", "m.k.weight", "lora_A.weight", "m..lora_B.weight", "q"]
)
SHAPES = st.lists(st.integers(0, 5), max_size=3)


@given(st.dictionaries(NAMES, SHAPES, min_size=1))
def test_open_model__survives_any_adapter(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, list[int]]
) -> None:
    root = tmp_path_factory.mktemp("a")
    base = open_model(MetadataStore(), named(Location.local(base_at(root / "base"))), None)
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 4
        for length in shape:
            size *= length
        header[f"base_model.model.{name}"] = record(end, end + size, shape=shape)
        end += size
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_model.safetensors").write_bytes(file_bytes(header, bytes(end)))
    (root / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2}')
    opened = outcome(lambda: open_model(MetadataStore(), named(Location.local(root / "adapter")), base))
    if isinstance(opened, MergePipeError):
        assert str(opened).isprintable()
    else:
        deltas = [tensor for tensor in opened.tensors.values() if tensor.is_delta]
        assert all(tensor.shape == base.tensors[tensor.name].shape for tensor in deltas)


def test_open_model__a_pickled_adapter_executes_nothing(tmp_path: Path) -> None:
    base = open_model(MetadataStore(), named(Location.local(base_at(tmp_path / "base"))), None)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    proof = tmp_path / "executed"
    call = Call(GlobalName("os", "mkdir"), (str(proof),))
    (tmp_path / "a" / "adapter_model.bin").write_bytes(torch_bytes({"x": call}))
    with pytest.raises(UnsupportedError, match=r"'os\.mkdir', which is not on the list"):
        open_model(MetadataStore(), named(Location.local(tmp_path / "a")), base)
    assert not proof.exists()


def test_open_model__no_link_leads_out_of_an_adapter(tmp_path: Path) -> None:
    base = open_model(MetadataStore(), named(Location.local(base_at(tmp_path / "base"))), None)
    (tmp_path / "a").mkdir()
    (tmp_path / "secret.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "a" / "adapter_config.json").symlink_to(tmp_path / "secret.json")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(file_bytes({}))
    with pytest.raises(CorruptError, match="outside of the checkpoint"):
        open_model(MetadataStore(), named(Location.local(tmp_path / "a")), base)
