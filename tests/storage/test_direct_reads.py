"""Files from disk are opened by `storage/regular.py` alone, so that none makes a command wait or fill memory."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import mergepipe

SOURCE = Path(mergepipe.__file__).parent
# Files of the package or of the kernel, and files that the same process made a moment before.
ALLOWED = {
    "kernels/compiled.py": "read_bytes",  # the kernels' own source
    "cli/render/sweep_page.py": "read_text",  # a template of the package
    "runs/sidecars.py": "read_text",  # a template of the package
    "storage/owner.py": "read_text",  # /proc
    "storage/output.py": "open",  # the staged output
    "jobs/repair.py": "open",  # the copy that was made anew
}


def direct_reads(code: str) -> Iterator[str]:
    """Names of the calls that read a file without asking what it is."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_read_mode = any(isinstance(a, ast.Constant) and a.value in ("r", "rb") for a in node.args[:2])
        if (name in ("read_bytes", "read_text") and not node.args) or (name == "open" and is_read_mode):
            yield str(name)


def test_direct_reads__are_seen() -> None:
    assert list(direct_reads("p.read_bytes(); p.read_text(encoding='utf-8'); p.open('rb'); open(p, 'r')")) == [
        "read_bytes", "read_text", "open", "open",
    ]  # fmt: skip
    assert list(direct_reads("store.open(path); p.open('xb'); read_text(path)")) == []


def test_package__reads_files_of_users_through_one_module() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in sorted(SOURCE.rglob("*.py"))
        if "testing" not in path.relative_to(SOURCE).parts
        for name in direct_reads(path.read_text(encoding="utf-8"))
    }
    assert found <= set(ALLOWED.items())
