"""Damaged inputs from sound ones: bytes, pieces and JSON trees changed at random, then sealed again or not."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

Change = Callable[[random.Random, bytearray], bytearray]

MAX_CONTENT_BYTES: Final = 256 * 1024
_SEALED_SHARE = 0.75
_CHANGES = (1, 1, 1, 2, 3, 4)
_EDGES = (0, 1, 7, 8, 0x7F, 0x80, 0xFF, 0x100, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**53, 2**63 - 1, 2**64 - 1)
_ODD_VALUES: Final[tuple[object, ...]] = (
    None, True, False, 0, -1, 1, 2, 3, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 0.5,
    -0.0, 1e308, -1e-320, float("nan"), float("inf"), "", "0", "-1", "1e3", "\0", " ", ".", "..", "../x", "/", "a/b",
    "\u202e", "\ud800", "é", "x" * 300, [], {}, [[]], [0], {"": 0}, [None, None], "NaN", "null", "F32", "BF16",
    "0" * 32,
)  # fmt: skip
_JSON_WORDS = (
    b"1e999", b"-0", b"NaN", b"9" * 5000, b"\\ud800", b"\\u0000", b'"":', b"[" * 90, b'{"a":' * 90, b"null", b"-1",
    b",", b"true", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """How the inputs of one format are made.

    `seeds` are sound contents. `seal` turns content into the file's bytes: wraps it, and makes its checksums hold.
    `split` cuts content where its parts begin. `words` are strings that mean something to the reader.
    """

    seeds: tuple[bytes, ...]
    seal: Callable[[bytes], bytes] = bytes
    split: Callable[[bytes], Sequence[bytes]] | None = None
    words: tuple[bytes, ...] = ()
    is_json: bool = False


class Mutator:
    """An endless stream of inputs. Law: the same shape and seed give the same inputs."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._shape = shape
        self._words = (*shape.words, *(_JSON_WORDS if shape.is_json else ()))
        self._random = random.Random(seed)

    def next(self) -> bytes:
        """The next input: a seed whose content is changed and sealed, and in part changed again."""
        rng, shape = self._random, self._shape
        content = rng.choice(shape.seeds)
        is_sealed_last = rng.random() < _SEALED_SHARE
        if is_sealed_last or rng.random() < 0.5:
            content = self._changed(content)
        raw = shape.seal(content[:MAX_CONTENT_BYTES])
        return raw if is_sealed_last else self._bytes_changed(raw)

    def _changed(self, content: bytes) -> bytes:
        rng = self._random
        kind = rng.random()
        if self._shape.is_json and kind < 0.7:
            return _json_changed(rng, content, self._shape)
        if self._shape.split is not None and kind < 0.6:
            return self._parts_changed(content)
        return self._bytes_changed(content)

    def _bytes_changed(self, content: bytes) -> bytes:
        rng, changed = self._random, bytearray(content)
        for _ in range(rng.choice(_CHANGES)):
            if self._words and rng.random() < 0.2:
                at = rng.randint(0, len(changed))
                changed[at : at + rng.choice((0, 0, 1, 4, 16))] = rng.choice(self._words)
            elif rng.random() < 0.1:
                other = rng.choice(self._shape.seeds)
                changed[rng.randint(0, len(changed)) :] = other[rng.randint(0, len(other)) :]
            else:
                changed = rng.choice(_BYTE_CHANGES)(rng, changed)
        return bytes(changed)

    def _parts_changed(self, content: bytes) -> bytes:
        rng, split = self._random, self._shape.split
        if split is None:
            raise AssertionError("a shape without parts")
        parts = list(split(content))
        for _ in range(rng.choice(_CHANGES)):
            if not parts:
                break
            at, kind = rng.randrange(len(parts)), rng.randrange(5)
            if kind == 0:
                del parts[at]
            elif kind == 1:
                parts.insert(rng.randint(0, len(parts)), parts[at])
            elif kind == 2:
                other = rng.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            elif kind == 3:
                parts.insert(at, rng.choice(list(split(rng.choice(self._shape.seeds))) or [b""]))
            else:
                parts[at] = self._bytes_changed(parts[at])
        return b"".join(parts)


def _flip(rng: random.Random, content: bytearray) -> bytearray:
    if content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def _overwrite(rng: random.Random, content: bytearray) -> bytearray:
    if content:
        content[rng.randrange(len(content))] = rng.randrange(256)
    return content


def _set_number(rng: random.Random, content: bytearray) -> bytearray:
    """Write a binary number that is likely at the edge of something."""
    nbytes = rng.choice((1, 2, 4, 8))
    if len(content) >= nbytes:
        at = rng.randrange(len(content) - nbytes + 1)
        number = rng.choice(_EDGES) if rng.random() < 0.7 else rng.getrandbits(64)
        content[at : at + nbytes] = (number % (1 << 8 * nbytes)).to_bytes(nbytes, rng.choice(("little", "big")))
    return content


def _set_digits(rng: random.Random, content: bytearray) -> bytearray:
    """Replace a run of decimal digits, wherever one is found from a random place on."""
    start = rng.randrange(len(content) + 1)
    at = next((i for i in range(start, min(start + 200, len(content))) if 48 <= content[i] < 58), None)
    if at is not None:
        stop = at
        while stop < len(content) and 48 <= content[stop] < 58:
            stop += 1
        content[at:stop] = b"1e999" if rng.random() < 0.1 else str(rng.choice(_EDGES)).encode()
    return content


def _delete(rng: random.Random, content: bytearray) -> bytearray:
    at = rng.randint(0, len(content))
    del content[at : at + rng.choice((1, 2, 4, 8, 32, 200))]
    return content


def _repeat(rng: random.Random, content: bytearray) -> bytearray:
    at = rng.randint(0, len(content))
    piece = content[at : at + rng.choice((1, 2, 4, 8, 32, 200))]
    content[at:at] = piece * rng.choice((1, 1, 2, 40))
    return content


def _cut(rng: random.Random, content: bytearray) -> bytearray:
    return content[: rng.randint(0, len(content))]


def _append(rng: random.Random, content: bytearray) -> bytearray:
    return content + rng.randbytes(rng.choice((1, 8, 64)))


_BYTE_CHANGES: tuple[Change, ...] = (
    _flip, _flip, _overwrite, _set_number, _set_number, _set_digits, _delete, _repeat, _cut, _append,
)  # fmt: skip


def _json_changed(rng: random.Random, content: bytes, shape: Shape) -> bytes:
    """Change the tree that `content` describes; content that is no JSON stays as it is."""
    try:
        document = json.loads(content)
    except ValueError:
        return content
    for _ in range(rng.choice(_CHANGES)):
        places = _places(document)
        if not places:
            break
        _change_at(rng, *rng.choice(places), places, shape)
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", errors="surrogatepass")


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every container with every key of it."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        container = waiting.pop()
        if isinstance(container, dict):
            found += [(container, key) for key in container]
            waiting += container.values()
        elif isinstance(container, list):
            found += [(container, index) for index in range(len(container))]
            waiting += container
    return found


def _change_at(rng: random.Random, container: Any, key: Any, places: list[tuple[Any, Any]], shape: Shape) -> None:
    kind, value = rng.randrange(8), container[key]
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[_odd_key(rng, places, shape)] = container.pop(key)
    elif kind == 2:
        other, other_key = rng.choice(places)
        container[key] = copy.deepcopy(other[other_key])
    elif kind == 3 and isinstance(container, list):
        container.insert(key, copy.deepcopy(value))
    elif kind == 4 and isinstance(value, int) and not isinstance(value, bool):
        container[key] = value + rng.choice((-1, 1, -8, 8, 2**32, -value * 2, value, 0.5))
    elif kind == 5:
        container[key] = _nested(rng, value)
    elif kind == 6 and isinstance(value, str):
        container[key] = _odd_text(rng, value, shape)
    else:
        container[key] = copy.deepcopy(rng.choice(_ODD_VALUES))


def _odd_key(rng: random.Random, places: list[tuple[Any, Any]], shape: Shape) -> str:
    if shape.words and rng.random() < 0.4:
        return rng.choice(shape.words).decode("utf-8", errors="replace")
    known = [key for _, key in places if isinstance(key, str)]
    return rng.choice(known) if known and rng.random() < 0.6 else rng.choice(("", "\0", "x" * 200, "..", "\ud800"))


def _odd_text(rng: random.Random, text: str, shape: Shape) -> str:
    if shape.words and rng.random() < 0.4:
        return rng.choice(shape.words).decode("utf-8", errors="replace")
    at = rng.randint(0, len(text))
    return text[:at] + rng.choice(("", "\0", "0", "/", "\ud800", ",", "-", "9" * 30, "\u202e")) + text[at + 1 :]


def _nested(rng: random.Random, value: object) -> object:
    for _ in range(rng.choice((1, 2, 80))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value
