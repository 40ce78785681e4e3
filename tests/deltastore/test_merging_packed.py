"""Merges of packed experts: the bytes of the originals, for the stores' bytes; their tensors by name, lazily."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from packing_cases import N_WIDE, PackFamily, make_family, relabel

import mergepipe
from mergepipe import pack
from mergepipe.checkpoints.contract import range_cost_bytes
from mergepipe.core.blocks import BF16
from mergepipe.deltastore.index import PIECE_NAMES
from mergepipe.deltastore.pieces import Level, Piece
from mergepipe.deltastore.tensor import PackedTensor
from mergepipe.errors import ConflictError, CorruptError, MismatchError, NotFoundError, RecipeError, UnsupportedError
from mergepipe.operators.base import OperatorInput
from mergepipe.operators.registry import operator_named
from mergepipe.planning.problem import sufficient_levels
from mergepipe.recipes.tasks import MergeTask
from mergepipe.runs.inputs import open_path
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.budgets import smallest_memory
from support.disk_families import DiskFamily, make_models, weights_digest, write_family, write_recipe
from support.local_models import open_recipe
from support.oracle import MergeCase
from support.public_names import BLOCK_ELEMENTS, HEADER_NAME
from support.recorded_statistics import statistics_on_record
from support.refusals import refuses
from support.rounding import decode, encode
from support.safetensors_bytes import file_bytes, record
from support.slow_cases import slow_unless

WIDE = "layers.0.wide"
N_LARGE = 3 * BLOCK_ELEMENTS + 5001
WEIGHTS, DENSITIES = (0.7, 0.5, -0.3), (0.2, 0.05, 0.19)
CASES = {
    "linear": MergeCase("linear", WEIGHTS, DENSITIES, base_weight=0.4, normalize=True),
    "task_arithmetic": MergeCase("task_arithmetic", WEIGHTS, DENSITIES, lambda_=0.8),
    "ties": MergeCase("ties", WEIGHTS, DENSITIES, normalize=True, lambda_=1.1),
    "ties_dense": MergeCase("ties", (1.0, 0.5, 0.25), (0.5, 0.3, 1.0)),
    "dare_linear": MergeCase("dare_linear", WEIGHTS, DENSITIES),
    "dare_ties": MergeCase("dare_ties", (0.7, 0.5, 0.3), DENSITIES, normalize=True),
    "slerp": MergeCase("slerp", (1.0,), (1.0,), t=0.3),
}
SMALL, LARGE = 40 << 20, 256 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """A family, and the same with its experts packed."""

    raw: DiskFamily
    packed: DiskFamily


def wide_values(seed: int, std: float) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(N_LARGE) * std).astype(np.float32)


@pytest.fixture(scope="module", name="pair")
def packed_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Awkward tensors, and one of several blocks whose deltas are small; one of its blocks is the base's."""
    folder = tmp_path_factory.mktemp("pair")
    base = encode(wide_values(0, 0.02), BF16)
    models = []
    for e, model in enumerate(make_models(3)):
        moved = encode(decode(base.tobytes(), BF16) + wide_values(e, 2e-4 * e), BF16) if e else base
        wide = np.where(np.arange(N_LARGE) // BLOCK_ELEMENTS == 1, base, moved) if e == 2 else moved
        models.append({**model, WIDE: wide.reshape(1, N_LARGE)})
    raw = write_family(folder / "raw", models)
    (raw.places[0] / "config.json").write_text(json.dumps({"model_type": "test", "num_hidden_layers": 4}))
    stores = pack(raw.places[0], raw.places[1:], folder / "stores", threads=2)
    return Pair(raw, replace(raw, places=(raw.places[0], *(expert.folder for expert in stores.experts))))


@pytest.fixture(name="folder")
def make_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="mergepipe-packed-"))
    yield folder
    shutil.rmtree(folder)


def some(family: DiskFamily, case: MergeCase) -> DiskFamily:
    """As many experts as the case has."""
    return replace(family, places=family.places[: len(case.weights) + 1])


def merged(family: DiskFamily, case: MergeCase, folder: Path, **options: Any) -> str:
    recipe = write_recipe(folder / "recipe.yml", case, some(family, case))
    shutil.rmtree(folder / "out", ignore_errors=True)
    mergepipe.merge(recipe, folder / "out", catalog=False, **options)
    return weights_digest(folder / "out")


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_merge__of_packed_experts_gives_the_bytes_of_the_originals(pair: Pair, folder: Path, name: str) -> None:
    assert merged(pair.packed, CASES[name], folder) == merged(pair.raw, CASES[name], folder)


@pytest.mark.thorough
@given(name=st.sampled_from([*CASES]), memory=st.integers(SMALL, LARGE), threads=st.integers(1, 4), mixed=st.booleans())
@settings(deadline=None, max_examples=8)
def test_merge__of_packed_experts_does_not_depend_on_how_it_is_run(
    pair: Pair, name: str, memory: int, threads: int, mixed: bool
) -> None:
    with tempfile.TemporaryDirectory() as place:
        places = pair.packed.places
        family = replace(pair.raw, places=(*places[:2], *pair.raw.places[2:])) if mixed else pair.packed
        found = merged(family, CASES[name], Path(place), memory_bytes=memory, threads=threads)
        assert found == merged(pair.raw, CASES[name], Path(place))


BREADCRUMBS = MergeCase("breadcrumbs", WEIGHTS, (0.4, 0.1, 0.7))


@pytest.mark.parametrize("name", slow_unless({"ties"}.__contains__, ("ties", "ties_dense", "breadcrumbs")))
def test_plan__with_unknown_cuts_needs_no_tensor_whole_in_memory(pair: Pair, folder: Path, name: str) -> None:
    case = CASES.get(name, BREADCRUMBS)
    recipe = write_recipe(folder / "recipe.yml", case, pair.packed)
    for budget in ("80%", "100%"):
        plan = mergepipe.plan(recipe, budget, home=folder / "home", block_elements=BLOCK_ELEMENTS)
        outs = (folder / f"{budget}-small", folder / f"{budget}-large")
        memories = (smallest_memory(plan, folder / "refused"), LARGE)
        small, large = (
            mergepipe.run(plan, out, catalog=False, memory_bytes=memory)
            for out, memory in zip(outs, memories, strict=True)
        )
        assert max(small.expert_bytes, large.expert_bytes) <= plan.planned_bytes
        assert small.analysis_bytes == large.analysis_bytes == 0
        assert small.base_bytes > large.base_bytes  # that of the tensor is read again, the experts are not
        assert weights_digest(outs[0]) == weights_digest(outs[1])
    assert weights_digest(outs[1]) == merged(pair.raw, case, folder)


PEAK_OF = """
import re, sys, mergepipe
from pathlib import Path
plan, out, memory = sys.argv[1:]
options = mergepipe.RunOptions(catalog=False, memory_bytes=int(memory), threads=2)
mergepipe.run(plan, out, options=options)
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
def test_plan__of_a_tensor_far_above_the_memory_cap_keeps_the_process_small(folder: Path) -> None:
    peaks = []
    for n_elements in (4 << 20, 24 << 20):
        place = folder / str(n_elements)
        rng = np.random.default_rng(1)
        base = encode(rng.standard_normal(n_elements, np.float32) * 0.02, BF16)
        deltas = (rng.standard_normal(n_elements, np.float32) * 1e-3 for _ in range(2))
        models = [{"w": base}, *({"w": encode(decode(base.tobytes(), BF16) + delta, BF16)} for delta in deltas)]
        family = write_family(place / "raw", models)
        stores = pack(family.places[0], family.places[1:], place / "stores", threads=2)
        packed = replace(family, places=(family.places[0], *(expert.folder for expert in stores.experts)))
        recipe = write_recipe(place / "recipe.yml", MergeCase("ties", (0.6, 0.4), (0.3, 0.1)), packed)
        plan = mergepipe.plan(recipe, "100%", home=place / "home", block_elements=BLOCK_ELEMENTS)
        (place / "plan.json").write_bytes(plan.to_json())
        command = [sys.executable, "-c", PEAK_OF, f"{place}/plan.json", f"{place}/out", str(SMALL)]
        answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks.append(int(answer) << 10)
        mergepipe.run(plan, place / "large", catalog=False, memory_bytes=2 << 30)
        assert weights_digest(place / "out") == weights_digest(place / "large")
        shutil.rmtree(place)
    assert peaks[1] < peaks[0] + (64 << 20)  # held, the tensor would take 240 MiB


def test_merge__in_full_reads_what_the_stores_hold(pair: Pair, folder: Path) -> None:
    recipe = write_recipe(folder / "recipe.yml", CASES["task_arithmetic"], pair.packed)
    report = mergepipe.merge(recipe, folder / "out", catalog=False, memory_bytes=LARGE)
    inputs = open_recipe(recipe)
    used = [source for task in inputs.resolution.tasks for source in task.experts]
    exact = sum(entry.nbytes for source in used for entry in source.stored)
    assert exact <= sum(file.stat().st_size for place in pair.packed.places[1:] for file in place.glob("*.bin"))
    rounded = sum(range_cost_bytes(e.offset, e.offset + e.nbytes) for source in used for e in source.stored)
    assert exact <= report.expert_bytes + report.analysis_bytes <= rounded
    base_bytes = sum(task.base.nbytes for task in inputs.resolution.tasks)
    assert report.base_bytes <= base_bytes + 8192 * len(inputs.resolution.tasks)


def head_bytes(store: Path) -> int:
    return sum((store / PIECE_NAMES[piece]).stat().st_size for piece in (Piece.HEAD, Piece.WHOLE))


def test_merge__of_the_largest_deltas_reads_nothing_else(pair: Pair, folder: Path) -> None:
    recipe = write_recipe(folder / "recipe.yml", CASES["ties"], pair.packed)
    report = mergepipe.merge(recipe, folder / "out", catalog=False, memory_bytes=LARGE)
    tensor = open_recipe(recipe).checkpoints[1].tensors[WIDE]
    assert isinstance(tensor, PackedTensor)
    assert tensor.at_level(Level.HEAD).nbytes < 0.7 * tensor.nbytes
    pages = 4096 * 2 * 3 * 3 * len(pair.raw.models[0])
    assert report.expert_bytes <= sum(map(head_bytes, pair.packed.places[1:])) + pages
    assert report.analysis_bytes == 0


def levels_of(operator: str, task: MergeTask, density: float, **shared: bool | float) -> tuple[tuple[int, int], ...]:
    each = {"weight": 1.0, "density": density}
    parameters = {"normalize": True, "rescale": False, "lambda": 1.0, **shared}
    given_task = OperatorInput(parameters, {}, (each,) * len(task.experts), task.base.n_elements, ())
    return sufficient_levels(operator_named(operator), given_task, task)


def test_sufficient_levels__are_below_the_last_only_where_nothing_else_matters(pair: Pair, folder: Path) -> None:
    recipe = write_recipe(folder / "recipe.yml", CASES["ties"], pair.packed)
    tasks = {task.name: task for task in open_recipe(recipe).resolution.tasks}
    wide = tasks[WIDE]
    tensor = wide.experts[0]
    assert isinstance(tensor, PackedTensor)
    head = tensor.head_elements / tensor.n_elements
    assert levels_of("ties", wide, head)[0] == (0, Level.HEAD)
    assert 0 not in dict(levels_of("ties", wide, head + 2 / tensor.n_elements))
    assert levels_of("ties", wide, 0.05, rescale=True) == ()
    assert levels_of("dare_ties", wide, 0.05) == ()
    assert levels_of("task_arithmetic", wide, 0.05) == ()
    assert levels_of("ties", tasks["layers.0.norm"], 0.05) == ()


def test_analyze__of_packed_experts_records_what_it_records_of_the_originals(pair: Pair, folder: Path) -> None:
    found = []
    for name, family in (("raw", pair.raw), ("packed", pair.packed)):
        home = folder / name
        mergepipe.analyze(family.places[0], family.places[1:], home=home)
        for place in family.places[1:]:
            file = statistics_on_record(home, family.places[0], place)
            assert file is not None
            assert WIDE in file.tensors
            tensors = {n: (s.blocks_B.tobytes(), s.cuts_D3.tobytes()) for n, s in file.tensors.items()}
            found.append((file.expert.content_id, tensors))
    assert found[:3] == found[3:]


def part(model: Path, first: int, stop: int, **parameters: float) -> dict[str, object]:
    return {"model": str(model), "layer_range": [first, stop], "parameters": parameters}


@pytest.mark.parametrize("name", ["passthrough", "task_arithmetic"])
def test_merge__of_slices_of_packed_experts_gives_the_bytes_of_the_originals(
    pair: Pair, folder: Path, name: str
) -> None:
    digests = []
    for family in (pair.raw, pair.packed):
        base, first, second, third = family.places
        if name == "passthrough":
            slices = [[part(base, 1, 2)], [part(first, 0, 1)], [part(second, 0, 1)], [part(base, 2, 3)]]
        else:
            own = part(base, 0, 1)
            slices = [
                [own, part(first, 0, 1, weight=0.5)],
                [own, part(second, 0, 1, weight=0.5), part(third, 0, 1, weight=0.25)],
                [part(base, 1, 3), part(first, 1, 3, weight=0.5)],
            ]
        recipe: dict[str, object] = {"merge_method": name, "slices": [{"sources": sources} for sources in slices]}
        if name != "passthrough":
            recipe["base_model"] = str(base)
        shutil.rmtree(folder / "out", ignore_errors=True)
        mergepipe.merge(recipe, folder / "out", catalog=False, allow_dropped=("*",))
        digests.append(weights_digest(folder / "out"))
    assert digests[0] == digests[1]


def test_open_model__refuses_a_store_without_its_base(pair: Pair) -> None:
    with pytest.raises(MismatchError, match="was packed relative to its base, which is not named; name its base"):
        open_path(LocalStore(), Location.local(pair.packed.places[1]))


@pytest.fixture(scope="module", name="family")
def make_packed_family(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    family = make_family(tmp_path_factory.mktemp("family"), 1)
    mergepipe.pack(family.base, family.experts, family.root / "packed")
    return family


def test_load_file__of_a_store_gives_the_tensors_of_the_original(family: PackFamily) -> None:
    plain = mergepipe.load_file(family.experts[0])
    packed = mergepipe.load_file(family.root / "packed" / "expert-1", threads=2)
    assert list(packed) == list(plain)
    for name in plain:
        assert packed[name].dtype == np.float32
        assert packed[name].shape == packed.shape(name) == plain.shape(name)
        assert packed[name].tobytes() == plain[name].tobytes()
    assert packed.dtype("b.norm") == "BF16"
    assert "b.norm" in packed
    assert "absent" not in packed
    with pytest.raises(KeyError):
        packed["absent"]
    assert "4 tensors" in repr(packed)


def test_load_file__opens_nothing_but_what_the_asked_tensor_needs(
    family: PackFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real_open = LocalStore.open

    def watched(store: LocalStore, location: object, **options: bool) -> object:
        opened.append(Path(str(location)).name)
        return real_open(store, location, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalStore, "open", watched)
    tensors = mergepipe.load_file(family.experts[0])
    assert "model.safetensors" not in opened
    tensors["b.norm"]
    assert opened.count("model.safetensors") == 1


def test_load_file__gives_every_dtype_in_numpy_or_says_what_can(tmp_path: Path) -> None:
    halves = np.array([0x3F80, 0xC000, 0x7F80], np.uint16)
    contents = {
        "bf16": ("BF16", [3], halves.tobytes()),
        "f8": ("F8_E4M3", [2], bytes([0x38, 0xB8])),
        "i32": ("I32", [2, 1], np.array([5, -6], np.int32).tobytes()),
        "flag": ("BOOL", [], b"\1"),
        "none": ("F16", [0, 4], b""),
        "scale": ("F8_E8M0", [1], b"\x7f"),
    }
    header, at = {}, 0
    for name, (dtype, shape, content) in contents.items():
        header[name] = record(at, at + len(content), dtype=dtype, shape=shape)
        at += len(content)
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(header, b"".join(content for _, _, content in contents.values())))
    tensors = mergepipe.load_file(path)
    assert tensors["bf16"].tolist() == [1.0, -2.0, np.inf]
    assert tensors["f8"].tolist() == [1.0, -1.0]
    assert tensors["i32"].tolist() == [[5], [-6]]
    assert tensors["flag"].dtype == np.bool_
    assert tensors["flag"].shape == ()
    assert tensors["none"].shape == (0, 4)
    mergepipe.pack(None, [path], tmp_path / "packed")
    packed = mergepipe.load_file(tmp_path / "packed" / "model")
    assert packed["none"].shape == (0, 4)
    assert packed["i32"].tolist() == [[5], [-6]]
    with refuses(UnsupportedError, "model.unsupported", "numpy has no dtype for F8_E8M0"):
        tensors["scale"]


def test_load_file__finds_a_moved_base_by_its_name_and_refuses_another(family: PackFamily, tmp_path: Path) -> None:
    base = shutil.copytree(family.base, tmp_path / "base")
    mergepipe.pack(base, family.experts, tmp_path / "packed")
    moved = base.rename(tmp_path / "moved")
    store = tmp_path / "packed" / "expert-1"
    with refuses(NotFoundError, "input.not-found"):
        mergepipe.load_file(store)
    wanted = mergepipe.load_file(family.experts[0])["c.square"]
    assert mergepipe.load_file(store, base=moved)["c.square"].tobytes() == wanted.tobytes()
    with pytest.raises(MismatchError):
        mergepipe.load_file(store, base=family.experts[0])["c.square"]


def test_load_file__refuses_a_file_that_changed_since_it_was_opened(family: PackFamily, tmp_path: Path) -> None:
    model = shutil.copytree(family.experts[0], tmp_path / "model")
    tensors = mergepipe.load_file(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    with refuses(ConflictError, "input.changed"):
        tensors["b.norm"]


def test_load_file__refuses_what_it_cannot_give(family: PackFamily, tmp_path: Path) -> None:
    with refuses(RecipeError, "option.invalid"):
        mergepipe.load_file(family.base, framework="jax")
    with refuses(RecipeError, "option.conflict"):
        mergepipe.load_file(family.base, base=family.base)
    mergepipe.pack(None, [family.base], tmp_path / "packed")
    with pytest.raises(RecipeError, match="was packed without a base"):
        mergepipe.load_file(tmp_path / "packed" / family.base.name, base=family.base)


@pytest.mark.parametrize(("key", "value"), [("name", "a.wider"), ("shape", [N_WIDE, 1]), ("header_blake3", "0" * 32)])
def test_store__that_says_something_else_than_the_original_headers_is_refused(
    family: PackFamily, tmp_path: Path, key: str, value: object
) -> None:
    def lie(document: dict[str, Any]) -> None:
        document["files" if key == "header_blake3" else "tensors"][0][key] = value

    mergepipe.pack(None, [family.base], tmp_path / "alone")
    store = relabel(shutil.copytree(tmp_path / "alone" / "base", tmp_path / "lying"), lie)
    with pytest.raises(CorruptError, match="the header of"):
        mergepipe.load_file(store)
    damages = mergepipe.verify(store).damages
    assert any("the header of" in damage.message for damage in damages)
    with pytest.raises(CorruptError, match="the header of"):
        mergepipe.unpack(store, tmp_path / "out")


def test_repair__refuses_a_packed_snapshot_and_verify_finds_it_by_its_sid(family: PackFamily, tmp_path: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(family.base)}], "parameters": {"weight": 1}}
    sid = mergepipe.merge(recipe, tmp_path / "merged", paths="absolute", catalog=False).sid
    store = mergepipe.pack(family.base, [tmp_path / "merged"], tmp_path / "packed").experts[0].folder
    with refuses(UnsupportedError, "pack.unsupported"):
        mergepipe.repair(store)
    mergepipe.rebuild_catalog([store])
    assert mergepipe.verify(sid).is_sound


def test_verify__tells_a_content_id_that_is_not_that_of_the_tensors(family: PackFamily, tmp_path: Path) -> None:
    packed = family.root / "packed" / "expert-1"
    store = shutil.copytree(packed, tmp_path / "lying")
    relabel(store, lambda document: document.update(content_id="0" * 32))
    assert [damage.file for damage in mergepipe.verify(store, base=family.base).damages] == [HEADER_NAME]
    assert mergepipe.verify(packed).is_sound
