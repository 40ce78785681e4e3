"""The I/O floor: the seconds of direct reads of 4 MiB by 8 threads beside one writer.

A ratio below 1 means that the disk, or the read-ahead, was faster.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

READERS, WRITERS = 8, 2
CHUNK_BYTES = 4 << 20
_ALIGNMENT = 4096


def make_cold(paths: Iterable[Path]) -> None:
    """Drop every file of `paths` (directories are walked) from the page cache, so that the next read is physical."""
    for file in _files(paths):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file())
        else:
            yield path


def floor_seconds(inputs: Sequence[Path], scratch: Path, output_bytes: int, read_bytes: int | None = None) -> float:
    """Measure the floor in a process of its own, so that its buffers do not count as anybody's memory."""
    command = [sys.executable, "-m", "benchmarks.floor", str(scratch), str(output_bytes), str(read_bytes or "all")]
    done = subprocess.run([*command, *map(str, inputs)], stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def measure_floor(
    inputs: Sequence[Path], scratch: Path, output_bytes: int, max_read_bytes: int | None = None
) -> tuple[float, int]:
    """Read `inputs` once with O_DIRECT while `output_bytes` are written to `scratch` with O_DIRECT and synced.

    Return the seconds and the bytes that were read. The output is allocated before it is written. The clock covers
    opening, both streams and the fsync; `scratch` is deleted after it stops. `max_read_bytes` reads only so many, to a
    whole chunk. Memory: one chunk a thread.
    """
    make_cold(inputs)
    start = time.perf_counter()
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path in inputs]
    try:
        offsets = [(fd, at) for fd in descriptors for at in range(0, os.fstat(fd).st_size, CHUNK_BYTES)]
        work = iter(offsets if max_read_bytes is None else offsets[: max_read_bytes // CHUNK_BYTES])
        with ThreadPoolExecutor(READERS + 1) as pool:
            writing = pool.submit(_write, scratch, output_bytes)
            reading = [pool.submit(_read, work) for _ in range(READERS)]
            read_bytes = sum(future.result() for future in reading)
            writing.result()
        seconds = time.perf_counter() - start
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        scratch.unlink(missing_ok=True)
    return seconds, read_bytes


def _read(work: Iterator[tuple[int, int]]) -> int:
    """Take chunks from `work`, shared by all readers (a list iterator is safe to share), until there is none."""
    buffer = mmap.mmap(-1, CHUNK_BYTES)  # page-aligned, as O_DIRECT wants
    return sum(os.preadv(descriptor, [buffer], offset) for descriptor, offset in work)


def _write(path: Path, nbytes: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        if nbytes:
            os.posix_fallocate(descriptor, 0, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
        offsets = iter(list(range(0, nbytes, CHUNK_BYTES)))
        with ThreadPoolExecutor(WRITERS) as pool:
            list(pool.map(lambda _: _write_chunks(descriptor, offsets, nbytes), range(WRITERS)))
        os.ftruncate(descriptor, nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_chunks(descriptor: int, offsets: Iterator[int], nbytes: int) -> None:
    buffer = mmap.mmap(-1, CHUNK_BYTES)
    buffer[:] = os.urandom(CHUNK_BYTES)  # zeros could be cheaper than data
    with memoryview(buffer) as view:
        for offset in offsets:
            aligned_bytes = min(CHUNK_BYTES, -(-(nbytes - offset) // _ALIGNMENT) * _ALIGNMENT)
            with view[:aligned_bytes] as part:
                written = os.pwritev(descriptor, [part], offset)
            if written != aligned_bytes:
                raise OSError(f"short write: {written} of {aligned_bytes} bytes at {offset}")


def main(scratch: str, output_bytes: str, read_bytes: str, *inputs: str) -> None:
    """Print the seconds of a floor."""
    limit = None if read_bytes == "all" else int(read_bytes)
    print(measure_floor(list(map(Path, inputs)), Path(scratch), int(output_bytes), limit)[0])


if __name__ == "__main__":
    main(*sys.argv[1:])
