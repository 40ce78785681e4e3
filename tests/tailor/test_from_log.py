"""The composition a log implies: newest at or before, for every unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.errors import CorruptError, NotFoundError
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.inspection import compose_from_log, composition_from_log_file
from mergepipe.tailor.saving.save_log import SaveRecord, read_log
from mergepipe.tailor.selection import (
    EMBED,
    LM_HEAD,
    NORM,
    Unit,
    UnitKind,
    layer,
    model_units,
    parse_selector,
    unit_selectors,
)

RUN = Location.parse("run")
MODEL = (EMBED, *(layer(i) for i in range(4)), NORM, LM_HEAD)
EVEN, ODD = (EMBED, layer(0), layer(2)), (layer(1), layer(3), NORM, LM_HEAD)


def save(step: int, units: tuple[Unit, ...], *, full: bool = False, folder: str = "") -> str:
    name = folder or (f"checkpoint-{step}" if full else f"partial-{step}")
    return SaveRecord(step, units, name, full, MODEL).to_line()


LOG = save(10, MODEL, full=True) + save(20, EVEN) + save(30, ODD) + save(40, EVEN)


def test_compose_from_log__resumes_where_the_newest_save_with_a_state_is() -> None:
    found = compose_from_log(LOG, RUN, 35)
    assert (found.step, found.default, found.state_from) == (30, RUN / "checkpoint-10", RUN / "partial-30")
    assert (list(found.sources), found.notes) == (list(MODEL), ())
    found = compose_from_log(LOG, RUN, 35, stateless=["partial-30"])
    assert found.state_from == RUN / "partial-20"
    assert "as new as step 30; step, scheduler and random state are those of step 20" in found.notes[0]
    assert compose_from_log(LOG, RUN, 35, stateless=["partial-20", "partial-30"]).state_from == RUN / "checkpoint-10"


def test_composition_from_log_file__sees_which_saves_hold_tensors_alone(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "partial-20", "partial-30"):
        (tmp_path / name).mkdir()
    for name in ("partial-20", "partial-30"):
        (tmp_path / name / "mergepipe-partial.json").touch()
    (tmp_path / "partial-20" / "trainer_state.json").touch()
    (tmp_path / "log").write_text(LOG)
    log, run = Location.local(tmp_path / "log"), Location.local(tmp_path)
    assert composition_from_log_file(LocalStore(), log, run, 30).state_from == run / "partial-20"
    (tmp_path / "partial-30" / ".metadata").touch()
    assert composition_from_log_file(LocalStore(), log, run, 30).state_from == run / "partial-30"


@pytest.mark.parametrize(("folder", "run"), [("", "run"), ("recipes", "../run")])
def test_to_yaml__is_the_short_recipe_with_paths_relative_to_it(folder: str, run: str) -> None:
    recipe = yaml.safe_load(compose_from_log(LOG, RUN, 20).to_yaml(Location.local(Path(folder))))
    assert recipe == {
        "default": f"{run}/checkpoint-10",
        "take": [{"from": f"{run}/partial-20", "units": ["layers 0,2", "embed"]}],
        "state_from": f"{run}/partial-20",
    }
    full = yaml.safe_load(compose_from_log(LOG, RUN, 10).to_yaml(Location.local(Path(folder))))
    assert full == {"default": f"{run}/checkpoint-10", "state_from": f"{run}/checkpoint-10"}


saves = st.lists(st.lists(st.sampled_from(MODEL), unique=True), min_size=1, max_size=8)


@given(saves, st.integers(1, 9))
def test_compose_from_log__agrees_with_a_replay(found: list[list[Unit]], at: int) -> None:
    text = save(1, MODEL, full=True)
    replay = dict.fromkeys(MODEL, (RUN / "checkpoint-1", 1))
    for step, units in enumerate(found, 2):
        text += save(step, tuple(units))
        replay |= dict.fromkeys(units, (RUN / f"partial-{step}", step)) if step <= at else {}
    assert compose_from_log(text, RUN, at).sources == replay


def test_compose_from_log__leaves_out_a_branch_that_was_given_up() -> None:
    text = LOG + SaveRecord(10).to_line() + save(20, ODD, folder="partial-20-r1")
    found = compose_from_log(text, RUN, 40)
    assert {str(folder) for folder, _ in found.sources.values()} == {"run/checkpoint-10", "run/partial-20-r1"}
    assert any("20, 30, 40" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("", 5, "no save at or before step 5"),
        (LOG, 9, "the first is at step 10"),
        (save(1, EVEN), 1, "layers 1,3, norm, lm_head"),
        (save(1, EVEN) + save(2, ODD), 2, "before the partial one at step 1"),
        (save(1, EVEN) + save(2, ODD) + save(3, MODEL, full=True), 2, "needs one full checkpoint"),
    ],
)
def test_compose_from_log__refuses(text: str, at: int, message: str) -> None:
    with pytest.raises(NotFoundError, match=message) as caught:
        compose_from_log(text, RUN, at)
    assert caught.value.code == "save.not-found"


def test_compose_from_log__refuses_a_folder_that_is_gone() -> None:
    with pytest.raises(NotFoundError, match="step 20 is not there: no partial-20"):
        compose_from_log(LOG, RUN, 20, folders=["checkpoint-10"])
    assert compose_from_log(LOG, RUN, 10, folders=["checkpoint-10"]).step == 10


def test_compose_from_log__refuses_units_the_model_lacks() -> None:
    alien = SaveRecord(50, (layer(9),), "partial-50", False, MODEL).to_line()
    with pytest.raises(NotFoundError, match="the log has layer 9"):
        compose_from_log(LOG + alien, RUN, 50)


PARAMETERS = model_units([
    "model.embed_tokens.weight", *(f"model.layers.{i}.mlp.weight" for i in range(9)), "model.norm.weight",
    "lm_head.weight", "vision[a].weight", "vision*.weight", "vision.weight",
])  # fmt: skip


@given(st.sets(st.sampled_from(tuple(PARAMETERS.parameters)), min_size=1))
def test_unit_selectors__select_exactly_the_units(units: set[Unit]) -> None:
    selectors = [parse_selector(text) for text in unit_selectors(units)]
    selected = [name for selector in selectors for name in selector.find(PARAMETERS, "units")[0]]
    assert {PARAMETERS.unit_of(name) for name in selected} == units
    assert len(selected) == sum(len(PARAMETERS.parameters[unit]) for unit in units)


# --- logs of partial saves: read in both forms, refused where they lie


UNITS = (EMBED, layer(0), layer(1), layer(2), NORM, LM_HEAD, Unit(UnitKind.OTHER, name="vision.blocks.0"))
names = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1).filter(
    lambda n: n not in (".", "..") and not set(n) & {"/", "\\"}
)
RECORDS = st.builds(
    SaveRecord,
    step=st.integers(0, 10**9),
    units=st.lists(st.sampled_from(UNITS), unique=True).map(lambda units: tuple(sorted(units))),
    folder=names,
    is_full=st.booleans(),
    model_units=st.just(UNITS),
    strategy=st.sampled_from(["parity", "filter", ""]),
    saved_bytes=st.integers(0, 10**15),
    full_bytes=st.integers(0, 10**15),
    seconds=st.integers(0, 10**6).map(lambda n: n / 64),
)


@given(RECORDS)
def test_to_line__is_read_back_as_it_was(record: SaveRecord) -> None:
    assert read_log(record.to_line()).records == (record,)


def test_read_log__gives_up_the_branch_that_training_went_back_from() -> None:
    """By a save of a step that was saved, or by a start at one."""
    for back, steps in ((save(2, (EMBED, NORM)), [(1, 1), (2, 2)]), (SaveRecord(2).to_line(), [(1, 1), (2, 1)])):
        log = read_log(save(1, (EMBED,)) + save(2, (EMBED,)) + save(3, (EMBED,)) + back + save(9, (EMBED,)))
        assert [(r.step, len(r.units)) for r in log.records] == [*steps, (9, 1)]
        assert log.dropped_steps == (3,)


@pytest.mark.parametrize("tail", ['{"step": 7, "fl', "{", '{"step": 7}]'])
def test_read_log__leaves_out_a_last_line_that_was_cut_short(tail: str) -> None:
    log = read_log(save(1, ()) + "\n" + tail)
    assert ([r.step for r in log.records], log.cut_line) == ([1], 3)


def test_read_log__reads_a_last_line_without_an_end() -> None:
    assert [r.step for r in read_log((save(1, ()) + save(2, ())).rstrip()).records] == [1, 2]


OWN = SaveRecord(3, UNITS, "full-3", True, UNITS)


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
        read_log(save(1, ()) + line + save(2, ()))
    assert caught.value.code == "save-log.damaged"
