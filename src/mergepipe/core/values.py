"""`dataclass` by the standard library's contract, without compiling functions where a class is defined.

The standard decorator compiles six functions for every frozen class: a third of the start of a command, which uses few
of the classes. Here comparing, hashing, printing and freezing are closures, and `__init__` is compiled for the first
value. Type checkers see the standard decorator; `fields`, `replace` and `asdict` work as with any dataclass.

Deviations: a class without a docstring is documented by its name alone, and values compare as the tuples of their
fields in every version of Python, so that fields that are one object are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence, Set
from dataclasses import MISSING, Field, FrozenInstanceError, fields, is_dataclass
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(**options: bool) -> Callable[[type], type]:
        """Make a class a dataclass; as the standard decorator does unless it is frozen, slotted and without a base."""

        def decorate(cls: type) -> type:
            is_value = options.keys() <= _VALUE_OPTIONS and options.get("frozen") and options.get("slots")
            if not is_value or any(is_dataclass(base) for base in cls.__bases__):
                return dataclasses.dataclass(**options)(cls)
            return _make_value_class(cls, **options)

        return decorate


__all__ = ["dataclass"]

_VALUE_OPTIONS = {"frozen", "slots", "eq", "repr", "kw_only"}
_FACTORY = object()


def _make_value_class(cls: type, *, eq: bool = True, repr: bool = True, kw_only: bool = False, **_always: bool) -> type:
    defined = dict(cls.__dict__)
    cls.__doc__ = cls.__doc__ or cls.__name__
    made: Any = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
    told = made.__dataclass_params__
    told.init, told.repr, told.eq, told.frozen = True, repr, eq, True
    methods = {"__init__": _InitCompiledLater(made), "__getstate__": _get_state, "__setstate__": _set_state}
    all_fields = fields(made)
    names = {field.name for field in all_fields}
    methods |= {"__setattr__": _refusal("assign to", made, names), "__delattr__": _refusal("delete", made, names)}
    if repr:
        methods["__repr__"] = _representation([field.name for field in all_fields if field.repr])
    if eq:
        methods["__eq__"] = _equality([field for field in all_fields if field.compare])
        if defined.get("__hash__") is None and "__eq__" in defined:
            del defined["__hash__"]  # Python has put it there, not the class
        hashed = [field for field in all_fields if (field.compare if field.hash is None else field.hash)]
        methods["__hash__"] = _hash_of(hashed)
    for name in methods.keys() - defined.keys():
        setattr(made, name, methods[name])
    value_class: type = made
    return value_class


class _InitCompiledLater:
    """Stands for the `__init__` of a class of values until the first is made, or its signature is looked at."""

    def __init__(self, cls: type) -> None:
        self._class = cls

    def __get__(self, value: object, _owner: type | None = None) -> Any:
        compiled = _compile_init(self._class)
        self._class.__init__ = compiled  # type: ignore[misc]
        return compiled if value is None else compiled.__get__(value)


def _compile_init(cls: type) -> Any:
    names: dict[str, object] = {"__factory": _FACTORY}
    body: list[str] = []
    parameters: list[str] = []
    keywords: list[str] = []
    for field in fields(cls):
        name = field.name
        names |= {f"__set_{name}": cls.__dict__[name].__set__, f"__default_{name}": field.default}
        default, value, made = "" if field.default is MISSING else f"__default_{name}", name, ""
        if field.default_factory is not MISSING:
            names[f"__make_{name}"] = field.default_factory
            default, value, made = (
                "__factory",
                f"__make_{name}() if {name} is __factory else {name}",
                f"__make_{name}()",
            )
        if field.init:
            (keywords if field.kw_only else parameters).append(f"{name} = {default}" if default else name)
            body.append(f"    __set_{name}(self, {value})\n")
        elif default:
            body.append(f"    __set_{name}(self, {made or default})\n")
    if hasattr(cls, "__post_init__"):
        body.append("    self.__post_init__()\n")
    listed = ", ".join(["self", *parameters, *(["*", *keywords] if keywords else [])])
    exec(f"def __init__({listed}):\n{''.join(body) or '    pass'}", names)
    init: Any = names["__init__"]
    init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    init.__annotations__ = {field.name: field.type for field in fields(cls)} | {"return": None}
    return init


def _get_state(self: Any) -> list[object]:
    return [getattr(self, field.name) for field in fields(self)]


def _set_state(self: Any, state: Sequence[object]) -> None:
    for field, value in zip(fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)


def _refusal(action: str, cls: type, names: Set[str]) -> Callable[..., None]:
    general = getattr(object, "__setattr__" if action == "assign to" else "__delattr__")

    def refuse(self: object, name: str, *value: object) -> None:
        if type(self) is cls or name in names:
            raise FrozenInstanceError(f"cannot {action} field {name!r}")
        general(self, name, *value)

    return refuse


def _representation(names: Sequence[str]) -> Callable[[object], str]:
    @recursive_repr()
    def represent(self: object) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    return represent


def _values(fields_: Sequence[Field[Any]]) -> Callable[[object], object]:
    """Return a function that takes the values of these fields off one object, together."""
    return attrgetter(*(field.name for field in fields_)) if fields_ else type


def _equality(compared: Sequence[Field[Any]]) -> Callable[[object, object], bool]:
    values = _values(compared)

    def equal(self: object, other: object) -> bool:
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return equal


def _hash_of(hashed: Sequence[Field[Any]]) -> Callable[[object], int]:
    values = _values(hashed)
    return lambda self: hash(values(self))
