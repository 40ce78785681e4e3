"""Translate the Hub's refusals into errors that say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mergepipe.errors import ConflictError, CorruptError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.location import Location

UNREACHABLE: Final = "storage.connection"
"""The code of the error for a Hub that cannot be reached, in whose place a local cache may serve."""

_INVALID_TOKEN = "Invalid credentials in Authorization header"
_LOG_IN = "`hf auth login`"


def refusal(location: Location, status: int, headers: Mapping[str, str], *, has_token: bool) -> MergePipeError:
    """Make the error for an answer of the Hub that is no success. `headers` has names in lower case."""
    code, message = headers.get("x-error-code", ""), headers.get("x-error-message", "")
    model = location.root
    if code == "GatedRepo":
        return _gated(location, has_token)
    if code == "RevisionNotFound":
        text = f"the model has no branch, tag or commit '{location.revision}'"
        return NotFoundError.of("hub.revision", location, text, f"see hf.co/{model}/tree/main for what there is")
    if code == "EntryNotFound":
        return NotFoundError.of("storage.not-found", location, "no such file", f"see hf.co/{model}/tree/main")
    if status == 401 and message == _INVALID_TOKEN:
        hint = f"renew it by {_LOG_IN}, or correct HF_TOKEN"
        return StorageError.of("hub.token", location, "the Hub does not accept the token (401)", hint)
    if status in (401, 404) and code in ("", "RepoNotFound"):
        return _no_model(location, status, has_token)
    if status == 403:
        text, hint = f"the Hub refuses access (403): {_shown(message)}", "see that the token has the right to read it"
        return StorageError.of("hub.forbidden", location, text, hint)
    return StorageError.of("hub.status", location, f"the Hub answers {status}: {_shown(message)}", "run again later")


def offline(location: Location, why: str) -> MergePipeError:
    """Make the error for a model that is needed from the network where there is none."""
    model, name = location.root, location.root.rpartition("/")[2]
    revision = f" --revision {location.revision}" if location.revision else ""
    hint = f"where there is a network, run `hf download {model}{revision} --local-dir {name}`, and name that folder"
    return NotFoundError.of("hub.offline", location, f"{why}, and the local cache of the Hub does not hold it", hint)


def changed(location: Location, what: str, expected: object, answer: object) -> MergePipeError:
    """Make the error for bytes of another version than the pinned one."""
    message = f"is not what was pinned: {what} is {answer}, {expected} is needed"
    return ConflictError.of("input.changed", location, message, "run again; if it repeats, the server is at fault")


def is_unreachable(error: MergePipeError) -> bool:
    """Whether an error means that there is no network, or no Hub at its other end."""
    return error.code == UNREACHABLE


def no_answer(location: Location, why: str) -> MergePipeError:
    """Make the error for an answer that is not that of a Hub."""
    message = f"the Hub's answer is not as expected: {why}"
    return CorruptError.of("hub.answer", location, message, "see that HF_ENDPOINT leads to a Hub")


def _gated(location: Location, has_token: bool) -> MergePipeError:
    hint = f"accept its terms at hf.co/{location.root}, then {_LOG_IN}"
    why = "your account has not been granted access" if has_token else "no token was sent"
    return StorageError.of("hub.gated", location, f"is a gated model, and {why}", hint)


def _no_model(location: Location, status: int, has_token: bool) -> MergePipeError:
    hint = f"check the name at hf.co/{location.root}; a folder of this machine is written with ./ or / before it"
    if not has_token:
        hint = f"{hint}; for a private model, {_LOG_IN}"
    message = f"the Hub knows no model '{location.root}' that this token may see ({status})"
    if not has_token:
        message = f"the Hub knows no public model '{location.root}' ({status})"
    return NotFoundError.of("hub.model", location, message, hint)


def _shown(message: str) -> str:
    printable = "".join(character for character in message if character.isprintable())
    return printable[:200] or "no reason given"
