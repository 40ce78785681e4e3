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


def outcome(call: Callable[[], T]) -> T | MergePipeError:
    """What a call gives, or the typed error it ends in; any other error fails the test."""
    try:
        return call()
    except MergePipeError as error:
        return error


def parsed(content: bytes) -> AdapterConfig:
    return read_adapter_config(InMemoryStore({PATH: content}), PATH)


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
