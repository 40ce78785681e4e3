"""What the reader finds in partial checkpoints, and every way one can lie."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from composing import checkpoint_at

from mergepipe import tailor
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import EXP_AVG, EXP_AVG_SQ, FP32
from mergepipe.tailor.formats.partial import PARTIAL_FORMAT, read_partial_manifest
from mergepipe.tailor.selection import EMBED, Unit, layer
from support.engine_views import known_view, write_partial
from support.local_models import open_training
from support.public_names import PARTIAL_MANIFEST_NAME, ZERO_FORMAT
from support.stores import MetadataStore
from support.training_trees import decoder_shapes, known_states, write_zero3

SHAPES = decoder_shapes()
KNOWN = known_states(SHAPES)
UNITS = (EMBED, layer(1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two units, written by two ranks."""
    write_partial(tmp_path / "partial-7", KNOWN, UNITS)
    return tmp_path / "partial-7"


def names_of(units: Iterable[Unit]) -> set[str]:
    return {name for unit in units for name in known_view(KNOWN).units.parameters[unit]}


def test_read_partial__holds_the_saved_units_and_no_other(folder: Path) -> None:
    checkpoint = checkpoint_at(folder)
    assert {name for name, _ in checkpoint.states} == names_of(UNITS)
    assert checkpoint.kinds == (FP32, EXP_AVG, EXP_AVG_SQ)
    assert (checkpoint.format, checkpoint.stage, checkpoint.world_size, checkpoint.step) == (ZERO_FORMAT, 3, 2, 7)
    assert dict(checkpoint.parameters) == SHAPES
    assert checkpoint.missing == tuple(f"{u}: not saved" for u in ("layer 0", "layer 2", "norm", "lm_head"))
    (counter,) = checkpoint.steps  # one cell a rank
    assert (counter.value, set(counter.parameters), len(counter.cells)) == (7.0, names_of(UNITS), 2)


def test_read_partial__compares_with_a_full_checkpoint_of_its_run(folder: Path, tmp_path: Path) -> None:
    write_zero3(tmp_path / "full", KNOWN, [list(SHAPES)], 2)
    assert tailor.inspect(tmp_path / "full", folder).reasons == ()
    write_zero3(tmp_path / "wide", KNOWN, [list(SHAPES)], 3)
    reasons = tailor.inspect(tmp_path / "wide", folder).reasons
    assert any("world size 3 and 2" in reason for reason in reasons)


def test_to_json__is_read_back_as_it_was(folder: Path) -> None:
    manifest = read_partial_manifest(MetadataStore(), Location.local(folder))
    assert PARTIAL_FORMAT.parse(PARTIAL_FORMAT.to_json(manifest), folder) == manifest


def test_read_partial__says_what_a_rank_that_is_not_listed_would_have(folder: Path) -> None:
    edit(folder, lambda m: m["shards"].pop())
    missing = checkpoint_at(folder).missing
    assert "part of fp32 of model.embed_tokens.weight" in missing
    assert len(missing) == 4 + 3 * len(names_of(UNITS))


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / PARTIAL_MANIFEST_NAME
    document = json.loads(path.read_text())
    change(document)
    document["digest"] = digest_of({key: value for key, value in document.items() if key != "digest"})
    path.write_text(json.dumps(document))


def set_key(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda m: m.__setitem__(key, value)


def set_shard(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["shards"][0].__setitem__(key, value)


def set_tensor(place: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda m: m["shards"][0]["tensors"][0].__setitem__(place, value)


LIES: dict[str, tuple[Callable[[dict[str, Any]], object], type[MergePipeError], str]] = {
    "no format": (lambda m: m.pop("format"), CorruptError, "its format is None"),
    "a later version": (set_key("format", "mergepipe-manifest/99"), UnsupportedError, "use a newer version"),
    "a manifest of another kind": (set_key("kind", "composite"), UnsupportedError, "'partial' is needed"),
    "an unknown key": (set_key("unit", []), CorruptError, "did you mean 'units'"),
    "an unknown format": (set_key("origin", "zip"), CorruptError, "'origin'"),
    "no ranks": (set_key("world_size", 0), CorruptError, "world_size"),
    "a negative step": (set_key("step", -1), CorruptError, "step: an integer"),
    "a step that is true": (set_key("step", True), CorruptError, "step: an integer"),
    "a missing list": (lambda m: m.pop("units"), CorruptError, "'units'"),
    "an alias of nothing": (set_key("tied", {"a": "b"}), CorruptError, "'tied'"),
    "a unit the model has not": (set_key("units", ["layer 99"]), CorruptError, "no unit 'layer 99'"),
    "a unit left out": (set_key("units", ["embed"]), CorruptError, "in no unit that was saved"),
    "a group of an unknown": (set_key("flat_groups", [["x"]]), CorruptError, "'flat_groups'"),
    "a shape that overflows": (lambda m: m["parameters"].update(x=[2**40, 2**40]), CorruptError, "overflows"),
    "a shape of words": (lambda m: m["parameters"].update(x=["2"]), CorruptError, "an integer"),
    "a file elsewhere": (set_shard("name", "../rank-00000.safetensors"), CorruptError, "in the manifest's folder"),
    "a file of another kind": (set_shard("name", PARTIAL_MANIFEST_NAME), CorruptError, "in the manifest's folder"),
    "a file that is not there": (set_shard("name", "x.safetensors"), CorruptError, "is not there"),
    "a wrong size": (set_shard("size_bytes", 5), CorruptError, "the manifest says 5 bytes"),
    "a shard twice": (lambda m: m["shards"].append(m["shards"][0]), CorruptError, "one name"),
    "a tensor twice": (lambda m: m["shards"][0]["tensors"].append(m["shards"][0]["tensors"][0]), CorruptError, "twice"),
    "a tensor too few": (lambda m: m["shards"][0]["tensors"].pop(), CorruptError, "does not match the manifest"),
    "an unknown parameter": (set_tensor(0, "x"), CorruptError, "unknown parameter 'x'"),
    "a counter as a state": (set_tensor(1, "step"), CorruptError, "kind 'step'"),
    "a path as a kind": (set_tensor(1, "a/b"), CorruptError, "kind 'a/b'"),
    "another dtype": (set_tensor(2, "BF16"), CorruptError, "does not match the manifest"),
    "an unknown dtype": (set_tensor(2, "F31"), CorruptError, "F31"),
    "elements beyond the end": (set_tensor(4, 10**6), CorruptError, "no elements"),
    "elements backwards": (set_tensor(3, 10**6), CorruptError, "no elements"),
    "elements that overlap": (
        lambda m: [t.__setitem__(slice(3, 5), [0, t[4] - t[3]]) for t in m["shards"][1]["tensors"]],
        CorruptError, "overlap",
    ),
    "a counter of nothing": (set_shard("counters", [0, 1]), CorruptError, "not described"),
    "a counter no shard has": (lambda m: m["counters"].append([]), CorruptError, "step counter 1"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_read_partial__refuses(folder: Path, lie: str) -> None:
    change, error, message = LIES[lie]
    edit(folder, change)
    with pytest.raises(error, match=message):
        open_training(folder, MetadataStore())


def test_read_partial__refuses_ranks_at_different_steps(folder: Path) -> None:
    (counter,) = checkpoint_at(folder).steps
    cell = counter.cells[1]
    content = bytearray(cell.file.local_path.read_bytes())
    content[cell.offset : cell.offset + 4] = b"\0\0\x80?"
    cell.file.local_path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"the values \[1.0, 7.0\]"):
        checkpoint_at(folder)


def test_read_partial__refuses_a_shard_that_is_a_link_elsewhere(folder: Path, tmp_path: Path) -> None:
    shard = folder / "rank-00000.safetensors"
    shard.rename(tmp_path / "outside")
    shard.symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptError, match="outside the checkpoint"):
        checkpoint_at(folder)
