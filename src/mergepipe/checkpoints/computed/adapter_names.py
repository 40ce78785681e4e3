"""Map an adapter's tensor names to the base's, where the two were saved under different prefixes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from mergepipe.core.strict_json import shown
from mergepipe.errors import MismatchError, did_you_mean

_FEWEST_PARTS = 2  # what is left of a name after its prefix is gone must still say something
_MOST_CANDIDATES = 500


@dataclass(frozen=True, slots=True)
class Prefix:
    """Names that start with `removed` start with `added` instead."""

    removed: str
    added: str

    def applied(self, name: str) -> str | None:
        """Return the mapped name, or None where the prefix does not match."""
        return self.added + name[len(self.removed) :] if name.startswith(self.removed) else None


def base_names(wanted: Sequence[str], base: Collection[str], where: object) -> dict[str, str]:
    """Map each wanted name to the base's: the same name, or by one prefix change common to all others.

    Raises:
        MismatchError: there is no such change, or more than one that takes equally little away.
    """
    renamed = {name: name for name in wanted if name in base}
    changed_names = [name for name in wanted if name not in base]
    if not changed_names:
        return renamed
    prefix = _common_prefix(changed_names, base, where)
    for name in changed_names:
        other = prefix.applied(name) if prefix else None
        if other is None:
            candidates = [base_name for base_name in base if base_name.rpartition(".")[2] == name.rpartition(".")[2]]
            raise MismatchError.of(
                "adapter.tensor.unknown", where, f"{shown(name)} has no counterpart in the base",
                did_you_mean(name, candidates[:_MOST_CANDIDATES]),
            )  # fmt: skip
        renamed[name] = other
    return renamed


def _common_prefix(names: Sequence[str], base: Collection[str], where: object) -> Prefix | None:
    longest = max(names, key=lambda name: name.count("."))
    for candidates in _candidates(longest, base):
        fitting = _most_alike([prefix for prefix in candidates if all(prefix.applied(name) in base for name in names)])
        if len(fitting) > 1:
            both = " or ".join(shown(prefix.applied(longest)) for prefix in fitting[:2])
            raise MismatchError.of("adapter.tensor.ambiguous", where, f"{shown(longest)} could be the base's {both}")
        if fitting:
            return fitting[0]
    return None


def _most_alike(prefixes: list[Prefix]) -> list[Prefix]:
    """Return the prefix changes that keep most words: `model.language_model.` is no `vision_tower.encoder.`."""
    n_shared = [len({*prefix.removed.split(".")} & {*prefix.added.split(".")} - {""}) for prefix in prefixes]
    return [prefix for prefix, count in zip(prefixes, n_shared, strict=True) if count == max(n_shared)]


def _candidates(name: str, base: Collection[str]) -> Iterator[list[Prefix]]:
    """List prefix changes from `name` to a name of the base, by length removed.

    No prefix holds a number: another layer is not the same tensor saved differently.
    """
    parts = name.split(".")
    for cut in range(len(parts) - _FEWEST_PARTS + 1):
        rest = ".".join(parts[cut:])
        removed = name[: len(name) - len(rest)]
        if _has_number(removed):
            return
        prefixes = (n[: len(n) - len(rest)] for n in base if n == rest or n.endswith(f".{rest}"))
        yield [Prefix(removed, added) for added in prefixes if not _has_number(added)]


def _has_number(prefix: str) -> bool:
    return any(part.isdigit() for part in prefix.split("."))
