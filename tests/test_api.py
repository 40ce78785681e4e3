"""What the package exports: changed on purpose, or not at all."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import mergepipe
from mergepipe import api as session
from mergepipe import cli, errors, reports

EXPORTED = [
    "AnalyzeReport",
    "Catalog",
    "CheckReport",
    "Explanation",
    "MergePipeError",
    "MergeReport",
    "PackReport",
    "Plan",
    "Progress",
    "SnapshotReport",
    "SweepReport",
    "UnpackReport",
    "__version__",
    "analyze",
    "catalog_stats",
    "check",
    "diff",
    "explain",
    "gc",
    "lineage",
    "list_snapshots",
    "materialise",
    "merge",
    "operator",
    "pack",
    "plan",
    "rebuild_catalog",
    "repair",
    "replay",
    "run",
    "show",
    "store_plan",
    "sweep",
    "tailor",
    "unpack",
    "verify",
]
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
    assert mergepipe.merge is session.merge
    assert mergepipe.check is session.check
    assert mergepipe.MergePipeError is errors.MergePipeError
    assert (mergepipe.CheckReport, mergepipe.MergeReport) == (reports.CheckReport, reports.MergeReport)
    assert mergepipe.Progress is reports.Progress
    assert (mergepipe.plan, mergepipe.run, mergepipe.explain) == (session.plan, session.run, session.explain)
    assert mergepipe.sweep is session.sweep
    assert mergepipe.Catalog.__module__ == "mergepipe.catalog.catalog"


def test_package__offers_tailor_as_the_command_line_does() -> None:
    code = (
        "import mergepipe; t = mergepipe.tailor; t.compose.__module__; import mergepipe.tailor.composition.compose, "
        "mergepipe.tailor.inspect; print(dir(t), "
        "{getattr(t, n).__module__ for n in dir(t)})"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "['check', 'compose', 'diff', 'inspect', 'recipe'] {'mergepipe.tailor.api'}"


def test_package__importing_it_loads_no_dependency() -> None:
    loaded = "import sys, mergepipe; print([m for m in ('numpy', 'numba', 'typer', 'yaml') if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_merge__takes_these_parameters() -> None:
    parameters = inspect.signature(mergepipe.merge).parameters
    assert list(parameters) == [
        "recipe", "out", "threads", "memory_bytes", "seed", "force", "shard_bytes", "budget", "target_error",
        "select", "on_omit", "adjust_min_density", "block_elements", "price", "storage_speed", "home", "catalog",
        "statistics", "resume", "reuse", "keep_accumulators", "overlay", "pack", "allow_dropped",
        "on_progress",
    ]  # fmt: skip
    keyword_only = [name for name, each in parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keyword_only == list(parameters)[2:]


def test_budget_functions__take_these_parameters() -> None:
    assert list(inspect.signature(mergepipe.plan).parameters) == [
        "recipe", "budget", "target_error", "select", "on_omit", "adjust_min_density", "seed", "block_elements",
        "price", "storage_speed", "home", "reuse", "allow_dropped",
    ]  # fmt: skip
    assert list(inspect.signature(mergepipe.run).parameters) == [
        "plan", "out", "threads", "memory_bytes", "force", "shard_bytes", "home", "catalog", "resume", "on_progress",
    ]  # fmt: skip
    assert list(inspect.signature(mergepipe.analyze).parameters) == [
        "base", "experts", "home", "probe_fraction", "densities", "block_elements", "threads", "memory_bytes",
        "pack", "on_progress",
    ]  # fmt: skip
    assert list(inspect.signature(mergepipe.pack).parameters) == [
        "base", "experts", "out", "replace", "threads", "on_progress",
    ]  # fmt: skip
    assert list(inspect.signature(mergepipe.unpack).parameters) == ["path", "out", "base", "threads", "on_progress"]
    assert list(inspect.signature(mergepipe.explain).parameters) == ["subject", "tensor", "home"]
    assert list(inspect.signature(mergepipe.sweep).parameters) == [
        "recipe", "budgets", "select", "on_omit", "price", "storage_speed", "seed", "threads", "memory_bytes", "home",
        "work",
        "allow_dropped", "on_progress",
    ]  # fmt: skip


def test_check__takes_these_parameters() -> None:
    assert list(inspect.signature(mergepipe.check).parameters) == ["recipe", "shard_bytes", "allow_dropped"]


def test_errors__classes_keep_their_exit_codes() -> None:
    classes = {name: each for name, each in vars(errors).items() if inspect.isclass(each)}
    found = {name: each.exit_code for name, each in classes.items() if issubclass(each, errors.MergePipeError)}
    assert found == EXIT_CODES


def test_reports__keep_their_fields() -> None:
    assert [field.name for field in dataclasses.fields(reports.MergeReport)] == [
        "out", "sid", "operator", "merged_tensors", "copied_tensors", "dropped_tensors", "base_bytes",
        "expert_bytes", "analysis_bytes", "metadata_bytes", "output_bytes", "seconds", "peak_rss_bytes",
        "planned_bytes", "budget_bytes", "reused_bytes", "notices", "packed", "not_packed", "earlier_expert_bytes",
        "forgiven_expert_bytes", "reused_from", "reused_by", "sum_bytes",
    ]  # fmt: skip
    assert [field.name for field in dataclasses.fields(reports.CheckReport)] == [
        "recipe", "operator", "models", "merged_tensors", "copied", "dropped", "base_bytes", "expert_bytes",
        "output_bytes", "disk_bytes", "shards", "notices",
    ]  # fmt: skip


def test_entry_point__exists() -> None:
    assert list(inspect.signature(cli.main).parameters) == ["argv"]
