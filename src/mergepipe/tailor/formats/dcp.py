"""torch.distributed.checkpoint directories (FSDP2): every chunk is a small torch.save archive inside a shared file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from mergepipe.checkpoints.directory import is_plain_name
from mergepipe.checkpoints.inert_pickle import TORCH_DTYPES, PickledTensor, Record, load_inert
from mergepipe.checkpoints.torch_file import read_torch_zip, walk
from mergepipe.checkpoints.zip_directory import Window, read_zip_directory
from mergepipe.core.blocks import DType, Span, element_count
from mergepipe.core.strict_json import shown
from mergepipe.core.units import first_names
from mergepipe.errors import NotFoundError, damaged, mismatched, unsupported
from mergepipe.storage.contract import PICKLE_BYTES, Store, is_file, map_at_once
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import WEIGHT, AdamStep, Framework, Piece, StoredState, Strip, TrainingCheckpoint
from mergepipe.tailor.formats.contract import (
    NO_OPTIMIZER,
    Node,
    TrainingFormat,
    read_scalar,
    refuse_foreign_states,
    step_of_name,
)
from mergepipe.tailor.pickle_writer import torch_size
from mergepipe.tailor.selection import model_units

# --- the metadata of torch DCP directories as inert values that are changed and written back ---


_SIZED_FIELDS = {
    "TensorStorageMetadata": ("size",),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "MetadataIndex": ("offset",),
}
_DESCRIBED = "state_dict_metadata"
_STORED = "storage_data"
_KEYS = "planner_data"


def read_dcp_metadata(store: Store, folder: Location) -> object:
    """Read `.metadata`; shapes are `torch_size`, so that it can be written back."""
    metadata = _load_metadata(store, folder)
    _restore_sizes(metadata)
    return metadata


def _load_metadata(store: Store, folder: Location) -> object:
    path = folder / METADATA_NAME
    if not is_file(store, path):
        raise NotFoundError.of("checkpoint.incomplete", folder, "there is no .metadata file")
    return load_inert(store.read_small(path, PICKLE_BYTES), str(path))


def _restore_sizes(root: object) -> None:
    """Make shapes `torch.Size` again, which the inert reader turns into tuples."""
    for _, value in walk(root):
        state = value.state if isinstance(value, Record) and isinstance(value.state, dict) else {}
        for field in _SIZED_FIELDS.get(value.kind.name, ()) if isinstance(value, Record) else ():
            if isinstance(state.get(field), tuple):
                state[field] = torch_size(state[field])


def merge_state(metadata: object, folder: Location, state: object, state_folder: Location) -> dict[str, str]:
    """Take every entry of `state` into `metadata` (changed in place), in place of entries of the same key.

    Returns the state's files with the names they must have beside `metadata`.
    """
    metadata_root, new = _root(metadata, folder), _root(state, state_folder)
    described, added = metadata_root.get(_DESCRIBED).mapping(), new.get(_DESCRIBED).mapping()
    plain = [k for k, v in described.items() if isinstance(v, Record) and v.kind.name == "BytesStorageMetadata"]
    lacking = [str(key) for key in plain if key not in added]
    if lacking:
        hint = "save the same state in every partial checkpoint, or name a complete one in state_from"
        raise mismatched(state_folder, f"lacks {first_names(lacking)}, which {folder} holds", hint)
    described.update(added)
    keys, added_keys = metadata_root.find(_KEYS), new.find(_KEYS)
    if keys is not None and added_keys is not None:
        keys.mapping().update(added_keys.mapping())
    stored = metadata_root.get(_STORED).mapping()
    for index in [*stored]:
        if Node(index, metadata_root.file).fields("MetadataIndex").get("fqn").text() in added:
            del stored[index]
    renamed: dict[str, str] = {}
    for index, place in new.get(_STORED).items():
        fields = place.fields("_StorageInfo")
        relative = fields.get("relative_path").text()
        if not is_plain_name(relative):
            raise unsupported(state_folder, f"its state lies in {relative[:80]!r}")
        renamed[relative] = f"state-{relative}"
        fields.mapping()["relative_path"] = renamed[relative]
        stored[index] = place.value
    return renamed


def _root(metadata: object, folder: Location) -> Node:
    return Node(metadata, str(folder / METADATA_NAME)).fields("Metadata")


# --- torch.distributed.checkpoint directories (FSDP2) ---
# every chunk is a small torch.save archive inside a shared file


DCP_FORMAT = "torch-dcp"
METADATA_NAME = ".metadata"
_NAME_LIMIT = 200
_STATE_KEY = re.compile(r"(?:|.*?\.)state\.(?P<name>.+)\.(?P<kind>[a-z_]+)", re.ASCII)
_ELEMENTS = "/data/0"
_LEAST_TIED_DIMENSIONS = 2
_METADATA_KINDS = ("Metadata", "MCoreMetadata")  # the second is Megatron's
_FILE_NAME = re.compile(r"__(\d+)_\d+\.distcp", re.ASCII)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One stored part of a tensor: `offsets` and `sizes` by dimension, and its archive's place."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Location
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class DcpTensor:
    """One tensor of the state dict; `container` is the name of the mapping that it lies in, empty at the top."""

    key: str
    container: str
    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


def read_dcp(store: Store, folder: Location, home: Location | None = None) -> TrainingCheckpoint:
    """Read a DCP directory; of tensors, only step counters are read.

    Its pieces are packed (`is_packed`): `unpack_piece` finds the elements inside one. The step is the newest
    counter, of weights alone the number in the name of `home`.
    """
    return dcp_checkpoint(store, folder, read_tensors(store, folder), home)


def read_tensors(store: Store, folder: Location) -> Iterator[DcpTensor]:
    """Yield the tensors that a DCP directory describes; no tensor byte is read. Raises as `read_dcp`."""
    root = _load_metadata(store, folder)
    name = root.kind.name if isinstance(root, Record) else ""
    metadata = Node(root, str(folder / METADATA_NAME)).fields(name if name in _METADATA_KINDS else "Metadata")
    stored = _storage(metadata, folder)
    keys = metadata.find(_KEYS)
    paths = {} if keys is None else {key: path.value for key, path in keys.items()}
    for key, node in metadata.get("state_dict_metadata").named_items():
        if not isinstance(node.value, Record) or node.value.kind.name != "TensorStorageMetadata":
            continue  # bytes: options and the like, of no parameter
        fields = node.fields("TensorStorageMetadata")
        shape = fields.get("size").shape()
        chunks = []
        for chunk in fields.get("chunks").elements():
            place = chunk.fields("ChunkStorageMetadata")
            offsets, sizes = place.get("offsets").shape(), place.get("sizes").shape()
            same = len(offsets) == len(sizes) == len(shape)
            if not same or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
                raise chunk.error(f"a chunk of {sizes} at {offsets} is outside the tensor's shape {shape}")
            if (key, offsets) not in stored:
                raise chunk.error(f"tensor {key[:80]!r}: the chunk at {offsets} is in no file")
            chunks.append(_Chunk(offsets, sizes, *stored[(key, offsets)]))
        path = paths.get(key)
        container = ".".join(map(str, path[:-1])) if isinstance(path, tuple) else ""
        yield DcpTensor(key, container, _dtype(fields), shape, tuple(chunks))


def tensor_keys(store: Store, folder: Location) -> dict[tuple[str, str], str]:
    """Return the keys of a DCP directory's tensors, by parameter or alias and kind; counters are of the kind `step`."""
    optimizer, weights = _classify({tensor.key: tensor for tensor in read_tensors(store, folder)}, folder)
    keys = {(name, WEIGHT): tensor.key for name, tensor in weights.items()}
    return keys | {state: tensor.key for state, tensor in optimizer.items()}


def dcp_checkpoint(
    store: Store, folder: Location, described: Iterable[DcpTensor], home: Location | None = None
) -> TrainingCheckpoint:
    """Make the checkpoint of a state dict's tensors, of one directory or of several. Raises as `read_dcp`."""
    tensors = {tensor.key: tensor for tensor in described}
    optimizer, weights = _classify(tensors, folder)
    states = {(name, WEIGHT): tensor_state(tensor, name, WEIGHT) for name, tensor in weights.items()}
    states |= {(n, k): tensor_state(t, n, k) for (n, k), t in optimizer.items() if k != "step"}
    counters = [(name, tensor) for (name, kind), tensor in optimizer.items() if kind == "step"]
    steps = tuple(map_at_once(store, [folder], lambda counter: _step(store, *counter), counters))
    tied = dict(_aliases(store, weights, frozenset(name for name, _ in optimizer)))
    parameters = {name: tensor.shape for name, tensor in weights.items() if name not in tied}
    world_size, missing = find_files(store, tensors.values())
    missing += [f"part of {kind} of {name}" for (name, kind), state in states.items() if state.gaps]
    missing += [] if optimizer else [NO_OPTIMIZER]
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=DCP_FORMAT,
        world_size=world_size,
        step=int(max((s.value for s in steps), default=step_of_name((home or folder).name) or 0)),
        units=model_units(parameters, tied),
        parameters=parameters,
        states=states,
        steps=steps,
        missing=tuple(missing),
    )


def find_files(store: Store, tensors: Iterable[DcpTensor]) -> tuple[int, list[str]]:
    """Count the ranks that wrote the files of some tensors, one at least; list the files that are not there.

    Raises:
        CorruptError: one ends before its chunks do.
    """
    chunks = sorted((c for t in tensors for c in t.chunks), key=lambda c: (c.file, c.offset + c.nbytes))
    missing = []
    ends = {chunk.file: chunk.offset + chunk.nbytes for chunk in chunks}
    for file, end in ends.items():
        status = store.stat(file)
        if status is None or not status.is_file:
            missing.append(f"file {file.name}")
        elif status.size_bytes < end:
            raise damaged(file, f"has {status.size_bytes} bytes, {METADATA_NAME} needs {end}: it was cut off")
    return len({match[1] for file in ends if (match := _FILE_NAME.fullmatch(file.name))}) or 1, missing


def unpack_piece(store: Store, piece: Piece, dtype: DType) -> Piece:
    """Find the elements inside a packed piece, or those of its strips; another piece is returned as it is."""
    if not piece.is_packed:
        return piece
    if not piece.strips:
        offset, nbytes = _unpacked(store, piece, piece.span.n_elements, dtype)
        return replace(piece, offset=offset, nbytes=nbytes, is_packed=False)
    rows = piece.span.n_elements // sum(strip.width for strip in piece.strips)
    located = [(strip, *_unpacked(store, strip, rows * strip.width, dtype)) for strip in piece.strips]
    strips = tuple(replace(strip, offset=offset, nbytes=nbytes) for strip, offset, nbytes in located)
    return Piece(strips[0].file, strips[0].offset, strips[0].nbytes, piece.span, strips=strips)


def _unpacked(store: Store, packed: Piece | Strip, n_elements: int, dtype: DType) -> tuple[int, int]:
    """Find the offset and the bytes of the elements that an archive holds."""
    where = f"{packed.file} [{packed.offset}, {packed.offset + packed.nbytes})"
    archive = read_torch_zip(store, packed.file, Window(packed.file, packed.offset, packed.nbytes))
    if not isinstance(archive.root, PickledTensor):
        raise damaged(where, "the archive does not hold a tensor")
    tensor = archive.locate(archive.root, "the tensor")
    if tensor.dtype != dtype or tensor.n_elements != n_elements:
        raise damaged(where, f"{tensor.n_elements} elements of {tensor.dtype.name}, not {n_elements} of {dtype.name}")
    return tensor.offset, tensor.nbytes


def _dtype(fields: Node) -> DType:
    """The dtype: the first of the properties' state, which is a tuple."""
    name = fields.get("properties").fields("TensorProperties").elements()[0].name()
    if name.module != "torch" or name.name not in TORCH_DTYPES:
        raise fields.error(f"dtype {name} is unknown")
    return TORCH_DTYPES[name.name]


def _storage(metadata: Node, folder: Location) -> dict[tuple[str, tuple[int, ...]], tuple[Location, int, int]]:
    """Return the file, offset and size of each (tensor, offsets)."""
    pieces = {}
    files: dict[str, Location] = {}
    for key, node in metadata.get("storage_data").items():
        index = Node(key, node.file, node.path).fields("MetadataIndex")
        place = node.fields("_StorageInfo")
        if place.find("transform_descriptors") is not None:
            raise unsupported(node.file, "chunks are compressed or transformed")
        offsets = index.find("offset")
        name = (index.get("fqn").text(), offsets.shape() if offsets is not None else ())
        relative = place.get("relative_path").text()
        if relative not in files:
            if not all(is_plain_name(part) and len(part) < _NAME_LIMIT for part in relative.split("/")):
                raise place.error(f"the file {shown(relative)} is outside the checkpoint's folder")
            files[relative] = (folder.absolute() / relative).normal()
        pieces[name] = (files[relative], place.get("offset").integer(), place.get("length").integer())
    return pieces


def _classify(
    tensors: Mapping[str, DcpTensor], folder: Location
) -> tuple[dict[tuple[str, str], DcpTensor], dict[str, DcpTensor]]:
    """Tell optimizer states, by (parameter, kind), from weights, by parameter, whatever the state dict calls them.

    Weights are found by the names the optimizer states give; what stands before them gives the prefix of all weights.
    Without a prefix other things may stand beside them (torchtitan's step, under `train_state`): mappings of scalars
    that have no optimizer state are none.
    """
    refuse_foreign_states(frozenset(key.rpartition(".")[2] for key in tensors if "state." in key), folder)
    states: dict[tuple[str, str], DcpTensor] = {}
    for key, tensor in tensors.items():
        match = _STATE_KEY.fullmatch(key)
        if match:
            states[(match["name"], match["kind"])] = tensor
    names = {name for name, _ in states}
    others = {key: tensor for key, tensor in tensors.items() if not _STATE_KEY.fullmatch(key)}
    prefix = _trained_prefix(names, others.keys(), folder) if names else _largest_container(others.values(), folder)
    holding = {tensor.container for tensor in others.values() if element_count(tensor.shape) > 1}
    weights = {
        key.removeprefix(prefix): tensor
        for key, tensor in others.items()
        if key.startswith(prefix) and (prefix or key in names or not tensor.container or tensor.container in holding)
    }
    return states, weights


_STATE_DICT_NAMES = ("model", "state_dict", "module")


def _trained_prefix(names: AbstractSet[str], keys: AbstractSet[str], folder: Location) -> str:
    """Find what stands before the names of all trained weights."""
    first = min(names)  # what stands before all names stands before any one
    prefixes = {key.removesuffix(first) for key in keys if key == first or key.endswith(f".{first}")}
    complete = [prefix for prefix in prefixes if all(prefix + name in keys for name in names)]
    if not complete:
        message = "has optimizer state without the weights that it belongs to"
        raise unsupported(folder, message, "save both: {'model': ..., 'optim': ...} of get_state_dict")
    return min(complete, key=len)


def _largest_container(tensors: Iterable[DcpTensor], folder: Location) -> str:
    """Find what stands before the names of weights that have no optimizer.

    It is the mapping that is called as state dicts are, else the one that holds most elements.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors:
        outermost = tensor.container.partition(".")[0]
        sizes[outermost] = sizes.get(outermost, 0) + element_count(tensor.shape)
    if not sizes:
        raise unsupported(folder, "holds no tensors")
    named = (name for name in _STATE_DICT_NAMES if name in sizes)
    largest = next(named, max(sizes, key=lambda container: sizes[container]))
    return f"{largest}." if largest else ""


def _aliases(store: Store, weights: Mapping[str, DcpTensor], trained: AbstractSet[str]) -> Iterator[tuple[str, str]]:
    """Weights that are stored under two names, as (alias, owner): the alias has no optimizer state of its own.

    Bytes are compared by the checksums of their archives; vectors, which can be alike by chance, are not looked at.
    """
    for alias, tensor in weights.items():
        if alias in trained or len(tensor.shape) < _LEAST_TIED_DIMENSIONS:
            continue
        alike = (name for name in weights if name in trained and _layout(weights[name]) == _layout(tensor))
        owner = next((name for name in alike if _checksums(store, weights[name]) == _checksums(store, tensor)), None)
        if owner is not None:
            yield alias, owner


def _layout(tensor: DcpTensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, frozenset((chunk.offsets, chunk.sizes) for chunk in tensor.chunks)


def _checksums(store: Store, tensor: DcpTensor) -> dict[tuple[int, ...], int]:
    """The CRC-32 of every chunk's elements, as its archive has noted it."""
    checksums = {}
    for chunk in tensor.chunks:
        members = read_zip_directory(store, Window(chunk.file, chunk.offset, chunk.nbytes)) if chunk.nbytes else {}
        checksums[chunk.offsets] = next((m.crc32 for name, m in members.items() if name.endswith(_ELEMENTS)), 0)
    return checksums


def tensor_state(tensor: DcpTensor, name: str, kind: str) -> StoredState:
    """Make the state of a tensor, its pieces in the order of their elements."""
    pieces = sorted(_pieces(tensor), key=lambda p: p.span.start)
    for a, b in pairwise(pieces):
        if b.span.start < a.span.stop:
            raise damaged(tensor.key, f"chunks overlap at element {b.span.start}")
    return StoredState(name, kind, tensor.dtype, tensor.shape, tuple(pieces))


def _pieces(tensor: DcpTensor) -> Iterator[Piece]:
    """Yield runs of elements, and rows of which several chunks hold a strip each; incomplete rows are left out."""
    shape = tensor.shape
    strips: dict[tuple[Span, int], dict[int, Strip]] = {}
    for chunk in tensor.chunks:
        sizes, start = chunk.sizes, 0
        if not element_count(sizes):
            continue
        for offset, length in zip(chunk.offsets, shape, strict=True):
            start = start * length + offset
        long = next((place for place, size in enumerate(sizes) if size != 1), len(sizes))
        cut = max((place for place, size in enumerate(sizes) if size != shape[place]), default=0)
        if long >= cut:
            span = Span(start, start + element_count(sizes))
            yield Piece(chunk.file, chunk.offset, chunk.nbytes, span, is_packed=True)
            continue
        if sizes[long + 1 : cut] != shape[long + 1 : cut]:
            hint = "only grids of rows and columns are read (FSDP2, tensor parallelism)"
            raise unsupported(tensor.key, f"a chunk of {sizes} of {shape} is not a range of rows or columns", hint)
        inner = element_count(shape[cut + 1 :])
        column, row = chunk.offsets[cut] * inner, shape[cut] * inner
        rows = Span(start - column, start - column + element_count(sizes[long:cut]) * row)
        strips.setdefault((rows, row), {})[column] = Strip(chunk.file, chunk.offset, chunk.nbytes, sizes[cut] * inner)
    for (rows, row), by_column in strips.items():
        ordered = tuple(by_column[column] for column in sorted(by_column))
        ends = [0, *accumulate(strip.width for strip in ordered)]
        if any(end > column for end, column in zip(ends, sorted(by_column), strict=False)):
            raise damaged(tensor.key, f"chunks overlap in rows from {rows.start} on")
        if ends[-1] == row:
            first = ordered[0]
            yield Piece(first.file, first.offset, first.nbytes, rows, is_packed=True, strips=ordered)


def _step(store: Store, name: str, tensor: DcpTensor) -> AdamStep:
    if element_count(tensor.shape) != 1 or len(tensor.chunks) != 1:
        raise damaged(tensor.key, f"a step counter has shape {tensor.shape}")
    chunk = tensor.chunks[0]
    packed = Piece(chunk.file, chunk.offset, chunk.nbytes, Span(0, 1), is_packed=True)
    inside = unpack_piece(store, packed, tensor.dtype)
    return AdamStep(
        read_scalar(store.read_metadata, inside.file, inside.offset, tensor.dtype), (name,), tensor.dtype, (packed,)
    )


DCP = TrainingFormat(
    DCP_FORMAT,
    f"{METADATA_NAME} (torch DCP)",
    lambda store, path: is_file(store, path / METADATA_NAME),
    read_dcp,
    state_file=METADATA_NAME,
    partial_frameworks=frozenset(Framework),
)
