"""Reports as JSON for programs: the fields of the report, and what it computes from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from mergepipe.core.escaping import json_line
from mergepipe.reports import CheckReport, MergeReport

REPORT_FORMAT = "mergepipe-report/1"
"""The first field of everything that `--json` prints but plans, which have a format of their own.

The number grows when a field goes away or changes its meaning; new fields may come at any time.
"""


def merge_json(report: MergeReport) -> str:
    """One line: every field of the report, total bytes read and speed."""
    content = _fields(report) | {
        "out": str(report.out),
        "read_bytes": report.read_bytes,
        "bytes_per_second": round(report.bytes_per_second),
        "seconds": round(report.seconds, 3),
    }
    return report_json(content)


def check_json(report: CheckReport, free_bytes: int) -> str:
    """One line: every field of the report, and the bytes free where the command runs."""
    content = _fields(report) | {
        "copied": [{"tensor": name, "reason": reason} for name, reason in report.copied],
        "free_bytes": free_bytes,
    }
    return report_json(content)


def _fields(report: Any) -> dict[str, object]:
    return {field.name: getattr(report, field.name) for field in fields(report)}


def report_json(report: object) -> str:
    """Return one line: the format, then the fields of a report or the items of a mapping."""
    content = _fields(report) if is_dataclass(report) else report
    if not isinstance(content, Mapping):
        raise TypeError(f"a report has named fields: {type(report).__name__}")
    return json_line({"format": REPORT_FORMAT} | dict(content))
