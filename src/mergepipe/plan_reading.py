"""Reads a stored plan: strictly, every key known, every value in range, the digest checked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NoReturn

from mergepipe.canonical import parse_digestible
from mergepipe.errors import CorruptError, UnsupportedError, did_you_mean
from mergepipe.plan import (
    PLAN_FORMAT,
    PLAN_NAME,
    PLAN_VERSION,
    Access,
    Fallback,
    FileBinding,
    OmissionBound,
    Plan,
    PlannedModel,
    PlannedTensor,
    ReusedSnapshot,
    Runs,
    Scalar,
    SharedRuns,
    TimePrice,
)
from mergepipe.prices import DecodingPrices, Duration, Speeds

_LONGEST_INDEX = 18  # digits
_Parameters = tuple[dict[str, Scalar], dict[str, Scalar], tuple[dict[str, Scalar], ...]]


def parse_plan(raw: bytes, where: object = "plan") -> Plan:
    """Read what `Plan.to_json` wrote. `where` names the file in messages.

    Raises:
        UnsupportedError: `plan.version`, it is of another version of the format.
        CorruptError: `plan.json`, `plan.format`, `plan.key`, `plan.type`, `plan.value`, or `plan.digest` where it was
            changed by hand.
    """
    top = _Object(_parse(raw, where), where)
    _check_format(top.text("format"), where)
    digest = top.text("digest")
    plan = _plan_of(top)
    if plan.digest != digest:
        message = f"it says that its digest is '{digest[:40]}', it is '{plan.digest}'"
        raise CorruptError.of("plan.digest", where, message, "a plan cannot be edited: plan again")
    return plan


def parse_runs(text: str) -> Runs:
    """The inverse of `format_runs`.

    Raises:
        ValueError: it is not a list of runs.
    """
    return tuple(_run_of(part) for part in text.split(","))


def _parse_shared(text: str) -> SharedRuns:
    found = []
    for part in text.split(","):
        run, at, source = part.partition("@")
        if not at or not _is_index(source):
            raise ValueError(f"'{part[:40]}' is not a run of shared blocks")
        found.append((*_run_of(run), int(source)))
    return tuple(found)


def _run_of(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not _is_index(first) or (dash and not _is_index(last)):
        raise ValueError(f"'{text[:40]}' is not a run of blocks")
    return int(first), int(last if dash else first) + 1


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_INDEX


def _parse(raw: bytes, where: object) -> object:
    def refuse(reason: str) -> NoReturn:
        raise CorruptError.of("plan.json", where, reason, "plan again")

    return parse_digestible(raw, refuse)


def _check_format(text: str, where: object) -> None:
    name, _, version = text.partition("/")
    if name != PLAN_NAME or not _is_index(version) or int(version) < 1:
        raise CorruptError.of("plan.format", where, f"its format is '{text[:40]}', '{PLAN_FORMAT}' is needed")
    if int(version) != PLAN_VERSION:
        is_newer = int(version) > PLAN_VERSION
        message = f"its format '{text}' is {'newer' if is_newer else 'older'} than '{PLAN_FORMAT}'"
        hint = "use a newer version of MergePipe" if is_newer else "make the plan again (`mergepipe plan`)"
        raise UnsupportedError.of("plan.version", where, message, hint)


class _Object:
    """One JSON object. Its keys are taken one by one; `done` refuses what is left."""

    def __init__(self, value: object, where: object, place: str = "") -> None:
        self._where = where
        self._place = place
        if not isinstance(value, dict):
            self.fail("plan.type", "an object is needed")
        self._left: dict[str, object] = dict(value)
        self._known: list[str] = []

    def fail(self, code: str, message: str) -> NoReturn:
        """Refuse the plan."""
        place = f"{self._place}: " if self._place else ""
        raise CorruptError.of(code, self._where, place + message, "plan again")

    def take(self, key: str) -> object:
        self._known.append(key)
        if key not in self._left:
            self.fail("plan.key", f"'{key}' is missing")
        return self._left.pop(key)

    def has(self, key: str) -> bool:
        self._known.append(key)
        return key in self._left

    def keys(self) -> tuple[str, ...]:
        return tuple(self._left)

    def text(self, key: str) -> str:
        value = self.take(key)
        return value if isinstance(value, str) else self.fail("plan.type", f"'{key}' is not a string")

    def optional_text(self, key: str) -> str | None:
        value = self.take(key)
        return value if value is None or isinstance(value, str) else self.fail("plan.type", f"'{key}' is not a string")

    def flag(self, key: str) -> bool:
        value = self.take(key)
        return value if isinstance(value, bool) else self.fail("plan.type", f"'{key}' is neither true nor false")

    def signed(self, key: str) -> int:
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail("plan.type", f"'{key}' is not an integer")
        return value

    def integer(self, key: str) -> int:
        value = self.signed(key)
        return value if value >= 0 else self.fail("plan.value", f"'{key}' is negative")

    def number(self, key: str) -> float:
        return self._number(self.take(key), key)

    def numbers(self, key: str) -> tuple[float, ...]:
        return tuple(self._number(value, key) for value in self.array(key))

    def integers(self, key: str) -> tuple[int, ...]:
        values = self.array(key)
        if any(isinstance(value, bool) or not isinstance(value, int) for value in values):
            self.fail("plan.type", f"'{key}' is not an array of integers")
        return tuple(value for value in values if isinstance(value, int))

    def _number(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.fail("plan.type", f"'{key}' is not a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        return number if math.isfinite(number) else self.fail("plan.value", f"'{key}' is not finite")

    def array(self, key: str) -> list[object]:
        value = self.take(key)
        return value if isinstance(value, list) else self.fail("plan.type", f"'{key}' is not an array")

    def objects(self, key: str) -> Iterator[_Object]:
        for i, value in enumerate(self.array(key)):
            yield _Object(value, self._where, f"{self._inside(key)}[{i}]")

    def optional_object(self, key: str) -> _Object | None:
        value = self.take(key)
        return None if value is None else _Object(value, self._where, self._inside(key))

    def object(self, key: str) -> _Object:
        return _Object(self.take(key), self._where, self._inside(key))

    def _inside(self, key: str) -> str:
        return f"{self._place}.{key}" if self._place else key

    def scalars(self) -> dict[str, Scalar]:
        """Everything, as parameters of an operator."""
        return {key: self._scalar(key) for key in self.keys()}

    def _scalar(self, key: str) -> Scalar:
        value = self.take(key)
        return value if isinstance(value, bool) else self._number(value, key)

    def done(self) -> None:
        for key in sorted(self._left):
            self.fail("plan.key", f"unknown key '{key[:40]}', {did_you_mean(key[:40], self._known)}")


def _plan_of(top: _Object) -> Plan:
    rows = [_parameters_of(row) for row in top.objects("parameters")]
    texts = {name: top.text(name) for name in ("operator", "policy", "on_omit", "recipe")}
    names = ("block_elements", "budget_bytes", "planned_bytes", "full_cost_bytes")
    numbers = {name: top.integer(name) for name in names}
    seed = top.signed("seed")
    models = tuple(_model_of(each) for each in top.objects("models"))
    n_experts = sum(model.role == "expert" for model in models)
    tensors = tuple(_tensor_of(each, rows, n_experts) for each in top.objects("tensors"))
    fallbacks = tuple(_fallback_of(each) for each in top.objects("fallbacks"))
    adjustments = tuple(_fallback_of(each) for each in top.objects("adjustments"))
    bound = _bound_of(top)
    reuse = tuple(_reused_of(each) for each in top.objects("reuse")) if top.has("reuse") else ()
    vocabulary = top.text("vocabulary") if top.has("vocabulary") else None
    price = _price_of(top.object("price")) if top.has("price") else None
    error_is_least = top.flag("error_is_least") if top.has("error_is_least") else False
    top.done()
    try:
        return Plan(
            operator=texts["operator"],
            policy=texts["policy"],
            on_omit=texts["on_omit"],
            recipe=texts["recipe"],
            seed=seed,
            block_elements=numbers["block_elements"],
            budget_bytes=numbers["budget_bytes"],
            planned_bytes=numbers["planned_bytes"],
            full_cost_bytes=numbers["full_cost_bytes"],
            models=models,
            tensors=tensors,
            fallbacks=fallbacks,
            adjustments=adjustments,
            bound=bound,
            reuse=reuse,
            vocabulary=vocabulary,
            price=price,
            error_is_least=error_is_least,
        )
    except ValueError as error:
        top.fail("plan.value", str(error))


def _parameters_of(row: _Object) -> _Parameters:
    found = (
        row.object("globals").scalars(),
        row.object("anchor").scalars(),
        tuple(each.scalars() for each in row.objects("experts")),
    )
    row.done()
    return found


def _bound_of(top: _Object) -> OmissionBound | None:
    bound = top.optional_object("bound")
    if bound is None:
        return None
    absolute = bound.number("absolute")
    relative = bound.number("relative") if bound.has("relative") else None
    bound.done()
    return OmissionBound(absolute, relative)


def _model_of(model: _Object) -> PlannedModel:
    fields = PlannedModel(
        role=model.text("role"),
        model=model.text("model"),
        path=model.text("path"),
        identity=model.text("identity"),
        content_id=model.optional_text("content_id"),
        files=tuple(_file_of(each) for each in model.objects("files")),
        full_cost_bytes=model.integer("full_cost_bytes"),
        planned_bytes=model.integer("planned_bytes"),
    )
    side_bytes = model.integer("side_bytes") if model.has("side_bytes") else 0
    model.done()
    try:
        return replace(fields, side_bytes=side_bytes)
    except ValueError as error:
        model.fail("plan.value", str(error))


def _price_of(price: _Object) -> TimePrice:
    kinds = price.object("decoding_nanoseconds")
    names = kinds.keys()
    try:
        found = TimePrice(
            Speeds(
                storage_bytes_per_second=price.number("storage_bytes_per_second"),
                decoding=DecodingPrices({kind: kinds.numbers(kind) for kind in names}),
                threads=price.integer("threads"),
                source=price.text("source"),
            ),
            Duration(price.number("reading_seconds"), price.number("decoding_seconds")),
        )
    except ValueError as error:
        price.fail("plan.value", str(error))
    price.done()
    return found


def _reused_of(reused: _Object) -> ReusedSnapshot:
    found = ReusedSnapshot(reused.text("sid"), reused.text("path"), reused.integers("saved_bytes"))
    reused.done()
    return found


def _file_of(file: _Object) -> FileBinding:
    found = FileBinding(
        file.text("name"), file.integer("size_bytes"), file.signed("mtime_ns"), file.text("header_digest")
    )
    file.done()
    return found


def _fallback_of(fallback: _Object) -> Fallback:
    found = Fallback(fallback.text("where"), fallback.text("decision"), fallback.text("reason"))
    fallback.done()
    return found


def _tensor_of(tensor: _Object, rows: Sequence[_Parameters], n_experts: int) -> PlannedTensor:
    index = tensor.integer("parameters")
    if index >= len(rows):
        tensor.fail("plan.value", f"there is no set of parameters {index}")
    shared, anchor, experts = rows[index]
    access = tuple(_access_of(each) for each in tensor.objects("access"))
    models = tensor.integers("models") if tensor.has("models") else tuple(range(n_experts))
    try:
        reused = _parse_shared(tensor.text("reused")) if tensor.has("reused") else ()
    except ValueError as error:
        tensor.fail("plan.value", str(error))
    name, n_elements = tensor.text("name"), tensor.integer("n_elements")
    tensor.done()
    return PlannedTensor(name, n_elements, shared, anchor, experts, access, models, reused)


def _access_of(access: _Object) -> Access:
    products: tuple[float, float, float] | None = None
    if access.has("products"):
        numbers = access.numbers("products")
        if len(numbers) != 3:
            access.fail("plan.value", f"{len(numbers)} products, 3 are needed")
        products = (numbers[0], numbers[1], numbers[2])
    energy: tuple[float, float] | None = None
    if access.has("energy"):
        numbers = access.numbers("energy")
        if len(numbers) != 2:
            access.fail("plan.value", f"{len(numbers)} energies, 2 are needed")
        energy = (numbers[0], numbers[1])
    try:
        found = Access(
            blocks=parse_runs(access.text("read")) if access.has("read") else (),
            free=parse_runs(access.text("free")) if access.has("free") else (),
            shared=_parse_shared(access.text("shared")) if access.has("shared") else (),
            threshold_bits=access.integer("threshold_bits") if access.has("threshold_bits") else None,
            products=products,
            levels=_parse_shared(access.text("levels")) if access.has("levels") else (),
            energy=energy,
        )
    except ValueError as error:
        access.fail("plan.value", str(error))
    access.done()
    return found
