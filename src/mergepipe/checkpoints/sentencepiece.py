"""Parse the pieces of a sentencepiece model file: known protobuf fields, everything else skipped."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, MergePipeError

MAX_TOKEN_ID = (1 << 24) - 1
_PIECES_FIELD = 1
_TEXT_FIELD = 1
_SCORE_FIELD = 2
_KIND_FIELD = 3
_VARINT = 0
_FIXED64 = 1
_BYTES = 2
_FIXED32 = 5
_NORMAL = 1
_MAX_VARINT_BYTES = 10


def read_pieces(raw: bytes, *, where: object) -> dict[str, tuple[float, int]]:
    """Read the pieces in order of id: score and kind (1 is a usual one) by text."""
    parser = _Parser(raw, where)
    pieces: dict[str, tuple[float, int]] = {}
    for number, value in parser.fields(0, len(raw)):
        if number != _PIECES_FIELD:
            continue
        if not isinstance(value, tuple):
            raise parser.error(f"field {number} must be a message")
        piece, score, kind = parser.piece(*value)
        if piece in pieces:
            raise parser.error(f"the piece {shown(piece)} occurs twice")
        pieces[piece] = score, kind
        if len(pieces) > MAX_TOKEN_ID:
            raise parser.error(f"more than {MAX_TOKEN_ID} pieces")
    if not pieces:
        raise parser.error("no piece found; is it a sentencepiece model?")
    return pieces


class _Parser:
    """Walks protobuf messages in a byte string; no length is trusted."""

    def __init__(self, raw: bytes, where: object) -> None:
        self._raw = raw
        self._where = where

    def error(self, message: str) -> MergePipeError:
        return CorruptError.of("tokenizer.damaged", self._where, message)

    def piece(self, start: int, stop: int) -> tuple[str, float, int]:
        """Return text, score and kind of one piece message."""
        text = ""
        score = 0.0
        kind = _NORMAL
        for number, value in self.fields(start, stop):
            match number, value:
                case (_, (first, last)) if number == _TEXT_FIELD:
                    text = self._text(first, last)
                case (_, (first, last)) if number == _SCORE_FIELD and last - first == 4:
                    (score,) = struct.unpack_from("<f", self._raw, first)
                case (_, int()) if number == _KIND_FIELD:
                    kind = value
        if not text:
            raise self.error(f"the piece at byte {start} has no text")
        return text, score, kind

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
        """Yield the fields of one message: number, and value or byte range `[start, stop)`."""
        at = start
        while at < stop:
            key, at = self._varint(at, stop)
            number = key >> 3
            kind = key & 7
            if number == 0:
                raise self.error(f"field 0 at byte {at}")
            if kind == _VARINT:
                value, at = self._varint(at, stop)
                yield number, value
                continue
            if kind == _BYTES:
                n_bytes, at = self._varint(at, stop)
            elif kind in (_FIXED32, _FIXED64):
                n_bytes = 4 if kind == _FIXED32 else 8
            else:
                raise self.error(f"wire type {kind} at byte {at}")
            if n_bytes > stop - at:
                raise self.error(f"field {number} needs {n_bytes} bytes at byte {at}, found {stop - at}")
            yield number, (at, at + n_bytes)
            at += n_bytes

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        value = 0
        for position in range(at, min(at + _MAX_VARINT_BYTES, stop)):
            byte = self._raw[position]
            value |= (byte & 0x7F) << (7 * (position - at))
            if byte < 0x80:
                return value, position + 1
        raise self.error(f"the number at byte {at} does not end")

    def _text(self, start: int, stop: int) -> str:
        try:
            return self._raw[start:stop].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"the piece at byte {start} is not UTF-8") from None
