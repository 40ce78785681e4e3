"""What the package exports; docs/reference/python.md and errors.md record names, signatures, fields and exit codes."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import mergepipe
from mergepipe import cli, errors, options, reports, tailor
from mergepipe.catalog import snapshots as catalog_snapshots
from mergepipe.core.flags import Options
from mergepipe.errors import MergePipeError, MergePipeWarning, OutputError, RecipeError
from mergepipe.options import (
    AnalyzeOptions,
    ApplyLoraOptions,
    CheckLoraOptions,
    CheckOptions,
    ConvertLoraOptions,
    ExtractLoraOptions,
    MergeLoraOptions,
    MergeOptions,
    OutputOptions,
    PackOptions,
    PlanOptions,
    PushOptions,
    RunOptions,
    SearchOptions,
    SweepOptions,
    UnpackOptions,
    VerifyOptions,
)
from support.model_folders import recipe_of, write_model

KINDS: dict[str, type[Options]] = {
    "check": CheckOptions, "merge": MergeOptions, "analyze": AnalyzeOptions, "run": OutputOptions,
    "run_part": OutputOptions, "sweep": SweepOptions, "search": SearchOptions, "pack": PackOptions,
    "merged_tensors": MergeOptions, "load_model": MergeOptions, "merge_into": MergeOptions,
    "apply_lora": ApplyLoraOptions, "check_lora": CheckLoraOptions, "merge_lora": MergeLoraOptions,
    "convert_lora": ConvertLoraOptions,
    "extract_lora": ExtractLoraOptions, "unpack": UnpackOptions, "verify": VerifyOptions,
    "repair": RunOptions, "replay": OutputOptions,
    "without": OutputOptions, "push": PushOptions, "plan": PlanOptions,
}  # fmt: skip
"""The options whose fields are keywords of a call, too."""
CALLS = {name for name in mergepipe.__all__ if inspect.isfunction(getattr(mergepipe, name))}
CALLS -= {"operator", "progress_bar"}


def test_package__lists_what_it_exports() -> None:
    assert dir(mergepipe) == mergepipe.__all__
    assert set(mergepipe.__all__) >= CALLS


def test_package__names_are_those_of_their_modules() -> None:
    homes = (options, reports, errors, catalog_snapshots)
    wanted = {name: vars(home)[name] for home in homes for name in mergepipe.__all__ if name in vars(home)}
    assert {name: getattr(mergepipe, name) for name in wanted} == wanted
    others = {"Catalog", "LoadedTensors", "Plan", "__version__", "errors", "operator", "progress_bar", "tailor"}
    assert set(mergepipe.__all__) - wanted.keys() - CALLS == others
    assert mergepipe.progress_bar.__module__ == "mergepipe.cli.progress"
    assert mergepipe.Catalog.__module__ == "mergepipe.catalog.catalog"
    assert mergepipe.Plan.__module__ == "mergepipe.planning.plan"
    assert mergepipe.errors is errors


def test_package__no_call_has_the_name_of_a_module_which_would_hide_it_once_imported() -> None:
    modules = {module.name for module in pkgutil.iter_modules(mergepipe.__path__)}
    assert set(mergepipe.__all__) & modules == {"errors", "tailor"}


def test_package__every_report_of_a_call_is_exported() -> None:
    returns = [inspect.signature(getattr(mergepipe, name)).return_annotation for name in CALLS]
    returned = {word for text in returns for word in re.findall(r"[A-Z]\w+", text)}
    assert returned - set(mergepipe.__all__) == {"None", "Any", "Iterator"}


def test_help__shows_the_example_and_every_name() -> None:
    text = pydoc.plain(pydoc.render_doc(mergepipe))
    assert 'mergepipe.merge("recipe.yml", "merged", budget="25%")' in text
    description = text.partition("PACKAGE CONTENTS")[0]
    for name in CALLS:
        assert re.search(rf"\b{name}\b", description), name
        assert f"\n    {name}(" in text
    for name in mergepipe.__all__:
        assert name == "__version__" or re.search(rf"\b{name}\b", text), name


def test_package__offers_tailor_as_the_command_line_does() -> None:
    code = (
        "import mergepipe; t = mergepipe.tailor; t.compose.__module__; import mergepipe.tailor.composition, "
        "mergepipe.tailor.inspection; print(dir(t), "
        "sorted({getattr(t, n).__module__ for n in dir(t)}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["Averager", "average", "check", "compose", "diff", "export", "inspect", "recipe"]
    assert ran.stdout.strip() == f"{names} ['mergepipe.tailor.api', 'mergepipe.tailor.averaging']"


def test_package__importing_it_loads_no_dependency() -> None:
    loaded = "import sys, mergepipe; print([m for m in ('numpy', 'click', 'yaml') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", KINDS)
def test_calls__refuse_keywords_that_are_no_field_of_their_options(name: str) -> None:
    call = getattr(mergepipe, name)
    kinds = [parameter.kind for parameter in inspect.signature(call).parameters.values()]
    positional = ["nothing"] * kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    with pytest.raises(TypeError, match=f"{KINDS[name].__name__} has no option 'thread'"):
        call(*positional, thread=1)


def test_calls__that_take_fields_are_all_tried() -> None:
    written = {name: inspect.signature(inspect.unwrap(getattr(mergepipe, name))) for name in CALLS}
    assert {name for name, signature in written.items() if "fields" in signature.parameters} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_calls__name_the_fields_of_their_options_with_type_and_default(name: str) -> None:
    parameters = inspect.signature(getattr(mergepipe, name)).parameters
    assert inspect.Parameter.VAR_KEYWORD not in {parameter.kind for parameter in parameters.values()}
    for field in dataclasses.fields(KINDS[name]):
        assert parameters[field.name].default == field.default
        assert parameters[field.name].annotation


def test_calls__that_no_option_of_theirs_has_are_type_errors() -> None:
    """`mypy --strict` refuses these lines too: it would call the remarks superfluous otherwise."""
    with pytest.raises(TypeError, match="did you mean 'threads'"):
        mergepipe.merge("recipe.yml", "out", thread=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="did you mean 'export'"):
        tailor.compose("recipe.yml", "out", exports="universal")  # type: ignore[call-arg]
    with pytest.raises(MergePipeError, match="threads"):
        mergepipe.merge("recipe.yml", "out", threads="two")  # type: ignore[arg-type]


def test_sizes__are_numbers_of_bytes_or_texts_everywhere() -> None:
    kinds: set[type[Options]] = {RunOptions, options.ComposeOptions, *KINDS.values()}
    for kind in kinds:
        names = {field.name for field in dataclasses.fields(kind)} & {"memory_bytes", "shard_bytes"}
        needed: dict[str, Any] = {"rank": 1} if kind is ExtractLoraOptions else {}
        for name in names:
            size: dict[str, Any] = {name: "1GiB"}
            assert getattr(kind(**needed, **size), name) == 1 << 30
            keyword = {"memory_bytes": "memory", "shard_bytes": "shard_size"}[name]
            for value in ("1GiB", 1 << 30):
                assert getattr(kind.of(None, {keyword: value, **needed}), name) == 1 << 30
            assert kind.of(None, {keyword: None, **needed}) == kind(**needed)
            with pytest.raises(MergePipeError, match=keyword):
                kind.of(None, {keyword: "much", **needed})
            with pytest.raises(TypeError, match=f"give one of {keyword} and {name}"):
                kind.of(None, {keyword: "1GiB", name: 1 << 30, **needed})


def recipe_with_a_warning(folder: Path) -> dict[str, object]:
    """Return a recipe whose density is taken as 1."""
    base = write_model(folder / "base", {"w": np.zeros((2, 2), np.float32)})
    expert = write_model(folder / "expert", {"w": np.ones((2, 2), np.float32)})
    return recipe_of("ties", {expert: {"weight": 0.5}}, base, parameters={"density": 1.5})


def test_warnings__say_what_changes_the_result_once_a_call_and_name_the_callers_line(tmp_path: Path) -> None:
    recipe = recipe_with_a_warning(tmp_path)
    calls: dict[str, Callable[[], object]] = {
        "check": lambda: mergepipe.check(recipe),
        "plan": lambda: mergepipe.plan(recipe, "100%"),
        "merge": lambda: mergepipe.merge(recipe, tmp_path / "merged"),
        "budget": lambda: mergepipe.merge(recipe, tmp_path / "budgeted", budget="100%"),
        "sweep": lambda: mergepipe.sweep(recipe, ["100%"]),
        "merged_tensors": lambda: dict(mergepipe.merged_tensors(recipe)),
    }
    for name, call in calls.items():
        with pytest.warns(MergePipeWarning, match="read as 1") as warned:
            call()
        assert [warning.filename for warning in warned] == [__file__], name
    stored = tmp_path / "plan.json"
    mergepipe.store_plan(mergepipe.plan(recipe, "100%"), stored)
    for finish in (
        lambda: mergepipe.run_part(stored, tmp_path / "parts", (1, 1)),
        lambda: mergepipe.run(stored, tmp_path / "run"),
    ):
        with pytest.warns(MergePipeWarning, match="read as 1") as warned:
            finish()
        assert len(warned) == 1


def test_warnings__of_python_are_not_printed_by_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    recipe = recipe_with_a_warning(tmp_path)
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    assert cli.main(["merge", str(tmp_path / "recipe.yml"), str(tmp_path / "merged"), "--quiet"]) == 0
    assert capsys.readouterr().err.count("read as 1") == 1
    assert len(recwarn) == 0


def test_verify__a_report_is_true_if_the_snapshot_is_sound(tmp_path: Path) -> None:
    model = write_model(tmp_path / "base", {"w": np.ones((2, 2), np.float32)})
    out = tmp_path / "merged"
    mergepipe.merge(recipe_of("linear", {model: {"weight": 1.0}}), out)
    sound = mergepipe.verify(out)
    assert sound
    assert "is_sound=True" in repr(sound)
    weights = next(out.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    damaged = mergepipe.verify(out)
    assert not damaged
    assert "is_sound=False" in repr(damaged)


def test_progress_bar__works_with_every_call_that_reports_progress() -> None:
    calls = [getattr(mergepipe, name) for name in CALLS] + [getattr(tailor, name) for name in dir(tailor)]
    signatures = {call: inspect.signature(call) for call in calls}
    reporting = [s.parameters["on_progress"] for s in signatures.values() if "on_progress" in s.parameters]
    assert {parameter.annotation for parameter in reporting} == {"ProgressCallback | None"}
    assert len(reporting) > 15


def test_calls__take_a_keyword_over_the_field_of_their_options() -> None:
    given = MergeOptions(threads=2, seed=3)
    assert MergeOptions.of(given, {"seed": 7, "allow_dropped": ["*.bias"]}) == MergeOptions(
        threads=2, seed=7, allow_dropped=("*.bias",)
    )
    of_numpy = MergeOptions(seed=np.int64(7), budget=np.float64(0.5), allow_dropped="*.bias")  # type: ignore[arg-type]
    assert (of_numpy, type(of_numpy.seed)) == (MergeOptions(seed=7, budget=0.5, allow_dropped=("*.bias",)), int)
    assert OutputOptions.of(MergeOptions(threads=2), {}) == OutputOptions(threads=2)


def test_calls__take_one_model_where_several_may_stand() -> None:
    for call in (mergepipe.gc, partial(mergepipe.merge_lora, out="out"), partial(tailor.average, out="out")):
        with pytest.raises(MergePipeError, match="nowhere"):
            call("nowhere")


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [("force", "yes", "True or False"), ("threads", True, "a number"), ("budget", [1], "a text or a number"),
     ("home", 3, "a text or a path"), ("allow_dropped", (3,), "a text"), ("card", 1, "True or False"),
     ("importance", {}, "a text or a path"), ("select", 2, "a text"), ("min_density", "much", "a number")],
)  # fmt: skip
def test_options__of_another_type_are_refused_before_anything_is_opened(name: str, value: object, needed: str) -> None:
    keywords: dict[str, Any] = {name: value}
    with pytest.raises(RecipeError, match=f"^{name}: .* was given; give {needed}$"):
        mergepipe.merge("nowhere.yml", "out", **keywords)


def test_calls__refuse_options_that_are_no_options() -> None:
    with pytest.raises(
        TypeError, match=r"options: a dict was given; give MergeOptions\(\.\.\.\), or its fields as key"
    ):
        mergepipe.merge("recipe.yml", "out", options={"threads": 2})  # type: ignore[arg-type]


def test_calls__refuse_places_that_are_none(tmp_path: Path) -> None:
    recipe = recipe_with_a_warning(tmp_path)
    needed = "it is of type {}, and a text or a path is needed"
    places: tuple[Any, ...] = (None, 5)
    for place in places:
        for call in (
            partial(mergepipe.merge, recipe),
            partial(mergepipe.merge, out=tmp_path / "out"),
            mergepipe.verify,
        ):
            with pytest.raises(RecipeError, match=needed.format(type(place).__name__)):
                call(place)


@pytest.mark.parametrize(
    ("place", "hint"),
    [("hf:/org/name", "write hf://org/name, or ./hf:/org/name for a path"), ("s3:bucket/a", "write s3://bucket/a"),
     ("GS:/bucket", "write gs://bucket"), ("merged.safetensor", "the name of a file, and the output is a folder")],
)  # fmt: skip
def test_merge__refuses_an_output_that_is_nearly_an_address_or_a_file(tmp_path: Path, place: str, hint: str) -> None:
    with pytest.raises(OutputError, match=hint):
        mergepipe.merge(recipe_with_a_warning(tmp_path), place)


def test_calls__refuse_options_that_would_be_ignored() -> None:
    with pytest.raises(TypeError, match="AnalyzeOptions has no option 'catalog'"):
        AnalyzeOptions.of(RunOptions(catalog=False), {})


def test_entry_points__exist() -> None:
    for main in (cli.main, cli.mergekit_main):
        assert list(inspect.signature(main).parameters) == ["argv"]
