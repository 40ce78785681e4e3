"""Writes the generated pages into the directory that is given."""

from __future__ import annotations

import sys
from pathlib import Path

from tools.reference import pages

if __name__ == "__main__":
    directory = Path(sys.argv[1])
    for name, text in pages().items():
        (directory / name).write_text(text, encoding="utf-8")
