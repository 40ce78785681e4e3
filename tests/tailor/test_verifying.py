"""`mergepipe verify` of a composite: every file by its digest, and nothing that cannot be done is pretended."""

from __future__ import annotations

from pathlib import Path

import pytest
from composing import FORMATS, make_pair

import mergepipe
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.snapshots.manifest import MANIFEST_NAME
from support.refusals import refuses

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
