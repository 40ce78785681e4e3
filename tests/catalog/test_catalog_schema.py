"""The catalog's schema is one version: the golden file of it opens with all it holds, others are refused by name."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from catalog_cases import NOON, make_manifest, make_statistics, same_bits
from make_golden import DENSITIES, golden_checkpoint

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.rebuild import rebuild
from mergepipe.catalog.schema import SCHEMA_VERSION, TABLES
from mergepipe.errors import UnsupportedError

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    shutil.copyfile(GOLDEN / f"catalog-{SCHEMA_VERSION}" / CATALOG_NAME, tmp_path / CATALOG_NAME)
    return tmp_path


def expect_golden(catalog: Catalog) -> None:
    base, expert = catalog.models()
    assert catalog.model_for(golden_checkpoint("base")) == base
    assert catalog.model_for(golden_checkpoint("expert")) == expert
    assert (base.content_id, expert.content_id) == (None, "c" * 32)
    assert same_bits(catalog.statistics(expert, base)["t.weight"], make_statistics(1, densities=DENSITIES))
    assert catalog.tensors_on_record(expert, base) == {"t.weight", "u"}
    assert [(row.path, row.sid, row.created) for row in catalog.snapshots()] == [
        (Path("/nowhere", name), make_manifest(name).sid, NOON) for name in ("two", "one")
    ]


def test_golden__opens_with_all_it_holds(home: Path) -> None:
    for _ in range(2):
        with Catalog.open(home) as catalog:
            expect_golden(catalog)
            catalog.check_integrity()


def test_golden__has_the_schema_of_a_new_catalog(home: Path, tmp_path: Path) -> None:
    select = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
    schemas = []
    for place in (home, tmp_path / "new"):
        with Catalog.open(place) as catalog, contextlib.closing(sqlite3.connect(catalog.path)) as connection:
            schemas.append(connection.execute(select).fetchall())
    assert schemas[0] == schemas[1]
    assert {row[1] for row in schemas[0] if row[0] == "table"} == set(TABLES)


def test_open__an_older_catalog_is_refused_and_a_rebuild_sets_it_aside(tmp_path: Path) -> None:
    content = (GOLDEN / "catalog-2" / CATALOG_NAME).read_bytes()
    (tmp_path / CATALOG_NAME).write_bytes(content)
    with pytest.raises(UnsupportedError, match="analyze again") as caught:
        Catalog.open(tmp_path)
    assert caught.value.code == "catalog.older"
    assert (tmp_path / CATALOG_NAME).read_bytes() == content
    aside = rebuild(tmp_path, []).moved_aside
    assert aside is not None
    assert (aside.name, aside.read_bytes()) == (f"{CATALOG_NAME}.corrupt-1", content)
    with Catalog.open(tmp_path) as catalog:
        assert catalog.models() == ()
