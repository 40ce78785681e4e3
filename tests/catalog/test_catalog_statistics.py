"""Statistics in the catalog: complete, resumable, exact before estimated."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from catalog_cases import make_checkpoint, make_statistics, same_bits

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.rows import ModelRow
from mergepipe.errors import ConflictError, CorruptError
from support.family_shapes import QWEN3_0_6B


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(tmp_path / "home") as opened:
        yield opened


@pytest.fixture
def pair(catalog: Catalog, tmp_path: Path) -> tuple[ModelRow, ModelRow]:
    expert = catalog.register_model(make_checkpoint(tmp_path / "expert"))
    return expert, catalog.register_model(make_checkpoint(tmp_path / "base"))


def test_statistics__gives_back_what_was_put(catalog: Catalog, pair: tuple[ModelRow, ModelRow]) -> None:
    kept = {name: make_statistics(seed) for seed, name in enumerate(("b", "a", "c\0ü"))}
    for name, statistics in kept.items():
        assert catalog.put_many(*pair, {name: statistics})
    found = catalog.statistics(*pair)
    assert found.keys() == kept.keys()
    assert all(same_bits(found[name], kept[name]) for name in kept)


def test_statistics__belong_to_one_expert_and_one_base(catalog: Catalog, pair: tuple[ModelRow, ModelRow]) -> None:
    expert, base = pair
    catalog.put_many(expert, base, {"a": make_statistics(1)})
    assert catalog.statistics(base, expert) == {}
    catalog.put_many(base, expert, {"a": make_statistics(2)})
    assert same_bits(catalog.statistics(expert, base)["a"], make_statistics(1))
    assert same_bits(catalog.statistics(base, expert)["a"], make_statistics(2))


def test_put_many__is_all_or_nothing(catalog: Catalog, pair: tuple[ModelRow, ModelRow]) -> None:
    too_many = make_statistics(2, densities=tuple(range(70_000)))
    with pytest.raises(ValueError, match="70000 densities"):
        catalog.put_many(*pair, {"a": make_statistics(1), "b": too_many})
    assert catalog.statistics(*pair) == {}
    assert catalog.put_many(*pair, {"a": make_statistics(1), "b": make_statistics(2)}) == 2
    assert catalog.statistics(*pair).keys() == {"a", "b"}


def test_put_many__the_latest_counts(catalog: Catalog, pair: tuple[ModelRow, ModelRow]) -> None:
    for seed in (1, 2):
        assert catalog.put_many(*pair, {"a": make_statistics(seed)})
    assert same_bits(catalog.statistics(*pair)["a"], make_statistics(2))


def test_put_many__for_a_model_that_is_gone_is_a_conflict(catalog: Catalog, pair: tuple[ModelRow, ModelRow]) -> None:
    catalog.forget_models(pair[:1])
    with pytest.raises(ConflictError) as caught:
        catalog.put_many(*pair, {"a": make_statistics(1)})
    assert caught.value.code == "catalog.model-gone"
    assert catalog.statistics(*pair) == {}


def test_missing_statistics__is_what_analysis_still_has_to_do(
    catalog: Catalog, pair: tuple[ModelRow, ModelRow]
) -> None:
    names = ("z", "coarse", "done", "few")
    assert catalog.missing_statistics(*pair, names, 256, (0.1,)) == names
    catalog.put_many(*pair, {"done": make_statistics(1, densities=(0.1, 0.2))})
    catalog.put_many(*pair, {"few": make_statistics(2, densities=(0.2,))})
    catalog.put_many(*pair, {"coarse": make_statistics(3, block_elements=512, densities=(0.1,))})
    assert catalog.missing_statistics(*pair, names, 256, (0.1,)) == ("z", "coarse", "few")
    assert catalog.missing_statistics(*pair, names, 256, ()) == ("z", "coarse")
    assert catalog.missing_statistics(*pair, names, 512, (0.1,)) == ("z", "done", "few")


def test_put_many__is_there_for_the_next_run_without_a_close(tmp_path: Path) -> None:
    interrupted = Catalog.open(tmp_path / "home")
    expert = interrupted.register_model(make_checkpoint(tmp_path / "expert"))
    base = interrupted.register_model(make_checkpoint(tmp_path / "base"))
    interrupted.put_many(expert, base, {"a": make_statistics(1)})
    with Catalog.open(tmp_path / "home") as resumed:
        assert resumed.missing_statistics(expert, base, ("a", "b"), 256, ()) == ("b",)
    interrupted.close()


def _edit(catalog: Catalog, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(catalog.path)) as connection, connection:
        connection.execute(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE tensor_statistics SET packed = zeroblob(length(packed)) WHERE pk = 1",
        "UPDATE tensor_statistics SET packed = substr(packed, 1, 50) WHERE pk = 1",
        "UPDATE tensor_statistics SET packed = (SELECT packed FROM tensor_statistics WHERE pk = 2) WHERE pk = 1",
        "UPDATE tensor_names SET name = 'a' || name WHERE pk = 1",
    ],
)
def test_statistics__a_damaged_row_is_told_analysed_again_and_dropped(
    catalog: Catalog, pair: tuple[ModelRow, ModelRow], sql: str
) -> None:
    for seed, name in ((1, "a"), (2, "b")):
        catalog.put_many(*pair, {name: make_statistics(seed)})
    _edit(catalog, sql)
    with pytest.raises(CorruptError) as caught:
        catalog.statistics(*pair)
    assert caught.value.code == "catalog.corrupt-statistics"
    assert catalog.missing_statistics(*pair, ("a", "b"), 256, ()) == ("a",)
    assert catalog.drop_corrupt_statistics() == 1
    assert catalog.statistics(*pair).keys() == {"b"}


@pytest.mark.parametrize(("is_tied", "most_share"), [(False, 0.00025), (True, 0.00029)])
def test_catalog__takes_a_small_share_of_the_expert_it_describes(
    tmp_path: Path, is_tied: bool, most_share: float
) -> None:
    tensors = QWEN3_0_6B.tensors()
    block_elements = 256 * 1024
    with Catalog.open(tmp_path / "home") as catalog:
        base, *experts = (catalog.register_model(make_checkpoint(tmp_path / name)) for name in ("b", "x", "y"))
        sizes = []
        for expert in experts:
            for seed, tensor in enumerate(tensors):
                statistics = make_statistics(seed, tensor.n_elements, block_elements, is_tied=is_tied)
                catalog.put_many(expert, base, {tensor.name: statistics})
            with contextlib.closing(sqlite3.connect(catalog.path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sizes.append(catalog.stats().file_bytes)
        found = catalog.statistics(experts[0], base)
    expert_bytes = sum(2 * tensor.n_elements for tensor in tensors)
    assert (len(tensors), sum(statistics.grid.n_blocks for statistics in found.values())) == (310, 2387)
    assert sizes[0] <= (most_share + 0.00005) * expert_bytes
    assert sizes[1] - sizes[0] <= most_share * expert_bytes
