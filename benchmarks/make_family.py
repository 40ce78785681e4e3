"""Command that writes the checkpoint family the benchmarks merge, or finds the one already there."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from support.families import (
    DEMO,
    QWEN3_0_6B,
    TINY,
    Architecture,
    FamilyPaths,
    FamilyShape,
    family_bytes,
    family_paths,
    write_family,
)

DEFAULT_ROOT = Path(".bench/family")
SHAPES: dict[str, FamilyShape] = {
    "8b": FamilyShape(4096, 32, 32, 8, 128, 14336, 128256, tied=False, architecture=Architecture.LLAMA),
    "3b": FamilyShape(3072, 28, 24, 8, 128, 8192, 128256, tied=True, architecture=Architecture.LLAMA),
    "1.7b": replace(QWEN3_0_6B, hidden=2048, intermediate=6144),
    "0.6b": QWEN3_0_6B,
    "slice": replace(QWEN3_0_6B, layers=6, vocab=30720),
    "small": replace(QWEN3_0_6B, layers=4, vocab=16000),
    "demo": DEMO,
    "tiny": TINY,
}
"""`8b` is Llama-3.1-8B, `3b` Llama-3.2-3B, `1.7b`, `0.6b` are Qwen3's, `slice` and `small` are 6 and 4 of 28 layers of
the latter, with a fifth and a tenth of its words."""
_MARKER = "family.json"


@dataclass(frozen=True, slots=True)
class FamilyRequest:
    """Which family is wanted, and where."""

    root: Path
    shape: str
    experts: int
    seed: int
    is_fitted: bool = False

    def marker(self) -> dict[str, object]:
        """What is left beside a family that was written to its end."""
        return {"shape": self.shape, "experts": self.experts, "seed": self.seed, "is_fitted": self.is_fitted}


def ensure_family(request: FamilyRequest) -> FamilyPaths:
    """Write the family unless the very same one is there already; FileExistsError: another, or a part of one, is."""
    marker = request.root / _MARKER
    if marker.exists() and json.loads(marker.read_text()) == request.marker():
        return family_paths(request.root, request.experts)
    paths = write_family(
        request.root, SHAPES[request.shape], request.experts, request.seed, is_fitted=request.is_fitted
    )
    marker.write_text(json.dumps(request.marker()) + "\n")
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add_family_options(parser)
    request = family_request(parser.parse_args())
    start = time.perf_counter()
    paths = ensure_family(request)
    gigabytes = family_bytes(SHAPES[request.shape], request.experts) / 1e9
    print(f"{len(paths.models)} models, {gigabytes:.2f} GB in {request.root} ({time.perf_counter() - start:.1f} s)")
    return 0


def add_family_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which family."""
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--experts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)


def family_request(options: argparse.Namespace) -> FamilyRequest:
    """Read the options of `add_family_options`."""
    return FamilyRequest(options.root, options.shape, options.experts, options.seed)


if __name__ == "__main__":
    sys.exit(main())
