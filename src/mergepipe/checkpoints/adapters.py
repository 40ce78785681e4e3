"""Apply adapters to a base: their tensors under the base's names, and their deltas added to its weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType

import numpy as np

from mergepipe.checkpoints.adapted_tensors import (
    Adapted,
    AnyDelta,
    Composed,
    Factor,
    KroneckerDelta,
    LowRankDelta,
    SavedTensor,
    StackedDelta,
)
from mergepipe.checkpoints.adapter_forms import read_adapter
from mergepipe.checkpoints.architecture_names import is_made_by_loading
from mergepipe.checkpoints.architectures import Architecture, architecture_of, other_spelling
from mergepipe.checkpoints.config_files import TIED_KEY
from mergepipe.checkpoints.contract import (
    AdapterAccount,
    Checkpoint,
    CheckpointFile,
    CheckpointKind,
    LeveledTensor,
    Readable,
    TensorEntry,
)
from mergepipe.checkpoints.diffusion_names import WHOLE, Target, lora_names
from mergepipe.checkpoints.embedding_rows import embedding_ending, is_head, is_task_head
from mergepipe.checkpoints.gathered_rows import GatheredRows, resized, with_rows
from mergepipe.checkpoints.open_files import decoded
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.checkpoints.sparse_patches import opened_patch, read_patch
from mergepipe.checkpoints.stacked_experts import Piece, fused_name, inputs_first, pieces_of
from mergepipe.checkpoints.stored_adapters import (
    BASE_LAYER,
    DIFFUSERS,
    KOHYA,
    MERGE_HINT,
    AdaptedModule,
    StoredAdapter,
    damaged_adapter,
    unsupported_adapter,
)
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, TokenizerFiles
from mergepipe.core.strict_json import JsonValue, shown
from mergepipe.errors import MergePipeError, MismatchError, did_you_mean
from mergepipe.storage.contract import BESIDE, Store
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES

# --- map an adapter's tensor names to the base's, where the two were saved under different prefixes ---


_WEIGHT = ".weight"
_FEWEST_PARTS = 2  # what is left of a name after its prefix is gone must still say something
_MOST_CANDIDATES = 500
_RENAME_HINT = "--rename OLD=NEW reads parts of its names as the base has them"


def _mismatch(where: object, message: str, hint: str = "") -> MergePipeError:
    return MismatchError.of("adapter.mismatch", where, message, hint)


def base_names(
    wanted: Sequence[str],
    base: Collection[str],
    where: object,
    optional: Collection[str] = (),
    is_made_by_loading: Callable[[str], bool] = lambda _: False,
) -> dict[str, str]:
    """Map each wanted name to the base's: the same name, or by the prefix change common to all others of its part.

    Names of `optional` that have no counterpart are left out. `is_made_by_loading` tells why
    others have none.
    """
    renamed = {name: name for name in wanted if name in base}
    changed_names = [name for name in wanted if name not in base]
    needed = [name for name in changed_names if name not in optional] or changed_names
    changes, taken = _prefix_changes(needed, base, where), {*renamed}
    for name in changed_names:
        others = [added + name.removeprefix(removed) for removed, added in changes if name.startswith(removed)]
        fitting = [other for other in others if other in base and other not in taken]
        if fitting:
            renamed[name] = fitting[0]
            taken.add(fitting[0])
        elif name not in optional and is_task_head(name):
            module = name.rpartition(".")[0]
            message = f"{shown(name)} is the head of another task, and the base has none"
            hint = (
                "apply it to the base saved by the class that was trained, e.g. AutoModelForSequenceClassification; "
                f"to leave the head out: --allow-unapplied '{module}'"
            )
            raise _mismatch(where, message, hint)
        elif name not in optional:
            message = f"{shown(name)} has no counterpart in the base"
            if is_made_by_loading(name):
                hint = (
                    "loading makes it of other tensors of the files: apply the adapter to the base as it is loaded, "
                    "which save_pretrained(..., save_original_format=False) writes"
                )
                raise _mismatch(where, message, hint)
            candidates = [base_name for base_name in base if base_name.rpartition(".")[2] == name.rpartition(".")[2]]
            similar = did_you_mean(name, candidates[:_MOST_CANDIDATES])
            raise _mismatch(where, message, f"{similar} {_RENAME_HINT}".strip())
    return renamed


def _prefix_changes(names: Sequence[str], base: Collection[str], where: object) -> list[tuple[str, str]]:
    """Return the change of all names or, where there is none, those of the parts (text, vision) that they name."""
    change = _prefix_change(names, base, where) if names else None
    words = [name.split(".") for name in names]
    shared = [column[0] for column in takewhile(lambda column: len({*column}) == 1, zip(*words, strict=False))]
    parts: dict[str, list[str]] = defaultdict(list)
    for name, own in zip(names, words, strict=True):
        parts["".join(own[len(shared) : len(shared) + 1])].append(name)
    if change or len(parts) < 2 or any(word.isdigit() for word in (*shared, *parts)):
        return [change] if change else []
    return [change for part in parts.values() for change in _prefix_changes(part, base, where)]


def _prefix_change(names: Sequence[str], base: Collection[str], where: object) -> tuple[str, str] | None:
    """Return the shortest prefix of all names with what the base has in its place.

    No prefix holds a number: another layer is not the same tensor saved differently. Of several changes those are taken
    that keep most words: `model.language_model.` is no `vision_tower.encoder.`.
    """
    longest = max(names, key=lambda name: name.count("."))
    parts = longest.split(".")
    for cut in range(len(parts) - _FEWEST_PARTS + 1):
        if any(part.isdigit() for part in parts[:cut]):
            break
        rest = ".".join(parts[cut:])
        removed = longest.removesuffix(rest)
        prefixes = (name.removesuffix(rest) for name in base if name == rest or name.endswith(f".{rest}"))
        fitting = [
            added
            for added in prefixes
            if not any(part.isdigit() for part in added.split("."))
            and all(name.startswith(removed) and added + name.removeprefix(removed) in base for name in names)
        ]
        n_shared = [len({*parts[:cut]} & {*added.split(".")}) for added in fitting]
        alike = [added for added, count in zip(fitting, n_shared, strict=True) if count == max(n_shared)]
        if len(alike) > 1:
            both = " or ".join(shown(added + rest) for added in alike[:2])
            raise _mismatch(where, f"{shown(longest)} could be the base's {both}")
        if alike:
            return removed, alike[0]
    return None


# --- open an adapter as a checkpoint of deltas against a base ---


def open_adapter(
    store: Store,
    path: Location,
    base: Checkpoint,
    allow_unapplied: Sequence[str] = (),
    names: Mapping[str, str] = MappingProxyType({}),
) -> Checkpoint:
    """Open the adapter at `path`, a folder or one file; its tensors are named like the `base` tensors they change.

    Deltas are computed when they are fetched. Weights that the adapter stores in full (`modules_to_save`, biases) are
    stored tensors. What it does not touch is absent. What the base lacks is an error, unless a pattern of
    `allow_unapplied` has it. Parts of the adapter's names are changed by `names`. No tensor byte is read.
    """
    patch = read_patch(store, path)
    if patch is not None:
        return opened_patch(patch, base, base_names(patch.names, base.tensors, path))
    adapter = read_adapter(store, path, TokenizerFiles(base, store).document(CONFIG_NAME)).renamed(names)
    return matched_adapter(store, adapter, base, allow_unapplied)


def _matched_by_spelling(adapter: StoredAdapter, base: Checkpoint, allow_unapplied: Sequence[str]) -> Checkpoint:
    """Match the modules of one file, whose names are those of diffusers, of the original model, or flattened."""
    targets = _targets_by_spelling(base)
    placed: dict[str, list[tuple[tuple[int, int], LowRankDelta]]] = defaultdict(list)
    left_over = []
    for module, parts in adapter.modules.items():
        fitting = sorted(targets.get(module, ()), key=lambda target: (target.module, target.of_lora.index))
        if not fitting and any(fnmatchcase(module, glob) for glob in allow_unapplied):
            left_over.append(f"{module}{_WEIGHT}")
            continue
        _check_targets(adapter.path, module, fitting, targets)
        for target in fitting:
            name = f"{target.module}{_WEIGHT}"
            rows = None if target.of_lora == WHOLE else target.of_lora.rows(parts.shape)
            delta = LowRankDelta(name, parts.up, parts.down, adapter.config.scale_of(module), rows=rows)
            placed[name].append((_own_rows(adapter.path, module, target, base.tensors[name].shape, delta), delta))
    tensors = {
        name: _of_rows(adapter.path, base.tensors[name], placed[name]) for name in base.tensors if name in placed
    }
    n_modules = len(adapter.modules)
    account = AdapterAccount(n_modules, n_modules - len(left_over), 0, tuple(left_over), adapter.config.base)
    return Checkpoint(
        adapter.path, adapter.path, MappingProxyType(tensors), adapter.files, (), CheckpointKind.ADAPTER,
        adapters=(account,),
    )  # fmt: skip


def _targets_by_spelling(base: Checkpoint) -> dict[str, set[Target]]:
    """Return the modules of a base by all names that files may give them."""
    targets: dict[str, set[Target]] = defaultdict(set)
    for name, tensor in base.tensors.items():
        if name.endswith(_WEIGHT) and len(tensor.shape) > 1:
            for spelling, target in lora_names(name.removesuffix(_WEIGHT)):
                targets[spelling].add(target)
    return targets


def _check_targets(path: Location, module: str, fitting: Sequence[Target], spellings: Collection[str]) -> None:
    """Refuse a module that has no counterpart in the base, or more than one."""
    if not fitting:
        candidates = [name for name in spellings if name[:5] == module[:5]]
        similar = did_you_mean(module, candidates[:_MOST_CANDIDATES])
        raise _mismatch(path, f"{shown(module)} has no counterpart in the base", similar)
    whole = [target.module for target in fitting if target.of_lora == WHOLE]
    if len(whole) > 1:
        raise _mismatch(path, f"{shown(module)} could be the base's {shown(whole[0])} or {shown(whole[1])}")


def _own_rows(
    path: Location, module: str, target: Target, shape: tuple[int, ...], delta: LowRankDelta
) -> tuple[int, int]:
    """Return the rows of a weight of `shape` that a delta changes; refuse one that does not fit."""
    matrix = shape[0], math.prod(shape[1:])
    rows = target.own.rows(matrix)
    if delta.shape != (rows[1] - rows[0], matrix[1]):
        needed = [rows[1] - rows[0], *shape[1:]]
        message = f"the factors of {shown(module)} make {list(delta.shape)}, the base has {needed}"
        raise _mismatch(path, message)
    return rows


def _of_rows(path: Location, weights: Readable, deltas: Sequence[tuple[tuple[int, int], LowRankDelta]]) -> AnyDelta:
    """Return the change of a weight by deltas of some of its rows each."""
    n_rows = weights.shape[0]
    first_rows, first = deltas[0]
    if len(deltas) == 1 and first_rows == (0, n_rows):
        return first if len(weights.shape) == 2 else StackedDelta(weights.name, weights.shape, (first,))
    height = math.gcd(n_rows, *(row for rows, _ in deltas for row in rows))
    parts: list[LowRankDelta | None] = [None] * (n_rows // height)
    for (start, stop), delta in deltas:
        first_row = 0 if delta.rows is None else delta.rows[0]
        for place in range(start // height, stop // height):
            if parts[place] is not None:
                raise _mismatch(path, f"two of its modules change the same rows of {shown(weights.name)}")
            at = first_row + place * height - start
            parts[place] = replace(delta, rows=(at, at + height))
    return StackedDelta(weights.name, weights.shape, tuple(parts))


def matched_adapter(
    store: Store, adapter: StoredAdapter, base: Checkpoint, allow_unapplied: Sequence[str] = ()
) -> Checkpoint:
    """Match what an adapter stores with the tensors of `base`; see `open_adapter`."""
    if adapter.config.kind in (KOHYA, DIFFUSERS):
        return _matched_by_spelling(adapter, base, allow_unapplied)
    path = adapter.path
    has_head = any(map(is_head, base.tensors))
    if adapter.config.keeps_tied and not has_head:  # its head says the same as its embedding
        modules = {module: parts for module, parts in adapter.modules.items() if not is_head(f"{module}.weight")}
        full = {name: entry for name, entry in adapter.full.items() if not is_head(name)}
        adapter = replace(adapter, modules=modules, full=full)
    rows_by_head = {is_head(f"{module}.weight"): rows.shape for module, rows in adapter.tokens.items()}
    if not has_head and rows_by_head.get(True) == rows_by_head.get(False):  # PEFT trains those of tied tables as one
        tokens = {module: rows for module, rows in adapter.tokens.items() if not is_head(f"{module}.weight")}
        adapter = replace(adapter, tokens=tokens)
    opener = _Opener(adapter, base, allow_unapplied, TokenizerFiles(base, store))
    tensors = opener.tensors()
    lost = {name.rpartition(".")[0] for name in opener.left_over}
    adapted = {*adapter.modules, *adapter.tokens, *adapter.gains}
    n_saved = len([module for module in adapter.saved_modules if module not in adapted | lost])
    account = AdapterAccount(len(adapted), len(adapted - lost), n_saved, tuple(opener.left_over), adapter.config.base)
    return Checkpoint(
        path, path, MappingProxyType(tensors), adapter.files, (), CheckpointKind.ADAPTER, adapters=(account,)
    )


_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class TiedHead:
    """An output head that a model does not store because it is its embedding.

    `copies` are the weights that the model stores in addition once the two differ, each with the one that it equals.
    """

    embedding: str
    head: str
    copies: Mapping[str, str]


def tied_head(store: Store, weights: Checkpoint, changed: Collection[str] = ()) -> TiedHead | None:
    """Return the tied head of a model that could be a tensor of its own; None where there is none, or more is tied.

    A class that is not known tells no name of its head: that among the `changed` tensors of an adapter is it, which has
    the names of the model's modules. It is empty where there is none.
    """
    config = TokenizerFiles(weights, store).document(CONFIG_NAME)
    if config.get(TIED_KEY, True) is False:
        return None
    architecture = architecture_of(config)
    if architecture is None:
        return _unknown_tied_head(config, weights.tensors, changed)
    if architecture.head is None or architecture.embedding is None:
        return None
    return _known_tied_head(architecture, architecture.head, architecture.embedding, weights.tensors)


def _known_tied_head(
    architecture: Architecture, own_head: str, own_embedding: str, tensors: Collection[str]
) -> TiedHead | None:
    """Return the tied head of a class whose names are known.

    Encoder and decoder tie more by the same option, which would be lost; T5 alone does not.
    """
    embedding = architecture.stored_name(own_embedding, tensors)
    untied = architecture.untied or {own_head: own_embedding}
    of_head = own_head.rpartition(".")[0]
    is_alone = all(name.rpartition(".")[0] == of_head for name in untied)
    sources = {name: architecture.stored_name(source, tensors) for name, source in untied.items()}
    is_renamed = embedding is not None and embedding != own_embedding
    copies = {
        architecture.name_in_files(name) if is_renamed else name: source
        for name, source in sources.items()
        if source is not None
    }
    if embedding is None or not is_alone or len(copies) != len(untied) or any(name in tensors for name in copies):
        return None
    head = architecture.name_in_files(own_head) if is_renamed else own_head
    return TiedHead(embedding, head, copies)


def _unknown_tied_head(
    config: Mapping[str, JsonValue], tensors: Collection[str], changed: Collection[str]
) -> TiedHead | None:
    """Return the tied head of a class that is not known, by the name that is among `changed`."""
    ends = [name for name in tensors if embedding_ending(name)]
    if len(ends) != 1 or is_head(ends[0]):
        return None
    names = config.get("architectures")
    has_head = isinstance(names, list) and any(str(name).endswith(_WITH_HEAD) for name in names)
    is_alone = not config.get("is_encoder_decoder") or ends == ["shared.weight"]
    if not has_head or not is_alone:
        return None
    head = next(filter(is_head, changed), "")
    return TiedHead(ends[0], head, {head: ends[0]})


def is_same_weight(name: str, other: str) -> bool:
    """Whether two names differ only by what precedes one of them, as where only one was saved with its head."""
    return f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}")


def with_own_head(store: Store, weights: Checkpoint, adapter: Location, names: Mapping[str, str]) -> Checkpoint:
    """Give `weights` an output head of its own, equal to the embedding, where `adapter` changes only one of the two.

    In training one of them stayed as it was, though the model stores one tensor for both. Trained tokens change both.
    """
    if read_patch(store, adapter) is not None:
        return weights
    stored = read_adapter(store, adapter, TokenizerFiles(weights, store).document(CONFIG_NAME)).renamed(names)
    changed = [*(f"{module}.weight" for module in stored.modules), *stored.full]
    tied = tied_head(store, weights, changed)
    if tied is None or stored.config.keeps_tied:
        return weights
    heads = [name for name in changed if tied.head and is_same_weight(name, tied.head)]
    embeddings = [name for name in changed if is_same_weight(name, tied.embedding)]
    if not heads and not embeddings:
        return weights
    if heads and stored.tokens:
        message = "it trains tokens, and changes the head that the base ties to their embedding"
        raise unsupported_adapter(adapter, message, MERGE_HINT)
    embedding = weights.tensors[tied.embedding]
    tables = {**stored.full, **stored.copies}
    resized_tables = [
        tables[name] for name in embeddings if name in tables and tables[name].shape[0] != embedding.shape[0]
    ]
    is_resized = bool(resized_tables)
    copies = {name: weights.tensors[source] for name, source in tied.copies.items()}
    kept = stored.copies.get(embeddings[0]) if embeddings else None
    if isinstance(kept, TensorEntry) and is_resized:  # what the head stayed in training
        copies = {name: kept for name, source in tied.copies.items() if source == tied.embedding}
        is_resized = False
    if not all(isinstance(tensor, TensorEntry) for tensor in copies.values()) or (is_resized and not heads):
        return weights
    if not tied.head:
        message = f"it changes {shown(embeddings[0])}, and the base has no other tensor for its output head"
        hint = (
            "the head stayed as it was in training, and its name is not known for this architecture: save the base "
            "with a head of its own and tie_word_embeddings false, and apply the adapter to that"
        )
        raise unsupported_adapter(adapter, message, hint)
    own = {name: replace(tensor, name=name) for name, tensor in copies.items() if isinstance(tensor, TensorEntry)}
    return replace(weights, tensors=MappingProxyType({**weights.tensors, **own}), is_untied=True)


def apply_adapter(weights: Checkpoint, adapter: Checkpoint) -> Checkpoint:
    """Apply `adapter`, opened against `weights`: a checkpoint of full tensors, unchanged ones as stored."""
    tensors = {
        name: _applied(weights.path, tensor, adapter.tensors.get(name)) for name, tensor in weights.tensors.items()
    }
    outside = []
    for file in adapter.files:
        identity = replace(file.id, name=f"{BESIDE}{file.id.name}")
        outside.append(CheckpointFile(file.location, identity))
    resized = [name for name, tensor in tensors.items() if tensor.shape != weights.tensors[name].shape]
    rows = {name: tensors[name].shape[0] for name in tensors if embedding_ending(name)} if resized else {}
    if len({*rows.values()}) > 1:
        told = ", ".join(f"{shown(name)} has {n_rows}" for name, n_rows in rows.items())
        message = f"it stores {shown(resized[0])} with another number of rows than the base: {told}"
        hint = "save embedding and head with the adapter, or resize the base as it was for training, and save it"
        raise _mismatch(adapter.path, message, hint)
    return replace(
        weights, tensors=MappingProxyType(tensors), files=(*weights.files, *outside), content_id=None,
        adapters=(*weights.adapters, *adapter.adapters), resized_by=adapter.path if resized else weights.resized_by,
    )  # fmt: skip


def _applied(path: Location, weights: Readable, change: Readable | None) -> Readable:
    if isinstance(change, SavedTensor):
        return replace(change, model_dtype=weights.stored_dtype)
    if change is None or (not change.is_delta and change.stored_dtype == weights.stored_dtype):
        return weights if change is None else change
    if not isinstance(change, AnyDelta):  # stored in full in another dtype than the model
        return replace(with_rows(change, change, ()), model_dtype=weights.stored_dtype)
    if not _takes_deltas(weights):
        message = f"{shown(weights.name)} is packed, so an adapter cannot be applied to it"
        raise unsupported_adapter(path, message, "unpack it, and apply the adapter to the result")
    return Adapted(weights, change)


_READ_BYTES = 1 << 20


def count_scaled_by_0(checkpoint: Checkpoint) -> int:
    """Count the tensors for whose changes adapters are configured with an alpha of 0; DoRA changes the norms still."""
    scales = []
    for tensor in checkpoint.tensors.values():
        delta: Readable = tensor
        if isinstance(tensor, Adapted) and tensor.magnitude is None:
            delta = tensor.delta
        if isinstance(delta, StackedDelta):
            delta = next((part for part in delta.parts if part is not None), delta)
        if isinstance(delta, LowRankDelta | KroneckerDelta):
            scales.append(delta.scale)
    return scales.count(0.0)


def is_untrained(store: Store, checkpoint: Checkpoint) -> bool:
    """Whether one of the factors of every change that adapters make is all zeros, as PEFT begins training with.

    Reads a page of factors where they are not, else whole factors; nothing where adapters store weights in full.
    """
    tensors = checkpoint.tensors.values()
    changes = [tensor for tensor in tensors if isinstance(tensor, Adapted | AnyDelta)]
    if not changes or any(isinstance(tensor, SavedTensor | GatheredRows) for tensor in tensors):
        return False
    return all(changes_nothing(store, tensor) for tensor in changes)


def changes_nothing(store: Store, change: Readable) -> bool:
    """Whether a change that an adapter makes is zero because a factor is."""
    if isinstance(change, Adapted):
        is_alone = not isinstance(change.weights, Adapted) or changes_nothing(store, change.weights)
        return is_alone and change.magnitude is None and changes_nothing(store, change.delta)
    if isinstance(change, KroneckerDelta):
        return _is_zero(store, change.first) or _is_zero(store, change.second)
    if isinstance(change, LowRankDelta):
        return _is_zero(store, change.up) or (change.down is not None and _is_zero(store, change.down))
    if isinstance(change, StackedDelta):
        parts = dict.fromkeys((part.up, part.down) for part in change.parts if part is not None)
        return all(_is_zero(store, up) or (down is not None and _is_zero(store, down)) for up, down in parts)
    return False


def _is_zero(store: Store, factor: Factor) -> bool:
    """Whether all values of a factor, or of one that it is a product of, are zeros."""
    if isinstance(factor, Composed):
        return any(_is_zero(store, part) for part in factor.parts)
    for entry in factor.stored:
        place = 0
        step = PAGE_BYTES
        while place < entry.nbytes:
            content = store.read_metadata(entry.file, entry.offset + place, min(step, entry.nbytes - place))
            if decoded(np.frombuffer(content, np.uint8), entry.dtype.kernel_code).any():
                return False
            place += len(content)
            step = _READ_BYTES
    return True


def _takes_deltas(weights: Readable) -> bool:
    """Whether a delta can be added to a tensor: it has weights, which no other bytes are needed for."""
    return not weights.is_delta and not isinstance(weights, LeveledTensor)


class _Opener:
    """Turns the stored tensors of one adapter into tensors of its base; `left_over` is what the base lacks."""

    def __init__(
        self, adapter: StoredAdapter, base: Checkpoint, allow_unapplied: Sequence[str], files: TokenizerFiles
    ) -> None:
        self._adapter = adapter
        self._files = files
        self._path = adapter.path
        self._config = adapter.config
        self._base = base
        self._allow = allow_unapplied
        self._experts = _BaseExperts(base)
        self._configured: dict[str, str] = {}  # by module: the name that patterns of ranks and alphas match
        self._resized_tables: dict[str, StoredTensor] = {}  # stored next to factors, by the base's name
        self.left_over: list[str] = []

    def tensors(self) -> dict[str, Readable]:
        """Return the tensors by the base's names, in storage order."""
        adapter = self._adapter
        plain, expert_targets = self._targets()
        wanted = [*plain, *(f"{module}.bias" for module, parts in adapter.modules.items() if parts.bias)]
        others = [f"{module}.weight" for module in (*adapter.tokens, *adapter.gains)]
        wanted += [*adapter.full, *others]
        biases = [f"{module}.bias" for module in adapter.gains]  # which no module needs to have
        self._check_layers()
        self._check_heads([*plain, *others])
        optional = [*biases, *(name for name in wanted if self._is_allowed(name))]
        wanted = list(dict.fromkeys([*wanted, *biases]))
        in_files = {name: self._name_in_files(name) for name in wanted}
        optional_in_files = [in_files[name] for name in optional]
        of_base = base_names(
            [*dict.fromkeys(in_files.values())], self._base.tensors, self._path, optional_in_files,
            lambda name: is_made_by_loading(self._files.document(CONFIG_NAME), name),
        )  # fmt: skip
        names = {name: of_base[other] for name, other in in_files.items() if other in of_base}
        self.left_over += [name for name in wanted if name not in names and name not in biases]
        for name, entry in adapter.full.items():
            needed = self._base.tensors[names[name]].shape if name in names else entry.shape
            is_resized = embedding_ending(name) and entry.shape[1:] == needed[1:]
            if entry.shape != needed and not is_resized:
                message = f"it stores {shown(name)} of shape {list(entry.shape)}, the base has {list(needed)}"
                raise _mismatch(self._path, message, "is it an adapter of this base?")
        tensors: dict[str, Readable] = {
            names[name]: replace(entry, name=names[name]) for name, entry in adapter.full.items() if name in names
        }
        fitting = {names[name]: adapter.modules[module] for name, module in plain.items() if name in names}
        for name, module in plain.items():
            copy = adapter.copies.get(f"{module}.weight")
            if name in names and copy is not None and embedding_ending(name):
                self._add_table(names[name], copy)
        is_stack = {name: len(self._base.tensors[name].shape) == 3 for name in fitting}
        is_transposed = self._orientation({name: parts for name, parts in fitting.items() if not is_stack[name]})
        is_transposed |= self._orientation({name: parts for name, parts in fitting.items() if is_stack[name]})
        for name, module in plain.items():
            if name in names:
                self._add_module(tensors, names[name], module, transposed=is_transposed[names[name]])
                bias = adapter.modules[module].bias
                if bias is not None and f"{module}.bias" in names:
                    self._add_bias(tensors, names[f"{module}.bias"], module, bias)
        self._add_experts(tensors, expert_targets)
        for module, rows in adapter.tokens.items():
            if f"{module}.weight" in names:
                self._add_tokens(tensors, names[f"{module}.weight"], module, rows)
        for module, gains in adapter.gains.items():
            if f"{module}.weight" in names:
                self._add_gains(tensors, names[f"{module}.weight"], names.get(f"{module}.bias"), gains)
        return {
            name: SavedTensor(name, tensor) if isinstance(tensor, StoredTensor) else tensor
            for name, tensor in tensors.items()
        }

    def _add_table(self, name: str, table: StoredTensor) -> None:
        """Note the embedding or head that PEFT stores next to what changes it; its number of rows may be another."""
        needed = self._base.tensors[name].shape
        if table.shape[1:] != needed[1:]:
            message = f"it stores {shown(table.name)} of shape {list(table.shape)}, the base has {list(needed)}"
            raise _mismatch(self._path, message, "is it an adapter of this base?")
        self._resized_tables[name] = table

    @cached_property
    def _architecture(self) -> Architecture | None:
        """What is known of the base's class, which is asked only for names that the base lacks."""
        return architecture_of(self._files.document(CONFIG_NAME))

    def _name_in_files(self, name: str) -> str:
        """Return what the base's files call a weight that transformers renames when it loads them."""
        if name in self._base.tensors:
            return name
        spelling = other_spelling(name)
        if spelling is not None and self._has_end(spelling):
            return spelling
        if self._architecture is None:
            return name
        return self._architecture.stored_name(name, self._base.tensors) or name

    def _has_end(self, name: str) -> bool:
        """Whether the base has a weight of a name, whatever precedes one of the two."""
        return name in self._base.tensors or any(is_same_weight(name, other) for other in self._base.tensors)

    def _is_allowed(self, name: str) -> bool:
        module = name.rpartition(".")[0]
        return any(fnmatchcase(candidate, glob) for glob in self._allow for candidate in (name, module))

    # --- pair modules with tensors of the base ---

    def _targets(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the modules of each target: weights by name, and matrices of experts that the base lays out otherwise.

        Adapters of a parameter that is no module's weight are named by its module; shapes tell which one is meant.
        """
        plain: dict[str, str] = {}
        experts: dict[str, str] = {}
        for module, parts in self._adapter.modules.items():
            name = f"{module}.weight"
            parameters = self._config.parameters_of(module)
            if parameters and name.replace(BASE_LAYER, "") not in self._base.tensors:
                name = self._parameter(parameters, parts) or self._config.nested_parameters(module)[0]
            self._configured[module] = name if name in parameters else module
            is_elsewhere = self._name_in_files(name) not in self._base.tensors and self._experts.has(name)
            (experts if is_elsewhere else plain)[name] = module
        return plain, experts

    def _parameter(self, names: Sequence[str], parts: AdaptedModule) -> str:
        """Return which of the parameters of a module its factors change; an empty name where no base tells."""
        stem = names[0].rpartition(".")[0]
        stored = [(f".{name}", tensor.shape) for name, tensor in self._base.tensors.items()]
        shapes = {name: shape for name in names for end, shape in stored if end.endswith(f".{name}")}
        renamed = {name: self._base.tensors.get(self._name_in_files(name)) for name in names}
        shapes |= {name: tensor.shape for name, tensor in renamed.items() if tensor is not None}
        shapes |= {name: shape for name in names if (shape := self._experts.fused_shape(name))}
        fitting = [name for name, shape in shapes.items() if self._fits(shape, parts, self._config.rank_of(name))]
        if len(fitting) > 1:
            message = f"the factors of {shown(stem)} fit {' and '.join(map(shown, fitting))}"
            raise unsupported_adapter(self._path, message, MERGE_HINT)
        if not fitting and shapes:
            made = list(parts.shape)
            needed = " or ".join(f"{list(shape)} ({name})" for name, shape in shapes.items())
            message = f"the factors of {shown(stem)} make {made} for each expert, the base has {needed}"
            raise _mismatch(self._path, message)
        return fitting[0] if fitting else ""

    @staticmethod
    def _fits(shape: tuple[int, ...], parts: AdaptedModule, rank: int) -> bool:
        n_experts = shape[0] if len(shape) == 3 else 1
        return parts.down.shape[0] == rank * n_experts and shape[-2:] in (parts.shape, parts.shape[::-1])

    def _check_layers(self) -> None:
        """Refuse a base that does not have the repeated layers that the adapter was trained on."""
        ranges = self._config.layers
        last = sum(stop - start for start, stop in ranges) - 1
        if ranges and not any(f".{last}." in name for name in self._base.tensors):
            slices = ", ".join(f"[{start}, {stop}]" for start, stop in ranges)
            message = f"it was trained on repeated layers (layer_replication), and the base has no layer {last}"
            hint = f"merge the base with slices of layer_range {slices} by passthrough, then apply the adapter to it"
            raise _mismatch(self._path, message, hint)

    def _check_heads(self, changed: Sequence[str]) -> None:
        """Refuse an output head where the base has none because its weights are tied."""
        heads = [name for name in (*changed, *self._adapter.full) if is_head(name)]
        if not heads or any(map(is_head, self._base.tensors)):
            return
        if heads[0] in changed:
            hint = f"{MERGE_HINT}: the change goes into the embedding"
        else:
            hint = f"{MERGE_HINT}, with --allow-dropped '{heads[0]}', which leaves the head out"
        message = f"it changes {shown(heads[0])}, and the base has no output head: its embedding is used for it"
        raise _mismatch(self._path, message, hint)

    def _orientation(self, modules: Mapping[str, AdaptedModule]) -> dict[str, bool]:
        """Decide whether each product is transposed in the base: by its shape, else by the others', else by the option.

        Frameworks store some layers (Conv1D of GPT-2) transposed, and one option for all modules cannot say which.
        PEFT before 0.19 took the first dimension of stacked experts for their inputs, later the last: shapes tell.
        """
        choices = {name: self._choices(name, parts) for name, parts in modules.items()}
        told = {fits[0] for name, fits in choices.items() if len(fits) == 1 and not modules[name].is_embedding}
        usual = next(iter(told)) if len(told) == 1 else self._config.is_transposed
        for name, fits in choices.items():
            if len(fits) == 2 and len(told) == 2:
                message = (
                    f"{shown(name)} is square, and other tensors are stored both ways: its orientation is ambiguous"
                )
                raise unsupported_adapter(self._path, message, MERGE_HINT)
        return {
            name: fits[0] if len(fits) == 1 else usual or (not told and inputs_first(name, self._base.tensors))
            for name, fits in choices.items()
        }

    def _choices(self, name: str, parts: AdaptedModule) -> tuple[bool, ...]:
        """Return the orientations in which a product fits its base tensor; an embedding has only one."""
        shape = parts.shape
        needed = self._shape_of(name)
        allowed = (True,) if parts.is_embedding else (False,) if parts.is_kronecker else (False, True)
        fits = tuple(flipped for flipped in allowed if (shape[::-1] if flipped else shape) == needed[-2:])
        if not fits:
            raise _mismatch(self._path, f"the factors of {shown(name)} make {list(shape)}, the base has {list(needed)}")
        return fits

    def _shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the weight that factors change: the base's, or that of a table resized in training."""
        shape = self._base.tensors[name].shape
        resized = self._resized_tables.get(name)
        return shape if resized is None else resized.shape

    # --- compute what changes ---

    def _check_rank(self, module: str, parts: AdaptedModule, n_experts: int) -> None:
        rank = self._config.rank_of(self._configured[module])
        if not parts.is_kronecker and parts.down.shape[0] != rank * n_experts:
            of_experts = f" for each of {n_experts} experts" if n_experts > 1 else ""
            factors = f"{list(parts.up.shape)} and {list(parts.down.shape)}"
            message = f"{shown(module)} has factors {factors}, the configured rank is {rank}{of_experts}"
            raise damaged_adapter(self._path, message)

    def _check_magnitude(self, module: str, parts: AdaptedModule) -> None:
        if parts.magnitude is None and self._config.is_dora:
            message = f"it is DoRA, and {shown(module)} has no lora_magnitude_vector"
        elif parts.magnitude is not None and parts.magnitude.n_elements != parts.up.shape[0]:
            message = f"{shown(module)} has {parts.magnitude.n_elements} magnitudes for {parts.up.shape[0]} rows"
        else:
            return
        raise damaged_adapter(self._path, message)

    def _add_module(self, tensors: dict[str, Readable], name: str, module: str, *, transposed: bool) -> None:
        parts, shape = self._adapter.modules[module], self._base.tensors[name].shape
        n_experts = shape[0] if len(shape) == 3 else 1
        self._check_rank(module, parts, n_experts)
        self._check_magnitude(module, parts)
        scale = self._config.scale_of(self._configured[module])
        if len(shape) == 3:
            deltas = tuple(
                LowRankDelta(name, parts.up, parts.down, scale, transposed, n_experts, expert)
                for expert in range(n_experts)
            )
            tensors[name] = StackedDelta(name, shape, deltas)
            return
        delta: AnyDelta = (
            KroneckerDelta(name, parts.up, parts.down, scale)
            if parts.is_kronecker
            else LowRankDelta(name, parts.up, parts.down, scale, transposed)
        )
        copy = self._adapter.copies.get(f"{module}.weight")
        stored = tensors.get(name) or (copy and replace(copy, name=name))
        if parts.magnitude is not None and stored is None:
            stored = self._base.tensors[name]
        if stored is None:
            tensors[name] = delta
        elif _takes_deltas(stored):
            tensors[name] = Adapted(stored, delta, parts.magnitude)
        else:
            raise unsupported_adapter(self._path, f"{shown(name)} is packed, so a DoRA cannot be applied to it")

    def _add_bias(self, tensors: dict[str, Readable], name: str, module: str, bias: StoredTensor) -> None:
        up = replace(bias, shape=(*bias.shape, 1))
        delta = LowRankDelta(name, up, None, self._config.scale_of(module))
        stored = tensors.get(name)
        tensors[name] = Adapted(stored, delta) if isinstance(stored, StoredTensor) else delta

    def _add_tokens(self, tensors: dict[str, Readable], name: str, module: str, rows: StoredTensor) -> None:
        """Replace rows of an embedding by those that were trained."""
        config = self._config.tokens
        indices = next((config[end] for end in config if not end or f".{module}".endswith(f".{end}")), ())
        copy = self._adapter.copies.get(f"{module}.weight")
        stored = tensors.get(name) or self._base.tensors[name]
        if copy is not None and name not in tensors:
            self._add_table(name, copy)
            stored = SavedTensor(name, copy)
        if len(indices) != rows.shape[0] or stored.is_delta:
            message = f"{shown(rows.name)} has {rows.shape[0]} rows, for {len(indices)} tokens of {stored.shape[0]}"
            raise damaged_adapter(self._path, message)
        n_rows = max(stored.shape[0], max(indices, default=-1) + 1)
        if n_rows > stored.shape[0]:
            trained_rows = {*indices}
            missing = next((row for row in range(stored.shape[0], n_rows) if row not in trained_rows), None)
            if missing is not None:
                message = f"it trains row {n_rows - 1} of {shown(name)}, the base has {stored.shape[0]} rows"
                hint = f"row {missing} is stored nowhere: resize the base as it was for training, and save it"
                raise _mismatch(self._path, message, hint)
            stored = resized(stored, n_rows)
        tensors[name] = with_rows(stored, SavedTensor(name, rows), indices)

    def _add_gains(self, tensors: dict[str, Readable], weight: str, bias: str | None, gains: StoredTensor) -> None:
        """Multiply the rows of a weight, and its bias, or its columns: (IA)^3 scales outputs, or inputs."""
        is_of_outputs = gains.shape[1] == 1
        axis = 0 if is_of_outputs != self._config.is_transposed else -1
        for name, scaled_axis in ((weight, axis), *([(bias, -1)] if bias and is_of_outputs else [])):
            stored = self._base.tensors[name]
            if stored.shape[scaled_axis] != gains.n_elements or not _takes_deltas(stored):
                message = (
                    f"{shown(gains.name)} scales {gains.n_elements} features, {shown(name)} is {list(stored.shape)}"
                )
                raise _mismatch(self._path, message, "is it an adapter of this base?")
            nothing = StackedDelta(name, stored.shape, (None,))
            tensors[name] = Adapted(stored, nothing, gains, scaled_axis=scaled_axis)

    def _add_experts(self, tensors: dict[str, Readable], targets: Mapping[str, str]) -> None:
        """Add matrices of experts that the base stores in the other layout."""
        stacks: dict[str, list[LowRankDelta | None]] = {}
        needed = {name: self._experts.matrix_shape(name) for name in targets}
        made = {name: self._adapter.modules[module].shape for name, module in targets.items()}
        is_transposed = any(made[name] != needed[name] for name in targets)  # squares as the others
        for name, module in targets.items():
            parts, places = self._adapter.modules[module], self._experts.places(name)
            if needed[name] != (made[name][::-1] if is_transposed else made[name]):
                message = f"the factors of {shown(name)} make {list(made[name])}, the base has {list(needed[name])}"
                raise _mismatch(self._path, message)
            n_experts = len({place.expert for place in places}) if fused_name(name) else 1
            self._check_rank(module, parts, n_experts)
            scale = self._config.scale_of(self._configured[module])
            for place in places:
                delta = LowRankDelta(
                    place.tensor, parts.up, parts.down, scale, is_transposed, n_experts,
                    place.expert if n_experts > 1 else 0, (place.row, place.row + place.shape[0]),
                )  # fmt: skip
                if place.n_chunks == 1:
                    tensors[place.tensor] = delta
                else:
                    stacks.setdefault(place.tensor, [None] * place.n_chunks)[place.chunk] = delta
        for name, deltas in stacks.items():
            tensors[name] = StackedDelta(name, self._base.tensors[name].shape, tuple(deltas))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the base stores one matrix of an expert: chunk `chunk` of `n_chunks` equal ones of a tensor.

    `row` is its first row among those of the matrix that an adapter changes as one.
    """

    tensor: str
    chunk: int
    n_chunks: int
    shape: tuple[int, int]
    expert: int
    row: int = 0


def _ending(layer: str) -> str:
    """Return the name of a layer from the word before its first number on: `layers.3`."""
    words = layer.split(".")
    first = next((place for place, word in enumerate(words) if word.isdigit()), 1)
    return ".".join(words[max(0, first - 1) :])


class _BaseExperts:
    """The matrices of a base's experts, whichever way it stores them."""

    def __init__(self, base: Checkpoint) -> None:
        self._places: dict[Piece, _Place] = {}
        self._of_layer: dict[str, set[int]] = defaultdict(set)
        for name, tensor in base.tensors.items():
            pieces = pieces_of(name, tensor.shape)
            for chunk, piece in enumerate(pieces):
                n_rows = tensor.shape[-2] * (tensor.shape[0] if len(tensor.shape) == 3 else 1) // len(pieces)
                shape = (n_rows, tensor.shape[-1])
                self._places[piece] = _Place(name, chunk, len(pieces), shape, piece.expert)
                if piece.role != "router":
                    self._of_layer[piece.layer].add(piece.expert)

    def has(self, name: str) -> bool:
        """Whether there are all matrices that a name of the other layout stands for."""
        return bool(self.places(name))

    def _stored_name(self, layer: str) -> str:
        """Return the base's name of a layer, where only what precedes its number may differ; the name if none fits."""
        if layer in self._of_layer:
            return layer
        fitting = [other for other in self._of_layer if _ending(other) == _ending(layer)]
        return fitting[0] if len(fitting) == 1 else layer

    def places(self, name: str) -> list[_Place]:
        """List the matrices of a name, expert by expert; none where one is missing."""
        fused = fused_name(name)
        if fused is None:
            pieces = [replace(piece, layer=self._stored_name(piece.layer)) for piece in pieces_of(name, ())]
        else:
            layer = self._stored_name(fused[0])
            experts = sorted(self._of_layer.get(layer, ()))
            pieces = [Piece(layer, expert, role) for expert in experts for role in fused[1]]
        if not all(piece in self._places for piece in pieces):
            return []
        placed, row = [], 0
        for index, piece in enumerate(pieces):
            place = self._places[piece]
            row = row if index and pieces[index - 1].expert == piece.expert else 0
            placed.append(replace(place, row=row))
            row += place.shape[0]
        return placed

    def matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the shape of the matrix of one expert that an adapter changes as one."""
        places = self.places(name)
        return sum(place.shape[0] for place in places if place.expert == places[0].expert), places[0].shape[1]

    def fused_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that the tensor of a name would have, were the experts fused; empty where they lack it."""
        experts = {place.expert for place in self.places(name)}
        return (len(experts), *self.matrix_shape(name)) if experts else ()
