"""Files of statistics: what is written is read again, and a file that lies in any way is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalog_cases import make_statistics, same_bits
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.catalog.statistics_file import (
    MAGIC,
    PortableContent,
    PortableFile,
    StatisticsFile,
    parse_statistics,
    statistics_path,
    write_statistics,
)
from mergepipe.checkpoints.contract import CheckpointKind
from mergepipe.errors import CorruptError, UnsupportedError
from support.fuzz_seals import seal_statistics_file
from support.refusals import refuses

DENSITIES = (0.1, 1 / 3)
hexes = st.text("0123456789abcdef", min_size=64, max_size=64)
files = st.builds(PortableFile, hexes, st.integers(0, 1 << 60), hexes.map(lambda h: h[:32]), st.booleans())
contents = st.builds(
    PortableContent.of,
    st.sampled_from(CheckpointKind),
    st.lists(files, min_size=1, max_size=3).map(tuple),
    hexes.map(lambda h: h[:32]),
)


def content(number: int) -> PortableContent:
    return PortableContent.of(
        CheckpointKind.FULL, (PortableFile(f"{number:064x}", 1000, f"{number:032x}", False),), "c" * 32
    )


def file_of(*names: str, densities: tuple[float, ...] = DENSITIES) -> StatisticsFile:
    """A base, an expert, and statistics for each name."""
    tensors = {name: make_statistics(i, 1000 + i, densities=densities, is_tied=True) for i, name in enumerate(names)}
    return StatisticsFile(content(2), content(1), 256, DENSITIES, tensors)


@given(contents, contents, st.dictionaries(st.text(), st.integers(0, 600), max_size=4))
def test_parse_statistics__is_the_inverse_of_to_bytes(
    expert: PortableContent, base: PortableContent, sizes: dict[str, int]
) -> None:
    tensors = {name: make_statistics(n, n, densities=DENSITIES) for name, n in sizes.items()}
    file = StatisticsFile(expert, base, 256, DENSITIES, tensors)
    parsed = parse_statistics(file.to_bytes(), "x")
    assert (parsed.expert, parsed.base, parsed.block_elements, parsed.densities) == (expert, base, 256, DENSITIES)
    assert parsed.tensors.keys() == tensors.keys()
    assert all(same_bits(parsed.tensors[name], tensors[name]) for name in tensors)
    assert parsed.to_bytes() == file.to_bytes()


def test_to_bytes__does_not_depend_on_the_order_of_tensors() -> None:
    file = file_of("a", "b")
    assert replace(file, tensors=dict(sorted(file.tensors.items(), reverse=True))).to_bytes() == file.to_bytes()


def test_covers__asks_for_the_grid_the_tensors_and_the_densities() -> None:
    file = file_of("a", "b")
    assert file.covers(["a", "b"], 256, [0.1])
    assert not file.covers(["a", "c"], 256, [0.1])
    assert not file.covers(["a"], 512, [0.1])
    assert not file.covers(["a"], 256, [0.1, 0.2])


# --- ways to lie ---

Change = Callable[[dict[str, Any]], None]
LIES: dict[str, tuple[Change, str]] = {
    "another format": (lambda d: d.update(format="mergepipe-plan/1"), "its format is 'mergepipe-plan/1'"),
    "a content of no files": (lambda d: d["base"].update(files=[]), "base: its digest is not that of the files"),
    "a digest of other files": (lambda d: d["base"].update(digest="0" * 32), "base: its digest is not that of the"),
    "other files of a digest": (lambda d: d["base"]["files"][0].update(sha256="0" * 64), "base: its digest is not"),
    "a SHA-256 that is none": (lambda d: d["base"]["files"][0].update(sha256="x" * 64), "files.0.: the digest"),
    "a content id that is none": (lambda d: d["expert"].update(content_id="c"), "expert: its content id is not 32"),
    "a tensor twice": (lambda d: d.update(tensors=["a", "a"]), "tensors are not one name, one size and one"),
    "a tensor without a size": (lambda d: d["tensors"].append("c"), "tensors are not one name, one size and one"),
    "a size beyond the end": (lambda d: d["elements"].__setitem__(1, 1 << 60), "bytes of arrays, the file has"),
    "cuts beyond the end": (lambda d: d["cuts"].__setitem__(1, 1 << 60), "bytes of arrays, the file has"),
    "bytes behind the arrays": (lambda d: d["elements"].__setitem__(1, 0), "bytes of arrays, the file has"),
    "cuts that no tensor has": (lambda d: d["densities"].append(0.5), "tensor 'a' has densities that are no"),
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
    change, words = LIES[name]
    with refuses(CorruptError, "format.damaged", words):
        parse_statistics(with_header(file_of("a", "b").to_bytes(), change), "x")


def test_parse_statistics__refuses_a_newer_version() -> None:
    raw = with_header(file_of("a").to_bytes(), lambda d: d.update(format="mergepipe-statistics/5"))
    with pytest.raises(UnsupportedError, match="this version reads 'mergepipe-statistics/4' only"):
        parse_statistics(raw, "x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda raw: raw[:47], "is not a file of statistics"),
        (lambda raw: b"X" + raw[1:], "is not a file of statistics"),
        (lambda raw: raw[:-1], "is damaged: its checksum does not fit"),
        (lambda raw: raw + b"x", "is damaged: its checksum does not fit"),
        (lambda raw: raw[:100] + bytes([raw[100] ^ 1]) + raw[101:], "is damaged: its checksum does not fit"),
        (lambda raw: seal_statistics_file(raw[:8] + b"\xff" * 8 + raw[16:-32]), "its header ends at byte"),
        (lambda raw: seal_statistics_file(raw[:16] + b"\xff" + raw[17:-32]), "JSON must be UTF-8"),
    ],
)
def test_parse_statistics__refuses_damage(change: Callable[[bytes], bytes], words: str) -> None:
    with refuses(CorruptError, "format.damaged", words):
        parse_statistics(change(file_of("a").to_bytes()), "x")


@pytest.mark.parametrize("densities", [(0.2, 0.1), (0.1, 0.1), (0.0, 0.1), (0.1, 1.5), (0.1, float("nan"))])
def test_parse_statistics__refuses_densities_that_no_analysis_writes(densities: tuple[float, ...]) -> None:
    file = file_of("a")
    wrong = {name: replace(one, densities_D=np.array(densities)) for name, one in file.tensors.items()}
    with refuses(CorruptError, "format.damaged"):
        parse_statistics(replace(file, densities=(), tensors=wrong).to_bytes(), "x")


def test_write_statistics__by_many_at_once_leaves_one_whole_file(tmp_path: Path) -> None:
    file = file_of("a", "b")
    with ThreadPoolExecutor(8) as pool:
        places = set(pool.map(lambda _: write_statistics(tmp_path / "home", file), range(32)))
    assert places == {statistics_path(tmp_path / "home", file.expert.digest, file.base.digest)}
    (path,) = (tmp_path / "home" / "statistics").iterdir()
    assert path.read_bytes() == file.to_bytes()
