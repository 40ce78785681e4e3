"""Write saves behind the training step: at most one at a time; a failure is raised by the next save or at the end."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from mergepipe.tailor.saving.engine_view import Ranks
from mergepipe.tailor.saving.save_log import SaveRecord


class BackgroundWriter:
    """Writes one save of a run at a time in a thread. A context manager, which waits for the last one.

    Every method is called on every rank together. Memory: a copy of what is being saved of this rank's part.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "mergepipe-save")
        self._saving: Future[SaveRecord] | None = None
        self._ranks: Ranks | None = None

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def start(self, ranks: Ranks, write: Callable[[Ranks], SaveRecord]) -> None:
        """Call `write` in the thread, with the ranks as they are seen from there.

        Raises:
            MergePipeError: the save before failed; `write` is not called.
        """
        self.wait()
        if self._ranks is None:
            self._ranks = ranks.for_another_thread()
        self._saving = self._pool.submit(write, self._ranks)

    def wait(self) -> SaveRecord | None:
        """Wait for the save that is being written; None without one.

        Raises:
            MergePipeError: it failed, on whichever rank. Raised once; the run's earlier saves are as they were.
        """
        saving, self._saving = self._saving, None
        return None if saving is None else saving.result()
