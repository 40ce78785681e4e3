"""Models in the catalog: found by fingerprint, never by path alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from catalog_cases import make_checkpoint, make_statistics, publish, reopened, rewrite

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import ModelKind, Staleness
from mergepipe.checkpoints.contract import FileFingerprint
from mergepipe.errors import UnsupportedError
from mergepipe.storage.location import Location


def test_register_model__describes_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "expert")
    with Catalog.open(tmp_path / "home") as catalog:
        row = catalog.register_model(checkpoint, "c" * 32)
        assert row.path.local_path == (tmp_path / "expert").resolve()
        assert (row.kind, row.content_id) == (ModelKind.DIRECTORY, "c" * 32)
        assert (row.n_tensors, row.n_parameters, row.tensor_bytes) == (2, 1024, 2048)
        assert row.dtypes == (("BF16", 1024),)
        assert row.files == checkpoint.files
        assert catalog.models() == (row,)


def test_register_model__twice_is_one_row(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "expert")
    (tmp_path / "link").symlink_to(tmp_path / "expert")
    with Catalog.open(tmp_path / "home") as catalog:
        row = catalog.register_model(checkpoint)
        assert catalog.register_model(checkpoint) == row
        assert (
            catalog.register_model(
                replace(checkpoint, path=Location.local(tmp_path / "link"), root=Location.local(tmp_path / "link"))
            )
            == row
        )
        assert catalog.models() == (row,)


@pytest.mark.parametrize("kind", list(ModelKind))
def test_register_model__tells_what_the_path_is(tmp_path: Path, kind: ModelKind) -> None:
    if kind is ModelKind.SNAPSHOT:
        publish(tmp_path / "expert")
    checkpoint = make_checkpoint(tmp_path / "expert", bare=kind is ModelKind.FILE)
    with Catalog.open(tmp_path / "home") as catalog:
        row = catalog.register_model(checkpoint)
        assert row.kind is kind
        assert row.root.local_path == (tmp_path / "expert").resolve()
        assert catalog.stale_models() == ()


def test_register_model__adds_a_content_id_and_keeps_it(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "expert")
    with Catalog.open(tmp_path / "home") as catalog:
        catalog.register_model(checkpoint)
        assert catalog.register_model(checkpoint, "c" * 32).content_id == "c" * 32
        assert catalog.register_model(checkpoint).content_id == "c" * 32
        assert len(catalog.models()) == 1


def test_register_model__another_content_under_the_same_fingerprint_drops_the_statistics(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "expert")
    with Catalog.open(tmp_path / "home") as catalog:
        base = catalog.register_model(make_checkpoint(tmp_path / "base"))
        row = catalog.register_model(checkpoint, "c" * 32)
        catalog.put_many(row, base, {"a.weight": make_statistics(1)})
        changed = catalog.register_model(checkpoint, "d" * 32)
        assert changed.content_id == "d" * 32
        assert catalog.statistics(changed, base) == {}
        assert len(catalog.models()) == 2


def test_model_for__finds_only_the_current_fingerprint(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "expert")
    with Catalog.open(tmp_path / "home") as catalog:
        assert catalog.model_for(checkpoint) is None
        row = catalog.register_model(checkpoint)
        assert catalog.model_for(checkpoint) == row
        rewrite(tmp_path / "expert/model.safetensors", b"changed")
        changed = reopened(checkpoint)
        assert catalog.model_for(changed) is None
        newer = catalog.register_model(changed)
        assert newer.id != row.id
        assert catalog.models() == (row, newer)


@pytest.mark.parametrize(
    "other",
    [
        FileFingerprint("other", 7, "5", "0" * 32),
        FileFingerprint("model.safetensors", 8, "5", "0" * 32),
        FileFingerprint("model.safetensors", 7, "6", "0" * 32),
        FileFingerprint("model.safetensors", 7, "5", "1" * 32),
    ],
)
def test_model_for__every_part_of_the_fingerprint_counts(tmp_path: Path, other: FileFingerprint) -> None:
    checkpoint = replace(
        make_checkpoint(tmp_path / "expert"), files=(FileFingerprint("model.safetensors", 7, "5", "0" * 32),)
    )
    with Catalog.open(tmp_path / "home") as catalog:
        row = catalog.register_model(checkpoint)
        assert catalog.model_for(checkpoint) == row
        assert catalog.model_for(replace(checkpoint, files=(other,))) is None
        assert catalog.model_for(replace(checkpoint, files=(*checkpoint.files, other))) is None


def test_model_for__the_same_files_elsewhere_are_another_model(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "expert")
    copy = replace(make_checkpoint(tmp_path / "copy"), files=checkpoint.files)
    with Catalog.open(tmp_path / "home") as catalog:
        catalog.register_model(checkpoint)
        assert catalog.model_for(copy) is None


def test_stale_models__tells_changed_from_missing(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        rows = [catalog.register_model(make_checkpoint(tmp_path / name)) for name in ("same", "changed", "missing")]
        rewrite(tmp_path / "changed/model.safetensors", b"changed")
        (tmp_path / "missing/model.safetensors").unlink()
        stale = {each.model: each.staleness for each in catalog.stale_models()}
        assert stale == {rows[1]: Staleness.CHANGED, rows[2]: Staleness.MISSING}


def test_forget_models__takes_their_statistics_along(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        base, one, two = (catalog.register_model(make_checkpoint(tmp_path / name)) for name in ("base", "one", "two"))
        for expert in (one, two):
            catalog.put_many(expert, base, {"a.weight": make_statistics(1)})
        assert catalog.forget_models([one]) == 1
        assert catalog.forget_models([one]) == 0
        assert (catalog.models(), catalog.stats().analysed_tensors) == ((base, two), 1)
        assert catalog.forget_models([base]) == 1
        assert catalog.stats().analysed_tensors == 0


def test_register_model__a_path_that_is_no_text_is_refused(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"bad-\xff")
    with Catalog.open(tmp_path / "home") as catalog:
        with pytest.raises(UnsupportedError) as caught:
            catalog.register_model(make_checkpoint(directory))
        assert caught.value.code == "catalog.path-encoding"
        assert "\\udcff" in str(caught.value)
        assert catalog.models() == ()
