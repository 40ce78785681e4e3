"""Conversations that chat templates are compared on: turns in order and out of order, odd spaces, other roles."""

from __future__ import annotations

_CONTENTS = {"system": " Be brief.\n", "user": "Hi? ", "assistant": " Yes.", "tool": "x"}
_LETTERS = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
_TURNS = [
    "u", "ua", "uau", "su", "sua", "suau", "uaua", "s", "a", "uu", "su", "uausu", "as", "sas", "ut", "utua", "ta",
    "suaua",
]  # fmt: skip

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": _LETTERS[letter], "content": f"{_CONTENTS[_LETTERS[letter]]}{n or ''}"} for n, letter in enumerate(turns)]
    for turns in _TURNS
] + [[{"role": "user", "content": "\n{{ a }}\t'b'"}, {"role": "assistant", "content": "c\n\n"}]]
