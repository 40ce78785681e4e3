"""Pickles and zip files that lie: a typed error each, and nothing executed."""

from __future__ import annotations

import json
import pickle
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints import inert_pickle, name_patterns
from mergepipe.checkpoints.inert_pickle import load_inert
from mergepipe.checkpoints.stored_adapters import AdapterConfig, read_adapter_config
from mergepipe.checkpoints.torch_file import walk_tensors
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.runs.inputs import open_model
from mergepipe.storage.contract import ADAPTER_CONFIG_BYTES
from mergepipe.storage.location import Location
from support.local_models import torch_archive
from support.named_models import named
from support.refusals import refusal, refuses
from support.safetensors_bytes import file_bytes, record
from support.stores import InMemoryStore, MetadataStore
from support.torch_bytes import (
    Call,
    Member,
    Named,
    PickleWriter,
    View,
    pickle_file,
    torch_bytes,
    torch_members,
    zip_bytes,
)
from support.torch_bytes import Named as GlobalName

TENSOR_V2 = Named("torch._utils", "_rebuild_tensor_v2")
ORDERED = Named("collections", "OrderedDict")


@cache
def audited() -> list[list[str]]:
    """Lists that the process adds its audited events to: by one hook, for there is no way to remove any."""
    lists: list[list[str]] = []

    def hook(event: str, args: tuple[object, ...]) -> None:
        for seen in lists:
            watched = event in ("exec", "os.system", "subprocess.Popen", "os.posix_spawn", "pickle.find_class")
            if watched or (event == "import" and str(args[0]) in ("os", "torch", "antigravity")):
                seen.append(event)

    sys.addaudithook(hook)
    return lists


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record every audited import, execution and process start of this test."""
    seen: list[str] = []
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    audited().append(seen)
    yield seen
    audited().remove(seen)


def written(value: object) -> bytes:
    return PickleWriter().write(value)


class Malicious:
    """What a real pickler makes of an object that wants to run a command."""

    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        Malicious(eval, "__import__('os').system('touch /nowhere/owned')"),
        Malicious(exec, "raise SystemExit"),
        Malicious(getattr, 1, "__class__"),
        Malicious(__import__, "antigravity"),
        Malicious(print, "owned"),
    ],
)
def test_load_inert__refuses_calls_and_runs_nothing(value: Malicious, protocol: int, trap: list[str]) -> None:
    with refuses(UnsupportedError, "pickle.refused", "not on the list of inert types"):
        load_inert(pickle.dumps(value, protocol), "test")
    assert trap == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("posix", "system"),
        ("subprocess", "Popen"),
        ("builtins", "getattr"),
        ("__builtin__", "eval"),
        ("torch", "load"),
        ("torch.hub", "load"),
        ("torch", "Size.__init__"),
        ("torch._utils", "_rebuild_tensor_v2.__globals__"),
        ("torch.storage", "_load_from_bytes"),
        ("collections", "OrderedDict.__class__"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("functools", "partial"),
        ("", ""),
    ],
)
def test_load_inert__refuses_every_name_off_the_list(module: str, name: str, trap: list[str]) -> None:
    stacked = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93."
    for pickled in (f"c{module}\n{name}\n".encode(), stacked[2:-1]):
        with refuses(UnsupportedError, "pickle.refused"):
            load_inert(b"\x80\x04" + pickled + b".", "test")
    assert trap == []


@pytest.mark.parametrize(
    "hostile",
    [
        Call(TENSOR_V2, (1, 2, 3, 4, 5, 6)),
        Call(TENSOR_V2),
        Call(Named("torch", "FloatStorage"), (1 << 40,)),
        Call(Named("torch", "Size"), (("x",),)),
        Call(Named("torch", "Size"), ((-1,),)),
        Call(Named("torch", "Size"), ((1 << 63,),)),
        Call(Named("torch", "Size"), ((1,) * 70,)),
        Call(ORDERED, ([1, 2],)),
        Call(ORDERED, ([([], 1)],)),
        Call(Named("collections", "defaultdict"), ("x",)),
        Call(Named("torch._tensor", "_rebuild_from_type_v2"), (ORDERED, ORDERED, (), None)),
        Call(Named("torch._tensor", "_rebuild_from_type_v2"), (TENSOR_V2, ORDERED, (1,), None)),
        Call(Named("torch._utils", "_rebuild_parameter"), ("x", True, None)),
        Call(Named("_codecs", "encode"), ("x", "rot13")),
        Call(Named("_codecs", "encode"), ("\u20ac", "latin1")),
        Call(Named("builtins", "set"), ("xyz",)),
        Call(Named("torch", "Tensor"), ()),
        Call(Named("torch", "float32"), ()),
        {"a": Call(ORDERED, (), state=None)} | {"b": Call(TENSOR_V2, (None,) * 6)},
        {None: Call(ORDERED), "x": Call(Named("torch.nn.parameter", "Parameter"), ())},
    ],
)
def test_load_inert__refuses_listed_names_with_hostile_arguments(hostile: object, trap: list[str]) -> None:
    with pytest.raises(CorruptError):
        load_inert(written(hostile), "test")
    assert trap == []


def number(opcode: bytes, form: str, value: int) -> bytes:
    return opcode + struct.pack(form, value)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("recalled from nowhere", number(b"j", "<I", 0xFFFFFFFF)),
        ("text longer than the file", number(b"X", "<I", 0xFFFFFFFF)),
        ("text of 2**63 bytes", number(b"\x8d", "<Q", 1 << 63)),
        ("bytes of 2**62 bytes", number(b"\x8e", "<Q", 1 << 62)),
        ("integer of 2 GB", number(b"\x8b", "<i", 0x7FFFFFFF)),
        ("integer of negative size", number(b"\x8b", "<i", -1)),
        ("integer of 255 bytes", b"\x8a\xff" + b"\x01" * 255),
        ("frame of 2**63 bytes", number(b"\x95", "<Q", 1 << 63)),
        ("empty stack", b"R"),
        ("tuple of nothing", b"\x86"),
        ("list end without begin", b"e"),
        ("append to a tuple", b")Na"),
        ("state for a list", b"]Nb"),
        ("items for a list", b"](NNu"),
        ("key without value", b"}(Nu"),
        ("list as a key", b"}]Ns"),
        ("tuple as a key", b"})Ns"),
        ("float as a key", b"}G" + bytes(8) + b"Ns"),
        ("huge integer as a key", b"}\x8a\x09" + b"\x01" * 9 + b"Ns"),
        ("name that is not text", b"NN\x93"),
        ("name without an end", b"c" + b"x" * 2000),
        ("text that is not UTF-8", b"X\x01\x00\x00\x00\xff"),
        ("storage id that is none", b"NQ"),
        ("two values", b"NN"),
        ("open mark", b"(N"),
        ("second protocol", b"N\x80\x02"),
    ],
)
def test_load_inert__names_what_is_corrupt(name: str, body: bytes) -> None:
    with pytest.raises(CorruptError):
        load_inert(b"\x80\x02" + body + b".", name)


@pytest.mark.parametrize("opcode", [b"i", b"o", b"P", b"I", b"L", b"S", b"V", b"F", b"0", b"1", b"2", b"\x82", b"\x92"])
def test_load_inert__refuses_opcodes_no_checkpoint_needs(opcode: bytes) -> None:
    with refuses(UnsupportedError, "pickle.refused"):
        load_inert(b"\x80\x02" + opcode, "test")


def test_load_inert__stores_a_huge_memo_index_in_no_space() -> None:
    assert load_inert(b"\x80\x02N" + number(b"r", "<I", 0xFFFFFFFE) + b".", "test") is None


def test_load_inert__refuses_deep_marks_and_endless_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CorruptError, match="nested"):
        load_inert(b"\x80\x02" + b"(" * 100_000, "test")
    with pytest.raises(CorruptError, match="are waiting"):
        load_inert(b"\x80\x02" + b"]" * 200_000, "test")
    monkeypatch.setattr(inert_pickle, "_MOST_OPCODES", 150)
    with refuses(CorruptError, "checkpoint.damaged"):
        load_inert(b"\x80\x02]" + b"Na" * 100 + b".", "test")
    monkeypatch.setattr(inert_pickle, "PICKLE_BYTES", 3)
    with refuses(UnsupportedError, "pickle.refused"):
        load_inert(b"\x80\x02N.", "test")


def again_and_again(function: str, argument: bytes, n_calls: int = 1000) -> bytes:
    """A pickle that remembers an argument and calls a function with it a thousand times."""
    module, _, name = function.rpartition(".")
    named = b"c" + module.encode() + b"\n" + name.encode() + b"\nq\x03"
    return b"\x80\x02](" + argument + b"q\x01" + named + b"h\x03h\x01\x85R" * n_calls + b"e."


REMEMBERED = {
    "builtins.set": b"](" + b"N" * 4000 + b"e",
    "builtins.frozenset": b"](" + b"N" * 4000 + b"e",
    "collections.OrderedDict": b"](" + b"K\x01N\x86" * 4000 + b"e",
}


@pytest.mark.parametrize("function", REMEMBERED)
def test_load_inert__refuses_calls_that_copy_one_value_again_and_again(function: str) -> None:
    with pytest.raises(CorruptError, match=r"calls copy more than the [0-9]+ items"):
        load_inert(again_and_again(function, REMEMBERED[function]), "x")


def test_load_inert__refuses_one_text_that_is_encoded_again_and_again() -> None:
    text = b"X" + struct.pack("<I", 4000) + b"a" * 4000
    latin1 = b"X\x06\x00\x00\x00latin1q\x02"
    calls = b"h\x03h\x01h\x02\x86R" * 1000
    body = b"\x80\x02](" + text + b"q\x01" + latin1 + b"c_codecs\nencode\nq\x03" + calls + b"e."
    with pytest.raises(CorruptError, match="calls copy more"):
        load_inert(body, "x")


@pytest.mark.parametrize("protocol", [2, 4])
def test_load_inert__reads_many_collections_that_python_wrote(protocol: int) -> None:
    value = [{1, 2, 3}, frozenset("ab"), b"\x00\xff" * 50, [set(range(100)) for _ in range(50)]]
    loaded = load_inert(pickle.dumps(value, protocol), "x")
    assert isinstance(loaded, list)
    assert sorted(loaded[0]) == [1, 2, 3]
    assert loaded[2] == b"\x00\xff" * 50


def test_walk_tensors__takes_linear_time_on_nested_sharing() -> None:
    doubled = b"]" + b"".join(b"q\x00" + b"](h\x00h\x00e" for _ in range(300))
    # each list holds the one before twice: 2**300 paths, 301 lists; the stack is reduced by appending downwards
    nested = b"\x80\x02](" + doubled + b"e."
    assert list(walk_tensors(load_inert(nested, "test"))) == []


def test_walk_tensors__survives_levels_beyond_the_limit_of_recursion_and_a_cycle() -> None:
    deep = load_inert(b"\x80\x02)" + b"\x85" * 20 * sys.getrecursionlimit() + b".", "test")
    cycle = load_inert(b"\x80\x02]q\x00h\x00a.", "test")
    assert [list(walk_tensors(deep)), list(walk_tensors(cycle))] == [[], []]


# --- the zip around it


def refused(tmp_path: Path, content: bytes) -> MergePipeError:
    path = tmp_path / "file.pt"
    path.write_bytes(content)
    error = refusal(lambda: torch_archive(path).tensors())
    assert isinstance(error, CorruptError | UnsupportedError)
    return error


HONEST = {"w": np.arange(600, dtype=np.float32), "v": np.arange(1500, dtype=np.float32)}


def altered(member: str, /, **lies: Any) -> bytes:
    """The honest file with one member's fields replaced."""
    return zip_bytes(replace(m, **lies) if m.name == member else m for m in torch_members(HONEST))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (altered("archive/data/0", method=8), "member 'archive/data/0' is compressed or"),
        (altered("archive/data/0", flags=0x0809), "member 'archive/data/0' is compressed or"),
        (altered("archive/data/0", name="archive/data/1"), "two members are called 'archive/data/1'"),
        (altered("archive/data/0", name="archive/../data/0"), "a member is called 'archive/../data/0'"),
        (altered("archive/data/0", name="/etc/passwd"), "a member is called '/etc/passwd'"),
        (altered("archive/data/0", name="archive\\data\\0"), "a member is called 'archive\\\\data\\\\0'"),
        (altered("archive/data/0", name="archive//0"), "a member is called 'archive//0'"),
        (altered("archive/data/0", name="archive/a\x00b"), "a member's name is empty, too long or not"),
        (altered("archive/data/0", name="other/data/0"), "a zip file, but not one written by"),
        (altered("archive/data/0", local_name="archive/data/9"), "the header of member 'archive/data/0'"),
        (altered("archive/data/0", central_size=4000), "member 'archive/data/0' ends at 4576,"),
        (altered("archive/data/0", central_size=1000), "the descriptor behind member"),
        (altered("archive/data/0", header_offset=0), "member 'archive/data.pkl' ends at 363,"),
        (altered("archive/data/0", header_offset=1 << 31), "bytes [2147483648, 2147483692) of 9498 are"),
        (altered("archive/data/0", content=b"short"), "storage '0' has 5 bytes, 2400 are announced"),
        (altered("archive/data/0", name="archive/data/00"), "storage '0' is not in the file"),
        (altered("archive/data.pkl", crc32=1), "the checksum of data.pkl does not match;"),
        (altered("archive/data.pkl", name="archive/data.pk"), "a zip file, but not one written by"),
        (zip_bytes(torch_members(HONEST), comment=b"PK"), "the file does not end with a zip directory;"),
        (torch_bytes(HONEST) + b"tail", "the file does not end with a zip directory;"),
        (b"MZ" + torch_bytes(HONEST), "not a file written by torch.save"),
        (zip_bytes([]), "a zip file, but not one written by"),
        (b"", "not a file written by torch.save"),
        (b"PK\x03\x04", "4 bytes are too few for a zip file"),
    ],
)
def test_read_torch_zip__names_each_lie(tmp_path: Path, content: bytes, words: str) -> None:
    error = refused(tmp_path, content)
    assert error.code in ("checkpoint.damaged", "checkpoint.unsupported")
    assert words in str(error)


def test_read_torch_zip__refuses_a_file_cut_anywhere(tmp_path: Path) -> None:
    whole = torch_bytes(HONEST)
    for length in range(0, len(whole), 97):
        assert refused(tmp_path, whole[:length]).code in ("checkpoint.damaged", "checkpoint.unsupported")


def test_read_torch_zip__refuses_two_members_in_the_same_bytes(tmp_path: Path) -> None:
    members = torch_members(HONEST)
    inner = zip_bytes([Member("archive/data/7", b"x" * 100)])
    outer = Member("archive/data/8", inner)
    content = zip_bytes([*members, outer])
    start = content.index(inner)
    twice = zip_bytes([*members, outer, Member("archive/data/7", b"x" * 100, header_offset=start)])
    assert re.search("beyond byte|contradicts the directory|another size", str(refused(tmp_path, twice)))


@pytest.mark.parametrize(
    "view",
    [
        View(np.ones(8, np.float32), 1, (8,)),
        View(np.ones(8, np.float32), 0, (1 << 40,)),
        View(np.ones(8, np.float32), 1 << 60, (1,)),
        View(np.ones(8, np.float32), 0, (1 << 31, 1 << 31, 1 << 31)),
    ],
)
def test_read_torch_zip__refuses_a_tensor_beyond_its_storage(tmp_path: Path, view: View) -> None:
    assert "of a storage of" in str(refused(tmp_path, torch_bytes({"t": view})))


def test_read_torch_zip__refuses_a_malicious_pickle_in_an_honest_zip(tmp_path: Path, trap: list[str]) -> None:
    content = pickle_file(pickle.dumps(Malicious(exec, "raise SystemExit"), 2))
    assert (refused(tmp_path, content).code, trap) == ("pickle.refused", [])


# --- adapters, deltas and pickled weights from strangers: a typed error or a sound checkpoint


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


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|aa)+$", "(?:a+)+", r"(a)\1*", "(?=a)b", "a{300}{300}", "a*" * 600])
def test_read_adapter_config__refuses_or_matches_patterns_that_could_explode(pattern: str) -> None:
    config = outcome(lambda: parsed(json.dumps({"peft_type": "LORA", "rank_pattern": {pattern: 3}}).encode()))
    if isinstance(config, AdapterConfig):
        assert config.rank_of("a" * 500 + "!") == 8
    else:
        assert config.code in ("adapter.unsupported", "adapter.damaged")
        assert "the pattern" in str(config)


def test_read_adapter_config__bounds_the_work_of_many_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "_MOST_WORK", 100_000)
    patterns = {f".*{'.*'.join(map(str, range(n)))}x": n + 1 for n in range(1, 60)}
    config = parsed(json.dumps({"peft_type": "LORA", "rank_pattern": patterns}).encode())

    def match_all() -> None:
        for number in range(1000):
            config.rank_of(f"{number:0300d}{number * 7919:0200d}")

    with refuses(UnsupportedError, "adapter.unsupported", "takes too long, with so many patterns and names"):
        match_all()


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
    with pytest.raises(CorruptError, match="outside the checkpoint"):
        open_model(MetadataStore(), named(Location.local(tmp_path / "a")), base)
