"""Part `models`: scaling in K again on larger models, whose experts are packed where the disk is too small for them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.reproduce.family_recipes import PAPER_BUDGET_SHARE, PAPER_OPERATORS, SYNTHETIC_TEXT, PaperMerge
from benchmarks.reproduce.pages import ERROR_TEXT, Figure, Page, Series, Table, cost_cells, gb, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Entry, Results
from benchmarks.reproduce.sizes import SHAPES, Size
from benchmarks.reproduce.workplace import Workplace, weight_files
from support.families import FamilyPaths, family_bytes, family_paths, write_models

_PACKED_SHARE = 0.25  # of a raw expert's bytes, generously: those of 8B take 0.233
_TOLD = "ties"  # the stored results have the others too, which take less time
_AT_ONCE = 2  # raw experts that are on the disk while they are packed


@dataclass(frozen=True, slots=True)
class _Model:
    """A shape of families, numbers of experts, and whether each is packed as soon as it is written."""

    shape: str
    ks: tuple[int, ...]
    is_packed: bool = False

    @property
    def nbytes(self) -> int:
        return family_bytes(SHAPES[self.shape], 0)

    @property
    def disk_bytes(self) -> int:
        """The most that is on the disk, or asked for: while experts are packed, or beside two outputs."""
        n_experts = max(self.ks)
        if not self.is_packed:
            return (1 + n_experts + 2) * self.nbytes
        room = self.nbytes  # packing asks for as much as the expert takes raw
        return (1 + _AT_ONCE) * self.nbytes + int((n_experts - _AT_ONCE) * _PACKED_SHARE * self.nbytes) + room


_1_7B = _Model("1.7b", (2, 4, 8, 12))
_3B = _Model("3b", (2, 4))
_8B = _Model("8b", (2, 4), is_packed=True)
_MODELS: Mapping[str, Sequence[_Model]] = MappingProxyType(
    {  # by size
        "toy": (_Model("tiny", (2,)), _Model("demo", (2, 3), is_packed=True)),
        "demo": (_Model("demo", (2, 4)),),
        "small": (_Model("small", (2, 4, 8, 12)),),
        "0.6b": (_Model("0.6b", (2, 4, 8, 12)),),
        "1.7b": (_1_7B,),
        "8b": (_1_7B, _3B, _8B),
    }
)


def _needs(size: Size) -> Needs:
    models = _MODELS[size.name]
    merged = sum(len(PAPER_OPERATORS) * sum(m.ks) * m.nbytes * (2 + size.repeats) for m in models)
    written = sum((1 + max(m.ks)) * m.nbytes for m in models)
    return Needs(max(m.disk_bytes for m in models), merged / 60e9 + written / 9e9)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    for model in _MODELS[size.name]:
        family = _Family(place.within(model.shape), model)
        for k in model.ks:
            for operator in PAPER_OPERATORS:
                key = f"{model.shape}/{operator}/{k}"
                results.measure(f"{key}/full", partial(family.in_full, operator, k))
                results.measure(f"{key}/budget", partial(family.under_the_budget, operator, k, size.repeats))
        family.place.remove()


@dataclass(frozen=True, slots=True)
class _Family:
    """The family of a model in a workplace of its own, written when the first merge needs it."""

    place: Workplace
    model: _Model

    def in_full(self, operator: str, k: int) -> dict[str, Any]:
        paths = self._paths()
        return self._entry(paths, PaperMerge(self.place, paths, operator, k).in_full())

    def under_the_budget(self, operator: str, k: int, repeats: int) -> dict[str, Any]:
        paths = self._paths()
        merge = PaperMerge(self.place, paths, operator, k)
        return self._entry(paths, merge.under_the_budget(self.model.nbytes, repeats))

    def _entry(self, paths: FamilyPaths, measured: Mapping[str, Any]) -> dict[str, Any]:
        stored_bytes = sum(file.stat().st_size for file in weight_files(paths.experts)) // len(paths.experts)
        return {
            "model_bytes": self.model.nbytes,
            "stored_expert_bytes": stored_bytes,
            "is_packed": self.model.is_packed,
            **measured,
        }

    def _paths(self) -> FamilyPaths:
        n_experts = max(self.model.ks)
        if not self.model.is_packed:
            return self.place.family(self.model.shape, n_experts)
        root = self.place.folder / "family"
        raw = family_paths(root, n_experts)
        if not (root / "written").exists():
            shutil.rmtree(root, ignore_errors=True)
            self._write_packed(root, n_experts)
            (root / "written").touch()
        return FamilyPaths(raw.base, tuple(root / "packed" / expert.name for expert in raw.experts))

    def _write_packed(self, root: Path, n_experts: int) -> None:
        shape = SHAPES[self.model.shape]
        (base,) = write_models(root, shape, [0])
        for first in range(1, n_experts + 1, _AT_ONCE):
            experts = write_models(root, shape, range(first, min(first + _AT_ONCE, n_experts + 1)))
            self.place.ours("pack", base, *experts, "--out", root / "packed", "--home", self.place.folder / "home-pack")
            for expert in experts:
                shutil.rmtree(expert)


def _page(results: Results) -> Page:
    shapes = list(dict.fromkeys(key.split("/")[0] for key in results.entries))
    told = [_ToldModel(results, shape) for shape in shapes]
    body: list[str | Table | Figure] = [
        SYNTHETIC_TEXT,
        f"*GB read* are counted by the kernel for the whole process; RSS is its largest memory. {ERROR_TEXT}",
    ]
    for model in told:
        body += [f"## {model.shape}", model.text(), model.table()]
    body.append(_error_figure(told))
    packed = any(model.is_packed for model in told)
    meaning = (
        "**Larger models behave like small ones: what is read is what the budget says, and on one machine time goes"
        f" with the bytes{'; packed experts make the same budget go further' if packed else ''}.**"
        + "".join(model.meaning() for model in told)
        + (_TWO_MACHINES if any("cpu" in entry for entry in results.entries.values()) else "")
    )
    return Page("Scaling in the size of the model", meaning, tuple(body))


class _ToldModel:
    """The stored merges of one model."""

    def __init__(self, results: Results, shape: str) -> None:
        self.shape = shape
        self._results = results
        self._entries: dict[str, dict[tuple[str, int], Entry]] = {"full": {}, "budget": {}}
        for key, entry in results.entries.items():
            of_shape, operator, k, kind = key.split("/")
            if of_shape == shape:
                self._entries[kind][operator, int(k)] = entry

    @property
    def is_packed(self) -> bool:
        return any(entry["is_packed"] for entry in self._entries["full"].values())

    def errors(self, operator: str) -> dict[int, float]:
        """The error under the budget by number of experts."""
        return self._under_the_budget(operator, "error")

    def _under_the_budget(self, operator: str, field: str) -> dict[int, float]:
        merges = self._entries["budget"].items()
        return {k: float(entry[field]) for (name, k), entry in merges if name == operator}

    def meaning(self) -> str:
        """Tell how time and error grow with the experts, as far as they are measured."""
        told = self._growth("ties")
        return f" {self.shape}: {told}." if told else ""

    def _growth(self, operator: str) -> str:
        times, errors = self._under_the_budget(operator, self._results.clock), self.errors(operator)
        name = PAPER_OPERATORS[operator]
        if not times:
            return ""
        first, last = min(times), max(times)
        if first == last:
            return f"{name} of {last} experts has an error of {errors[last]:.3f}"
        told = f"errors {errors[first]:.3f} and {errors[last]:.3f}"
        if len({self._entries["budget"][operator, k].get("cpu") for k in (first, last)}) > 1:
            return f"{name} of {first} and {last} experts has {told}"
        time = f"{times[last] / times[first]:.2f} times the {self._results.clock_name} of {first}"
        return f"{name} of {last} experts takes {time}, {told}"

    def text(self) -> str:
        entry = next(iter(self._entries["full"].values()))
        model_bytes, stored_bytes = int(entry["model_bytes"]), int(entry["stored_expert_bytes"])
        budget = f"budget {gb(PAPER_BUDGET_SHARE * model_bytes)} GB, {percent(PAPER_BUDGET_SHARE, 1)} of a raw expert"
        packed = (
            f"; experts are packed, and take {gb(stored_bytes)} GB each ({percent(stored_bytes / model_bytes, 1)})"
            if self.is_packed
            else ""
        )
        blocks = "2 Mi" if self.is_packed else "256 Ki"
        told = [cell for row in self.table().rows for cell in row]
        busy = " Times with ~: other programs used much of the processors." if any("~" in cell for cell in told) else ""
        cpus = {entry["cpu"] for entries in self._entries.values() for entry in entries.values() if "cpu" in entry}
        elsewhere = f" Times with * are those of {' and '.join(sorted(cpus))}." if cpus else ""
        return f"A model has {gb(model_bytes)} GB; {budget}{packed}; blocks of {blocks} elements.{busy}{elsewhere}"

    def table(self) -> Table:
        """The merges of the fewest and of the most experts: the figure and the stored results have all."""
        full, budget = (self._entries[kind] for kind in ("full", "budget"))
        rows = []
        ks = sorted({k for operator, k in (*full, *budget) if operator == _TOLD})
        for k in dict.fromkeys((*ks[:1], *ks[-1:])):
            merges = [of_kind.get((_TOLD, k)) for of_kind in (full, budget)]
            error = f"{merges[1]['error']:.3f}" if merges[1] is not None else ""
            rows.append((str(k), *(cell for entry in merges for cell in self._cells(entry)), error))
        columns = (f"{what}, {how}" for how in ("in full", "budget") for what in ("GB read", "s", "CPU s", "RSS MiB"))
        return Table((f"K, {PAPER_OPERATORS[_TOLD]}", *columns, "error"), tuple(rows))

    def _cells(self, entry: Entry | None) -> tuple[str, ...]:
        read = "" if entry is None else gb(entry["kernel_read_bytes"])
        seconds, cpu_seconds, _, rss = cost_cells(self._results, entry)
        return (read, seconds, cpu_seconds, rss)


def _error_figure(told: Sequence[_ToldModel]) -> Figure:
    series = []
    for model in told:
        for operator, name in PAPER_OPERATORS.items():
            errors = dict(sorted(model.errors(operator).items()))
            label, xs = f"{name}, {model.shape}", tuple(map(float, errors))
            series.append(Series(label, xs, tuple(errors.values()), dashed=model is not told[0]))
    return Figure(
        "models-error", "Error under the fixed budget", "experts K", "error over what the full merge changes",
        tuple(series),
    )  # fmt: skip


_TWO_MACHINES = (
    " Rows with * were measured on another processor, which decodes packed experts more slowly: their times do not"
    " compare with those of rows without. All rows have yet to be measured on one machine."
)

PART = Part(
    "models", "the same operators and budget on larger models, whose experts are packed to fit", _needs, _measure,
    _page, tells_beginnings=True,
)  # fmt: skip
