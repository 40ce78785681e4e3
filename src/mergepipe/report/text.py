"""Text that is safe to show: names come from files, and files from strangers."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with whatever could break a line or command a terminal written escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
