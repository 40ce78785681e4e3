"""Writes the golden models and store of this version; run it as a program."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

import mergepipe
from mergepipe.core.blocks import BF16, DTYPES, F16, F32, DType
from mergepipe.core.strict_json import digest_of
from mergepipe.deltastore.index import HEADER_FORMAT
from support.public_names import HEADER_NAME
from support.rounding import encode
from support.safetensors_bytes import file_bytes

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
_F8 = DTYPES["F8_E4M3"]
_TENSORS: tuple[tuple[str, DType | None, DType, int, float], ...] = (
    ("banded", BF16, BF16, 17_000, 1e-4), ("far", BF16, BF16, 6000, 1.0), ("alone", None, BF16, 6000, 0.0),
    ("half", F16, F16, 5000, 1e-4), ("wider", BF16, F32, 3000, 1e-4), ("narrower", F32, BF16, 3000, 1e-4),
    ("single", F32, F32, 3000, 1e-5), ("eighth", _F8, _F8, 3000, 1e-3), ("hardly", _F8, _F8, 9000, 1e-4),
    ("few", BF16, BF16, 33, 1e-4), ("new.few", None, F32, 5, 0.0), ("same", BF16, BF16, 4100, 0.0),
    ("empty", BF16, BF16, 0, 0.0),
)  # fmt: skip
"""Name, dtype in the base (None: not there), dtype of the expert, elements, size of the deltas."""


def write_models(golden: Path) -> None:
    """Write a base and an expert whose tensors need every codec."""
    rng = np.random.default_rng(0)
    files: dict[str, tuple[dict[str, object], bytes]] = {"base": ({}, b""), "expert": ({}, b"")}
    for name, base_dtype, dtype, n, step in _TENSORS:
        values_N = (rng.standard_normal(n) * 0.02).astype(np.float32)
        moved_N = values_N + (rng.standard_normal(n) * step).astype(np.float32)
        for model, kind, content_N in (("base", base_dtype, values_N), ("expert", dtype, moved_N)):
            if kind is not None:
                header, data = files[model]
                stored = encode(content_N, kind).tobytes()
                header[name] = {
                    "dtype": kind.name, "shape": [n], "data_offsets": [len(data), len(data) + len(stored)]
                }  # fmt: skip
                files[model] = header, data + stored
    golden.mkdir(exist_ok=True)
    for model, (header, data) in files.items():
        (golden / f"{model}.safetensors").write_bytes(file_bytes(header, data))


def main() -> None:
    """Pack the golden expert; the header names the models as they lie beside one another."""
    golden = GOLDEN / f"delta-store-{HEADER_FORMAT.version}"
    write_models(golden)
    os.chdir(golden)
    out = golden / "store"
    with tempfile.TemporaryDirectory() as place:
        mergepipe.pack("base.safetensors", ["expert.safetensors"], place)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(Path(place) / "expert", out)
    document = json.loads((out / HEADER_NAME).read_text())
    del document["digest"]
    document |= {"base": "base.safetensors", "expert": "expert.safetensors"}
    content = {**document, "digest": digest_of(document)}
    (out / HEADER_NAME).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
