"""What the YAML layer accepts, refuses and remembers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import mergepipe
from mergepipe.core.display import shortened
from mergepipe.errors import CorruptError, NotFoundError, OutputError, RecipeError, StorageError
from mergepipe.recipes import yaml_source
from mergepipe.recipes.yaml_source import MAX_DEPTH, MAX_NODES, Value, YamlSource, read_yaml
from mergepipe.storage.contract import RECIPE_BYTES
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from support.families import TINY, write_family
from support.refusals import refuses

EXPONENT = re.compile(r"[0-9][.]?[eE][-+]?[0-9]")  # a dump leaves these texts bare, and bare they mean numbers here
PLAIN_TEXT = st.text(
    st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=("Cc", "Cs")), max_size=8
).filter(lambda text: EXPONENT.search(text) is None)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | PLAIN_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(PLAIN_TEXT, inner, max_size=4),
    max_leaves=12,
)


def read(folder: Path, text: str | bytes) -> YamlSource:
    path = folder / "recipe.yml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(Location.local(path), LocalStore())


def refusal(folder: Path, text: str | bytes) -> tuple[str, str]:
    with pytest.raises(RecipeError) as caught:
        read(folder, text)
    assert len(caught.value.problems) == 1
    return caught.value.code, str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("yaml")


@settings(deadline=None)
@given(VALUES.filter(lambda value: value is not None))
def test_read_yaml__inverts_a_dump(folder: Path, value: Value) -> None:
    assert read(folder, yaml.safe_dump(value, allow_unicode=True)).root == value


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1", 1),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("1.5E3", 1.5e3),
        ("-.5e+2", -50.0),
        ("'1e-3'", "1e-3"),
        ("'0.5'", "0.5"),
        (".inf", math.inf),
        ("true", True),
        ("no", False),
        ("2020-01-01", "2020-01-01"),
        ("1e-3x", "1e-3x"),
        ("~", None),
        ("é", "é"),
    ],
)
def test_read_yaml__reads_scalars_as_meant(folder: Path, written: str, value: Value) -> None:
    found = read(folder, f"a: {written}\n").root
    assert found == {"a": value}
    assert isinstance(found, dict)
    assert type(found["a"]) is type(value)


def test_read_yaml__accepts_a_byte_order_mark_aliases_and_merge_keys(folder: Path) -> None:
    assert read(folder, b"\xef\xbb\xbfa: &x [1, 2]\nb: *x\n").root == {"a": [1, 2], "b": [1, 2]}
    merged = read(folder, "a: &usual {weight: 0.5, density: 0.3}\nb: {<<: *usual, density: 0.7}\n").root
    assert merged == {"a": {"weight": 0.5, "density": 0.3}, "b": {"weight": 0.5, "density": 0.7}}


def test_where__names_line_and_path(folder: Path) -> None:
    text = "# comment\nmodels:\n  - model: a\n  - model: b\n    parameters:\n\n      density: 2\n      'x y': 1\n"
    source = read(folder, text)
    assert source.where("models", 1, "parameters", "density") == "recipe.yml:7 models[1].parameters.density"
    assert source.where("models", 1, "parameters", "x y") == "recipe.yml:8 models[1].parameters.'x y'"
    assert source.where("models", 0) == "recipe.yml:3 models[0]"
    assert source.where() == "recipe.yml:2"


def test_where__gives_what_is_missing_the_line_around_it(folder: Path) -> None:
    source = read(folder, "\nmodels:\n  - model: a\n")
    assert source.where("models", 0, "parameters", "weight") == "recipe.yml:3 models[0].parameters.weight"


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "recipe.yml: the recipe is empty; it needs at least merge_method and models"),
        ("# only\n", None),
        ("---\n", None),
        (
            "a: 1\nb: 2\na: 3\n",
            "recipe.yml:3 a: the key occurs twice, first in line 1, with another value; "
            "remove one of the two (mergekit takes the last)",
        ),
        (
            "m:\n- x: 1\n  x: 2\n",
            "recipe.yml:3 m[0].x: the key occurs twice, first in line 2, with another value; "
            "remove one of the two (mergekit takes the last)",
        ),
        ("a: 1\n---\nb: 1\n", "recipe.yml:3: several YAML documents where one is expected; keep one recipe per file"),
        ("a:\n\tb: 1\n", "recipe.yml:2: a tab in the indentation; YAML indents with spaces"),
        ("a: [1\n", None),
        ("a: b: c\n", "recipe.yml:1: not YAML: mapping values are not allowed here (column 5)"),
        ("a: *b\n", "recipe.yml:1: not YAML: found undefined alias 'b' (column 4)"),
        (b"a: \xff\n", None),
        (b"a: 1\nb: \xe9\n", "recipe.yml:2: not UTF-8: byte 0xe9 at offset 8; save the file as UTF-8"),
        ("a: 1".encode("utf-16"), None),
        ("a: 1\nb: \x07\n", "recipe.yml:2: the character #x0007 is not allowed"),
        ('a: "\\0"\n', "recipe.yml:1: the character #x0000 is not allowed"),
        ('a: "\\ud800"\n', "recipe.yml:1: the character #xd800 is not allowed"),
        ('a: "\\UFFFFFFFF"\n', None),
        ("a: !!python/object/apply:os.system [ls]\n", None),
        ("a: !x 1\n", "recipe.yml:1: the YAML tag '!x' is refused; write plain values"),
        ("a: !!set {x}\n", None),
        ("a: !!binary aGk=\n", None),
        ("a: =\n", None),
        ("a: !!int x\n", "recipe.yml:1: 'x' is not a valid int"),
        ("a: !!int ''\n", None),
        ("a: !!bool x\n", None),
        ("a: " + "1" * 65 + "\n", None),
        ("a: 1" + ":1" * 200_000 + "\n", None),
        ("? [a]\n: 1\n", "recipe.yml:1: a key must be a name, not a list or a mapping"),
        ("y:\n  <<: 1\n", "recipe.yml:2: a merge key (<<) needs a mapping, or a list of mappings"),
        ("a: &a {<<: *a}\n", None),
        ("a: &a {<<: [*a, *a, *a]}\n", None),
        ("---\na: 1\n" * 101, "recipe.yml:202: more than 100 documents"),
        ("%YAML 3.0\n---\na: 1\n", None),
        (BOMB, None),
        pytest.param("[" + "1," * MAX_NODES + "]", None, marks=pytest.mark.slow),
        ("[" * 500_000, "recipe.yml:1: nested deeper than 64 levels"),
        ("a: &a [*a]\n", None),
        ("a: &a [*a, *a, *a]\n", None),
    ],
    ids=lambda value: shortened(value if isinstance(value, str) else repr(value), 24),
)
def test_read_yaml__refuses(folder: Path, text: str | bytes, message: str | None) -> None:
    found_code, found_message = refusal(folder, text)
    assert found_code == "recipe.syntax"
    assert found_message.startswith("recipe.yml")
    assert "\n" not in found_message
    assert message is None or found_message == message


def test_read_yaml__accepts_the_deepest_that_is_allowed(folder: Path) -> None:
    levels = MAX_DEPTH - 1
    value: Value = read(folder, "[" * levels + "1" + "]" * levels).root
    for _ in range(levels):
        assert isinstance(value, list)
        value = value[0]
    assert value == 1


def test_read_yaml__tells_missing_files_from_unreadable_ones(folder: Path) -> None:
    with refuses(NotFoundError, "recipe.not-found"):
        read_yaml(Location.local(folder / "none.yml"), LocalStore())
    with refuses(RecipeError, "recipe.syntax"):
        read_yaml(Location.local(folder), LocalStore())
    with refuses(StorageError, "storage.io"):
        read_yaml(Location.local(folder / ("x" * 5000)), LocalStore())
    with refuses(CorruptError, "storage.too-large") as large:
        refusal(folder, "a: " + "x" * RECIPE_BYTES)
    assert "recipe.yml: has 1048579 bytes, at most 1048576 " in str(large.value)


@settings(deadline=None)
@given(st.text(max_size=100), st.integers(4, 60))
def test_shortened__is_one_printable_line(text: str, limit: int) -> None:
    found = shortened(text, limit)
    assert found.isprintable()
    assert found == text or len(text) > limit or not text.isprintable()


def test_read_yaml__counts_every_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_source, "MAX_NODES", 100)
    code, _ = refusal(folder, "[" + "1," * 100 + "]")  # and the list itself
    assert code == "recipe.syntax"
    assert read(folder, "[" + "1," * 99 + "]").root == [1] * 99


@pytest.mark.parametrize(
    "repeat",
    [
        lambda times: f"b: [{'*a, ' * times}]",
        lambda times: "\n".join(f"k{number}: {{? *a : 1}}" for number in range(times)),
    ],
    ids=["values", "keys"],
)
def test_read_yaml__counts_a_text_wherever_it_is_repeated(folder: Path, repeat: Callable[[int], str]) -> None:
    text = f"a: &a {'x' * 500_000}\n"
    code, message = refusal(folder, text + repeat(20))
    assert code == "recipe.syntax"
    assert "characters of long texts, aliases expanded" in message
    assert read(folder, text + repeat(10)).root


# --- a recipe as a mapping is the recipe in a file


def test_recipes__as_a_mapping_merge_as_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(tmp_path / "family", TINY, 2)
    monkeypatch.chdir(tmp_path)
    recipe = {
        "merge_method": "linear",
        "models": [
            {"model": Path("family/base"), "parameters": {"weight": 1.0}},
            {"model": np.str_("family/expert-1"), "parameters": {"weight": np.full(2, np.float32(0.5))}},
        ],
        "dtype": "bfloat16",
    }
    mergepipe.merge(recipe, "out", catalog=False)
    written = tmp_path / "recipe.yml"
    written.write_text(
        "merge_method: linear\nmodels:\n- {model: family/base, parameters: {weight: 1.0}}\n"
        "- {model: family/expert-1, parameters: {weight: 0.5}}\ndtype: bfloat16\n"
    )
    mergepipe.merge(written, "other", catalog=False)
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "other/model.safetensors").read_bytes()
    assert mergepipe.check(recipe).merged_tensors > 0
    assert mergepipe.verify("out").is_sound
    with pytest.raises(OutputError, match=r"replace it with force=True$"):
        mergepipe.merge(recipe, "out", catalog=False)


def test_recipes__as_a_mapping_with_a_value_of_no_recipe_are_refused() -> None:
    endless: dict[str, object] = {}
    endless["models"] = endless
    for recipe in ({"merge_method": object()}, endless):
        with refuses(RecipeError, "recipe.syntax"):
            mergepipe.check(recipe)
    with pytest.raises(RecipeError, match="recipe:1 merge_method"):
        mergepipe.check({"merge_method": "linaer", "models": []})
