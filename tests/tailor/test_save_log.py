"""Logs of partial saves: read in both forms, refused where they lie."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import CorruptError
from mergepipe.tailor.saving.unit_choice import SaveRecord, read_log
from mergepipe.tailor.selection import EMBED, LM_HEAD, NORM, Unit, UnitKind, layer

MODEL = (EMBED, layer(0), layer(1), layer(2), NORM, LM_HEAD, Unit(UnitKind.OTHER, name="vision.blocks.0"))
names = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1).filter(
    lambda n: n not in (".", "..") and not set(n) & {"/", "\\"}
)
records = st.builds(
    SaveRecord,
    step=st.integers(0, 10**9),
    units=st.lists(st.sampled_from(MODEL), unique=True).map(lambda units: tuple(sorted(units))),
    folder=names,
    is_full=st.booleans(),
    model_units=st.just(MODEL),
    strategy=st.sampled_from(["parity", "filter", ""]),
    saved_bytes=st.integers(0, 10**15),
    full_bytes=st.integers(0, 10**15),
    seconds=st.integers(0, 10**6).map(lambda n: n / 64),
)


def save(step: int, *units: Unit) -> str:
    return SaveRecord(step, units, f"partial-{step}", False, MODEL).to_line()


@given(records)
def test_to_line__is_read_back_as_it_was(record: SaveRecord) -> None:
    assert read_log(record.to_line()).records == (record,)


def test_read_log__gives_up_the_branch_that_training_went_back_from() -> None:
    """By a save of a step that was saved, or by a start at one."""
    for back, steps in ((save(2, EMBED, NORM), [(1, 1), (2, 2)]), (SaveRecord(2).to_line(), [(1, 1), (2, 1)])):
        log = read_log(save(1, EMBED) + save(2, EMBED) + save(3, EMBED) + back + save(9, EMBED))
        assert [(r.step, len(r.units)) for r in log.records] == [*steps, (9, 1)]
        assert log.dropped_steps == (3,)


@pytest.mark.parametrize("tail", ['{"step": 7, "fl', "{", '{"step": 7}]'])
def test_read_log__leaves_out_a_last_line_that_was_cut_short(tail: str) -> None:
    log = read_log(save(1) + "\n" + tail)
    assert ([r.step for r in log.records], log.cut_line) == ([1], 3)


def test_read_log__reads_a_last_line_without_an_end() -> None:
    assert [r.step for r in read_log((save(1) + save(2)).rstrip()).records] == [1, 2]


OWN = SaveRecord(3, MODEL, "full-3", True, MODEL)


def own(**changes: object) -> str:
    return json.dumps(json.loads(OWN.to_line()) | changes) + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense\n", "log:2"),
        ("[1]\n", "log:2"),
        ('{"event": "save", "step": 1, "step": 2}\n', "'step'"),
        ("{}\n", "'step' is missing"),
        ('{"step": 1}\n', "unknown event None"),
        ('{"event": "stop", "step": 1}\n', "unknown event 'stop'"),
        (own(folder="../elsewhere"), "'folder'"),
        (own(folder=None), "'folder'"),
        (own(is_full="yes"), "is_full: true or false"),
        (own(units="embed"), "units: an array is needed"),
        (own(units=["layer x"]), "'layer x' names no unit"),
        (own(units=["layer " + "9" * 5000]), "names no unit"),
        (own(units=["other:"]), "'other:' names no unit"),
        (own(model_units=[3]), "a string is needed, found 3"),
        (own(saved_bytes=-1), "saved_bytes: an integer"),
        ("\ud800\n", "UTF-8"),
    ],
)
def test_read_log__refuses(line: str, message: str) -> None:
    with pytest.raises(CorruptError, match=message) as caught:
        read_log(save(1) + line + save(2))
    assert caught.value.code == "save-log.damaged"
