"""Where the repository keeps what tests look at."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
DOCS = ROOT / "docs"
GOLDEN = ROOT / "tests" / "golden"
