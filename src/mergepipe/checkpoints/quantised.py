"""Weights stored as codes and scales, told by their names and dtypes: scaled FP8 is read as numbers, others refused."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, ComputedTensor, Fetch, Readable, TensorEntry
from mergepipe.checkpoints.directory import component_of
from mergepipe.checkpoints.open_files import decoded_into, read_span
from mergepipe.core.blocks import BF16, F8_E4M3, F8_E5M2, F32, DType, DTypeKind, Span
from mergepipe.core.strict_json import parse_object, shown
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.contract import RangeFile, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.limits import CONFIG_BYTES
from mergepipe.storage.location import Location

_CONFIG_NAME = "config.json"
QUANTIZATION_KEY = "quantization_config"
_HINT = "convert it to bfloat16 first, with the tool that made it"
# The last parts of names that stand for codes by themselves.
_CODES = (
    (re.compile(r"(.+)\.qweight"), "GPTQ or AWQ"),
    (re.compile(r"(.+)\.weight_packed"), "compressed-tensors, packed"),
    (re.compile(r"(.+)\.weight\.(absmax|quant_map|nested_absmax|quant_state\..+)"), "bitsandbytes, 4 bits"),
    (re.compile(r"(.+)\.(SCB|weight_format)"), "bitsandbytes, 8 bits"),
    (re.compile(r"(.+)_blocks"), "MXFP4 blocks"),
)
# Scales say so only beside a tensor that is not plain floating point: `X.weight_scale` beside `X.weight`, or
# `X_scales` beside `X`.
_SCALE = re.compile(r"(.+?)(\.weight)?[._](scale|scales|scale_inv|scale_2|zero_point)")
_FP8 = (F8_E4M3, F8_E5M2)
_SCALE_ENDINGS = (".weight_scale_inv", ".weight_scale")
_ACTIVATION_SCALES = re.compile(r"(.+)\.(input_scale|output_scale|activation_scale|[kqv]_scale)")
_BLOCK = 128  # rows and columns of a block, unless the configuration says otherwise


@dataclass(frozen=True, slots=True)
class ScaledFP8(ComputedTensor):
    """A matrix of FP8 codes times scales: one for all, one for each row, or one for each block of rows and columns.

    Read as float32: `float32(code) * float32(scale)`, which is what transformers and compressed-tensors compute before
    they round. A span costs the pages of its codes and those of the scales of its rows; nothing is kept.
    """

    codes: TensorEntry
    scales: TensorEntry
    block: tuple[int, int]

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def dtype(self) -> DType:
        return F32

    @property
    def stored_dtype(self) -> DType:
        """The dtype that such a model has where it is not quantised."""
        return BF16

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def is_delta(self) -> bool:
        return False

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return self.codes, self.scales

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def cost_bytes(self, span: Span) -> int:
        if not span.n_elements:
            return 0
        return self.codes.cost_bytes(span) + self.scales.cost_bytes(self.scales_of(span))

    def scales_of(self, span: Span) -> Span:
        """The scales of the rows that a span touches."""
        (rows, columns), (_, n_columns) = self.block, self.shape
        first, last = span.start // n_columns // rows, (span.stop - 1) // n_columns // rows
        a_row = -(-n_columns // columns)
        return Span(first * a_row, (last + 1) * a_row)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps nothing."""
        return _ScaledFetch(self, files)


@dataclass(frozen=True, slots=True)
class _ScaledFetch:
    """Reads codes and their scales, and multiplies them."""

    tensor: ScaledFP8
    files: Mapping[Location, RangeFile]

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
        tensor, values = self.tensor, out.view(np.float32)
        if not span.n_elements:
            return
        (rows, columns), n_columns, kept = tensor.block, tensor.shape[1], tensor.scales_of(span)
        raw = read_span(tensor.scales, kept, self.files, purpose)
        scales = decoded_into(raw, tensor.scales.kernel_code, np.empty(kept.n_elements, np.float32))
        scales = scales.reshape(-1, -(-n_columns // columns))
        decoded_into(read_span(tensor.codes, span, self.files, purpose), tensor.codes.kernel_code, values)
        first_row = span.start // n_columns // rows
        for row, n_rows, start, stop in _stretches(span, n_columns, rows):
            scale_N = np.repeat(scales[row // rows - first_row], columns)[start:stop]
            at = row * n_columns + start - span.start
            values[at : at + n_rows * len(scale_N)].reshape(n_rows, -1)[:] *= scale_N


def _stretches(span: Span, n_columns: int, rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Cut a span into rows that share scales: the first row, their number, and the columns `[start, stop)` of each.

    Only the first and the last row of a span may be cut.
    """
    at = span.start
    while at < span.stop:
        row, start = divmod(at, n_columns)
        n_rows = 1 if start else max(1, min(rows - row % rows, (span.stop - at) // n_columns))
        stop = min(n_columns, start + span.stop - at)
        yield row, n_rows, start, stop
        at += n_rows * (stop - start)


def dequantised(store: Store, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with scaled FP8 weights as numbers; one without codes as it is.

    Raises:
        UnsupportedError: `model.unsupported`, weights are codes of another scheme.
        CorruptError: `checkpoint.damaged`, scales do not have the shape that their weight asks for.
    """
    scale_of = dict(_scales(checkpoint.tensors))
    if scale_of:
        stated, folders = _quantization_configs(store, checkpoint), checkpoint.components
        read = {
            name: ScaledFP8(codes, scales, _block_of(checkpoint, codes, scales, stated[component_of(name, folders)]))
            for name, (codes, scales) in scale_of.items()
        }
        gone = {scales.name for _, scales in scale_of.values()}
        gone |= {name for name in checkpoint.tensors if _is_activation_scale(name, read)}
        tensors = {name: read.get(name, tensor) for name, tensor in checkpoint.tensors.items() if name not in gone}
        checkpoint = replace(checkpoint, tensors=MappingProxyType(tensors), quantisation="FP8 with scales")
    refuse_quantised(store, checkpoint)
    return checkpoint


def _scales(tensors: Mapping[str, Readable]) -> Iterator[tuple[str, tuple[TensorEntry, TensorEntry]]]:
    """Yield the FP8 matrices that have scales, by name, with these."""
    for name, scales in tensors.items():
        ending = next((ending for ending in _SCALE_ENDINGS if name.endswith(ending)), None)
        codes = tensors.get(f"{name.removesuffix(ending)}.weight") if ending else None
        if not isinstance(codes, TensorEntry) or not isinstance(scales, TensorEntry):
            continue
        if codes.dtype in _FP8 and len(codes.shape) == 2 and scales.dtype.kind is DTypeKind.FLOAT:
            yield codes.name, (codes, scales)


def _is_activation_scale(name: str, read: Mapping[str, ScaledFP8]) -> bool:
    match = _ACTIVATION_SCALES.fullmatch(name)
    if match is None:
        return False
    return f"{match[1]}.weight" in read or any(other.startswith(f"{match[1]}.") for other in read)


def _block_shape(stated: Mapping[str, object]) -> tuple[int, int]:
    """The rows and columns of a block that a configuration states, or those that such models have."""
    shape = stated.get("weight_block_size")
    if isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and n > 0 for n in shape):
        return shape[0], shape[1]
    return _BLOCK, _BLOCK


def _block_of(
    checkpoint: Checkpoint, codes: TensorEntry, scales: TensorEntry, stated: Mapping[str, object]
) -> tuple[int, int]:
    """How many rows and columns share a scale: all, one row, or a block."""
    block, (rows, columns) = _block_shape(stated), codes.shape
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.n_elements == 1:
        return max(1, rows), max(1, columns)
    if scales.shape in ((rows,), (rows, 1)):
        return 1, max(1, columns)
    if scales.shape == blocks:
        return block
    message = (
        f"{shown(scales.name)} has the shape {list(scales.shape)}; for {shown(codes.name)} of {list(codes.shape)} it"
        f" must be [1], [{rows}, 1] or {list(blocks)}, a scale for each block of {block[0]} x {block[1]}"
    )
    raise CorruptError.of("checkpoint.damaged", checkpoint.path, message, "download it again")


def refuse_quantised(store: Store, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose weights are codes."""
    tensors = checkpoint.tensors
    for name in tensors:
        quantisation = _code_format(name, tensors) or _scaled(name, tensors)
        if quantisation:
            what = f"{shown(name)} shows that the weights are quantised ({quantisation})"
            raise UnsupportedError.of("model.unsupported", checkpoint.path, what, _HINT)
    declared = _declared(store, checkpoint)
    if declared:
        raise UnsupportedError.of("model.unsupported", checkpoint.path, declared, _HINT)


def _code_format(name: str, tensors: Mapping[str, Readable]) -> str:
    for pattern, what in _CODES:
        if pattern.fullmatch(name) and not (name.endswith("_blocks") and name[:-6] + "scales" not in tensors):
            return what
    return ""


def _scaled(name: str, tensors: Mapping[str, Readable]) -> str:
    match = _SCALE.fullmatch(name)
    if not match:
        return ""
    for beside in (f"{match[1]}.weight", match[1]):
        tensor = tensors.get(beside)
        if tensor is not None and _is_code(tensor):
            return f"{tensor.dtype.name} with scales"
    return ""


def _is_code(tensor: Readable) -> bool:
    return tensor.dtype in _FP8 or tensor.dtype.kind is not DTypeKind.FLOAT


def _declared(store: Store, checkpoint: Checkpoint) -> str:
    """Return the quantisation that the configuration declares; empty where weights are plain."""
    coded = [tensor for tensor in checkpoint.tensors.values() if _is_code(tensor) and len(tensor.shape) > 1]
    stated = _quantization_configs(store, checkpoint) if coded else {}
    for tensor in coded:
        folder = component_of(tensor.name, checkpoint.components)
        if stated[folder]:
            method = shown(stated[folder].get("quant_method", "unnamed"))
            name = f"{folder}/{_CONFIG_NAME}" if folder else _CONFIG_NAME
            return f"{name} declares the quantisation {method}, and {shown(tensor.name)} is {tensor.dtype.name}"
    return ""


def _quantization_configs(store: Store, checkpoint: Checkpoint) -> dict[str, Mapping[str, object]]:
    """What the configurations of a checkpoint and of its components say of a quantisation, by folder."""
    return {folder: _quantization_config(store, checkpoint, folder) for folder in ("", *checkpoint.components)}


def _quantization_config(store: Store, checkpoint: Checkpoint, folder: str) -> Mapping[str, object]:
    """What one configuration says of a quantisation; empty where it says nothing."""
    name = f"{folder}/{_CONFIG_NAME}" if folder else _CONFIG_NAME
    if name not in checkpoint.sidecars:
        return {}
    raw = store.read_small(checkpoint.root / name, CONFIG_BYTES)
    config = parse_object(raw, where=checkpoint.root / name, code="checkpoint.damaged").get(QUANTIZATION_KEY)
    return config if isinstance(config, dict) else {}
