"""Reports as JSON for programs: the fields of the report, and what it computes from them."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from datetime import datetime
from pathlib import Path

from mergepipe.reports import CheckReport, MergeReport


def merge_json(report: MergeReport) -> str:
    """One line: every field of the report, total bytes read and speed."""
    fields = asdict(report) | {
        "out": str(report.out),
        "read_bytes": report.read_bytes,
        "bytes_per_second": round(report.bytes_per_second),
        "seconds": round(report.seconds, 3),
    }
    return json.dumps(fields, default=_plain)


def check_json(report: CheckReport, free_bytes: int) -> str:
    """One line: every field of the report, and the bytes free where the command runs."""
    fields = asdict(report) | {
        "copied": [{"tensor": name, "reason": reason} for name, reason in report.copied],
        "free_bytes": free_bytes,
    }
    return json.dumps(fields)


def to_json(value: object) -> str:
    """One line: a report's fields, or a list of such; paths as strings, times in ISO 8601."""
    return json.dumps(_plain(value), default=_plain)


def _plain(value: object) -> object:
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, tuple | list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    raise TypeError(f"not for JSON: {type(value).__name__}")
