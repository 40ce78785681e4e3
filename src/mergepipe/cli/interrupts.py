"""Turn the signals that ask a process to stop into KeyboardInterrupt, when cleaning up is certain to work.

Until a run reports progress for the first time a signal interrupts at once. From then on the run is asked to stop at
its next report, so that no cleaning up is cut short; a second signal that finds the run still silent interrupts it
wherever it is. Once an interrupt is on its way, further signals are ignored.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupts:
    """Handles the signals while its context lasts. Signals that are ignored from outside (`nohup`) stay ignored."""

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._at_reports_only = False
        self._raised = False
        self._previous: dict[signal.Signals, object] = {}
        self._tell_unraisable = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _NAMES if hasattr(signal, name)):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
            self._tell_unraisable, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        return self

    def __exit__(self, *_: object) -> None:
        if sys.unraisablehook == self._on_unraisable:
            sys.unraisablehook = self._tell_unraisable
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned

    @property
    def exit_code(self) -> int:
        """Return the exit code of a process that a signal stopped: 128 and the signal's number."""
        return 128 + int(self._received or signal.SIGINT)

    def report(self) -> None:
        """Say that the run can be stopped here. From the first call on, a signal waits for the next one."""
        self._at_reports_only = True
        if self._received is not None:
            self._raised = True
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        waits = self._at_reports_only and self._received is None
        self._received = self._received or signal.Signals(number)
        if not (waits or self._raised):
            self._raised = True
            raise KeyboardInterrupt

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Print nothing of an interrupt that came in a callback of Python's: the next report raises it again."""
        if unraisable.exc_type is not KeyboardInterrupt:
            self._tell_unraisable(unraisable)
