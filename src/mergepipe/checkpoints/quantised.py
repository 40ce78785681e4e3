"""Weights stored as codes and scales: told by their names and dtypes, and refused, never merged as numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mergepipe.checkpoints.contract import Checkpoint, Readable
from mergepipe.core.blocks import F8_E4M3, F8_E5M2, DTypeKind
from mergepipe.core.strict_json import parse_object, shown
from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import CONFIG_BYTES

_CONFIG_NAME = "config.json"
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
    coded = next((t for t in checkpoint.tensors.values() if _is_code(t) and len(t.shape) > 1), None)
    if coded is None or _CONFIG_NAME not in checkpoint.sidecars:
        return ""
    path = checkpoint.root / _CONFIG_NAME
    raw = store.read_small(path, CONFIG_BYTES)
    config = parse_object(raw, where=path, code="checkpoint.damaged").get("quantization_config")
    if not isinstance(config, dict):
        return ""
    method = shown(config.get("quant_method", "unnamed"))
    return f"config.json declares the quantisation {method}, and {shown(coded.name)} is {coded.dtype.name}"
