"""Read plans that are kept in a manifest or beside an unfinished merge, and open the inputs of one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mergepipe.core.records import RecordFormat
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import ConflictError, CorruptError, MergePipeError, NotFoundError, Problem, UnsupportedError
from mergepipe.planning.plan import PLAN_FORMAT, Plan, parse_plan
from mergepipe.recipes.fields import LENIENT
from mergepipe.recipes.recipe_files import reload_recipe
from mergepipe.recipes.references import reference_text
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, open_recipes, with_known_digests
from mergepipe.snapshots.manifest import Manifest
from mergepipe.storage import owned
from mergepipe.storage.contract import BESIDE, PLAN_BYTES, FileId, Store
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import os_errors
from mergepipe.storage.stores import Stores

STORED_PLAN_NAME = "plan"


@dataclass(frozen=True, slots=True)
class _StoredPlan:
    """A plan, and the key of the request that it answers."""

    key: str
    plan: Plan


_FORMAT: Final = RecordFormat("mergepipe-staging", 2, _StoredPlan, "run again", variant="plan")


def read_plan(plan: Plan | str | Path) -> Plan:
    """Return a plan as it is, or read a stored one."""
    if isinstance(plan, Plan):
        return plan
    place = Location.of(plan)
    return parse_plan(Stores().read_small(place, PLAN_BYTES), place)


def plan_of(manifest: Manifest, where: str) -> Plan | None:
    """Decode the plan in a manifest; None for a full merge."""
    return None if manifest.plan is None else PLAN_FORMAT.of_content(manifest.plan, where)


def plan_key(inputs: Inputs, request: str) -> str:
    """Digest the recipe, the state of all input files and `request`: what must be equal to follow an earlier plan.

    What the catalog holds is left out on purpose: an interrupted merge may itself have added estimates to it.
    """
    return digest_of({**inputs.state, "request": request})


def plan_record(plan: Plan, key: str) -> bytes:
    """Encode a plan with the request that it answers. Law: `plan_in_record(plan_record(plan, key), key, _) == plan`."""
    return _FORMAT.to_json(_StoredPlan(key, plan))


def plan_in_record(raw: bytes | None, key: str | None, where: Location) -> Plan | None:
    """Decode a plan; None if there is no record, it is damaged, or it answers another request than `key`, if given."""
    with contextlib.suppress(CorruptError, UnsupportedError):
        stored = _FORMAT.parse(raw or b"", where)
        return stored.plan if key in (None, stored.key) else None
    return None


def store_plan(directory: Path, key: str, plan: Plan) -> None:
    """Write the plan durably into the staging directory of its output; the seal of the record covers paths too."""
    place = directory / STORED_PLAN_NAME
    with os_errors(place, "writing it"):
        owned.replace_file(place, plan_record(plan, key))


def stored_plan(directory: Path, key: str) -> Plan | None:
    """Read the plan of an unfinished merge; None if there is none, it is damaged, or it answers another request."""
    place = directory / STORED_PLAN_NAME
    with contextlib.suppress(OSError, MergePipeError):
        return plan_in_record(owned.read_file(place, PLAN_BYTES), key, Location.local(place))
    return None


def open_planned(plan: Plan, store: Store, link: CatalogLink) -> Inputs:
    """Open the inputs that a plan was made for."""
    recipe = reload_recipe(plan.recipe, store, {model.model: model.path for model in plan.models})
    if [reference_text(model) for model in recipe.inputs()] != [model.path for model in plan.models]:
        raise NotFoundError.of(
            "input.not-found", "plan", "its models are not those of its recipe", "make the plan again"
        )
    inputs = open_recipes((recipe,), store, ("*",), strictness=LENIENT)  # it was accepted when the plan was made
    inputs = with_known_digests(inputs, link)
    hint = "make the plan again (`mergepipe analyze`, then `mergepipe plan`)"
    problems = [
        Problem("input.changed", f"{model.path}/{name}", "changed since the plan was made", hint)
        for model, checkpoint in zip(plan.models, inputs.checkpoints, strict=True)
        for name in changed_files(model.files, checkpoint.file_ids, by_version=True)
    ]
    if inputs.vocabulary != plan.vocabulary:
        message = "the tokenizers of its models are not those that it was made for"
        problems.append(Problem("input.changed", "tokenizer", message, "make the plan again"))
    if problems:
        raise ConflictError(*problems)
    return replace(inputs, notices=plan.recipe_notices)  # of the recipe as it was written


def changed_files(then: Iterable[FileId], now: Iterable[FileId], *, by_version: bool) -> list[str]:
    """Name the files that differ in size or header, or are gone or new; those of an applied adapter by their own names.

    Also, `by_version`, those of another version, unless equal SHA-256 digests say that nothing changed.
    """
    earlier = {file.name: file for file in then}
    present = {file.name: file for file in now}

    def is_same(name: str) -> bool:
        a, b = earlier.get(name), present.get(name)
        if a is None or b is None or (a.size_bytes, a.header_digest) != (b.size_bytes, b.header_digest):
            return False
        return not by_version or a.version == b.version or a.sha256 == b.sha256 is not None

    changed = [name for name in sorted(earlier.keys() | present.keys()) if not is_same(name)]
    return [name.removeprefix(BESIDE) for name in changed]
