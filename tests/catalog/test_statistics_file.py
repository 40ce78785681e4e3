"""Files of statistics: what is written is read again, and a file that lies in any way is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalog_cases import make_statistics
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.catalog.statistics_bytes import pack
from mergepipe.catalog.statistics_file import (
    MAGIC,
    PortableContent,
    PortableFile,
    PortablePair,
    PortableRow,
    StatisticsFile,
    pack_row,
    parse_statistics,
    row_subject,
    write_statistics,
)
from mergepipe.checkpoints.contract import CheckpointKind
from mergepipe.errors import CorruptError, MergePipeError, OutputError, UnsupportedError
from support.fuzz_seals import seal_statistics_file

hexes = st.text("0123456789abcdef", min_size=64, max_size=64)
files = st.builds(PortableFile, hexes, st.integers(0, 1 << 60), hexes.map(lambda h: h[:32]), st.booleans())
some_contents = st.builds(
    PortableContent,
    st.sampled_from(CheckpointKind),
    st.lists(files, min_size=1, max_size=3).map(tuple),
    st.none() | hexes.map(lambda h: h[:32]),
)


def content(number: int, content_id: str | None = None) -> PortableContent:
    return PortableContent(
        CheckpointKind.FULL, (PortableFile(f"{number:064x}", 1000, f"{number:032x}", False),), content_id
    )


def file_of(*names: str) -> StatisticsFile:
    """A base, an expert, and a row for each name."""
    base, expert = content(1), content(2, "c" * 32)
    rows = tuple(pack_row(n, make_statistics(i), expert.digest, base.digest) for i, n in enumerate(names))
    return StatisticsFile((base, expert), (PortablePair(expert.digest, base.digest, rows),))


@given(
    st.lists(some_contents, min_size=1, max_size=3, unique_by=lambda each: each.digest).map(tuple),
    st.dictionaries(st.text(), st.binary(max_size=50), max_size=4),
)
def test_parse_statistics__is_the_inverse_of_to_bytes(
    contents: tuple[PortableContent, ...], rows: dict[str, bytes]
) -> None:
    packed = tuple(PortableRow(name, raw) for name, raw in rows.items())
    file = StatisticsFile(contents, (PortablePair(contents[-1].digest, contents[0].digest, packed),))
    assert parse_statistics(file.to_bytes(), "x") == file


def test_pair__unpacks_the_statistics_that_were_packed() -> None:
    file = parse_statistics(file_of("a", "b").to_bytes(), "x")
    statistics = file.pairs[0].statistics("x")
    assert list(statistics) == ["a", "b"]
    for number, one in enumerate(statistics.values()):
        assert pack(one, "") == pack(make_statistics(number), "")


# --- ways to lie ---

Change = Callable[[dict[str, Any]], None]
LIES: dict[str, tuple[Change, str]] = {
    "another format": (lambda d: d.update(format="mergepipe-plan/1"), "stats.value"),
    "an unknown key": (lambda d: d.update(extra=1), "stats.key"),
    "no pairs": (lambda d: d.pop("pairs"), "stats.key"),
    "a content twice": (lambda d: d["contents"].append(d["contents"][0]), "stats.value"),
    "a content of no files": (lambda d: d["contents"][0].update(files=[]), "stats.value"),
    "a digest of other files": (lambda d: d["contents"][0].update(digest="0" * 32), "stats.value"),
    "other files of a digest": (lambda d: d["contents"][0]["files"][0].update(sha256="0" * 64), "stats.value"),
    "a SHA-256 that is none": (lambda d: d["contents"][0]["files"][0].update(sha256="x" * 64), "stats.value"),
    "a kind that is none": (lambda d: d["contents"][0].update(kind="none"), "stats.value"),
    "a content id that is none": (lambda d: d["contents"][0].update(content_id="c"), "stats.value"),
    "a pair twice": (lambda d: d["pairs"].append({**d["pairs"][0], "tensors": [], "sizes": []}), "stats.value"),
    "a pair of nobody": (lambda d: d["pairs"][0].update(expert=2), "stats.value"),
    "a tensor twice": (lambda d: d["pairs"][0].update(tensors=["a", "a"]), "stats.value"),
    "a tensor without a size": (lambda d: d["pairs"][0]["tensors"].append("c"), "stats.value"),
    "a name that is none": (lambda d: d["pairs"][0].update(tensors=["a", 1]), "stats.value"),
    "a negative size": (lambda d: d["pairs"][0]["sizes"].__setitem__(0, -1), "stats.value"),
    "a size beyond the end": (lambda d: d["pairs"][0]["sizes"].__setitem__(1, 1 << 60), "stats.value"),
    "bytes behind the rows": (lambda d: d["pairs"][0]["sizes"].__setitem__(1, 0), "stats.value"),
}


def with_header(raw: bytes, change: Change) -> bytes:
    """The file with its header changed, sealed again."""
    stop = 16 + int.from_bytes(raw[8:16], "little")
    document = json.loads(raw[16:stop])
    change(document)
    header = json.dumps(document).encode()
    return seal_statistics_file(MAGIC + len(header).to_bytes(8, "little") + header + raw[stop:-32])


@pytest.mark.parametrize("name", LIES)
def test_parse_statistics__refuses_a_header_that_lies(name: str) -> None:
    change, code = LIES[name]
    with pytest.raises(CorruptError) as caught:
        parse_statistics(with_header(file_of("a", "b").to_bytes(), change), "x")
    assert caught.value.code == code


def test_parse_statistics__refuses_a_newer_version() -> None:
    raw = with_header(file_of("a").to_bytes(), lambda d: d.update(format="mergepipe-statistics/4"))
    with pytest.raises(UnsupportedError, match="version 4, 3 is known"):
        parse_statistics(raw, "x")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda raw: raw[:47], "stats.magic"),
        (lambda raw: b"X" + raw[1:], "stats.magic"),
        (lambda raw: raw[:-1], "stats.checksum"),
        (lambda raw: raw + b"x", "stats.checksum"),
        (lambda raw: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:], "stats.checksum"),
        (lambda raw: seal_statistics_file(raw[:8] + b"\xff" * 8 + raw[16:-32]), "stats.length"),
        (lambda raw: seal_statistics_file(raw[:16] + b"\xff" + raw[17:-32]), "stats.json"),
    ],
)
def test_parse_statistics__refuses_damage(change: Callable[[bytes], bytes], code: str) -> None:
    with pytest.raises(CorruptError) as caught:
        parse_statistics(change(file_of("a").to_bytes()), "x")
    assert caught.value.code == code


def test_pair__refuses_rows_that_were_packed_for_others() -> None:
    file = file_of("a", "b")
    (pair,) = file.pairs
    a, b = pair.rows
    swapped = replace(pair, rows=(replace(a, tensor=b.tensor), replace(b, tensor=a.tensor)))
    for wrong in (swapped, replace(pair, base=content(3).digest), replace(pair, expert=content(3).digest)):
        with pytest.raises(CorruptError) as caught:
            wrong.statistics("x")
        assert caught.value.code == "stats.row"


@pytest.mark.parametrize("densities", [(0.2, 0.1), (0.1, 0.1), (0.0, 0.1), (0.1, 1.5), (0.1, float("nan"))])
def test_pair__refuses_densities_that_no_analysis_writes(densities: tuple[float, ...]) -> None:
    statistics = make_statistics(1, densities=(0.1, 0.2))
    packed = pack(replace(statistics, densities_D=np.array(densities)), row_subject("a", "e", "b"))
    with pytest.raises(CorruptError) as caught:
        PortablePair("e", "b", (PortableRow("a", packed),)).statistics("x")
    assert caught.value.code == "stats.row"


# --- files of this machine ---


def test_write_statistics__replaces_its_own_files_alone(tmp_path: Path) -> None:
    path = tmp_path / "mergepipe.stats"
    write_statistics(file_of("a"), path)
    assert write_statistics(file_of("a", "b"), path) == path.stat().st_size
    assert parse_statistics(path.read_bytes(), path) == file_of("a", "b")
    path.write_bytes(b"thesis")
    (tmp_path / "link").symlink_to(path)
    for place, code in ((path, "stats.not-ours"), (tmp_path, "stats.not-ours"), (tmp_path / "link", "output.link")):
        with pytest.raises(OutputError) as caught:
            write_statistics(file_of("a"), place)
        assert caught.value.code == code
    assert path.read_bytes() == b"thesis"


@given(st.binary(max_size=300))
def test_parse_statistics__any_bytes_end_in_a_value_or_a_typed_error(raw: bytes) -> None:
    header = len(raw).to_bytes(8, "little") + raw
    with pytest.raises(MergePipeError):
        parse_statistics(seal_statistics_file(MAGIC + header), "x")
