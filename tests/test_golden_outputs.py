"""Outputs, plans, packed experts and composites are byte for byte what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

from support.golden_outputs import RECORD, all_digests


def test_golden_outputs__every_job_gives_the_recorded_bytes(tmp_path: Path) -> None:
    found = all_digests(tmp_path)
    recorded = json.loads(RECORD.read_text())
    assert list(found) == list(recorded)
    assert {job: files for job, files in found.items() if files != recorded[job]} == {}
