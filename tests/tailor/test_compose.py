"""Compositions of small checkpoints in every format: values, checksums, steps, refusals, failures."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from io import BytesIO
from pathlib import Path
from sys import modules
from typing import Any

import numpy as np
import pytest
from composing import (
    FORMATS,
    FULL,
    SHARED_STEPS,
    Pair,
    checkpoint_at,
    hidden,
    make_pair,
    stored_values,
    tree,
    wrong_values,
)

import mergepipe
from mergepipe import Progress, tailor
from mergepipe.errors import ConflictError, CorruptError, MismatchError, OutputError, RecipeError, UnsupportedError
from mergepipe.snapshots.manifest import StepPolicy
from mergepipe.snapshots.staging import staging_directory
from mergepipe.storage.ledger import Purpose
from mergepipe.tailor.checkpoint import FP32, WEIGHT, Framework
from mergepipe.tailor.composition import CompositionReport, compose
from mergepipe.tailor.formats.contract import Node
from mergepipe.tailor.saving.frameworks import EngineView
from mergepipe.tailor.selection import EMBED, layer
from support.engine_views import write_partial
from support.faults import replaced, short_reads, short_writes, worker_threads
from support.local_models import torch_archive
from support.public_names import DCP_FORMAT, HF_FORMAT, MANIFEST_NAME, VERL_FORMAT
from support.refusals import refuses
from support.torch_bytes import Member, zip_bytes
from support.training_trees import (
    KnownStates,
    decay_groups,
    decoder_shapes,
    known_states,
    write_dcp,
    write_fsdp,
    write_hf,
    write_zero3,
    write_zero12,
)

PARITY = "default: new\ntake: [{from: old, units: [layers even, embed, norm]}]\n"


def from_old(name: str) -> bool:
    """Whether PARITY takes a parameter from the older checkpoint."""
    words = name.split(".")
    return words[2] in ("0", "2") if words[1] == "layers" else words[1] in ("embed_tokens", "norm")


@dataclass(frozen=True, slots=True)
class Composed:
    """A pair, the report of what PARITY made of it in `pair.out`, and the files of its sources before that."""

    kind: str
    pair: Pair
    report: CompositionReport
    before: dict[str, tuple[bytes, int, int]]

    def wrong_values(self, out: Path) -> list[str]:
        return wrong_values(out, self.pair, [name for name in self.pair.old.shapes if from_old(name)])


@pytest.fixture(scope="module")
def compositions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Composed]:
    """Compositions of each format, which the tests of this module share and leave as they are."""

    @cache
    def composed(kind: str) -> Composed:
        pair = make_pair(tmp_path_factory.mktemp(kind), FORMATS[kind])
        before = pair.sources()
        return Composed(kind, pair, pair.compose(PARITY), before)

    return composed


@pytest.fixture(params=FORMATS)
def composed(request: pytest.FixtureRequest, compositions: Callable[[str], Composed]) -> Composed:
    return compositions(request.param)


@pytest.fixture
def zero2(tmp_path: Path) -> Pair:
    return make_pair(tmp_path, FORMATS["zero2"])


@pytest.mark.thorough
def test_compose__gives_every_value_its_source_and_leaves_the_sources_alone(composed: Composed) -> None:
    assert composed.pair.sources() == composed.before
    assert {links for _, _, links in composed.before.values()} == {1}
    assert composed.wrong_values(composed.pair.out) == []
    assert sum(map(from_old, composed.pair.old.shapes)) == 10
    assert composed.report.manifest is not None
    assert (composed.report.manifest.self_check.elements > 0, hidden(composed.pair.folder)) == (True, [])


@pytest.mark.thorough
def test_compose__of_one_checkpoint_with_itself_is_the_same_bytes(composed: Composed, tmp_path: Path) -> None:
    new, out = composed.pair.folder / "new", tmp_path / "out"
    shutil.copytree(new, tmp_path / "twin")
    text = f"default: new\ntake: [{{from: {tmp_path}/twin, units: [layers all, lm_head]}}]\n"
    composed.pair.compose(text, out=out)
    made = {name: content for name, (content, _, _) in tree(out).items() if name != "mergepipe.json"}
    source = {name: content for name, (content, _, _) in tree(new).items()}
    assert made == {name: content for name, content in source.items() if not name.startswith("older/")}


def archives(path: Path) -> list[bytes]:
    """The torch archives in a file: itself, or the items of a DCP file."""
    if path.suffix == ".pt":
        return [path.read_bytes()]
    if path.suffix != ".distcp":
        return []
    made = checkpoint_at(path.parent)
    pieces = [p for s in made.states.values() for p in s.pieces] + [p for s in made.steps for p in s.cells]
    assert all(p.is_packed for p in pieces)
    return [path.read_bytes()[p.offset : p.offset + p.nbytes] for p in pieces if p.file.local_path == path]


@pytest.mark.thorough
def test_compose__leaves_valid_checksums(composed: Composed) -> None:
    checked = 0
    for path in composed.pair.out.rglob("*"):
        for content in archives(path) if path.is_file() else []:
            with zipfile.ZipFile(BytesIO(content)) as archive:
                assert archive.testzip() is None
            checked += 1
    assert checked >= 1


@pytest.mark.thorough
def test_compose__takes_state_from_the_newest_or_as_asked_however_short_reads_are(
    composed: Composed, tmp_path: Path
) -> None:
    newest = composed.report.plan.assignment.skeleton
    assert (newest.step, checkpoint_at(composed.pair.out).step) == (9, 9)
    with replaced(os, "preadv", short_reads), replaced(os, "pwrite", short_writes):
        asked = composed.pair.compose(PARITY + "state_from: old\n", out=tmp_path / "out").plan.assignment.skeleton
    made = checkpoint_at(tmp_path / "out")
    counts_itself = made.format not in (DCP_FORMAT, VERL_FORMAT)  # there the newest counter is the step
    assert (asked.step, made.step) == (7, 7 if counts_itself else 9)
    assert composed.wrong_values(tmp_path / "out") == []


def test_compose__counts_steps_as_its_policy_says(composed: Composed) -> None:
    found = {name: s.value for s in checkpoint_at(composed.pair.out).steps for name in s.parameters}
    is_shared = composed.kind in SHARED_STEPS
    assert found == {n: 7.0 if from_old(n) and not is_shared else 9.0 for n in composed.pair.old.shapes}
    policies = {policy for unit in composed.report.plan.staleness for policy in unit.step_policies}
    assert policies == ({StepPolicy.NEWEST} if is_shared else {StepPolicy.EXACT})


@pytest.mark.thorough
def test_compose__reads_every_needed_byte_once_and_is_deterministic(composed: Composed, tmp_path: Path) -> None:
    options = replace(FULL, self_check="off", memory_bytes=16 << 20)
    report = composed.pair.compose(PARITY, options, tmp_path / "out")
    assert report.manifest is not None
    assert composed.report.manifest is not None
    assert report.manifest.files == composed.report.manifest.files
    realized = report.manifest.realized
    moved = realized[Purpose.BASE] + realized[Purpose.EXPERT]
    assert moved == report.plan.read_bytes <= report.plan.output_bytes
    assert realized[Purpose.ANALYSIS] == 0
    assert [i.read_bytes for i in report.manifest.inputs] == [realized[Purpose.BASE], realized[Purpose.EXPERT]]


# --- refusals


def test_compose__tells_everything_that_is_wrong_at_once(zero2: Pair) -> None:
    error = zero2.refused("take: [{from: old, units: [layers evn, embed]}, {from: gone, unit: [x]}]\ndefalt: new")
    assert [p.code for p in error.problems] == [
        "recipe.unknown-name", "recipe.units", "recipe.unknown-name", "recipe.incomplete",
        "model.not-found",
    ]  # fmt: skip


SMALL = known_states(decoder_shapes(), step=7)
WIDER = known_states(decoder_shapes(width=6), step=7)
FEWER = known_states(decoder_shapes(2), step=7)
GROUPS = decay_groups(SMALL.shapes)

MISFITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "groups": (lambda p: write_zero12(p, SMALL, GROUPS[::-1], 3), "grouped or ordered differently"),
    "shapes": (lambda p: write_zero12(p, WIDER, GROUPS, 3), "different shapes"),
    "fewer": (lambda p: write_zero12(p, FEWER, [list(FEWER.shapes)], 3), "lacks model.layers.2"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_compose__refuses_sources_that_do_not_fit(zero2: Pair, misfit: str) -> None:
    write, reason = MISFITS[misfit]
    shutil.rmtree(zero2.folder / "old")
    write(zero2.folder / "old")
    error = zero2.refused(PARITY)
    assert isinstance(error, MismatchError)
    assert (error.code, any(reason in p.message for p in error.problems)) == ("checkpoint.mismatch", True)


TIED = {"lm_head.weight": "model.embed_tokens.weight"}
WRITE_TIED: dict[str, Callable[[Path, KnownStates], None]] = {
    "hf": lambda path, known: write_hf(path, known, tied=True),
    "dcp": lambda path, known: write_dcp(path, known, 2, tied=TIED),
    "fsdp-full": partial(write_fsdp, full=True, tied=TIED),
    "fsdp-sharded": partial(write_fsdp, full=False, tied=TIED),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", WRITE_TIED)
def test_compose__takes_tied_weights_from_one_source(tmp_path: Path, kind: str) -> None:
    pair = make_pair(tmp_path, WRITE_TIED[kind], decoder_shapes(tied=True))
    text = (
        "merge_method: passthrough\n"
        "slices: [{sources: [{model: new, layer_range: [0, 3]}]}]\n"
        "pre_weights: [{name: model.embed_tokens.weight, model: old}, {name: model.norm.weight, model: new}]\n"
        "post_weights: [{name: lm_head.weight, model: %s}]\n"
    )
    assert pair.refused(text % "new").code == "checkpoint.mismatch"
    pair.compose(text % "old")
    made = checkpoint_at(pair.out)
    assert (dict(made.units.tied), "lm_head.weight" in made.parameters) == (TIED, False)
    assert "lm_head" not in [str(unit) for unit in made.units.parameters]
    both = [state for (name, kind), state in made.states.items() if kind == WEIGHT and name in {*TIED, *TIED.values()}]
    assert len(both) == (1 if kind in ("hf", "fsdp-full") else 2)  # others store a tensor once
    wanted = pair.old.arrays[TIED["lm_head.weight"], FP32]
    assert all(np.array_equal(stored_values(state), wanted) for state in both)


def test_compose__refuses_checksums_it_could_not_renew(tmp_path: Path) -> None:
    pair = make_pair(tmp_path, write_hf)
    for name in ("old", "new"):
        path = pair.folder / name / "optimizer.pt"
        with zipfile.ZipFile(path) as archive:
            members = [Member(n, archive.read(n), flags=0) for n in archive.namelist()]
        path.write_bytes(zip_bytes(members))
    assert pair.refused(PARITY).code == "checkpoint.unsupported"


# --- slices


def test_compose__understands_slices_with_zero_length_ranges(zero2: Pair) -> None:
    ranges = [("old", 0, 0), ("new", 0, 1), ("old", 1, 3), ("new", 4, 4), ("old", 5, 5)]
    slices = ", ".join(f"{{sources: [{{model: {m}, layer_range: [{a}, {b}]}}]}}" for m, a, b in ranges)
    text = (
        f"slices: [{slices}]\nmerge_method: passthrough\ndtype: float32\n"
        "pre_weights: [{name: model.norm.weight, model: old}]\n"
        "post_weights: [{name: lm_head.weight, model: new}, {name: model.embed_tokens.weight, model: old}]\n"
    )
    zero2.compose(text)
    old = [n for n in zero2.old.shapes if ".0." not in n and not n.startswith("lm_head")]
    assert wrong_values(zero2.out, zero2, old) == []


def slices(*ranges: list[int], rest: str = "base_model: old") -> str:
    entries = ", ".join(f"{{sources: [{{model: new, layer_range: {each}}}]}}" for each in ranges)
    return f"slices: [{entries}]\nmerge_method: passthrough\n{rest}\n"


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("slices: []\nmerge_method: linear", "recipe.value", "merge_method: passthrough"),
        (slices([3], [0, True]), "recipe.value", "slices[1].sources[0].layer_range: needs two layer numbers"),
        (slices([2, 1]), "recipe.value", "needs two layer numbers"),
        ("slices: [{sources: []}]\nmerge_method: passthrough", "recipe.value", "exactly one source"),
        (slices([9, 9]), "recipe.units", "no such unit"),
        ("pre_weights: [{name: model.nrm.weight, model: new}]\nmerge_method: passthrough", "recipe.units", "nrm"),
        (slices([0, 0], rest="pre_weights: [{name: model.norm.weight, model: old}]"), "recipe.conflict", "norm"),
        (slices([0, 3], rest=""), "recipe.incomplete", "embed, norm, lm_head"),
        (slices([0, 5]), "recipe.units", "has no layer 3"),
        ("default: new\ntake: [{from: old, units: ['name:*.mlp.up']}]", "recipe.units", "mlp.up"),
        ("default: new\ntokenizer_source: base", "recipe.unknown-name", "tokenizer_source"),
        ("default: [new]", "recipe.value", "default"),
        ('default: new\ntake: [{from: old, units: ["layers 1,1"]}]', "recipe.units", "names layer 1 twice"),
        ("default: new\ntake: [{from: old, units: [layers 1, layers odd]}]", "recipe.conflict", "selects too"),
    ],
)
def test_compose__explains_what_is_wrong_with_a_recipe(zero2: Pair, text: str, code: str, words: str) -> None:
    error = zero2.refused(text)
    assert (type(error), error.code, words in str(error)) == (RecipeError, code, True)


def test_compose__refuses_another_dtype_than_the_sources(zero2: Pair) -> None:
    text = "slices: [{sources: [{model: new, layer_range: [0, 3]}]}]\nmerge_method: passthrough\ndtype: bfloat16\n"
    names = ("model.norm.weight", "lm_head.weight", "model.embed_tokens.weight")
    weights = ", ".join(f"{{name: {n}, model: new}}" for n in names)
    assert zero2.refused(f"{text}post_weights: [{weights}]").code == "checkpoint.mismatch"


def test_compose__touches_nothing_that_is_not_its_own(zero2: Pair) -> None:
    staging = staging_directory(zero2.out)
    staging.symlink_to(zero2.folder / "old")
    before = tree(zero2.folder / "old")
    with pytest.raises(OutputError) as caught:
        zero2.compose(PARITY)
    assert (caught.value.code, tree(zero2.folder / "old")) == ("output.link", before)
    staging.unlink()
    zero2.compose(PARITY)
    (zero2.out / "notes").write_text("precious")
    with pytest.raises(OutputError, match="notes") as caught:
        zero2.compose(PARITY, replace(FULL, force=True))
    assert caught.value.code == "output.not-ours"
    assert (zero2.out / "notes").read_text() == "precious"


# --- failures


def test_compose__notices_bytes_that_were_written_wrongly(zero2: Pair) -> None:
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states = checkpoint_at(zero2.folder / "new").states
    offset = states["model.embed_tokens.weight", "exp_avg"].pieces[0].offset

    def flip(pwrite: Callable[..., int]) -> Callable[..., int]:
        def write(descriptor: int, content: memoryview, at: int) -> int:
            if at == 0 and str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith(name):
                content[offset] ^= 1
            return pwrite(descriptor, content, at)

        return write

    with replaced(os, "pwrite", flip), pytest.raises(CorruptError, match=r"model.*: exp_avg differs") as caught:
        zero2.compose(PARITY)
    assert (caught.value.code, zero2.out.exists(), hidden(zero2.folder)) == ("output.damaged", False, [])


@pytest.mark.parametrize("during", ["write_files", "_check_structure"])
def test_compose__notices_a_source_that_changes_meanwhile(zero2: Pair, during: str) -> None:
    victim = sorted((zero2.folder / "old").iterdir())[0]

    def touch(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            times = victim.stat()
            os.utime(victim, ns=(times.st_atime_ns, times.st_mtime_ns))  # as after an edit, set back
            return function(*args, **options)

        return called

    with replaced(modules[compose.__module__], during, touch), pytest.raises(ConflictError) as caught:
        zero2.compose(PARITY)
    assert (caught.value.code, zero2.out.exists()) == ("input.changed", False)


def test_compose__stops_when_the_caller_does(zero2: Pair) -> None:
    def stop(progress: Progress) -> None:
        if progress.done_bytes != 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tailor.compose(zero2.recipe(PARITY), zero2.out, options=FULL, on_progress=stop)
    assert (zero2.out.exists(), hidden(zero2.folder), worker_threads(2)) == (False, [], [])


# --- partial sources


@pytest.fixture
def with_partial(tmp_path: Path) -> Pair:
    """A complete checkpoint `old`, and units of `new` in a partial one."""
    pair = make_pair(tmp_path, lambda p, k: write_zero3(p, k, [list(k.shapes)], 2))
    shutil.rmtree(tmp_path / "new")
    write_partial(tmp_path / "new", pair.new, (EMBED, layer(1)))
    return pair


def test_compose__takes_units_from_a_partial_checkpoint(with_partial: Pair) -> None:
    report = with_partial.compose("default: old\ntake: [{from: new, units: [embed, layer 1]}]\n")
    old = [n for n in with_partial.old.shapes if "embed_tokens" not in n and ".layers.1." not in n]
    assert wrong_values(with_partial.out, with_partial, old) == []
    assert report.plan.assignment.skeleton.step == 7
    ages = {unit.unit: [source.age for source in unit.sources] for unit in report.plan.staleness}
    assert ages == {"embed": [-2], "layer 0": [0], "layer 1": [-2], "layer 2": [0], "norm": [0], "lm_head": [0]}


def test_compose__refuses_units_that_a_partial_checkpoint_lacks(with_partial: Pair) -> None:
    error = with_partial.refused("default: old\ntake: [{from: new, units: [layers 0-1]}]\n")
    assert error.code == "checkpoint.mismatch"
    (problem,) = error.problems
    assert "of model.layers.0." in problem.message


def test_compose__needs_the_full_base_of_a_partial_checkpoint(with_partial: Pair) -> None:
    assert with_partial.refused("default: new\n").code == "checkpoint.mismatch"
    error = with_partial.refused("default: old\nstate_from: new\n")
    assert (error.code, "to resume from" in str(error)) == ("checkpoint.damaged", True)


def trainer_partial(folder: Path, known: KnownStates, rates: tuple[float, ...], *names: str) -> None:
    """A partial checkpoint of a plain Trainer run, all units, with small files of the given names."""
    options = tuple({"lr": rate} for rate in rates)
    texts = {name: f"{name} at {known.step}" for name in names}
    texts |= {name: json.dumps({"global_step": known.step}) for name in names if name.endswith("json")}

    def change(view: EngineView) -> EngineView:
        trainer = Framework.TRANSFORMERS
        layout = replace(view.layout, origin=HF_FORMAT, framework=trainer, stage=None, flat_groups=(), options=options)
        return replace(view, layout=layout)

    files = {name: text.encode() for name, text in texts.items()}
    write_partial(folder, known, world_size=1, change=change, files=files)


STATE_NAMES = ("trainer_state.json", "scheduler.pt", "rng_state.pth")


@pytest.fixture
def trainer(tmp_path: Path) -> Pair:
    """A complete Trainer checkpoint `old`, with the usual small files, and a partial one to be made `new`."""
    pair = make_pair(tmp_path, write_hf)
    shutil.rmtree(tmp_path / "new")
    for name in STATE_NAMES[1:]:
        (tmp_path / "old" / name).write_text(f"{name} at 7")
    return pair


def test_compose__resumes_at_the_step_of_a_partial_checkpoint(trainer: Pair) -> None:
    trainer_partial(trainer.folder / "new", trainer.new, (0.25, 0.5), *STATE_NAMES)
    report = trainer.compose("default: old\ntake: [{from: new, units: [layers all]}]\nstate_from: new\n")
    old = [n for n in trainer.old.shapes if ".layers." not in n]
    assert wrong_values(trainer.out, trainer, old) == []
    assert checkpoint_at(trainer.out).step == 9
    assert [(trainer.out / name).read_text() for name in STATE_NAMES[1:]] == ["scheduler.pt at 9", "rng_state.pth at 9"]
    root = torch_archive(trainer.out / "optimizer.pt").root
    rates = [group.get("lr").value for group in Node(root, "optimizer.pt").get("param_groups").elements()]
    assert rates == [0.25, 0.5]
    with zipfile.ZipFile(trainer.out / "optimizer.pt") as archive:
        assert archive.testzip() is None
    ages = {unit.unit: [source.age for source in unit.sources] for unit in report.plan.staleness}
    assert (ages["layer 1"], ages["embed"]) == ([0], [2])
    assert not (trainer.out / "mergepipe-partial.json").exists()


@pytest.mark.parametrize(
    ("rates", "names", "code", "words"),
    [
        ((0.25, 0.5), STATE_NAMES[1:], "checkpoint.damaged", "holds no trainer_state.json"),
        ((0.25, 0.5), STATE_NAMES[:2], "checkpoint.damaged", "holds no rng_state.pth"),
        ((0.25,), STATE_NAMES, "checkpoint.mismatch", "has learning rates"),
    ],
)
def test_compose__refuses_a_partial_state_that_is_not_whole(
    trainer: Pair, rates: tuple[float, ...], names: tuple[str, ...], code: str, words: str
) -> None:
    trainer_partial(trainer.folder / "new", trainer.new, rates, *names)
    error = trainer.refused("default: old\nstate_from: new\n")
    assert (error.code, words in str(error)) == (code, True)


# --- verify: every file by its digest, and nothing that cannot be done is pretended


RECIPE = "default: old\ntake: [{from: new, units: [layers all]}]\n"


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_NAME)


@pytest.fixture
def composite(tmp_path: Path) -> Path:
    pair = make_pair(tmp_path, FORMATS["zero3"])
    pair.compose(RECIPE)
    return pair.out


def test_verify__names_the_damaged_file_of_a_composite(composite: Path) -> None:
    found = []
    for path in files_of(composite):
        sound = path.read_bytes()
        for damaged in (sound[:-1] + bytes([sound[-1] ^ 1]), sound[:-1], sound + b"x", None):
            path.unlink() if damaged is None else path.write_bytes(damaged)
            (damage,) = mergepipe.verify(composite).damages
            assert damage.file == path.relative_to(composite).as_posix()
            found.append(damage.kind)
        path.write_bytes(sound)
    assert set(found) == {"small-file", "size", "missing"}
    report = mergepipe.verify(composite)
    assert (report.is_sound, report.files > 1) == (True, True)
    assert report.read_bytes == sum(path.stat().st_size for path in files_of(composite))


def test_verify__believes_no_composite_manifest_that_was_edited(composite: Path) -> None:
    manifest = composite / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace("layers all", "layers 0-1"))
    with refuses(CorruptError, "format.damaged"):
        mergepipe.verify(composite)


def test_verify__cannot_make_a_composite_again(composite: Path) -> None:
    with refuses(UnsupportedError, "snapshot.composite"):
        mergepipe.verify(composite, deep_fraction=0.1)
