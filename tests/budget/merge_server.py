"""A process that carries out merges it is told of on standard input, so that one tracer can watch many of them."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mergepipe
from mergepipe.errors import MergePipeError
from support.faults import Fault, drop_from_page_cache, replaced

MARKER = "/nowhere/mergepipe-trace"


def main() -> None:
    """Answer one JSON object per line until the input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        drop_from_page_cache(*(Path(place) for place in order["cold"]))
        _mark(order["number"])
        before = _physical_bytes()
        answer = _answer(order)
        answer["physical"] = _physical_bytes() - before
        _mark(order["number"])
        print(json.dumps(answer), flush=True)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    fault = Fault(order["fault_at"])
    faulty = replaced(os, "preadv", fault.wrap) if order["fault_at"] is not None else nullcontext()
    try:
        with faulty:
            report = mergepipe.run(
                Path(order["plan"]),
                Path(order["out"]),
                memory_bytes=order["memory_bytes"],
                home=order["home"],
                threads=2,
            )
    except MergePipeError as error:
        return {"error": error.code, "fired": fault.fired}
    return {
        "error": None,
        "fired": fault.fired,
        "expert": report.expert_bytes,
        "analysis": report.analysis_bytes,
        "read": report.read_bytes,
    }


def _mark(number: int) -> None:
    """Leave a system call in the trace by which the order is found."""
    try:
        os.close(os.open(f"{MARKER}/{number}", os.O_RDONLY))
    except FileNotFoundError:
        return


def _physical_bytes() -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


if __name__ == "__main__":
    main()
