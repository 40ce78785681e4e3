"""Sharded checkpoints of other trainers: FSDP of Accelerate, Automodel, verl and SkyRL; Megatron-Core and NeMo."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from mergepipe.checkpoints.directory import list_names, torch_shards
from mergepipe.checkpoints.inert_pickle import PickledTensor, Record
from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_zip
from mergepipe.core.blocks import Span, element_count
from mergepipe.core.strict_json import shown
from mergepipe.errors import NotFoundError, damaged, mismatched, unsupported
from mergepipe.storage.contract import LATEST_BYTES, Store, is_file, is_folder
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import (
    EXP_AVG,
    EXP_AVG_SQ,
    FP32,
    WEIGHT,
    AdamStep,
    Framework,
    PicklePath,
    Piece,
    StoredState,
    TrainingCheckpoint,
)
from mergepipe.tailor.formats.contract import (
    Node,
    TrainingFormat,
    joined_counter,
    located,
    read_counter,
    recorded_step,
    refuse_foreign_states,
    root_of,
    step_of_name,
    tied_by_place,
)
from mergepipe.tailor.formats.dcp import METADATA_NAME, dcp_checkpoint, find_files, read_tensors, tensor_state
from mergepipe.tailor.formats.deepspeed import with_export
from mergepipe.tailor.formats.hf_trainer import (
    TRAINER_STATE_NAME,
    parameter_states,
    rank_count,
    read_global_step,
    read_json,
    read_weights,
)
from mergepipe.tailor.selection import model_units

FSDP_FORMAT = "accelerate-fsdp"
FOLDERS = {"pytorch_model_fsdp_0": "optimizer_0", "model": "optim"}
"""DCP directories of weights, and of the optimizer beside them: those of Accelerate and of NeMo Automodel."""
HF_FILES = ".hf_metadata"
"""Where Automodel keeps configuration and tokenizer, in the directory of the weights."""
SAFETENSORS_FOLDER = "model"
WEIGHTS_NAME, OPTIMIZER_NAME = "pytorch_model_fsdp.bin", "optimizer.bin"


def read_sharded(store: Store, folder: Location, weights: str, home: Location) -> TrainingCheckpoint:
    """Read a checkpoint of sharded state dicts, weights alone too; of tensors, only step counters are read."""
    tensors = list(read_tensors(store, folder / weights))
    if is_folder(store, folder / FOLDERS[weights]):
        tensors += read_tensors(store, folder / FOLDERS[weights])
    files = folder / weights / HF_FILES
    opened = dcp_checkpoint(store, folder, tensors, home)
    return replace(opened, lender=files if is_folder(store, files) else None)


def sharded_weights(store: Store, folder: Location) -> str | None:
    """Return the directory that holds sharded weights; None where there is none."""
    return next((name for name in FOLDERS if is_file(store, folder / name / METADATA_NAME)), None)


def has_safetensors_shards(store: Store, folder: Location) -> bool:
    """Whether there are weights as Automodel saves them with torch's Hugging Face writer."""
    place = folder / SAFETENSORS_FOLDER
    return is_folder(store, place) and bool(torch_shards(list_names(store, place)))


def read_full(store: Store, folder: Location) -> TrainingCheckpoint:
    """Read a checkpoint of full state dicts, whose optimizer names parameters; of tensors, only counters are read."""
    model = read_torch_zip(store, folder / WEIGHTS_NAME)
    weights = {
        name: located(model, node)
        for name, node in Node(model.root, WEIGHTS_NAME).named_items()
        if isinstance(node.value, PickledTensor)
    }
    archive = read_torch_zip(store, folder / OPTIMIZER_NAME)
    optimizer = Node(archive.root, OPTIMIZER_NAME)
    entries = dict(optimizer.get("state").named_items())
    groups = (group.get("params").elements() for group in optimizer.get("param_groups").elements())
    trained = {name.text() for names in groups for name in names}  # no buffers and frozen weights
    unknown = next((name for name in entries if name not in weights), None)
    if unknown is not None:
        raise damaged(folder, f"{unknown[:80]!r} of the optimizer is not among the weights")
    tied = tied_by_place({name: weights[name].offset for name in (*entries, *weights) if weights[name].n_elements})
    parameters = {name: tensor.shape for name, tensor in weights.items() if name not in tied}
    states = {(n, WEIGHT): StoredState.whole(n, WEIGHT, weights[n]) for n in parameters}  # aliases have their owner's
    steps = []
    for name, entry in entries.items():
        parameter = StoredState.whole(name, WEIGHT, weights[name])
        held, counters = parameter_states(archive, entry, ("state", name), parameter)
        states |= held
        steps += counters
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=FSDP_FORMAT,
        world_size=rank_count(store, folder),
        step=int(max((step.value for step in steps), default=0)),
        units=model_units(parameters, tied),
        parameters=parameters,
        states=states,
        steps=tuple(steps),
        missing=tuple(f"optimizer state of {name}" for name in parameters if name in trained and name not in entries),
    )


def _recognise(store: Store, path: Location) -> bool:
    """Recognise the format by its model and optimizer, in two directories or two files."""
    is_sharded = sharded_weights(store, path) is not None or has_safetensors_shards(store, path)
    return is_sharded or (is_file(store, path / WEIGHTS_NAME) and is_file(store, path / OPTIMIZER_NAME))


def _open(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """See `read_sharded` and `read_full`; the Trainer's state tells the step, where it is."""
    weights = sharded_weights(store, path)
    if weights is not None:
        opened = read_sharded(store, path, weights, home)
    elif has_safetensors_shards(store, path):
        files = path / SAFETENSORS_FOLDER / HF_FILES
        opened = read_weights(store, path / SAFETENSORS_FOLDER, home)
        opened = replace(opened, path=path, root=path, lender=files if is_folder(store, files) else opened.path)
    else:
        opened = read_full(store, path)
    opened = replace(opened, format=FSDP_FORMAT)
    if not is_file(store, path / TRAINER_STATE_NAME):
        return opened
    step = read_global_step(store, path)
    return with_export(store, replace(opened, step=step, framework=Framework.TRANSFORMERS))


FSDP = TrainingFormat(
    FSDP_FORMAT,
    f"{'/, '.join(FOLDERS)}/ or {WEIGHTS_NAME} (FSDP of Accelerate, Automodel)",
    _recognise,
    _open,
    state_file=TRAINER_STATE_NAME,
)


# --- Megatron-Core and NeMo (`torch_dist`): DCP files whose tensors have Megatron's names ---


MEGATRON_FORMAT = "megatron-torch-dist"
_LATEST_NAME = "latest_checkpointed_iteration.txt"
_METADATA_NAME, _COMMON_NAME = "metadata.json", "common.pt"
_NEMO_WEIGHTS, _NEMO_CONTEXT = "weights", "context"
_BACKEND = "torch_dist"
_STEPS = ("iteration", "global_step")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+)\.(?P<name>.+)", re.ASCII)
_KINDS = {"fp32_param": FP32, "exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ}
_OTHERS = re.compile(r"(?:chained_\d+\.)?optimizer\.|rng_state|rerun_state|opt_param_|.*_extra_state", re.ASCII)


def read_megatron(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """Read an iteration's directory, a save directory with its latest one, or NeMo's; of tensors, nothing is read.

    Optimizer states that have their parameter's shape are known, as the masters that a model is made of; of those that
    are kept flat by rank the weights' own values are. There are no step counters: training is not resumed from a part.
    """
    folder = _iteration_folder(store, path)
    gone = next((name for name in (_METADATA_NAME, _COMMON_NAME) if not is_file(store, folder / name)), None)
    if gone is not None:
        message = f"there is no {gone}: a checkpoint of Megatron-Core's {_BACKEND} has one"
        hint = f"save it in the format {_BACKEND}, or convert it with Megatron's tools"
        raise NotFoundError.of("checkpoint.incomplete", folder, message, hint)
    backend = read_json(store, folder / _METADATA_NAME).get("sharded_backend")
    if backend != _BACKEND:
        hint = f"save it in the format {_BACKEND}, or convert it with Megatron's tools"
        raise unsupported(folder / _METADATA_NAME, f"the backend is {shown(backend)}, {_BACKEND} is read", hint)
    tensors = {tensor.key: tensor for tensor in read_tensors(store, folder)}
    weights = {name: tensor for name, tensor in tensors.items() if not _OTHERS.match(name)}
    if not weights:
        raise unsupported(folder, "holds no weights")
    states = {(name, WEIGHT): tensor_state(tensor, name, WEIGHT) for name, tensor in weights.items()}
    for key, tensor in tensors.items():
        match = _STATE.fullmatch(key)
        kind, name = (_KINDS.get(match["kind"]), match["name"]) if match else (None, "")
        if kind is not None and name in weights and tensor.shape == weights[name].shape:
            states[name, kind] = tensor_state(tensor, name, kind)
    parameters = {name: tensor.shape for name, tensor in weights.items()}
    world_size, missing = find_files(store, tensors.values())
    recorded = recorded_step(read_torch_zip(store, folder / _COMMON_NAME).root, _STEPS)
    named = step_of_name(folder.name) or step_of_name(home.name) or 0
    return TrainingCheckpoint(
        path=path,
        root=folder,
        format=MEGATRON_FORMAT,
        world_size=world_size,
        step=named if recorded is None else recorded,
        units=model_units(parameters),
        parameters=parameters,
        states=states,
        missing=(
            *missing,
            *(f"part of {kind} of {name}" for (name, kind), state in states.items() if state.gaps),
            "step counters by parameter, which Megatron does not keep",
        ),
    )


def _iteration_folder(store: Store, path: Location) -> Location:
    """Find the directory of the distributed checkpoint."""
    if is_file(store, path / _LATEST_NAME):
        raw = store.read_small(path / _LATEST_NAME, LATEST_BYTES).decode("utf-8", "replace").strip()
        if not raw.isdecimal() or len(raw) > 12:
            message = f"names {shown(raw)}, a number of iterations is needed"
            raise damaged(path / _LATEST_NAME, message)
        path = path / f"iter_{int(raw):07d}"
        if not is_folder(store, path):
            raise NotFoundError.of("checkpoint.incomplete", path, f"is not there, and {_LATEST_NAME} names it")
    return path / _NEMO_WEIGHTS if is_folder(store, path / _NEMO_WEIGHTS) else path


def _is_megatron(store: Store, path: Location) -> bool:
    """Recognise a distributed checkpoint by its two small files, NeMo's and save directories by what they hold."""
    names = {entry.name for entry in store.list(path)}
    marks = ({_METADATA_NAME, _COMMON_NAME}, {_NEMO_WEIGHTS, _NEMO_CONTEXT}, {_LATEST_NAME})
    return any(mark <= names for mark in marks)


MEGATRON = TrainingFormat(
    MEGATRON_FORMAT,
    f"{_METADATA_NAME} with {_COMMON_NAME}, or {_LATEST_NAME} (Megatron-Core, NeMo)",
    _is_megatron,
    read_megatron,
)


# --- verl and SkyRL: a file of model shards and one of optimizer shards for every rank of FSDP ---


VERL_FORMAT = "verl-fsdp"
CONFIG_FOLDER = "huggingface"
_OPENED_AT_ONCE = 8
_NAME = re.compile(r"(model|optim)_world_size_(\d{1,6})_rank_(\d{1,6})\.pt", re.ASCII)


def read_verl(store: Store, folder: Location, home: Location) -> TrainingCheckpoint:
    """Read the files of all ranks; of tensors, only step counters are read.

    The step is the optimizer's, else that of the directory's
    name, as `global_step_40/actor`.
    """
    ranks = _open_ranks(store, folder, "model")
    names = list(dict(root_of(ranks[0]).named_items()))
    weights = {name: _joined(ranks, (name,), name, WEIGHT) for name in names if _value(ranks[0], name)}
    firsts = {name: state.pieces[0] for name, state in weights.items() if state.pieces}
    tied = tied_by_place({name: (piece.file, piece.offset) for name, piece in firsts.items()})
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
        untrained={n: state for n, state in weights.items() if n not in parameters and n not in tied},
        lender=config if is_folder(store, config) else None,
    )


def _open_ranks(store: Store, folder: Location, kind: str) -> list[TorchArchive]:
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
    ranks = _open_ranks(store, folder, "optim")
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
                counters = [read_counter(archive, root_of(archive).at(place), place) for archive in ranks]
                steps.append(joined_counter(counters, (name,)))
                continue
            state = states[name, kind] = _joined(ranks, place, name, kind)
            if state.shape != shapes[name]:
                message = f"state {number} has shape {state.shape}, {name!r} has {shapes[name]}"
                raise mismatched(ranks[0].file, message)
    return states, steps


VERL = TrainingFormat(
    VERL_FORMAT,
    "model_world_size_2_rank_0.pt (verl, SkyRL)",
    lambda store, path: any(entry.name.startswith("model_world_size_") for entry in store.list(path)),
    read_verl,
    state_file="fsdp_config.json",
)
