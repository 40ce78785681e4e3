"""Reads of files as the kernel saw them, by strace: which bytes of which file were requested between two markers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from merge_server import MARKER

SERVER = Path(__file__).parent / "merge_server.py"
# Every call that moves bytes out of a file, so that none can be overlooked.
READING_CALLS = (
    "openat,read,readv,pread64,preadv,preadv2,mmap,sendfile,splice,tee,copy_file_range,io_uring_enter,io_submit,"
    "readahead"
)
STRACE = ("strace", "-f", "--seccomp-bpf", "-y")
PAGE_BYTES = 4096
PATIENCE_SECONDS = 120.0

_CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+|\?)")
_DESCRIPTOR = re.compile(r"\d+<([^<>]*)>")
_LENGTHS = re.compile(r"iov_len=(\d+)")


@dataclass(slots=True)
class FileReads:
    """What was asked of one file: lists of (offset, bytes), and what else was done with it."""

    vectored: list[tuple[int, int]] = field(default_factory=list)
    plain: list[tuple[int, int]] = field(default_factory=list)
    other: set[str] = field(default_factory=set)

    @property
    def tensor_bytes(self) -> int:
        """Bytes requested by vectored reads."""
        return sum(nbytes for _, nbytes in self.vectored)

    @property
    def metadata_bytes(self) -> int:
        """Bytes requested by plain reads."""
        return sum(nbytes for _, nbytes in self.plain)


@dataclass(frozen=True, slots=True)
class TracedRun:
    """What the server says of a run, and what the kernel saw of each file."""

    answer: dict[str, Any]
    reads: dict[str, FileReads]

    def of_place(self, place: Path) -> dict[str, FileReads]:
        """The files of one model."""
        inside = f"{place}/"
        return {file: reads for file, reads in self.reads.items() if file == str(place) or file.startswith(inside)}

    def tensor_bytes(self, place: Path) -> int:
        """Bytes requested of one model's tensors."""
        return sum(reads.tensor_bytes for reads in self.of_place(place).values())


class TracedServer:
    """A merge server under strace."""

    def __init__(self, process: subprocess.Popen[str], trace: Path) -> None:
        self._process = process
        self._trace = _Trace(trace)
        self._number = 0

    def run(
        self,
        plan: Path,
        out: Path,
        home: Path,
        *,
        memory_bytes: int | None = None,
        cold: tuple[Path, ...] = (),
        fault_at: int | None = None,
    ) -> TracedRun:
        """Run a stored plan, with the files below `cold` out of the page cache."""
        self._number += 1
        order = {
            "number": self._number,
            "plan": str(plan),
            "out": str(out),
            "home": str(home),
            "memory_bytes": memory_bytes,
            "cold": [str(place) for place in cold],
            "fault_at": fault_at,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the server died"
        return TracedRun(json.loads(line), self._trace.reads_of(self._number))

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)
        self._trace.close()


@contextmanager
def traced_server(folder: Path) -> Iterator[TracedServer]:
    """Start a server; the trace is written to `folder`."""
    trace = folder / "trace"
    trace.touch()
    command = [*STRACE, "-s", "1", "-e", f"trace={READING_CALLS}", "-o", str(trace)]
    process = subprocess.Popen(
        [*command, sys.executable, str(SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "MERGEPIPE_HOME": str(folder / "server-home")},
    )
    server = TracedServer(process, trace)
    try:
        yield server
    finally:
        server.close()


class _Trace:
    """Reads a trace while it is being written."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open(encoding="utf-8", errors="replace")
        self._rest = ""
        self._unfinished: dict[str, str] = {}

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def reads_of(self, number: int) -> dict[str, FileReads]:
        """Reads by file between the two markers of an order; waits for the second."""
        marker = f'{MARKER}/{number}"'
        markers = 0
        found: dict[str, FileReads] = defaultdict(FileReads)
        for name, arguments in self._calls():
            if marker in arguments:
                markers += 1
                if markers == 2:
                    return dict(found)
            elif markers:
                _note(found, name, arguments)
        raise AssertionError(f"the trace of order {number} has no end")

    def _calls(self) -> Iterator[tuple[str, str]]:
        """Name and arguments of every call, interrupted ones joined, in order of their ends."""
        for line in self._lines():
            thread, _, text = line.partition(" ")
            text = text.strip()
            if text.endswith("<unfinished ...>"):
                self._unfinished[thread] = text.removesuffix("<unfinished ...>")
                continue
            if text.startswith("<... "):
                text = self._unfinished.pop(thread) + text.partition(" resumed>")[2]
            call = _CALL.match(text)
            if call is not None:
                yield call.group(1), call.group(2)

    def _lines(self) -> Iterator[str]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            part = self._stream.readline()
            if not part:
                time.sleep(0.002)
                continue
            self._rest += part
            if self._rest.endswith("\n"):
                line, self._rest = self._rest, ""
                yield line


def _note(found: dict[str, FileReads], name: str, arguments: str) -> None:
    descriptor = _DESCRIPTOR.search(arguments)
    if name == "openat" or descriptor is None:
        return
    reads = found[descriptor.group(1)]
    last = arguments.split(", ")
    if name in ("preadv", "preadv2"):
        nbytes = sum(int(each) for each in _LENGTHS.findall(arguments))
        reads.vectored.append((int(last[-1 if name == "preadv" else -2]), nbytes))
    elif name == "pread64":
        reads.plain.append((int(last[-1]), int(last[-2])))
    elif name == "mmap":
        reads.other.add(f"mmap {last[2]}")
    else:
        reads.other.add(name)
