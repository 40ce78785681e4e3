"""Pair tensors of different models: by name, by tied weights, by rows, under other prefixes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from mergepipe.checkpoints.architectures import other_spelling
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable, Source, Unchanged
from mergepipe.checkpoints.embedding_rows import embedding_ending, is_head, is_task_head
from mergepipe.core.blocks import DTypeKind
from mergepipe.core.strict_json import shown
from mergepipe.errors import MismatchError, UnsupportedError, did_you_mean
from mergepipe.recipes.fields import Findings
from mergepipe.recipes.layer_names import part_of, template
from mergepipe.recipes.output_tensors import OpenModel
from mergepipe.recipes.tasks import count_text, group_by_pattern

# --- rename a model's tensors to match another model's, where name prefixes differ ---


MAX_RULES = 4

_DIGIT = re.compile(r"\d")


def renamed_to_match(reference: Checkpoint, checkpoint: Checkpoint) -> dict[str, Readable]:
    """Return the tensors of `checkpoint` under the names that `reference` uses, in storage order.

    A tensor without a partner is looked for by the end of its name. Names are changed only by few whole prefixes, and
    only if every missing tensor has exactly one partner of its shape then; otherwise they all stay as they are.
    """
    tensors = _in_spelling_of(reference.tensors, checkpoint.tensors)
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


def _in_spelling_of(reference: Mapping[str, Readable], tensors: Mapping[str, Readable]) -> dict[str, Readable]:
    """Return tensors under the names that `reference` has for them where releases of a library differ in these."""
    renamed = {}
    for name, tensor in tensors.items():
        other = None if name in reference else other_spelling(name)
        is_renamed = other is not None and other in reference and other not in tensors
        renamed[other if other is not None and is_renamed else name] = tensor
    return renamed


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


# --- pair tensors of different models: by name, by tied weights, by rows ---


_INPUT_EMBEDDING = re.compile(
    r"(^|\.)(embed_tokens|wte|word_embeddings?|tok_embeddings|token_embeddings?|embed_in|shared)\.weight$"
)

WHISPER_HEAD = "proj_out.weight"
_POOLER = "pooler"
_KEPT_PARTS = ("vision", "audio", "projector", _POOLER)
"""Parts of models that others of their kind lack: those of a multimodal one, and the pooler of an encoder."""
_POOLER_NAME = re.compile(r"(^|\.)pooler\.")
_COPY = re.compile(r"(?P<prefix>.*?)(?:encoder|decoder)\.embed_tokens\.weight")
_MAX_CANDIDATES = 500
_NUMBER = re.compile(r"\d+")


def is_pooler(name: str) -> bool:
    """Whether a tensor is of the pooler of an encoder, which models for other tasks lack."""
    return _POOLER_NAME.search(name) is not None


def _kept_part_of(name: str) -> str:
    part = part_of(name)
    return part if part in _KEPT_PARTS or not is_pooler(name) else _POOLER


def shared_embedding(name: str, tensors: Mapping[str, Readable]) -> str | None:
    """Return the shared embedding of which a tensor is a copy: that of T5's or BART's encoder or decoder."""
    match = _COPY.fullmatch(name)
    shared = None if match is None else f"{match['prefix']}shared.weight"
    return shared if shared in tensors else None


class Pairing:
    """Pairs tensors, records which were used, reports those that do not fit."""

    def __init__(self, models: Sequence[OpenModel], findings: Findings) -> None:
        self.used: list[set[str]] = [set() for _ in models]
        self._models = models
        self._findings = findings
        self._candidates: dict[int, dict[tuple[str, ...], list[str]]] = {}
        self._missing: dict[tuple[int, int], list[str]] = defaultdict(list)
        self._short: dict[int, tuple[int, int]] = {}  # models with fewer embedding rows: theirs, the base's
        self._parts: dict[int, set[str]] = {}  # of models that were asked for theirs
        self._kept: set[tuple[int, str, int]] = set()  # models without a part that is the base's then, and that base
        self._related: set[int] = set()  # models that have a tensor of the name that is wanted

    def base(self, model: int, name: str) -> Readable | None:
        """Return the base of an output tensor; None if it cannot be merged."""
        entry = self._models[model].tensors[name]
        self.used[model].add(name)
        if entry.dtype.kind is DTypeKind.OPAQUE:
            self._refuse_dtype(self._models[model].input.text, name, entry, "")
            return None
        return entry

    def keeps(self, experts: Sequence[int], name: str, base_model: int) -> bool:
        """Whether a base tensor is kept: it sees, hears or joins, and all experts are whole models without such parts.

        Their tensors have the base's names by then, or are missed one by one.
        """
        part = _kept_part_of(name)
        if part not in _KEPT_PARTS or not experts or any(part in self._parts_of(expert) for expert in experts):
            return False
        if any(self._models[expert].kind is not CheckpointKind.FULL for expert in experts):
            return False
        self._kept |= {(expert, part, base_model) for expert in experts}
        return True

    def _parts_of(self, model: int) -> set[str]:
        if model not in self._parts:
            self._parts[model] = set(map(_kept_part_of, self._models[model].tensors))
        return self._parts[model]

    def tensors_of(self, model: int) -> Mapping[str, Readable]:
        """Return the tensors of a model, by the base's names."""
        return self._models[model].tensors

    def partner(self, model: int, name: str, base: Readable, base_model: int) -> Source | None:
        """Return the tensor of a model that is merged with `base`; None if a problem was reported."""
        open_model = self._models[model]
        if name in open_model.tensors:
            self._related.add(model)
        name = self._stored_name(open_model, name, base)
        tensor = open_model.tensors.get(name)
        if tensor is None and open_model.kind is not CheckpointKind.FULL:
            return Unchanged(base.name, base.dtype, base.shape)
        if tensor is None:
            self._missing[model, base_model].append(name)
            return None
        self.used[model].add(name)
        base_text = self._models[base_model].input.text
        if tensor.dtype.kind is not DTypeKind.FLOAT:
            instead = f"{base.dtype.name} in the base '{base_text}'"
            self._refuse_dtype(open_model.input.text, name, tensor, instead)
        return self._fitted(model, name, tensor, base, base_text)

    def _stored_name(self, model: OpenModel, name: str, base: Readable) -> str:
        """Return the stored name: the name itself, or that of the embedding that it is a copy of.

        Whisper's head has a name that other models have for other tensors.
        """
        if name in model.tensors or model.kind is not CheckpointKind.FULL:
            return name
        if shared := shared_embedding(name, model.tensors):
            return shared
        if not is_head(name) and name != WHISPER_HEAD:
            return name
        embeddings = [tensor for tensor in model.tensors if _INPUT_EMBEDDING.search(tensor)]
        fitting = [embedding for embedding in embeddings if model.tensors[embedding].shape[1:] == base.shape[1:]]
        return fitting[0] if len(fitting) == 1 else name

    def _fitted(self, index: int, name: str, tensor: Readable, base: Readable, base_text: str) -> Source | None:
        model = self._models[index]
        if tensor.shape != base.shape:
            has_rows = min(len(tensor.shape), len(base.shape)) > 0 and is_vocabulary(name)
            if has_rows and tensor.shape[1:] == base.shape[1:] and tensor.dtype.kind is DTypeKind.FLOAT:
                from mergepipe.checkpoints.gathered_rows import (
                    resized,  # brings the compiled kernels; most merges do without
                )

                if tensor.shape[0] < base.shape[0]:
                    self._short.setdefault(index, (tensor.shape[0], base.shape[0]))
                return resized(tensor, base.shape[0], fallback=None if tensor.is_delta else base)
            shapes = f"shape {list(tensor.shape)} in '{model.input.text}', {list(base.shape)} in the base '{base_text}'"
            self._findings.add(MismatchError, "model.mismatch", name, shapes)
            return None
        return tensor if tensor.dtype.kind is DTypeKind.FLOAT else None

    def note_short_vocabularies(self) -> None:
        """Report models that lack some of the base's embedding rows."""
        for index, (rows, base_rows) in sorted(self._short.items()):
            model = self._models[index].input
            what = f"{rows} of the base's {base_rows} embedding rows"
            message = f"'{model.text}' has {what}: the base's rows are used for the others"
            meaning = "mergekit refuses such models; `tokenizer_source` in the recipe matches rows by token"
            self._findings.add_notice("recipe.unclear", model.where, message, meaning, changes_result=True)

    def note_kept_parts(self) -> None:
        """Report models that lack whole parts of the base, which are kept."""
        for index, part, base in sorted(self._kept):
            model = self._models[index].input
            message = f"'{model.text}' has no {part} tensors: those of '{self._models[base].input.text}' are kept"
            self._findings.add_notice("recipe.unclear", model.where, message)

    def note_missing(self) -> set[int]:
        """Report tensors without a partner; return the models that share no tensor with their base."""
        unrelated: set[int] = set()
        for (model, base), names in self._missing.items():
            text, base_text = self._models[model].input.text, self._models[base].input.text
            if model not in self._related:
                unrelated.add(model)
                message = f"'{text}' has no tensor of the base '{base_text}', e.g. not '{names[0]}'"
                examples = ", ".join(map(shown, list(self._models[model].tensors)[:3])) or "nothing"
                hint = f"it has {examples}: is it another architecture?"
                prefixes = _prefixes_with(self._models[base].tensors, self._models[model].tensors)
                if prefixes:
                    listed = " or ".join(f"`modules: {{{prefix}: {{models: ...}}}}`" for prefix in prefixes)
                    hint = f"the base has such tensors in several places: write {listed}"
                where = self._models[model].input.where
                self._findings.add(MismatchError, "model.mismatch", where, message, hint)
                continue
            for pattern, lacking in group_by_pattern(names, self._models[model].tensors).items():
                message = f"'{text}' lacks {count_text(lacking)} of the base '{base_text}'"
                hint_of = partial(self._hint_for_missing, model, base, lacking[0])
                self._findings.add(MismatchError, "model.mismatch", pattern, message, hint_of)
        return unrelated

    def _refuse_dtype(self, model: str, name: str, entry: Readable, instead_of: str) -> None:
        message = f"{entry.dtype.name} in '{model}' cannot be merged" + (f", it is {instead_of}" if instead_of else "")
        self._findings.add(UnsupportedError, "model.unsupported", name, message, "convert the model first")

    def _hint_for_missing(self, model: int, base: int, name: str) -> str:
        """Say how to merge the other parts, where a model has no tensor of the part that the missing one is of."""
        parts = self._parts_of(model)
        if is_task_head(name):
            other = f"make '{self._models[model].input.text}' the base and leave the head out (--allow-dropped)"
            return f"it is the head of another task: merge models of one task, or {other}"
        if _kept_part_of(name) in parts:
            return self._did_you_mean(model, name)
        shared = " and ".join(f"'{part}'" for part in sorted(parts))
        rest = f"the rest of '{self._models[base].input.text}' is kept"
        return f"it has no {part_of(name)} tensors: list the models under `modules:` for {shared} only, and {rest}"

    def _did_you_mean(self, model: int, name: str) -> str:
        """Suggest a name for a missing tensor, among names with the same layer numbers that the first model lacks."""
        groups = self._candidates.get(model)
        if groups is None:
            groups = defaultdict(list)
            for other in self._models[model].tensors:
                if other not in self._models[0].tensors:
                    groups[tuple(_NUMBER.findall(other))].append(other)
            self._candidates[model] = groups
        same_numbers = groups.get(tuple(_NUMBER.findall(name)), [])
        return did_you_mean(name, same_numbers[:_MAX_CANDIDATES]) if same_numbers else ""


def _prefixes_with(base: Mapping[str, Readable], model: Mapping[str, Readable]) -> list[str]:
    """Find the prefixes under which a base has every floating-point tensor of a model, with the shape of its rows.

    They stand before the model's names, or in place of a first word that all of these have (`model.`).
    """
    wanted = [tensor for tensor in model.values() if tensor.dtype.kind is DTypeKind.FLOAT and not is_head(tensor.name)]
    names = [tensor.name for tensor in wanted]
    has_one_first_word = len({name.partition(".")[0] for name in names}) == 1
    for ends in (names, [name.partition(".")[2] for name in names] if has_one_first_word else []):
        cuts = [name.removesuffix(f".{ends[0]}") for name in base if ends and name.endswith(f".{ends[0]}")]
        pairs = list(zip(ends, wanted, strict=False))
        prefixes = [
            prefix for prefix in cuts
            if all((held := base.get(f"{prefix}.{end}")) and held.shape[1:] == t.shape[1:] for end, t in pairs)
        ]  # fmt: skip
        if prefixes:
            return prefixes
    return []


def is_vocabulary(name: str) -> bool:
    """Whether a tensor has one row per token; models with different vocabulary sizes merge their common rows."""
    return embedding_ending(name) is not None and template(name) == name
