"""What one subprocess costs, as the kernel counts it: time, memory, physical I/O; and what other programs used."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

OURS = (sys.executable, "-m", "mergepipe")
_SAMPLE_SECONDS = 0.05
_BUSY_COLUMNS = (0, 1, 2, 5, 6, 7)  # user, nice, system, irq, softirq, steal; not idle, not waiting for a disk


class BenchmarkError(Exception):
    """A program that is measured failed, or did not do what it was measured for."""


@dataclass(frozen=True, slots=True)
class ProcessCost:
    """One finished process.

    `peak_rss_bytes` counts mapped files too; `peak_anonymous_bytes` (with anonymous shared memory) does not, and is
    sampled every 50 ms. `read_bytes` and `written_bytes` went through the block layer; written pages that were still
    dirty at the exit are counted.
    """

    exit_code: int
    wall_seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    peak_anonymous_bytes: int
    read_bytes: int
    written_bytes: int


def measure(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
) -> ProcessCost:
    """Run `command` to its end, its output going to `log`.

    It is killed when it holds more than `memory_bytes` of anonymous memory, before the machine comes to a halt. The
    kernel lets a child inherit its parent's peak memory at fork: keep the calling process small.
    """
    with log.open("wb") as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=None if environment is None else {**os.environ, **environment},
        )
        sampler = _AnonymousPeak(process, memory_bytes)
        sampler.start()
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie still shows its I/O counters
            wall_seconds = time.perf_counter() - start
            io = io_counters(process.pid)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            process.kill()
            process.wait()
            raise
        finally:
            sampler.stop()
    return ProcessCost(
        exit_code=process.returncode,
        wall_seconds=wall_seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=usage.ru_maxrss * 1024,
        peak_anonymous_bytes=sampler.peak_bytes,
        read_bytes=io["read_bytes"],
        written_bytes=io["write_bytes"],
    )


def measure_checked(command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> ProcessCost:
    """Run `command` to its end as `measure` does.

    Raises:
        BenchmarkError: it ended with another exit code than 0.
    """
    cost = measure(command, log=log, environment=environment)
    if cost.exit_code:
        tail = log.read_text(errors="replace")[-2000:]
        raise BenchmarkError(f"{' '.join(command)}: exit code {cost.exit_code}\n{tail}")
    return cost


def run_quietly(command: Sequence[str], failure: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Run a command that is not measured.

    Raises:
        BenchmarkError: it failed, by which it is told as `failure`.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    if done.returncode:
        raise BenchmarkError(f"{failure}:\n{done.stderr[-1000:]}")


def pip(command: str, *arguments: str) -> None:
    """Download or install wheels without what they require, the last argument among them."""
    options = ("--quiet", "--no-deps", "--only-binary=:all:")
    run_quietly([sys.executable, "-m", "pip", command, *options, *arguments], f"{arguments[-1]} could not be had")


def available_memory_bytes(meminfo: str) -> int:
    """Return the memory that programs may still take without swapping, from the text of /proc/meminfo."""
    lines = (line.split() for line in meminfo.splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:")


def io_counters(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds since some moment: by the clock, of all busy processors, and of this process and its ended children."""

    wall: float
    busy: float
    ours: float

    @classmethod
    def read(cls) -> Clocks:
        times = os.times()
        ours = times.user + times.system + times.children_user + times.children_system
        return cls(time.monotonic(), busy_seconds(Path("/proc/stat").read_text()), ours)


def busy_seconds(stat: str, ticks_per_second: int = os.sysconf("SC_CLK_TCK")) -> float:
    """Return the seconds that all processors were busy, from the text of /proc/stat."""
    columns = stat.partition("\n")[0].split()[1:]
    return sum(int(columns[number]) for number in _BUSY_COLUMNS) / ticks_per_second


def processors_of_others(before: Clocks, after: Clocks) -> float:
    """Return the mean number of processors that other programs used in between; counters round, so at least 0."""
    wall = after.wall - before.wall
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0.0, others / wall) if wall > 0 else 0.0


class _AnonymousPeak(threading.Thread):
    """Samples the anonymous memory of a process until stopped; kills it where it has more than `most_bytes`."""

    def __init__(self, process: subprocess.Popen[bytes], most_bytes: int | None) -> None:
        super().__init__(daemon=True)
        self.peak_bytes = 0
        self._process = process
        self._most_bytes = most_bytes
        self._status = Path(f"/proc/{process.pid}/status")
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            self.peak_bytes = max(self.peak_bytes, self._sample())
            if self._most_bytes is not None and self.peak_bytes > self._most_bytes:
                self._process.kill()

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def _sample(self) -> int:
        try:
            lines = self._status.read_text().splitlines()
        except OSError:  # reaped between two samples
            return 0
        # an anonymous shared mapping (mmap's default in Python) is counted as shmem
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))
