"""Mixtures of experts built from dense models: read mergekit-moe's recipes, choose the architecture, list the tensors.

Source: the files and outputs of mergekit-moe 0.1.5, whose names and configurations these are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Final

import numpy as np

from mergepipe.checkpoints.config_files import Json, config_bytes
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable
from mergepipe.checkpoints.gathered_rows import gathered_rows
from mergepipe.checkpoints.routers import CHEAP_MODE, RANDOM_MODES, Gates, Noisy, Router, prompt_batches, token_rows
from mergepipe.checkpoints.stacked_experts import Stacked
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, TokenizerFiles
from mergepipe.core.blocks import DTYPES_BY_RECIPE_NAME
from mergepipe.core.outcome import DroppedTensor
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import MismatchError, UnsupportedError
from mergepipe.recipes.chosen_experts import select_experts, selected_config
from mergepipe.recipes.recipe import Mixture, Recipe
from mergepipe.recipes.tasks import MergeTask, Resolution, copy_task
from mergepipe.storage.contract import Store

_MLP: Final = re.compile(r"model\.layers\.(?P<layer>\d{1,6})\.mlp\.(?P<role>gate_proj|up_proj|down_proj)\.weight")
_BIAS: Final = re.compile(r"model\.layers\.\d{1,6}\.self_attn\.(?P<role>[qkv])_proj\.bias")
_BIASED: Final = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
_ROLES: Final = ("gate_proj", "up_proj", "down_proj")
REASON_NOT_MLP: Final = "only the MLPs of an expert are used in a mixture"
REASON_REPLACED: Final = "the experts' MLPs replace it"
_LLAMAS: Final = ("llama", "mistral")
# What the source's loader takes where its configuration says nothing, and the output's would take as something else.
_DEFAULTS: Final[Json] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of mixtures: which base models it takes, how many shared experts, and how its tensors are named."""

    name: str
    model_type: str
    sources: tuple[str, ...]
    n_shared: tuple[int, ...]
    shared: str = ""  # the module of a shared expert
    is_fused: bool = False
    gates_shared: bool = False
    has_biases: bool = False


ARCHITECTURES: Final = (
    Architecture("Mixtral", "mixtral", _LLAMAS, (0,), is_fused=True),
    Architecture("DeepSeek MoE", "deepseek", _LLAMAS, (0, 1), "shared_experts"),
    Architecture(
        "Qwen MoE", "qwen2_moe", (*_LLAMAS, "qwen2"), (1,), "shared_expert", gates_shared=True, has_biases=True
    ),
    Architecture("Qwen3 MoE", "qwen3_moe", ("qwen3",), (0,), is_fused=True, has_biases=True),
)


def chosen_architecture(mixture: Mixture, model_types: Sequence[str], where: str) -> Architecture:
    """Choose the first architecture that takes models of these types; the recipe may name one.

    Raises:
        UnsupportedError: there is none.
    """
    wanted = (mixture.architecture or "").lower()
    n_shared = len(mixture.shared)
    is_prompted = any(expert.positive for expert in mixture.shared)
    for architecture in ARCHITECTURES:
        fits = set(model_types) <= {model_types[0]} & set(architecture.sources) and n_shared in architecture.n_shared
        gates = mixture.gate_mode in RANDOM_MODES or not n_shared or is_prompted == architecture.gates_shared
        if architecture.name.lower().startswith(wanted) and fits and gates:
            return architecture
    named = f"'{mixture.architecture}' " if wanted else ""
    message = f"no mixture {named}is made of {', '.join(sorted(set(model_types)))} with {n_shared} shared experts"
    table = "; ".join(
        f"{known.name}: {' or '.join(known.sources)}, {' or '.join(map(str, known.n_shared))} shared"
        + (" with prompts" if known.gates_shared else "")
        for known in ARCHITECTURES
    )
    raise UnsupportedError.of("recipe.unsupported", where, message, table)


def mixture_config(config: Json, mixture: Mixture, where: str) -> bytes:
    """Return the configuration of the mixture, from that of the base; raises as `resolve_mixture`."""
    if mixture.chosen:
        return selected_config(config, mixture)
    n_types = len(mixture.experts) + len(mixture.shared)
    architecture = chosen_architecture(mixture, [str(config.get("model_type"))] * n_types, where)
    made: Json = {**_DEFAULTS, "num_key_value_heads": config.get("num_attention_heads"), **config}
    if "rope_theta" not in made and "rope_parameters" not in made:
        made["rope_theta"] = 10000.0
    n_experts, intermediate = len(mixture.experts), made.get("intermediate_size")
    made |= {"model_type": architecture.model_type, "num_experts_per_tok": mixture.experts_per_token}
    if architecture.model_type == "mixtral":
        made |= {"architectures": ["MixtralForCausalLM"], "num_local_experts": n_experts, "sliding_window": None}
    elif architecture.model_type == "deepseek":
        origin = "deepseek-ai/deepseek-moe-16b-base--"
        made |= {
            "architectures": ["DeepseekForCausalLM"], "n_routed_experts": n_experts,
            "n_shared_experts": len(mixture.shared) or None, "first_k_dense_replace": 0, "moe_layer_freq": 1,
            "scoring_func": "softmax", "norm_topk_prob": True, "moe_intermediate_size": intermediate,
            "auto_map": {
                "AutoConfig": f"{origin}configuration_deepseek.DeepseekConfig",
                "AutoModel": f"{origin}modeling_deepseek.DeepseekModel",
                "AutoModelForCausalLM": f"{origin}modeling_deepseek.DeepseekForCausalLM",
            },
        }  # fmt: skip
    else:
        is_qwen2 = architecture.model_type == "qwen2_moe"
        made |= {
            "architectures": [f"Qwen{2 if is_qwen2 else 3}MoeForCausalLM"], "num_experts": n_experts,
            "decoder_sparse_step": 1, "norm_topk_prob": True, "moe_intermediate_size": intermediate,
        }  # fmt: skip
        if is_qwen2:
            made |= {"shared_expert_intermediate_size": intermediate, "sliding_window": None}
            made["use_sliding_window"] = False
    return config_bytes(made)


def resolve_mixture(recipe: Recipe, checkpoints: Sequence[Checkpoint], store: Store) -> Resolution:
    """List the tensors of a mixture: copies, stacks of the experts' matrices, and routers.

    Raises:
        MismatchError: an expert has other shapes than the base, or the base has what mixtures lack.
        UnsupportedError: there is no such mixture, an expert holds differences, or an extra is missing.
    """
    assert recipe.mixture is not None
    if recipe.mixture.chosen:
        return select_experts(recipe, checkpoints[0], TokenizerFiles(checkpoints[0], store).document(CONFIG_NAME))
    return _Builder(recipe, checkpoints, store).resolution()


class _Builder:
    """Builds the tasks of one mixture."""

    def __init__(self, recipe: Recipe, checkpoints: Sequence[Checkpoint], store: Store) -> None:
        assert recipe.mixture is not None
        self._inputs = recipe.inputs()
        self._checkpoints = checkpoints
        self._mixture = mixture = recipe.mixture
        index = {model.key: place for place, model in enumerate(self._inputs)}
        self._members = members = [index[model.key] for model in recipe.models]
        self._experts, self._shared = members[: len(mixture.experts)], members[len(mixture.experts) :]
        self._used: list[set[str]] = [set() for _ in checkpoints]
        configs = [TokenizerFiles(checkpoint, store).document(CONFIG_NAME) for checkpoint in checkpoints]
        types = [str(config.get("model_type", "of no stated type")) for config in configs]
        self.architecture = chosen_architecture(mixture, types, recipe.path.name)
        self._config = configs[0]
        stated = self._config.get("dtype", self._config.get("torch_dtype"))
        self._dtype = recipe.dtype or DTYPES_BY_RECIPE_NAME.get(str(stated))
        self._gates = self._routers(store)

    def _routers(self, store: Store) -> Gates:
        mixture, base = self._mixture, self._checkpoints[0]
        norm = base.tensors.get("model.norm.weight")
        if norm is None:
            raise MismatchError.of("model.mismatch", base.path, "has no tensor 'model.norm.weight'")
        layers = {int(match["layer"]) for name in base.tensors if (match := _MLP.fullmatch(name))}
        gated = (*mixture.experts, *(mixture.shared if self.architecture.gates_shared else ()))
        make = partial(Gates, mixture.gate_mode, len(layers), len(gated), norm.shape[0], mixture.seed)
        if mixture.gate_mode in RANDOM_MODES:
            return make()
        prompts = prompt_batches(base, store, [(expert.positive, expert.negative) for expert in gated])
        if mixture.gate_mode == CHEAP_MODE:
            return make(prompts, token_rows(base.tensors["model.embed_tokens.weight"], prompts))
        if not base.root.is_local:
            message = f"gate_mode {mixture.gate_mode} runs the base, which transformers reads from a folder"
            raise UnsupportedError.of("recipe.unsupported", base.root, message, "download it, or write cheap_embed")
        return make(prompts, folder=str(base.root.local_path))

    def resolution(self) -> Resolution:
        for model, checkpoint in zip(self._inputs, self._checkpoints, strict=True):
            if checkpoint.kind is not CheckpointKind.FULL or checkpoint.encoded is not None:
                message = f"'{model.text}' holds differences from a base, and an expert needs weights"
                raise UnsupportedError.of("model.unsupported", model.where, message, "unpack it, or write base+adapter")
        tasks = tuple(task for task in self._tasks())
        dropped = tuple(
            DroppedTensor(model.text, name, REASON_REPLACED if _MLP.fullmatch(name) else REASON_NOT_MLP)
            for model, checkpoint, used in zip(self._inputs, self._checkpoints, self._used, strict=True)
            for name in checkpoint.tensors if name not in used
        )  # fmt: skip
        return Resolution(tasks, dropped, self._inputs, prompts=self._prompts())

    def _prompts(self) -> str | None:
        """Digest the tokens of the prompts, and the configuration of a base that is run on them; None without any."""
        gates = self._gates
        if gates.mode in RANDOM_MODES:
            return None
        batches = [batch for pair in gates.prompts for batch in pair]
        tokens = [None if batch is None else asdict(batch) for batch in batches]
        return digest_of([tokens, self._config if gates.rows is None else None])

    def _tasks(self) -> Iterator[MergeTask]:
        base = self._checkpoints[0]
        for name, tensor in base.tensors.items():
            match = _MLP.fullmatch(name)
            if match is None:
                is_bias = name.endswith(".bias") and not (self.architecture.has_biases and _BIAS.fullmatch(name))
                if is_bias or ".mlp." in name:
                    message = f"'{self._inputs[0].text}' has this tensor, {self.architecture.name} has none like it"
                    raise MismatchError.of("model.mismatch", name, message, "build the mixture of models without it")
                self._used[0].add(name)
                yield self._task(name, tensor)
                bias = name.removesuffix("weight") + "bias"
                if self.architecture.gates_shared and name.endswith(_BIASED) and bias not in base.tensors:
                    # Qwen MoE adds to queries, keys and values what Llama does not: zeros.
                    nowhere = np.full(tensor.shape[0], -1, np.int64)
                    yield self._task(bias, gathered_rows(base.tensors["model.norm.weight"], nowhere, name=bias))
            elif match["role"] == _ROLES[-1]:
                yield from self._layer(int(match["layer"]))

    def _layer(self, layer: int) -> Iterator[MergeTask]:
        place = f"model.layers.{layer}.mlp"
        if self.architecture.is_fused:
            for fused, roles in (("gate_up_proj", _ROLES[:2]), ("down_proj", _ROLES[2:])):
                parts = [self._matrix(place_, layer, role) for place_ in range(len(self._experts)) for role in roles]
                rows, columns = parts[0].shape
                shape = len(self._experts), rows * len(roles), columns
                name = f"{place}.experts.{fused}"
                yield self._task(name, Stacked(name, shape, tuple(parts)))
        else:
            modules = [f"experts.{place_}" for place_ in range(len(self._experts))]
            for place_, module in enumerate([*modules, *(self.architecture.shared for _ in self._shared)]):
                for role in _ROLES:
                    matrix = self._matrix(place_, layer, role)
                    yield self._task(f"{place}.{module}.{role}.weight", matrix, self._members[place_])
        n_experts = len(self._experts)
        yield self._task(f"{place}.gate.weight", Router(f"{place}.gate.weight", self._gates, layer, 0, n_experts))
        if self.architecture.gates_shared:
            name = f"{place}.shared_expert_gate.weight"
            yield self._task(name, Router(name, self._gates, layer, n_experts, self._gates.n_experts))

    def _matrix(self, place: int, layer: int, role: str) -> Readable:
        """Return a matrix of an expert, by its place among experts and shared experts."""
        model, expert = self._members[place], (*self._mixture.experts, *self._mixture.shared)[place]
        name = f"model.layers.{layer}.mlp.{role}.weight"
        tensor, wanted = self._checkpoints[model].tensors.get(name), self._checkpoints[0].tensors[name]
        if tensor is None or tensor.shape != wanted.shape:
            what = "lacks this tensor" if tensor is None else f"has shape {list(tensor.shape)}"
            message = f"the expert '{self._inputs[model].text}' {what}, the base has {list(wanted.shape)}"
            raise MismatchError.of("model.mismatch", name, message, "experts are models of the base's own shapes")
        self._used[model].add(name)
        factor = expert.residual if role == _ROLES[-1] else 1.0
        if not expert.noise and factor == 1.0:
            return tensor
        return Noisy(tensor, expert.noise, factor, (self._mixture.seed, place, layer, _ROLES.index(role)))

    def _task(self, name: str, tensor: Readable, model: int = 0) -> MergeTask:
        return copy_task(name, tensor, self._dtype, model)
