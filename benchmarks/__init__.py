"""Speed and memory claims, each with its baseline and the I/O floor in the same run."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))  # the generators of model families
