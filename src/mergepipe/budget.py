"""The ledger: what a run really read and wrote, in integer bytes, by purpose and by file."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Purpose(StrEnum):
    """Why bytes move. Expert bytes are what a budget caps."""

    METADATA = "metadata"  # headers, indices, sidecar files
    BASE = "base"
    EXPERT = "expert"
    ANALYSIS = "analysis"  # reads beyond the one pass: content ids, a second pass for thresholds
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Usage:
    """A frozen reading of a ledger: bytes by purpose, and by (file, purpose)."""

    by_purpose: Mapping[Purpose, int]
    by_file: Mapping[tuple[str, Purpose], int]

    def __getitem__(self, purpose: Purpose) -> int:
        return self.by_purpose.get(purpose, 0)


class Ledger:
    """Counts bytes as they are requested. Safe to charge from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_purpose: dict[Purpose, int] = defaultdict(int)
        self._by_file: dict[tuple[str, Purpose], int] = defaultdict(int)

    def charge(self, file: str, purpose: Purpose, nbytes: int) -> None:
        """Add `nbytes` requested from (or written to) `file`."""
        with self._lock:
            self._by_purpose[purpose] += nbytes
            self._by_file[(file, purpose)] += nbytes

    def total_bytes(self) -> int:
        """All bytes charged so far, whatever the purpose."""
        with self._lock:
            return sum(self._by_purpose.values())

    def usage(self) -> Usage:
        """A consistent copy of the counters."""
        with self._lock:
            return Usage(dict(self._by_purpose), dict(self._by_file))
