"""Rename a model's tensors to match another model's, where name prefixes differ."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable
from mergepipe.core.blocks import DTypeKind

MAX_RULES = 4

_DIGIT = re.compile(r"\d")


def renamed_to_match(reference: Checkpoint, checkpoint: Checkpoint) -> dict[str, Readable]:
    """Return the tensors of `checkpoint` under the names that `reference` uses, in storage order.

    A tensor without a partner is looked for by the end of its name. Names are changed only by few whole prefixes, and
    only if every missing tensor has exactly one partner of its shape then; otherwise they all stay as they are.
    """
    tensors = dict(checkpoint.tensors)
    if checkpoint.kind is not CheckpointKind.FULL:
        return tensors
    missing = [
        entry
        for name, entry in reference.tensors.items()
        if name not in tensors and entry.dtype.kind is DTypeKind.FLOAT
    ]
    unmatched = [name for name in tensors if name not in reference.tensors]
    rules = _rules(missing, unmatched, tensors)
    if not rules:
        return tensors
    ordered = sorted(rules, key=len, reverse=True)
    renamed = {name: _renamed(name, ordered, rules) for name in unmatched}
    if not _is_sound(missing, renamed, tensors):
        return tensors
    return {renamed.get(name, name): entry for name, entry in tensors.items()}


def _rules(missing: list[Readable], unmatched: list[str], tensors: Mapping[str, Readable]) -> dict[str, str]:
    """Derive prefix replacements from the longest common name suffixes; empty if they disagree."""
    rules: dict[str, str] = {}
    for name, claims in _claims(missing, unmatched, tensors).items():
        for wanted, end in claims:
            prefix = wanted[: -len(end)]
            if rules.setdefault(name[: -len(end)], prefix) != prefix:
                return {}
    return rules if len(rules) <= MAX_RULES else {}


def _claims(
    missing: list[Readable], unmatched: list[str], tensors: Mapping[str, Readable]
) -> dict[str, list[tuple[str, str]]]:
    """Find for each own name the missing names with the longest common suffix, and that suffix."""
    by_end: dict[str, list[str]] = {}
    for name in unmatched:
        for end in _ends(name):
            by_end.setdefault(end, []).append(name)
    claims: dict[str, list[tuple[str, str]]] = {}
    for entry in missing:
        end = next((end for end in _ends(entry.name) if len(by_end.get(end, ())) == 1), "")
        name = by_end[end][0] if end else ""
        prefixes = name[: -len(end)] + entry.name[: -len(end)] if end else ""
        if not end or _DIGIT.search(prefixes) or tensors[name].shape[1:] != entry.shape[1:]:
            continue
        claimed = claims.setdefault(name, [])
        if claimed and len(end) > len(claimed[0][1]):
            claimed.clear()
        if not claimed or len(end) == len(claimed[0][1]):
            claimed.append((entry.name, end))
    return claims


def _ends(name: str) -> list[str]:
    """Yield the suffixes of a name at dots that have at least two parts."""
    cuts = [0, *(index + 1 for index, character in enumerate(name) if character == ".")]
    return [name[cut:] for cut in (cuts[:-1] if len(cuts) > 1 else cuts)]


def _renamed(name: str, prefixes: list[str], rules: Mapping[str, str]) -> str:
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if prefix is None else rules[prefix] + name[len(prefix) :]


def _is_sound(missing: list[Readable], renamed: Mapping[str, str], tensors: Mapping[str, Readable]) -> bool:
    """Whether renamed names stay distinct, and fill missing names with matching shapes."""
    after = {new: name for name, new in renamed.items()}
    unrenamed = tensors.keys() - renamed.keys()
    if len(after) < len(renamed) or unrenamed & after.keys():
        return False
    matched = [(entry, tensors[after[entry.name]]) for entry in missing if entry.name in after]
    return bool(matched) and all(entry.shape[1:] == other.shape[1:] for entry, other in matched)
