"""A delta checkpoint gives the expert back bit for bit, or says how far off it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.blocks import BF16, F16, F32, Span
from mergepipe.budget import Purpose
from mergepipe.errors import CorruptError, MergePipeError, MismatchError, OutputError, UnsupportedError
from mergepipe.kernels.deltas import add_delta, compare, make_delta
from mergepipe.readers.base import CheckpointKind, TensorEntry
from mergepipe.reports import Progress
from mergepipe.sources.delta_record import RECORD_NAME, DeltaRecord, Form, TensorRecord, record_of_json
from mergepipe.storage.local import LocalStore
from mergepipe.testing.rounding import NUMPY_DTYPES
from mergepipe.workflows import deltas
from mergepipe.workflows.deltas import apply_delta, write_delta
from mergepipe.workflows.opening import open_path

Tensors = Mapping[str, NDArray[Any]]


def write_model(folder: Path, tensors: Tensors, **sidecars: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    for name, content in {"config.json": "{}", **sidecars}.items():
        (folder / name).write_text(content)
    return folder


def base_tensors(dtype: Any) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(3)
    shapes = {"frozen": (7, 5), "tuned": (300, 11), "far": (40, 9), "vocabulary": (20, 4), "steps": ()}
    made: dict[str, NDArray[Any]] = {n: random.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    made["steps"] = np.array([1, 2], np.int64)
    return made


def expert_tensors(dtype: Any) -> dict[str, NDArray[Any]]:
    """One tensor as it was, one tuned a little, one a lot, one longer, one new, and a counter."""
    random = np.random.default_rng(4)
    made = base_tensors(dtype)
    tuned = made["tuned"].astype(np.float32)
    made["tuned"] = (tuned * (1 + 1e-3 * random.standard_normal(tuned.shape))).astype(dtype)
    made["far"] = random.standard_normal((40, 9)).astype(dtype)
    made["vocabulary"] = np.concatenate([made["vocabulary"], made["vocabulary"][:3]])
    made["added"] = made["frozen"] * np.array(2, dtype)
    made["steps"] = np.array([3, 4], np.int64)
    return made


def forms(out: Path) -> dict[str, tuple[str, str]]:
    content = json.loads((out / RECORD_NAME).read_text())
    return {t["name"]: (t["form"], t["stored_dtype"]) for t in content["tensors"]}


def same_bits(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(
        (first[n].dtype, first[n].shape, first[n].tobytes()) == (second[n].dtype, second[n].shape, second[n].tobytes())
        for n in first
    )


@pytest.mark.parametrize("name", ["BF16", "F16"])
def test_write_delta__of_narrow_weights_gives_every_bit_back(tmp_path: Path, name: str) -> None:
    dtype = NUMPY_DTYPES[name]
    base = write_model(tmp_path / "base", base_tensors(dtype))
    expert = write_model(tmp_path / "expert", expert_tensors(dtype), **{"tokenizer.json": '{"own": 1}'})
    report = write_delta(base, expert, tmp_path / "delta")
    assert (report.as_delta, report.unchanged, report.in_full, report.inexact) == (2, 1, 3, ())
    assert forms(tmp_path / "delta") == {
        "frozen": ("same", name), "tuned": ("delta", name), "far": ("delta", "F32"), "vocabulary": ("full", name),
        "added": ("full", name), "steps": ("full", "I64"),
    }  # fmt: skip
    apply_delta(base, tmp_path / "delta", tmp_path / "again")
    assert same_bits(load_file(tmp_path / "again" / "model.safetensors"), expert_tensors(dtype))
    assert (tmp_path / "again" / "tokenizer.json").read_text() == '{"own": 1}'


def test_write_delta__of_float32_says_how_far_off_it_is(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", base_tensors(np.float32))
    expert = write_model(tmp_path / "expert", expert_tensors(np.float32))
    report = write_delta(base, expert, tmp_path / "delta")
    inexact = {tensor.name: tensor for tensor in report.inexact}
    assert "far" in inexact
    apply_delta(base, tmp_path / "delta", tmp_path / "again")
    again, wanted = load_file(tmp_path / "again" / "model.safetensors"), expert_tensors(np.float32)
    for name, tensor in inexact.items():
        off = np.abs(again[name].astype(np.float64) - wanted[name])
        assert (int(np.count_nonzero(off)), float(off.max())) == (tensor.differing, tensor.worst)
    assert same_bits(*({n: t for n, t in each.items() if n not in inexact} for each in (again, wanted)))


def test_write_delta__exact_stores_in_full_what_no_difference_gives_back(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", base_tensors(np.float32))
    expert = write_model(tmp_path / "expert", expert_tensors(np.float32))
    assert write_delta(base, expert, tmp_path / "delta", exact=True).inexact == ()
    assert forms(tmp_path / "delta")["far"] == ("full", "F32")
    apply_delta(base, tmp_path / "delta", tmp_path / "again")
    assert same_bits(load_file(tmp_path / "again" / "model.safetensors"), expert_tensors(np.float32))


def test_write_delta__is_opened_as_the_differences(tmp_path: Path) -> None:
    base_values, values = base_tensors(np.float32), expert_tensors(np.float32)
    base = write_model(tmp_path / "base", base_values)
    write_delta(base, write_model(tmp_path / "expert", values), tmp_path / "delta")
    assert not (tmp_path / "delta" / "model.safetensors").exists()
    store = LocalStore()
    delta = open_path(store, tmp_path / "delta", open_path(store, base))
    assert (delta.kind, "frozen" in delta.tensors) == (CheckpointKind.DELTA, False)
    assert {n for n, t in delta.tensors.items() if t.is_delta} == {"tuned", "far"}
    stored = load_file(tmp_path / "delta" / "delta.safetensors")
    assert np.array_equal(stored["tuned"], values["tuned"] - base_values["tuned"])


def test_apply_delta__refuses_what_does_not_give_the_expert_back(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", base_tensors(np.float32))
    expert = write_model(tmp_path / "expert", expert_tensors(np.float32))
    write_delta(base, expert, tmp_path / "delta", exact=True)
    other = write_model(tmp_path / "other", {n: t + t.dtype.type(1) for n, t in base_tensors(np.float32).items()})
    with pytest.raises(MismatchError, match="holds differences from the base"):
        apply_delta(other, tmp_path / "delta", tmp_path / "again")
    changed = bytearray((tmp_path / "delta" / "delta.safetensors").read_bytes())
    changed[-1] ^= 1
    (tmp_path / "delta" / "delta.safetensors").write_bytes(changed)
    with pytest.raises(CorruptError, match="does not come out as the expert's"):
        apply_delta(base, tmp_path / "delta", tmp_path / "again")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "delta", "expert", "other"]


def test_apply_delta__without_a_record_takes_the_dtypes_of_the_base(tmp_path: Path) -> None:
    base_values = base_tensors(ml_dtypes.bfloat16)
    base = write_model(tmp_path / "base", base_values)
    write_delta(base, write_model(tmp_path / "expert", expert_tensors(ml_dtypes.bfloat16)), tmp_path / "delta")
    (tmp_path / "delta" / RECORD_NAME).unlink()
    apply_delta(base, tmp_path / "delta", tmp_path / "again")
    assert same_bits(load_file(tmp_path / "again" / "model.safetensors"), expert_tensors(ml_dtypes.bfloat16))


def test_write_delta__refuses_what_it_cannot_do_before_it_writes(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", base_tensors(np.float32))
    lacking = {n: t for n, t in expert_tensors(np.float32).items() if n != "frozen"}
    expert = write_model(tmp_path / "expert", lacking)
    with pytest.raises(MismatchError, match="lacks 'frozen' of the base"):
        write_delta(base, expert, tmp_path / "delta")
    with pytest.raises(OutputError, match="overlaps the input"):
        write_delta(base, base, base / "delta")
    with pytest.raises(OutputError, match="already exists"):
        write_delta(base, base, expert)
    write_delta(base, base, tmp_path / "delta")
    with pytest.raises(UnsupportedError, match="holds delta tensors, full weights are needed"):
        write_delta(base, tmp_path / "delta", tmp_path / "twice")
    with pytest.raises(UnsupportedError, match="holds full tensors, no differences"):
        apply_delta(base, base, tmp_path / "twice")


def test_write_delta__leaves_nothing_behind_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_model(tmp_path / "base", base_tensors(np.float32))
    expert = write_model(tmp_path / "expert", expert_tensors(np.float32))

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(deltas, "check_unchanged", fail)
    with pytest.raises(KeyboardInterrupt):
        write_delta(base, expert, tmp_path / "delta")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["base", "expert"]


def test_write_delta__streams_tensors_of_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(deltas, "SHARD_BYTES", 5000)
    base = write_model(tmp_path / "base", base_tensors(ml_dtypes.bfloat16))
    expert = write_model(tmp_path / "expert", expert_tensors(ml_dtypes.bfloat16))
    write_delta(base, expert, tmp_path / "delta")
    assert len(list((tmp_path / "delta").glob("delta-*.safetensors"))) > 1
    assert (tmp_path / "delta" / "delta.safetensors.index.json").is_file()
    apply_delta(base, tmp_path / "delta", tmp_path / "again")
    again = {n: t for path in (tmp_path / "again").glob("*.safetensors") for n, t in load_file(path).items()}
    assert same_bits(again, expert_tensors(ml_dtypes.bfloat16))


@given(st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFF)), min_size=1, max_size=40))
def test_make_delta__in_float32_gives_back_every_finite_bfloat16_but_a_changed_zero(
    pairs: list[tuple[int, int]],
) -> None:
    base, expert = (np.array(half, np.uint16).view(ml_dtypes.bfloat16) for half in zip(*pairs, strict=True))
    with np.errstate(all="ignore"):
        gaps = np.abs(np.frexp(base.astype(np.float64))[1] - np.frexp(expert.astype(np.float64))[1])
        fits = np.isfinite(base) & np.isfinite(expert) & (gaps < 15) & (expert != 0)
    fits |= (base.view(np.uint16) == expert.view(np.uint16)) & ~np.isnan(base)
    delta, again = np.zeros(4 * len(pairs), np.uint8), np.zeros(2 * len(pairs), np.uint8)
    code = BF16.kernel_code
    make_delta(base.view(np.uint8), code, expert.view(np.uint8), code, delta, F32.kernel_code)
    add_delta(base.view(np.uint8), code, delta, F32.kernel_code, again, code)
    assert np.array_equal(again.view(np.uint16)[fits], expert.view(np.uint16)[fits])


def test_compare__counts_bits_and_measures_finite_distances() -> None:
    found = np.array([0.0, 1.0, 2.0, np.inf], np.float16)
    wanted = np.array([-0.0, 1.0, 2.5, 1.0], np.float16)
    differing, worst = np.zeros(1, np.int64), np.zeros(1, np.float64)
    compare(found.view(np.uint8), wanted.view(np.uint8), F16.kernel_code, differing, worst)
    assert (differing[0], worst[0]) == (3, 0.5)


RECORD = DeltaRecord(
    "base",
    "0" * 32,
    "expert",
    (TensorRecord("a", "BF16", (2, 3), Form.DELTA, "F32", 1, 0.5, "f" * 32),),
    ("delta.safetensors",),
)


def test_record_of_json__reads_what_was_written() -> None:
    assert record_of_json(RECORD.to_json(), Path("x")) == RECORD


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("name", 3, "'name' must be a string"), ("dtype", "BF17", "did you mean 'BF16'"),
        ("form", "half", "'form' is 'half'"), ("shape", [-1], "'shape' must be a list of sizes"),
        ("differing", True, "must be numbers"), ("worst", "x", "must be numbers"), ("blake3", "00", "32 hex digits"),
    ],
)  # fmt: skip
def test_record_of_json__refuses_each_lie(key: str, value: object, words: str) -> None:
    content = json.loads(RECORD.to_json())
    content["tensors"][0][key] = value
    with pytest.raises(CorruptError, match=words):
        record_of_json(json.dumps(content).encode(), Path("x"))


def test_record_of_json__refuses_other_formats_and_repeated_tensors() -> None:
    content = json.loads(RECORD.to_json())
    for changed, error in (
        ({**content, "format": "mergepipe-delta/3"}, UnsupportedError),
        ({**content, "tensors": content["tensors"] * 2}, CorruptError),
        ({**content, "tensors": {}}, CorruptError),
        ({**content, "base": None}, CorruptError),
        ({**content, "files": None}, CorruptError),
        ({**content, "files": [3]}, CorruptError),
    ):
        with pytest.raises(error):
            record_of_json(json.dumps(changed).encode(), Path("x"))


@given(st.binary(max_size=200) | st.recursive(st.none() | st.text(), st.lists).map(lambda v: json.dumps(v).encode()))
def test_record_of_json__survives_anything(raw: bytes) -> None:
    with pytest.raises(MergePipeError):
        record_of_json(raw, Path("x"))


def test_apply_delta__holds_the_record_against_what_is_there(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", base_tensors(np.float32))
    write_delta(base, write_model(tmp_path / "expert", expert_tensors(np.float32)), tmp_path / "delta")
    path = tmp_path / "delta" / RECORD_NAME
    content = json.loads(path.read_text())
    tuned = next(t for t in content["tensors"] if t["name"] == "tuned")
    for change, error in (
        ({"form": "full"}, CorruptError),
        ({"name": "gone"}, MismatchError),
        ({"shape": [1]}, MismatchError),
    ):
        lying = {**content, "tensors": [{**t, **change} if t is tuned else t for t in content["tensors"]]}
        path.write_text(json.dumps(lying))
        with pytest.raises(error, match=r"tuned|gone"):
            apply_delta(base, tmp_path / "delta", tmp_path / "again")


def test_delta_chunks__charge_base_and_expert_apart(tmp_path: Path) -> None:
    base = open_path(LocalStore(), write_model(tmp_path / "base", base_tensors(np.float32)))
    store = LocalStore()
    entry = base.tensors["tuned"]
    assert isinstance(entry, TensorEntry)
    with deltas._Opened(store, (base,), deltas._Meter("delta", (base,), 1, None)) as stream:
        chunks = list(stream.chunks((entry, Purpose.BASE), (entry, Purpose.EXPERT)))
    assert b"".join(first.tobytes() for first, _ in chunks) == base_tensors(np.float32)["tuned"].tobytes()
    usage = store.ledger.usage()
    assert usage[Purpose.BASE] == usage[Purpose.EXPERT] >= Span(0, entry.nbytes).n_elements


def test_delta__progress_grows_to_the_end(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"t{n}": rng.standard_normal(64).astype(np.float32) for n in range(4)}
    base = write_model(tmp_path / "base", tensors)
    expert = write_model(tmp_path / "expert", {name: values + 1 for name, values in tensors.items()})
    seen: list[Progress] = []
    mergepipe.make_delta(base, expert, tmp_path / "delta", on_progress=seen.append)
    done = [each.done_bytes for each in seen]
    assert done == sorted(done)
    assert (done[-1], seen[-1].total_bytes, seen[-1].phase) == (4096, 4096, "delta")
    seen.clear()
    mergepipe.apply_delta(base, tmp_path / "delta", tmp_path / "again", on_progress=seen.append)
    assert (seen[-1].done_bytes, seen[-1].total_bytes, seen[-1].phase) == (2048, 2048, "apply")
