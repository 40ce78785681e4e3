"""Reads elements of stored states, across their pieces, whatever file they lie in."""

from __future__ import annotations

from bisect import bisect_right
from contextlib import ExitStack
from threading import Lock
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.open_files import allow_open_files
from mergepipe.core.blocks import Span
from mergepipe.errors import CorruptError
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import read_exact
from mergepipe.tailor.checkpoint import StoredState


class StateReader:
    """Reads spans of raw states from any number of threads, charged as analysis. A context manager.

    Every file stays open until the end: the limit on open files is raised as far as it goes.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._files: dict[Location, RangeFile] = {}
        self._lock = Lock()

    def __enter__(self) -> StateReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; nothing may be read any more."""
        with ExitStack() as stack:
            for file in self._files.values():
                stack.callback(file.close)
            self._files.clear()

    def read(self, state: StoredState, *spans: Span) -> NDArray[np.uint8]:
        """Return the bytes of elements of `state`, those of one span after those of another.

        Raises:
            CorruptError: a piece of it is not there.
        """
        out = np.empty(sum(span.n_elements for span in spans) * state.dtype.itemsize, np.uint8)
        start = 0
        for span in spans:
            stop = start + span.n_elements * state.dtype.itemsize
            self._read(state, span, out[start:stop])
            start = stop
        return out

    def _read(self, state: StoredState, span: Span, out: NDArray[np.uint8]) -> None:
        itemsize, done = state.dtype.itemsize, 0
        place = bisect_right(state.pieces, span.start, key=lambda piece: piece.span.stop)
        while place < len(state.pieces) and (piece := state.pieces[place]).span.start < span.stop:
            place += 1
            first, last = max(piece.span.start, span.start), min(piece.span.stop, span.stop)
            at, nbytes = (first - span.start) * itemsize, (last - first) * itemsize
            offset = piece.offset + (first - piece.span.start) * itemsize
            read_exact(self._open(piece.file), offset, offset + nbytes, Purpose.ANALYSIS, out[at : at + nbytes])
            done += nbytes
        if done != out.size:
            raise CorruptError.of("tailor.gap", state.parameter, f"{state.kind} is saved in part only")

    def _open(self, path: Location) -> RangeFile:
        file = self._files.get(path)
        if file is not None:
            return file
        with self._lock:
            if path not in self._files:
                allow_open_files(len(self._files))
                self._files[path] = self._store.open(path)
            return self._files[path]
