"""The safetensors header of one file: parsed strictly and held against the file's size, never trusted."""

from __future__ import annotations

import unicodedata

from blake3 import blake3

from mergepipe.checkpoints.contract import TensorEntry, WeightHeader
from mergepipe.core.blocks import DTYPES, DType
from mergepipe.core.strict_json import JsonValue, object_members, parse_object, shown
from mergepipe.errors import damaged, did_you_mean, unsupported
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES

MAX_HEADER_BYTES = 16 << 20  # 130,000 tensors in one file; the library takes 100 MB, which are 2 GB as values
FIRST_READ_BYTES = 8 << 10
PREFIX_BYTES = 8
METADATA_KEY = "__metadata__"
_SHARDING_KEY = "DCP_SHARDING_INFO"  # of shards that torch's Hugging Face writer saves
ADAPTER_METADATA_KEY = "lora_adapter_metadata"  # of LoRA files that diffusers saves: their configuration
_KEPT_KEYS = (ADAPTER_METADATA_KEY, "format", "encoding", "sparse")
_MOST_METADATA = 1 << 20
_MAX_COUNT = 2**63 - 1
_SUB_BYTE_DTYPES = frozenset({"F4", "F6_E2M3", "F6_E3M2"})
_ENTRY_KEYS = ("dtype", "shape", "data_offsets")


def read_header(store: Store, path: Location) -> WeightHeader:
    """Read and check the header of `path`; no tensor byte is read. Memory: 10 times the header, of at most 16 MiB.

    Law: the tensors, in order, tile the file from the end of the header on. The digest is of prefix and header.
    """
    size_bytes = store.size_bytes(path)
    content = b"".join(_read_raw(store, path, size_bytes))
    return parse_header(content, path, size_bytes, store.terms(path).granularity_bytes)


def parse_header(content: bytes, path: Location, size_bytes: int, granularity: int = PAGE_BYTES) -> WeightHeader:
    """Check a header, length prefix included, of a file of `size_bytes` that is read in multiples of `granularity`."""
    unsorted: list[TensorEntry] = []
    sharding: str | None = None
    metadata: dict[str, str] = {}
    members = object_members(content[PREFIX_BYTES:], where=path, code="checkpoint.damaged", nested=METADATA_KEY)
    for outer, name, record in members:
        if outer:
            if not isinstance(record, str):
                raise damaged(path, f"{METADATA_KEY} {shown(name)} must be a string, found {shown(record)}")
            if name == _SHARDING_KEY:
                sharding = record
            if name in _KEPT_KEYS and len(record) <= _MOST_METADATA:
                metadata[name] = record
        elif name == METADATA_KEY:
            if record is None:  # as some writers state that there is none
                continue
            raise damaged(path, f"{METADATA_KEY} must be an object of strings, found {shown(record)}")
        else:
            unsorted.append(_entry(path, name, record, len(content), granularity))
    # An empty tensor shares its offset with the next one: it sorts before it.
    entries = tuple(sorted(unsorted, key=lambda e: (e.offset, e.nbytes, e.name)))
    _check_tiling(path, entries, len(content), size_bytes)
    offsets = None if sharding is None else _offsets(path, sharding, entries)
    return WeightHeader(entries, size_bytes, blake3(content).hexdigest(length=16), offsets, metadata)


def _offsets(path: Location, sharding: str, entries: tuple[TensorEntry, ...]) -> dict[str, tuple[int, ...]]:
    """Return where the tensors of a shard begin in the whole ones, a number for each dimension."""
    stated = parse_object(sharding.encode(), where=path, code="checkpoint.damaged")
    offsets = {}
    for entry in entries:
        match stated.get(entry.name):
            case {"saved_offsets": list(numbers)} if len(numbers) == len(entry.shape):
                offsets[entry.name] = tuple(n for n in numbers if type(n) is int and 0 <= n <= _MAX_COUNT)
        if len(offsets.get(entry.name, ())) != len(entry.shape) or entry.name not in offsets:
            message = f"{_SHARDING_KEY} does not say where {shown(entry.name)} of {list(entry.shape)} begins"
            raise damaged(path, message)
    return offsets


def _read_raw(store: Store, path: Location, size_bytes: int) -> tuple[bytes, bytes]:
    """Return the length prefix and the header bytes."""
    is_dear = store.terms(path).request_cost_bytes > 0  # then one request for most headers, not two
    start = store.read_metadata(path, 0, FIRST_READ_BYTES if is_dear else PREFIX_BYTES)
    prefix, rest = start[:PREFIX_BYTES], start[PREFIX_BYTES:]
    if len(prefix) < PREFIX_BYTES:
        message = f"a safetensors file starts with {PREFIX_BYTES} bytes of header length, found {len(prefix)} bytes"
        raise damaged(path, message)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        message = f"the header claims {length} bytes, at most {MAX_HEADER_BYTES} are read"
        raise damaged(path, message, _origin_hint(prefix))
    raw = rest[:length]
    if len(raw) < length and PREFIX_BYTES + length <= size_bytes:
        raw += store.read_metadata(path, PREFIX_BYTES + len(raw), length - len(raw))
    if len(raw) < length:
        message = f"truncated inside the header: {PREFIX_BYTES + length} bytes are needed, the file has {size_bytes}"
        raise damaged(path, message, _origin_hint(prefix))
    if raw[:1] != b"{":
        raise damaged(path, f"the header must start with '{{', found {shown(raw[:8])}")
    return prefix, raw


def _origin_hint(prefix: bytes) -> str:
    """Name what a file that is no safetensors file most often is."""
    if prefix.startswith(b"PK\x03\x04"):
        return "this looks like a PyTorch file: convert it to safetensors"
    return "is it a safetensors file, copied or downloaded to the end?"


def _entry(path: Location, name: str, record: JsonValue, data_start: int, granularity: int) -> TensorEntry:
    _check_name(path, name)
    fields = _fields(path, name, record)
    dtype = _dtype(path, name, fields["dtype"])
    shape = _shape(path, name, fields["shape"])
    begin, end = _data_offsets(path, name, fields["data_offsets"])
    nbytes = _checked_product(path, name, (*shape, dtype.itemsize))
    if end - begin != nbytes:
        needed = f"tensor {shown(name)} of shape {shown(list(shape))} and dtype {dtype.name} needs {nbytes} bytes"
        raise damaged(path, f"{needed}, its data_offsets [{begin}, {end}] give {end - begin}")
    return TensorEntry(name, dtype, shape, path, data_start + begin, nbytes, granularity_bytes=granularity)


def _check_name(path: Location, name: str) -> None:
    if not name:
        raise damaged(path, "a tensor has an empty name")
    # isprintable is fast and mostly True; it also refuses harmless spaces, hence the second look.
    if not name.isprintable() and any(unicodedata.category(c) == "Cc" for c in name):
        raise damaged(path, f"the tensor name {shown(name)} holds control characters")


def _fields(path: Location, name: str, record: JsonValue) -> dict[str, JsonValue]:
    if not isinstance(record, dict):
        raise damaged(path, f"tensor {shown(name)} must be an object, found {shown(record)}")
    for key in _ENTRY_KEYS:
        if key not in record:
            raise damaged(path, f"tensor {shown(name)} has no '{key}'")
    if len(record) > len(_ENTRY_KEYS):
        extra = next(key for key in record if key not in _ENTRY_KEYS)
        message = f"tensor {shown(name)} has an unknown key {shown(extra)}"
        raise damaged(path, message, did_you_mean(extra[:40], _ENTRY_KEYS))
    return record


def _dtype(path: Location, name: str, value: JsonValue) -> DType:
    if not isinstance(value, str):
        raise damaged(path, f"the dtype of tensor {shown(name)} must be a string, found {shown(value)}")
    if value in _SUB_BYTE_DTYPES:
        message = f"tensor {shown(name)} has dtype {value}, whose elements are smaller than a byte; not yet read"
        raise unsupported(path, message)
    if value not in DTYPES:
        message = f"tensor {shown(name)} has the unknown dtype {shown(value)}"
        raise damaged(path, message, did_you_mean(value[:40], tuple(DTYPES)))
    return DTYPES[value]


def _shape(path: Location, name: str, value: JsonValue) -> tuple[int, ...]:
    shape: list[int] = []
    for length in value if isinstance(value, list) else [None]:
        if type(length) is not int or length < 0:  # bool is an int to Python, not to the format
            message = f"the shape of tensor {shown(name)} must be a list of non-negative integers, found {shown(value)}"
            raise damaged(path, message)
        shape.append(length)
    return tuple(shape)


def _checked_product(path: Location, name: str, factors: tuple[int, ...]) -> int:
    """Multiply from the left as a 63-bit machine would: an overflow is one even if a later factor is 0."""
    product = 1
    for factor in factors:
        product *= factor
        if product > _MAX_COUNT or factor > _MAX_COUNT:
            raise damaged(path, f"the shape {shown(list(factors[:-1]))} of tensor {shown(name)} overflows 63 bits")
    return product


def _data_offsets(path: Location, name: str, value: JsonValue) -> tuple[int, int]:
    match value:
        case [begin, end] if type(begin) is int and type(end) is int and 0 <= begin <= end:
            return begin, end
    needed = "two integers with 0 <= begin <= end"
    raise damaged(path, f"the data_offsets of tensor {shown(name)} must be {needed}, found {shown(value)}")


def _check_tiling(path: Location, entries: tuple[TensorEntry, ...], data_start: int, size_bytes: int) -> None:
    """Check that the sorted entries follow one another without overlap or hole, up to the end of the file."""
    end, last = data_start, "the header"
    for entry in entries:
        if entry.offset != end:
            starts = f"tensor {shown(entry.name)} starts at byte {entry.offset - data_start} of the data"
            message = f"{starts}, {last} ends at {end - data_start}"
            raise damaged(path, f"{message}; tensors must follow one another without overlap or hole")
        if entry.nbytes:
            end, last = entry.offset + entry.nbytes, f"tensor {shown(entry.name)}"
    if end > size_bytes:
        message = f"truncated: the header describes {end} bytes, the file has {size_bytes}"
        raise damaged(path, message, "copy or download it again")
    if end < size_bytes:
        left = f"{size_bytes - end} bytes are in no tensor"
        raise damaged(path, f"the header describes {end} bytes, the file has {size_bytes}: {left}")
