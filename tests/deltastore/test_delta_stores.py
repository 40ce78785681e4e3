"""Stores on disk: packed, opened, fetched, unpacked; and every way in which one can be wrong."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing_cases import content_of, halves, relabel

from mergepipe import pack, unpack, verify
from mergepipe.checkpoints.contract import BaseBytes, Checkpoint, ComputedTensor, LeveledTensor
from mergepipe.checkpoints.open_files import open_files
from mergepipe.core.blocks import BF16, F32, Span
from mergepipe.deltastore.checkpoint import open_store, read_header
from mergepipe.deltastore.index import HEADERS_NAME, OWN_NAMES, PIECE_NAMES, ROW, ROW_BYTES, index_digest
from mergepipe.deltastore.pieces import Codec, Level, Piece
from mergepipe.deltastore.tensor import PackedTensor
from mergepipe.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.bucket_outputs import files_below
from support.disk_families import make_models, write_single
from support.local_models import open_local
from support.public_names import BLOCK_ELEMENTS, HEADER_NAME, INDEX_NAME
from support.refusals import refuses

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "delta-store-7"
BIG = "big.weight"
EXTRA = "only.in.the.expert"
N_BIG = BLOCK_ELEMENTS * 2 + 5000


@dataclass(frozen=True, slots=True)
class Packed:
    """A base, an expert and its store."""

    base: Path
    expert: Path
    store: Path


def bf16_file(values: np.ndarray[tuple[int], np.dtype[np.float32]], name: str = BIG) -> bytes:
    return content_of({name: halves(values)})


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Packed:
    """One tensor of several blocks, in bare files."""
    root = tmp_path_factory.mktemp("big")
    rng = np.random.default_rng(0)
    base = (rng.standard_normal(N_BIG) * 0.02).astype(np.float32)
    (root / "base.safetensors").write_bytes(bf16_file(base))
    expert = (base + rng.standard_normal(N_BIG) * 1e-4).astype(np.float32)
    (root / "expert.safetensors").write_bytes(bf16_file(expert))
    pack(root / "base.safetensors", [root / "expert.safetensors"], root / "stores", threads=2)
    return Packed(root / "base.safetensors", root / "expert.safetensors", root / "stores" / "expert")


@pytest.fixture
def odd(tmp_path: Path) -> Packed:
    """Directories with tensors of every dtype, shape and kind of value that is awkward, and other files."""
    models = make_models(1)
    others = {EXTRA: np.ones(3, np.float32), "last": models[0]["last"][:7]}  # not in the base; of another shape
    base, expert = write_single(tmp_path / "b", models[0]), write_single(tmp_path / "e", {**models[1], **others})
    (expert / "notes").mkdir()
    (expert / "notes" / "deep.txt").write_text("kept")
    (expert / "empty").write_bytes(b"")
    pack(base, [expert], tmp_path / "stores", threads=1)
    return Packed(base, expert, tmp_path / "stores" / "e")


def opened(packed: Packed, store: LocalStore | None = None) -> Checkpoint:
    store = store or LocalStore()
    return open_store(store, Location.local(packed.store), open_local(packed.base, store))


def big_tensor(packed: Packed, store: LocalStore | None = None) -> PackedTensor:
    tensor = opened(packed, store).tensors[BIG]
    assert isinstance(tensor, PackedTensor)
    return tensor


def fetched(tensor: PackedTensor, span: Span, store: LocalStore, *, base: np.ndarray | None = None) -> bytes:
    out = np.zeros(span.n_elements * tensor.dtype.itemsize, np.uint8)
    with open_files(store, {*(entry.file for entry in tensor.stored), tensor.base.file}) as files:
        fetch = tensor.opened(files)
        if base is None:
            fetch(span, out, Purpose.EXPERT)
        else:
            fetch.with_base(span, BaseBytes(base), out, Purpose.EXPERT)
    return out.tobytes()


def stored_bytes(path: Path, span: Span) -> bytes:
    return path.read_bytes()[-2 * N_BIG :][2 * span.start : 2 * span.stop]


def test_unpack__gives_the_files_back_byte_for_byte(odd: Packed, tmp_path: Path) -> None:
    unpack(odd.store, tmp_path / "back", threads=2)
    assert files_below(tmp_path / "back") == files_below(odd.expert)


def test_unpack__gives_a_bare_file_back(big: Packed, tmp_path: Path) -> None:
    unpack(big.store, tmp_path / "back")
    assert files_below(tmp_path / "back") == {"expert.safetensors": big.expert.read_bytes()}


def test_pack__refuses_files_it_needs_the_names_of(odd: Packed, tmp_path: Path) -> None:
    (odd.expert / INDEX_NAME).write_text("{}")
    with refuses(UnsupportedError, "pack.unsupported"):
        pack(odd.base, [odd.expert], tmp_path / "other")


def test_pack__refuses_links_to_directories_which_it_would_lose(odd: Packed, tmp_path: Path) -> None:
    (odd.expert / "linked").symlink_to(odd.expert / "notes")
    with refuses(UnsupportedError, "pack.unsupported", "linked: is a link to a directory"):
        pack(odd.base, [odd.expert], tmp_path / "other")


def test_open_store__has_the_experts_tensors_in_order(odd: Packed) -> None:
    expert, found = open_local(odd.expert), opened(odd)
    assert list(found.tensors) == list(expert.tensors)
    assert found.sidecars == expert.sidecars
    for name, entry in expert.tensors.items():
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (entry.dtype, entry.shape)
    for name in (EXTRA, "last"):
        kept = found.tensors[name].entry()
        assert kept is not None
        assert (kept.nbytes, kept.dtype) == (expert.tensors[name].nbytes, expert.tensors[name].dtype)


def test_packed_tensor__keeps_the_contracts(big: Packed) -> None:
    tensor: ComputedTensor = big_tensor(big)
    assert (tensor.dtype, tensor.is_delta, tensor.is_unit) == (BF16, False, False)
    assert isinstance(tensor, LeveledTensor)
    assert tensor.encoded_on.name == tensor.name
    rough = big_tensor(big).at_level(Level.HEAD)
    assert (rough.dtype, rough.is_delta) == (F32, True)
    assert rough.nbytes < tensor.nbytes


@given(start=st.integers(0, N_BIG), size=st.integers(0, N_BIG), level=st.sampled_from([Level.HEAD, Level.LOSSLESS]))
def test_packed_tensor__fetches_spans_for_no_more_than_their_cost(
    big: Packed, start: int, size: int, level: Level
) -> None:
    span = Span(start, min(start + size, N_BIG))
    store = LocalStore()
    tensor = big_tensor(big, store).at_level(level)
    found = fetched(tensor, span, store)
    if level is Level.LOSSLESS:
        assert found == stored_bytes(big.expert, span)
    else:
        whole = fetched(tensor, Span(0, N_BIG), LocalStore())
        assert found == whole[4 * span.start : 4 * span.stop]
    index_bytes = read_header(store, Location.local(big.store)).index_reader.cost_bytes
    assert store.ledger.usage()[Purpose.EXPERT] <= tensor.cost_bytes(span) + index_bytes


@given(first=st.integers(0, N_BIG // 16384), stop=st.integers(0, N_BIG // 16384 + 1))
def test_packed_fetch__with_the_bases_bytes_reads_less_and_gives_the_same(big: Packed, first: int, stop: int) -> None:
    span = Span(min(first, stop) * 16384, min(max(first, stop) * 16384, N_BIG))
    store = LocalStore()
    given_base = np.frombuffer(stored_bytes(big.base, span), np.uint8)
    found = fetched(big_tensor(big, store), span, store, base=given_base)
    assert found == stored_bytes(big.expert, span)
    if span == Span(0, N_BIG):
        assert store.ledger.usage()[Purpose.BASE] == 0


def test_packed_tensor__records_errors_and_counts(big: Packed) -> None:
    tensor = big_tensor(big)
    errors = [float(tensor.squared_errors(level).sum()) for level in Level]
    assert len(tensor.squared_errors(Level.HEAD)) == tensor.n_blocks == 3
    assert errors[Level.LOSSLESS] == 0.0
    assert errors[Level.NOTHING] > errors[Level.HEAD] > 0
    assert tensor.head_elements >= int(0.2 * N_BIG)


def test_packed_tensor__one_block_costs_its_own_pages(big: Packed) -> None:
    tensor = big_tensor(big)
    one = tensor.cost_bytes(tensor.block_span(1))
    assert one <= 0.25 * 2 * BLOCK_ELEMENTS
    assert tensor.at_level(Level.HEAD).cost_bytes(tensor.block_span(1)) < one


def test_verify_and_unpack__say_which_piece_is_damaged(big: Packed, tmp_path: Path) -> None:
    store = shutil.copytree(big.store, tmp_path / "expert")
    for piece, place, damage in ((Piece.HEAD, 0, "head piece of block 0"), (Piece.REST, -100, "rest piece of block 2")):
        path = store / PIECE_NAMES[piece]
        sound = path.read_bytes()
        content = bytearray(sound)
        content[place] ^= 1
        path.write_bytes(content)
        (found,) = verify(store, base=big.base).damages
        assert (found.tensor, f"the {damage} is damaged" in found.message) == (BIG, True)
        with pytest.raises(CorruptError, match=f"the {damage} is damaged"):
            unpack(store, tmp_path / "back", base=big.base)
        assert not (tmp_path / "back").exists()
        path.write_bytes(sound)


def test_packed_tensor__refuses_another_base_of_the_same_form(big: Packed, tmp_path: Path) -> None:
    other = tmp_path / "base.safetensors"
    content = bytearray(big.base.read_bytes())
    content[-1] ^= 1
    other.write_bytes(content)
    with refuses(MismatchError, "base.mismatch"):
        unpack(big.store, tmp_path / "back", base=other)
    assert not (tmp_path / "back").exists()


def test_open_store__refuses_a_base_without_the_tensor_or_with_another_shape(big: Packed, tmp_path: Path) -> None:
    for name, n in (("other", N_BIG), (BIG, N_BIG - 1)):
        path = tmp_path / f"{n}.safetensors"
        path.write_bytes(bf16_file(np.zeros(n, np.float32), name))
        with refuses(MismatchError, "base.mismatch") as caught:
            opened(Packed(path, big.expert, big.store))
        assert str(big.base) in str(caught.value)


@pytest.mark.parametrize("name", sorted(OWN_NAMES))
def test_open_store__or_reading_finds_a_changed_byte_and_a_missing_end(odd: Packed, tmp_path: Path, name: str) -> None:
    path = odd.store / name
    whole = path.read_bytes()
    if not whole:
        pytest.skip("nothing of this kind in the store")
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    for damaged in (bytes(flipped), whole[:-2]):
        path.write_bytes(damaged)
        with pytest.raises(CorruptError):
            unpack(odd.store, tmp_path / "back")
        assert not (tmp_path / "back").exists()
    path.unlink()
    with pytest.raises((CorruptError, NotFoundError)):
        unpack(odd.store, tmp_path / "back")


@pytest.mark.parametrize(("version", "hint"), [(6, "pack the expert again"), (8, "use a newer version")])
def test_open_store__refuses_another_version(odd: Packed, version: int, hint: str) -> None:
    relabel(odd.store, lambda document: document.update(format=f"mergepipe-delta-store/{version}"))
    with refuses(UnsupportedError, "format.version", f"its format is 'mergepipe-delta-store/{version}'.*{hint}"):
        opened(odd)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "something"},
        {"block_elements": 1},
        {"tensors": []},
        {"tensors": [{"name": "x", "dtype": "BF16", "shape": [1 << 40], "file": 0, "first_row": 0, "base_dtype": "BF16",
                      "is_plain": False}]},
        {"files": [{"name": "../up", "size_bytes": 8, "version": "", "header_bytes": 8, "header_blake3": ""}]},
        {"kept": [{"name": "/etc/passwd", "size_bytes": 8, "blake3": ""}]},
        {"kept": [{"name": INDEX_NAME, "size_bytes": 8, "blake3": ""}]},
        {"index_blake3": "00"},
        {"is_bare_file": 1},
    ],
)  # fmt: skip
def test_open_store__refuses_headers_that_lie(odd: Packed, changes: dict[str, object]) -> None:
    relabel(odd.store, lambda document: document.update(**changes))
    with pytest.raises(CorruptError):
        _ = opened(odd).tensors[EXTRA].stored  # what the index says is read when it is needed


def test_open_store__refuses_blocks_of_more_bytes_than_they_have_elements_for(odd: Packed) -> None:
    """What is read of a block goes into memory: it is refused before."""
    path = odd.store / INDEX_NAME
    rows = np.frombuffer(path.read_bytes(), ROW).copy()
    rows["lengths"][0, Piece.HEAD] = 1 << 31
    path.write_bytes(rows.tobytes())
    os.truncate(odd.store / PIECE_NAMES[Piece.HEAD], int(rows["lengths"][:, Piece.HEAD].sum(dtype=np.int64)))
    relabel(odd.store, lambda document: document.update(index_blake3=index_digest(rows.tobytes())))
    checkpoint = opened(odd)
    with pytest.raises(CorruptError, match="bytes are stored for a block of"):
        _ = checkpoint.tensors[EXTRA].stored


def test_format__the_golden_store_is_read_as_ever(tmp_path: Path) -> None:
    unpack(GOLDEN / "store", tmp_path / "back", base=GOLDEN / "base.safetensors")
    assert files_below(tmp_path / "back") == {"expert.safetensors": (GOLDEN / "expert.safetensors").read_bytes()}


def test_format__the_golden_expert_has_blocks_of_every_codec() -> None:
    rows = np.frombuffer((GOLDEN / "store" / INDEX_NAME).read_bytes(), ROW)
    assert set(rows["codec"].tolist()) == {int(codec) for codec in Codec}


@pytest.mark.skipif(zstd.zstd_version_info != (1, 5, 7), reason="planes are as that version compresses them")
def test_format__golden_store_is_written_as_ever(tmp_path: Path) -> None:
    golden = GOLDEN / "store"
    pack(GOLDEN / "base.safetensors", [GOLDEN / "expert.safetensors"], tmp_path)
    for name in sorted(OWN_NAMES - {HEADER_NAME}):  # the header holds paths and times
        assert (tmp_path / "expert" / name).read_bytes() == (golden / name).read_bytes(), name
    headers = [json.loads((place / HEADER_NAME).read_text()) for place in (tmp_path / "expert", golden)]
    for header in headers:
        for key in ("base", "expert", "base_files", "digest"):
            del header[key]
        for file in header["files"]:
            del file["version"]
    assert headers[0] == headers[1]


def test_format__an_index_row_has_the_documented_size() -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "internals" / "formats" / "delta-store.md"
    text = document.read_text(encoding="utf-8")
    assert f"{ROW_BYTES} bytes a block" in text
    for name in OWN_NAMES:
        assert f"`{name}`" in text
    assert HEADERS_NAME in text
