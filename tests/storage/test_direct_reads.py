"""Inputs are looked at and read through a `Store`: above storage/ the modules that touch files are few and listed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from support.source_code import source_texts

PATH_METHODS = frozenset({
    "exists", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "read_bytes", "read_text", "readlink", "resolve",
    "stat",
})  # fmt: skip
PATH_METHODS_WITH_PATTERN = frozenset({"glob", "rglob"})
OS_FUNCTIONS = frozenset({
    "access", "fstat", "listdir", "lstat", "open", "pread", "preadv", "read", "readlink", "scandir", "stat", "walk",
})  # fmt: skip
OS_PATH_FUNCTIONS = frozenset({"exists", "isdir", "isfile", "islink", "ismount", "realpath", "samefile", "samestat"})
REGULAR_FUNCTIONS = frozenset({"open_regular", "read_descriptor", "read_head", "read_small", "regular_status"})
READ_MODES = ("r", "rb")
_NAMES = PATH_METHODS | PATH_METHODS_WITH_PATTERN | OS_FUNCTIONS | OS_PATH_FUNCTIONS

OWN = "our own files: home, catalog, staging, outputs"
ALLOWED = {
    "catalog/catalog.py": ("exists glob os.path.realpath stat", OWN),
    "catalog/database.py": ("exists regular.regular_status", OWN),
    "catalog/snapshots.py": ("is_dir os.path.realpath os.walk", OWN),
    "cli/__init__.py": ("os.open", "/dev/null"),
    "cli/commands/budgets.py": ("exists is_dir is_file is_symlink", OWN),
    "cli/guard.py": ("os.open", "/dev/null"),
    "cli/pages.py": ("read_text", "a template of the package"),
    "deltastore/builder.py": ("is_dir", OWN),
    "deltastore/writer.py": ("regular.read_head stat", OWN),
    "jobs/gc.py": ("exists glob is_dir is_file is_symlink os.walk rglob stat", OWN),
    "jobs/push.py": ("exists", "whether a name is a folder of this machine, or a model of the Hub"),
    "jobs/repair.py": ("is_file is_symlink open os.fstat resolve stat", "a snapshot that is repaired"),
    "jobs/sweep.py": ("is_dir", OWN),
    "checkpoints/gguf_files.py": ("stat", OWN),
    "jobs/evaluations.py": ("read_bytes read_text rglob", "what its own process measures a model on"),
    "kernels/compiled.py": ("is_dir os.fstat os.listdir os.lstat os.open read_bytes rglob", "kernels and their source"),
    "planning/plan.py": ("exists is_file is_symlink regular.read_head", OWN),
    "runs/remote_output.py": ("read_bytes", OWN),
    "runs/progress.py": ("is_dir is_file stat", OWN),
    "recipes/references.py": ("os.path.realpath", "the folder that paths are written relative to"),
    "runs/snapshots.py": ("exists is_dir is_file", OWN),
    "snapshots/object_upload.py": ("stat", OWN),
    "snapshots/parts_places.py": ("lstat", OWN),
    "snapshots/manifest.py": ("os.path.realpath", "the folder that paths are written relative to"),
    "snapshots/staging.py": (
        "exists glob is_dir is_file is_symlink iterdir lstat os.fstat os.path.samestat os.walk resolve",
        OWN,
    ),
    "snapshots/work_log.py": ("stat", OWN),
    "tailor/saving/callback.py": ("glob is_dir", OWN),
    "tailor/saving/frameworks.py": ("is_file", OWN),
    "tailor/saving/partial_run.py": ("exists is_dir os.fstat", OWN),
    "tailor/saving/unit_choice.py": ("exists os.fstat regular.read_small", OWN),
}


def direct_reads(code: str) -> Iterator[str]:
    """Names of the calls that look at or read a file of this machine, and of imported functions that do."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module == "mergepipe.storage.ranges":
            yield from (f"regular.{each.name}" for each in node.names if each.name in REGULAR_FUNCTIONS)
        elif isinstance(node, ast.Call) and _called_name(node.func) in _NAMES:
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if _is_direct(owner, name, node.args):
                yield f"{owner}.{name}" if owner in ("os", "os.path") else name


def _called_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_direct(owner: str, name: str, arguments: list[ast.expr]) -> bool:
    if owner in ("os", "os.path"):
        return name in (OS_FUNCTIONS if owner == "os" else OS_PATH_FUNCTIONS)
    if name == "open":
        return any(_is_read_mode(argument) for argument in arguments[:2])
    if owner and name in PATH_METHODS_WITH_PATTERN:
        return len(arguments) == 1
    return bool(owner) and name in PATH_METHODS and not arguments


def _is_read_mode(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in READ_MODES


def test_direct_reads__are_seen() -> None:
    assert list(direct_reads("p.read_bytes(); p.read_text(encoding='utf-8'); p.open('rb'); open(p, 'r')")) == [
        "read_bytes", "read_text", "open", "open",
    ]  # fmt: skip
    assert list(direct_reads("p.stat(); p.glob('*'); os.walk(p); os.path.realpath(p)")) == [
        "stat", "glob", "os.walk", "os.path.realpath",
    ]  # fmt: skip
    assert list(direct_reads("from mergepipe.storage.ranges import os_error, read_small")) == ["regular.read_small"]
    assert list(direct_reads("store.open(path); store.stat(p); p.open('xb'); is_file(store, p); os.path.join(p)")) == []


def test_package__touches_files_above_storage_only_where_it_is_listed() -> None:
    found: dict[str, set[str]] = {}
    for module, code in source_texts().items():
        if not module.startswith(("storage/", "testing/")):
            for name in direct_reads(code):
                found.setdefault(module, set()).add(name)
    assert {module: " ".join(sorted(names)) for module, names in found.items()} == {
        module: names for module, (names, _) in ALLOWED.items()
    }
