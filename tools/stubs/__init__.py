"""Writes what type checkers and editors see of the public packages: their names, and calls with all their keywords.

`mergepipe.merge` and its like take the fields of options as keywords; the stubs write these signatures out. Everything
in them follows from the functions and `options.py`; `tests/surface/test_stubs.py` compares them.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import mergepipe
from mergepipe import options, tailor

PACKAGE = Path(mergepipe.__file__).parent
_WRITTEN_BY = "# Written by `python -m tools.stubs` from the functions and options.py; not edited by hand."
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


def stubs() -> dict[str, str]:
    """Return the stubs by their place in the package."""
    return {
        "__init__.pyi": _stub(mergepipe, dir(mergepipe)),
        "tailor/__init__.pyi": _stub(tailor, dir(tailor)),
    }


def _stub(package: ModuleType, names: Sequence[str]) -> str:
    """Return the stub of a package with these public names."""
    homes: dict[str, str] = {}
    values: list[str] = []
    calls: list[str] = []
    for name in names:
        member = getattr(package, name)
        if inspect.ismodule(member):
            homes[name] = package.__name__
        elif isinstance(member, str):
            values.append(f"{name}: str")
        elif _takes_fields(member):
            signature = inspect.signature(member)
            calls += ["", *_declaration(name, signature, inspect.getdoc(member) or "")]
            homes |= _homes_of_annotations(signature, member.__module__)
        else:
            homes[name] = member.__module__
    imports: dict[str, list[str]] = {}
    for name in sorted(homes):
        imported = f"{name} as {name}" if name in names else name
        imports.setdefault(homes[name], []).append(f"    {imported},")
    values.append("__all__: list[str]")
    lines = [_WRITTEN_BY, ""]
    for module in sorted(imports):
        lines += [f"from {module} import (", *imports[module], ")"]
    return "\n".join([*lines, "", *values, *calls]) + "\n"


def _takes_fields(member: object) -> bool:
    """Whether a member is a call whose keywords are the fields of its options."""
    written = inspect.unwrap(member) if callable(member) else None
    return inspect.isfunction(written) and "fields" in inspect.signature(written, follow_wrapped=False).parameters


def _declaration(name: str, signature: inspect.Signature, documentation: str) -> list[str]:
    """Return the declaration of a call, with its documentation, which editors look for here."""
    lines = [f"def {name}("]
    has_star = False
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            lines.append("    *,")
            has_star = True
        default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    lines.append(f") -> {signature.return_annotation}:")
    quoted = f'"""{documentation}\n"""' if "\n" in documentation else f'"""{documentation}"""'
    return lines + [f"    {line}".rstrip() for line in quoted.split("\n")]


def _homes_of_annotations(signature: inspect.Signature, user: str) -> dict[str, str]:
    """Return the modules of the names in the annotations of a call of the module `user`."""
    annotations = [parameter.annotation for parameter in signature.parameters.values()]
    text = " ".join([*annotations, signature.return_annotation])
    names = {name for name in _NAME.findall(text) if not hasattr(builtins, name)}
    return {name: _module_of(name, user) for name in names}


def _module_of(name: str, user: str) -> str:
    """Return the module that the annotations of `user`, or those of the options, mean by `name`."""
    for module in (user, options.__name__):
        sources = _imported_names(module)
        if name in sources:
            return sources[name]
        if hasattr(sys.modules[module], name):
            return module
    if hasattr(import_module("collections.abc"), name):
        return "collections.abc"
    raise LookupError(f"{user} has no {name}, which an annotation names")


def _imported_names(module: str) -> Mapping[str, str]:
    """Return the modules of the names that a module imports, for type checkers alone or not."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name: node.module or "" for node in imports for alias in node.names}
