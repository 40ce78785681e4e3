"""The page of error codes: found in the syntax of the package, never listed by hand."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from pathlib import Path

from mergepipe import errors
from mergepipe.errors import MergePipeError
from tools.reference import cell, row, table

_CODE = re.compile(r"^[a-z][a-z0-9_]*([-.][a-z0-9_]+)*$")
_SHOWN_MESSAGES = 2
_LEFT_OUT = ("testing",)
_RELAYED = ("code",)
"""Attributes of a problem that is passed on: its code was found where it was made."""
INTERNAL = 70
_LEAVES = (ast.expr_context, ast.operator, ast.cmpop, ast.Name, ast.Constant, ast.alias)
_HEAD = """# Errors

Every failure is one or more lines on standard error, each with a stable code in brackets; `--json` prints the same as
JSON, `--debug` adds the traceback. In Python it is a `mergepipe.MergePipeError` with `problems`, each with `code`,
`where`, `message` and `hint`. A code names the object and what is wrong with it, so that a program can tell what to do;
the message has the particulars, and may improve. In the tables `…` stands for what differs from case to case.

## Classes and exit codes

"""
_TAIL = """
Exit codes 130 (Ctrl-C), 143 (SIGTERM) and 129 (SIGHUP) are an interruption: nothing was published. Exit code 70,
`internal`, is an error of MergePipe itself: please report it.
"""

Function = ast.FunctionDef | ast.ClassDef

CLASSES: dict[str, type[MergePipeError]] = {
    name: kind
    for name, kind in sorted(vars(errors).items(), key=lambda each: getattr(each[1], "exit_code", 0))
    if isinstance(kind, type) and issubclass(kind, MergePipeError) and kind is not MergePipeError
}
"""The error classes, by exit code."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A code, or part of one, that the callers of a function (or of a class) give."""

    module: Path
    function: Function
    name: str


@dataclass(frozen=True, slots=True)
class Site:
    """One place that makes a problem: its code and message as syntax, and where they stand."""

    module: Module
    scope: tuple[Function, ...]
    code: ast.expr
    message: ast.expr | None
    classes: tuple[str, ...]


@dataclass(slots=True)
class Entry:
    """What is known of one code."""

    classes: set[str] = field(default_factory=set)
    messages: list[str] = field(default_factory=list)


class UnknownCodeError(Exception):
    """A problem is made with a code that the syntax does not tell."""


@dataclass(frozen=True)
class Module:
    """One parsed file."""

    path: Path
    tree: ast.Module

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node around every node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def scopes(self) -> dict[ast.Call, tuple[Function, ...]]:
        """Every call, with the classes and functions around it, the outermost first."""
        calls: dict[ast.Call, tuple[Function, ...]] = {}

        def visit(node: ast.AST, scope: tuple[Function, ...]) -> None:
            if isinstance(node, ast.Call):
                calls[node] = scope
            inner = (*scope, node) if isinstance(node, Function) else scope
            for name in node._fields:
                value = getattr(node, name)
                for child in value if isinstance(value, list) else (value,):
                    if isinstance(child, ast.AST) and not isinstance(child, _LEAVES):
                        visit(child, inner)

        visit(self.tree, ())
        return calls

    @cached_property
    def imported(self) -> set[str]:
        """Last names of the modules from which something is imported."""
        nodes = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom))
        return {str(node.module).rpartition(".")[2] for node in nodes}

    @cached_property
    def constants(self) -> dict[str, str]:
        """Strings that are named on the top level."""
        return {
            statement.targets[0].id: statement.value.value
            for statement in self.tree.body
            if isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        }

    @cached_property
    def defined(self) -> set[str]:
        """Names of all functions and classes, methods included."""
        return {node.name for node in ast.walk(self.tree) if isinstance(node, Function)}

    @cached_property
    def error_classes(self) -> set[str]:
        """Error classes raised for problems made elsewhere: where problems are passed on, else anywhere here."""
        passing = [scope[-1] for call, scope in self.scopes.items() if scope and _is_relay(call)]
        trees: list[ast.AST] = [*passing] or [self.tree]
        raised = [node.exc for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Raise)]
        return {_name(each.func) for each in raised if isinstance(each, ast.Call)} & set(CLASSES)


def error_page(source: Path) -> str:
    """Return the page for the package under `source`."""
    entries = error_codes(source)
    lines = table("exit code", "class", "meaning")
    lines += [row(str(kind.exit_code), f"`{name}`", cell(_meaning(kind))) for name, kind in CLASSES.items()]
    lines += [_TAIL]
    for exit_code, title in _groups():
        codes = [code for code in sorted(entries) if _exit_code(code, entries[code]) == exit_code]
        lines += [f"## {title}", "", *table("code", "message")] if codes else []
        lines += [row(f"`{code}`", cell(_messages(entries[code]))) for code in codes]
        lines += [""] if codes else []
    return _HEAD + "\n".join(lines)


def error_codes(source: Path) -> dict[str, Entry]:
    """Return every code that the package under `source` raises.

    Raises:
        UnknownCodeError: a code is worked out in a way that is not followed here.
    """
    with (
        _collector_paused()
    ):  # a syntax tree is many small objects that all stay: looking through them takes half the time
        return _Search(source).entries()


@contextmanager
def _collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _meaning(kind: type[MergePipeError]) -> str:
    return (kind.__doc__ or "").partition("\n\n")[0]


def _groups() -> Iterator[tuple[int, str]]:
    """Exit codes, each with the title of its table."""
    for name, kind in CLASSES.items():
        yield kind.exit_code, f"Exit code {kind.exit_code}: `{name}`"
    yield INTERNAL, "Exit code 70: an error of MergePipe itself"
    yield 0, "Lines beside an error, with its exit code"


def _exit_code(code: str, entry: Entry) -> int:
    numbers = sorted(CLASSES[name].exit_code for name in entry.classes)
    return numbers[-1] if numbers else INTERNAL if code == "internal" else 0


def _messages(entry: Entry) -> str:
    general = [_meaning(CLASSES[name]) for name in sorted(entry.classes)]
    shown = list(dict.fromkeys(entry.messages or general or ["…"]))
    return "; or: ".join(shown[:_SHOWN_MESSAGES]) + ("; or others" if len(shown) > _SHOWN_MESSAGES else "")


Caller = tuple[Module, ast.Call, Function]
"""A call that gives a code: its module, the call, and the function that is called."""


class _Search:
    """Follows codes from where problems are made to where the codes are written."""

    def __init__(self, source: Path) -> None:
        paths = sorted(path for path in source.rglob("*.py") if path.relative_to(source).parts[0] not in _LEFT_OUT)
        self.modules = [Module(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]
        self.calls: dict[str, list[tuple[Module, ast.Call]]] = defaultdict(list)
        for module in self.modules:
            for call in module.scopes:
                self.calls[_name(call.func)].append((module, call))

    def entries(self) -> dict[str, Entry]:
        """Every code with its classes and messages."""
        entries: dict[str, Entry] = defaultdict(Entry)
        for site in self._sites():
            for code, message in self._outcomes(site):
                if not _CODE.match(code):
                    raise UnknownCodeError(f"{site.module.path}:{site.code.lineno}: {code!r} is no code")
                entries[code].classes |= set(site.classes)
                entries[code].messages += [message] if message else []
        return dict(entries)

    def _sites(self) -> Iterator[Site]:
        known = set(CLASSES)
        for module in self.modules:
            for call, scope in module.scopes.items():
                name, given = _name(call.func), call.args
                if scope and scope[-1].name in ("of", "add") and _is_parameter(given[:1], scope[-1]):
                    continue  # the two places that every problem passes
                if name == "of" and len(given) > 2 and _owner(call.func) in known:
                    yield Site(module, scope, given[0], given[2], (_owner(call.func),))
                elif name == "add" and len(given) > 3 and _name(given[0]) in known:
                    yield Site(module, scope, given[1], given[3], (_name(given[0]),))
                elif name == "notice_at" and len(given) > 2:  # an error where notices are refused
                    yield Site(module, scope, given[0], given[2], ("RecipeError",))
                elif name == "Problem" and given:
                    message = given[2] if len(given) > 2 else None
                    yield Site(module, scope, given[0], message, self._raised(module, call))

    def _raised(self, module: Module, call: ast.Call) -> tuple[str, ...]:
        """The class with which a problem is raised: named in the nearest statement, else raised in the module.

        Empty if a whole function names several: the problem then goes with whatever error it is added to.
        """
        node: ast.AST = call
        while not isinstance(node, Function | ast.Module):
            node = module.parents[node]
            named = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & set(CLASSES)
            if len(named) > 1:
                return tuple(sorted(_raised_with(node, call) & set(CLASSES)))
            if named:
                return tuple(named)
        return tuple(sorted(module.error_classes))

    def _outcomes(self, site: Site) -> Iterator[tuple[str, str]]:
        """Codes of one place, each with its message; one for each caller where callers give the code."""
        if isinstance(site.code, ast.Attribute) and site.code.attr in _RELAYED and _name(site.code.value) != "self":
            return
        own = self._text(site.module, site.scope, site.message)
        values = self._values(site.module, site.scope, site.code, frozenset())
        paired = self._paired(site)
        relayed = [] if _says_something(own) or paired else self._relayed(site)
        for index, (code, caller) in enumerate(values):
            message = paired[index] if len(paired) == len(values) else own
            for text in relayed if relayed and caller is None else [message]:
                yield code, text if _says_something(text) else self._told(caller)

    def _relayed(self, site: Site) -> list[str]:
        """The messages that the callers of a function give which makes the error of one code."""
        if not isinstance(site.message, ast.Name) or not site.scope or isinstance(site.scope[-1], ast.ClassDef):
            return []
        function, name = site.scope[-1], site.message.id
        if name not in _parameters(function):
            return []
        callers = [
            (caller, call, _argument(call, _parameters(function).index(name), name))
            for caller, call in self.calls[function.name]
            if _fits(call, function) and (caller is site.module or self._may_call(caller, site.module, function))
        ]
        return [self._text(caller, caller.scopes[call], given) for caller, call, given in callers]

    def _paired(self, site: Site) -> list[str]:
        """The messages of a place where code and message are chosen together, in the order of the choices."""
        if not isinstance(site.message, ast.Name) or not site.scope:
            return []
        assigned = _assigned(site.scope[-1], site.message.id)
        return [self._text(site.module, site.scope, each) for each in assigned]

    def _told(self, caller: Caller | None) -> str:
        """The message that a caller gives together with the code."""
        if caller is None:
            return ""
        module, call, function = caller
        names = _parameters(function)
        given = _argument(call, names.index("message"), "message") if "message" in names else None
        message = self._text(module, module.scopes[call], given)
        return message if _says_something(message) else ""

    def _values(
        self, module: Module, scope: tuple[Function, ...], value: ast.expr, seen: frozenset[Parameter]
    ) -> list[tuple[str, Caller | None]]:
        """Strings that an expression can be, each with the call that gave it, if one did."""
        match value:
            case ast.Constant(value=str(text)):
                return [(text, None)]
            case ast.IfExp(body=body, orelse=orelse):
                return [*self._values(module, scope, body, seen), *self._values(module, scope, orelse, seen)]
            case ast.JoinedStr(values=parts):
                found = [self._values(module, scope, each, seen) for each in parts]
                return [
                    ("".join(text for text, _ in each), next((call for _, call in reversed(each) if call), None))
                    for each in product(*found)
                ]
            case ast.FormattedValue(value=inner):
                return self._values(module, scope, inner, seen)
            case ast.Name(id=name):
                return self._named(module, scope, name, value, seen)
            case ast.Attribute(value=ast.Name(id="self"), attr=attribute):
                owner = next(each for each in reversed(scope) if isinstance(each, ast.ClassDef))
                return self._given(module, owner, attribute.removeprefix("_"), seen)
            case ast.Attribute(value=holder, attr=attribute):
                for home, record in self._defined(_annotation(scope, holder)):
                    if attribute in _parameters(record):
                        return self._given(home, record, attribute, seen)
        raise UnknownCodeError(f"{module.path}:{value.lineno}: the code {ast.unparse(value)} is not followed")

    def _defined(self, name: str) -> Iterator[tuple[Module, ast.ClassDef]]:
        """Classes of that name, each after the module in which it is."""
        for module in self.modules:
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and node.name == name:
                    yield module, node

    def _named(
        self, module: Module, scope: tuple[Function, ...], name: str, value: ast.expr, seen: frozenset[Parameter]
    ) -> list[tuple[str, Caller | None]]:
        if name in module.constants:
            return [(module.constants[name], None)]
        for function in reversed(scope):
            if name in _parameters(function):
                return self._given(module, function, name, seen)
            assigned = _assigned(function, name)
            if assigned:
                return [each for expr in assigned for each in self._values(module, scope, expr, seen)]
        raise UnknownCodeError(f"{module.path}:{value.lineno}: {name} is not followed")

    def _given(
        self, module: Module, function: Function, name: str, seen: frozenset[Parameter]
    ) -> list[tuple[str, Caller | None]]:
        """What the callers of a function give for one of its parameters."""
        parameter = Parameter(module.path, function, name)
        if parameter in seen:
            return []
        values: list[tuple[str, Caller | None]] = []
        position = _parameters(function).index(name)
        for caller, call in self.calls[function.name]:
            if caller is not module and not self._may_call(caller, module, function):
                continue
            given = _argument(call, position, name)
            if given is None or not _fits(call, function) or caller.scopes[call][-1:] == (function,):
                continue
            found = self._values(caller, caller.scopes[call], given, seen | {parameter})
            own = None if isinstance(function, ast.ClassDef) else (caller, call, function)
            values += [(text, inner or own) for text, inner in found]
        return values

    def _may_call(self, caller: Module, module: Module, function: Function) -> bool:
        """Whether a call of that name in another module can mean this function."""
        if function.name.startswith("_") or function.name in caller.defined:
            return False
        return module.path.stem in caller.imported

    def _text(self, module: Module, scope: tuple[Function, ...], value: ast.expr | None) -> str:
        """A message as text, with `…` for what is worked out."""
        match value:
            case ast.Constant(value=str(text)):
                return text
            case ast.JoinedStr(values=parts):
                return "".join(self._text(module, scope, each) for each in parts)
            case ast.IfExp(body=body):
                return self._text(module, scope, body)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._text(module, scope, left) + self._text(module, scope, right)
            case ast.Name(id=name):
                assigned = [each for function in reversed(scope) for each in _assigned(function, name)]
                before = [each for each in assigned if each.lineno < value.lineno and not _mentions(each, name)]
                if before:
                    return self._text(module, scope, max(before, key=lambda each: each.lineno))
        return "…"


def _mentions(value: ast.expr, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(value))


def _name(node: ast.expr) -> str:
    """The last name of a dotted expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _owner(node: ast.expr) -> str:
    return _name(node.value) if isinstance(node, ast.Attribute) else ""


def _parameters(function: Function) -> list[str]:
    """Parameters by position, without `self`, then those that are given by name; the fields, for a data class."""
    if isinstance(function, ast.ClassDef):
        for statement in function.body:
            if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
                return _parameters(statement)
        fields = [
            each.target.id
            for each in function.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        ]
        return [each.removeprefix("_") for each in fields]
    positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    named = [each.arg for each in function.args.kwonlyargs]
    return [each for each in positional if each not in ("self", "cls")] + named


def _raised_with(function: ast.AST, call: ast.Call) -> set[str]:
    """Classes that are raised with the list to which a problem is assigned."""
    assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    names = {_name(node.targets[0]) for node in assigned if call in ast.walk(node.value)}
    raised = [node.exc for node in ast.walk(function) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {
        _name(each.func)
        for each in raised
        for given in each.args
        if isinstance(given, ast.Starred) and _name(given.value) in names
    }


def _says_something(message: str) -> bool:
    """Whether a message has words of its own beside what is worked out."""
    return any(each.isalpha() for each in message)


def _annotation(scope: tuple[Function, ...], holder: ast.expr) -> str:
    """The class that annotates a parameter, or the parameter from which an attribute of `self` is set."""
    name = _name(holder).removeprefix("_") if isinstance(holder, ast.Attribute) else _name(holder)
    for function in reversed(scope):
        methods = [each for each in ast.walk(function) if isinstance(each, ast.FunctionDef)]
        for each in [function, *methods] if isinstance(function, ast.FunctionDef) else methods:
            for given in (*each.args.args, *each.args.kwonlyargs):
                if given.arg == name and given.annotation is not None:
                    return _name(given.annotation)
    return ""


def _is_relay(call: ast.Call) -> bool:
    """Whether a call passes a problem on: `Problem(found.code, ...)`."""
    return _name(call.func) == "Problem" and bool(call.args) and isinstance(call.args[0], ast.Attribute)


def _is_parameter(given: list[ast.expr], function: Function) -> bool:
    return bool(given) and _name(given[0]) in _parameters(function)


def _fits(call: ast.Call, function: Function) -> bool:
    """Whether a call gives every parameter that a function needs: another of the same name may not be meant."""
    if isinstance(function, ast.ClassDef) or any(isinstance(each, ast.Starred) for each in call.args):
        return True
    positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args) if each.arg != "self"]
    needed = positional[: len(positional) - len(function.args.defaults)]
    return set(needed[len(call.args) :]) <= {keyword.arg for keyword in call.keywords}


def _argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return call.args[position] if position < len(call.args) else None


def _assigned(function: Function, name: str) -> list[ast.expr]:
    """Expressions that are assigned to a local name, by itself or as one of several."""
    return _assignments(function).get(name, [])


@cache
def _assignments(function: Function) -> dict[str, list[ast.expr]]:
    values: dict[str, list[ast.expr]] = defaultdict(list)
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Assign):
            continue
        for target in statement.targets:
            if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                for each, value in zip(target.elts, statement.value.elts, strict=False):
                    values[_name(each)].append(value)
            else:
                values[_name(target)].append(statement.value)
    return dict(values)
