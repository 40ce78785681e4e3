"""When a merge records what is durable."""

from __future__ import annotations

import pytest

from mergepipe.engine.work import OutputPlan
from mergepipe.runs.recovery import resume
from mergepipe.runs.recovery.resume import INTERVAL_BYTES, INTERVAL_SECONDS, MergeProgress, Resume
from mergepipe.storage.ledger import Ledger


def test_progress__is_recorded_every_few_seconds_or_after_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "INTERVAL_SECONDS", INTERVAL_SECONDS)  # as a user has it, not as other tests do
    now = 100.0
    progress = MergeProgress("key", OutputPlan((), ()), None, Ledger(), Resume.AUTO, lambda: now)
    assert not progress.is_due(1)
    assert progress.is_due(INTERVAL_BYTES)
    now += INTERVAL_SECONDS
    assert progress.is_due(1)
    assert not progress.is_due(1)
    assert INTERVAL_SECONDS <= 5
