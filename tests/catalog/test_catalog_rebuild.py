"""Making the catalog again from manifests; several processes and threads on one: every row arrives."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from catalog_cases import NOON, make_checkpoint, make_manifest, publish

from mergepipe import Catalog
from mergepipe.catalog.catalog import rebuild
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.cli.printing import report_text
from mergepipe.errors import NotFoundError
from mergepipe.snapshots.manifest import COMPOSITE_FORMAT
from support.public_names import MANIFEST_NAME
from support.refusals import refuses


def family(tmp_path: Path, n_models: int = 2) -> None:
    """A home with the digests of models and with one snapshot of them, closed."""
    checkpoints = [make_checkpoint(tmp_path / "models" / name) for name in ("base", "expert")]
    checkpoints += [make_checkpoint(tmp_path / "models" / f"m{number}") for number in range(2, n_models)]
    catalog = Catalog(tmp_path / "home")
    for number, checkpoint in enumerate(checkpoints):
        catalog.record_digests(with_digests(checkpoint, {checkpoint.files[0].location: f"{number:064x}"}))
    manifest = publish(tmp_path / "out" / "one", tuple(each.path.local_path for each in checkpoints[:2]))
    catalog.record_snapshot(manifest, tmp_path / "out" / "one", created=NOON)


def test_rebuild__of_a_sound_catalog_changes_nothing_and_tells_of_a_snapshot_that_is_gone(tmp_path: Path) -> None:
    family(tmp_path)
    before = Catalog(tmp_path / "home").snapshots()
    report = rebuild(tmp_path / "home", [tmp_path / "out"])
    assert (report.snapshots, report.missing, report.unreadable) == (1, (), ())
    assert Catalog(tmp_path / "home").snapshots() == before
    catalog = Catalog(tmp_path / "home")
    assert catalog.stats().digests == 2
    shutil.rmtree(tmp_path / "out" / "one")
    assert rebuild(tmp_path / "home", [tmp_path / "out"]).missing == (tmp_path / "out" / "one",)
    assert Catalog(tmp_path / "home").snapshots() == before


def test_rebuild__finds_snapshots_that_were_never_recorded_and_their_lineage(tmp_path: Path) -> None:
    family(tmp_path)
    publish(tmp_path / "out" / "deep" / "er" / "two", (tmp_path / "out" / "one",))
    report = rebuild(tmp_path / "new-home", [tmp_path / "out"])
    assert report.snapshots == 2
    catalog = Catalog(tmp_path / "new-home")
    nodes = catalog.lineage(tmp_path / "out" / "deep" / "er" / "two")
    assert [Path(node.path).name for node in nodes] == ["two", "one", "base", "expert"]


def test_rebuild__leaves_out_training_composites_and_names_them(tmp_path: Path) -> None:
    family(tmp_path)
    composite = tmp_path / "out" / "run" / "checkpoint-9"
    composite.mkdir(parents=True)
    (composite / MANIFEST_NAME).write_text(
        json.dumps({"format": COMPOSITE_FORMAT.title, "kind": "composite", "sid": "0" * 32})
    )
    report = rebuild(tmp_path / "home", [tmp_path / "out"])
    assert (report.snapshots, report.composites, report.unreadable, report.missing) == (1, (composite,), (), ())
    assert f"{composite}: a training checkpoint" in report_text(report)
    (row,) = Catalog(tmp_path / "home").snapshots()
    assert row.path == tmp_path / "out" / "one"


def test_rebuild__looks_at_known_paths_without_being_told(tmp_path: Path) -> None:
    family(tmp_path)
    assert rebuild(tmp_path / "home", []).snapshots == 1


def test_rebuild__does_not_see_staging_or_follow_links(tmp_path: Path) -> None:
    publish(tmp_path / "roots" / ".out.mergepipe-123456")
    publish(tmp_path / "elsewhere")
    (tmp_path / "roots" / "link").symlink_to(tmp_path / "elsewhere")
    assert rebuild(tmp_path / "home", [tmp_path / "roots"]).snapshots == 0


def test_rebuild__tells_which_manifests_cannot_be_read_and_takes_the_others(tmp_path: Path) -> None:
    family(tmp_path)
    publish(tmp_path / "out" / "bad")
    (tmp_path / "out" / "bad" / "mergepipe.json").write_bytes(b"{")
    report = rebuild(tmp_path / "home", [tmp_path / "out"])
    assert report.snapshots == 1
    assert [problem.code for problem in report.unreadable] == ["format.damaged"]


@pytest.mark.parametrize("leave_link", [False, True])
def test_rebuild__a_moved_snapshot_moves_with_all_that_was_known(tmp_path: Path, leave_link: bool) -> None:
    family(tmp_path)
    catalog = Catalog(tmp_path / "home")
    manifest = publish(tmp_path / "out" / "two", (tmp_path / "out" / "one",))
    known = catalog.record_snapshot(manifest, tmp_path / "out" / "two", created=NOON)
    shutil.rmtree(tmp_path / "out" / "one")  # so that its sid can only come from the old row
    (tmp_path / "out" / "two").rename(tmp_path / "out" / "moved")
    if leave_link:
        (tmp_path / "out" / "two").symlink_to(tmp_path / "out" / "moved")
    report = rebuild(tmp_path / "home", [tmp_path / "out"])
    assert report.missing == (tmp_path / "out" / "one",)
    assert {row.path.name for row in Catalog(tmp_path / "home").snapshots()} == {"one", "moved"}
    catalog = Catalog(tmp_path / "home")
    moved = catalog.snapshot(tmp_path / "out" / "moved")
    assert moved.inputs == known.inputs
    assert moved.inputs[0].sid is not None
    assert moved.created == NOON


def test_adopt_snapshot__without_a_manifest_is_not_found(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    with refuses(NotFoundError, "snapshot.not-found"):
        catalog.adopt_snapshot(tmp_path, (), created=NOON)
    catalog.record_snapshot(make_manifest("a"), tmp_path / "a", created=NOON)
    assert len(catalog.snapshots()) == 1


_SPAWN = multiprocessing.get_context("spawn")


@pytest.mark.thorough
def test_catalog__threads_share_one_catalog(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")

    def record(seed: int) -> bool:
        row = catalog.record_snapshot(make_manifest(f"{seed}"), tmp_path / f"out-{seed}", created=NOON)
        return catalog.snapshot(tmp_path / f"out-{seed}") == row

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(record, range(80)))
    assert len(catalog.snapshots()) == 80


def record_until_killed(place: Path) -> None:
    catalog = Catalog(place / "home")
    for seed in range(1_000_000):
        catalog.record_snapshot(
            make_manifest(f"{seed}", (place / "base", place / "expert")), place / f"out-{seed}", created=NOON
        )


@pytest.mark.thorough
def test_catalog__a_killed_process_leaves_whole_snapshots(tmp_path: Path) -> None:
    for name in ("base", "expert"):
        make_checkpoint(tmp_path / name)
    catalog = Catalog(tmp_path / "home")
    process = _SPAWN.Process(target=record_until_killed, args=(tmp_path,))
    process.start()
    while len(catalog.snapshots()) < 40:
        process.join(0.01)
        assert process.is_alive()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    catalog = Catalog(tmp_path / "home")
    assert {len(row.inputs) for row in catalog.snapshots()} == {2}
