"""The forms in which an adapter is written: what each holds, scales, names and stores, in one table.

Legend: M rows, N columns, R rank, E experts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.config_files import Json
from mergepipe.checkpoints.contract import GGUF_SUFFIX
from mergepipe.checkpoints.diffusion_names import DENOISER_COMPONENTS
from mergepipe.checkpoints.stored_adapters import INNER, OUTER, PREFIX
from mergepipe.core.strict_json import shown
from mergepipe.errors import MergePipeError, UnsupportedError
from mergepipe.runs.adapters import WEIGHTS_NAME, adapter_config, factor_names, stated_targets, targets_of
from mergepipe.runs.lora_modules import LoraModule

Named = tuple[str, NDArray[Any], tuple[int, ...]]
"""A tensor as it is written: its name, its values in any order of dimensions, and its shape."""


class Scaling(Enum):
    """Where a form keeps what the product of two factors is multiplied by."""

    BY_MODULE = "a scale for each module"
    ONE = "one scale and one rank for all modules"
    NONE = "no scale"


class Experts(Enum):
    """How a form stores the matrices of experts."""

    ANY = "stacked or one by one"
    SINGLE = "one by one"
    BY_MATRIX = "the experts of one matrix stacked"
    STACKED = "stacked as transformers 5 has them"


class Kind(Enum):
    """What an adapter can hold in addition to the two factors of a linear layer."""

    EMBEDDING = "factors of an embedding"
    CONVOLUTION = "factors of a convolution"
    MAGNITUDE = "magnitudes (DoRA)"
    BIAS = "a trained bias (lora_bias)"
    SAVED = "a tensor stored in full (modules_to_save)"
    TOKENS = "trained tokens"


@dataclass(frozen=True, slots=True)
class Written:
    """What the configuration of an adapter is made from: its modules, and what was chosen for them.

    `scales` are by module, `rank` and `scale` those of all of them where a form has one.
    """

    modules: Sequence[LoraModule]
    scales: Mapping[str, float]
    ranks: Mapping[str, int]
    rank: int
    scale: float
    base_model: str | None
    stated: Json  # the configuration of the adapter that is converted, empty where it has none
    saved: tuple[str, ...] = ()
    tokens: Json | None = None


@dataclass(frozen=True, slots=True)
class LoraForm:
    """A form: its weights are in one file of the name `file`, where {} stands for the name of the output."""

    name: str
    file: str
    holds: frozenset[Kind]
    scaling: Scaling
    experts: Experts
    module: Callable[[LoraModule, Sequence[LoraModule]], str]
    tensors: Callable[[str, LoraModule, NDArray[Any], NDArray[Any]], Iterator[Named]]
    config: Callable[[Written], bytes] | None = None
    magnitude: str = ""  # the name of a module's magnitudes, with {} for its own

    def file_name(self, output: str) -> str:
        """Return the name of the file of weights in an output of a name."""
        return self.file.format(output)

    def refused(self, kind: Kind, name: str, where: object) -> MergePipeError:
        """Make the error for what the form does not hold."""
        fitting = [form.name for form in FORMS.values() if kind in form.holds]
        message = f"{shown(name)} is {kind.value}, which the form {self.name} cannot hold"
        hint = f"convert it to {' or '.join(fitting)}" if fitting else "apply it to its base"
        return UnsupportedError.of("adapter.unsupported", where, message, hint)


def _own_name(module: LoraModule, modules: Sequence[LoraModule]) -> str:
    """Return the name of a module in PEFT's files, which nests the two parameters of stacked experts."""
    stem, _, leaf = module.name.rpartition(".")
    if not module.is_stack:
        return module.name
    has_outer = any(other.is_stack and other.name == f"{stem}.{OUTER}" for other in modules)
    return f"{stem}.base_layer" if leaf == INNER and has_outer else stem


def _switch_name(module: LoraModule, _: Sequence[LoraModule]) -> str:
    name = _dotted(module.name)
    return name.replace(".experts.", ".switch_mlp.") if module.is_stack else name


def _plain_name(module: LoraModule, _: Sequence[LoraModule]) -> str:
    return module.name


_UNET = re.compile(r"(?:down_blocks|mid_block|up_blocks|conv_in|conv_out|input_blocks|middle_block|output_blocks)\b.*")
_FLAT_PREFIXES = {"text_encoder": "lora_te1_", "text_encoder_2": "lora_te2_", "text_encoder_3": "lora_te3_"}
_TEXT_ENCODER = "text_encoder"


def _split(name: str) -> tuple[str, str]:
    """Return the component of a diffusers pipeline that a name begins with, empty where it has none, and the rest."""
    for component in ("model.diffusion_model", *DENOISER_COMPONENTS, *_FLAT_PREFIXES):
        if name.startswith(f"{component}."):
            return component, name.removeprefix(f"{component}.")
    return "", name


def _flat_name(module: LoraModule, modules: Sequence[LoraModule]) -> str:
    """Return the name that Kohya's scripts give to a module."""
    if module.name.startswith("lora_") and "." not in module.name:
        return module.name
    component, rest = _split(module.name)
    prefix = _FLAT_PREFIXES.get(component, "lora_unet_")
    is_alone = not any(_split(other.name)[0] in ("text_encoder_2", "text_encoder_3") for other in modules)
    if component == _TEXT_ENCODER and is_alone:
        prefix = "lora_te_"
    return prefix + rest.replace(".", "_")


def _comfy_name(module: LoraModule, _: Sequence[LoraModule]) -> str:
    component, rest = _split(module.name)
    if component in _FLAT_PREFIXES:
        message = "is of a text encoder, and only names of the denoiser are written for ComfyUI"
        hint = "convert it to kohya, which names text encoders"
        raise UnsupportedError.of("adapter.unsupported", shown(module.name), message, hint)
    return f"diffusion_model.{_dotted(rest)}"


def _pipeline_name(module: LoraModule, _: Sequence[LoraModule]) -> str:
    component, rest = _split(module.name)
    if component in ("", "diffusion_model", "model.diffusion_model"):
        component = "unet" if _UNET.fullmatch(rest) else "transformer"
    return f"{component}.{_dotted(rest)}"


def _dotted(name: str) -> str:
    """Refuse the flattened name of a module, which does not say where its dots were."""
    if "." in name or not name.startswith("lora_"):
        return name
    message = "is a flattened name, and only the base says where its dots were"
    raise UnsupportedError.of("adapter.unsupported", shown(name), message, "name the base: --base BASE")


def _dotted_name(module: LoraModule, modules: Sequence[LoraModule]) -> str:
    component, rest = _split(module.name)
    components = {_split(other.name)[0] for other in modules}
    if len(components) > 1:
        message = f"is of one of {len(components)} models, and an adapter of PEFT is of one"
        raise UnsupportedError.of("adapter.unsupported", shown(module.name), message, "convert it to diffusers")
    return _dotted(rest if component else _own_name(module, modules))


def _peft_tensors(name: str, module: LoraModule, up_EMR: NDArray[Any], down_ERN: NDArray[Any]) -> Iterator[Named]:
    n_experts, n_rows, rank = up_EMR.shape
    down, up = factor_names(name, is_embedding=module.is_embedding)
    yield down, down_ERN, (n_experts * rank, down_ERN.shape[2])
    yield up, up_EMR.transpose(1, 2, 0), (n_rows, rank * n_experts)


def _mlx_tensors(name: str, module: LoraModule, up_EMR: NDArray[Any], down_ERN: NDArray[Any]) -> Iterator[Named]:
    if module.is_stack:
        yield f"{name}.lora_a", down_ERN, down_ERN.shape
        yield f"{name}.lora_b", up_EMR, up_EMR.shape
        return
    yield f"{name}.lora_a", down_ERN[0].T, down_ERN.shape[:0:-1]
    yield f"{name}.lora_b", up_EMR[0].T, up_EMR.shape[:0:-1]


def _file_tensors(down: str, up: str) -> Callable[[str, LoraModule, NDArray[Any], NDArray[Any]], Iterator[Named]]:
    """Return what writes the factors of a file by the ends of their names."""

    def tensors(name: str, module: LoraModule, up_EMR: NDArray[Any], down_ERN: NDArray[Any]) -> Iterator[Named]:
        _, n_rows, rank = up_EMR.shape
        ones = (1,) * (len(module.kernel) - 1)
        yield f"{name}.{down}", down_ERN, (rank, *(module.kernel or (down_ERN.shape[2],)))
        yield f"{name}.{up}", up_EMR, (n_rows, rank, *ones)

    return tensors


def _gguf_tensors(name: str, module: LoraModule, up_EMR: NDArray[Any], down_ERN: NDArray[Any]) -> Iterator[Named]:
    if module.is_stack:
        yield f"{name}.lora_a", down_ERN, down_ERN.shape
        yield f"{name}.lora_b", up_EMR, up_EMR.shape
        return
    down = down_ERN[0].T if module.is_embedding else down_ERN[0]
    yield f"{name}.lora_a", down, down.shape
    yield f"{name}.lora_b", up_EMR[0], up_EMR.shape[1:]


def _peft_config(written: Written) -> bytes:
    """Write PEFT's configuration: the rank and alpha of each module."""
    names = [module.name for module in written.modules]
    alphas = {name: written.scales[name] * written.ranks[name] for name in names}
    common = _most_common(list(alphas.values()))
    rank = max(written.ranks.values(), default=1)
    stacks = sorted(module.name for module in written.modules if module.is_stack)
    more: Json = {
        "lora_alpha": _number(common),
        "alpha_pattern": {name: _number(alpha) for name, alpha in alphas.items() if alpha != common},
        "r": rank,
        "target_parameters": stacks or None,
        "use_dora": any(module.magnitude is not None for module in written.modules),
        "lora_bias": any(module.bias is not None for module in written.modules),
        "trainable_token_indices": written.tokens,
    }
    stated = written.stated
    for key in ("bias", "ensure_weight_tying", "layer_replication"):
        if stated.get(key):
            more[key] = stated[key]
    plain = [module.name for module in written.modules if not module.is_stack]
    return adapter_config(
        base_model=written.base_model,
        revision=_text(stated.get("revision")),
        ranks=dict(written.ranks),
        modules=(),
        saved_modules=list(written.saved),
        transposed=any(module.is_transposed for module in written.modules),
        task_type=_text(stated.get("task_type")),
        more={**more, "target_modules": stated_targets(plain, targets_of(stated))},
    )


def _serving_config(written: Written) -> bytes:
    """Write the configuration of an adapter as servers read it: one rank, one alpha, and the last names of modules."""
    ends = sorted({module.name.rpartition(".")[2] for module in written.modules})
    return adapter_config(
        base_model=written.base_model,
        revision=_text(written.stated.get("revision")),
        ranks={},
        modules=(),
        saved_modules=(),
        transposed=any(module.is_transposed for module in written.modules),
        task_type=_text(written.stated.get("task_type")),
        more={"r": written.rank, "lora_alpha": _number(written.scale * written.rank), "target_modules": ends},
    )


_LAYER = re.compile(r".*?\blayers\.\d+\.(?P<key>.+)")


def _mlx_config(written: Written) -> bytes:
    """Write MLX's configuration: one rank and scale, and the names of modules within a layer."""
    keys = set()
    for module in written.modules:
        name = _switch_name(module, written.modules)
        match = _LAYER.fullmatch(name)
        keys.add(match["key"] if match else name)
    content = {
        "fine_tune_type": "dora" if any(module.magnitude is not None for module in written.modules) else "lora",
        "lora_parameters": {
            "dropout": 0.0, "keys": sorted(keys), "rank": written.rank, "scale": _number(written.scale),
        },
        "model": written.base_model,
        "num_layers": -1,
    }  # fmt: skip
    return (json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n").encode()


def _most_common(values: Sequence[float]) -> float:
    return max(sorted(set(values)), key=values.count, default=1.0)


def _number(value: float) -> float:
    """Return a number as configurations write it: whole ones that float64 counts exactly without a point."""
    return int(value) if float(value).is_integer() and abs(value) <= 1 << 53 else value


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


_FACTORS_ALONE = frozenset[Kind]()
FORMS = {
    form.name: form
    for form in (
        LoraForm(
            "peft", WEIGHTS_NAME, frozenset(Kind) - {Kind.CONVOLUTION}, Scaling.BY_MODULE, Experts.ANY, _dotted_name,
            _peft_tensors, _peft_config, f"{PREFIX}{{}}.lora_magnitude_vector",
        ),
        LoraForm(
            "vllm", WEIGHTS_NAME, frozenset({Kind.EMBEDDING}), Scaling.ONE, Experts.SINGLE, _dotted_name,
            _peft_tensors, _serving_config,
        ),
        LoraForm(
            "sglang", WEIGHTS_NAME, frozenset({Kind.EMBEDDING}), Scaling.ONE, Experts.SINGLE, _dotted_name,
            _peft_tensors, _serving_config,
        ),
        LoraForm(
            "mlx", "adapters.safetensors", frozenset({Kind.EMBEDDING, Kind.MAGNITUDE}), Scaling.ONE,
            Experts.BY_MATRIX, _switch_name, _mlx_tensors, _mlx_config, "{}.m",
        ),
        LoraForm(
            "kohya", "{}.safetensors", frozenset({Kind.CONVOLUTION}), Scaling.BY_MODULE, Experts.SINGLE, _flat_name,
            _file_tensors("lora_down.weight", "lora_up.weight"),
        ),
        LoraForm(
            "comfyui", "{}.safetensors", frozenset({Kind.CONVOLUTION}), Scaling.NONE, Experts.SINGLE, _comfy_name,
            _file_tensors("lora_A.weight", "lora_B.weight"),
        ),
        LoraForm(
            "diffusers", "{}.safetensors", frozenset({Kind.CONVOLUTION}), Scaling.NONE, Experts.SINGLE,
            _pipeline_name, _file_tensors("lora_A.weight", "lora_B.weight"),
        ),
        LoraForm(
            "gguf", f"{{}}{GGUF_SUFFIX}", frozenset({Kind.EMBEDDING}), Scaling.ONE, Experts.BY_MATRIX, _plain_name,
            _gguf_tensors,
        ),
    )
}  # fmt: skip
"""The forms that adapters are written in, by the name that `--to` takes."""


def names_of_modules(form: LoraForm, modules: Sequence[LoraModule]) -> dict[str, str]:
    """Return the name of each module in a form.

    Raises:
        UnsupportedError: two of them have one.
    """
    names = {module.name: form.module(module, modules) for module in modules}
    owners: dict[str, str] = {}
    for module, name in names.items():
        if name in owners:
            message = f"{shown(module)} and {shown(owners[name])} are both {shown(name)} in the form {form.name}"
            raise UnsupportedError.of("adapter.unsupported", form.name, message)
        owners[name] = module
    return names


def alpha_of(scale: float, rank: int) -> NDArray[np.float32] | None:
    """Return alpha as a scalar of float32; None where that is not exact."""
    if abs(scale * rank) > float(np.finfo(np.float32).max):
        return None
    alpha = np.float32(scale * rank)
    is_exact = float(alpha) / rank == scale
    return np.asarray(alpha) if is_exact else None
