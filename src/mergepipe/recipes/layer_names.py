"""Find a model's layers, modules and towers from its tensor names, for any architecture."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The first number between dots counts layers; later ones count what is inside a layer (experts, sublayers).
_NUMBERED = re.compile(r"(?:(?P<prefix>.*?)\.)??(?P<index>\d+)\.")
# Tensors outside the layers that come before them; all others come after.
_BEFORE = re.compile(
    r"embed(?!_out)|embd|(^|[._])(wte|wpe|wpm|shared|relative_\w+|pos_emb|rotary\w*|project_in|conv[12]|ln_pre)[._]"
)
# Parts of a model of several, by a word in the names of their tensors; the first that fits.
_PARTS = (
    ("projector", re.compile(r"(^|\.)(multi_modal_projector|mm_projector|merger|deepstack_merger_list|connector)\.")),
    ("vision", re.compile(r"(^|\.)(visual|vision\w*|image_\w+)\.")),
    ("audio", re.compile(r"(^|\.)audio\w*\.")),
    ("encoder", re.compile(r"(^|\.)encoder\.")),
    ("decoder", re.compile(r"(^|\.)decoder\.")),
)
_REST = "text"
# Words in the names of a text model that stands among other parts, and the parts that are never text.
_TEXT_PART = re.compile(r"(^|\.)(language_model|text_model|text_decoder)\.")
_TOWERS = frozenset({"projector", "vision", "audio"})
SIDES = ("decoder", "encoder")  # of a model with layers of both
ANY_LAYER = "0."
EVERYTHING = "default"
# mergekit's names of modules, and what they are here.
_MODULES = {
    EVERYTHING: "", "text_decoder": _REST, "text": _REST, "language_model": _REST, "shared": _REST,
    "multi_modal_projector": "projector", "projector": "projector",
    "vision_tower": "vision", "vision_model": "vision", "visual": "vision", "vision": "vision",
    "audio_tower": "audio", "audio": "audio", "encoder": "encoder", "decoder": "decoder",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerList:
    """The numbered layers of a model: tensors `prefix` + number + `.` + the rest, numbers from 0."""

    prefix: str
    n_layers: int

    def split(self, name: str) -> tuple[int, str] | None:
        """Split a tensor's name into layer number and rest; None if it is in no layer."""
        parts = _numbered(name)
        return parts[1:] if parts is not None and parts[0] == self.prefix else None

    def name(self, index: int, rest: str) -> str:
        """Join a layer number and a rest into a tensor's name: the inverse of `split`."""
        return f"{self.prefix}{index}.{rest}"

    def __str__(self) -> str:
        return f"'{self.prefix}0.' to '{self.prefix}{self.n_layers - 1}.'"


def _numbered(name: str) -> tuple[str, int, str] | None:
    match = _NUMBERED.match(name)
    if match is None:
        return None
    return name[: match.start("index")], int(match["index"]), name[match.end() :]


def template(name: str) -> str:
    """Remove the layer number from a name, so that all layers share it. Other names stay."""
    parts = _numbered(name)
    return name if parts is None else f"{parts[0]}*.{parts[2]}"


def layer_of(name: str) -> tuple[str, int]:
    """Return the list of layers that a tensor is in, by its prefix, and the layer; an empty prefix if in none."""
    parts = _numbered(name)
    return ("", 0) if parts is None else parts[:2]


def layer_lists(names: Iterable[str]) -> dict[str, LayerList]:
    """Find every list of layers by prefix: those numbered 0, 1, 2 ... without a gap."""
    numbers: dict[str, set[int]] = defaultdict(set)
    for name in names:
        parts = _numbered(name)
        if parts is not None:
            numbers[parts[0]].add(parts[1])
    return {
        prefix: LayerList(prefix, len(indices))
        for prefix, indices in numbers.items()
        if max(indices) == len(indices) - 1
    }


def longest(lists: Mapping[str, LayerList]) -> tuple[LayerList, ...]:
    """Return the longest lists: one if the layers are unambiguous, none if there are none."""
    most = max((layers.n_layers for layers in lists.values()), default=0)
    return tuple(layers for layers in lists.values() if layers.n_layers == most)


def text_lists(lists: Mapping[str, LayerList]) -> dict[str, LayerList]:
    """Return the lists of a model's text part, where it has other parts; else all of them."""
    named = {prefix: layers for prefix, layers in lists.items() if _TEXT_PART.search(prefix)}
    others = {prefix: layers for prefix, layers in lists.items() if part_of(prefix + ANY_LAYER) not in _TOWERS}
    return named or others or dict(lists)


def depth_of(index: int, n_layers: int) -> float:
    """Return a layer's depth between the first (0) and the last (1); 1 for a single layer, as in mergekit."""
    return index / (n_layers - 1) if n_layers > 1 else 1.0


def is_before_layers(name: str) -> bool:
    """Whether a tensor outside the layers precedes them: embeddings do, norms and heads do not."""
    return _BEFORE.search(name) is not None


def module_names(names: Iterable[str]) -> list[str]:
    """List the names that a recipe may use for the modules of a model with these tensors."""
    parts = {part_of(name) for name in names}
    return [module for module, part in _MODULES.items() if not part or part in parts]


def module_tensors(module: str, names: Iterable[str]) -> list[str]:
    """Find the tensors of a module by mergekit's name for it, or by prefix. Empty if unknown."""
    if module in _MODULES:
        part = _MODULES[module]
        return [name for name in names if not part or part_of(name) == part]
    return [name for name in names if name.startswith((f"{module}.", f"{module}/"))]


def part_of(name: str) -> str:
    """Return the part that a tensor belongs to: the folder of a component, or text, vision, audio, projector, ..."""
    return name.rpartition("/")[0] or next((part for part, pattern in _PARTS if pattern.search(name)), _REST)
