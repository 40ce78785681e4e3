"""Composites that resume at the step of a partial checkpoint: DeepSpeed and DCP trees written without frameworks."""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from composing import FULL, Pair, checkpoint_at, edit, make_pair, tree, wrong_values

from mergepipe.checkpoints.inert_pickle import load_inert
from mergepipe.core.strict_json import JsonValue
from mergepipe.tailor.checkpoint import FP32, Framework
from mergepipe.tailor.composition import CompositionReport
from mergepipe.tailor.formats.contract import Node
from mergepipe.tailor.formats.dcp import unpack_piece
from mergepipe.tailor.saving.frameworks import EngineView
from support.engine_views import write_partial
from support.local_models import torch_archive
from support.public_names import DCP_FORMAT
from support.stores import MetadataStore
from support.torch_bytes import torch_bytes
from support.training_trees import (
    RATE,
    SAMPLES_A_STEP,
    KnownStates,
    decay_groups,
    write_dcp,
    write_trainer_files,
    write_zero3,
    write_zero12,
)

LATE = 1900  # a step that takes more bytes than that of the skeleton
RECIPE = "default: old\ntake: [{from: new, units: [layers all]}]\n"
OPTIONS: tuple[dict[str, JsonValue], ...] = (
    {"lr": 0.25, "betas": [0.5, 0.999], "new": 1},
    {"lr": 0.5, "betas": [0.9, 0.999]},
)
ZERO = {
    "1": lambda folder, known, groups: write_zero12(folder, known, groups, 2, stage=1),
    "2": lambda folder, known, groups: write_zero12(folder, known, groups, 2),
    "3": lambda folder, known, groups: write_zero3(folder, known, groups, 2),
}


def save_partially(folder: Path, known: KnownStates, change: Callable[[EngineView], EngineView], *names: str) -> None:
    """A partial save of every unit by two ranks, with small files of the given names."""
    files = {name: name.encode() for name in names}
    files |= {name: json.dumps({"global_step": known.step}).encode() for name in names if name.endswith("json")}
    files |= {name: torch_bytes({"last": [known.step]}) for name in names if name == "scheduler.pt"}
    write_partial(folder, known, change=change, files=files)


STATE_NAMES = ("trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth")


def zero_pair(folder: Path, stage: str, *, scheduler: object = None) -> Pair:
    """A Trainer's DeepSpeed checkpoint `old` at step 7, and a partial one `new` at a late step."""
    pair = make_pair(folder, lambda path, known: write_trainer_zero(path, known, stage, scheduler))
    pair = replace(pair, new=replace(pair.new, step=LATE))
    shutil.rmtree(folder / "new")
    for name in STATE_NAMES[1:]:
        (folder / "old" / name).write_text("old")

    def change(view: EngineView) -> EngineView:
        groups = decay_groups(pair.new.shapes)
        layout = replace(view.layout, framework=Framework.TRANSFORMERS, stage=int(stage), options=OPTIONS)
        return replace(view, layout=replace(layout, flat_groups=tuple(map(tuple, groups))))

    save_partially(folder / "new", pair.new, change, *STATE_NAMES)
    return pair


def write_trainer_zero(path: Path, known: KnownStates, stage: str, scheduler: object) -> None:
    write_trainer_files(path, known)
    tag = f"global_step{known.step}"
    ZERO[stage](path / tag, known, decay_groups(known.shapes))
    (path / "latest").write_text(tag)
    for file in (path / tag).glob("*model_states.pt") if scheduler is not None else ():
        edit(file, {("lr_scheduler",): scheduler})


def root_of(path: Path) -> Node:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    return Node(torch_archive(path).root, path.name)


def ages(report: CompositionReport) -> Mapping[str, int]:
    return {unit.unit: unit.sources[0].age for unit in report.plan.staleness}


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_compose__resumes_deepspeed_at_the_step_of_a_partial_checkpoint(tmp_path: Path, stage: str) -> None:
    pair = zero_pair(tmp_path, stage)
    report = pair.compose(RECIPE, FULL)
    old = [name for name in pair.old.shapes if ".layers." not in name]
    assert wrong_values(pair.out, pair, old) == []
    assert checkpoint_at(pair.out).step == LATE
    assert (ages(report)["layer 1"], ages(report)["embed"]) == (0, LATE - 7)

    tag = pair.out / f"global_step{LATE}"
    assert ((pair.out / "latest").read_text(), [path.name for path in pair.out.glob("global*")]) == (
        tag.name,
        [tag.name],
    )
    for path in tag.glob("*model_states.pt"):
        root = root_of(path)
        counters = [root.get(key).value for key in ("global_steps", "global_samples", "lr_scheduler", "dp_world_size")]
        assert counters == [LATE, LATE * SAMPLES_A_STEP, None, 2]
    inner = "optimizer_state_dict" if stage == "3" else "base_optimizer_state"
    for path in tag.glob("*optim_states.pt"):
        groups = root_of(path).at(("optimizer_state_dict", inner, "param_groups")).elements()
        assert [group.get("lr").value for group in groups] == [0.25, 0.5]
        assert [group.get("betas").value for group in groups] == [(0.5, 0.999), (0.9, 0.999)]
        assert all("new" not in group.mapping() for group in groups)
    assert json.loads((pair.out / "trainer_state.json").read_text()) == {"global_step": LATE}
    assert (pair.out / "rng_state_1.pth").read_text() == "rng_state_1.pth"
    assert not (pair.out / "mergepipe-partial.json").exists()


def test_compose__puts_the_scheduler_where_the_engine_keeps_it(tmp_path: Path) -> None:
    pair = zero_pair(tmp_path, "2", scheduler={"last": [7]})
    pair.compose(RECIPE)
    path = pair.out / f"global_step{LATE}" / "mp_rank_00_model_states.pt"
    assert root_of(path).get("lr_scheduler").value == {"last": [LATE]}
    (tmp_path / "new" / "scheduler.pt").unlink()
    (tmp_path / "old" / "scheduler.pt").unlink()
    shutil.rmtree(pair.out)
    error = pair.refused(RECIPE)
    assert (error.code, "holds no scheduler.pt" in str(error)) == ("checkpoint.damaged", True)


def test_compose__takes_the_complete_checkpoint_where_a_partial_one_has_no_state(tmp_path: Path) -> None:
    pair = zero_pair(tmp_path, "3")
    (tmp_path / "new" / "trainer_state.json").unlink()
    report = pair.compose(RECIPE)
    assert (report.plan.assignment.state.step, ages(report)["layer 1"]) == (7, 7 - LATE)
    shutil.rmtree(pair.out)
    error = pair.refused(RECIPE + "state_from: new\n")
    assert (error.code, "to resume from" in str(error)) == ("checkpoint.damaged", True)


def test_compose__refuses_random_states_of_fewer_ranks(tmp_path: Path) -> None:
    pair = zero_pair(tmp_path, "3")
    (tmp_path / "new" / "rng_state_1.pth").unlink()
    assert "rng_state_1.pth" in str(pair.refused(RECIPE))


# --- torch DCP

PLAIN = {"optim.param_groups.0.lr": RATE, "step": 7, "scheduler.last_epoch": 7}


def dcp_pair(folder: Path, plain: Mapping[str, object]) -> Pair:
    """A DCP directory `old` at step 7 with values that are no tensors, and a partial one `new` with `plain`."""
    pair = make_pair(folder, lambda path, known: write_dcp(path, known, 2, plain=PLAIN))
    shutil.rmtree(folder / "new")
    (folder / "old" / "rng_state_0.pth").write_text("old")

    def change(view: EngineView) -> EngineView:
        shards = tuple(replace(s, kind="weight") if s.kind == FP32 else s for s in view.shards)
        layout = replace(view.layout, origin=DCP_FORMAT, framework=Framework.TORCH, stage=None, flat_groups=())
        layout = replace(layout, counters=tuple((name,) for name in layout.parameters))
        return replace(view, layout=layout, shards=shards, counters=view.counters * len(layout.counters))

    save_partially(folder / "new", pair.new, change, "rng_state_0.pth")
    write_dcp(folder / "new", replace(pair.new, shapes={}), 1, plain=plain)
    return pair


def plain_values(folder: Path) -> dict[str, object]:
    """Values of a DCP directory that are no tensors, by key, read through its metadata."""
    metadata = Node(load_inert((folder / ".metadata").read_bytes(), "metadata"), "metadata").fields("Metadata")
    described = metadata.get("state_dict_metadata").mapping()
    found: dict[str, object] = {}
    for index, place in metadata.get("storage_data").items():
        key = Node(index, "metadata").fields("MetadataIndex").get("fqn").text()
        if getattr(described[key], "kind").name == "BytesStorageMetadata":  # noqa: B009 - an inert record
            fields = place.fields("_StorageInfo")
            start = fields.get("offset").integer()
            item = folder / "item.pt"
            whole = (folder / fields.get("relative_path").text()).read_bytes()
            item.write_bytes(whole[start : start + fields.get("length").integer()])
            found[key] = torch_archive(item).root
            item.unlink()
    return found


def test_compose__resumes_dcp_at_the_step_of_a_partial_checkpoint(tmp_path: Path) -> None:
    plain = {"optim.param_groups.0.lr": 0.25, "step": 9, "scheduler.last_epoch": 9, "scheduler.new": "x"}
    pair = dcp_pair(tmp_path, plain)
    before = tree(tmp_path / "new")
    report = pair.compose(RECIPE)
    old = [name for name in pair.old.shapes if ".layers." not in name]
    assert (wrong_values(pair.out, pair, old), plain_values(pair.out)) == ([], plain)
    assert (report.plan.assignment.state.step, ages(report)["layer 1"], ages(report)["embed"]) == (9, 0, 2)
    assert (pair.out / "rng_state_0.pth").read_text() == "rng_state_0.pth"
    assert tree(tmp_path / "new") == before
    made = checkpoint_at(pair.out)
    piece = made.states["model.norm.weight", "weight"].pieces[0]
    assert (made.world_size, unpack_piece(MetadataStore(), piece, made.states["model.norm.weight", "weight"].dtype).file
            == piece.file) == (2, True)  # fmt: skip


def test_compose__refuses_a_dcp_state_that_lacks_a_value(tmp_path: Path) -> None:
    pair = dcp_pair(tmp_path, {key: value for key, value in PLAIN.items() if key != "step"})
    error = pair.refused(RECIPE)
    assert (error.code, "lacks step" in str(error)) == ("checkpoint.mismatch", True)
