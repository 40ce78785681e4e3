"""The ledger counts the bytes that a run reads and writes, by purpose and by file."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from mergepipe.errors import LimitError

K = TypeVar("K")


class Purpose(StrEnum):
    """The purpose of a read or write. Expert bytes are what a budget limits."""

    METADATA = "metadata"  # headers, indices, sidecar files
    BASE = "base"
    EXPERT = "expert"
    ANALYSIS = "analysis"  # reads beyond the one pass: content ids, a second pass for thresholds
    OUTPUT = "output"


EXPERT_PURPOSES = (Purpose.EXPERT, Purpose.ANALYSIS)


@dataclass(frozen=True, slots=True)
class Usage:
    """An immutable snapshot of a ledger: bytes by purpose, and by (file, purpose).

    Laws: usages add up as a commutative monoid with `Usage()`; `(a + b) - a == b`.
    """

    by_purpose: Mapping[Purpose, int] = field(default_factory=dict)
    by_file: Mapping[tuple[str, Purpose], int] = field(default_factory=dict)

    def __getitem__(self, purpose: Purpose) -> int:
        return self.by_purpose.get(purpose, 0)

    def __add__(self, other: Usage) -> Usage:
        return Usage(_sums(self.by_purpose, other.by_purpose, 1), _sums(self.by_file, other.by_file, 1))

    def __sub__(self, earlier: Usage) -> Usage:
        """Return what was used since an earlier snapshot of the same ledger."""
        return Usage(_sums(self.by_purpose, earlier.by_purpose, -1), _sums(self.by_file, earlier.by_file, -1))

    @property
    def total_bytes(self) -> int:
        return sum(self.by_purpose.values())

    @property
    def expert_bytes(self) -> int:
        """The bytes that a budget limits."""
        return sum(self[purpose] for purpose in EXPERT_PURPOSES)


def _sums(first: Mapping[K, int], second: Mapping[K, int], sign: int) -> dict[K, int]:
    """Add two counters; entries that come to nothing are left out."""
    sums = {key: first.get(key, 0) + sign * second.get(key, 0) for key in (*first, *second)}
    return {key: nbytes for key, nbytes in sums.items() if nbytes}


class Ledger:
    """Counts bytes before they are requested. Safe to charge from many threads.

    With `expert_limit_bytes` set it is also the last guard of a budget: a request that would go beyond is refused
    before it is made. A plan that is sound never meets it. `before_expert_read` is told the new total of expert bytes
    before they are read, while the ledger is locked.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.expert_limit_bytes: int | None = None
        self.before_expert_read: Callable[[int], None] | None = None
        self._by_purpose: dict[Purpose, int] = defaultdict(int)
        self._by_file: dict[tuple[str, Purpose], int] = defaultdict(int)

    def charge(self, file: str, purpose: Purpose, nbytes: int) -> None:
        """Add `nbytes` about to be requested from (or just written to) `file`."""
        with self._lock:
            if purpose in EXPERT_PURPOSES:
                self._admit_expert_bytes(file, nbytes)
            self._by_purpose[purpose] += nbytes
            self._by_file[(file, purpose)] += nbytes

    def refund(self, file: str, purpose: Purpose, nbytes: int) -> None:
        """Take back `nbytes` of a charge: it is proved that they were not sent."""
        with self._lock:
            if not 0 <= nbytes <= self._by_file[(file, purpose)]:
                raise ValueError(f"{file}: no charge of {nbytes} bytes to take back")
            self._by_purpose[purpose] -= nbytes
            self._by_file[(file, purpose)] -= nbytes

    def add(self, usage: Usage) -> None:
        """Count what another ledger has counted: that of a part which another process made."""
        for (file, purpose), nbytes in sorted(usage.by_file.items()):
            self.charge(file, purpose, nbytes)

    def _admit_expert_bytes(self, file: str, nbytes: int) -> None:
        used = sum(self._by_purpose[purpose] for purpose in EXPERT_PURPOSES)
        if self.expert_limit_bytes is not None and used + nbytes > self.expert_limit_bytes:
            message = f"{nbytes} more bytes were asked for, {used} of {self.expert_limit_bytes} are used"
            raise LimitError.of("budget.exceeded", file, message, "report this: the plan was unsound")
        if self.before_expert_read is not None:
            self.before_expert_read(used + nbytes)

    def total_bytes(self) -> int:
        """All bytes charged so far, whatever the purpose."""
        with self._lock:
            return sum(self._by_purpose.values())

    def usage(self) -> Usage:
        """A consistent copy of the counters."""
        with self._lock:
            return Usage(dict(self._by_purpose), dict(self._by_file))
