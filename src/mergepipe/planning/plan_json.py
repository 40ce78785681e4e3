"""Parse a stored plan strictly, and write plans to files atomically."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from mergepipe.core.canonical_json import parse_digestible
from mergepipe.core.json_fields import FieldCodes, JsonFields
from mergepipe.core.notices import Notice
from mergepipe.errors import CorruptError, OutputError, UnsupportedError
from mergepipe.operators.statistics import Cut
from mergepipe.planning.plan import (
    PLAN_FORMAT,
    PLAN_NAME,
    PLAN_VERSION,
    Access,
    Fallback,
    FileBinding,
    ImportanceRecord,
    Plan,
    PlannedModel,
    PlannedTensor,
    Runs,
    Scalar,
    SharedRuns,
)
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.output import replace_durably
from mergepipe.storage.ranges import os_error, read_head

# --- parse a stored plan strictly: every key known, every value in range, the digest checked ---


_CODES = FieldCodes("plan.damaged", "plan.damaged", "plan.damaged", "plan again")
_LONGEST_INDEX = 18  # digits
_Parameters = tuple[dict[str, Scalar], dict[str, Scalar], tuple[dict[str, Scalar], ...]]


def parse_plan(raw: bytes, where: object = "plan") -> Plan:
    """Parse what `Plan.to_json` wrote. `where` names the file in messages."""
    top = JsonFields(_parse(raw, where), _CODES, where)
    _check_format(top.text("format"), where)
    digest = top.text("digest")
    plan = _plan_of(top)
    if plan.digest != digest:
        message = f"it says that its digest is '{digest[:40]}', it is '{plan.digest}'"
        raise CorruptError.of("plan.damaged", where, message, "a plan cannot be edited: plan again")
    return plan


def parse_runs(text: str) -> Runs:
    """The inverse of `format_runs`."""
    return tuple(_run_of(part) for part in text.split(","))


def _parse_shared(text: str) -> SharedRuns:
    shared_runs = []
    for part in text.split(","):
        run, at, source = part.partition("@")
        if not at or not _is_index(source):
            raise ValueError(f"'{part[:40]}' is not a run of shared blocks")
        shared_runs.append((*_run_of(run), int(source)))
    return tuple(shared_runs)


def _run_of(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if not _is_index(first) or (dash and not _is_index(last)):
        raise ValueError(f"'{text[:40]}' is not a run of blocks")
    return int(first), int(last if dash else first) + 1


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _LONGEST_INDEX


def _parse(raw: bytes, where: object) -> object:
    def refuse(reason: str) -> NoReturn:
        raise CorruptError.of("plan.damaged", where, reason, "plan again")

    return parse_digestible(raw, refuse)


def _check_format(text: str, where: object) -> None:
    name, _, version = text.partition("/")
    if name != PLAN_NAME or not _is_index(version) or int(version) < 1:
        raise CorruptError.of("plan.damaged", where, f"its format is '{text[:40]}', '{PLAN_FORMAT}' is needed")
    if int(version) != PLAN_VERSION:
        is_newer = int(version) > PLAN_VERSION
        message = f"its format '{text}' is {'newer' if is_newer else 'older'} than '{PLAN_FORMAT}'"
        hint = "use a newer version of MergePipe" if is_newer else "make the plan again (`mergepipe plan`)"
        raise UnsupportedError.of("format.version", where, message, hint)


def _plan_of(top: JsonFields) -> Plan:
    rows = [_parameters_of(row) for row in top.objects("parameters")]
    texts = {name: top.text(name) for name in ("operator", "policy", "on_omit", "recipe")}
    names = ("block_elements", "budget_bytes", "planned_bytes", "full_cost_bytes")
    numbers = {name: top.size(name) for name in names}
    seed = top.integer("seed")
    models = tuple(_model_of(row) for row in top.objects("models"))
    n_experts = sum(model.role == "expert" for model in models)
    tensors = tuple(_tensor_of(row, rows, n_experts) for row in top.objects("tensors"))
    fallbacks = tuple(_fallback_of(row) for row in top.objects("fallbacks"))
    adjustments = tuple(_fallback_of(row) for row in top.objects("adjustments"))
    vocabulary = top.text("vocabulary") if top.has("vocabulary") else None
    importance = _importance_of(top.object("importance")) if top.has("importance") else None
    notices = tuple(_notice_of(row) for row in top.objects("recipe_notices")) if top.has("recipe_notices") else ()
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
            vocabulary=vocabulary,
            importance=importance,
            recipe_notices=notices,
        )
    except ValueError as error:
        top.refuse(str(error))


def _parameters_of(row: JsonFields) -> _Parameters:
    parameters = (
        row.object("globals").scalars(),
        row.object("anchor").scalars(),
        tuple(expert.scalars() for expert in row.objects("experts")),
    )
    row.done()
    return parameters


def _notice_of(fields: JsonFields) -> Notice:
    texts = [fields.text(name) for name in ("code", "file", "key", "message", "elsewhere")]
    code, file, key, message, elsewhere = texts
    lines, changes_result = fields.sizes("other_lines"), fields.flag("changes_result")
    notice = Notice(code, file, fields.size("line"), key, message, elsewhere, lines, changes_result)
    fields.done()
    return notice


def _model_of(model: JsonFields) -> PlannedModel:
    fields = PlannedModel(
        role=model.text("role"),
        model=model.text("model"),
        path=model.text("path"),
        identity=model.text("identity"),
        content_id=model.optional_text("content_id"),
        files=tuple(_file_of(file) for file in model.objects("files")),
        full_cost_bytes=model.size("full_cost_bytes"),
        planned_bytes=model.size("planned_bytes"),
    )
    side_bytes = model.size("side_bytes") if model.has("side_bytes") else 0
    model.done()
    try:
        return replace(fields, side_bytes=side_bytes)
    except ValueError as error:
        model.refuse(str(error))


def _file_of(file: JsonFields) -> FileBinding:
    parsed = FileBinding(
        file.text("name"), file.size("size_bytes"), file.text("version"), file.text("header_digest"),
        file.text("sha256") if "sha256" in file.remaining() else None,
    )  # fmt: skip
    file.done()
    return parsed


def _importance_of(fields: JsonFields) -> ImportanceRecord:
    parsed = ImportanceRecord(fields.text("path"), fields.text("digest"))
    fields.done()
    return parsed


def _fallback_of(fallback: JsonFields) -> Fallback:
    parsed = Fallback(fallback.text("where"), fallback.text("decision"), fallback.text("reason"))
    fallback.done()
    return parsed


def _tensor_of(tensor: JsonFields, rows: Sequence[_Parameters], n_experts: int) -> PlannedTensor:
    index = tensor.size("parameters")
    if index >= len(rows):
        tensor.refuse(f"there is no set of parameters {index}")
    shared, anchor, experts = rows[index]
    access = tuple(_access_of(entry) for entry in tensor.objects("access"))
    models = tensor.integers("models") if tensor.has("models") else tuple(range(n_experts))
    name, n_elements = tensor.text("name"), tensor.size("n_elements")
    probability = tensor.number("probability") if tensor.has("probability") else 1.0
    tensor.done()
    try:
        return PlannedTensor(name, n_elements, shared, anchor, experts, access, models, probability)
    except ValueError as error:
        tensor.refuse(str(error))


def _access_of(access: JsonFields) -> Access:
    products: tuple[float, float, float] | None = None
    if access.has("products"):
        numbers = access.numbers("products")
        if len(numbers) != 3:
            access.refuse(f"{len(numbers)} products, 3 are needed")
        products = (numbers[0], numbers[1], numbers[2])
    cut: Cut | None = None
    if access.has("cut"):
        cut_3 = access.sizes("cut")
        if len(cut_3) != 3:
            access.refuse(f"{len(cut_3)} numbers of a cut, 3 are needed")
        cut = Cut(*cut_3)
    try:
        parsed = Access(
            blocks=parse_runs(access.text("read")) if access.has("read") else (),
            free=parse_runs(access.text("free")) if access.has("free") else (),
            shared=_parse_shared(access.text("shared")) if access.has("shared") else (),
            cut=cut,
            products=products,
            levels=_parse_shared(access.text("levels")) if access.has("levels") else (),
        )
    except ValueError as error:
        access.refuse(str(error))
    access.done()
    return parsed


# --- write plans to files atomically: the file holds the old plan, the new one, or does not exist ---


_HEAD_BYTES = 400


def write_plan(plan: Plan, path: Path) -> None:
    """Write a plan; refuse to replace a file that is not a plan."""
    try:
        _check_replaceable(path)
    except OSError as error:
        raise os_error(error, path, "writing the plan") from error
    replace_durably(path, plan.to_json(), Ledger())


def _check_replaceable(path: Path) -> None:
    if path.is_symlink():
        message = "is a link, and nothing is written through links"
        raise OutputError.of("output.link", path, message, "name the file itself")
    if path.exists() and not _is_plan(path):
        message = "exists, and is not a plan of mergepipe"
        raise OutputError.of("output.not-ours", path, message, "choose another name")


def _is_plan(path: Path) -> bool:
    return path.is_file() and f'"format": "{PLAN_NAME}/'.encode() in read_head(path, _HEAD_BYTES)
