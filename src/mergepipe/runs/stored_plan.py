"""Read plans that are kept: in a manifest, and where an unfinished merge grows, for who resumes it or works for it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import mergepipe
from mergepipe.core.canonical_json import digest_of
from mergepipe.errors import MergePipeError
from mergepipe.planning.plan import PLAN_FORMAT, Plan
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.snapshots.manifest import Manifest
from mergepipe.storage import owned
from mergepipe.storage.limits import PLAN_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import os_error
from mergepipe.storage.sealed_lines import payload_of, sealed

STORED_PLAN_NAME = "plan"
_KEY, _PLAN = "key", "plan"


def plan_of(manifest: Manifest, where: str) -> Plan | None:
    """Decode the plan in a manifest; None for a full merge."""
    return None if manifest.plan is None else PLAN_FORMAT.of_content(manifest.plan, where)


def plan_key(inputs: Inputs, request: str) -> str:
    """Digest the recipe, the state of all input files and `request`: what must be equal to follow an earlier plan.

    What the catalog holds is left out on purpose: an interrupted merge may itself have added estimates to it.
    """
    return digest_of({
        "version": mergepipe.__version__,
        "recipe": inputs.recipe_text,
        "request": request,
        "inputs": [
            [str(checkpoint.root), [[f.name, f.size_bytes, f.version, f.header_digest] for f in checkpoint.files]]
            for _, _, checkpoint in inputs.leaves()
        ],
        "alignment": None if inputs.alignment is None else inputs.alignment.digest,
    })  # fmt: skip


def plan_record(plan: Plan, key: str) -> bytes:
    """Encode a plan with the request that it answers. Law: `plan_in_record(plan_record(plan, key), key, _) == plan`."""
    return json.dumps({_KEY: key, _PLAN: PLAN_FORMAT.content(plan)}, ensure_ascii=False, allow_nan=False).encode()


def plan_in_record(raw: bytes | None, key: str | None, where: Location) -> Plan | None:
    """Decode a plan; None if there is no record, it is damaged, or it answers another request than `key`, if given."""
    with contextlib.suppress(MergePipeError, ValueError, LookupError, RecursionError):
        content = json.loads(raw or b"")
        if isinstance(content, dict) and key in (None, content.get(_KEY)):
            return PLAN_FORMAT.of_content(content[_PLAN], where)
    return None


def store_plan(directory: Path, key: str, plan: Plan) -> None:
    """Write the plan durably into the staging directory of its output, sealed: its digest covers no paths."""
    place = directory / STORED_PLAN_NAME
    try:
        owned.replace_file(place, sealed(plan_record(plan, key)))
    except OSError as error:
        raise os_error(error, place, "writing it") from error


def stored_plan(directory: Path, key: str) -> Plan | None:
    """Read the plan of an unfinished merge; None if there is none, it is damaged, or it answers another request."""
    place = directory / STORED_PLAN_NAME
    with contextlib.suppress(OSError, MergePipeError):
        return plan_in_record(payload_of(owned.read_file(place, PLAN_BYTES)), key, Location.local(place))
    return None
