"""What inspect reports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mergepipe.cli.printing import report_json
from mergepipe.storage.location import Location
from mergepipe.tailor.inspection import InspectReport, inspect_checkpoints
from support.stores import MetadataStore
from support.training_trees import (
    decay_groups,
    decoder_shapes,
    known_states,
    write_dcp,
    write_hf,
    write_zero3,
    write_zero12,
)

SHAPES = decoder_shapes()
KNOWN = known_states(SHAPES)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_zero12(tmp_path / "zero2", KNOWN, decay_groups(SHAPES), 2)
    write_zero12(tmp_path / "later", replace(KNOWN, step=9), decay_groups(SHAPES), 2)
    write_zero3(tmp_path / "zero3", KNOWN, decay_groups(SHAPES), 2)
    write_hf(tmp_path / "hf", KNOWN)
    write_dcp(tmp_path / "dcp", KNOWN, 2)
    return tmp_path


def inspected(run: Path, *names: str) -> InspectReport:
    return inspect_checkpoints(MetadataStore(), [Location.local(run / name) for name in names])


def test_inspect_checkpoints__counts_bytes_per_unit_and_kind(run: Path) -> None:
    (report,) = inspected(run, "zero2").checkpoints
    layer = next(u for u in report.units if u.unit == "layer 1")
    n_elements = sum(KNOWN.arrays[n, "fp32"].size for n in SHAPES if ".layers.1." in n)
    assert (layer.parameters, layer.elements) == (4, n_elements)
    assert dict(layer.bytes) == dict.fromkeys(("fp32", "exp_avg", "exp_avg_sq", "weight"), 4 * n_elements)
    assert report.bytes == 16 * sum(KNOWN.arrays[n, "fp32"].size for n in SHAPES)


def test_inspect_checkpoints__says_where_a_step_counter_is_shared(run: Path) -> None:
    report = inspected(run, "zero2", "hf", "dcp")
    shared = [{u.shared_step for u in c.units} for c in report.checkpoints]
    steps = {step for c in report.checkpoints for u in c.units for step in u.adam_steps}
    assert (shared, steps) == ([{True}, {False}, {False}], {7.0})


def test_inspect_checkpoints__says_why_two_do_not_fit(run: Path) -> None:
    for other, reason in (("zero3", "only one has weight"), ("dcp", "framework deepspeed and torch"), ("later", "")):
        report = inspected(run, "zero2", other)
        assert (report.comparable, reason in "; ".join(report.reasons)) == (not reason, True)
    for lost in (*run.rglob("zero2/*rank_1_*optim*"), *run.rglob("later/*rank_1_*optim*")):
        lost.unlink()
    assert inspected(run, "zero2", "later").reasons == ("none of them is complete: a composition needs one that is",)


def test_to_json__is_json_and_complete(run: Path) -> None:
    report = inspected(run, "zero2", "dcp")
    document = json.loads(report_json(report))
    assert [c["format"] for c in document["checkpoints"]] == ["deepspeed-zero", "torch-dcp"]
    assert [u["unit"] for u in document["checkpoints"][0]["units"]] == [
        "embed", "layer 0", "layer 1", "layer 2", "norm", "lm_head",
    ]  # fmt: skip
    assert document["comparable"] is False
