"""Every way a safetensors file can lie, and what it is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe.checkpoints.contract import WeightHeader
from mergepipe.checkpoints.safetensors import FIRST_READ_BYTES, MAX_HEADER_BYTES, read_header
from mergepipe.core.strict_json import MAX_DEPTH, parse_object
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.storage.location import Location
from support.refusals import refusal, refuses
from support.safetensors_bytes import file_bytes, honest_file, record
from support.stores import InMemoryStore

PATH = Location.parse("model.safetensors")
LIBRARY_READ: Callable[[bytes], list[tuple[str, dict[str, object]]]] = safetensors.deserialize


def parse(content: bytes) -> WeightHeader:
    return read_header(InMemoryStore({PATH: content}), PATH)


def refused(content: bytes) -> MergePipeError:
    error = refusal(lambda: parse(content), CorruptError)
    assert error.problems[0].where == str(PATH)
    return error


def one(entry: object, tensor_bytes: bytes = bytes(4)) -> bytes:
    return file_bytes({"w": entry}, tensor_bytes)


def one_with(key: str, value: object) -> bytes:
    return one({**record(0, 4), key: value})


def text_of(shape: str, offsets: str = "[0,4]") -> bytes:
    return file_bytes(f'{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}', bytes(4))


HUGE = 10**15
DEEP = 100_000

EMPTY = '{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
LIES: dict[str, tuple[bytes, str]] = {
    "empty file": (b"", "a safetensors file starts with 8 bytes of"),
    "shorter than the prefix": (b"\0" * 7, "a safetensors file starts with 8 bytes of"),
    "length over the cap": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "the header claims 16777217"),
    "length of all ones": (b"\xff" * 8 + b"{}", "the header claims 18446744073709551615"),
    "zip archive": (b"PK\x03\x04" + bytes(60), "PyTorch file"),
    "pickle": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + bytes(60), "the header claims 5088219219985302144"),
    "length beyond the file": ((3).to_bytes(8, "little") + b"{}", "header: 11 bytes are needed, the file has 10"),
    "no header": (file_bytes(b""), "the header must start with '{', found b''"),
    "leading space": (file_bytes(" {}"), "the header must start with '{', found b' {}'"),
    "byte order mark": (file_bytes("\ufeff{}"), "the header must start with '{', found"),
    "header is a list": (file_bytes("[]"), "the header must start with '{', found b'[]'"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), "JSON must be UTF-8, found byte 0xff at 2"),
    "surrogate as UTF-8": (file_bytes(b'{"\xed\xa0\x80":1}'), "JSON must be UTF-8, found byte 0xed at 2"),
    "UTF-16": (file_bytes("{}".encode("utf-16-le")), "not valid JSON: "),
    "unfinished JSON": (file_bytes('{"w":'), "not valid JSON: "),
    "trailing JSON": (file_bytes("{}{}"), "not valid JSON: "),
    "trailing NUL": (file_bytes(b"{}\0"), "not valid JSON: "),
    "trailing comma": (file_bytes('{"__metadata__":{},}'), "not valid JSON: "),
    "comment": (file_bytes("{/* */}"), "not valid JSON: "),
    "single quotes": (file_bytes("{'a':1}"), "not valid JSON: "),
    "raw control character": (file_bytes('{"a\nb":1}'), "not valid JSON: Invalid control character"),
    "deep lists": (file_bytes('{"w":' + "[" * DEEP + "]" * DEEP + "}"), "JSON is nested deeper than 64 levels"),
    "deep objects": (file_bytes('{"w":' * DEEP + "1" + "}" * DEEP), "JSON is nested deeper than 64 levels"),
    "deep and unfinished": (file_bytes('{"w":' * DEEP), "JSON is nested deeper than 64 levels"),
    "deep behind a quoted bracket": (file_bytes('{"\\"]]]":' + "[" * DEEP + "]" * DEEP + "}"), "JSON is nested"),
    "NaN": (text_of("[NaN]"), "JSON has no number NaN"),
    "Infinity": (text_of("[Infinity]"), "JSON has no number Infinity"),
    "minus Infinity": (text_of("[-Infinity]"), "JSON has no number -Infinity"),
    "number out of range": (text_of("[1e999]"), "the number '1e999' is out of range"),
    "integer of many digits": (text_of("[" + "9" * 5000 + "]"), "the integer"),
    "tensor twice": (file_bytes(f'{{"w":{EMPTY},"w":2}}'), "the key 'w' occurs twice in one JSON object"),
    "tensor twice by escape": (file_bytes(f'{{"w":{EMPTY},"\\u0077":2}}'), "the key 'w' occurs twice in one JSON"),
    "metadata twice": (file_bytes('{"__metadata__":{},"__metadata__":{}}'), "the key '__metadata__' occurs twice"),
    "dtype twice": (file_bytes('{"w":{"dtype":"F32","dtype":"F16"}}'), "the key 'dtype' occurs twice in one JSON"),
    "lone surrogate": (file_bytes('{"\\ud800":1}'), "a string holds half of a surrogate pair,"),
    "surrogates swapped": (file_bytes('{"__metadata__":{"a":"\\ude00\\ud83d"}}'), "a string holds half of a"),
    "metadata a list": (file_bytes('{"__metadata__":[]}'), "__metadata__ must be an object of strings,"),
    "metadata list": (file_bytes('{"__metadata__":[]}'), "__metadata__ must be an object of strings,"),
    "metadata number": (file_bytes('{"__metadata__":{"a":1}}'), "__metadata__ 'a' must be a string, found 1"),
    "metadata nested": (file_bytes('{"__metadata__":{"a":{}}}'), "__metadata__ 'a' must be a string, found {}"),
    "metadata as a tensor": (file_bytes({"__metadata__": record(0, 4)}, bytes(4)), "__metadata__ 'shape' must be a"),
    "empty name": (file_bytes({"": record(0, 4)}, bytes(4)), "a tensor has an empty name"),
    "NUL in name": (file_bytes({"a\0b": record(0, 4)}, bytes(4)), "the tensor name 'a\\x00b' holds control"),
    "escape sequence in name": (file_bytes({"\x1b[2J": record(0, 4)}, bytes(4)), "the tensor name '\\x1b[2J' holds"),
    "C1 control in name": (file_bytes({"a\x9b": record(0, 4)}, bytes(4)), "the tensor name 'a\\x9b' holds control"),
    "entry null": (one(None), "tensor 'w' must be an object, found None"),
    "entry list": (one(["F32", [1], [0, 4]]), "tensor 'w' must be an object, found ['F32',"),
    "entry without dtype": (one({"shape": [1], "data_offsets": [0, 4]}), "tensor 'w' has no 'dtype'"),
    "entry without shape": (one({"dtype": "F32", "data_offsets": [0, 4]}), "tensor 'w' has no 'shape'"),
    "entry without offsets": (one({"dtype": "F32", "shape": [1]}), "tensor 'w' has no 'data_offsets'"),
    "entry with more": (one_with("strides", [1]), "tensor 'w' has an unknown key 'strides'"),
    "unknown dtype": (one_with("dtype", "FP32"), "the unknown dtype 'FP32'; did you mean 'F32'?"),
    "dtype in lower case": (one_with("dtype", "f32"), "tensor 'w' has the unknown dtype 'f32'"),
    "dtype number": (one_with("dtype", 32), "the dtype of tensor 'w' must be a string,"),
    "dtype list": (one_with("dtype", ["F32"]), "the dtype of tensor 'w' must be a string,"),
    "long dtype": (one_with("dtype", "F" * 1_000_000), "tensor 'w' has the unknown dtype 'FFF"),
    "shape null": (one_with("shape", None), "the shape of tensor 'w' must be a list of"),
    "shape number": (one_with("shape", 1), "the shape of tensor 'w' must be a list of"),
    "shape string": (one_with("shape", "1"), "the shape of tensor 'w' must be a list of"),
    "shape bool": (one_with("shape", [True]), "the shape of tensor 'w' must be a list of"),
    "shape float": (one_with("shape", [1.0]), "the shape of tensor 'w' must be a list of"),
    "shape negative": (one_with("shape", [-1]), "the shape of tensor 'w' must be a list of"),
    "shape negative twice": (one_with("shape", [-1, -1]), "the shape of tensor 'w' must be a list of"),
    "shape minus zero": (text_of("[-0]", "[0,0]"), "the shape of tensor 'w' must be a list of"),
    "shape nested": (one_with("shape", [[1]]), "the shape of tensor 'w' must be a list of"),
    "shape over 63 bits": (one_with("shape", [2**63]), "the shape [9223372036854775808] of tensor"),
    "shape wraps to the size": (one_with("shape", [2**32, 2**32]), "the shape [4294967296, 4294967296] of"),
    "shape wraps with the item size": (one_with("shape", [2**62 + 1]), "the shape [4611686018427387905] of tensor"),
    "shape overflows before a zero": (one_with("shape", [2**40, 2**40, 0]), "the shape [1099511627776,"),
    "shape overflows after a zero": (one_with("shape", [0, 2**63]), "the shape [0, 9223372036854775808] of"),
    "offsets null": (one_with("data_offsets", None), "the data_offsets of tensor 'w' must be two"),
    "offsets of one": (one_with("data_offsets", [4]), "the data_offsets of tensor 'w' must be two"),
    "offsets of three": (one_with("data_offsets", [0, 4, 4]), "the data_offsets of tensor 'w' must be two"),
    "offsets object": (one_with("data_offsets", {"0": 0}), "the data_offsets of tensor 'w' must be two"),
    "offsets bool": (one_with("data_offsets", [False, 4]), "the data_offsets of tensor 'w' must be two"),
    "offsets float": (one_with("data_offsets", [0, 4.0]), "the data_offsets of tensor 'w' must be two"),
    "offsets negative": (one_with("data_offsets", [-4, 0]), "the data_offsets of tensor 'w' must be two"),
    "offsets reversed": (one_with("data_offsets", [4, 0]), "the data_offsets of tensor 'w' must be two"),
    "offsets wider than the shape": (one({**record(0, 8), "shape": [1]}, bytes(8)), "tensor 'w' of shape [1] and"),
    "offsets narrower than the shape": (one({**record(0, 4), "shape": [2]}), "8 bytes, its data_offsets [0, 4] give 4"),
    "scalar of nothing": (one(record(0, 0, shape=[]), b""), "tensor 'w' of shape [] and dtype F32 needs"),
    "same bytes twice": (file_bytes({"a": record(0, 4), "b": record(0, 4)}, bytes(4)), "tensor 'b' starts at byte"),
    "partial overlap": (file_bytes({"a": record(0, 8), "b": record(4, 12)}, bytes(12)), "'b' starts at byte 4 of"),
    "one inside the other": (file_bytes({"a": record(0, 12), "b": record(4, 8)}, bytes(12)), "tensor 'b' starts at"),
    "empty inside the other": (file_bytes({"a": record(0, 8), "b": record(4, 4)}, bytes(8)), "tensor 'b' starts at"),
    "hole at the start": (file_bytes({"a": record(4, 8)}, bytes(8)), "tensor 'a' starts at byte 4 of the data,"),
    "hole in the middle": (file_bytes({"a": record(0, 4), "b": record(8, 12)}, bytes(12)), "'b' starts at byte 8 of"),
    "empty behind the end": (file_bytes({"a": record(0, 4), "b": record(8, 8)}, bytes(4)), "tensor 'b' starts at"),
    "data cut short": (file_bytes({"a": record(0, 8)}, bytes(7)), "truncated: the header describes 77 bytes,"),
    "data missing": (file_bytes({"a": record(0, 4 * HUGE)}), "truncated: the header describes"),
    "data left over": (file_bytes({"a": record(0, 4)}, bytes(5)), "bytes, the file has 74: 1 bytes are in no"),
    "payload behind no tensor": (file_bytes("{}", b"#!/bin/sh"), "the header describes 10 bytes, the file has"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_read_header__tells_every_lie_by_its_words_in_a_short_printable_line(lie: str) -> None:
    content, words = LIES[lie]
    error = refused(content)
    assert (error.code, words in str(error)) == ("checkpoint.damaged", True)
    assert (str(error).isprintable(), len(str(error)) < 600) == (True, True)


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_read_header__dtypes_below_a_byte_are_unsupported(dtype: str) -> None:
    with refuses(UnsupportedError, "checkpoint.unsupported", dtype):
        parse(one(record(0, 4, dtype=dtype, shape=[8])))


def test_read_header__a_length_over_the_cap_reads_only_the_first_part() -> None:
    store = InMemoryStore({PATH: LIES["length over the cap"][0]})
    with pytest.raises(CorruptError):
        read_header(store, PATH)
    assert [read.nbytes for read in store.reads] == [FIRST_READ_BYTES]


def test_read_header__a_length_beyond_the_file_asks_for_no_more() -> None:
    store = InMemoryStore({PATH: MAX_HEADER_BYTES.to_bytes(8, "little") + b"{}"})
    with pytest.raises(CorruptError):
        read_header(store, PATH)
    assert [read.nbytes for read in store.reads] == [FIRST_READ_BYTES]


def test_parse_object__accepts_nesting_up_to_the_limit() -> None:
    inner = MAX_DEPTH - 1
    text = '{"a":' + "[" * inner + "]" * inner + "}"
    assert list(parse_object(text.encode(), where="x", code="c.not_json")) == ["a"]
    with refuses(CorruptError, "c.not_json"):
        parse_object(f'{{"a":{"[" * MAX_DEPTH}{"]" * MAX_DEPTH}}}'.encode(), where="x", code="c.not_json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**65) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def has_no_infinity(value: object) -> bool:
    return not re.search(r"NaN|Infinity", json.dumps(value))


@settings(deadline=None)
@given(JSON.filter(has_no_infinity), st.booleans())
def test_parse_object__agrees_with_plain_json_on_sound_documents(value: object, ascii_only: bool) -> None:
    raw = json.dumps({"a": value}, ensure_ascii=ascii_only).encode()
    assert parse_object(raw, where="x", code="c") == json.loads(raw)


def check_accepted_or_typed_refusal(content: bytes) -> None:
    """Law: only a typed error leaves the parser, and what it accepts the safetensors library accepts alike."""
    try:
        header = parse(content)
    except MergePipeError:
        return
    theirs = dict(LIBRARY_READ(content))
    assert {e.name: list(e.shape) for e in header.entries} == {name: t["shape"] for name, t in theirs.items()}
    for entry in header.entries:
        assert content[entry.offset : entry.offset + entry.nbytes] == theirs[entry.name]["data"]


@settings(deadline=None)
@given(st.integers(0, len(honest_file("a", "b")) - 1))
def test_read_header__refuses_every_truncation(length: int) -> None:
    with pytest.raises(CorruptError):
        parse(honest_file("a", "b")[:length])


MORE = settings(deadline=None, max_examples=5 * settings.default.max_examples)  # type: ignore[union-attr] # small cases


@MORE
@given(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]), JSON)
def test_read_header__survives_any_json_in_an_entry(key: str, value: object) -> None:
    check_accepted_or_typed_refusal(one_with(key, value))


SIZES = st.integers(0, 3)
ENTRIES = st.fixed_dictionaries({
    "dtype": st.sampled_from(["F32", "F16", "U8", "F8_E4M3"]),
    "shape": st.lists(SIZES, max_size=2),
    "data_offsets": st.tuples(st.integers(0, 24), st.integers(0, 24)),
})  # fmt: skip


@st.composite
def tilings(draw: st.DrawFn) -> tuple[dict[str, object], int]:
    """Headers that tile their data, mostly; sometimes one pair of offsets is replaced."""
    header: dict[str, object] = {}
    end = 0
    for name in draw(st.permutations("abcd")):
        size = draw(SIZES)
        header[name] = {"dtype": "F32", "shape": [size], "data_offsets": [end, end + 4 * size]}
        end += 4 * size
    if draw(st.booleans()):
        header[draw(st.sampled_from("abcd"))] = draw(ENTRIES)
    return header, end


@MORE
@given(tilings())
def test_read_header__near_sound_tilings_agree_with_the_library(tiling: tuple[dict[str, object], int]) -> None:
    header, n_bytes = tiling
    check_accepted_or_typed_refusal(file_bytes(header, bytes(i % 256 for i in range(n_bytes))))


@MORE
@given(tilings())
def test_read_header__refuses_tilings_the_library_refuses(tiling: tuple[dict[str, object], int]) -> None:
    header, n_bytes = tiling
    content = file_bytes(header, bytes(n_bytes))
    try:
        LIBRARY_READ(content)
    except safetensors.SafetensorError:
        refused(content)
    else:
        parse(content)  # well-formed entries: what the library reads, we read
