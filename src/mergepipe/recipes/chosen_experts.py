"""Choose experts of a mixture: some of them, in another order, twice, or one as a dense model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from mergepipe.checkpoints.config_files import Json, config_bytes
from mergepipe.checkpoints.contract import Checkpoint, Readable
from mergepipe.checkpoints.gathered_rows import gathered_rows
from mergepipe.checkpoints.stacked_experts import Piece, pieces_of
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.outcome import DroppedTensor
from mergepipe.errors import MismatchError, UnsupportedError
from mergepipe.recipes.recipe import Mixture, Recipe
from mergepipe.recipes.tasks import MergeTask, Resolution, copy_task

_COUNTS: Final = ("num_local_experts", "num_experts", "n_routed_experts")
_DENSE: Final = {"mixtral": ("mistral", "Mistral"), "qwen2_moe": ("qwen2", "Qwen2"), "qwen3_moe": ("qwen3", "Qwen3")}
_ONLY_MIXTURES: Final = re.compile(
    r".*expert.*|.*moe.*|num_experts_per_tok|decoder_sparse_step|norm_topk_prob|router_.*|output_router_logits|auto_map"
    r"|mlp_only_layers|first_k_dense_replace|scoring_func"
)
_OF_DENSE: Final = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_ROUTED: Final = re.compile(r".*\.(?:mlp|block_sparse_moe|feed_forward)\.(?:gate|router)\..+")
REASON_NOT_CHOSEN: Final = "of an expert that the recipe does not choose"


def _count_of(config: Json, where: object) -> tuple[str, int]:
    """Return the key of a configuration that counts experts, and the count."""
    key = next((key for key in _COUNTS if type(config.get(key)) is int), None)
    if key is None:
        message = "its configuration does not count experts, so it is not a mixture of experts to choose from"
        raise MismatchError.of("model.mismatch", where, message, "name a mixture of experts as base_model")
    return key, config[key]


def selected_config(config: Json, mixture: Mixture) -> bytes:
    """Return the configuration of the chosen experts, from that of the mixture."""
    key, _ = _count_of(config, CONFIG_NAME)
    if mixture.is_dense:
        model_type = str(config.get("model_type"))
        if model_type not in _DENSE:
            message = f"an expert of the type '{model_type}' has no dense model, those of {', '.join(_DENSE)} have"
            raise UnsupportedError.of("recipe.unsupported", CONFIG_NAME, message, "write experts: [N]")
        dense, name = _DENSE[model_type]
        kept = {name_: value for name_, value in config.items() if not _ONLY_MIXTURES.fullmatch(name_)}
        size = config.get("moe_intermediate_size") or config.get("intermediate_size")
        made = {**kept, "model_type": dense, "architectures": [f"{name}ForCausalLM"], "intermediate_size": size}
        return config_bytes(made)
    most = min(int(config.get("num_experts_per_tok") or 1), len(mixture.chosen))
    return config_bytes({**config, key: len(mixture.chosen), "num_experts_per_tok": most})


def select_experts(recipe: Recipe, base: Checkpoint, config: Json) -> Resolution:
    """List the tensors of a mixture that keeps some experts of the base, or of one expert as a dense model.

    Raises:
        MismatchError: the base has no such expert, or the experts cannot be grouped as its router groups them.
        UnsupportedError: the expert has no dense model, or its layout does not allow single experts to be taken.
    """
    assert recipe.mixture is not None
    chosen = recipe.mixture.chosen
    is_dense = recipe.mixture.is_dense
    _, n_experts = _count_of(config, base.path)
    if max(chosen) >= n_experts:
        message = f"has {n_experts} experts, and the recipe chooses number {max(chosen)}"
        raise MismatchError.of("model.mismatch", base.path, message, f"numbers go from 0 to {n_experts - 1}")
    n_groups = config.get("n_group")
    if type(n_groups) is int and n_groups > 1 and len(chosen) % n_groups and not is_dense:
        message = f"its router has {n_groups} groups of as many experts each (n_group), and {len(chosen)} are chosen"
        raise MismatchError.of("model.mismatch", base.path, message, f"choose a multiple of {n_groups}, group by group")

    tasks: list[MergeTask] = []
    dropped: list[DroppedTensor] = []
    for name, tensor in base.tensors.items():
        kept = list(_kept_of(name, tensor, chosen, n_experts, is_dense=is_dense))
        tasks.extend(copy_task(kept_name, part, recipe.dtype) for kept_name, part in kept)
        if not kept:
            dropped.append(DroppedTensor(recipe.inputs()[0].text, name, REASON_NOT_CHOSEN))
    return Resolution(tuple(tasks), tuple(dropped), recipe.inputs())


def _kept_of(
    name: str, tensor: Readable, chosen: Sequence[int], n_experts: int, *, is_dense: bool
) -> Iterator[tuple[str, Readable]]:
    """Yield what is kept of one tensor of a mixture, by its new name."""
    pieces = pieces_of(name, tensor.shape)
    if not pieces or _ROUTED.fullmatch(name):
        yield from _kept_outside_matrices(name, tensor, chosen, n_experts, is_dense=is_dense)
    elif len(pieces) == 1:
        piece = pieces[0]
        for place, expert in enumerate(chosen):
            if expert == piece.expert:
                renumbered = name.replace(f".experts.{piece.expert}.", f".experts.{place}.")
                yield _dense_name(piece) if is_dense else renumbered, tensor
    elif is_dense:
        yield from _cut_out(tensor, pieces, chosen[0], n_experts)
    else:
        yield name, gathered_rows(tensor, np.array(chosen, np.int64))


def _kept_outside_matrices(
    name: str, tensor: Readable, chosen: Sequence[int], n_experts: int, *, is_dense: bool
) -> Iterator[tuple[str, Readable]]:
    """Yield what is kept of a tensor that is no matrix of an expert: rows of routers and biases, all of any other."""
    if is_dense and "expert" in name:
        message = "does not belong to one expert (a shared expert?), so no expert is a dense model"
        raise UnsupportedError.of("recipe.unsupported", name, message, "write experts: [N]")
    is_routed = _ROUTED.fullmatch(name) is not None
    is_of_experts = ".experts." in name
    has_row_per_expert = tensor.shape[:1] == (n_experts,)
    if is_of_experts and not has_row_per_expert:
        message = "holds experts in a layout from which single experts cannot be taken"
        raise UnsupportedError.of("recipe.unsupported", name, message, "write the model out with transformers")
    if has_row_per_expert and (is_routed or is_of_experts or len(tensor.shape) == 3):
        tensor = gathered_rows(tensor, np.array(chosen, np.int64))
    if not (is_dense and is_routed):
        yield name, tensor


def _cut_out(tensor: Readable, pieces: Sequence[Piece], expert: int, n_experts: int) -> Iterator[tuple[str, Readable]]:
    """Yield the matrices of one expert, by their names in a dense model, from a tensor that stacks all experts."""
    entry = tensor.entry()
    if entry is None:
        message = "is computed while it is read (an adapter, a quantised weight), so no part of it can be taken"
        hint = "write the model out in bfloat16 first"
        raise UnsupportedError.of("model.unsupported", tensor.name, message, hint)
    n_roles = len(pieces) // n_experts
    shape = (tensor.shape[1] // n_roles, tensor.shape[2])
    nbytes = entry.nbytes // len(pieces)
    for number, piece in enumerate(pieces):
        if piece.expert == expert:
            fresh = _dense_name(piece)
            offset = entry.offset + number * nbytes
            yield fresh, replace(entry, name=fresh, shape=shape, offset=offset, nbytes=nbytes)


def _dense_name(piece: Piece) -> str:
    return f"{piece.layer}.mlp.{_OF_DENSE[piece.role]}.weight"
