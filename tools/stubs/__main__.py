"""Writes the stubs into the package."""

from __future__ import annotations

from tools.stubs import PACKAGE, stubs

if __name__ == "__main__":
    for name, text in stubs().items():
        (PACKAGE / name).write_text(text, encoding="utf-8")
