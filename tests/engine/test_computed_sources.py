"""Experts that are not stored as they are merged: computed, encoded on their base, deltas, untouched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import (
    NO_TURNS,
    BaseBytes,
    ComputedTensor,
    Fetch,
    FetchOnBase,
    LeveledTensor,
    Source,
    TensorEntry,
    Turns,
    Unchanged,
)
from mergepipe.checkpoints.open_files import pin_files
from mergepipe.core.blocks import BF16, F32, DType, Span
from mergepipe.engine.make_part import make_part
from mergepipe.engine.segments import full_access
from mergepipe.engine.work import EngineOptions, MergeWork, plan_output, whole
from mergepipe.recipes.tasks import Action, MergeTask, TensorParameters
from mergepipe.storage.contract import RangeFile
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.rounding import decode, encode

N = 200_003
EXPERT = {"weight": 0.6, "density": 0.3}
SHARED: Mapping[str, Mapping[str, float | bool]] = {
    "task_arithmetic": {"normalize": False, "rescale": False, "lambda": 0.9},
    "ties": {"normalize": True, "rescale": False, "lambda": 1.0},
    "dare_ties": {"normalize": False, "rescale": True, "lambda": 1.0},
    "slerp": {"t": 0.4},
}
SMALL, LARGE = 12 << 20, 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Reversed(ComputedTensor):
    """A tensor stored back to front; fetched as float32, or as its difference from a base."""

    held: TensorEntry
    base: TensorEntry | None = None
    is_unit: bool = False

    name = "w"
    dtype: DType = F32

    @property
    def is_delta(self) -> bool:
        return self.base is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.held.shape

    @property
    def nbytes(self) -> int:
        return self.held.nbytes

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (self.held,) if self.base is None else (self.held, self.base)

    def cost_bytes(self, span: Span) -> int:
        return self.held.cost_bytes(Span(self.n_elements - span.stop, self.n_elements - span.start))

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            mirrored = Span(self.n_elements - span.stop, self.n_elements - span.start)
            found = values(files, self.held, mirrored, purpose)[::-1]
            if self.base is not None:
                found = found - values(files, self.base, span, purpose)
            out[:] = np.ascontiguousarray(found, np.float32).view(np.uint8)

        return fetch


@dataclass(frozen=True, slots=True, eq=False)
class OnBase(Reversed, LeveledTensor):
    """The same, stored as the sum with its base: it cannot be fetched without the base's bytes."""

    encoded_on: TensorEntry = field(kw_only=True)
    last_level = 1

    @property
    def files(self) -> frozenset[Location]:
        return frozenset({self.held.file})

    def exact_level(self, n_kept: int) -> int:
        return self.last_level

    def opened_on_base(self, files: Mapping[Location, RangeFile], turns: Turns = NO_TURNS) -> FetchOnBase:
        def fetch(span: Span, base: BaseBytes, out: NDArray[np.uint8], purpose: Purpose) -> None:
            mirrored = Span(self.n_elements - span.stop, self.n_elements - span.start)
            total = values(files, self.held, mirrored, purpose)[::-1]
            out[:] = np.ascontiguousarray(total - decode(base.stored.tobytes(), BF16), np.float32).view(np.uint8)

        return fetch


def values(
    files: Mapping[Location, RangeFile], entry: TensorEntry, span: Span, purpose: Purpose
) -> NDArray[np.float32]:
    """Elements of a stored tensor."""
    raw = np.empty(span.n_elements * entry.dtype.itemsize, np.uint8)
    with entry.file.local_path.open("rb") as stream:
        stream.seek(entry.offset + span.start * entry.dtype.itemsize)
        raw[:] = np.frombuffer(stream.read(len(raw)), np.uint8)
    assert files[entry.file].location == entry.file
    assert purpose in (Purpose.EXPERT, Purpose.ANALYSIS)
    return decode(raw.tobytes(), entry.dtype)


@dataclass(frozen=True, slots=True)
class Family:
    """A base and two experts in bfloat16, and the second expert in other forms."""

    base: TensorEntry
    first: TensorEntry
    second: TensorEntry
    forms: Mapping[str, Source]


def store(folder: Path, name: str, dtype: DType, stored: NDArray[np.generic]) -> TensorEntry:
    path = folder / name
    path.write_bytes(b"?" * 7 + stored.tobytes())
    return TensorEntry("w", dtype, stored.shape, Location.local(path), 7, stored.nbytes)


@pytest.fixture(name="family")
def make_family(tmp_path: Path) -> Family:
    rng = np.random.default_rng(5)
    weights = rng.standard_normal(N).astype(np.float32)
    base, first, second = (
        encode(weights + np.float32(0.01) * rng.standard_normal(N).astype(np.float32), BF16) for _ in range(3)
    )
    base_values, second_values = decode(base, BF16), decode(second, BF16)
    delta = np.asarray(second_values - base_values, np.float32)
    mirrored = store(tmp_path, "mirrored", BF16, second[::-1].copy())
    summed = np.asarray(np.asarray(second_values, np.float64) + base_values, np.float64)
    on_base = store(tmp_path, "summed", F32, summed.astype(np.float32)[::-1].copy())
    exact = np.asarray(on_base_values(on_base) - np.asarray(base_values, np.float32), np.float32)
    base_entry = store(tmp_path, "base", BF16, base)
    return Family(
        base_entry,
        store(tmp_path, "first", BF16, first),
        store(tmp_path, "second", BF16, second),
        {
            "computed": Reversed(mirrored),
            "computed delta": Reversed(mirrored, base_entry),
            "delta": replace(store(tmp_path, "delta", F32, delta), is_delta=True),
            "on its base": OnBase(on_base, encoded_on=base_entry),
            "what it is on its base": store(tmp_path, "exact", F32, exact),
        },
    )


def on_base_values(entry: TensorEntry) -> NDArray[np.float32]:
    raw = np.frombuffer(entry.file.local_path.read_bytes()[entry.offset :], "<f4")
    return np.asarray(raw[::-1], np.float32)


def task_of(operator: str, base: TensorEntry, experts: Sequence[Source], dtype: DType = F32) -> MergeTask:
    parameters = TensorParameters(SHARED[operator], {}, (EXPERT,) * len(experts))
    models = tuple(range(1, len(experts) + 1))
    return MergeTask("w", Action.MERGE, (N,), dtype, base, tuple(experts), parameters, expert_models=models)


def merged(task: MergeTask, operator: str, folder: Path, memory: int = LARGE, threads: int = 2) -> bytes:
    """The result of one task, by the engine."""
    files = LocalStore()
    paths = {entry.file for source in (task.base, *task.experts) for entry in source.stored}
    work = MergeWork(plan_output([task], 1 << 40), operator, 3, {1: "a", 2: "b"}, pin_files(files, paths))
    folder.mkdir()
    make_part(work, whole(work.output), folder, files, EngineOptions(threads, memory))
    (path,) = folder.iterdir()
    return path.read_bytes()[-N * task.dtype.itemsize :]


@pytest.mark.parametrize("memory", [SMALL, LARGE])
@pytest.mark.parametrize("form", ["computed", "computed delta", "delta"])
@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "dare_ties"])
def test_engine__merges_an_expert_alike_in_whatever_form_it_comes(
    family: Family, tmp_path: Path, operator: str, form: str, memory: int
) -> None:
    plain = merged(task_of(operator, family.base, (family.first, family.second)), operator, tmp_path / "plain")
    task = task_of(operator, family.base, (family.first, family.forms[form]))
    assert merged(task, operator, tmp_path / "other", memory) == plain


def test_engine__merges_a_single_computed_expert_on_a_sphere(family: Family, tmp_path: Path) -> None:
    plain = merged(task_of("slerp", family.base, (family.second,)), "slerp", tmp_path / "plain")
    assert merged(task_of("slerp", family.base, (family.forms["computed"],)), "slerp", tmp_path / "other") == plain


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties"])
def test_engine__hands_the_base_to_tensors_that_are_encoded_on_it(
    family: Family, tmp_path: Path, operator: str
) -> None:
    exact = family.forms["what it is on its base"]
    plain = merged(task_of(operator, family.base, (family.first, exact)), operator, tmp_path / "plain")
    task = task_of(operator, family.base, (family.first, family.forms["on its base"]))
    assert merged(task, operator, tmp_path / "other") == plain


@pytest.mark.parametrize("operator", ["task_arithmetic", "ties", "dare_ties"])
def test_engine__takes_an_unchanged_tensor_for_a_copy_of_the_base(
    family: Family, tmp_path: Path, operator: str
) -> None:
    plain = merged(task_of(operator, family.base, (family.first, family.base)), operator, tmp_path / "plain")
    task = task_of(operator, family.base, (family.first, Unchanged("w", BF16, (N,))))
    assert merged(task, operator, tmp_path / "other") == plain
    (run,) = full_access(0, task)
    assert (run.present, run.free) == ((0,), (1,))
