"""When a merge records what is durable."""

from __future__ import annotations

import pytest

from mergepipe.engine.work import OutputPlan
from mergepipe.runs.recovery import resume
from mergepipe.runs.recovery.resume import INTERVAL_BYTES, INTERVAL_SECONDS, MergeProgress, Resume
from mergepipe.storage.ledger import Ledger


def test_progress__is_recorded_from_the_start_then_every_second_or_after_many_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resume, "INTERVAL_SECONDS", INTERVAL_SECONDS)  # as a user has it, not as other tests do
    now = 100.0
    progress = MergeProgress("key", OutputPlan((), ()), None, Ledger(), Resume.AUTO, lambda: now)
    assert not progress.is_due(1)
    recorded = []
    while now < 110.0:
        now += INTERVAL_SECONDS / 64
        if progress.is_due(1):
            recorded.append(now)
        assert not progress.is_due(1)
    waits = [later - earlier for earlier, later in zip([100.0, *recorded], recorded, strict=False)]
    assert waits[0] <= INTERVAL_SECONDS / 4
    assert waits == sorted(waits)
    assert waits[-1] == INTERVAL_SECONDS <= 5
    assert progress.is_due(INTERVAL_BYTES)
