"""What the package exports; docs/reference/python.md and errors.md record names, signatures, fields and exit codes."""

from __future__ import annotations

import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
from functools import partial

import numpy as np
import pytest

import mergepipe
from mergepipe import cli, errors, options, reports, tailor
from mergepipe.catalog import snapshots as catalog_snapshots
from mergepipe.core.flags import Options
from mergepipe.errors import MergePipeError
from mergepipe.options import (
    AnalyzeOptions,
    ApplyLoraOptions,
    CheckOptions,
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

KINDS: dict[str, type[Options]] = {
    "check": CheckOptions, "merge": MergeOptions, "analyze": AnalyzeOptions, "run": OutputOptions,
    "run_part": OutputOptions, "sweep": SweepOptions, "search": SearchOptions, "pack": PackOptions,
    "merged_tensors": MergeOptions, "load_model": MergeOptions, "merge_into": MergeOptions,
    "apply_lora": ApplyLoraOptions, "merge_lora": MergeLoraOptions, "extract_lora": ExtractLoraOptions,
    "unpack": UnpackOptions, "verify": VerifyOptions, "repair": RunOptions, "replay": OutputOptions,
    "push": PushOptions, "plan": PlanOptions,
}  # fmt: skip
"""The options whose fields are keywords of a call, too."""
CALLS = {name for name in mergepipe.__all__ if inspect.isfunction(getattr(mergepipe, name))}
CALLS -= {"operator", "progress_bar"}


def test_package__lists_what_it_exports() -> None:
    assert dir(mergepipe) == mergepipe.__all__
    seen_by_type_checkers = re.findall(r"(\w+) as \1\b", inspect.getsource(mergepipe))
    assert sorted(["__version__", *seen_by_type_checkers]) == mergepipe.__all__
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
    loaded = "import sys, mergepipe; print([m for m in ('numpy', 'numba', 'typer', 'yaml') if m in sys.modules])"
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
    taking = {name for name in CALLS if "fields" in inspect.signature(getattr(mergepipe, name)).parameters}
    assert taking == set(KINDS)


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


def test_calls__refuse_options_that_would_be_ignored() -> None:
    with pytest.raises(TypeError, match="AnalyzeOptions has no option 'catalog'"):
        AnalyzeOptions.of(RunOptions(catalog=False), {})


def test_entry_points__exist() -> None:
    for main in (cli.main, cli.mergekit_main):
        assert list(inspect.signature(main).parameters) == ["argv"]
