"""Values made by `core.values.dataclass` beside those of the standard library's decorator."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, field
from typing import Any

import pytest

from mergepipe.core import values
from mergepipe.core.values import dataclass

OPTIONS: tuple[dict[str, bool], ...] = (
    {},
    {"eq": False},
    {"repr": False},
    {"kw_only": True},
    {"order": True},
)


class _Shown:
    __slots__ = ()

    def __repr__(self) -> str:
        return "shown"


def _declare(decorate: Callable[..., Any], **options: bool) -> Any:
    """Declare one class with every kind of field that the package has."""

    class Value(_Shown):
        """A value."""

        name: str
        sizes: tuple[int, ...] = (1, 2)
        parts: list[str] = field(default_factory=list, hash=False)
        note: str = field(default="", compare=False, repr=False)
        n_sizes: int = field(init=False)
        first: str = field(init=False, default="f")
        seen: list[str] = field(init=False, default_factory=list, compare=False)

        def __post_init__(self) -> None:
            if not self.name:
                raise ValueError("no name")
            object.__setattr__(self, "n_sizes", len(self.sizes))

    return decorate(frozen=True, slots=True, **options)(Value)


@pytest.fixture(params=OPTIONS, ids=str)
def classes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    ours, standard = (_declare(decorate, **request.param) for decorate in (dataclass, dataclasses.dataclass))
    monkeypatch.setitem(globals(), "Value", ours)
    ours.__qualname__ = standard.__qualname__ = "Value"  # pickle looks for it there
    return ours, standard


def test_dataclass__describes_itself_as_the_standard_one(classes: tuple[Any, Any]) -> None:
    ours, standard = classes
    assert ours.__slots__ == standard.__slots__
    assert ours.__match_args__ == standard.__match_args__
    assert ours.__doc__ == standard.__doc__
    assert str(ours.__dataclass_params__) == str(standard.__dataclass_params__)
    assert [str(field) for field in dataclasses.fields(ours)] == [str(field) for field in dataclasses.fields(standard)]
    parameters = [inspect.signature(cls).parameters.values() for cls in classes]
    assert [(p.name, p.kind, p.annotation) for p in parameters[0]] == [
        (p.name, p.kind, p.annotation) for p in parameters[1]
    ]


def test_dataclass__makes_compares_prints_and_changes_values_as_the_standard_one(classes: tuple[Any, Any]) -> None:
    outcomes = []
    for cls in classes:
        one = cls(name="a", parts=["x"], note="n")
        others = [cls(name="a", parts=["x"]), cls(name="a"), dataclasses.replace(one, sizes=(), note="other"), "a"]
        state = [getattr(copy.copy(one), name) for name in (*cls.__match_args__, "n_sizes", "first", "seen")]
        outcomes.append(
            [
                *(one == other for other in others),
                repr(one),
                dataclasses.asdict(one),
                dataclasses.astuple(others[2]),
                state,
                cls(name="b").parts is not cls(name="b").parts,
                hash(one) == hash(others[0]),
                hash(one) == hash(others[2]),
                hasattr(one, "__dict__"),
            ]
        )
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "act",
    [
        lambda value: setattr(value, "name", "b"),
        lambda value: delattr(value, "name"),
        lambda value: type(value)(),
        lambda value: type(value)(name=""),
        lambda value: type(value)(name="a", unknown=1),
    ],
)
def test_dataclass__refuses_as_the_standard_one(classes: tuple[Any, Any], act: Callable[[Any], object]) -> None:
    refusals = []
    for cls in classes:
        value = cls(name="a")
        with pytest.raises((FrozenInstanceError, TypeError, ValueError)) as refused:
            act(value)
        refusals.append((refused.type, str(refused.value).rpartition("__init__")[2]))
        assert value.name == "a"
    assert refusals[0] == refusals[1]


def test_dataclass__refuses_names_that_are_no_fields(classes: tuple[Any, Any]) -> None:
    """The standard decorator raises a TypeError of its own making there."""
    with pytest.raises((FrozenInstanceError, TypeError)):
        classes[0](name="a").unknown = 1


def test_dataclass__values_pickle(classes: tuple[Any, Any]) -> None:
    value = classes[0](name="a", parts=["x"], note="n")
    read = pickle.loads(pickle.dumps(value))
    assert dataclasses.astuple(read) == dataclasses.astuple(value)


def test_dataclass__compares_and_hashes_as_a_class_itself_says() -> None:
    def declare(decorate: Callable[..., Any]) -> Any:
        class Value:  # noqa: PLW1641 (the decorator makes it)
            """Equal where lengths are."""

            text: str

            def __eq__(self, other: object) -> bool:
                return isinstance(other, type(self)) and len(other.text) == len(self.text)

        return decorate(frozen=True, slots=True)(Value)

    for decorate in (dataclass, dataclasses.dataclass):
        value = declare(decorate)
        assert value("ab") == value("cd")
        assert hash(value("ab")) == hash(value("ab")) != hash(value("cd"))


def test_dataclass__classes_with_a_dataclass_as_base_and_changeable_ones_are_the_standard_librarys() -> None:
    @dataclass(frozen=True, slots=True)
    class Base:
        name: str

    @dataclass(frozen=True, slots=True)
    class Derived(Base):
        size: int = 0

    @dataclass(slots=True)
    class Changeable:
        size: int

    assert Derived("a", 1) == Derived("a", 1) != Derived("a")
    with pytest.raises(FrozenInstanceError):
        Derived("a").name = "b"  # type: ignore[misc]
    changed = Changeable(1)
    changed.size = 2
    assert changed == Changeable(2)


def test_dataclass__compiles_init_for_the_first_value_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[type] = []
    compile_init = values._compile_init

    def note(cls: type) -> Any:
        compiled.append(cls)
        return compile_init(cls)

    monkeypatch.setattr(values, "_compile_init", note)
    cls = _declare(dataclass)
    assert compiled == []
    assert cls("a") == cls("a")
    assert compiled == [cls]
