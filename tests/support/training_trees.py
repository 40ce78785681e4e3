"""Small training checkpoints in every format, written from known arrays without the frameworks.

Layouts are made the frameworks' way round (concatenate, pad, split), not the reader's (intersect ranges).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from support.safetensors_bytes import file_bytes, record
from support.torch_bytes import Array, Call, Named, PickleWriter, View, row_major, torch_bytes

STATES = ("exp_avg", "exp_avg_sq")
RATE = 0.1
SAMPLES_A_STEP = 8
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class KnownStates:
    """What a written checkpoint holds: `arrays` by (parameter, kind); kinds are fp32, exp_avg, exp_avg_sq."""

    shapes: Shapes
    arrays: Mapping[tuple[str, str], Array]
    step: int


def known_states(shapes: Shapes, *, seed: int = 0, step: int = 7) -> KnownStates:
    """Random values, all different."""
    generator = np.random.default_rng(seed)
    kinds = ("fp32", *STATES)
    arrays = {(n, k): generator.standard_normal(s).astype(np.float32) for n, s in shapes.items() for k in kinds}
    return KnownStates(shapes, arrays, step)


def decoder_shapes(
    n_layers: int = 3, width: int = 5, vocabulary: int = 11, *, tied: bool = False
) -> dict[str, tuple[int, ...]]:
    """A Llama's parameters with odd sizes, in the order the model defines them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    for index in range(n_layers):
        prefix = f"model.layers.{index}"
        for module, shape in (
            ("self_attn.k_proj", (3, width)), ("mlp.up_proj", (7, width)), ("mlp.down_proj", (width, 7)),
            ("input_layernorm", (width,)),
        ):  # fmt: skip
            shapes[f"{prefix}.{module}.weight"] = shape
    shapes["model.norm.weight"] = (width,)
    return shapes if tied else shapes | {"lm_head.weight": (vocabulary, width)}


def decay_groups(shapes: Shapes) -> list[list[str]]:
    """The two usual groups: weights with decay, norms without."""
    return [[n for n in shapes if "norm" not in n], [n for n in shapes if "norm" in n]]


def _step(value: int) -> Array:
    return np.array(value, dtype=np.float32)


def _adam(step: int, average: Array, square: Array) -> dict[str, object]:
    return {"step": _step(step), "exp_avg": average, "exp_avg_sq": square}


def _options(members: Sequence[Sequence[int]]) -> list[dict[str, object]]:
    return [{"lr": RATE, "betas": (0.9, 0.999), "params": list(numbers)} for numbers in members]


def _stage(number: int) -> Call:
    return Call(Named("deepspeed.runtime.zero.config", "ZeroStageEnum"), (number,))


def _size(shape: tuple[int, ...]) -> Call:
    return Call(Named("torch", "Size"), (shape,))


def _model_file(
    known: KnownStates,
    groups: Sequence[Sequence[str]],
    world_size: int,
    module: object,
    frozen: Mapping[str, object] = MappingProxyType({}),
) -> bytes:
    return torch_bytes({
        **frozen,
        "module": module,
        "param_shapes": [{n: _size(known.shapes[n]) for n in group} for group in groups],
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": known.step,
        "global_samples": known.step * SAMPLES_A_STEP,
        "dp_world_size": world_size,
    })  # fmt: skip


def write_zero12(
    folder: Path,
    known: KnownStates,
    groups: Sequence[Sequence[str]],
    world_size: int,
    *,
    stage: int = 2,
    buffers: Mapping[str, Array] = MappingProxyType({}),
) -> None:
    """A DeepSpeed tag directory of stage 1 or 2: groups concatenated, padded to 2 x ranks, cut in equal parts."""
    folder.mkdir(parents=True)
    module: dict[str, object] = dict(buffers)
    parts: dict[tuple[int, str], list[Array]] = {}
    for index, group in enumerate(groups):
        for kind in ("fp32", *STATES):
            flat = np.concatenate([known.arrays[n, kind].reshape(-1) for n in group])
            padded = np.concatenate([flat, np.zeros(-flat.size % (2 * world_size), np.float32)])
            parts[index, kind] = np.split(padded, world_size)
            if kind == "fp32":
                n_padding = padded.size - flat.size
                last = parts[index, kind][-1]
                parts[index, kind][-1] = last[: max(0, last.size - n_padding)]
                starts = np.cumsum([0, *(known.arrays[n, kind].size for n in group)])
                module |= {n: View(flat, int(s), known.shapes[n]) for n, s in zip(group, starts, strict=False)}
    (folder / "mp_rank_00_model_states.pt").write_bytes(_model_file(known, groups, world_size, module))
    for rank in range(world_size):
        state = {
            i: _adam(known.step, parts[i, "exp_avg"][rank], parts[i, "exp_avg_sq"][rank]) for i in range(len(groups))
        }
        optimizer = {
            "base_optimizer_state": {"state": state, "param_groups": _options([[i] for i in range(len(groups))])},
            "single_partition_of_fp32_groups": [parts[i, "fp32"][rank] for i in range(len(groups))],
            "zero_stage": _stage(stage),
            "partition_count": [world_size] * len(groups),
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        (folder / name).write_bytes(torch_bytes({"optimizer_state_dict": optimizer}))


def write_zero3(
    folder: Path,
    known: KnownStates,
    groups: Sequence[Sequence[str]],
    world_size: int,
    *,
    members: Sequence[Sequence[int]] | None = None,
    config: Mapping[str, object] = MappingProxyType({}),
    buffers: Mapping[str, Array] = MappingProxyType({}),
    frozen: Mapping[str, Array] = MappingProxyType({}),
) -> None:
    """A DeepSpeed tag directory of stage 3: every parameter padded and cut by itself.

    `members` are the flat groups of each parameter group, which are one each unless given. `buffers` and `frozen` are
    weights that are not trained.
    """
    options = _options(members or [[i] for i in range(len(groups))])
    folder.mkdir(parents=True)
    module = {n: np.zeros(0, np.float32) for n in (*known.shapes, *frozen)} | dict(buffers)
    for rank in range(world_size):
        flats = [{k: _shares(known, group, k, rank, world_size) for k in ("fp32", *STATES)} for group in groups]
        state = {i: _adam(known.step, flat["exp_avg"], flat["exp_avg_sq"]) for i, flat in enumerate(flats)}
        optimizer = {
            "zero_stage": _stage(3),
            "partition_count": world_size,
            "optimizer_state_dict": {"state": state, "param_groups": options},
            "fp32_flat_groups": [flat["fp32"] for flat in flats],
        }
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        content = torch_bytes({"optimizer_state_dict": optimizer, "ds_config": dict(config)})
        (folder / f"{prefix}_optim_states.pt").write_bytes(content)
        fragments = {n: _share(array, rank, world_size) for n, array in frozen.items()}
        shapes = {n: _size(array.shape) for n, array in frozen.items()}
        parts = {"frozen_param_shapes": shapes, "frozen_param_fragments": fragments} if frozen else {}
        model = _model_file(known, groups, world_size, module, parts)
        (folder / f"{prefix}_model_states.pt").write_bytes(model)


def _share(array: Array, rank: int, world_size: int) -> Array:
    flat = array.reshape(-1)
    return np.split(np.concatenate([flat, np.zeros(-flat.size % world_size, np.float32)]), world_size)[rank]


def _shares(known: KnownStates, group: Sequence[str], kind: str, rank: int, world_size: int) -> Array:
    return np.concatenate([_share(known.arrays[name, kind], rank, world_size) for name in group])


def write_trainer_files(folder: Path, known: KnownStates, *, tied: bool = False) -> None:
    """What the Trainer writes beside the optimizer state: configuration, weights, its own state."""
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {}
    content = b""
    for name in sorted(known.shapes):
        raw = known.arrays[name, "fp32"].tobytes()
        header[name] = record(len(content), len(content) + len(raw), shape=list(known.shapes[name]))
        content += raw
    (folder / "model.safetensors").write_bytes(file_bytes(header, content))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "tie_word_embeddings": tied}))
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": known.step}))


def write_hf(folder: Path, known: KnownStates, *, tied: bool = False) -> None:
    """A plain Trainer checkpoint: optimizer states numbered decayed first."""
    write_trainer_files(folder, known, tied=tied)
    groups = decay_groups(known.shapes)
    names = [n for group in groups for n in group]
    state = {i: _adam(known.step, *(known.arrays[n, k] for k in STATES)) for i, n in enumerate(names)}
    numbers = [list(range(len(groups[0]))), list(range(len(groups[0]), len(names)))]
    options = [{"lr": RATE, "params": n} for n in numbers]
    (folder / "optimizer.pt").write_bytes(torch_bytes({"state": state, "param_groups": options}))


def write_dcp(
    folder: Path,
    known: KnownStates,
    world_size: int,
    *,
    tied: Mapping[str, str] = MappingProxyType({}),
    plain: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """A DCP directory: rows of every tensor spread over the ranks, one archive a chunk, one file a rank.

    `tied` adds weights that are copies of others, by name; `plain` values that are no tensors, by key.
    """
    keyed = _weights(known, tied) | _states(known, "optim")
    _write_chunks(folder, keyed, world_size, plain)


def write_titan(folder: Path, known: KnownStates, world_size: int = 2, *, weights_only: bool = False) -> None:
    """A DCP directory of torchtitan: weights at the top of the state dict, all else in mappings of their own."""
    weights = {n: known.arrays[n, "fp32"] for n in known.shapes}
    paths: dict[str, tuple[str, ...]] = {n: (n,) for n in weights}
    others = {} if weights_only else _states(known, "optimizer")
    others |= {"train_state.step": np.array(known.step, np.float32)}
    paths |= {key: tuple(key.split(".", 1)) for key in others}
    _write_chunks(folder, weights | others, world_size, {}, paths)


def write_automodel(folder: Path, known: KnownStates) -> None:
    """A checkpoint of NeMo Automodel: a DCP directory of weights, with the model's files, and one of the optimizer."""
    weights = {n: known.arrays[n, "fp32"] for n in known.shapes}
    _write_chunks(folder / "model", weights, 2, {}, {n: (n,) for n in weights})
    states = _states(known, "optim")
    _write_chunks(folder / "optim", states, 2, {}, {key: tuple(key.split(".", 1)) for key in states})
    (folder / "model" / ".hf_metadata").mkdir()
    (folder / "model" / ".hf_metadata" / "config.json").write_text(json.dumps({"model_type": "llama"}))


def _weights(known: KnownStates, tied: Mapping[str, str]) -> dict[str, Array]:
    weights = {f"model.{n}": known.arrays[n, "fp32"] for n in known.shapes}
    return weights | {f"model.{alias}": known.arrays[owner, "fp32"] for alias, owner in tied.items()}


def _states(known: KnownStates, key: str) -> dict[str, Array]:
    states = {f"{key}.state.{n}.{k}": known.arrays[n, k] for n in known.shapes for k in STATES}
    return states | {f"{key}.state.{n}.step": _step(known.step) for n in known.shapes}


def write_fsdp(folder: Path, known: KnownStates, *, full: bool, tied: Mapping[str, str] = MappingProxyType({})) -> None:
    """FSDP as Accelerate saves it: sharded over two ranks, or whole; `tied` as in `write_dcp`."""
    folder.mkdir(parents=True)
    if not full:
        keyed = _weights(known, tied)
        paths = {key: tuple(key.split(".", 1)) for key in keyed}
        _write_chunks(folder / "pytorch_model_fsdp_0", keyed, 2, {}, paths)
        _write_chunks(folder / "optimizer_0", _states(known, "optimizer"), 2, {})
        return
    flats = {n: known.arrays[n, "fp32"].reshape(-1) for n in known.shapes}
    weights = {n: View(flats[n], 0, shape) for n, shape in known.shapes.items()}
    weights |= {alias: View(flats[owner], 0, known.shapes[owner]) for alias, owner in tied.items()}
    state = {n: _adam(known.step, *(known.arrays[n, k] for k in STATES)) for n in known.shapes}
    options = [{"lr": RATE, "params": list(known.shapes)}]
    (folder / "pytorch_model_fsdp.bin").write_bytes(torch_bytes(weights))
    (folder / "optimizer.bin").write_bytes(torch_bytes({"state": state, "param_groups": options}))


def write_verl(folder: Path, known: KnownStates, world_size: int = 2, *, replicas: int = 1) -> None:
    """FSDP2 as verl saves it: rows of every tensor spread over the ranks of each replica, one file a rank and kind."""
    folder.mkdir(parents=True)
    n_files = world_size * replicas
    for rank in range(n_files):
        place = (rank % world_size, world_size, replicas)
        model = {n: d_tensor(known.arrays[n, "fp32"], *place) for n in known.shapes}
        state = {
            i: {"step": _step(known.step)} | {k: d_tensor(known.arrays[n, k], *place) for k in STATES}
            for i, n in enumerate(known.shapes)
        }
        for kind, content in (("model", model), ("optim", {"state": state, "param_groups": []})):
            (folder / f"{kind}_world_size_{n_files}_rank_{rank}.pt").write_bytes(torch_bytes(content))


def d_tensor(array: Array, rank: int, world_size: int, replicas: int = 1, dimension: int = 0) -> Call:
    """A tensor cut along a dimension, as a rank pickles it."""
    kind, placements = Named("torch.distributed.tensor", "DTensor"), "torch.distributed.tensor.placement_types"
    share = -(-array.shape[dimension] // world_size)
    rows = np.take(array, range(rank * share, min((rank + 1) * share, array.shape[dimension])), dimension)
    shard = Call(Named(placements, "Shard"), state={"dim": dimension}, new=True)
    replicated = (Call(Named(placements, "Replicate"), new=True),) if replicas > 1 else ()
    specification = {"mesh": None, "placements": (*replicated, shard)}
    spec = Call(Named("torch.distributed.tensor._dtensor_spec", "DTensorSpec"), state=specification, new=True)
    arguments = (kind, Named("torch", "float32"), array.shape, row_major(array.shape), 0)
    state = (None, {"_local_tensor": np.ascontiguousarray(rows), "_spec": spec})
    wrapper = Named("torch._utils", "_rebuild_wrapper_subclass")
    return Call(Named("torch._tensor", "_rebuild_from_type_v2"), (wrapper, kind, arguments, state))


def _write_chunks(
    folder: Path,
    keyed: Mapping[str, Array],
    world_size: int,
    plain: Mapping[str, object],
    paths: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = [bytearray() for _ in range(world_size)]
    described: dict[str, object] = {}
    stored = []
    for key, array in keyed.items():
        chunks = []
        for rank, (start, rows) in enumerate(_rows(array, world_size)):
            offsets = (start, *(0,) * (array.ndim - 1)) if array.ndim else ()
            item = torch_bytes(np.ascontiguousarray(rows))
            chunks.append(_dcp("ChunkStorageMetadata", {"offsets": _size(offsets), "sizes": _size(rows.shape)}))
            index = _dcp("MetadataIndex", {"fqn": key, "index": rank, "offset": _size(offsets)})
            stored.append((index, _place(rank, len(files[rank]), len(item))))
            files[rank] += item
        properties = _dcp("TensorProperties", (Named("torch", "float32"), False))
        described[key] = _dcp(
            "TensorStorageMetadata", {"properties": properties, "size": _size(array.shape), "chunks": chunks}
        )
    for key, value in plain.items():
        item = torch_bytes(value)
        described[key] = _dcp("BytesStorageMetadata", None)
        stored.append((_dcp("MetadataIndex", {"fqn": key, "index": None}), _place(0, len(files[0]), len(item))))
        files[0] += item
    for rank, content in enumerate(files):
        (folder / f"__{rank}_0.distcp").write_bytes(content)
    (folder / ".metadata").write_bytes(_metadata(described, stored, paths))


def _rows(array: Array, world_size: int) -> list[tuple[int, Array]]:
    """Rows as FSDP2 spreads them: ceil(rows / ranks) each, the last ranks fewer or none; a scalar on rank 0."""
    if not array.ndim:
        return [(0, array)]
    share = -(-array.shape[0] // world_size)
    starts = range(0, array.shape[0], share)
    return [(start, array[start : start + share]) for start in starts]


def _dcp(name: str, state: object) -> Call:
    return Call(Named("torch.distributed.checkpoint.metadata", name), state=state, new=True)


def _place(rank: int, offset: int, nbytes: int) -> Call:
    kind = Named("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    state = {"relative_path": f"__{rank}_0.distcp", "offset": offset, "length": nbytes}
    return Call(kind, state=state, new=True)


def _metadata(
    described: Mapping[str, object], stored: Sequence[tuple[Call, Call]], paths: Mapping[str, tuple[str, ...]]
) -> bytes:
    """`.metadata`, whose storage mapping has objects as keys; `paths` says of each key in which mapping it lies."""
    writer = PickleWriter()
    storage = b"}(" + b"".join(writer.encode(key) + writer.encode(place) for key, place in stored) + b"u"
    state = b"}(" + writer.encode("state_dict_metadata") + writer.encode(dict(described))
    state += writer.encode("planner_data") + writer.encode(dict(paths) or None)
    state += writer.encode("storage_data") + storage + b"u"
    kind = Named("torch.distributed.checkpoint.metadata", "Metadata")
    return b"\x80\x02" + writer.encode(kind) + b")\x81" + state + b"b."
