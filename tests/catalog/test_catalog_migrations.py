"""Catalogs of every published schema version open in this one, with all they hold."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
from pathlib import Path

import pytest
from catalog_cases import NOON, make_manifest, make_statistics, same_bits
from make_golden import DENSITIES, golden_checkpoint

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import open_database
from mergepipe.catalog.home import CATALOG_NAME
from mergepipe.catalog.migrations import MIGRATIONS, TABLES, Migration, migrate, schema_version
from mergepipe.catalog.rows import Evidence
from mergepipe.errors import UnsupportedError
from mergepipe.storage.local import LocalStore

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


VERSIONED = 2  # since when models are known by their files' versions: before, they and their statistics go


@pytest.fixture(params=[migration.number for migration in MIGRATIONS if migration.number >= VERSIONED])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    shutil.copyfile(GOLDEN / f"catalog-{request.param}" / CATALOG_NAME, tmp_path / CATALOG_NAME)
    return tmp_path


def expect_golden(catalog: Catalog) -> None:
    base, expert = catalog.models()
    assert catalog.model_for(golden_checkpoint("base")) == base
    assert catalog.model_for(golden_checkpoint("expert")) == expert
    assert (base.content_id, expert.content_id) == (None, "c" * 32)
    assert same_bits(catalog.statistics(expert, base)["t.weight"], make_statistics(1, densities=DENSITIES))
    assert catalog.evidence(expert, base) == {"t.weight": Evidence.EXACT, "u": Evidence.PROBE}
    assert [(row.path, row.sid, row.created) for row in catalog.snapshots()] == [
        (Path("/nowhere", name), make_manifest(name).sid, NOON) for name in ("two", "one")
    ]


def test_migrations__are_numbered_without_a_gap() -> None:
    assert [migration.number for migration in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))


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


_NEXT = Migration(
    MIGRATIONS[-1].number + 1,
    ("ALTER TABLE models ADD COLUMN note TEXT", "UPDATE models SET note = 'seen: ' || path", "CREATE TABLE extra (x)"),
)
_FAILING = Migration(_NEXT.number, (*_NEXT.statements, "INSERT INTO no_such_table VALUES (1)"))


def test_migrate__a_new_step_keeps_the_rows(home: Path) -> None:
    database = open_database(home, migrations=(*MIGRATIONS, _NEXT))
    with database.read_transaction() as connection:
        assert schema_version(connection) == _NEXT.number
        assert connection.execute("SELECT DISTINCT substr(note, 1, 5) FROM models").fetchall() == [("seen:",)]
    expect_golden(Catalog(database, LocalStore()))
    database.close()
    with pytest.raises(UnsupportedError):
        Catalog.open(home)


def test_migrate__a_step_that_fails_leaves_the_file_as_it_was(home: Path) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no_such_table"):
        open_database(home, migrations=(*MIGRATIONS, _FAILING))
    with Catalog.open(home) as catalog:
        expect_golden(catalog)
    with contextlib.closing(sqlite3.connect(home / CATALOG_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'extra'").fetchone() == (0,)


def test_migrate__a_step_that_another_process_made_is_not_made_again(home: Path) -> None:
    steps = (*MIGRATIONS, _NEXT)
    with contextlib.closing(sqlite3.connect(home / CATALOG_NAME, isolation_level=None)) as one:
        migrate(one, steps)
        migrate(one, steps)
        assert one.execute("SELECT count(*) FROM pragma_table_info('models') WHERE name = 'note'").fetchone() == (1,)


def test_golden__of_models_known_by_time_keeps_snapshots_alone(tmp_path: Path) -> None:
    shutil.copyfile(GOLDEN / "catalog-1" / CATALOG_NAME, tmp_path / CATALOG_NAME)
    with Catalog.open(tmp_path) as catalog:
        assert catalog.models() == ()
        assert [row.path.name for row in catalog.snapshots()] == ["two", "one"]
        catalog.check_integrity()
