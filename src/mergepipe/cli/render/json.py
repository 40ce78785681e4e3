"""Reports as JSON for programs: the fields of the report, and what it computes from them."""

from __future__ import annotations

from dataclasses import fields

from mergepipe.core.escaping import json_line
from mergepipe.reports import CheckReport, MergeReport


def merge_json(report: MergeReport) -> str:
    """One line: every field of the report, total bytes read and speed."""
    content = _fields(report) | {
        "out": str(report.out),
        "read_bytes": report.read_bytes,
        "bytes_per_second": round(report.bytes_per_second),
        "seconds": round(report.seconds, 3),
    }
    return json_line(content)


def check_json(report: CheckReport, free_bytes: int) -> str:
    """One line: every field of the report, and the bytes free where the command runs."""
    content = _fields(report) | {
        "copied": [{"tensor": name, "reason": reason} for name, reason in report.copied],
        "free_bytes": free_bytes,
    }
    return json_line(content)


def _fields(report: MergeReport | CheckReport) -> dict[str, object]:
    return {field.name: getattr(report, field.name) for field in fields(report)}


def to_json(value: object) -> str:
    """One line: a report's fields, or a list of such; paths as strings, times in ISO 8601."""
    return json_line(value)
