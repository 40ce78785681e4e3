"""Parse the pieces of a sentencepiece model file: known protobuf fields, everything else skipped."""

from __future__ import annotations

from collections.abc import Iterator

from mergepipe.checkpoints.tokenizers.vocabulary import MAX_TOKEN_ID
from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, MergePipeError

_PIECES_FIELD, _TEXT_FIELD = 1, 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BYTES = 10


def read_pieces(raw: bytes, *, where: object) -> tuple[str, ...]:
    """Read the pieces in order of id.

    Raises:
        CorruptError: `tokenizer.pieces.*`: it is no sentencepiece model, or a piece occurs twice.
    """
    parser = _Parser(raw, where)
    pieces: dict[str, None] = {}
    for number, value in parser.fields(0, len(raw)):
        if number != _PIECES_FIELD:
            continue
        if not isinstance(value, tuple):
            raise parser.error("not_a_piece", f"field {number} must be a message")
        piece = parser.piece(*value)
        if piece in pieces:
            raise parser.error("duplicate", f"the piece {shown(piece)} occurs twice")
        pieces[piece] = None
        if len(pieces) > MAX_TOKEN_ID:
            raise parser.error("too_many", f"more than {MAX_TOKEN_ID} pieces")
    if not pieces:
        raise parser.error("none", "no piece found; is it a sentencepiece model?")
    return tuple(pieces)


class _Parser:
    """Walks protobuf messages in a byte string; no length is trusted."""

    def __init__(self, raw: bytes, where: object) -> None:
        self._raw = raw
        self._where = where

    def error(self, what: str, message: str) -> MergePipeError:
        return CorruptError.of(f"tokenizer.pieces.{what}", self._where, message)

    def piece(self, start: int, stop: int) -> str:
        """Return the text of one piece message."""
        text: str | None = None
        for number, value in self.fields(start, stop):
            if number == _TEXT_FIELD and isinstance(value, tuple):
                text = self._text(*value)
        if not text:
            raise self.error("no_text", f"the piece at byte {start} has no text")
        return text

    def fields(self, start: int, stop: int) -> Iterator[tuple[int, int | tuple[int, int]]]:
        """Yield the fields of one message: number, and value or byte range `[start, stop)`."""
        at = start
        while at < stop:
            key, at = self._varint(at, stop)
            number, kind = key >> 3, key & 7
            if number == 0:
                raise self.error("field", f"field 0 at byte {at}")
            if kind == _VARINT:
                value, at = self._varint(at, stop)
                yield number, value
                continue
            n_bytes, at = self._extent(kind, at, stop)
            if n_bytes > stop - at:
                raise self.error("truncated", f"field {number} needs {n_bytes} bytes at byte {at}, found {stop - at}")
            yield number, (at, at + n_bytes)
            at += n_bytes

    def _extent(self, kind: int, at: int, stop: int) -> tuple[int, int]:
        if kind == _BYTES:
            return self._varint(at, stop)
        if kind in (_FIXED32, _FIXED64):
            return (4 if kind == _FIXED32 else 8), at
        raise self.error("wire_type", f"wire type {kind} at byte {at}")

    def _varint(self, at: int, stop: int) -> tuple[int, int]:
        value = 0
        for position in range(at, min(at + _MAX_VARINT_BYTES, stop)):
            byte = self._raw[position]
            value |= (byte & 0x7F) << (7 * (position - at))
            if byte < 0x80:
                return value, position + 1
        raise self.error("varint", f"the number at byte {at} does not end")

    def _text(self, start: int, stop: int) -> str:
        try:
            return self._raw[start:stop].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("not_utf8", f"the piece at byte {start} is not UTF-8") from None
