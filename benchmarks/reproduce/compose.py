"""Part `compose`: training checkpoints composed of 2 to 32 others, with LLMTailor's times beside ours."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.floor import DEFAULT
from benchmarks.reproduce.pages import Figure, Page, Series, Table
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace
from benchmarks.tailor import Bench, Pattern, make_tree, patterns

_RANKS = 4
_CHECKPOINT_GB = {"toy": 0.02, "demo": 0.1, "small": 0.1, "0.6b": 0.5, "1.7b": 1.0, "8b": 2.0}
_SOURCES = {"toy": (2,), "8b": (2, 8)}
_ALL_SOURCES = (2, 8, 16, 32)


def _sources(size: Size) -> Sequence[int]:
    return _SOURCES.get(size.name, _ALL_SOURCES)


def _needs(size: Size) -> Needs:
    total_bytes = int((max(_sources(size)) + 2) * _CHECKPOINT_GB[size.name] * 1e9)
    return Needs(total_bytes, total_bytes / 1e9 / 6 + len(_sources(size)) * size.repeats)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    scratch = place.folder / "checkpoints"
    for pattern in patterns(_sources(size)):
        for repeat in range(size.repeats):
            call = partial(_compose, scratch, _CHECKPOINT_GB[size.name], max(_sources(size)), pattern)
            results.measure(f"{pattern.name}/{pattern.n_sources}/{repeat}", call)
    shutil.rmtree(scratch, ignore_errors=True)


def _compose(scratch: Path, size_gb: float, n_checkpoints: int, pattern: Pattern) -> dict[str, Any]:
    if not (scratch / "made").exists():
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        make_tree(scratch, size_gb, n_checkpoints, _RANKS)
        (scratch / "made").touch()
    return asdict(Bench(scratch, Path(sys.executable).parent / "mergepipe", (DEFAULT,)).run(pattern))


def _runs(results: Results) -> dict[tuple[str, int], list[Any]]:
    runs: dict[tuple[str, int], list[Any]] = {}
    for entry in results.entries.values():
        runs.setdefault((entry["pattern"], entry["n_sources"]), []).append(entry)
    return runs


def _middle(entries: Sequence[Any], field: str) -> float:
    return float(sorted(entry[field] for entry in entries)[len(entries) // 2])


def _page(results: Results) -> Page:
    runs = _runs(results)
    composed = {key: entries for key, entries in runs.items() if not key[0].startswith("cp")}
    times = {key: _middle(entries, results.clock) for key, entries in composed.items()}
    many = max(n for _, n in composed)
    in_turn = times["in turn" if many > 2 else "parity", many] / times["consecutive", many]
    growth = times["consecutive", many] / times["consecutive", 2]
    read = max(_middle(entries, "read_bytes") for entries in composed.values()) / _output_bytes(runs)
    meaning = (
        f"**Composing reads and writes one checkpoint, however many the layers come from.** At most it read {read:.2f}"
        f" times the bytes of one. From {many} sources it takes {growth:.2f} times the {results.clock_name} of 2;"
        f" layers in turn take {in_turn:.2f} times those of layers in runs, where LLMTailor's parity takes 3.1 times as"
        f" long as its two runs."
    )
    return Page(
        "Composing training checkpoints",
        meaning,
        (_text(_output_bytes(runs)), _table(results, runs), _figure(results, composed)),
    )


def _output_bytes(runs: dict[tuple[str, int], list[Any]]) -> float:
    return _middle(next(iter(runs.values())), "written_bytes")


def _text(checkpoint_bytes: float) -> str:
    return (
        f"ZeRO-3 checkpoints of Llama-3-8B's shapes scaled down to {checkpoint_bytes / 1e9:.2f} GB, {_RANKS} ranks;"
        " what is read beyond that is structure, which does not grow with the weights. The floor reads one checkpoint"
        " while as many bytes are written. LLMTailor, Llama-3.1-8B of 112.5 GB: loading one 16.8 s; composing from 2"
        " sources 332.4 s, parity 1027.5 s, 8 sources 279.2 s, 35 sources 264.3 s."
    )


def _table(results: Results, runs: dict[tuple[str, int], list[Any]]) -> Table:
    rows = []
    for (pattern, n_sources), entries in runs.items():
        floor = _middle(entries, "floor_seconds")
        over = "" if results.is_busy else f"{_middle(entries, 'seconds') / floor:.2f}"
        rows.append(
            (
                pattern, str(n_sources), f"{_middle(entries, 'seconds'):.2f}", f"{_middle(entries, 'cpu_seconds'):.2f}",
                over, f"{_middle(entries, 'read_bytes') / 1e9:.3f}",
                f"{_middle(entries, 'written_bytes') / 1e9:.3f}", f"{_middle(entries, 'peak_rss_bytes') / 2**20:.0f}",
            )
        )  # fmt: skip
    header = ("pattern", "sources", "s", "CPU s", "x floor", "kernel read GB", "written GB", "RSS MiB")
    return Table(header, tuple(rows))


def _figure(results: Results, composed: dict[tuple[str, int], list[Any]]) -> Figure:
    series = []
    for label, names in (("runs of layers", ("consecutive",)), ("layers in turn", ("parity", "in turn"))):
        points = {n: _middle(e, results.clock) for (name, n), e in composed.items() if name in names}
        series.append(Series(label, tuple(map(float, points)), tuple(points.values())))
    title = "Time to compose one checkpoint"
    return Figure("compose", title, "source checkpoints", results.clock_name, tuple(series))


PART = Part("compose", "training checkpoints composed of 2 to 32 others (LLMTailor)", _needs, _measure, _page)
