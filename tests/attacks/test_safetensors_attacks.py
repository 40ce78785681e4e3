"""Every way a safetensors file can lie, and what it is told."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from mergepipe.checkpoints.safetensors import FIRST_READ_BYTES, MAX_HEADER_BYTES, SafetensorsHeader, read_header
from mergepipe.core.strict_json import MAX_DEPTH, parse_object
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.storage.location import Location
from support.safetensors_bytes import file_bytes, honest_file, record
from support.stores import InMemoryStore

PATH = Location.parse("model.safetensors")
LIBRARY_READ: Callable[[bytes], list[tuple[str, dict[str, object]]]] = safetensors.deserialize


def parse(content: bytes) -> SafetensorsHeader:
    return read_header(InMemoryStore({PATH: content}), PATH)


def refusal(content: bytes) -> MergePipeError:
    with pytest.raises(CorruptError) as caught:
        parse(content)
    assert caught.value.problems[0].where == str(PATH)
    return caught.value


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
    "empty file": (b"", "too_short"),
    "shorter than the prefix": (b"\0" * 7, "too_short"),
    "length over the cap": ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "too_long"),
    "length of all ones": (b"\xff" * 8 + b"{}", "too_long"),
    "zip archive": (b"PK\x03\x04" + bytes(60), "too_long"),
    "git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:", "too_long"),
    "pickle": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + bytes(60), "too_long"),
    "length beyond the file": ((3).to_bytes(8, "little") + b"{}", "truncated"),
    "no header": (file_bytes(b""), "start"),
    "leading space": (file_bytes(" {}"), "start"),
    "byte order mark": (file_bytes("\ufeff{}"), "start"),
    "header is a list": (file_bytes("[]"), "start"),
    "not UTF-8": (file_bytes(b'{"\xff":1}'), "not_json"),
    "surrogate as UTF-8": (file_bytes(b'{"\xed\xa0\x80":1}'), "not_json"),
    "UTF-16": (file_bytes("{}".encode("utf-16-le")), "not_json"),
    "unfinished JSON": (file_bytes('{"w":'), "not_json"),
    "trailing JSON": (file_bytes("{}{}"), "not_json"),
    "trailing NUL": (file_bytes(b"{}\0"), "not_json"),
    "trailing comma": (file_bytes('{"__metadata__":{},}'), "not_json"),
    "comment": (file_bytes("{/* */}"), "not_json"),
    "single quotes": (file_bytes("{'a':1}"), "not_json"),
    "raw control character": (file_bytes('{"a\nb":1}'), "not_json"),
    "deep lists": (file_bytes('{"w":' + "[" * DEEP + "]" * DEEP + "}"), "not_json"),
    "deep objects": (file_bytes('{"w":' * DEEP + "1" + "}" * DEEP), "not_json"),
    "deep and unfinished": (file_bytes("{" + '"w":[' * DEEP), "not_json"),
    "deep behind a quoted bracket": (file_bytes('{"\\"]]]":' + "[" * DEEP + "]" * DEEP + "}"), "not_json"),
    "NaN": (text_of("[NaN]"), "not_json"),
    "Infinity": (text_of("[Infinity]"), "not_json"),
    "minus Infinity": (text_of("[-Infinity]"), "not_json"),
    "number out of range": (text_of("[1e999]"), "not_json"),
    "integer of many digits": (text_of("[" + "9" * 5000 + "]"), "not_json"),
    "tensor twice": (file_bytes(f'{{"w":{EMPTY},"w":2}}'), "not_json"),
    "tensor twice by escape": (file_bytes(f'{{"w":{EMPTY},"\\u0077":2}}'), "not_json"),
    "metadata twice": (file_bytes('{"__metadata__":{},"__metadata__":{}}'), "not_json"),
    "dtype twice": (file_bytes('{"w":{"dtype":"F32","dtype":"F16"}}'), "not_json"),
    "lone surrogate": (file_bytes('{"\\ud800":1}'), "not_json"),
    "surrogates swapped": (file_bytes('{"__metadata__":{"a":"\\ude00\\ud83d"}}'), "not_json"),
    "metadata null": (file_bytes('{"__metadata__":null}'), "metadata"),
    "metadata list": (file_bytes('{"__metadata__":[]}'), "metadata"),
    "metadata number": (file_bytes('{"__metadata__":{"a":1}}'), "metadata"),
    "metadata nested": (file_bytes('{"__metadata__":{"a":{}}}'), "metadata"),
    "metadata as a tensor": (file_bytes({"__metadata__": record(0, 4)}, bytes(4)), "metadata"),
    "empty name": (file_bytes({"": record(0, 4)}, bytes(4)), "tensor_name"),
    "NUL in name": (file_bytes({"a\0b": record(0, 4)}, bytes(4)), "tensor_name"),
    "escape sequence in name": (file_bytes({"\x1b[2J": record(0, 4)}, bytes(4)), "tensor_name"),
    "C1 control in name": (file_bytes({"a\x9b": record(0, 4)}, bytes(4)), "tensor_name"),
    "entry null": (one(None), "entry"),
    "entry list": (one(["F32", [1], [0, 4]]), "entry"),
    "entry without dtype": (one({"shape": [1], "data_offsets": [0, 4]}), "missing_key"),
    "entry without shape": (one({"dtype": "F32", "data_offsets": [0, 4]}), "missing_key"),
    "entry without offsets": (one({"dtype": "F32", "shape": [1]}), "missing_key"),
    "entry with more": (one_with("strides", [1]), "unknown_key"),
    "unknown dtype": (one_with("dtype", "FP32"), "dtype"),
    "dtype in lower case": (one_with("dtype", "f32"), "dtype"),
    "dtype number": (one_with("dtype", 32), "dtype"),
    "dtype list": (one_with("dtype", ["F32"]), "dtype"),
    "long dtype": (one_with("dtype", "F" * 1_000_000), "not_json"),
    "shape null": (one_with("shape", None), "shape"),
    "shape number": (one_with("shape", 1), "shape"),
    "shape string": (one_with("shape", "1"), "shape"),
    "shape bool": (one_with("shape", [True]), "shape"),
    "shape float": (one_with("shape", [1.0]), "shape"),
    "shape negative": (one_with("shape", [-1]), "shape"),
    "shape negative twice": (one_with("shape", [-1, -1]), "shape"),
    "shape minus zero": (text_of("[-0]", "[0,0]"), "shape"),
    "shape nested": (one_with("shape", [[1]]), "shape"),
    "shape over 63 bits": (one_with("shape", [2**63]), "shape_overflow"),
    "shape wraps to the size": (one_with("shape", [2**32, 2**32]), "shape_overflow"),
    "shape wraps with the item size": (one_with("shape", [2**62 + 1]), "shape_overflow"),
    "shape overflows before a zero": (one_with("shape", [2**40, 2**40, 0]), "shape_overflow"),
    "shape overflows after a zero": (one_with("shape", [0, 2**63]), "shape_overflow"),
    "offsets null": (one_with("data_offsets", None), "data_offsets"),
    "offsets of one": (one_with("data_offsets", [4]), "data_offsets"),
    "offsets of three": (one_with("data_offsets", [0, 4, 4]), "data_offsets"),
    "offsets object": (one_with("data_offsets", {"0": 0}), "data_offsets"),
    "offsets bool": (one_with("data_offsets", [False, 4]), "data_offsets"),
    "offsets float": (one_with("data_offsets", [0, 4.0]), "data_offsets"),
    "offsets negative": (one_with("data_offsets", [-4, 0]), "data_offsets"),
    "offsets reversed": (one_with("data_offsets", [4, 0]), "data_offsets"),
    "offsets wider than the shape": (one({**record(0, 8), "shape": [1]}, bytes(8)), "data_size"),
    "offsets narrower than the shape": (one({**record(0, 4), "shape": [2]}), "data_size"),
    "scalar of nothing": (one(record(0, 0, shape=[]), b""), "data_size"),
    "same bytes twice": (file_bytes({"a": record(0, 4), "b": record(0, 4)}, bytes(4)), "overlap"),
    "partial overlap": (file_bytes({"a": record(0, 8), "b": record(4, 12)}, bytes(12)), "overlap"),
    "one inside the other": (file_bytes({"a": record(0, 12), "b": record(4, 8)}, bytes(12)), "overlap"),
    "empty inside the other": (file_bytes({"a": record(0, 8), "b": record(4, 4)}, bytes(8)), "overlap"),
    "hole at the start": (file_bytes({"a": record(4, 8)}, bytes(8)), "hole"),
    "hole in the middle": (file_bytes({"a": record(0, 4), "b": record(8, 12)}, bytes(12)), "hole"),
    "empty behind the end": (file_bytes({"a": record(0, 4), "b": record(8, 8)}, bytes(4)), "hole"),
    "data cut short": (file_bytes({"a": record(0, 8)}, bytes(7)), "data_truncated"),
    "data missing": (file_bytes({"a": record(0, 4 * HUGE)}), "data_truncated"),
    "data left over": (file_bytes({"a": record(0, 4)}, bytes(5)), "data_trailing"),
    "payload behind no tensor": (file_bytes("{}", b"#!/bin/sh"), "data_trailing"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_read_header__refuses_every_lie_by_its_code(lie: str) -> None:
    content, code = LIES[lie]
    assert refusal(content).code == f"checkpoint.header.{code}"


@pytest.mark.parametrize("lie", LIES)
def test_read_header__a_refusal_is_a_short_printable_line(lie: str) -> None:
    message = str(refusal(LIES[lie][0]))
    assert message.isprintable()
    assert len(message) < 600


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_read_header__dtypes_below_a_byte_are_unsupported(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match=dtype) as caught:
        parse(one(record(0, 4, dtype=dtype, shape=[8])))
    assert caught.value.code == "checkpoint.header.dtype_unsupported"


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("unknown dtype", ["'w'", "'FP32'", "did you mean 'F32'?"]),
        ("partial overlap", ["'a'", "'b'", "byte 4", "ends at 8"]),
        ("hole in the middle", ["'a'", "'b'", "byte 8", "ends at 4"]),
        ("offsets narrower than the shape", ["'w'", "8 bytes", "give 4"]),
        ("length beyond the file", ["truncated", "11 bytes", "has 10"]),
        ("data cut short", ["truncated", "the file has"]),
        ("data left over", ["1 bytes are in no tensor"]),
        ("git LFS pointer", ["git LFS pointer"]),
        ("zip archive", ["PyTorch file"]),
        ("escape sequence in name", [r"\x1b[2J"]),
    ],
)
def test_read_header__says_what_was_found_and_needed(lie: str, words: list[str]) -> None:
    message = str(refusal(LIES[lie][0]))
    assert [word for word in words if word not in message] == []


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
    with pytest.raises(CorruptError) as caught:
        parse_object(f'{{"a":{"[" * MAX_DEPTH}{"]" * MAX_DEPTH}}}'.encode(), where="x", code="c.not_json")
    assert caught.value.code == "c.not_json"


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


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_read_header__survives_byte_flips(draws: st.DataObject) -> None:
    content = bytearray(file_bytes({"__metadata__": {"a": "b"}, "a": record(0, 8), "b": record(8, 8)}, bytes(8)))
    for position in draws.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[position] = draws.draw(st.integers(0, 255))
    check_accepted_or_typed_refusal(bytes(content))


@settings(deadline=None)
@given(st.integers(0, len(honest_file("a", "b")) - 1))
def test_read_header__refuses_every_truncation(length: int) -> None:
    with pytest.raises(CorruptError):
        parse(honest_file("a", "b")[:length])


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(["dtype", "shape", "data_offsets", "extra"]), JSON)
def test_read_header__survives_any_json_in_an_entry(key: str, value: object) -> None:
    check_accepted_or_typed_refusal(one_with(key, value))


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), JSON, max_size=4), st.binary(max_size=8))
def test_read_header__survives_any_json_object(header: dict[str, object], tensor_bytes: bytes) -> None:
    check_accepted_or_typed_refusal(file_bytes(header, tensor_bytes))


@settings(deadline=None)
@given(st.text(max_size=60), st.binary(max_size=8))
def test_read_header__survives_any_text(text: str, tensor_bytes: bytes) -> None:
    raw = ("{" + text).encode("utf-8", "replace")
    check_accepted_or_typed_refusal(file_bytes(raw, tensor_bytes))


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


@settings(deadline=None, max_examples=300)
@given(tilings())
def test_read_header__near_sound_tilings_agree_with_the_library(tiling: tuple[dict[str, object], int]) -> None:
    header, n_bytes = tiling
    check_accepted_or_typed_refusal(file_bytes(header, bytes(i % 256 for i in range(n_bytes))))


@settings(deadline=None, max_examples=300)
@given(tilings())
def test_read_header__refuses_tilings_the_library_refuses(tiling: tuple[dict[str, object], int]) -> None:
    header, n_bytes = tiling
    content = file_bytes(header, bytes(n_bytes))
    try:
        LIBRARY_READ(content)
    except safetensors.SafetensorError:
        refusal(content)
    else:
        parse(content)  # well-formed entries: what the library reads, we read
