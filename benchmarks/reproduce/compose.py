"""Part `compose`: checkpoints composed of 2 to 35 others, averaged and exported, beside loading one and LLMTailor."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.floor import make_cold, measure_floor
from benchmarks.process import BenchmarkError
from benchmarks.reproduce.pages import Figure, Page, Series, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace, training_python
from benchmarks.tailor import N_UNITS, Pattern, files_of, make_tree, patterns, run_pattern
from benchmarks.tailor_tree import checkpoint_name

_RANKS = 4
_ALL_SOURCES = (2, 8, 18, N_UNITS)
_AVERAGED = 10
_TREES: Mapping[str, Mapping[float, Sequence[int]]] = MappingProxyType(
    {  # by size: GB of a checkpoint, and how many are there to compose from
        "toy": {0.02: (2,)},
        "demo": {0.1: (2, 8)},
        "small": {0.1: _ALL_SOURCES},
        "0.6b": {0.5: _ALL_SOURCES},
        "1.7b": {0.5: _ALL_SOURCES, 2.0: (2, 8, 18)},
        "8b": {0.5: _ALL_SOURCES, 2.0: (2, 8, 18), 8.0: (2,), 16.0: (2,)},
    }
)
_ENGINE_GB = 2.0  # DeepSpeed's engine takes about three times a checkpoint's bytes of memory
_READ, _TORCH, _DEEPSPEED, _SCRIPT = "plain read", "torch.load", "DeepSpeed", "zero_to_fp32"
_NOT_COMPOSED = ("export", "average")
_BASELINES = {
    _READ: "past the page cache",
    _TORCH: "of file after file in one process",
    _DEEPSPEED: f"into an engine of {_RANKS} ranks, without building it",
    _SCRIPT: "is DeepSpeed's script, to float32 as *export*",
}


def _needs(size: Size) -> Needs:
    trees = _TREES[size.name]
    disk_bytes = max((max(counts) + 2) * gb * 1e9 for gb, counts in trees.items())
    written_gb = sum((max(counts) + 2) * gb for gb, counts in trees.items())
    return Needs(int(disk_bytes), written_gb / 6 + len(trees) * len(_ALL_SOURCES) * size.repeats)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    for gb, counts in _TREES[size.name].items():
        tree = _Tree(place.folder / f"checkpoints-{gb:g}", gb, max(counts))
        for name, measured in _runs_of(tree, counts, has_frameworks=not size.is_toy):
            for repeat in range(size.repeats):
                results.measure(f"{gb:g}/{name}/{repeat}", measured)
        shutil.rmtree(tree.scratch, ignore_errors=True)


def _runs_of(
    tree: _Tree, counts: Sequence[int], *, has_frameworks: bool
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Name what is measured on one tree: loading one, then every pattern."""
    baselines: dict[str, Callable[[], dict[str, Any]]] = {_READ: tree.read}
    if has_frameworks:
        baselines[_TORCH] = tree.load_by_torch
    if has_frameworks and tree.size_gb <= _ENGINE_GB:
        baselines |= {way: partial(tree.load_by_deepspeed, way) for way in (_DEEPSPEED, _SCRIPT)}
    yield from baselines.items()
    averaged = _AVERAGED if max(counts) >= _AVERAGED else 2
    for pattern in patterns(counts, [averaged]):
        yield f"{pattern.name}/{pattern.n_sources}", partial(tree.compose, pattern)


class _Tree:
    """Checkpoints of one size in `scratch`, which are written when the first is needed."""

    def __init__(self, scratch: Path, size_gb: float, n_checkpoints: int) -> None:
        self.scratch = scratch
        self.size_gb = size_gb
        self._n_checkpoints = n_checkpoints

    def compose(self, pattern: Pattern) -> dict[str, Any]:
        self._make()
        return self._entry(**run_pattern(pattern, self.scratch))

    def read(self) -> dict[str, Any]:
        newest, before = files_of(self._newest()), time.process_time()
        seconds, _ = measure_floor(newest, self.scratch / "floor", 0)
        return self._entry(baseline=_READ, seconds=seconds, cpu_seconds=time.process_time() - before)

    def load_by_torch(self) -> dict[str, Any]:
        newest = self._newest()
        make_cold([newest])
        return self._entry(baseline=_TORCH, **self._framework("torch", newest))

    def load_by_deepspeed(self, way: str) -> dict[str, Any]:
        self._make()
        saved = self.scratch / "saved"
        if not (saved / "latest").exists():  # which DeepSpeed writes last
            shutil.rmtree(saved, ignore_errors=True)
            self._framework("deepspeed-save", saved)
        make_cold([saved])
        return self._entry(baseline=way, **self._framework(way.lower(), saved))

    def _entry(self, **measured: Any) -> dict[str, Any]:
        return {"size_gb": self.size_gb, **measured}

    def _newest(self) -> Path:
        self._make()
        return self.scratch / checkpoint_name(self._n_checkpoints - 1)

    def _make(self) -> None:
        if not (self.scratch / "made").exists():
            shutil.rmtree(self.scratch, ignore_errors=True)
            self.scratch.mkdir(parents=True)
            make_tree(self.scratch, self.size_gb, self._n_checkpoints, _RANKS)
            (self.scratch / "made").touch()

    def _framework(self, way: str, directory: Path) -> dict[str, Any]:
        result = self.scratch / "loaded.json"
        result.write_text("{}")
        command = [training_python(), "-m", "benchmarks.load_one", way, directory, self.size_gb, _RANKS, result]
        if subprocess.run([*map(str, command)], check=False).returncode:
            raise BenchmarkError(f"{way} of {directory} failed; what it printed is above")
        loaded: dict[str, Any] = json.loads(result.read_text())
        return loaded


Composed = dict[tuple[str, int], list[Entry]]


class ComposeTimes:
    """The stored runs of checkpoints of one size."""

    def __init__(self, results: Results, size_gb: float) -> None:
        self.size_gb = size_gb
        self.clock, self.clock_name = results.clock, results.clock_name
        self.loads: dict[str, list[Entry]] = {}
        self.composed: Composed = {}
        for entry in (entry for entry in results.entries.values() if entry["size_gb"] == size_gb):
            if "baseline" in entry:
                self.loads.setdefault(entry["baseline"], []).append(entry)
            else:
                self.composed.setdefault((entry["pattern"], entry["n_sources"]), []).append(entry)
        self._compositions = [runs for (name, _), runs in self.composed.items() if name not in _NOT_COMPOSED]

    def time(self, pattern: str, n_sources: int) -> float | None:
        """Return the middle time by the clock of the results."""
        entries = self.composed.get((pattern, n_sources))
        return None if entries is None else _middle(entries, self.clock)

    def loading(self, way: str = _DEEPSPEED) -> float | None:
        """Return the middle time of loading one checkpoint, where it was measured."""
        entries = self.loads.get(way)
        return None if entries is None else _middle(entries, self.clock)

    def over_loading(self, seconds: float | None) -> str:
        """Tell a time over that of DeepSpeed's load; nothing where that was not measured."""
        loading = self.loading()
        return "" if seconds is None or loading is None else f"{seconds / loading:.2f}"

    def throughput(self, pattern: str, n_sources: int) -> str:
        """Tell the GB that are written in a second; nothing where that was not measured."""
        entries = self.composed.get((pattern, n_sources))
        return "" if entries is None else f"{self.output_bytes / 1e9 / _middle(entries, 'seconds'):.2f}"

    def told(self) -> list[tuple[str, int]]:
        """The patterns and numbers of sources that stand in the table; the stored results have all."""
        most = {name: max(n for of, n in self.composed if of == name) for name, _ in self.composed}
        return [(name, n) for name, n in self.composed if n in (2, most[name])]

    @property
    def sources(self) -> list[int]:
        return sorted({n for name, n in self.composed if name == "consecutive"})

    @property
    def most_read(self) -> float:
        """The most bytes that a composition read, over those that it wrote."""
        return max(_middle(entries, "read_bytes") for entries in self._compositions) / self.output_bytes

    @property
    def output_bytes(self) -> float:
        return _middle(self._compositions[0], "written_bytes")


def compose_times(results: Results) -> list[ComposeTimes]:
    """Return the runs by size of checkpoint, smallest first."""
    return [ComposeTimes(results, gb) for gb in sorted({entry["size_gb"] for entry in results.entries.values()})]


def _middle(entries: Sequence[Entry], field: str) -> float:
    return float(sorted(entry[field] for entry in entries)[len(entries) // 2])


def _page(results: Results) -> Page:
    times = compose_times(results)
    body = (_about(results), _table(results, times), _figure(results, times[0]))
    return Page("Composing training checkpoints", _meaning(times), body)


def _meaning(times: Sequence[ComposeTimes]) -> str:
    read = max(of_size.most_read for of_size in times)
    growths = [told for of_size in times if (told := _growth(of_size))]
    growth = f" From {'; from '.join(growths)}." if growths else ""
    return (
        "**Composing reads and writes one checkpoint, however many the layers come from.** At most it read"
        f" {read:.2f} times the bytes of one.{growth}"
        f"{_beside_loading([of_size for of_size in times if of_size.loading() is not None])}{_beside_torch(times[-1])}"
    )


def _growth(times: ComposeTimes) -> str:
    """Tell the time from the most sources over that from two, where more than two were there."""
    many = max(times.sources)
    pair, most = times.time("consecutive", 2), times.time("consecutive", many)
    if many == 2 or pair is None or most is None:
        return ""
    return f"{many} sources it takes {most / pair:.2f} times the {times.clock_name} of 2 ({times.size_gb:g} GB each)"


def _beside_loading(times: Sequence[ComposeTimes]) -> str:
    """Tell parity of two of the largest checkpoints that DeepSpeed loaded beside that load."""
    over = times[-1].over_loading(times[-1].time("parity", 2)) if times else ""
    if not over:
        return ""
    return (
        f" Parity of two checkpoints of {times[-1].size_gb:g} GB takes {over} times the {times[-1].clock_name} in which"
        f" DeepSpeed loads one, {times[-1].throughput('parity', 2)} GB/s; LLMTailor's takes 61 times its own load, 0.11"
        " GB/s (112.5 GB), and 292 times, 0.07 GB/s (17.3 GB)."
    )


def _beside_torch(times: ComposeTimes) -> str:
    """Tell parity of two of the largest checkpoints beside `torch.load` of one, where no engine of them fits."""
    parity, load = times.time("parity", 2), times.loading(_TORCH)
    if parity is None or load is None or times.loading() is not None:
        return ""
    over = f"{parity / load:.2f} times the {times.clock_name} of `torch.load` of one"
    return f" Of {times.size_gb:g} GB each, it takes {over}."


def _about(results: Results) -> str:
    loads = {entry.get("baseline") for entry in results.entries.values()}
    told = "; ".join(f"*{name}* {what}" for name, what in _BASELINES.items() if name in loads)
    return (
        "Synthetic ZeRO-3 checkpoints of Llama-3-8B's shapes, every width scaled down, which keeps its 35 units: 32"
        f" layers, embeddings, norm and head; {_RANKS} ranks. *consecutive* takes units in runs, *parity* and *in turn*"
        " one by one, *filter* all but the outer four layers from the older, *average* means weights and moments of"
        " all, *export* makes a model of the float32 masters. The floor reads and writes as many bytes at the same"
        f" time. Loading one: {told}; without imports, while composing counts the whole process."
        f" {_memory(results)} {_not_run(results.size['name'])}"
    )


def _memory(results: Results) -> str:
    most = max(entry["peak_rss_bytes"] for entry in results.entries.values() if "pattern" in entry)
    return f"No composition, average or export took more than {most / 2**20:.0f} MiB of memory."


def _not_run(size_name: str) -> str:
    """Tell which of the papers' numbers of sources, and which sizes, are left out here."""
    trees = _TREES[size_name]
    gone = [f"{gb:g} GB" for gb in _TREES["8b"] if gb not in trees and gb > max(trees)]
    fewer = [f"{gb:g} GB from more than {max(counts)}" for gb, counts in trees.items() if max(counts) < N_UNITS]
    left_out = [*([f"checkpoints of {', '.join(gone)} (larger sizes of `make reproduce`)"] if gone else []), *fewer]
    engine = (
        f" DeepSpeed's engine of more than {_ENGINE_GB:g} GB does not fit the memory."
        if max(trees) > _ENGINE_GB
        else ""
    )
    return (f"Not run, for the disk: {'; '.join(left_out)}." if left_out else "") + engine


def _table(results: Results, sizes: Sequence[ComposeTimes]) -> Table:
    """What loading one and composing take by size; of numbers of sources the fewest and the most, by pattern."""
    rows = []
    for name in dict.fromkeys(name for times in sizes for name in times.loads):
        loads = (times.loading(name) for times in sizes)
        cells = (cell for load in loads for cell in ("" if load is None else f"{load:.2f}", ""))
        rows.append((f"load one: {name}", "1", *cells))
    patterns = sorted({key for times in sizes for key in times.told()}, key=lambda key: (key[1], key[0]))
    for key in patterns:
        cells = (cell for times in sizes for cell in _cells(results, times, times.composed.get(key)))
        rows.append((key[0], str(key[1]), *cells))
    columns = (f"{what}, {times.size_gb:g} GB" for times in sizes for what in (times.clock_name, "x floor"))
    return Table(("pattern", "sources", *columns), tuple(rows))


def _cells(results: Results, times: ComposeTimes, entries: Sequence[Entry] | None) -> tuple[str, str]:
    if entries is None:
        return ("", "")
    over = "" if results.is_busy else f"{_middle(entries, 'seconds') / _middle(entries, 'floor_seconds'):.2f}"
    return (f"{_middle(entries, times.clock):.2f}", over)


def _figure(results: Results, times: ComposeTimes) -> Figure:
    series = []
    for label, names in (("runs of units", ("consecutive",)), ("units in turn", ("parity", "in turn"))):
        points = {n: times.time(name, n) for name, n in times.composed if name in names}
        values = {n: seconds for n, seconds in points.items() if seconds is not None}
        series.append(Series(label, tuple(map(float, values)), tuple(values.values())))
    title = f"Time to compose one checkpoint of {times.size_gb:g} GB"
    return Figure("compose", title, "source checkpoints", results.clock_name, tuple(series))


PART = Part(
    "compose", "checkpoints composed of 2 to 35 others, averaged and exported, beside loading one (LLMTailor)", _needs,
    _measure, _page,
)  # fmt: skip
