"""Compiled kernels are renewed when any kernel's source changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mergepipe.deltastore.codec.entropy import rans
from mergepipe.kernels import reduce, summary
from mergepipe.kernels.compilation.compiled import room_of, sources_digest

DELTASTORE = Path(rans.__file__).parents[2]


def test_kernel__is_cached_under_the_sources_of_all_kernels() -> None:
    kernels: tuple[Any, ...] = (summary.sum_products, reduce.count_fine)
    for kernel in kernels:
        assert kernel.sources == sources_digest()
        assert kernel.dispatcher._cache._cache_file._source_stamp == sources_digest()


def test_kernel__of_another_package_is_renewed_with_that_too() -> None:
    beside: Any = rans.decode_symbols
    assert beside.sources == sources_digest(DELTASTORE) + sources_digest()


def test_sources_digest__changes_with_any_source(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "one.py").write_text("a = 1\n")
    (tmp_path / "below/two.py").write_text("b = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "below/two.py").write_text("b = 2\n")
    sources_digest.cache_clear()
    assert sources_digest(tmp_path) != before


def test_sources_digest__is_of_the_kernels() -> None:
    assert sources_digest(Path(reduce.__file__).parent) == sources_digest()
    assert len(sources_digest()) == 64


def test_room_of__is_the_first_folder_of_the_package_or_the_files_own() -> None:
    assert room_of(Path(rans.__file__)) == DELTASTORE
    assert room_of(Path("/elsewhere/rules/own.py")) == Path("/elsewhere/rules")
