"""FSDP checkpoints of verl and SkyRL: a file of model shards and one of optimizer shards for every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from mergepipe.checkpoints.inert_values import PickledTensor, Record
from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_zip
from mergepipe.core.blocks import Span, element_count
from mergepipe.errors import NotFoundError, damaged, mismatched, unsupported
from mergepipe.storage.contract import Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import EXP_AVG, WEIGHT, AdamStep, PicklePath, Piece, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import (
    Node,
    TrainingFormat,
    read_scalar,
    refuse_foreign_states,
    root_of,
    step_of_name,
)
from mergepipe.tailor.selection import model_units

VERL_FORMAT = "verl-fsdp"
CONFIG_FOLDER = "huggingface"
_OPENED_AT_ONCE = 8
_NAME = re.compile(r"(model|optim)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt", re.ASCII)


def read_verl(store: Store, folder: Location, home: Location) -> TrainingCheckpoint:
    """Read the files of all ranks; of tensors, only step counters are read.

    The step is the optimizer's, else that of the directory's
    name, as `global_step_40/actor`.
    """
    ranks = _open(store, folder, "model")
    names = list(dict(root_of(ranks[0]).named_items()))
    weights = {name: _joined(ranks, (name,), name, WEIGHT) for name in names if _value(ranks[0], name)}
    places = {name: (state.pieces[0].file, state.pieces[0].offset) for name, state in weights.items() if state.pieces}
    owners = {place: name for name, place in reversed(places.items())}
    tied = {name: owners[place] for name, place in places.items() if owners[place] != name}
    cut = {name for name in weights if isinstance(_value(ranks[0], name), Record)} or weights.keys()
    parameters = {name: state.shape for name, state in weights.items() if name in cut and name not in tied}
    states, steps = _optimizer(store, folder, ranks, parameters)
    named = step_of_name(home.name) or step_of_name(home.parent.name) or 0
    config = folder / CONFIG_FOLDER
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=VERL_FORMAT,
        world_size=len(ranks),
        step=int(max((step.value for step in steps), default=named)),
        units=model_units(parameters, tied),
        parameters=parameters,
        states={**{(n, WEIGHT): weights[n] for n in parameters}, **states},
        steps=tuple(steps),
        missing=() if states else ("the optimizer's state by parameter",),
        has_state=bool(states),
        untrained={n: state for n, state in weights.items() if n not in parameters and n not in tied},
        lender=config if is_folder(store, config) else None,
    )


def _open(store: Store, folder: Location, kind: str) -> list[TorchArchive]:
    """Open the files of one kind, in the order of their ranks; none where there are none."""
    matches = [match for entry in store.list(folder) if (match := _NAME.fullmatch(entry.name)) and match[1] == kind]
    sizes = sorted({int(match[2]) for match in matches})
    if len(sizes) > 1:
        message = f"holds {kind} files of {sizes[0]} and of {sizes[1]} ranks"
        raise damaged(folder, message, "leave those of one run there")
    paths = [folder / f"{kind}_world_size_{size}_rank_{rank}.pt" for size in sizes for rank in range(size)]
    gone = next((path for path in paths if not is_file(store, path)), None)
    if gone is not None:
        message = f"there is no {gone.name}: the files of all {sizes[0]} ranks are needed"
        raise NotFoundError.of("checkpoint.incomplete", folder, message)
    with ThreadPoolExecutor(_OPENED_AT_ONCE, "mergepipe-tailor-open") as pool:  # each takes many small reads
        return list(pool.map(lambda path: read_torch_zip(store, path), paths))


def _value(archive: TorchArchive, name: str) -> object:
    """Return a tensor, or what stands for a sharded one; None for other entries."""
    value = root_of(archive).get(name).value
    return value if isinstance(value, PickledTensor | Record) else None


def _joined(ranks: Sequence[TorchArchive], at: PicklePath, parameter: str, kind: str) -> StoredState:
    """Join the rows of one tensor that ranks hold one after another; replicas behind the last row are not read."""
    first = root_of(ranks[0]).at(at)
    shape = _shape(first)
    pieces, end, dtype = [], 0, None
    for archive in ranks:
        node = root_of(archive).at(at)
        if _shape(node) != shape:
            raise node.error(f"has shape {_shape(node)}, in the file of rank 0 {shape}")
        for local in _local(node) if end < element_count(shape) else ():
            tensor = archive.locate(local, node.path)
            stop = end + tensor.n_elements
            if tensor.shape[1:] != shape[1:] or stop > element_count(shape) or tensor.dtype != (dtype or tensor.dtype):
                raise node.error(f"{tensor.dtype.name} of {tensor.shape} does not continue {shape} at element {end}")
            if tensor.n_elements:
                pieces.append(Piece(tensor.file, tensor.offset, tensor.nbytes, Span(end, stop)))
            end, dtype = stop, tensor.dtype
    if end < element_count(shape) or dtype is None:
        raise first.error(f"all ranks hold {end} elements of {shape}")
    return StoredState(parameter, kind, dtype, shape, tuple(pieces))


def _shape(node: Node) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    if not isinstance(node.value, Record):
        return node.tensor().shape
    return Node(node.value.args, node.file, node.path).at((2,)).shape()


def _local(node: Node) -> Iterator[PickledTensor]:
    """Yield what a rank holds of a tensor: rows that follow those of the rank before it, or all of it."""
    if not isinstance(node.value, Record):
        yield node.tensor()
    elif node.value.kind.name == "ShardedTensor":
        for shard in node.fields("ShardedTensor").at((0,)).elements():
            yield shard.fields("Shard").at((1, "tensor")).tensor()
    else:
        fields = node.fields("DTensor").at((1,))
        *replicas, rows = map(_placement, fields.get("_spec").fields("DTensorSpec").get("placements").elements())
        if rows not in ("Replicate", "Shard of 0") or any(placement != "Replicate" for placement in replicas):
            hint = "only sharding along the first dimension is read (FSDP without tensor parallelism)"
            raise unsupported(f"{node.file}: {node.path}", "is not cut into rows", hint)
        yield fields.get("_local_tensor").tensor()


def _placement(node: Node) -> str:
    """Name how one dimension of the mesh cuts a tensor."""
    name = node.value.kind.name if isinstance(node.value, Record) else ""
    return f"Shard of {node.fields(name).get('dim').integer()}" if name == "Shard" else name


def _optimizer(
    store: Store, folder: Location, weights: Sequence[TorchArchive], shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[tuple[str, str], StoredState], list[AdamStep]]:
    """Read the states and counters of an optimizer of FSDP2 with one group of parameters, in the model's order.

    Nothing where there is none, or where its states belong to no parameter that is known: FSDP1, several groups,
    frozen parameters, another optimizer than Adam.
    """
    ranks = _open(store, folder, "optim")
    if not ranks:
        return {}, []
    if len(ranks) != len(weights):
        message = f"holds model files of {len(weights)} ranks and optim files of {len(ranks)}"
        raise damaged(folder, message, "leave those of one run there")
    root = root_of(ranks[0])
    first = root.get("state")
    kept = {number: first.get(number).mapping() for number in first.mapping()}
    is_cut = all(isinstance(state.get(EXP_AVG), Record) for state in kept.values())
    if not is_cut or len(root.get("param_groups").elements()) > 1 or kept.keys() != set(range(len(shapes))):
        return {}, []
    states: dict[tuple[str, str], StoredState] = {}
    steps = []
    for number, name in enumerate(shapes):
        kinds = [kind for kind, _ in first.get(number).named_items()]
        refuse_foreign_states(frozenset(kinds), ranks[0].file)
        for kind in kinds:
            place: PicklePath = ("state", number, kind)
            if kind == "step":
                steps.append(_step(store, ranks, place, name))
                continue
            state = states[name, kind] = _joined(ranks, place, name, kind)
            if state.shape != shapes[name]:
                message = f"state {number} has shape {state.shape}, {name!r} has {shapes[name]}"
                raise mismatched(ranks[0].file, message)
    return states, steps


def _step(store: Store, ranks: Sequence[TorchArchive], place: PicklePath, name: str) -> AdamStep:
    """Read the counter of one parameter, which every rank keeps; of the first one, those of all ranks are compared."""
    cells: list[Piece] = []
    values: list[float] = []
    for archive in ranks:
        node = root_of(archive).at(place)
        tensor = archive.locate(node.tensor(), node.path)
        if tensor.n_elements != 1:
            raise node.error(f"a step counter has shape {tensor.shape}")
        cells.append(Piece(tensor.file, tensor.offset, tensor.nbytes, Span(0, 1)))
        if not values or place[1] == 0:
            values.append(read_scalar(store, tensor.file, tensor.offset, tensor.dtype))
        if values[-1] != values[0]:
            raise node.error(f"is at optimizer step {values[-1]:g}, rank 0 at {values[0]:g}")
    return AdamStep(values[0], (name,), tensor.dtype, tuple(cells))


VERL = TrainingFormat(
    VERL_FORMAT,
    "model_world_size_2_rank_0.pt (verl, SkyRL)",
    lambda store, path: any(entry.name.startswith("model_world_size_") for entry in store.list(path)),
    read_verl,
    state_file="fsdp_config.json",
)
