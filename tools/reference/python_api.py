"""The page of the Python interface: signatures and docstrings of what `mergepipe` exports."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field
from importlib import import_module

from mergepipe.core.flags import Option

_HEAD = """# Python

These names are public; all others may change. Results are immutable values; failures are
`mergepipe.MergePipeError` with a stable `code` and all problems that were found ([errors](errors.md)); they leave
nothing behind but what a later run can resume.

A `recipe` is a YAML file, or its content as a mapping, with paths relative to the working directory. `home` is the
catalog's home, where sids are looked up. The fields of `options` are keywords, too. `on_progress` is called from the
calling thread with a `Progress`. Where a result is not what the recipe asks for, a call warns (`MergePipeWarning`).

"""
_WIDTH = 100
_MODULES = {
    "mergepipe.tailor": "Training checkpoints",
    "mergepipe.tailor.saving": "Saving while training",
    "mergepipe.operators.custom": "Operators of your own",
    "mergepipe.testing": "",
}
_CHOSEN = {
    "mergepipe.operators.custom": ["parameter"],
    "mergepipe.testing": ["check_operator"],
}
"""Modules of which only these names are public."""
_NOT_LISTED = ("__version__", "errors", "tailor", "Strategy", "PartialCheckpointCallback")
"""Not objects with a signature, or (the callback) not there without transformers: see the guide."""


def python_page() -> str:
    """Return the page: functions, the modules beside the package itself, options, then other classes."""
    import mergepipe

    package = {name: getattr(mergepipe, name) for name in mergepipe.__all__ if name not in _NOT_LISTED}
    modules = {name: _exported(name) for name in _MODULES}
    lines = _section("Functions", "mergepipe", package, are_classes=False)
    for module, title in _MODULES.items():
        lines += _section(title, module, modules[module], are_classes=False)
    options = {name: value for name, value in package.items() if name.endswith("Options")}
    values = {name: value for name, value in package.items() if name not in options}
    lines += _section("Options", "mergepipe", options, are_classes=True)
    lines += _section("Values", "mergepipe", values, are_classes=True)
    for module in _MODULES:
        lines += _section("", module, modules[module], are_classes=True)
    return _HEAD + "\n".join(lines)


def _exported(module: str) -> dict[str, object]:
    imported = import_module(module)
    names = _CHOSEN.get(module) or [name for name in imported.__all__ if name not in _NOT_LISTED]
    return {name: getattr(imported, name) for name in names}


def _section(title: str, module: str, objects: Mapping[str, object], *, are_classes: bool) -> list[str]:
    entries = [(name, each) for name, each in objects.items() if inspect.isclass(each) == are_classes]
    lines = [f"## {title}", ""] if title and entries else []
    return lines + [line for name, each in entries for line in _entry(f"{module}.{name}", each)]


def _entry(name: str, value: object) -> list[str]:
    lines = [f"### {name}", "", "```python", *_declaration(name, value), "```", ""]
    lines += [*_documentation(value), ""]
    for member, documented in (*_options(value), *_members(value)) if inspect.isclass(value) else ():
        lines += [f"- `{member}`: {documented}"]
    return [*lines, ""]


def _declaration(name: str, value: object) -> list[str]:
    short = name.rpartition(".")[2]
    if inspect.isclass(value):
        declared = getattr(value, "__dataclass_fields__", {}).values()
        fields = [each for each in declared if not each.name.startswith("_") and "ClassVar" not in str(each.type)]
        if not fields:
            return [f"class {short}"]
        return [f"class {short}:", *(f"    {each.name}: {each.type}{_default(each)}" for each in fields)]
    if not callable(value):
        return [short]
    signature = inspect.signature(value)
    parameters = list(_parameters(signature))
    one_line = f"{short}({', '.join(parameters)}) -> {signature.return_annotation}"
    if len(one_line) <= _WIDTH:
        return [one_line]
    return [f"{short}(", *(f"    {each}," for each in parameters), f") -> {signature.return_annotation}"]


def _default(field: Field[object]) -> str:
    if field.default is not MISSING:
        return f" = {field.default!r}"
    return "" if field.default_factory is MISSING else f" = {getattr(field.default_factory, '__name__', '...')}()"


def _parameters(signature: inspect.Signature) -> Iterator[str]:
    has_star = False
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not has_star:
            yield "*"
            has_star = True
        default = "" if parameter.default is inspect.Parameter.empty else f" = {parameter.default!r}"
        stars = str(parameter).partition(parameter.name)[0]  # of `*paths` and `**fields`
        yield f"{stars}{parameter.name}: {parameter.annotation}{default}"


def _documentation(value: object) -> list[str]:
    """The docstring, with the entries of `Args:` and `Raises:` as lists."""
    raw = value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    written = inspect.cleandoc(raw or "")
    if written.startswith(getattr(value, "__name__", "") + "("):
        return []  # what `dataclass` writes where nothing is written
    lines: list[str] = []
    in_list = False
    for line in written.splitlines():
        if line in ("Args:", "Raises:"):
            lines += [line, ""]
        elif in_list and line.startswith("    ") and line[4] != " ":
            name, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{name}`: {meaning}")
        elif in_list and line.startswith("    "):
            lines.append("  " + line.strip())
        else:
            lines.append(line)
        in_list = line in ("Args:", "Raises:") or (in_list and line.startswith("    "))
    return lines


def _options(value: type) -> Iterator[tuple[str, str]]:
    """The options that a class declares itself, with their help; those of its base are told there."""
    inherited = {name for base in value.__bases__ for name in getattr(base, "__dataclass_fields__", {})}
    for declared in getattr(value, "__dataclass_fields__", {}).values():
        flag = declared.metadata.get("flag")
        if flag is not None and declared.name not in inherited:
            shown = f"  [default: {flag.default}]" if flag.default else ""
            yield (
                declared.name,
                f"`{Option(declared.name, declared.type, declared.default, flag).name}`. {flag.help}{shown}",
            )


def _members(value: type) -> Iterator[tuple[str, str]]:
    """Public methods and properties of the class itself, with the first line of their docstrings."""
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not inspect.isfunction(function):
            continue
        first = (inspect.getdoc(function) or "").partition("\n\n")[0].replace("\n", " ")
        shown = name if isinstance(member, property) else f"{name}{_call(function)}"
        yield shown, first


def _call(function: object) -> str:
    assert callable(function)
    names = [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    return f"({', '.join(names)})"
