"""What users test their operators with, and families written model by model."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import numpy as np
import pytest

import mergepipe.testing
from mergepipe.core.blocks import DTYPES
from mergepipe.testing import SPECIAL, STORED_DTYPES, decode_elements, encode_elements
from support.families import TINY, write_family, write_models
from support.rounding import canonical_bits, decode, encode


def contents(model: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(model.iterdir())}


def test_write_models__one_after_the_other_gives_the_family(tmp_path: Path) -> None:
    whole = write_family(tmp_path / "whole", TINY, 3, seed=7)
    written = [*write_models(tmp_path / "parts", TINY, [0, 2], seed=7)]
    written += write_models(tmp_path / "parts", TINY, [3], seed=7)
    assert [model.name for model in written] == ["base", "expert-2", "expert-3"]
    assert [contents(m) for m in written] == [contents(whole.models[number]) for number in (0, 2, 3)]
    with pytest.raises(FileExistsError, match=r"expert-3"):
        write_models(tmp_path / "parts", TINY, [3], seed=7)


@pytest.mark.parametrize("name", STORED_DTYPES)
def test_encode_elements__rounds_as_ml_dtypes_does(name: str) -> None:
    dtype = DTYPES[name]
    drawn = np.random.default_rng(3).integers(0, 1 << 32, 100_000, np.uint32).view(np.float32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(0x8000)).view(np.float32)
    values = np.concatenate([SPECIAL, drawn, ties])
    found, wanted = encode_elements(values, dtype), encode(values, dtype)
    assert np.array_equal(canonical_bits(found.view(wanted.dtype)), canonical_bits(wanted))
    np.testing.assert_array_equal(decode_elements(found, dtype), decode(wanted.tobytes(), dtype))


def test_testing__imports_numpy_alone() -> None:
    """The wheel brings neither ml_dtypes nor hypothesis."""
    imported = set()
    for path in Path(mergepipe.testing.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
    assert imported - sys.stdlib_module_names == {"numpy", "mergepipe"}
