"""What describes a model is read in little memory: its index, its headers, its card, as large as they may be."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mergepipe
from mergepipe.checkpoints.safetensors import MAX_HEADER_BYTES
from mergepipe.core import strict_json
from mergepipe.core.strict_json import MOST_MADE_BYTES, made_bytes, object_members, parse_object
from mergepipe.errors import CorruptError, OutputError
from mergepipe.storage.contract import CARD_BYTES, WEIGHT_INDEX_BYTES
from support.model_folders import recipe_of, write_model
from support.refusals import refuses
from support.safetensors_bytes import file_bytes

GROWTH_BYTES = 256 << 20
OPEN = """
import os, sys
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.errors import MergePipeError
from mergepipe.runs.model_card import read_input_card
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
def peak_bytes():  # of this program alone, which getrusage does not tell of one that another has started
    status = open("/proc/self/status").read()
    return int(status.split("VmHWM:")[1].split()[0]) << 10
def open_model(folder):
    before = peak_bytes()
    try:
        store = LocalStore()
        checkpoint = open_checkpoint(store, Location.parse(folder))
        result = read_input_card(store, checkpoint).license or "none"
    except MergePipeError as error:
        result = error.code
    print(result, peak_bytes() - before, flush=True)
for folder in sys.argv[1:]:
    if os.fork() == 0:
        open_model(folder)
        os._exit(0)
    os.wait()
"""
ENTRY = '"model.layers.{0:03d}.mlp.experts.{1:04d}.up_proj.weight":{2}'
EMPTY = '{"dtype":"BF16","shape":[0,4096],"data_offsets":[0,0]}'


def entries(value: str, nbytes: int) -> str:
    """Members with the names of experts' tensors, together so long."""
    line = len(ENTRY.format(0, 0, value)) + 1
    return ",".join(ENTRY.format(i // 1000, i % 1000, value) for i in range(nbytes // line))


def repeated(unit: str, nbytes: int) -> str:
    return ",".join([unit] * (nbytes // (len(unit) + 1)))


def write_index(folder: Path, text: str) -> None:
    (folder / "model-00001-of-00001.safetensors").write_bytes(file_bytes("{}"))
    (folder / "model.safetensors.index.json").write_text(text)


def write_header(folder: Path, text: str) -> None:
    (folder / "model.safetensors").write_bytes(file_bytes(text))


def write_card(folder: Path, text: str) -> None:
    (folder / "model.safetensors").write_bytes(file_bytes("{}"))
    (folder / "README.md").write_text(text)


RESULT = "- {task: {type: x}}\n"
INDEX, HEADER, CARD = WEIGHT_INDEX_BYTES - 1000, MAX_HEADER_BYTES - 1000, CARD_BYTES - 1000
SHARD = '"model-00001-of-00001.safetensors"'
CASES: dict[str, tuple[Callable[[Path, str], None], int, Callable[[int], str], str]] = {
    "index of many tensors": (
        write_index, INDEX, lambda n: f'{{"weight_map":{{{entries(SHARD, n)}}}}}', "checkpoint.damaged",
    ),
    "index of lists": (
        write_index, INDEX, lambda n: f'{{"weight_map":{{"a":[{repeated("[]", n)}]}}}}', "checkpoint.damaged",
    ),
    "index with other members": (
        write_index, INDEX, lambda n: f'{{"metadata":[{repeated("{}", n)}],"weight_map":{{"a":{SHARD}}}}}',
        "checkpoint.damaged",
    ),
    "header of many tensors": (write_header, HEADER, lambda n: f"{{{entries(EMPTY, n)}}}", "none"),
    "header of lists": (
        write_header, HEADER, lambda n: f'{{"a":[{repeated("[]", n)}]}}', "checkpoint.damaged",
    ),
    "header of metadata": (
        write_header, HEADER, lambda n: f'{{"__metadata__":{{{repeated(chr(34) * 2 + ":[]", n)}}}}}',
        "checkpoint.damaged",
    ),
    "card of results": (
        write_card, CARD,
        lambda n: f"---\nlicense: mit\nmodel-index:\n{RESULT * (n // len(RESULT))}---\n",
        "mit",
    ),
    "card of one key": (write_card, CARD, lambda n: f"---\ntags: [{repeated('a', n)}]\nlicense: mit\n---\n", "none"),
}  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize("part", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_open_checkpoint__takes_little_memory_for_what_describes_a_model(tmp_path: Path, part: int) -> None:
    """Each in a process of its own, whose peak is what is measured; an eighth of the most may take an eighth."""
    for case, (write, most_bytes, text, _) in CASES.items():
        (tmp_path / case).mkdir()
        write(tmp_path / case, text(most_bytes // part))
    command = [sys.executable, "-c", OPEN, *(str(tmp_path / case) for case in CASES)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    results = dict(zip(CASES, map(str.split, ran.stdout.splitlines()), strict=True))
    assert {case: result for case, (result, _) in results.items()} == {case: code for case, (*_, code) in CASES.items()}
    assert [case for case, (_, growth_bytes) in results.items() if int(growth_bytes) >= GROWTH_BYTES // part] == []


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**6), 10**6)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@pytest.fixture(params=[0, strict_json.MOST_AT_ONCE_BYTES], ids=["one by one", "at once"])
def _each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the members of small documents in both ways."""
    monkeypatch.setattr(strict_json, "MOST_AT_ONCE_BYTES", request.param)


@pytest.mark.usefixtures("_each_way")
@given(st.dictionaries(st.sampled_from(["nested", "a", "b", ""]) | st.text(), VALUES, max_size=5), st.integers(0, 2))
def test_object_members__are_those_of_the_whole_object(document: dict[str, object], indent: int) -> None:
    raw = json.dumps(document, indent=indent or None, ensure_ascii=indent == 1).encode("utf-8", "surrogatepass")
    whole = parse_object(raw, where="x", code="c")
    assert {key: value for _, key, value in object_members(raw, where="x", code="c")} == whole
    nested = whole.get("nested")
    inner = [(key, value) for outer, key, value in object_members(raw, where="x", code="c", nested="nested") if outer]
    assert inner == (list(nested.items()) if isinstance(nested, dict) else [])


@pytest.mark.usefixtures("_each_way")
@given(
    st.text(alphabet='{}[]",:\\u0a1e- \nt', max_size=20) | st.binary(max_size=12).map(lambda raw: raw.decode("latin-1"))
)
def test_object_members__refuse_what_the_whole_object_is_refused_for(text: str) -> None:
    raw = text.encode()
    codes = []
    for read in (parse_object, lambda raw, **given: list(object_members(raw, **given))):
        try:
            read(raw, where="x", code="c")
        except CorruptError as error:
            codes.append(error.code)
    assert len(codes) in (0, 2)
    assert len(set(codes)) <= 1


DOCUMENTS = {
    "empty objects": ",".join(["{}"] * 20_000),
    "empty lists": ",".join(["[]"] * 20_000),
    "objects of one member": ",".join(['{"a":1}'] * 20_000),
    "a log": ",".join(f'{{"epoch":{i / 7},"loss":{i / 3},"step":{i}}}' for i in range(10_000)),
    "numbers": ",".join(map(str, range(1000, 30_000))),
    "texts": ",".join(f'"text {i}"' for i in range(20_000)),
    "merges of a tokenizer": ",".join(f'["a{i}","b{i}"]' for i in range(20_000)),
}


@pytest.mark.parametrize("values", DOCUMENTS.values(), ids=DOCUMENTS)
def test_made_bytes__is_not_less_than_values_take_and_not_many_times_more(values: str) -> None:
    raw = f'{{"values":[{values}]}}'.encode()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        document = json.loads(raw)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert document
    assert taken <= 1.1 * made_bytes(raw)
    assert made_bytes(raw) <= 3 * taken


@pytest.mark.thorough
def test_parse_object__refuses_values_that_take_too_much_memory() -> None:
    raw = b'{"log_history":[' + b",".join([b"{}"] * (MOST_MADE_BYTES // 128)) + b"]}"
    with pytest.raises(CorruptError, match="its values take more than 805 MB of memory"):
        parse_object(raw, where="trainer_state.json", code="checkpoint.damaged")


MADE_BYTES_OF_AN_OBJECT = 128


def test_verify_and_force__read_no_values_that_take_too_much_memory(tmp_path: Path) -> None:
    """What somebody has put into a published output is refused before it is parsed."""
    shape = {"w": np.ones((64, 64), np.float32), "v": np.ones((64, 64), np.float32)}
    models = [write_model(tmp_path / name, shape) for name in ("one", "other")]
    recipe = recipe_of("linear", {model: {"weight": 0.5} for model in models})
    mergepipe.merge(recipe, tmp_path / "out", shard_bytes=20_000, catalog=False)
    objects = b",".join([b"{}"] * (MOST_MADE_BYTES // MADE_BYTES_OF_AN_OBJECT))
    (tmp_path / "out" / "model.safetensors.index.json").write_bytes(b'{"weight_map":[' + objects + b"]}")
    report = mergepipe.verify(tmp_path / "out", catalog=False)
    assert any("its values take more than" in damage.message for damage in report.damages if damage.kind == "index")
    (tmp_path / "out" / "mergepipe.json").write_bytes(b'{"files":[' + objects + b"]}")
    with refuses(OutputError, "output.not-ours"):
        mergepipe.merge(recipe, tmp_path / "out", force=True, catalog=False)
