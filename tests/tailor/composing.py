"""For the tests of compositions: pairs of small checkpoints in every format, and what their values should become."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mergepipe import tailor
from mergepipe.errors import MergePipeError
from mergepipe.options import ComposeOptions
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.archives import plan_edited
from mergepipe.tailor.checkpoint import EXPORT, FP32, WEIGHT, AdamStep, PicklePath, StoredState, TrainingCheckpoint
from mergepipe.tailor.composition import CompositionReport
from mergepipe.tailor.composition_plan import unpacked
from mergepipe.tailor.copy_writer import write_files
from support.local_models import open_local, open_training
from support.refusals import refusal
from support.stores import MetadataStore
from support.training_trees import (
    KnownStates,
    decay_groups,
    decoder_shapes,
    known_states,
    write_dcp,
    write_hf,
    write_titan,
    write_trainer_files,
    write_verl,
    write_zero3,
    write_zero12,
)

Array = npt.NDArray[np.float32]
Write = Callable[[Path, KnownStates], None]
NUMPY_TYPES: dict[str, npt.DTypeLike] = {
    "F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "I64": np.int64,
}  # fmt: skip
MEMORY_BYTES = 32 << 20
FULL = ComposeOptions(memory_bytes=MEMORY_BYTES, self_check="full")


def layer_groups(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Flat groups as the paper regroups them: two a layer, so that each has a step counter of its own."""
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in shapes:
        part = name.split(".")[2] if ".layers." in name else name
        groups.setdefault((part, "norm" in name), []).append(name)
    return list(groups.values())


def _hf_zero(folder: Path, known: KnownStates) -> None:
    write_trainer_files(folder, known)
    tag = f"global_step{known.step}"
    write_zero12(folder / tag, known, decay_groups(known.shapes), 2)
    (folder / "latest").write_text(tag)


def _save_directory(folder: Path, known: KnownStates) -> None:
    write_zero3(folder / "step", known, decay_groups(known.shapes), 3)
    write_zero3(folder / "older", replace(known, step=1), decay_groups(known.shapes), 3)
    (folder / "latest").write_text("step")


FORMATS: dict[str, Write] = {
    "zero1": lambda folder, known: write_zero12(folder, known, decay_groups(known.shapes), 2, stage=1),
    "zero2": lambda folder, known: write_zero12(folder, known, decay_groups(known.shapes), 3),
    "zero2-regrouped": lambda folder, known: write_zero12(folder, known, layer_groups(known.shapes), 2),
    "zero3": lambda folder, known: write_zero3(folder, known, decay_groups(known.shapes), 2),
    "zero3-regrouped": lambda folder, known: write_zero3(folder, known, layer_groups(known.shapes), 3),
    "zero3-saved": _save_directory,
    "hf": write_hf,
    "hf-zero2": _hf_zero,
    "dcp": lambda folder, known: write_dcp(folder, known, 2),
    "titan": write_titan,
    "verl": write_verl,
}
SHARED_STEPS = ("zero1", "zero2", "zero3", "zero3-saved", "hf-zero2")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two checkpoints of one run in `folder`: `old` at step 7 and `new` at step 9."""

    folder: Path
    old: KnownStates
    new: KnownStates

    @property
    def out(self) -> Path:
        return self.folder / "out"

    def recipe(self, text: str) -> Path:
        path = self.folder / "recipe.yml"
        path.write_text(text, encoding="utf-8")
        return path

    def compose(self, text: str, options: ComposeOptions = FULL, out: Path | None = None) -> CompositionReport:
        return tailor.compose(self.recipe(text), self.out if out is None else out, options=options)

    def sources(self) -> dict[str, tuple[bytes, int, int]]:
        return tree(self.folder / "old") | tree(self.folder / "new")

    def refused(self, text: str) -> MergePipeError:
        """The error of a composition that writes nothing."""
        recipe = self.recipe(text)
        before = tree(self.folder)
        error = refusal(lambda: tailor.compose(recipe, self.out, options=FULL))
        assert (self.out.exists(), hidden(self.folder), tree(self.folder) == before) == (False, [], True)
        return error


def make_pair(folder: Path, write: Write, shapes: Mapping[str, tuple[int, ...]] | None = None) -> Pair:
    shapes = shapes if shapes is not None else decoder_shapes()
    pair = Pair(folder, known_states(shapes, seed=1, step=7), known_states(shapes, seed=2, step=9))
    write(folder / "old", pair.old)
    write(folder / "new", pair.new)
    return pair


def checkpoint_at(path: Path) -> TrainingCheckpoint:
    """Open a checkpoint through a store that gives metadata alone."""
    return open_training(path, MetadataStore())


def step_of(checkpoint: TrainingCheckpoint, parameter: str) -> AdamStep | None:
    """The step counter that serves a parameter; None for a frozen one."""
    return next((step for step in checkpoint.steps if parameter in step.parameters), None)


def stored_values(state: StoredState) -> Array:
    """What the bytes of a state say, in float32; NaN where no piece is."""
    flat = np.full(state.n_elements, np.nan, np.float32)
    for piece in unpacked(MetadataStore(), state).pieces:
        raw = piece.file.local_path.read_bytes()[piece.offset : piece.offset + piece.nbytes]
        flat[piece.span.start : piece.span.stop] = np.frombuffer(raw, NUMPY_TYPES[state.dtype.name]).astype(np.float32)
    return flat.reshape(state.shape)


def model_values(folder: Path) -> dict[str, npt.NDArray[np.generic]]:
    """The weights of a model, in numpy's or ml_dtypes' dtypes."""
    arrays = {}
    for name, tensor in open_local(folder, MetadataStore()).tensors.items():
        (entry,) = tensor.stored
        raw = entry.file.local_path.read_bytes()[entry.offset : entry.offset + entry.nbytes]
        arrays[name] = np.frombuffer(raw, NUMPY_TYPES[entry.dtype.name]).reshape(entry.shape)
    return arrays


def wrong_weights(out: Path, known: KnownStates) -> list[str]:
    """Weights of a model that are not the masters."""
    made = model_values(out)
    assert made.keys() == known.shapes.keys()
    return [name for name, value in made.items() if not np.array_equal(value, known.arrays[name, FP32])]


def wrong_values(out: Path, pair: Pair, from_old: Collection[str]) -> list[str]:
    """States of the composite that are not those of their source. Copies of weights hold the source's master."""
    made = checkpoint_at(out)
    assert made.missing == ()
    wrong = []
    for (name, kind), state in made.states.items():
        known = pair.old if name in from_old else pair.new
        wanted = known.arrays[name, FP32 if kind in (WEIGHT, EXPORT) else kind]
        wrong += [] if np.array_equal(stored_values(state), wanted) else [f"{kind} of {name}"]
    assert {name for name, _ in made.states} == set(pair.new.shapes)
    return wrong


def edit(path: Path, edits: dict[PicklePath, object]) -> None:
    """Change values in the pickle of an archive."""
    plan = plan_edited(MetadataStore(), path.name, Location.local(path), [], edits)
    write_files(LocalStore(), [(plan, path.with_name("edited"))], 32 << 20, lambda _: None)
    path.with_name("edited").replace(path)


def tree(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Every file below a folder: content, modification time, number of names."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_nlink)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def hidden(folder: Path) -> list[str]:
    """What a run left behind."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def refuses_export(checkpoint: Path, code: str, message: str) -> None:
    """An export is refused in one line, and nothing is written."""
    error = refusal(lambda: tailor.export(checkpoint, checkpoint.parent / "out"))
    assert (error.code, len(error.problems), message in str(error)) == (code, 1, True)
    assert ((checkpoint.parent / "out").exists(), hidden(checkpoint.parent)) == (False, [])
