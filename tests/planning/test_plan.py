"""Plans survive a round trip, keep their digest on any machine, and refuse whatever was changed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe import Plan
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.operators.statistics import Cut
from mergepipe.planning.plan import (
    PLAN_FORMAT,
    Access,
    ImportanceRecord,
    PlannedModel,
    PlannedTensor,
    Runs,
    format_runs,
    parse_plan,
)
from mergepipe.recipes.tasks import TensorParameters
from mergepipe.reports import Fallback
from mergepipe.storage.contract import FileId
from support.places import DOCS
from support.refusals import refusal

BLOCK = 100
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.dictionaries(TEXT, FINITE | st.booleans(), max_size=3)
COUNTS = st.integers(0, 2**62)
PARAMETERS = st.builds(TensorParameters, SCALARS, SCALARS, st.tuples(SCALARS, SCALARS))
Json = dict[str, Any]


@st.composite
def accesses(draw: st.DrawFn, n_blocks: int) -> Access:
    """Runs of blocks that are read, in full or in part, and free ones."""
    edges = sorted(draw(st.sets(st.integers(0, n_blocks), max_size=8)))
    own: list[tuple[int, int]] = []
    free: list[tuple[int, int]] = []
    for start, stop in zip(edges[::3], edges[1::3], strict=False):
        (own if draw(st.booleans()) else free).append((start, stop))
    forms = [draw(st.sampled_from(("whole", *range(1, 5)))) for _ in own]
    levels = tuple((*run, form) for run, form in zip(own, forms, strict=True) if isinstance(form, int))
    return Access(tuple(own), tuple(free), levels)


CUTS = st.none() | st.builds(Cut, *[st.integers(0, 2**32 - 1)] * 3)
PRODUCTS = st.none() | st.tuples(FINITE, FINITE, FINITE)
BINDINGS = st.builds(FileId, TEXT, COUNTS, TEXT, TEXT)
FALLBACKS = st.lists(st.builds(Fallback, TEXT, TEXT, TEXT), max_size=2).map(tuple)


def models(role: str) -> st.SearchStrategy[PlannedModel]:
    bindings = st.lists(BINDINGS, max_size=2).map(tuple)
    plain = st.builds(PlannedModel, st.just(role), TEXT, TEXT, TEXT, st.none() | TEXT, bindings, COUNTS, COUNTS)
    return st.builds(
        lambda model, has_side: replace(model, side_bytes=model.planned_bytes // 2 if has_side else 0),
        plain,
        st.booleans(),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    parameters = draw(st.lists(PARAMETERS, min_size=1, max_size=2))
    tensors = []
    for name in draw(st.lists(TEXT, unique=True, max_size=3)):
        n_elements = draw(st.integers(0, 20 * BLOCK))
        access = accesses(-(-n_elements // BLOCK))
        reads = draw(st.lists(access, min_size=1, max_size=2, unique=True).map(tuple))
        index = draw(st.integers(0, len(parameters) - 1))
        read_of = draw(st.permutations(range(2)).map(tuple)) if len(reads) > 1 else ()
        cuts, products = draw(st.just(()) | st.tuples(CUTS, CUTS)), draw(st.just(()) | st.tuples(PRODUCTS, PRODUCTS))
        tensors.append(PlannedTensor(name, n_elements, index, (0, 1), reads, read_of, cuts, products))
    planned, spare = draw(COUNTS), draw(COUNTS)
    return Plan(
        operator=draw(TEXT),
        block_elements=BLOCK,
        seed=draw(st.integers(-(2**62), 2**62)),
        policy=draw(TEXT),
        on_omit=draw(TEXT),
        budget_bytes=planned + spare,
        planned_bytes=planned,
        full_cost_bytes=draw(COUNTS),
        recipe=draw(TEXT),
        models=(draw(models("base")), draw(models("expert")), draw(models("expert"))),
        parameters=tuple(parameters),
        tensors=tuple(tensors),
        fallbacks=draw(FALLBACKS),
        adjustments=draw(FALLBACKS),
    )


def example() -> Plan:
    file = FileId("model.safetensors", 10, "20", "ab")
    model = PlannedModel("base", "./m", "/here/m", "id", None, (file,), 800, 300)
    experts = tuple(replace(model, role="expert", model=f"./{name}") for name in "ab")
    reads = (Access(((0, 4), (7, 8)), ((5, 6),)), Access(((4, 5),)))
    tensor = PlannedTensor("w", 8 * BLOCK, 0, (0, 1), reads, (0, 1), (Cut(7, 8, 9), None), (None, (1.0, 2.0, 3.0)))
    parameters = TensorParameters({"lambda": 1.0}, {}, ({"weight": 1.0}, {"weight": 0.5}))
    return Plan(
        operator="ties", policy="norm", on_omit="keep", seed=0, block_elements=BLOCK, budget_bytes=700,
        planned_bytes=600, full_cost_bytes=800, recipe="recipe", models=(model, *experts), parameters=(parameters,),
        tensors=(tensor,), fallbacks=(Fallback("x", "y", "z"),),
    )  # fmt: skip


def schema() -> Json:
    text = files("mergepipe").joinpath("schemas/plan.schema.json").read_text(encoding="utf-8")
    found: Json = json.loads(text)
    return found


@given(plans())
def test_plan__survives_a_round_trip(plan: Plan) -> None:
    assert parse_plan(plan.to_json()) == plan
    assert parse_plan(plan.to_json()).digest == plan.digest
    assert parse_plan(plan.to_json()).to_json() == plan.to_json()


VALIDATOR = jsonschema.Draft202012Validator(schema())


@given(plans())
def test_plan__is_valid_by_its_schema(plan: Plan) -> None:
    VALIDATOR.validate(json.loads(plan.to_json()))


def test_schema__is_a_schema_and_refuses_unknown_keys_everywhere() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    content = json.loads(example().to_json())
    for place in (content, content["models"][0], content["models"][0]["files"][0], content["tensors"][0],
                  content["tensors"][0]["reads"][0], content["parameters"][0], content["fallbacks"][0]):  # fmt: skip
        place["unknown"] = 1
        assert not VALIDATOR.is_valid(content)
        del place["unknown"]
    assert VALIDATOR.is_valid(content)


def test_plan__digest_leaves_out_paths_and_times() -> None:
    plan = example()
    files = (replace(plan.models[0].files[0], version="99"),)
    moved = replace(plan.models[0], path="/there/m", files=files)
    assert replace(plan, models=(moved, *plan.models[1:])).digest == plan.digest


CHANGES: list[Callable[[Plan], Plan]] = [
    lambda p: replace(p, operator="linear"),
    lambda p: replace(p, seed=1),
    lambda p: replace(p, block_elements=BLOCK - 1),
    lambda p: replace(p, policy="random"),
    lambda p: replace(p, on_omit="renormalize"),
    lambda p: replace(p, budget_bytes=701),
    lambda p: replace(p, planned_bytes=599),
    lambda p: replace(p, full_cost_bytes=801),
    lambda p: replace(p, recipe="other"),
    lambda p: replace(p, fallbacks=()),
    lambda p: replace(p, adjustments=p.fallbacks),
    lambda p: replace(p, importance=ImportanceRecord("/importance.json", "0" * 32)),
    lambda p: replace(p, models=(*p.models[:2], replace(p.models[2], side_bytes=300))),
    lambda p: replace(p, models=(replace(p.models[0], identity="other"), *p.models[1:])),
    lambda p: replace(p, tensors=(replace(p.tensors[0], n_elements=8 * BLOCK - 1),)),
    lambda p: replace(p, parameters=(replace(p.parameters[0], globals={"lambda": 2.0}),)),
    lambda p: replace(p, tensors=(replace(p.tensors[0], reads=(p.tensors[0].reads[0], Access(()))),)),
]


def test_plan__digest_depends_on_everything_else() -> None:
    digests = {change(example()).digest for change in CHANGES} | {example().digest}
    assert len(digests) == len(CHANGES) + 1


def test_plan__digest_is_the_same_on_every_machine() -> None:
    assert example().digest == EXAMPLE_DIGEST


EXAMPLE_DIGEST = "f3687142afc1607557d60292f2563539"


def changed(**values: object) -> bytes:
    return json.dumps({**json.loads(example().to_json()), **values}).encode()


def refused(raw: bytes) -> MergePipeError:
    return refusal(lambda: parse_plan(raw, "p.json"))


@pytest.mark.parametrize("key", ["budget_bytes", "planned_bytes", "operator", "recipe", "policy", "digest"])
def test_parse_plan__refuses_a_plan_edited_by_hand(key: str) -> None:
    value = json.loads(example().to_json())[key]
    error = refused(changed(**{key: value + ("x" if isinstance(value, str) else 1)}))
    assert isinstance(error, CorruptError)
    assert error.code == "format.damaged"


def test_parse_plan__refuses_other_versions_and_foreign_formats() -> None:
    for version, hint in ((5, "make the plan again"), (7, "use a newer version of MergePipe")):
        refusal = refused(changed(format=f"mergepipe-plan/{version}"))
        assert isinstance(refusal, UnsupportedError)
        assert refusal.code == "format.version"
        assert f"its format is 'mergepipe-plan/{version}', this version reads 'mergepipe-plan/6' only" in str(refusal)
        assert hint in str(refusal)
    for foreign in ("mergepipe-manifest/1", "mergepipe-plan", "mergepipe-plan/x"):
        assert refused(changed(format=foreign)).code == "format.damaged"
    assert PLAN_FORMAT.title == "mergepipe-plan/6"


def edited(change: Callable[[Json], None]) -> bytes:
    content: Json = json.loads(example().to_json())
    change(content)
    return json.dumps(content).encode()


THREE_EXPERTS = {"models": [0, 1, 2], "read_of": [0, 1, 1], "cuts": [None] * 3, "products": [None] * 3}


def access_of(content: Json, expert: int = 0) -> Json:
    found: Json = content["tensors"][0]["reads"][expert]
    return found


@pytest.mark.parametrize(
    ("words", "raw"),
    [
        ("not valid JSON: Expecting property name enclosed", b"{"),
        ("JSON must be UTF-8, found byte 0xff at 0", b"\xff"),
        ("JSON is nested deeper than 64 levels", b"[" * 100_000),
        ("the key 'a' occurs twice in one JSON object", b'{"a": 1, "a": 2}'),
        ("JSON has no number NaN", changed(seed=float("nan"))),
        ("a JSON object is needed, found []", b"[]"),
        ("its format is None, 'mergepipe-plan/6' is needed", b"{}"),
        ("unknown key 'unknown'; known: adjustments,", changed(unknown=1)),
        ("'tensors' is missing", edited(lambda c: c.pop("tensors"))),
        ("tensors[0].reads[1]: unknown key 'level'; did", edited(lambda c: access_of(c, 1).update(level=1))),
        ("models[0]: unknown key 'x'; known:", edited(lambda c: c["models"][0].update(x=0))),
        ("seed: an integer is needed, found '1'", changed(seed="1")),
        ("seed: an integer is needed, found True", changed(seed=True)),
        ("seed: an integer is needed, found", changed(seed=2**64)),
        ("tensors: an array is needed", changed(tensors={})),
        ("operator: a string is needed", changed(operator=None)),
        ("budget_bytes: an integer from 0 on is needed", changed(budget_bytes=-1)),
        ("planned 600 bytes of a budget of 599", changed(budget_bytes=599)),
        ("blocks of 0 elements", changed(block_elements=0)),
        ("w: there is no set of parameters 0", changed(parameters=[])),
        ("a tensor is planned twice", edited(lambda c: c["tensors"].append(c["tensors"][0]))),
        ("w: 1 accesses, of which experts have [0, 1]", edited(lambda c: c["tensors"][0]["reads"].pop())),
        ("w: 1 values for 2 experts", edited(lambda c: c["tensors"][0]["cuts"].pop())),
        ("w: parameters of other than 3 experts", edited(lambda c: c["tensors"][0].update(THREE_EXPERTS))),
        ("tensors[0].reads[0]: runs of blocks must", edited(lambda c: access_of(c).update(blocks="3-1"))),
        ("tensors[0].reads[0]: runs of blocks must", edited(lambda c: access_of(c).update(blocks="0-3,3"))),
        ("w: a run of blocks ends past the last of 8", edited(lambda c: access_of(c).update(blocks="8"))),
        ("tensors[0].reads[0].blocks: '-1' is not a run of", edited(lambda c: access_of(c).update(blocks="-1"))),
        ("tensors[0].reads[0].blocks: '' is not a run of", edited(lambda c: access_of(c).update(blocks=""))),
        ("tensors[0].reads[0].blocks:", edited(lambda c: access_of(c).update(blocks="0-99999999999999999999"))),
        ("tensors[0].reads[0]: a block is planned twice", edited(lambda c: access_of(c).update(free="2"))),
        ("w: not three numbers of", edited(lambda c: c["tensors"][0].update(cuts=[[2**32, 0, 0], None]))),
        ("tensors[0].products[0]: 1 items, 3 are", edited(lambda c: c["tensors"][0].update(products=[[1.0], None]))),
        ("reads[1].levels: '0-1' is not a run of", edited(lambda c: access_of(c, 1).update(levels="0-1"))),
    ],
)
def test_parse_plan__refuses_what_is_no_plan(words: str, raw: bytes) -> None:
    error = refused(raw)
    assert isinstance(error, CorruptError)
    assert error.code == "format.damaged"
    assert words in str(error)
    assert "p.json" in str(error)


def test_runs__are_written_with_their_last_block() -> None:
    assert format_runs(((0, 4), (7, 8))) == "0-3,7"
    content = json.loads(example().to_json())["tensors"][0]["reads"]
    assert content == [{"blocks": "0-3,7", "free": "5"}, {"blocks": "4"}]


@pytest.mark.parametrize("runs", [((1, 1),), ((-1, 2),), ((0, 2), (2, 3)), ((4, 5), (0, 1))])
def test_access__refuses_what_are_no_runs(runs: Runs) -> None:
    with pytest.raises(ValueError, match="runs of blocks"):
        Access(runs)
    with pytest.raises(ValueError, match="runs of blocks"):
        Access((), runs)


def test_format_doc__names_every_key() -> None:
    formats = DOCS / "internals" / "formats"
    text = (formats / "plan.md").read_text(encoding="utf-8")
    keys = [
        *schema()["properties"],
        *schema()["$defs"]["access"]["properties"],
        *schema()["$defs"]["tensor"]["properties"],
    ]
    assert [key for key in keys if f"`{key}`" not in text] == []
    assert PLAN_FORMAT.title in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [({"levels": ((4, 6, 1),)}, "are not read"), ({"levels": ((0, 2, 0),)}, "at 0 nothing is read")],
)
def test_plan__refuses_levels_of_blocks_that_are_not_read(changed: dict[str, Any], message: str) -> None:
    first = example().tensors[0].reads[0]
    with pytest.raises(ValueError, match=message):
        replace(first, **changed)
