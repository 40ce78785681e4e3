"""What the package exports: changed on purpose, or not at all."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import pydoc
import re
import subprocess
import sys
from typing import Any

import pytest

import mergepipe
from mergepipe import api, cli, errors, options, reports
from mergepipe.catalog import snapshots as catalog_snapshots
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

EXPORTED = [
    "AnalyzeOptions",
    "AnalyzeReport",
    "ApplyLoraOptions",
    "Catalog",
    "CatalogStats",
    "CheckOptions",
    "CheckReport",
    "Explanation",
    "ExtractLoraOptions",
    "ExtractLoraReport",
    "GcReport",
    "LineageNode",
    "LoadedTensors",
    "MergeLoraOptions",
    "MergeLoraReport",
    "MergeOptions",
    "MergePipeError",
    "MergeReport",
    "OutputOptions",
    "PackOptions",
    "PackReport",
    "PartReport",
    "PartsStatus",
    "Plan",
    "PlanOptions",
    "Progress",
    "PushOptions",
    "PushReport",
    "RebuildReport",
    "RepairReport",
    "RunOptions",
    "SearchOptions",
    "SearchReport",
    "SnapshotDiff",
    "SnapshotReport",
    "SweepOptions",
    "SweepReport",
    "UnpackOptions",
    "UnpackReport",
    "VerifyOptions",
    "VerifyReport",
    "__version__",
    "analyze",
    "apply_lora",
    "catalog_stats",
    "check",
    "diff",
    "errors",
    "explain",
    "extract_lora",
    "gc",
    "lineage",
    "list_snapshots",
    "load_file",
    "load_model",
    "merge",
    "merge_into",
    "merge_lora",
    "merged_tensors",
    "operator",
    "pack",
    "parts_status",
    "plan",
    "progress_bar",
    "push",
    "rebuild_catalog",
    "repair",
    "replay",
    "run",
    "run_part",
    "search",
    "show",
    "store_plan",
    "sweep",
    "tailor",
    "unpack",
    "verify",
]
CALLS: dict[str, tuple[str, str, Any]] = {
    "check": ("recipe", "options", CheckOptions),
    "merge": ("recipe out", "options on_progress", MergeOptions),
    "analyze": ("base experts", "options on_progress", AnalyzeOptions),
    "plan": ("recipe budget", "everything options", PlanOptions),
    "store_plan": ("plan path", "", None),
    "run": ("plan out", "options on_progress", OutputOptions),
    "run_part": ("plan out part", "options on_progress", OutputOptions),
    "parts_status": ("plan out", "n_parts", None),
    "explain": ("subject", "tensor home", None),
    "sweep": ("recipe budgets", "options on_progress", SweepOptions),
    "search": ("recipe out evaluate", "loads_models options on_progress", SearchOptions),
    "pack": ("base experts out", "options on_progress", PackOptions),
    "load_file": ("path", "base framework threads", None),
    "merged_tensors": ("recipe", "framework only options", MergeOptions),
    "load_model": ("recipe", "torch_dtype device_map options", MergeOptions),
    "merge_into": ("model recipe", "only changed_from options", MergeOptions),
    "apply_lora": ("base adapters out", "options on_progress", ApplyLoraOptions),
    "merge_lora": ("adapters out", "options", MergeLoraOptions),
    "extract_lora": ("base model out", "options on_progress", ExtractLoraOptions),
    "unpack": ("path out", "options on_progress", UnpackOptions),
    "list_snapshots": ("", "contained operator since until home", None),
    "show": ("snapshot", "home", None),
    "lineage": ("snapshot", "down home", None),
    "diff": ("a b", "reads_tensors home on_progress", None),
    "verify": ("snapshot", "options on_progress", VerifyOptions),
    "repair": ("snapshot", "options on_progress", RunOptions),
    "replay": ("snapshot out", "options on_progress", OutputOptions),
    "gc": ("roots", "dry_run home", None),
    "catalog_stats": ("", "home", None),
    "push": ("snapshot destination", "options on_progress", PushOptions),
    "rebuild_catalog": ("roots", "home", None),
}
"""Every call, its parameters by position, those by keyword, and the options whose fields are keywords, too."""
EXIT_CODES = {
    "MergePipeError": 1,
    "RecipeError": 2,
    "NotFoundError": 3,
    "CorruptError": 4,
    "MismatchError": 5,
    "UnsupportedError": 6,
    "OutputError": 7,
    "StorageError": 8,
    "ConflictError": 9,
    "LimitError": 10,
    "PublishedError": 11,
    "InterruptedRunError": 130,
}


def test_package__exports_exactly_these_names() -> None:
    assert mergepipe.__all__ == EXPORTED
    assert dir(mergepipe) == EXPORTED


def test_package__names_are_those_of_their_modules() -> None:
    homes = (api, options, reports, errors, catalog_snapshots)
    wanted = {name: vars(home)[name] for home in homes for name in EXPORTED if name in vars(home)}
    assert {name: getattr(mergepipe, name) for name in wanted} == wanted
    others = {"Catalog", "LoadedTensors", "Plan", "__version__", "errors", "operator", "progress_bar", "tailor"}
    assert set(EXPORTED) - wanted.keys() == others
    assert mergepipe.progress_bar.__module__ == "mergepipe.cli.progress"
    assert mergepipe.Catalog.__module__ == "mergepipe.catalog.catalog"
    assert mergepipe.Plan.__module__ == "mergepipe.planning.plan"
    assert mergepipe.errors is errors


def test_package__no_call_has_the_name_of_a_module_which_would_hide_it_once_imported() -> None:
    modules = {module.name for module in pkgutil.iter_modules(mergepipe.__path__)}
    assert set(EXPORTED) & modules == {"errors", "tailor"}


def test_package__every_report_of_a_call_is_exported() -> None:
    calls = [value for value in vars(api).values() if inspect.isfunction(value) and value.__module__ == api.__name__]
    public = [call for call in calls if not call.__name__.startswith("_")]
    assert {call.__name__ for call in public} == CALLS.keys()
    returned = {word for call in public for word in re.findall(r"[A-Z]\w+", inspect.signature(call).return_annotation)}
    assert returned - set(EXPORTED) == {"None", "Any", "Iterator"}


def test_help__shows_the_example_and_every_name() -> None:
    text = pydoc.plain(pydoc.render_doc(mergepipe))
    assert 'mergepipe.merge("recipe.yml", "merged", budget="25%")' in text
    description = text.partition("PACKAGE CONTENTS")[0]
    for name in CALLS:
        assert re.search(rf"\b{name}\b", description), name
        assert f"\n    {name}(" in text
    for name in EXPORTED:
        assert name == "__version__" or re.search(rf"\b{name}\b", text), name


def test_package__offers_tailor_as_the_command_line_does() -> None:
    code = (
        "import mergepipe; t = mergepipe.tailor; t.compose.__module__; import mergepipe.tailor.composition, "
        "mergepipe.tailor.reports; print(dir(t), "
        "sorted({getattr(t, n).__module__ for n in dir(t)}))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["Averager", "average", "check", "compose", "diff", "export", "inspect", "recipe"]
    assert ran.stdout.strip() == f"{names} ['mergepipe.tailor.api', 'mergepipe.tailor.running_average']"


def test_package__importing_it_loads_no_dependency() -> None:
    loaded = "import sys, mergepipe; print([m for m in ('numpy', 'numba', 'typer', 'yaml') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", CALLS)
def test_calls__take_these_parameters(name: str) -> None:
    parameters = inspect.signature(getattr(mergepipe, name)).parameters.values()
    keywords = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [each.name for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert (" ".join(positional), " ".join(keywords)) == CALLS[name][:2]


@pytest.mark.parametrize("name", [name for name, (_, _, kind) in CALLS.items() if kind is not None])
def test_calls__refuse_keywords_that_are_no_field_of_their_options(name: str) -> None:
    kind = CALLS[name][2]
    positional = ["nothing"] * len(CALLS[name][0].split())
    with pytest.raises(TypeError, match=f"{kind.__name__} has no option 'thread'"):
        getattr(mergepipe, name)(*positional, thread=1)


def test_calls__take_a_keyword_over_the_field_of_their_options() -> None:
    given = MergeOptions(threads=2, seed=3)
    assert MergeOptions.of(given, {"seed": 7, "allow_dropped": ["*.bias"]}) == MergeOptions(
        threads=2, seed=7, allow_dropped=("*.bias",)
    )
    assert OutputOptions.of(MergeOptions(threads=2), {}) == OutputOptions(threads=2)


def test_calls__refuse_options_that_would_be_ignored() -> None:
    with pytest.raises(TypeError, match="AnalyzeOptions has no option 'catalog'"):
        AnalyzeOptions.of(RunOptions(catalog=False), {})


def test_options__have_these_fields() -> None:
    recipe = ["allow_dropped", "strict", "lenient"]
    machine = ["threads", "memory_bytes", "home", "connections"]
    planning = ["select", "where_omitted", "min_density", "block_elements", "importance", "seed"]
    output = ["force", "strict", "shard_bytes", "paths", "base_model_ids", "resume", "executor", "address"]
    merging = ["budget", "target_loss", "evaluate", "card", "tokenizer", "mergekit_config"]
    assert field_names(RunOptions) == [*machine, "catalog"]
    assert field_names(PlanOptions) == [*recipe, *planning, "home"]
    assert field_names(OutputOptions) == [*machine, "catalog", *output]
    assert set(field_names(MergeOptions)) == {*recipe, *planning, *machine, "catalog", *output, *merging}


def field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_errors__classes_keep_their_exit_codes() -> None:
    classes = {name: each for name, each in vars(errors).items() if inspect.isclass(each)}
    found = {name: each.exit_code for name, each in classes.items() if issubclass(each, errors.MergePipeError)}
    assert found == EXIT_CODES


def test_entry_points__exist() -> None:
    for main in (cli.main, cli.mergekit_main):
        assert list(inspect.signature(main).parameters) == ["argv"]
