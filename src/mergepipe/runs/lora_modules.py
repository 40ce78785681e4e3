"""The modules of an adapter as factors, whichever form it is stored in: by its own names, or by those of a base.

Legend: M rows, N columns, R rank, E experts.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.adapted_tensors import (
    COLUMNS_BY_EXPERT,
    Adapted,
    Composed,
    Factor,
    LowRankDelta,
    StackedDelta,
    read_finite,
)
from mergepipe.checkpoints.contract import Checkpoint, Readable, TensorEntry
from mergepipe.checkpoints.embedding_rows import embedding_ending, is_head
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.checkpoints.stacked_experts import fused_name, inputs_first, pieces_of
from mergepipe.checkpoints.stored_adapters import AdaptedModule, StoredAdapter, damaged_adapter, unsupported_adapter
from mergepipe.core.blocks import BF16, F16, F32, DType
from mergepipe.core.strict_json import shown
from mergepipe.errors import MergePipeError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

Files = Mapping[Location, RangeFile]
Matrix = NDArray[np.float32]
_WEIGHT = ".weight"
_SINGLE = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<matrix>[^.]+)")
_ROLES = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_KEPT_DTYPES = (F32, F16, BF16)
NAME_THE_BASE = "name its base: --base BASE"


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a matrix, and the delta that changes them: none where they stay as they are."""

    n_rows: int
    delta: LowRankDelta | None

    @property
    def rank(self) -> int:
        """The rank of the delta, of one expert."""
        return 0 if self.delta is None else self.delta.up.shape[1] // self.delta.n_experts


@dataclass(frozen=True, slots=True)
class LoraModule:
    """An adapted module: its matrix, or those of stacked experts, each of rows one below the other.

    The matrices are as a module has them, (outputs, inputs): `is_embedding` and `is_transposed` say that the model
    stores that one transposed. With `is_opaque` no base has told which dimension of stacked experts is which.
    """

    name: str
    experts: tuple[tuple[Rows, ...], ...]
    is_stack: bool = False
    is_embedding: bool = False
    is_transposed: bool = False
    is_opaque: bool = False
    kernel: tuple[int, ...] = ()
    bias: StoredTensor | None = None
    magnitude: StoredTensor | None = None

    @property
    def deltas(self) -> list[LowRankDelta]:
        """All deltas of the module."""
        return [rows.delta for expert in self.experts for rows in expert if rows.delta is not None]

    @property
    def rank(self) -> int:
        """The largest rank of its experts."""
        return max(map(_rank_of, self.experts))

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix of one expert."""
        delta = self.deltas[0]
        columns = _columns(delta)
        return sum(rows.n_rows for rows in self.experts[0]), columns

    @property
    def scales(self) -> set[float]:
        """The scales of its deltas."""
        return {delta.scale for delta in self.deltas}

    def factors(self, expert: int, rank: int, scale: float, files: Files) -> Factors:
        """Return B and A of one expert, of `rank` columns and rows, so that `scale * B @ A` is its delta.

        What the scales of its deltas have in addition goes into B, which keeps its dtype if that holds it exactly.
        Memory: the factors, some times.
        """
        n_rows, n_columns = self.shape
        up_MR = np.zeros((n_rows, rank), np.float64)
        down_RN = np.zeros((rank, n_columns), np.float32)
        dtypes: list[tuple[DType, DType]] = []
        is_folded = False
        row = 0
        at = 0
        for rows in self.experts[expert]:
            if rows.delta is not None:
                up, down, dtype = _oriented(rows.delta, files)
                factor = rows.delta.scale / scale
                is_folded |= factor != 1.0
                up_MR[row : row + rows.n_rows, at : at + rows.rank] = up.astype(np.float64) * factor
                down_RN[at : at + rows.rank] = down
                dtypes.append(dtype)
            row += rows.n_rows
            at += rows.rank
        up_dtype = _common([one for one, _ in dtypes])
        return Factors(up_MR, down_RN, up_dtype, _common([other for _, other in dtypes]), is_folded)


def _rank_of(expert: Sequence[Rows]) -> int:
    """Return the rank of one expert: that of all its rows together."""
    return sum(rows.rank for rows in expert)


@dataclass(frozen=True, slots=True)
class Factors:
    """The two factors of a matrix, with the dtypes of the tensors that they come from."""

    up_MR: NDArray[np.float64]
    down_RN: Matrix
    up_dtype: DType
    down_dtype: DType
    is_folded: bool


def _common(dtypes: Sequence[DType]) -> DType:
    """Return the dtype of all of some tensors, float32 where they differ."""
    first = dtypes[0] if dtypes else F32
    return first if all(dtype == first for dtype in dtypes) and first in _KEPT_DTYPES else F32


def without_loss(values: NDArray[np.floating], dtype: DType) -> tuple[NDArray[np.generic], str]:
    """Return values as they are stored, and the name of their dtype: `dtype`, or float32 where that loses something."""
    wide = values.astype(np.float64)
    if dtype == F16:
        half = values.astype(np.float16)
        if np.array_equal(half.astype(np.float64), wide):
            return half, F16.name
    single = np.ascontiguousarray(values, np.float32)
    if dtype == BF16:
        bits = single.view(np.uint32)
        if not (bits & 0xFFFF).any() and np.array_equal(single.astype(np.float64), wide):
            return (bits >> 16).astype(np.uint16), BF16.name
    return single, F32.name


def _columns(delta: LowRankDelta) -> int:
    down = delta.up if delta.transposed else delta.down
    assert down is not None
    return down.shape[0] if delta.transposed else down.shape[1]


def _oriented(delta: LowRankDelta, files: Files) -> tuple[Matrix, Matrix, tuple[DType, DType]]:
    """Read the factors of one delta, the left one first, with the dtypes that they are stored in."""
    assert delta.down is not None
    up = read_finite(delta.up, files, Purpose.EXPERT)
    down = read_finite(delta.down, files, Purpose.EXPERT)
    up = up.reshape(up.shape[0], -1, delta.n_experts)[:, :, delta.expert]
    down = down.reshape(delta.n_experts, -1, down.shape[1])[delta.expert]
    dtypes = _stored_dtype(delta.up), _stored_dtype(delta.down)
    if delta.transposed:
        return down.T[_kept_rows(delta)], up.T, dtypes[::-1]
    return up[_kept_rows(delta)], down, dtypes


def _kept_rows(delta: LowRankDelta) -> slice:
    """Return the rows of its product that a delta is of."""
    return slice(None) if delta.rows is None else slice(*delta.rows)


def _stored_dtype(factor: Factor) -> DType:
    """Return the dtype that a factor is stored in; of one that is computed, float32."""
    if isinstance(factor, Composed):
        is_reordered = len(factor.parts) == 1
        return _stored_dtype(factor.parts[0]) if is_reordered else F32
    return factor.dtype


def own_modules(adapter: StoredAdapter, *, by_expert: bool) -> list[LoraModule]:
    """List the modules of an adapter by its own names.

    `by_expert` says that the columns of an expert stand side by side in B of stacked experts.
    """
    modules = []
    for module, parts in adapter.modules.items():
        names = adapter.config.nested_parameters(module)
        configured = names[0] if names else module
        n_experts = _expert_count(adapter, module, parts, configured)
        if names and len(names) > 1:
            message = f"the factors of {shown(module)} may be of {' or '.join(map(shown, names))}"
            raise unsupported_adapter(adapter.path, message, NAME_THE_BASE)
        scale = adapter.config.scale_of(configured)
        name = configured if names else module
        up = _by_expert(parts.up, n_experts) if by_expert and names else parts.up
        experts = []
        for expert in range(n_experts):
            delta = LowRankDelta(name, up, parts.down, scale, n_experts=n_experts, expert=expert)
            experts.append((Rows(parts.up.shape[0], delta),))
        modules.append(
            LoraModule(
                name, tuple(experts), is_stack=bool(names), is_embedding=parts.is_embedding,
                is_transposed=adapter.config.is_transposed and not parts.is_embedding, is_opaque=bool(names),
                kernel=parts.kernel if len(parts.kernel) > 1 else (), bias=parts.bias, magnitude=parts.magnitude,
            )
        )  # fmt: skip
    return modules


def _expert_count(adapter: StoredAdapter, module: str, parts: AdaptedModule, configured: str) -> int:
    rank = adapter.config.rank_of(configured)
    if parts.down.shape[0] % rank or (configured == module and parts.down.shape[0] != rank):
        message = f"{shown(module)} has factors of rank {parts.down.shape[0]}, the configured rank is {rank}"
        raise damaged_adapter(adapter.path, message)
    return parts.down.shape[0] // rank


def _by_expert(up: Factor, n_experts: int) -> Composed:
    rows, columns = up.shape
    return Composed(COLUMNS_BY_EXPERT, (up,), (rows, columns), n_experts)


def with_columns_by_expert(adapter: StoredAdapter) -> StoredAdapter:
    """Return an adapter whose B of stacked experts is read with the columns of an expert side by side."""
    modules = dict(adapter.modules)
    for module, parts in adapter.modules.items():
        names = adapter.config.nested_parameters(module)
        if names:
            n_experts = _expert_count(adapter, module, parts, names[0])
            modules[module] = replace(parts, up=_by_expert(parts.up, n_experts))
    return replace(adapter, modules=modules)


def modules_of_base(opened: Checkpoint, base: Checkpoint) -> list[LoraModule]:
    """List the modules of an adapter that is opened against `base`, by the names of its tensors."""
    modules = []
    for name, tensor in opened.tensors.items():
        stored = base.tensors[name]
        magnitude = None
        if isinstance(tensor, Adapted) and tensor.weights is stored:
            magnitude = tensor.magnitude
            tensor = tensor.delta
        if not isinstance(tensor, LowRankDelta | StackedDelta):
            raise _not_factors(opened.path, name)
        module = name.removesuffix(_WEIGHT)
        is_stack = fused_name(name) is not None and len(stored.shape) == 3
        if isinstance(tensor, LowRankDelta):
            modules.append(_plain(module, tensor, base, magnitude))
        elif is_stack:
            modules.append(_stack(name, tensor, stored))
        else:
            kernel = stored.shape[1:] if len(stored.shape) > 2 else ()
            height = stored.shape[0] // len(tensor.parts)
            rows = [Rows(height, part) for part in tensor.parts]
            modules.append(LoraModule(module, (_joined(rows),), kernel=kernel, magnitude=magnitude))
    return modules


def _not_factors(path: Location, name: str) -> MergePipeError:
    message = f"{shown(name)} is changed by more than two factors: it is stored in full, or its rows are"
    return unsupported_adapter(path, message, "convert it without --base, to a form that holds such tensors")


def _plain(module: str, delta: LowRankDelta, base: Checkpoint, magnitude: StoredTensor | None) -> LoraModule:
    """Return the module of one matrix, as the module has it: a matrix of experts and part of a fused one as stored."""
    name = f"{module}{_WEIGHT}"
    is_embedding = embedding_ending(name) is not None and not is_head(name)
    if pieces_of(name, base.tensors[name].shape):
        return LoraModule(module, ((Rows(delta.shape[0], delta),),), magnitude=magnitude)
    in_module = replace(delta, transposed=False)
    rows = Rows(in_module.shape[0], in_module)
    return LoraModule(
        module, ((rows,),), is_embedding=is_embedding and delta.transposed,
        is_transposed=delta.transposed and not is_embedding, magnitude=magnitude,
    )  # fmt: skip


def _stack(name: str, tensor: StackedDelta, stored: Readable) -> LoraModule:
    n_experts = stored.shape[0]
    per_expert = len(tensor.parts) // n_experts
    height = stored.shape[1] // per_expert
    experts = []
    for expert in range(n_experts):
        parts = tensor.parts[expert * per_expert : (expert + 1) * per_expert]
        experts.append(_joined([Rows(height, part) for part in parts]))
    return LoraModule(name, tuple(experts), is_stack=True)


def _joined(rows: Sequence[Rows]) -> tuple[Rows, ...]:
    """Join rows that follow each other in one delta, so that its factors are taken once."""
    joined: list[Rows] = []
    for one in rows:
        last = joined[-1] if joined else None
        both = None if last is None else _one_delta(last, one)
        if both is None:
            joined.append(one)
        else:
            joined[-1] = both
    return tuple(joined)


def _one_delta(first: Rows, second: Rows) -> Rows | None:
    n_rows = first.n_rows + second.n_rows
    if first.delta is None and second.delta is None:
        return Rows(n_rows, None)
    if (
        first.delta is None
        or second.delta is None
        or replace(first.delta, rows=None) != replace(second.delta, rows=None)
    ):
        return None
    if first.delta.rows is None or second.delta.rows is None or first.delta.rows[1] != second.delta.rows[0]:
        return None
    return Rows(n_rows, replace(first.delta, rows=(first.delta.rows[0], second.delta.rows[1])))


def single_experts(
    modules: Sequence[LoraModule], path: Location, names_of_base: Mapping[str, Readable]
) -> list[LoraModule]:
    """Return modules in which each matrix of an expert is a module of its own."""
    split: list[LoraModule] = []
    for module in modules:
        if not module.is_stack:
            split.append(module)
            continue
        if module.is_opaque:
            message = f"{shown(module.name)} holds stacked experts, and nothing in it says which dimension is which"
            raise unsupported_adapter(path, message, NAME_THE_BASE)
        if inputs_first(module.name, names_of_base):
            message = f"the matrices of {shown(module.name)} lie inside one another, and no module has one alone"
            raise unsupported_adapter(path, message, "convert it to peft, which keeps them stacked")
        _, roles = fused_name(module.name) or ("", ())
        stem = module.name.rpartition(".")[0]
        height = module.shape[0] // len(roles)
        for expert, rows in enumerate(module.experts):
            for index, role in enumerate(roles):
                part = _cut(rows, index * height, (index + 1) * height)
                if any(one.delta is not None for one in part):
                    split.append(LoraModule(f"{stem}.{expert}.{_ROLES[role]}", (part,)))
    return split


def _cut(rows: Sequence[Rows], start: int, stop: int) -> tuple[Rows, ...]:
    """Return the rows from `start` to `stop` of a matrix."""
    cut: list[Rows] = []
    at = 0
    for one in rows:
        first = max(start, at)
        last = min(stop, at + one.n_rows)
        if first < last:
            delta = one.delta
            if delta is not None:
                offset = (delta.rows[0] if delta.rows is not None else 0) - at
                delta = replace(delta, rows=(first + offset, last + offset))
            cut.append(Rows(last - first, delta))
        at += one.n_rows
    return tuple(cut)


def experts_by_matrix(modules: Sequence[LoraModule], path: Location, n_experts: int) -> Iterator[LoraModule]:
    """Yield the modules of single experts stacked by matrix: "layer.mlp.experts.gate_proj"; others as they are."""
    stacks: dict[tuple[str, str], dict[int, LoraModule]] = defaultdict(dict)
    for module in modules:
        match = _SINGLE.fullmatch(module.name)
        if match is None:
            yield module
        else:
            stacks[match["experts"], _matrix(module.name)][int(match["expert"])] = module
    for (experts, matrix), by_expert in stacks.items():
        count = n_experts or _count_of(stacks, path)
        shape = next(iter(by_expert.values())).shape
        if any(module.shape != shape for module in by_expert.values()):
            raise damaged_adapter(path, f"the experts of {shown(experts)} differ in the shape of {matrix}")
        absent = (Rows(shape[0], None),)
        listed = [by_expert[expert].experts[0] if expert in by_expert else absent for expert in range(count)]
        yield LoraModule(f"{experts}.{matrix}", tuple(listed), is_stack=True)


def _matrix(name: str) -> str:
    """Return the usual name of the matrix that a module of a single expert is."""
    pieces = pieces_of(f"{name}{_WEIGHT}", ())
    return _ROLES[pieces[0].role] if pieces else name.rpartition(".")[2]


def _count_of(stacks: Mapping[tuple[str, str], Mapping[int, LoraModule]], path: Location) -> int:
    """Return the number of experts where all of them are adapted everywhere."""
    counts = {len(by_expert) for by_expert in stacks.values()}
    largest = {max(by_expert) + 1 for by_expert in stacks.values()}
    if len(counts) > 1 or counts != largest:
        message = "not all of its experts are adapted, and it does not say how many there are"
        raise unsupported_adapter(path, message, NAME_THE_BASE)
    return counts.pop()


def stacked_experts(modules: Sequence[LoraModule], path: Location, n_experts: int) -> Iterator[LoraModule]:
    """Yield the modules with experts as transformers 5 stacks them: `gate_up_proj`, gate above up, and `down_proj`."""
    pairs: dict[str, dict[str, LoraModule]] = defaultdict(dict)
    for module in experts_by_matrix(modules, path, n_experts):
        stem, _, matrix = module.name.rpartition(".")
        if not module.is_stack or matrix == "down_proj":
            yield module
        elif matrix in ("gate_proj", "up_proj"):
            pairs[stem][matrix] = module
        else:
            raise unsupported_adapter(path, f"{shown(module.name)} has no place among stacked experts")
    for stem, halves in pairs.items():
        half = next(iter(halves.values()))
        absent = replace(half, experts=((Rows(half.shape[0], None),),) * len(half.experts))
        gate = halves.get("gate_proj", absent)
        up = halves.get("up_proj", absent)
        experts = tuple(_joined((*one, *other)) for one, other in zip(gate.experts, up.experts, strict=True))
        yield LoraModule(f"{stem}.gate_up_proj", experts, is_stack=True)


def count_of_experts(base: Checkpoint) -> int:
    """Return the number of experts of a base, 0 where it has none."""
    n_experts = 0
    for name, tensor in base.tensors.items():
        pieces = pieces_of(name, tensor.shape)
        n_experts = max([n_experts, *(piece.expert + 1 for piece in pieces)])
    return n_experts


def all_entries(modules: Sequence[LoraModule], others: Sequence[StoredTensor]) -> list[TensorEntry]:
    """List the stored tensors that modules are made of, and those of `others`."""
    entries = [entry for module in modules for delta in module.deltas for entry in delta.stored]
    for module in modules:
        entries += [
            entry for vector in (module.bias, module.magnitude) if vector is not None for entry in vector.stored
        ]
    return [*entries, *(entry for tensor in others for entry in tensor.stored)]
