"""Part `memory`: merges of two raw experts in full, under caps on buffers: peak memory, and time over the floor."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.reproduce.family_recipes import PAPER_OPERATORS, SYNTHETIC_TEXT, inputs_of, write_recipe
from benchmarks.reproduce.pages import Page, Table, gb
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace
from support.families import FamilyPaths

_K = 2
_MIB = 2**20
_CAPS_MIB = (4096, 1024)  # what `--memory` is without being given, and a quarter
_ALLOWED_OVER_CAP = 1.10


def _needs(size: Size) -> Needs:
    family_bytes = (_K + 1) * size.model_bytes
    merges = len(PAPER_OPERATORS) * len(_CAPS_MIB) * 2  # each with its floor
    minutes = merges * (family_bytes + size.model_bytes) / 1e9 / 60 + family_bytes / 4e9
    return Needs(family_bytes + size.model_bytes, minutes)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    family = place.family(size.shape, _K)
    for operator in PAPER_OPERATORS:
        recipe = write_recipe(place, family, operator, _K)
        for cap_mib in _CAPS_MIB:
            results.measure(f"{operator}/{cap_mib}", partial(_capped, place, family, recipe, cap_mib))


def _capped(place: Workplace, family: FamilyPaths, recipe: Path, cap_mib: int) -> dict[str, Any]:
    return place.merge(
        recipe, inputs_of(family, _K), "--no-catalog", "--memory", f"{cap_mib}MiB",
        has_floor=True,
    )  # fmt: skip


def _page(results: Results) -> Page:
    model_gb = gb(results.size["model_bytes"])
    over = max(_over_cap(results, key) for key in results.entries)
    meaning = (
        f"**The memory of a merge is the cap that you give it, not the size of the models.** Two experts of"
        f" {model_gb} GB and their base are merged in full within {over:.2f} times the cap of `--memory` at"
        f" the most (target {_ALLOWED_OVER_CAP:.2f}: {'met' if over <= _ALLOWED_OVER_CAP else 'not met'});"
        " the interpreter and the compiled kernels are in it, which count"
        " [under small caps](../guide/troubleshooting.md#it-needs-too-much-memory-or-disk)."
    )
    header = ("operator", "cap MiB", "peak RSS MiB", "RSS over cap", "kernel read GB", "s", "CPU s", "x floor")
    rows = tuple(_row(results, key, entry) for key, entry in results.entries.items())
    return Page("Memory of a merge in full", meaning, (SYNTHETIC_TEXT, Table(header, rows), _note()))


def _note() -> str:
    return (
        "Cold files, without a catalog. Peak RSS and bytes are the kernel's counts of the process; the floor reads and"
        " writes as many bytes past the page cache."
    )


def _cap_bytes(key: str) -> int:
    return int(key.split("/")[1]) * _MIB


def _over_cap(results: Results, key: str) -> float:
    return float(results[key]["peak_rss_bytes"]) / _cap_bytes(key)


def _row(results: Results, key: str, entry: Entry) -> tuple[str, ...]:
    return (
        PAPER_OPERATORS[key.split("/")[0]], str(_cap_bytes(key) // _MIB), f"{entry['peak_rss_bytes'] / _MIB:.0f}",
        f"{_over_cap(results, key):.2f}", gb(entry["kernel_read_bytes"]), f"{entry['seconds']:.2f}",
        f"{entry['cpu_seconds']:.2f}", results.over_floor(entry),
    )  # fmt: skip


PART = Part("memory", "two experts merged in full under caps on memory", _needs, _measure, _page)
