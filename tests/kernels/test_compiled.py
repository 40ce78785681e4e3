"""Calls of compiled kernels: what is refused before compiled code runs, and which library they run in."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergepipe.core.blocks import RawBlock
from mergepipe.errors import UnsupportedError
from mergepipe.kernels import codec, compiled, library, merge, reduce
from support.source_code import trees_with

FLOATS = np.zeros(8, np.float32)
BYTES = np.zeros(32, np.uint8)
PLACES_E = np.zeros(1, np.int64)
CODES_E = np.ones(1, np.int64)
BLOCK = RawBlock(
    BYTES, 0, 1, PLACES_E, PLACES_E, PLACES_E, CODES_E, 0, 8, BYTES, 0, 1, np.uint64(0), np.empty((0, 2)), 0
)


def read_only(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = values.copy()
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    ("out", "found"),
    [
        (np.zeros(8), "1 dimensions of float64"),
        (np.zeros((2, 4), np.float32), "2 dimensions of float32"),
        (np.zeros(16, np.float32)[::2], "contiguous False"),
        (np.zeros(33, np.uint8)[1:].view(np.float32), "aligned False"),
        (read_only(FLOATS), "writeable False"),
    ],
)
def test_kernel__refuses_an_array_that_it_was_not_compiled_for(out: np.ndarray[Any, Any], found: str) -> None:
    with pytest.raises(TypeError, match=f"^out: an array of .*{found}"):
        codec.decode_all(BYTES, 1, 8, out)


def test_kernel__takes_an_array_that_it_only_reads_from_read_only_memory() -> None:
    out = np.ones(8, np.float32)
    codec.decode_all(read_only(BYTES), 1, 8, out)
    assert not out.any()


@pytest.mark.parametrize(
    "block",
    [
        BLOCK._replace(n_elements=9),
        BLOCK._replace(base_offset=4),
        BLOCK._replace(offsets_E=np.array([-4])),
        BLOCK._replace(offsets_E=np.array([4])),
        BLOCK._replace(offsets_E=np.zeros(0, np.int64), codes_E=np.zeros(0, np.int64)),
        BLOCK._replace(out_offset=1),
        BLOCK._replace(out_code=0),
    ],
)
def test_kernel__refuses_a_block_that_is_not_in_its_buffers(block: RawBlock) -> None:
    with pytest.raises(ValueError, match="elements"):
        merge.encode_array(block, FLOATS)


def test_kernel__refuses_stretches_that_are_not_in_their_buffer() -> None:
    deltas = reduce.DeltaStretches(BYTES, 1, np.array([[0, 8, 0, 0, 1], [8, 8, 4, 0, 1]]))
    with pytest.raises(ValueError, match="8 elements of code 1 at 0, those of the base at 4, of a buffer of 32 bytes"):
        reduce.count_magnitudes(deltas, np.zeros(reduce.COARSE_BINS, np.int64))


def test_kernel__that_only_kernels_call_refuses_python() -> None:
    with pytest.raises(TypeError, match="tie_hash is compiled into other kernels"):
        merge.tie_hash(1, np.uint32(1))


def test_exported_kernels__have_symbols_of_their_own() -> None:
    for module in library.MODULES:
        import_module(f"mergepipe.{module}")
    symbols = [special.symbol for kernel in compiled.EXPORTED for special in kernel.specializations.values()]
    assert len(set(symbols)) == len(symbols) > 50


def test_modules__are_all_that_compiled_code_depends_on() -> None:
    """A library is built of all of them, and refused when one has changed."""
    of_kernels = {".".join(Path(place).with_suffix("").parts) for place, _ in trees_with("@kernel", "@exported")}
    imported = {
        (node.module or "").removeprefix("mergepipe.")
        for _, tree in trees_with("@kernel", "@exported")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mergepipe.core")
    }
    assert imported == {"core.blocks"}
    assert of_kernels - {"kernels.compiled"} == set(library.MODULES) - imported


def test_loaded_library__that_was_not_built_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "LIBRARIES", tmp_path)
    with pytest.raises(UnsupportedError, match=re.escape(f"is in this installation ({tmp_path})")) as caught:
        library.loaded_library.__wrapped__()
    assert "pip install" in str(caught.value.problems[0].hint)


def test_loaded_library__of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "sources_digest", lambda: "0" * 64)
    with pytest.raises(UnsupportedError, match="the sources of kernels have changed since "):
        library.loaded_library.__wrapped__()


def test_usable_levels__of_a_processor_without_features_is_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    best = library.usable_levels()
    monkeypatch.setattr(library, "_features", set)
    assert library.usable_levels() == best[-1:]


def test_loaded_library__that_is_another_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "LIBRARIES", tmp_path)
    for content in (
        b"",
        Path(import_module("numpy._core._multiarray_umath").__file__ or "").read_bytes(),
    ):  # nothing, and a library without our symbols
        for level in library.usable_levels():
            library.library_path(level).write_bytes(content)
        with pytest.raises(
            UnsupportedError, match=r"is not the library of this package: .*; install the package again"
        ):
            library.loaded_library.__wrapped__()
