"""Weights stored as codes and scales, told by their names, dtypes and shapes: read as numbers, or refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.codes import (
    E8M0_EXPONENTS,
    U8_EXPONENTS,
    BitsAndBytes4,
    BitsAndBytes8,
    CodedTensor,
    PackedBits,
    PackedFP4,
    PackedIntegers,
    PackedTransposed,
    ScaledFP8,
    StackedMXFP4,
    codes_in_words,
)
from mergepipe.checkpoints.contract import Checkpoint, CheckpointFile, Readable, TensorEntry
from mergepipe.checkpoints.directory import component_of
from mergepipe.checkpoints.open_files import open_files, read_span
from mergepipe.checkpoints.requantised import Requantised
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.blocks import BF16, F8_E4M3, F8_E5M2, F16, F32, F64, DType, DTypeKind, Span
from mergepipe.core.strict_json import digest_of, parse_object, shown
from mergepipe.errors import UnsupportedError, damaged
from mergepipe.storage.contract import CONFIG_BYTES, Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location

QUANTIZATION_KEY = "quantization_config"
MASK_BITS = "mask_bits"
"""The last part of the name of a mask, of what `explain` writes: a bit for each element of the tensor named before."""
MODELOPT_NAME = "hf_quant_config.json"  # where vLLM looks for a quantisation that the configuration does not state
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
_SCALE = re.compile(r"(.+?)(\.weight)?[._](scale|scales|scale_inv|scale_2|zero_point|qscale_weight)")
_FP8 = (F8_E4M3, F8_E5M2)
_FLOATS = (BF16.name, F16.name, F32.name, F64.name)  # of scales: the libraries multiply by any of them
_EXPONENTS = {"U8": U8_EXPONENTS, "F8_E8M0": E8M0_EXPONENTS}  # of powers of two
_ACTIVATION_SCALES = re.compile(
    r"(.+)\.(input_scale|input_global_scale|output_scale|activation_scale|qscale_act|[kqv]_scale)"
)
_MOST_STATE_BYTES = 1 << 16  # of the description of one weight of bitsandbytes
_BLOCK = 128  # rows and columns of a block, unless the configuration says otherwise


def dequantised(store: Store, checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with weights of known schemes as numbers; one without codes as it is.

    Raises:
        UnsupportedError: `model.unsupported`, weights are codes of another scheme.
        CorruptError: `checkpoint.damaged`, scales do not have the shape that their weight asks for.
    """
    finder = _Finder(store, checkpoint)
    for name, tensor in checkpoint.tensors.items():
        if isinstance(tensor, TensorEntry):
            finder.look_at(name)
    if finder.made:
        made = finder.made
        gone = finder.used | {name for name in checkpoint.tensors if _is_activation_scale(name, finder.names)}
        kept = {name: tensor for name, tensor in checkpoint.tensors.items() if name in made or name not in gone}
        tensors = {(made.get(name) or tensor).name: made.get(name, tensor) for name, tensor in kept.items()}
        quantisation = ", ".join(sorted(finder.schemes))
        files = _with_schemes(checkpoint.files, made.values())
        checkpoint = replace(checkpoint, tensors=MappingProxyType(tensors), files=files, quantisation=quantisation)
    refuse_quantised(store, checkpoint)
    return checkpoint


def _with_schemes(files: Iterable[CheckpointFile], made: Iterable[CodedTensor]) -> tuple[CheckpointFile, ...]:
    """Add how codes are read, which the configuration decides, to the header digests of the files that hold them."""
    schemes: dict[Location, list[list[str]]] = {}
    for tensor in made:
        for location in tensor.files:
            schemes.setdefault(location, []).append([tensor.name, repr(tensor.scheme)])

    result = []
    for file in files:
        of_file = schemes.get(file.location)
        if of_file is not None:
            digest = digest_of([file.id.header_digest, sorted(of_file)])
            file = replace(file, id=replace(file.id, header_digest=digest))
        result.append(file)
    return tuple(result)


@dataclass(frozen=True, slots=True)
class _Part:
    """What a scheme wants of a stored tensor: a dtype, and a shape in which dimensions of 1 do not count."""

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]

    def difference(self, part: TensorEntry) -> tuple[str, str] | None:
        """Return what a stored tensor is and what it must be; None where it is as wanted."""
        if part.dtype.name not in self.dtypes:
            return f"is stored as {part.dtype.name}", " or ".join(self.dtypes)
        if _without_ones(part.shape) != _without_ones(self.shape):
            return f"has the shape {list(part.shape)}", f"{list(self.shape)}"
        return None


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


class _Finder:
    """Goes through the names of a checkpoint, and puts the stored tensors of each coded weight together."""

    def __init__(self, store: Store, checkpoint: Checkpoint) -> None:
        self._store, self._checkpoint = store, checkpoint
        self.made: dict[str, CodedTensor] = {}  # by the name of the codes
        self.names: set[str] = set()  # of the weights
        self.used: set[str] = set()
        self.schemes: set[str] = set()
        self._stated: dict[str, Mapping[str, object]] | None = None

    def look_at(self, name: str) -> None:
        """Make a weight if a name is that of its codes."""
        stem, _, ending = name.rpartition(".")
        if ending == "weight_packed":
            self._compressed(stem)
        elif ending == "qweight":
            self._transposed(stem)
        elif ending == "SCB":
            self._bits_and_bytes_8(stem)
        elif ending.startswith("bitsandbytes__") and stem.endswith(".weight.quant_state"):
            self._bits_and_bytes_4(stem.removesuffix(".quant_state"), name)
        elif name.endswith("_blocks"):
            self._stacked(name.removesuffix("_blocks"))
        elif ending in ("weight_scale", "weight_scale_inv", "scale", "qscale_weight"):
            self._scaled(stem, name)
        elif ending == MASK_BITS and self._checkpoint.tensors[name].dtype.name == "U8":
            stored = self._entries(name)
            shape = (*stored[0].shape[:-1], 8 * math.prod(stored[0].shape[-1:]))
            self.made[name] = CodedTensor(stem, shape, stored, PackedBits(max(1, shape[-1])))

    def _entries(self, *names: str) -> tuple[TensorEntry, ...]:
        """Return stored tensors; none unless all are there."""
        tensors = [self._checkpoint.tensors.get(name) for name in names]
        entries = tuple(tensor for tensor in tensors if isinstance(tensor, TensorEntry))
        return entries if len(entries) == len(names) else ()

    def _add(self, scheme: str, tensor: CodedTensor, wanted: Sequence[_Part], also: Iterable[str] = ()) -> None:
        """Add a weight whose stored tensors after the codes must be as `wanted`; `also` say nothing more of it."""
        codes = tensor.stored[0]
        for part, want in zip(tensor.stored[1:], wanted, strict=True):
            difference = want.difference(part)
            if difference:
                message = (
                    f"{shown(part.name)} {difference[0]}; for {shown(codes.name)} of {list(codes.shape)} it must be"
                )
                raise damaged(self._checkpoint.path, f"{message} {difference[1]}", "download it again")
        self.made[codes.name] = tensor
        self.names.add(tensor.name)
        self.used |= {*(part.name for part in tensor.stored), *also}
        self.schemes.add(scheme)

    def _config(self, name: str) -> Mapping[str, object]:
        if self._stated is None:
            self._stated = _quantization_configs(self._store, self._checkpoint)
        return self._stated[component_of(name, self._checkpoint.components)]

    def _scaled(self, stem: str, name: str) -> None:
        parts = self._entries(f"{stem}.weight", name)
        if not parts or len(parts[0].shape) != 2:
            return
        codes, scales = parts
        if codes.dtype in _FP8:
            self._fp8(codes, scales)
        elif codes.dtype.name == "U8" and scales.dtype == F8_E4M3:
            of_all = self._entries(f"{stem}.weight_scale_2")
            if of_all:
                self._fp4("NVFP4", codes.name, (*parts, *of_all), multiplies=True)
        elif codes.dtype.name == "I8" and scales.dtype.name == "F8_E8M0":
            self._fp4("MXFP4", codes.name, parts)

    def _fp8(self, codes: TensorEntry, scales: TensorEntry) -> None:
        has_exponents = scales.dtype.name in _EXPONENTS
        if scales.dtype.kind is not DTypeKind.FLOAT and not has_exponents:
            return
        if codes.name in self.made:
            other = self.made[codes.name].stored[1].name
            message = f"{shown(codes.name)} has two scales, {shown(other)} and {shown(scales.name)}"
            raise damaged(self._checkpoint.path, message, "download it again")
        block = _block_of(self._checkpoint, codes, scales, self._config(codes.name))
        scale_kernel = _EXPONENTS.get(scales.dtype.name, scales.kernel_code)
        scheme = ScaledFP8(max(1, codes.shape[1]), block, codes.kernel_code, scale_kernel)
        tensor = CodedTensor(codes.name, codes.shape, (codes, scales), scheme)
        name = "FP8 with scales that are powers of two" if has_exponents else "FP8 with scales"
        self._add(name, tensor, [_Part((scales.dtype.name,), scales.shape)])

    def _fp4(
        self,
        scheme: str,
        name: str,
        parts: Sequence[TensorEntry],
        also: Iterable[str] = (),
        *,
        multiplies: bool = False,
    ) -> None:
        """Make a weight of codes of 4 bits, scales, and for NVFP4 the scale of all."""
        codes, scales, *of_all = parts
        rows, columns = codes.shape[0], 2 * codes.shape[1]
        width = 16 if of_all else 32
        if columns % width or not columns:
            return
        groups = columns // width
        wanted = [_Part((scales.dtype.name,), (rows, groups))]
        if of_all:
            fp4 = PackedFP4(columns, groups, F8_E4M3.kernel_code, of_all[0].kernel_code, multiplies)
            wanted.append(_Part(_FLOATS, (1,)))
        else:
            fp4 = PackedFP4(columns, groups, _EXPONENTS[scales.dtype.name])
        self._add(scheme, CodedTensor(name, (rows, columns), tuple(parts), fp4), wanted, also)

    def _compressed(self, stem: str) -> None:
        parts = self._entries(f"{stem}.weight_packed", f"{stem}.weight_scale")
        if not parts or len(parts[0].shape) != 2 or len(parts[1].shape) != 2:
            return
        (codes, scales), name, also = parts, f"{stem}.weight", [f"{stem}.weight_shape"]
        rows, groups = codes.shape[0], scales.shape[1]
        if codes.dtype.name == "U8":
            of_all = self._entries(f"{stem}.weight_global_scale")
            if scales.dtype == F8_E4M3 and of_all:
                self._fp4("NVFP4", name, (*parts, *of_all), also)
            elif scales.dtype.name == "U8":
                self._fp4("MXFP4", name, parts, also)
        elif codes.dtype.name == "I32" and groups:
            n_bits = self._bits_of(name, stem, codes)
            columns = codes.shape[1] * 32 // n_bits if n_bits else 0
            if not columns or columns % groups:
                return
            wanted = [_Part(_FLOATS, (rows, groups))]
            order: tuple[TensorEntry, ...] = self._entries(f"{stem}.weight_g_idx")
            if order and order[0].dtype.name == "I32" and self._read(order[0]).view(np.int32).min(initial=0) < 0:
                also.append(order[0].name)
                order = ()  # none is named: they lie side by side
            if order:
                self._check_groups(order[0], columns, groups)
                wanted.append(_Part(("I32",), (columns,)))
            zeros = self._entries(f"{stem}.weight_zero_point")
            if zeros:
                wanted.append(_Part(("I32",), (-(-rows * n_bits // 32), groups)))
            parts += order + zeros
            scheme = PackedIntegers(columns, n_bits, groups, scales.kernel_code, bool(order))
            tensor = CodedTensor(name, (rows, columns), parts, scheme, _of_16_bits(scales))
            self._add(f"packed integers of {n_bits} bits", tensor, wanted, also)

    def _bits_of(self, name: str, stem: str, codes: TensorEntry) -> int:
        """The bits of a code, by the shape that is stored with it; 0 where it is no whole number of 4 or 8."""
        stored = self._entries(f"{stem}.weight_shape")
        if not stored or stored[0].shape != (2,) or stored[0].dtype.name not in ("I64", "I32"):
            return 0
        shape = self._read(stored[0]).view(np.int64 if stored[0].dtype.itemsize == 8 else np.int32).tolist()
        bits = [n for n in (4, 8) if shape == [codes.shape[0], codes.shape[1] * 32 // n]]
        return bits[0] if bits else 0

    def _check_groups(self, entry: TensorEntry, columns: int, groups: int) -> None:
        """Refuse groups of inputs that are not there; the dtype is checked where the weight is added."""
        if entry.dtype.name != "I32":
            return
        group_C = self._read(entry).view(np.int32)
        if len(group_C) != columns or group_C.min(initial=0) < 0 or group_C.max(initial=0) >= groups:
            message = f"{shown(entry.name)} names no group of {groups} for each of {columns} inputs"
            raise damaged(self._checkpoint.path, message, "download it again")

    def _read(self, entry: TensorEntry) -> NDArray[np.uint8]:
        with open_files(self._store, [entry.file], [self._checkpoint]) as files:
            return read_span(entry, Span(0, entry.n_elements), files, Purpose.METADATA).copy()

    def _stacked(self, name: str) -> None:
        parts = self._entries(f"{name}_blocks", f"{name}_scales")
        if not parts or len(parts[0].shape) != 4 or any(part.dtype.name != "U8" for part in parts):
            return
        experts, outputs, groups, n_bytes = parts[0].shape
        if n_bytes == 16:
            tensor = CodedTensor(
                name, (experts, groups * 32, outputs), parts, StackedMXFP4(max(1, outputs), groups * 32)
            )
            self._add("MXFP4", tensor, [_Part(("U8",), (experts, outputs, groups))])

    def _bits_and_bytes_4(self, name: str, state_name: str) -> None:
        plain = self._entries(name, f"{name}.absmax", f"{name}.quant_map")
        (state,) = self._entries(state_name)
        if not plain or state.dtype.name != "U8" or state.nbytes > _MOST_STATE_BYTES or plain[0].dtype.name != "U8":
            return
        stated = parse_object(self._read(state).tobytes(), where=state_name, code="checkpoint.damaged")
        block, nested = _counts([stated.get("blocksize"), stated.get("nested_blocksize", 0)]) or (0, 0)
        shape, offset = _counts(stated.get("shape")), stated.get("nested_offset", 0.0)
        parts = plain + self._entries(f"{name}.nested_absmax", f"{name}.nested_quant_map")
        dtypes = [part.dtype.name for part in parts[1:]]
        is_known = dtypes == (["U8", "F32", "F32", "F32"] if nested else ["F32", "F32"])
        if not is_known or not block or math.prod(shape) % block or not isinstance(offset, int | float):
            return
        rows = math.prod(shape) // block
        if 2 * plain[0].nbytes != math.prod(shape):
            message = f"states the shape {list(shape)}, and {shown(name)} has {2 * plain[0].nbytes} codes"
            where = f"{self._checkpoint.path}: {shown(state_name)}"
            raise damaged(where, message, "download it again")
        scheme = BitsAndBytes4(block, nested, float(offset))
        dtype = F16 if stated.get("dtype") == "float16" else BF16
        wanted = [_Part(("U8",) if nested else ("F32",), (rows,)), _Part(("F32",), (16,))]
        if nested:
            wanted += [_Part(("F32",), (-(-rows // nested),)), _Part(("F32",), (256,))]
        tensor = CodedTensor(name, shape, parts, scheme, dtype)
        self._add(f"bitsandbytes {state_name.rpartition('__')[2].upper()}", tensor, wanted, [state_name])

    def _bits_and_bytes_8(self, stem: str) -> None:
        parts = self._entries(f"{stem}.weight", f"{stem}.SCB")
        if not parts or len(parts[0].shape) != 2 or [part.dtype.name for part in parts] != ["I8", "F32"]:
            return
        tensor = CodedTensor(parts[0].name, parts[0].shape, parts, BitsAndBytes8(max(1, parts[0].shape[1])), F16)
        self._add("bitsandbytes int8", tensor, [_Part(("F32",), parts[0].shape[:1])], [f"{stem}.weight_format"])

    def _transposed(self, stem: str) -> None:
        parts = self._entries(f"{stem}.qweight", f"{stem}.qzeros", f"{stem}.scales")
        if not parts or any(len(part.shape) != 2 for part in parts) or parts[0].dtype.name != "I32":
            return
        codes, zeros, scales = parts
        stated, n_outputs, groups = self._config(codes.name), scales.shape[1], scales.shape[0]
        is_awq = codes.shape[1] != n_outputs
        n_bits = 4 if is_awq else stated.get("bits", 4)
        if type(n_bits) is not int or n_bits not in (2, 3, 4, 8) or scales.dtype.kind is not DTypeKind.FLOAT:
            return
        per, n_words = codes_in_words(n_bits)
        columns = codes.shape[0] * (1 if is_awq else per) // n_words
        groups_of_inputs = self._entries(f"{stem}.g_idx")
        if not groups or zeros.dtype != codes.dtype:
            return
        if groups_of_inputs and not is_awq:
            self._check_groups(groups_of_inputs[0], columns, groups)
            parts += groups_of_inputs
        elif columns % groups or not (is_awq or _is_in_order(stated, columns // groups)):
            return
        if is_awq and codes.shape[1] * per != n_outputs:
            message = f"{shown(scales.name)} has {n_outputs} outputs, and {shown(codes.name)} {codes.shape[1] * per}"
            raise damaged(self._checkpoint.path, message, "download it again")
        more = 0 if is_awq or stated.get("checkpoint_format") == "gptq_v2" else 1
        scheme = PackedTransposed(columns, n_bits, n_outputs, more, scales.kernel_code, is_awq)
        tensor = CodedTensor(f"{stem}.weight", (n_outputs, columns), parts, scheme, _of_16_bits(scales))
        wanted = [
            _Part(("I32",), (groups, -(-n_outputs // per) * n_words)),
            _Part(_FLOATS, (groups, n_outputs)),
            _Part(("I32",), (columns,)),
        ]
        self._add(f"{'AWQ' if is_awq else 'GPTQ'} of {n_bits} bits", tensor, wanted[: len(parts) - 1])


def stored_like(store: Store, base: Checkpoint, merged: Mapping[str, Readable]) -> dict[str, Readable]:
    """Return a merge's tensors as its base, opened as it is stored, has them: FP8 codes with scales for its weights.

    Raises:
        UnsupportedError: `recipe.unsupported`, the base is not stored so, or has other tensors than the merge.
    """
    read = dequantised(store, base)
    where, hint = base.path, "leave out out_dtype: like_base"
    stored = {
        part.name: (tensor, number)
        for tensor in read.tensors.values() if isinstance(tensor, CodedTensor)
        for number, part in enumerate(tensor.stored)
    }  # fmt: skip
    schemes = [tensor.scheme for tensor, _ in stored.values()]
    if not all(isinstance(scheme, ScaledFP8) and scheme.scale_kernel >= 0 for scheme in schemes) or not schemes:
        what = read.quantisation or "plain numbers"
        message = f"is stored as {what}; only FP8 with floating-point scales can be written like the base"
        raise UnsupportedError.of("recipe.unsupported", where, message, hint)
    if read.tensors.keys() != merged.keys():
        name = min(read.tensors.keys() ^ merged.keys())
        message = f"and the merge do not have the same tensors: only one has {shown(name)}"
        raise UnsupportedError.of("recipe.unsupported", where, message, hint)
    stated = _quantization_configs(store, base)
    tensors: dict[str, Readable] = {}
    shared: dict[str, dict[str, object]] = {}
    for name, entry in base.tensors.items():
        if name in stored:
            tensor, number = stored[name]
            powers = stated[component_of(name, base.components)].get("scale_fmt") == "ue8m0"
            of_weight = shared.setdefault(tensor.name, {})
            tensors[name] = Requantised(merged[tensor.name], tensor, bool(number), powers, of_weight)
        else:  # scales of activations are the base's
            tensors[name] = merged.get(name, entry)
    return tensors


def _is_in_order(stated: Mapping[str, object], group_size: int) -> bool:
    """Whether a configuration of GPTQ says that inputs lie in the order of their groups, so that none is named."""
    is_gptq = str(stated.get("packing_format", "auto_gptq")).endswith("auto_gptq")  # of auto-round
    return is_gptq and not stated.get("desc_act") and stated.get("group_size") in (-1, group_size)


def _counts(stated: object) -> tuple[int, ...]:
    """Return whole numbers that are not negative; none if anything else is among them."""
    numbers = stated if isinstance(stated, list) else []
    return tuple(numbers) if all(type(number) is int and number >= 0 for number in numbers) else ()


def _of_16_bits(scales: TensorEntry) -> DType:
    return scales.dtype if scales.dtype in (BF16, F16) else BF16


def _is_activation_scale(name: str, read: Collection[str]) -> bool:
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
    """How many rows and columns share a scale: all, one row, a block, or some columns of a row."""
    block, (rows, columns) = _block_shape(stated), codes.shape
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    if scales.n_elements == 1:
        return max(1, rows), max(1, columns)
    if scales.shape in ((rows,), (rows, 1)):
        return 1, max(1, columns)
    if scales.shape == blocks:
        return block
    if (
        len(scales.shape) == 2
        and scales.shape[0] == rows
        and 0 < scales.shape[1] < columns
        and not columns % scales.shape[1]
    ):
        return 1, columns // scales.shape[1]
    message = (
        f"{shown(scales.name)} has the shape {list(scales.shape)}; for {shown(codes.name)} of {list(codes.shape)} it"
        f" must be [1], [{rows}, groups of columns] or {list(blocks)}, one for each block of {block[0]} x {block[1]}"
    )
    raise damaged(checkpoint.path, message, "download it again")


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
    if match := _SCALE.fullmatch(name):
        for beside in (f"{match[1]}.weight", match[1]):
            if beside in tensors and _is_code(tensors[beside]):
                return f"{tensors[beside].dtype.name} with scales"
    return ""


def _is_code(tensor: Readable) -> bool:
    return tensor.dtype in _FP8 or tensor.dtype.kind is not DTypeKind.FLOAT


def _declared(store: Store, checkpoint: Checkpoint) -> str:
    """Return the quantisation that the configuration declares; empty where weights are plain."""
    coded = [tensor for tensor in checkpoint.tensors.values() if _is_code(tensor) and len(tensor.shape) > 1]
    stated = _quantization_configs(store, checkpoint) if coded else {}
    for tensor in coded:
        folder = component_of(tensor.name, checkpoint.components)
        if not stated[folder]:
            continue
        method = stated[folder].get("quant_method", "unnamed")
        if method == "fp8" and tensor.dtype.itemsize > 1:  # a table of numbers: its codes are bytes
            continue
        stored = f"{shown(tensor.name)} is {tensor.dtype.name}"
        return f"{_config_name(folder)} declares the quantisation {shown(method)}, and {stored}"
    return ""


def _quantization_configs(store: Store, checkpoint: Checkpoint) -> dict[str, Mapping[str, object]]:
    """Return the quantisation configs of a checkpoint and of its components, by folder; empty where there is none."""
    stated: dict[str, Mapping[str, object]] = {}
    for folder in ("", *checkpoint.components):
        name, config = _config_name(folder), None
        if name in checkpoint.sidecars:
            raw = store.read_small(checkpoint.root / name, CONFIG_BYTES)
            config = parse_object(raw, where=checkpoint.root / name, code="checkpoint.damaged").get(QUANTIZATION_KEY)
        stated[folder] = config if isinstance(config, dict) else {}
    return stated


def _config_name(folder: str) -> str:
    return f"{folder}/{CONFIG_NAME}" if folder else CONFIG_NAME
