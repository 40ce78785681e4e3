"""One pass over a base and several experts: the same stores, each byte read once, one failure apart from the others."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from packing_cases import SHAPES, PackFamily, halves, make_family, store_tree, write_model

import mergepipe
from mergepipe.deltastore import encode_pass as pack_pass
from mergepipe.errors import ConflictError
from mergepipe.reports import Progress
from mergepipe.snapshots.staging import Staging
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalFile
from support.faults import open_descriptors
from support.refusals import refuses

TENSOR_BYTES = 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())


@pytest.fixture(scope="module", name="family")
def make_shared_family(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    return make_family(tmp_path_factory.mktemp("family"), 3)


@pytest.fixture(scope="module", name="wanted")
def pack_one_by_one(family: PackFamily) -> dict[str, bytes]:
    for expert in family.experts:
        mergepipe.pack(family.base, [expert], family.root / "wanted", threads=1)
    return store_tree(family.root / "wanted")


@pytest.mark.parametrize("threads", [1, 4])
def test_pack__of_many_at_once_gives_the_stores_of_one_by_one(
    family: PackFamily, wanted: dict[str, bytes], tmp_path: Path, threads: int
) -> None:
    report = mergepipe.pack(family.base, family.experts, tmp_path, threads=threads)
    assert store_tree(tmp_path) == wanted
    assert [each.expert.local_path for each in report.experts] == list(family.experts)
    assert all(sum(each.blocks.values()) > 4 for each in report.experts)


def test_pack__of_more_than_fit_at_once_gives_the_same(
    family: PackFamily, wanted: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergepipe.jobs.pack.EXPERTS_AT_ONCE", 2)
    monkeypatch.setattr(pack_pass, "REQUEST_BYTES", 1)  # a block at a time
    mergepipe.pack(family.base, family.experts, tmp_path, threads=3)
    assert store_tree(tmp_path) == wanted


def test_pack__reads_the_base_once_for_all(family: PackFamily, tmp_path: Path) -> None:
    report = mergepipe.pack(family.base, family.experts, tmp_path)
    assert TENSOR_BYTES <= report.base_bytes <= 1.02 * TENSOR_BYTES + 4096 * 16
    assert 3 * TENSOR_BYTES <= report.expert_bytes <= 3 * (1.02 * TENSOR_BYTES + 4096 * 16)


def test_pack__reads_several_blocks_at_a_time(
    family: PackFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = LocalFile.read_into

    def watched(file: LocalFile, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        if purpose is not Purpose.METADATA:  # samples by which the base is checked
            sizes.append(len(buffer))
        return read(file, offset, buffer, purpose)

    monkeypatch.setattr(LocalFile, "read_into", watched)
    mergepipe.pack(family.base, family.experts, tmp_path)
    assert len([size for size in sizes if size > 1 << 20]) == 4  # the wide tensor of each, in one request
    assert len(sizes) <= 4 * len(SHAPES)


def test_pack__of_an_expert_that_changes_meanwhile_publishes_the_others(
    family: PackFamily, wanted: dict[str, bytes], tmp_path: Path
) -> None:
    changing = shutil.copytree(family.experts[0], tmp_path / "changing")
    experts = [changing, family.experts[1]]

    def touch(_: Progress) -> None:
        os.utime(changing / "notes.txt", ns=(1, 1))

    with refuses(ConflictError, "input.changed", r"notes\.txt"):
        mergepipe.pack(family.base, experts, tmp_path / "stores", on_progress=touch)
    assert [path.name for path in (tmp_path / "stores").iterdir()] == ["expert-2"]
    assert store_tree(tmp_path / "stores" / "expert-2") == {
        name.removeprefix("expert-2/"): content for name, content in wanted.items() if name.startswith("expert-2/")
    }


def test_pack__refuses_a_place_where_another_run_packs(family: PackFamily, tmp_path: Path) -> None:
    with Staging(tmp_path / "expert-1", force=False), refuses(ConflictError, "output.busy"):
        mergepipe.pack(family.base, family.experts[:1], tmp_path)


def test_pack__says_why_blocks_are_not_in_bands(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    base = {"big": rng.standard_normal((90, 90)).astype(np.float32), "small": np.ones((7,), np.float32)}
    odd = {**base, "big": base["big"].copy()}
    odd["big"][3, 4] = np.nan
    moved = {name: halves((values * 1.01).astype(np.float32)) for name, values in odd.items()}
    write_model(tmp_path / "base", {name: halves(values) for name, values in base.items()})
    write_model(tmp_path / "expert", {**moved, "extra": halves(np.ones((5,), np.float32))})
    report = mergepipe.pack(tmp_path / "base", [tmp_path / "expert"], tmp_path / "stores")
    assert report.experts[0].blocks == {"bytes": 2, "raw": 1}
    assert report.experts[0].outside_bands == {
        "fewer than 4096 elements": 1, "no such tensor in the base": 1, "not finite, or no smaller in levels": 1,
    }  # fmt: skip


def test_pack__raises_the_limit_of_open_files_for_as_many_experts_as_are_packed_at_once(tmp_path: Path) -> None:
    tensors = {"a": halves(np.ones(100, np.float32))}
    places = [write_model(tmp_path / f"model-{i}", tensors) for i in range(1 + pack_pass.EXPERTS_AT_ONCE)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(open_descriptors()) + 60, hard))
    try:
        report = mergepipe.pack(places[0], places[1:], tmp_path / "stores", threads=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(expert.is_new for expert in report.experts)


def test_progress_of_pack__is_the_bytes_of_the_experts(family: PackFamily, tmp_path: Path) -> None:
    seen: list[Progress] = []
    report = mergepipe.pack(family.base, family.experts, tmp_path, on_progress=seen.append)
    assert [progress.phase for progress in seen] == ["pack"] * len(seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes == 3 * TENSOR_BYTES
    assert [each.done_bytes for each in seen] == sorted(each.done_bytes for each in seen)
    assert report.seconds >= sum(each.seconds for each in report.experts) > 0
