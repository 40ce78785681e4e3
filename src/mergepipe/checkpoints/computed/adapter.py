"""Open a PEFT LoRA adapter as a checkpoint of deltas against a base."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from blake3 import blake3

from mergepipe.checkpoints.computed.adapted import Adapted
from mergepipe.checkpoints.computed.adapter_names import base_names
from mergepipe.checkpoints.computed.embedding_names import is_head
from mergepipe.checkpoints.computed.low_rank import LowRankDelta
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, FileFingerprint, Readable, TensorEntry
from mergepipe.checkpoints.directory import list_names, read_weight_file, stat_present
from mergepipe.checkpoints.formats.adapter_config import MERGE_HINT, AdapterConfig, read_adapter_config
from mergepipe.checkpoints.formats.weight_files import ADAPTER_CONFIG_NAME, ADAPTER_NAMES
from mergepipe.core.blocks import DTypeKind
from mergepipe.core.strict_json import shown
from mergepipe.errors import CorruptError, MismatchError, NotFoundError, UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import ADAPTER_CONFIG_BYTES
from mergepipe.storage.location import Location

PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?(embedding)|\.weight)")
_VARIANT = re.compile(r"lora_magnitude_vector|lora_[AB]\.bias|lora_[A-Za-z]+|token_adapter|prompt_embeddings")
_BASE_LAYER = ".base_layer."


@dataclass(slots=True)
class _Factors:
    """The stored factors of one module: `sides["A"]` is (R, N), `sides["B"]` (M, R)."""

    sides: dict[str, TensorEntry] = field(default_factory=dict)
    is_embedding: bool = False


def open_adapter(store: Store, path: Location, base: Checkpoint) -> Checkpoint:
    """Open the adapter in the directory `path`; its tensors are named like the `base` tensors they change.

    Deltas are computed when they are fetched. Weights that the adapter stores in full (`modules_to_save`, biases) are
    stored tensors. What it does not touch is absent. No tensor byte is read.

    Raises:
        NotFoundError: a file of the adapter is missing.
        CorruptError: it contradicts itself.
        MismatchError: it does not fit the base.
        UnsupportedError: it is no plain LoRA.
    """
    config, fingerprint = _read_config(store, path)
    name = next((candidate for candidate in ADAPTER_NAMES if candidate in list_names(store, path)), None)
    if name is None:
        raise NotFoundError.of("adapter.weights", path, f"holds neither {' nor '.join(ADAPTER_NAMES)}")
    file = read_weight_file(store, path, name, stat_present(store, path, name))
    tensors = _Opener(path / name, config, base).tensors(file.entries)
    files = (file.fingerprint, fingerprint)
    return Checkpoint(path, path, MappingProxyType(tensors), files, (), CheckpointKind.ADAPTER)


def apply_adapter(weights: Checkpoint, adapter: Checkpoint) -> Checkpoint:
    """Apply `adapter`, opened against `weights`: a checkpoint of full tensors, unchanged ones as stored.

    Raises:
        UnsupportedError: a tensor that the adapter changes is not stored plainly.
    """
    tensors = {
        name: _applied(weights.path, tensor, adapter.tensors.get(name)) for name, tensor in weights.tensors.items()
    }
    absolute = (replace(file, name=str((adapter.root / file.name).absolute())) for file in adapter.files)
    files = (*weights.files, *absolute)
    return replace(weights, tensors=MappingProxyType(tensors), files=files, content_id=None)


def _applied(path: Location, weights: Readable, change: Readable | None) -> Readable:
    if not isinstance(change, LowRankDelta):
        return weights if change is None else change
    if not isinstance(weights, TensorEntry) or weights.is_delta:
        raise UnsupportedError.of(
            "adapter.base", path, f"{shown(weights.name)} is not stored as weights, so no adapter applies to it"
        )
    return Adapted(weights, change)


def _read_config(store: Store, path: Location) -> tuple[AdapterConfig, FileFingerprint]:
    if ADAPTER_CONFIG_NAME not in list_names(store, path):
        raise NotFoundError.of("adapter.config", path, f"is no adapter: it holds no {ADAPTER_CONFIG_NAME}")
    status = stat_present(store, path, ADAPTER_CONFIG_NAME)
    config = read_adapter_config(store, path / ADAPTER_CONFIG_NAME)
    raw = store.read_small(path / ADAPTER_CONFIG_NAME, ADAPTER_CONFIG_BYTES)
    digest = blake3(raw).hexdigest(length=16)
    return config, FileFingerprint(ADAPTER_CONFIG_NAME, status.size_bytes, status.version, digest)


class _Opener:
    """Turns the stored tensors of one adapter into tensors of its base."""

    def __init__(self, path: Location, config: AdapterConfig, base: Checkpoint) -> None:
        self._path = path
        self._config = config
        self._base = base

    def tensors(self, entries: Sequence[TensorEntry]) -> dict[str, Readable]:
        """Return the tensors by the base's names, in storage order."""
        factors, full = self._sorted_out(entries)
        wanted = [f"{module}.weight" for module in factors]
        self._check_heads(wanted, full)
        names = base_names([*wanted, *(name for name in full if name not in wanted)], self._base.tensors, self._path)
        is_transposed = self._orientation({names[f"{m}.weight"]: f for m, f in factors.items()})
        tensors: dict[str, Readable] = {names[name]: replace(entry, name=names[name]) for name, entry in full.items()}
        for module, parts in factors.items():
            name = names[f"{module}.weight"]
            delta = self._delta(module, name, parts, transposed=is_transposed[name])
            stored = tensors.get(name)
            tensors[name] = Adapted(stored, delta) if isinstance(stored, TensorEntry) else delta
        return tensors

    def _check_heads(self, changed: Sequence[str], full: Collection[str]) -> None:
        """Refuse an output head where the base has none because its weights are tied."""
        heads = [name for name in (*changed, *full) if is_head(name)]
        if not heads or any(map(is_head, self._base.tensors)):
            return
        if heads[0] in changed:
            hint = f"{MERGE_HINT}: the change goes into the embedding"
        else:
            hint = f"{MERGE_HINT}, with --allow-dropped '{heads[0]}', which leaves the head out"
        raise MismatchError.of(
            "adapter.tensor.tied", self._path,
            f"it changes {shown(heads[0])}, and the base has no output head: its embedding is used for it", hint,
        )  # fmt: skip

    def _sorted_out(self, entries: Sequence[TensorEntry]) -> tuple[dict[str, _Factors], dict[str, TensorEntry]]:
        """Sort entries into factors by module, and tensors stored in full by name."""
        factors: dict[str, _Factors] = defaultdict(_Factors)
        full: dict[str, TensorEntry] = {}
        for entry in entries:
            name = entry.name.removeprefix(PREFIX)
            match = _FACTOR.fullmatch(name)
            if match:
                self._check_factor(entry)
                parts = factors[match["module"]]
                parts.sides[match["side"]] = entry
                parts.is_embedding = match["embedding"] is not None
            elif (variant := _VARIANT.search(name)) is not None:
                raise UnsupportedError.of(
                    "adapter.variant", self._path, f"{shown(entry.name)}: '{variant[0]}' is not part of a plain LoRA",
                    MERGE_HINT,
                )  # fmt: skip
            else:
                full[name.replace(_BASE_LAYER, ".")] = entry
        for module, parts in factors.items():
            self._check_pair(module, parts)
        return dict(factors), full

    def _check_factor(self, entry: TensorEntry) -> None:
        if len(entry.shape) != 2:
            raise UnsupportedError.of(
                "adapter.shape", self._path,
                f"{shown(entry.name)} has shape {list(entry.shape)}: only factors with two dimensions are read",
                MERGE_HINT,
            )  # fmt: skip
        if entry.dtype.kind is not DTypeKind.FLOAT:
            raise UnsupportedError.of("adapter.dtype", self._path, f"{shown(entry.name)} is {entry.dtype.name}")

    def _check_pair(self, module: str, parts: _Factors) -> None:
        if len(parts.sides) != 2:
            stored_name = next(iter(parts.sides.values())).name
            raise CorruptError.of("adapter.factor", self._path, f"{shown(stored_name)} has no counterpart, A or B")
        down, up = parts.sides["A"], parts.sides["B"]
        rank = self._config.rank_of(module)
        if (down.shape[0], up.shape[1]) != (rank, rank):
            raise CorruptError.of(
                "adapter.rank", self._path,
                f"{shown(module)} has factors {list(up.shape)} and {list(down.shape)}, the configured rank is {rank}",
            )  # fmt: skip

    def _orientation(self, factors: Mapping[str, _Factors]) -> dict[str, bool]:
        """Decide whether each product is transposed in the base: by its shape, else by the others', else by the option.

        Frameworks store some layers (Conv1D of GPT-2) transposed, and one option for all modules cannot say which.
        """
        choices = {name: self._choices(name, parts) for name, parts in factors.items()}
        told = {fits[0] for name, fits in choices.items() if len(fits) == 1 and not factors[name].is_embedding}
        usual = next(iter(told)) if len(told) == 1 else self._config.is_transposed
        for name, fits in choices.items():
            if len(fits) == 2 and len(told) == 2:
                raise UnsupportedError.of(
                    "adapter.orientation", self._path,
                    f"{shown(name)} is square, and other tensors are stored both ways: it cannot be told which it is",
                    MERGE_HINT,
                )  # fmt: skip
        return {name: fits[0] if len(fits) == 1 else usual for name, fits in choices.items()}

    def _choices(self, name: str, parts: _Factors) -> tuple[bool, ...]:
        """Return the orientations in which a product fits its base tensor; an embedding has only one."""
        shape = (parts.sides["B"].shape[0], parts.sides["A"].shape[1])
        needed = self._base.tensors[name].shape
        allowed = (True,) if parts.is_embedding else (False, True)
        fits = tuple(flipped for flipped in allowed if (shape[::-1] if flipped else shape) == needed)
        if not fits:
            raise MismatchError.of(
                "adapter.tensor.shape", self._path,
                f"the factors of {shown(name)} make {list(shape)}, the base has {list(needed)}",
            )  # fmt: skip
        return fits

    def _delta(self, module: str, name: str, parts: _Factors, *, transposed: bool) -> LowRankDelta:
        return LowRankDelta(name, parts.sides["B"], parts.sides["A"], self._config.scale_of(module), transposed)
