"""A model's vocabulary as frozen values: token ids, and settings of added tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MAX_TOKEN_ID = (1 << 24) - 1


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched in text before the tokenizer's own rules, with the settings of that match."""

    content: str
    special: bool = False
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True

    def settings(self) -> dict[str, str | bool]:
        """Return the settings as tokenizer files write them, without the id."""
        return {
            "content": self.content,
            "single_word": self.single_word,
            "lstrip": self.lstrip,
            "rstrip": self.rstrip,
            "normalized": self.normalized,
            "special": self.special,
        }


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`ids`: every token with its id, added ones too, by id; no two share one. `file` is the source."""

    ids: Mapping[str, int]
    added: Mapping[str, AddedToken]
    file: str

    def __post_init__(self) -> None:
        if not self.ids:
            raise ValueError("a vocabulary needs a token")

    @property
    def n_ids(self) -> int:
        """One more than the largest id: the rows of an embedding of all tokens."""
        return max(self.ids.values()) + 1

    def as_added(self, token: str) -> AddedToken:
        """Return the token as another tokenizer adds it, with its settings here if it is an added one."""
        return self.added.get(token, AddedToken(token))


def counted(n: int, noun: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{n} {noun}" + ("" if n == 1 else "s")
