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
from mergepipe.catalog import rows

EXPORTED = [
    "AnalyzeReport",
    "Catalog",
    "CatalogStats",
    "CheckReport",
    "Explanation",
    "ExtractLoraReport",
    "GcReport",
    "LineageNode",
    "LoadedTensors",
    "MergeLoraReport",
    "MergeOptions",
    "MergePipeError",
    "MergeReport",
    "OutputOptions",
    "PackReport",
    "PartReport",
    "PartsStatus",
    "Plan",
    "PlanOptions",
    "Progress",
    "PushReport",
    "RebuildReport",
    "RepairReport",
    "RunOptions",
    "SnapshotDiff",
    "SnapshotReport",
    "SweepReport",
    "UnpackReport",
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
    "merge",
    "merge_lora",
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
    "show",
    "store_plan",
    "sweep",
    "tailor",
    "unpack",
    "verify",
]
CALLS = {
    "check": ("recipe", "shard_bytes allow_dropped strict lenient"),
    "merge": ("recipe out", "budget force seed options on_progress"),
    "analyze": (
        "base experts",
        "densities block_elements text importance_to options on_progress",
    ),
    "plan": ("recipe budget", "everything seed home allow_dropped options"),
    "store_plan": ("plan path", ""),
    "run": ("plan out", "force options on_progress"),
    "run_part": ("plan out part", "finish options on_progress"),
    "parts_status": ("plan out", "n_parts"),
    "explain": ("subject", "tensor home"),
    "sweep": ("recipe budgets", "seed work evaluate allow_dropped plan options on_progress"),
    "pack": ("base experts out", "replace chain strict threads home on_progress"),
    "load_file": ("path", "base framework threads"),
    "apply_lora": ("base adapters out", "weights dtype strict allow_unapplied options on_progress"),
    "merge_lora": ("adapters out", "method rank weights density seed"),
    "extract_lora": ("base model out", "rank energy save_modules base_model_id on_progress"),
    "unpack": ("path out", "base threads on_progress"),
    "list_snapshots": ("", "contained operator since until home"),
    "show": ("snapshot", "home"),
    "lineage": ("snapshot", "down home"),
    "diff": ("a b", "reads_tensors home on_progress"),
    "verify": ("snapshot", "deep_fraction base options on_progress"),
    "repair": ("snapshot", "options on_progress"),
    "replay": ("snapshot out", "force options on_progress"),
    "gc": ("roots", "dry_run home"),
    "catalog_stats": ("", "home"),
    "push": ("snapshot destination", "create private message home on_progress"),
    "rebuild_catalog": ("roots", "home"),
}
"""Every call, its parameters by position, then those by keyword."""
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
    homes = (api, options, reports, errors, rows)
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
    assert returned - set(EXPORTED) == {"None"}


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
        "mergepipe.tailor.inspect; print(dir(t), "
        "{getattr(t, n).__module__ for n in dir(t)})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = ["average", "check", "compose", "diff", "export", "inspect", "recipe"]
    assert ran.stdout.strip() == f"{names} {{'mergepipe.tailor.api'}}"


def test_package__importing_it_loads_no_dependency() -> None:
    loaded = "import sys, mergepipe; print([m for m in ('numpy', 'numba', 'typer', 'yaml') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize("name", CALLS)
def test_calls__take_these_parameters(name: str) -> None:
    parameters = inspect.signature(getattr(mergepipe, name)).parameters
    keywords = [each.name for each in parameters.values() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    positional = [each for each in parameters if each not in keywords]
    assert (" ".join(positional), " ".join(keywords)) == CALLS[name]


def test_options__have_these_fields() -> None:
    common = ["threads", "memory_bytes", "home", "catalog", "connections"]
    assert field_names(options.RunOptions) == common
    assert field_names(options.PlanOptions) == [
        "select", "where_omitted", "min_density", "block_elements", "importance", "strict", "lenient",
    ]  # fmt: skip
    output = [*common, "force", "shard_bytes", "paths", "base_model_ids", "resume", "executor", "address"]
    assert field_names(options.OutputOptions) == output
    assert field_names(options.MergeOptions) == [
        *output, "budget", "target_loss", "evaluate", "plan", "seed", "allow_dropped", "strict", "lenient",
        "card", "tokenizer", "mergekit_config",
    ]  # fmt: skip


def field_names(kind: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def test_errors__classes_keep_their_exit_codes() -> None:
    classes = {name: each for name, each in vars(errors).items() if inspect.isclass(each)}
    found = {name: each.exit_code for name, each in classes.items() if issubclass(each, errors.MergePipeError)}
    assert found == EXIT_CODES


def test_reports__keep_their_fields() -> None:
    assert [field.name for field in dataclasses.fields(reports.MergeReport)] == [
        "out", "sid", "operator", "merged_tensors", "copied_tensors", "dropped_tensors", "base_bytes",
        "expert_bytes", "analysis_bytes", "metadata_bytes", "output_bytes", "seconds", "peak_rss_bytes",
        "planned_bytes", "budget_bytes", "notices", "earlier_expert_bytes",
        "verdict", "recipe_notices", "traffic",
        "left_out", "tried", "kept", "adapters",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(reports.CheckReport)] == [
        "recipe", "operator", "models", "merged_tensors", "copied", "dropped", "base_bytes", "expert_bytes",
        "output_bytes", "disk_bytes", "shards", "recipe_notices",
    ]  # fmt: skip


def test_entry_points__exist() -> None:
    for main in (cli.main, cli.mergekit_main):
        assert list(inspect.signature(main).parameters) == ["argv"]
