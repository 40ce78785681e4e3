"""Digests of files are known for the version that they were taken of, wherever a link leads there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from catalog_cases import WEIGHTS_NAME, make_checkpoint, reopened, rewrite

from mergepipe.catalog.catalog import Catalog
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.errors import UnsupportedError
from mergepipe.storage.location import Location
from support.refusals import refuses

SHA256 = "ab" * 32


def digest_known(catalog: Catalog, checkpoint: Checkpoint) -> str | None:
    return catalog.with_known_digests(checkpoint).files[0].sha256


@pytest.fixture(name="model")
def with_digest(tmp_path: Path) -> Checkpoint:
    model = make_checkpoint(tmp_path / "model")
    with Catalog.open(tmp_path / "home") as catalog:
        catalog.record_digests(with_digests(model, {WEIGHTS_NAME: SHA256}))
    return model


def test_digests__are_known_of_the_same_version_and_of_no_other(tmp_path: Path, model: Checkpoint) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        assert digest_known(catalog, model) == SHA256
        (file,) = model.files
        assert digest_known(catalog, replace(model, files=(replace(file, size_bytes=file.size_bytes + 1),))) is None
        assert digest_known(catalog, make_checkpoint(tmp_path / "other")) is None
        rewrite(tmp_path / "model" / WEIGHTS_NAME, b"wEights")
        assert digest_known(catalog, reopened(model)) is None


def test_digests__are_found_through_links(tmp_path: Path, model: Checkpoint) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "model")
    place = Location.local(tmp_path / "link")
    with Catalog.open(tmp_path / "home") as catalog:
        assert digest_known(catalog, replace(model, path=place, root=place)) == SHA256


def test_digests__a_later_version_takes_the_place_of_an_earlier_one(tmp_path: Path, model: Checkpoint) -> None:
    rewrite(tmp_path / "model" / WEIGHTS_NAME, b"wEights")
    later = reopened(model)
    with Catalog.open(tmp_path / "home") as catalog:
        catalog.record_digests(with_digests(later, {WEIGHTS_NAME: "cd" * 32}))
        assert (digest_known(catalog, model), digest_known(catalog, later)) == (None, "cd" * 32)
        assert catalog.stats().digests == 1


def test_digests__that_fingerprints_hold_are_kept(tmp_path: Path, model: Checkpoint) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        assert digest_known(catalog, with_digests(model, {WEIGHTS_NAME: "ef" * 32})) == "ef" * 32


def test_digests__of_a_path_that_is_not_text_are_refused(tmp_path: Path) -> None:
    model = with_digests(make_checkpoint(tmp_path / "caf\udce9"), {WEIGHTS_NAME: SHA256})
    with Catalog.open(tmp_path / "home") as catalog, refuses(UnsupportedError, "catalog.path-encoding"):
        catalog.record_digests(model)
