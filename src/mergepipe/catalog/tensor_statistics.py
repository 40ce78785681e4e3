"""Rows of statistics: one packed row per tensor of an expert against a base."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from mergepipe.catalog.models import content_key_and_id
from mergepipe.catalog.rows import ModelRow
from mergepipe.catalog.statistics_bytes import pack, unpack
from mergepipe.errors import CorruptError
from mergepipe.operators.statistics import TensorStatistics

_CONTENT_OF_MODEL = "SELECT content FROM models WHERE id = ?"


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row as stored; `expert_id` and `base_id` are those of the contents."""

    pk: int
    expert_id: str
    base_id: str
    tensor: str
    packed: bytes

    def unpacked(self) -> TensorStatistics:
        """Unpack the statistics.

        Raises:
            CorruptError: `catalog.corrupt-statistics`.
        """
        return unpack(self.packed, subject_of(self.expert_id, self.base_id, self.tensor))

    @property
    def is_sound(self) -> bool:
        """Whether it can be unpacked."""
        try:
            self.unpacked()
        except CorruptError:
            return False
        return True


def subject_of(expert_id: str, base_id: str, tensor: str) -> str:
    """Describe which contents' statistics these are: part of the checksum, so that rows cannot be exchanged."""
    return f"tensor {tensor} of model {expert_id} against {base_id}"


def put(
    connection: sqlite3.Connection,
    expert: ModelRow,
    base: ModelRow,
    statistics: Mapping[str, TensorStatistics],
) -> int:
    """Store statistics of some tensors; return how many rows were written."""
    expert_key, expert_id = content_key_and_id(connection, expert)
    base_key, base_id = content_key_and_id(connection, base)
    pair = _pair_key(connection, expert_key, base_key)
    return sum(
        _put_row(connection, pair, tensor, pack(of_tensor, subject_of(expert_id, base_id, tensor)))
        for tensor, of_tensor in statistics.items()
    )


def _put_row(connection: sqlite3.Connection, pair: int, tensor: str, packed: bytes) -> int:
    return connection.execute(
        """
        INSERT INTO tensor_statistics (pair, tensor, packed) VALUES (?, ?, ?)
        ON CONFLICT (pair, tensor) DO UPDATE SET packed = excluded.packed
        """,
        (pair, _name_key(connection, tensor), packed),
    ).rowcount


def merge_contents(connection: sqlite3.Connection, duplicate: int, other: int) -> None:
    """Give the models and the statistics of content `duplicate` to `other`, of the same digest, and remove it."""
    pairs = connection.execute("SELECT pk, expert, base FROM pairs WHERE ? IN (expert, base)", (duplicate,)).fetchall()
    for pk, expert, base in pairs:
        expert, base = (other if key == duplicate else key for key in (expert, base))
        target = _pair_key(connection, expert, base)
        expert_id, base_id = (_id_of_content(connection, content) for content in (expert, base))
        for row in list(_rows_where(connection, "s.pair = ?", (pk,))):
            if row.is_sound:
                packed = pack(row.unpacked(), subject_of(expert_id, base_id, row.tensor))
                _put_row(connection, target, row.tensor, packed)
    connection.execute(
        """
        UPDATE contents SET content_id = coalesce(content_id, (SELECT content_id FROM contents WHERE pk = ?))
        WHERE pk = ?
        """,
        (duplicate, other),
    )
    connection.execute("UPDATE models SET content = ? WHERE content = ?", (other, duplicate))
    connection.execute("DELETE FROM contents WHERE pk = ?", (duplicate,))


def _id_of_content(connection: sqlite3.Connection, key: int) -> str:
    return str(connection.execute("SELECT id FROM contents WHERE pk = ?", (key,)).fetchone()[0])


def _pair_key(connection: sqlite3.Connection, expert: int, base: int) -> int:
    connection.execute("INSERT OR IGNORE INTO pairs (expert, base) VALUES (?, ?)", (expert, base))
    row = connection.execute("SELECT pk FROM pairs WHERE expert = ? AND base = ?", (expert, base)).fetchone()
    return int(row[0])


def _name_key(connection: sqlite3.Connection, name: str) -> int:
    row = connection.execute("SELECT pk FROM tensor_names WHERE name = ?", (name,)).fetchone()
    if row is None:
        return int(connection.execute("INSERT INTO tensor_names (name) VALUES (?)", (name,)).lastrowid or 0)
    return int(row[0])


def rows_of(connection: sqlite3.Connection, expert: ModelRow, base: ModelRow) -> Iterator[PackedRow]:
    """Yield the rows of one pair, in the order in which they were first stored."""
    of_pair = f"p.expert = ({_CONTENT_OF_MODEL}) AND p.base = ({_CONTENT_OF_MODEL})"
    return _rows_where(connection, f"{of_pair} ORDER BY s.tensor", (expert.id, base.id))


def tensors_of(connection: sqlite3.Connection, expert: ModelRow, base: ModelRow) -> frozenset[str]:
    """Return the tensors that one pair has rows of."""
    rows = connection.execute(
        f"""
        SELECT n.name
        FROM tensor_statistics AS s JOIN tensor_names AS n ON n.pk = s.tensor JOIN pairs AS p ON p.pk = s.pair
        WHERE p.expert = ({_CONTENT_OF_MODEL}) AND p.base = ({_CONTENT_OF_MODEL})
        """,
        (expert.id, base.id),
    )
    return frozenset(str(tensor) for (tensor,) in rows)


def all_rows(connection: sqlite3.Connection) -> Iterator[PackedRow]:
    """Yield every row of every pair."""
    return _rows_where(connection, "1", ())


def _rows_where(connection: sqlite3.Connection, condition: str, values: tuple[str | int, ...]) -> Iterator[PackedRow]:
    rows = connection.execute(
        f"""
        SELECT s.pk, e.id, b.id, n.name, s.packed
        FROM tensor_statistics AS s JOIN tensor_names AS n ON n.pk = s.tensor
        JOIN pairs AS p ON p.pk = s.pair JOIN contents AS e ON e.pk = p.expert JOIN contents AS b ON b.pk = p.base
        WHERE {condition}
        """,
        values,
    )
    for pk, expert_id, base_id, tensor, packed in rows:
        yield PackedRow(pk, str(expert_id), str(base_id), str(tensor), _packed(packed))


def drop_corrupt(connection: sqlite3.Connection) -> int:
    """Remove the rows that cannot be unpacked; return how many."""
    corrupt = [row.pk for row in all_rows(connection) if not row.is_sound]
    connection.executemany("DELETE FROM tensor_statistics WHERE pk = ?", [(pk,) for pk in corrupt])
    return len(corrupt)


def covers(row: PackedRow, block_elements: int, densities: Iterable[float]) -> bool:
    """Whether a row is sound, on this grid and has the cuts of these densities."""
    try:
        statistics = row.unpacked()
    except CorruptError:
        return False
    has_cuts = set(densities) <= set(statistics.densities_D.tolist())
    return statistics.grid.block_elements == block_elements and has_cuts


def _packed(value: object) -> bytes:
    """The blob; empty bytes for a value of another type in a damaged row."""
    return value if isinstance(value, bytes) else b""
