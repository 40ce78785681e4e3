"""Stored results of one part: measured entries by key, kept after each measurement so that a run can be resumed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.process import Clocks, processors_of_others

FORMAT = "mergepipe-results/1"
DEFAULT_FOLDER = Path("docs/benchmarks/results")
DEFAULT_ANEW = Path(".bench/results")
Entry = Mapping[str, Any]
_BUSY_SHARE = 0.25  # of the processors, used by other programs


class ResultsError(Exception):
    """Stored results belong to another size."""


class Results:
    """The results of one part at one size, as JSON in a folder.

    Law: `measure` calls what it is given once for a key, in whichever process, and stores the entry before it returns.
    """

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self._content = content

    @classmethod
    def read(cls, path: Path) -> Results:
        return cls(path, json.loads(path.read_text()))

    @classmethod
    def stored(cls, folder: Path, part: str) -> Results | None:
        """Return the results of a part in a folder; None where there are none."""
        path = folder / f"{part}.json"
        return cls.read(path) if path.exists() else None

    @classmethod
    def open(cls, folder: Path, part: str, size: Mapping[str, Any], *, replace: bool = False) -> Results:
        """Open the results of `part` to add to them; those of another size give way to new ones with `replace`.

        Raises:
            ResultsError: results of another size are there.
        """
        path = folder / f"{part}.json"
        if path.exists() and not replace:
            results = cls.read(path)
            if results.size != size:
                message = (
                    f"{path}: has results of size '{results.size['name']}'; give --replace to measure '{size['name']}'"
                )
                raise ResultsError(message)
            return results
        folder.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "part": part, "size": dict(size), "machine": asdict(this_machine())}
        content["commit"] = _commit()
        return cls(path, {**content, "date": "", "is_complete": False, "entries": {}})

    @property
    def size(self) -> Mapping[str, Any]:
        size: Mapping[str, Any] = self._content["size"]
        return size

    @property
    def machine(self) -> Mapping[str, Any]:
        machine: Mapping[str, Any] = self._content["machine"]
        return machine

    @property
    def processors(self) -> str:
        """The processor of the first run, and the others that measured entries."""
        first, others = (
            str(self.machine["cpu"]),
            Counter(entry["cpu"] for entry in self.entries.values() if "cpu" in entry),
        )
        return "; ".join([first, *(f"{count} of {len(self.entries)} on {cpu}" for cpu, count in others.items())])

    @property
    def commit(self) -> str:
        return str(self._content["commit"])

    @property
    def date(self) -> str:
        return str(self._content["date"])

    @property
    def entries(self) -> Mapping[str, Entry]:
        entries: Mapping[str, Entry] = self._content["entries"]
        return entries

    @property
    def loads(self) -> list[float]:
        """The load averages before each measurement."""
        return [float(entry["load"]) for entry in self.entries.values()]

    @property
    def others(self) -> list[float]:
        """The mean number of processors that other programs used in each measurement; none where it is not stored."""
        return [float(entry["others"]) for entry in self.entries.values() if "others" in entry]

    @property
    def is_busy(self) -> bool:
        """Whether other programs had much of the machine, so that seconds by the clock say little.

        Of results without what others used, the load average is all there is, to which the benchmark adds its own.
        """
        if self.others:
            return median(self.others) > self.most_others
        return bool(self.entries) and median(self.loads) > int(self.machine["cores"]) / 2

    @property
    def most_others(self) -> float:
        """The processors that other programs may use while seconds by the clock are told."""
        return _BUSY_SHARE * int(self.machine["cores"])

    @property
    def clock(self) -> str:
        """The field of an entry to compare times by: processor seconds where the machine was busy."""
        return "cpu_seconds" if self.is_busy else "seconds"

    @property
    def clock_name(self) -> str:
        return "processor seconds" if self.is_busy else "seconds"

    def over_floor(self, entry: Entry) -> str:
        """Tell the seconds of an entry over those of its floor; nothing where the machine was busy, then or mostly."""
        if self.is_busy or entry.get("others", 0.0) > self.most_others:
            return ""
        return f"{entry['seconds'] / entry['floor_seconds']:.2f}"

    def told_seconds(self, entry: Entry, clock: str) -> str:
        """Tell the seconds of an entry by a clock.

        Those of another processor than the first run's have a star, wall seconds of a time when other programs had much
        of the machine a tilde.
        """
        is_slowed = clock == "seconds" and entry.get("others", 0.0) > self.most_others
        return f"{'~' if is_slowed else ''}{entry[clock]:.2f}{'*' if 'cpu' in entry else ''}"

    @property
    def floor_rate(self) -> float | None:
        """The middle rate at which floors read and wrote, in bytes a second; None where none was measured."""
        rates = []
        for entry in self.entries.values():
            fields = ("base_bytes", "expert_bytes", "output_bytes")
            if "floor_seconds" in entry and all(entry.get(name) is not None for name in fields):
                rates.append(sum(entry[name] for name in fields) / entry["floor_seconds"])
        return median(rates) if rates else None

    def __getitem__(self, key: str) -> Entry:
        return self.entries[key]

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def measure(self, key: str, call: Callable[[], Entry]) -> Entry:
        """Return the stored entry of `key`, else what `call` measures, with the load before and what others used.

        An entry names its processor where that is not the first run's.
        """
        if key not in self.entries:
            load, before = os.getloadavg()[0], Clocks.read()
            measured = call()
            others = processors_of_others(before, Clocks.read())
            entry = {**measured, "load": round(load, 1), "others": round(others, 2)}
            if (cpu := this_machine().cpu) != self.machine["cpu"]:
                entry["cpu"] = cpu
            self._content["entries"][key] = json.loads(json.dumps(entry))
            self._content["date"] = datetime.now(UTC).date().isoformat()
            self._write()
            print(f"{self._content['part']}: {key}", flush=True)
        return self.entries[key]

    def finish(self) -> None:
        """Record that the part was measured to its end: now there is a page of it."""
        if not self.is_complete:
            self._content["is_complete"] = True
            self._write()

    @property
    def is_complete(self) -> bool:
        return bool(self._content["is_complete"])

    def _write(self) -> None:
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self._content, indent=1) + "\n")
        partial.replace(self.path)


_OF_THE_RUN = ("load", "others")
_SAME_SHARE = 0.01


def differences(stored: Results, measured: Results) -> list[str]:
    """Compare each figure of results with the stored one; list those that differ by more than a hundredth.

    Of another size, or another number of experts, the entries with the same name are compared.
    """
    n_same, lines = 0, []
    for key in stored.entries.keys() & measured.entries.keys():
        before, now = stored[key], measured[key]
        for name in sorted(before.keys() & now.keys() - set(_OF_THE_RUN)):
            if not all(isinstance(figure, int | float) for figure in (before[name], now[name])):
                continue
            change = now[name] - before[name]
            if abs(change) <= _SAME_SHARE * abs(before[name]):
                n_same += 1
            else:
                relative = f"{change / before[name]:+.1%}" if before[name] else "from 0"
                lines.append(f"  {key} {name}: {before[name]:.6g} stored, {now[name]:.6g} now ({relative})")
    alone = stored.entries.keys() ^ measured.entries.keys()
    heading = f"{measured.path} beside {stored.path}: {n_same} figures differ by 1 % at most, {len(lines)} by more"
    if stored.size != measured.size:
        heading += f"; stored at size '{stored.size['name']}', measured at '{measured.size['name']}'"
    if alone:
        heading += f"; {len(alone)} entries are in one of them alone"
    if stored.processors != measured.processors:
        heading += f"; measured on {measured.processors}, not {stored.processors}"
    return [heading, *sorted(lines)]


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it was measured."""

    cpu: str
    cores: int
    memory_gib: float
    kernel: str
    python: str


def this_machine() -> Machine:
    """Describe this machine, without its name."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(
        cpu=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(memory_bytes / 2**30, 1),
        kernel=".".join(platform.release().split(".")[:2]),  # what comes after is the host's own
        python=platform.python_version(),
    )


def _processor() -> str:
    """The processor's name, and whether it lacks the instructions that packed experts are decoded with elsewhere."""
    fields = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    told = {name.strip(): value.strip() for name, _, value in fields}
    name = told.get("model name", platform.machine())
    return name if "avx512_vbmi2" in told.get("flags", "").split() else f"{name} without AVX-512 VBMI2"


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    except OSError:  # no git is there
        return "unknown"
    return done.stdout.strip() or "unknown"
