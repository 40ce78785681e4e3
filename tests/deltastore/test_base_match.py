"""Finding the base of an expert among candidates, by few bytes, and telling of a base that is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from packing_cases import PackFamily, content_of, halves, make_family, write_model

import mergepipe
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.deltastore.job import match_base
from mergepipe.errors import MismatchError, RecipeError
from mergepipe.reports import Progress
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from support.bucket_outputs import files_below
from support.local_models import open_local
from support.model_folders import write_model as write_tensors
from support.refusals import refuses


@pytest.fixture(scope="module", name="family")
def make_shared_family(tmp_path_factory: pytest.TempPathFactory) -> PackFamily:
    """Bases are `base`, `expert-2` as its further training, and `other`, of the same shapes and unrelated."""
    family = make_family(tmp_path_factory.mktemp("family"), 2)
    rng = np.random.default_rng(8)
    shapes = {"a.wide": (1, 40000), "b.norm": (777,), "c.square": (512, 513)}
    other = {name: halves((rng.standard_normal(shape) * 0.02).astype(np.float32)) for name, shape in shapes.items()}
    write_model(family.root / "other", other)
    return family


def chosen_bases(report: mergepipe.PackReport) -> list[Path]:
    return [expert.match.base.local_path for expert in report.experts if expert.match is not None]


def opened(store: LocalStore, *paths: Path) -> list[Checkpoint]:
    return [open_local(path, store) for path in paths]


def test_match__finds_the_nearest_candidate_from_few_bytes(family: PackFamily) -> None:
    store = LocalStore()
    expert, *candidates = opened(store, family.experts[0], family.root / "other", family.experts[1], family.base)
    header_bytes = store.ledger.usage()[Purpose.METADATA]
    number, match = match_base(store, expert, candidates)
    assert (number, match.base, match.next_base) == (2, candidates[2].path, candidates[1].path)
    assert match.relative_delta == pytest.approx(1e-4 / 0.02, rel=0.2)  # by construction
    assert match.next_delta == pytest.approx(5**0.5 * 1e-4 / 0.02, rel=0.2)
    assert match.nearest_fraction == 1.0
    assert match.is_sure
    read_bytes = store.ledger.usage()[Purpose.METADATA] - header_bytes
    assert 0 < read_bytes <= 4 * (128 << 10)


def test_match__of_an_expert_of_another_dtype_is_by_its_values(family: PackFamily, tmp_path: Path) -> None:
    """Such an expert is packed relative to the converted base."""
    write_tensors(tmp_path / "wide", dict(mergepipe.load_file(family.base)))  # as float32
    store = LocalStore()
    expert, other, base = opened(store, tmp_path / "wide", family.root / "other", family.base)
    number, match = match_base(store, expert, [other, base])
    assert (number, match.relative_delta, match.is_sure) == (1, 0.0, True)


@pytest.mark.parametrize("content", [{}, {"n": np.array([0x7FC0, 0x7F80, 0x7F81], np.uint16)}])
def test_match__of_an_expert_without_a_finite_weight_is_the_first_candidate(
    tmp_path: Path, content: dict[str, np.ndarray]
) -> None:
    store = LocalStore()
    path = tmp_path / "model.safetensors"
    path.write_bytes(content_of(content))
    (expert,) = opened(store, path)
    number, match = match_base(store, expert, [expert])
    assert (number, match.relative_delta) == (0, 0.0)


def test_pack__without_a_base_takes_the_nearest_candidate_of_each_expert(family: PackFamily, tmp_path: Path) -> None:
    mergepipe.pack(family.base, [family.experts[0]], tmp_path / "wanted")
    report = mergepipe.pack([family.root / "other", family.base], [family.experts[0]], tmp_path / "packed")
    assert files_below(tmp_path / "packed") == files_below(tmp_path / "wanted")
    assert chosen_bases(report) == [family.base]


def test_pack__experts_of_two_bases_in_one_call(family: PackFamily, tmp_path: Path) -> None:
    twin = shutil.copytree(family.root / "other", tmp_path / "twin")
    report = mergepipe.pack([family.base, family.root / "other"], [twin, family.experts[0]], tmp_path / "packed")
    assert chosen_bases(report) == [family.root / "other", family.base]
    assert report.experts[0].blocks == {"same": 4}
    mergepipe.unpack(tmp_path / "packed" / "twin", tmp_path / "again")
    assert files_below(tmp_path / "again") == files_below(twin)


def test_pack__tells_of_a_wrong_base_before_anything_is_written(family: PackFamily, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    seen: list[tuple[tuple[str, ...], bool]] = []

    def watch(progress: Progress) -> None:
        seen.append((progress.notices, out.exists()))

    with refuses(MismatchError, "base.mismatch", r"deltas have 14\d % of the size of the weights"):
        mergepipe.pack(family.root / "other", [family.experts[0]], out, strict=True, on_progress=watch)
    assert not out.exists()
    mergepipe.pack(family.root / "other", [family.experts[0]], out, on_progress=watch)
    (notice, was_there), *_ = seen
    assert "14" in notice[0]
    assert "other" in notice[0]
    assert not was_there


def test_pack__that_is_not_sure_of_the_base_says_so(family: PackFamily, tmp_path: Path) -> None:
    twin = shutil.copytree(family.base, tmp_path / "twin")
    notices: list[str] = []
    report = mergepipe.pack(
        [family.base, twin], [family.experts[0]], tmp_path / "packed", on_progress=lambda p: notices.extend(p.notices)
    )
    assert (len(notices), chosen_bases(report)) == (1, [family.base])
    assert "is equally near" in notices[0]


def test_pack__a_base_named_twice_is_one_candidate_and_none_is_refused(family: PackFamily, tmp_path: Path) -> None:
    again = family.root / "other" / ".." / family.base.name
    report = mergepipe.pack([family.base, again], [family.experts[0]], tmp_path / "packed", strict=True)
    assert chosen_bases(report) == [family.base]
    with refuses(RecipeError, "option.missing"):
        mergepipe.pack([], [family.experts[0]], tmp_path / "packed")


def test_pack__of_integers_alone_tells_that_its_base_was_not_compared(tmp_path: Path) -> None:
    for name in ("base", "expert"):
        write_tensors(tmp_path / name, {"ids": np.arange(9000, dtype=np.int32)})
    with refuses(MismatchError, "base.mismatch", "no floating-point tensor"):
        mergepipe.pack(tmp_path / "base", [tmp_path / "expert"], tmp_path / "packed", strict=True)
    report = mergepipe.pack(tmp_path / "base", [tmp_path / "expert"], tmp_path / "packed")
    (expert,) = report.experts
    assert expert.match is not None
    assert not expert.match.is_sure
