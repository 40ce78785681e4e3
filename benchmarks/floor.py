"""The I/O floor: the time to read all inputs once and write one output, at the same time, past the page cache."""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from benchmarks.cold import make_cold

MIB = 1024 * 1024
_ALIGNMENT = 4096
_CALIBRATION_BYTES = 1536 * MIB
_WRITERS = 2


@dataclass(frozen=True, slots=True)
class FloorSetting:
    """How the floor is read: `readers` threads, one request of `chunk_bytes` in flight each."""

    readers: int
    chunk_bytes: int

    @classmethod
    def parse(cls, text: str) -> FloorSetting:
        """Read `4x2`: 4 threads, 2 MiB."""
        readers, _, chunk_mib = text.partition("x")
        return cls(int(readers), int(chunk_mib) * MIB)

    def __str__(self) -> str:
        return f"{self.readers}x{self.chunk_bytes // MIB}"


DEFAULT = FloorSetting(8, 4 * MIB)
CANDIDATES = tuple(FloorSetting(readers, mib * MIB) for readers in (2, 4, 8, 16) for mib in (1, 2, 4))
WAYS = 2  # of asking that are measured each time; the fastest counts


@dataclass(frozen=True, slots=True)
class FloorResult:
    """One measurement of the floor."""

    setting: str
    seconds: float
    read_bytes: int
    written_bytes: int

    @property
    def read_gb_per_second(self) -> float:
        return self.read_bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One aligned request; the kernel shortens it at the end of a file."""

    descriptor: int
    offset: int


def measure_floor(
    inputs: Sequence[Path], scratch: Path, output_bytes: int, setting: FloorSetting, max_read_bytes: int | None = None
) -> FloorResult:
    """Read `inputs` once with O_DIRECT while `output_bytes` are written to `scratch` with O_DIRECT and synced.

    The output is allocated before it is written. The clock covers opening, both streams and the fsync; `scratch` is
    deleted after it stops. `max_read_bytes` reads only a part, for calibration. Memory: one chunk a thread.
    """
    make_cold(inputs)
    start = time.perf_counter()
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in inputs]
    try:
        chunks = _chunks(descriptors, setting.chunk_bytes)
        if max_read_bytes is not None:
            chunks = islice(chunks, max_read_bytes // setting.chunk_bytes)
        work = iter(list(chunks))
        with ThreadPoolExecutor(setting.readers + 1) as pool:
            writing = pool.submit(_write, scratch, output_bytes, setting.chunk_bytes)
            reading = [pool.submit(_read, work, setting.chunk_bytes) for _ in range(setting.readers)]
            read_bytes = sum(future.result() for future in reading)
            writing.result()
        seconds = time.perf_counter() - start
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        scratch.unlink(missing_ok=True)
    return FloorResult(str(setting), seconds, read_bytes, output_bytes)


def fastest_floor(
    inputs: Sequence[Path],
    scratch: Path,
    output_bytes: int,
    settings: Sequence[FloorSetting],
    max_read_bytes: int | None = None,
) -> FloorResult:
    """Measure the floor once by each setting, and return the fastest."""
    results = [measure_floor(inputs, scratch, output_bytes, setting, max_read_bytes) for setting in settings]
    return min(results, key=lambda result: result.seconds)


def calibrate(inputs: Sequence[Path], scratch: Path, output_bytes: int, *, repeat: int = 3) -> tuple[FloorSetting, ...]:
    """Return the `WAYS` fastest of `CANDIDATES` on a part of the inputs, with a like share of the output."""
    input_bytes = sum(path.stat().st_size for path in inputs)
    sample_bytes = min(input_bytes, _CALIBRATION_BYTES)
    share = output_bytes * sample_bytes // max(input_bytes, 1)
    seconds: dict[FloorSetting, list[float]] = {candidate: [] for candidate in CANDIDATES}
    for _ in range(repeat):  # rounds outside, so that a slow moment of the disk does not hit one candidate only
        for candidate, measured in seconds.items():
            measured.append(measure_floor(inputs, scratch, share, candidate, sample_bytes).seconds)
    return tuple(sorted(CANDIDATES, key=lambda candidate: statistics.median(seconds[candidate]))[:WAYS])


def _chunks(descriptors: Sequence[int], chunk_bytes: int) -> Iterator[_Chunk]:
    for descriptor in descriptors:
        for offset in range(0, os.fstat(descriptor).st_size, chunk_bytes):
            yield _Chunk(descriptor, offset)


def _read(work: Iterator[_Chunk], chunk_bytes: int) -> int:
    """Take chunks from `work`, shared by all readers (a list iterator is safe to share), until there is none."""
    buffer = mmap.mmap(-1, chunk_bytes)  # page-aligned, as O_DIRECT wants
    return sum(os.preadv(chunk.descriptor, [buffer], chunk.offset) for chunk in work)


def _write(path: Path, nbytes: int, chunk_bytes: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        offsets = iter(list(range(0, nbytes, chunk_bytes)))
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(lambda _: _write_chunks(descriptor, offsets, nbytes, chunk_bytes), range(_WRITERS)))
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_chunks(descriptor: int, offsets: Iterator[int], nbytes: int, chunk_bytes: int) -> None:
    buffer = mmap.mmap(-1, chunk_bytes)
    buffer[:] = os.urandom(chunk_bytes)  # zeros could be cheaper than data
    with memoryview(buffer) as view:
        for offset in offsets:
            aligned_bytes = min(chunk_bytes, -(-(nbytes - offset) // _ALIGNMENT) * _ALIGNMENT)
            with view[:aligned_bytes] as part:
                written = os.pwritev(descriptor, [part], offset)
            if written != aligned_bytes:
                raise OSError(f"short write: {written} of {aligned_bytes} bytes at {offset}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", type=Path, nargs="+", help="safetensors files, the base first")
    parser.add_argument("--scratch", type=Path, required=True, help="file to write and delete")
    parser.add_argument("--output-bytes", type=int, help="default: the size of the first input")
    parser.add_argument("--read-bytes", type=int, help="default: all of the inputs")
    ways = "THREADSxMIB; of several the fastest counts"
    parser.add_argument("--setting", type=FloorSetting.parse, nargs="+", default=[DEFAULT], help=ways)
    parser.add_argument("--calibrate", action="store_true", help="print the fastest settings and measure nothing else")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    output_bytes = options.output_bytes or options.inputs[0].stat().st_size
    if options.calibrate:
        print(" ".join(map(str, calibrate(options.inputs, options.scratch, output_bytes))))
        return 0
    for _ in range(options.repeat):
        result = fastest_floor(options.inputs, options.scratch, output_bytes, options.setting, options.read_bytes)
        if options.json:
            print(json.dumps(asdict(result)), flush=True)
        else:
            print(
                f"{result.seconds:.2f} s, {result.read_gb_per_second:.2f} GB/s read, {result.setting} (threads x MiB)"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
