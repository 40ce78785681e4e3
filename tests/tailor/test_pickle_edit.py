"""Values changed inside a pickle: what was asked for changes, and nothing else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints.inert_pickle import load_inert
from mergepipe.errors import CorruptError
from mergepipe.tailor.archives import edit_pickle
from mergepipe.tailor.checkpoint import PicklePath

SCALARS = (
    st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.floats(allow_nan=False) | st.text(max_size=9)
)
KEYS = st.sampled_from(["lr", "step", "a", "b"]) | st.integers(0, 3)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=12,
)


def paths(value: object, before: PicklePath = ()) -> list[PicklePath]:
    """Every path that ends with a key of a mapping, through mappings and lists."""
    found: list[PicklePath] = []
    items: list[tuple[Any, object]] = []
    if isinstance(value, dict):
        items = list(value.items())
        found = [(*before, key) for key in value]
    elif isinstance(value, list):
        items = list(enumerate(value))
    return found + [path for key, inner in items for path in paths(inner, (*before, key))]


def changed(value: Any, path: PicklePath, new: object) -> Any:
    result = copy.deepcopy(value)
    holder = result
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = new
    return result


@given(st.data(), st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), VALUES, st.integers(2, 5))
def test_edit_pickle__changes_what_was_asked_for_and_nothing_else(
    data: st.DataObject, value: dict[Any, Any], new: object, protocol: int
) -> None:
    path = data.draw(st.sampled_from(paths(value)))
    edited = edit_pickle(pickle.dumps(value, protocol), {path: new}, "test")
    assert load_inert(edited, "test") == pickle.loads(edited) == changed(value, path, new)


def test_edit_pickle__makes_several_changes_at_once() -> None:
    raw = pickle.dumps({"global_steps": 100, "groups": [{"lr": 0.5}, {"lr": 0.25}]}, 2)
    edits: dict[PicklePath, object] = {("groups", 1, "lr"): 1e-3, ("global_steps",): 70_000, ("groups", 0, "lr"): 2e-3}
    assert load_inert(edit_pickle(raw, edits, "test"), "test") == {
        "global_steps": 70_000,
        "groups": [{"lr": 2e-3}, {"lr": 1e-3}],
    }


def test_edit_pickle__leaves_values_that_others_refer_to() -> None:
    """The old value stands in the pickle first: what recalls it, or a text inside it, still finds it."""
    shared = {"last_epoch": [1, 2]}
    raw = pickle.dumps({"scheduler": shared, "again": shared, "last_epoch": "last_epoch"}, 2)
    edited = edit_pickle(raw, {("scheduler",): {"last_epoch": 9}}, "test")
    assert load_inert(edited, "test") == {
        "scheduler": {"last_epoch": 9}, "again": {"last_epoch": [1, 2]}, "last_epoch": "last_epoch",
    }  # fmt: skip


def test_edit_pickle__returns_the_same_bytes_where_nothing_is_asked_for() -> None:
    raw = pickle.dumps({"a": 1}, 2)
    assert edit_pickle(raw, {}, "test") is raw


@pytest.mark.parametrize("path", [("b",), ("a", "b"), ("list", 1, "x"), ("list", 0), ("list", 5, "x")])
def test_edit_pickle__refuses_a_path_that_is_not_there(path: PicklePath) -> None:
    raw = pickle.dumps({"a": 1, "list": [{"x": 1}, 2]}, 2)
    with pytest.raises(CorruptError, match="could be changed"):
        edit_pickle(raw, {path: 0}, "file")
