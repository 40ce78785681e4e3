"""Hugging Face Trainer checkpoints, with optimizer state in `optimizer.pt`; weights alone, in a directory or a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from importlib import import_module
from threading import Lock
from typing import Any

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind
from mergepipe.checkpoints.directory import (
    ADAPTER_NAMES,
    SAFETENSORS,
    TORCH,
    is_adapter,
    list_names,
    open_checkpoint,
    read_weight_file,
    stat_present,
    torch_shards,
)
from mergepipe.checkpoints.quantised import refuse_quantised
from mergepipe.checkpoints.torch_file import SUFFIXES, TorchArchive, read_torch_weights, read_torch_zip
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.strict_json import JsonValue, parse_object
from mergepipe.errors import MismatchError, UnsupportedError, damaged, how_to_install, mismatched, unsupported
from mergepipe.storage.contract import TRAINER_JSON_BYTES, Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import WEIGHT, AdamStep, Framework, PicklePath, StoredState, TrainingCheckpoint
from mergepipe.tailor.formats.contract import (
    NO_OPTIMIZER,
    Node,
    TrainingFormat,
    optimizer_tensors,
    read_counter,
    recorded_step,
    step_of_name,
    tied_by_place,
)
from mergepipe.tailor.selection import model_units

# --- the order in which the Trainer numbers parameters, without torch where it is known ---


_DECODER = (
    "model.embed_tokens",
    *(f"model.layers.N.{module}" for module in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.qkv_proj",
        "self_attn.q_norm", "self_attn.k_norm",
        "mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "mlp.down_proj",
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )),
    "model.norm", "lm_head",
)  # fmt: skip
_GPT2 = (
    "transformer.wte", "transformer.wpe",
    *(f"transformer.h.N.{module}" for module in
      ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")),
    "transformer.ln_f", "lm_head",
)  # fmt: skip

ORDERS: dict[str, tuple[str, ...]] = {
    "gemma": _DECODER, "gemma2": _DECODER, "gemma3_text": _DECODER, "gpt2": _GPT2, "llama": _DECODER,
    "mistral": _DECODER, "olmo": _DECODER, "olmo2": _DECODER, "phi3": _DECODER, "qwen2": _DECODER, "qwen3": _DECODER,
}  # fmt: skip
"""By model type: modules in the order they are defined, those of every layer once, as of layer N."""

_NUMBER = re.compile(r"\.(\d+)\.", re.ASCII)
_NORM_WORDS = ("norm", "layernorm", "ln_1", "ln_2", "ln_f")


def defined_order(model_type: str, names: Iterable[str]) -> tuple[str, ...] | None:
    """Return `names` as the model defines them; None when the architecture is unknown or does not have them all."""
    order = ORDERS.get(model_type)
    unordered = list(names)
    if order is None:
        return None
    places = {name: _place(order, name) for name in unordered}
    if any(place is None for place in places.values()):
        return None
    return tuple(sorted(unordered, key=lambda name: places[name] or ()))


def trainer_order(defined: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Split parameters in defined order into those with weight decay and those without."""
    names = tuple(defined)
    return tuple(n for n in names if _decays(n)), tuple(n for n in names if not _decays(n))


def _place(order: tuple[str, ...], name: str) -> tuple[int, ...] | None:
    """Sort key of a parameter: before, in or behind layers, layer, module, weight before bias."""
    module, _, leaf = name.rpartition(".")
    number = _NUMBER.search(module)
    place = _NUMBER.sub(".N.", module, count=1)
    if leaf not in ("weight", "bias") or place not in order:
        return None
    index = order.index(place)
    first = next(i for i, module in enumerate(order) if ".N." in module)
    return index if number is None else first, int(number[1]) if number is not None else 0, index, int(leaf == "bias")


def _decays(name: str) -> bool:
    module, _, leaf = name.rpartition(".")
    word = module.rpartition(".")[2]
    return leaf != "bias" and not word.endswith(_NORM_WORDS)


# --- of other architectures: asked from transformers, which is imported here alone in tailor, lazily ---


_build_lock = Lock()  # models are built under settings of the process


def ask_transformers(folder: Location, model_type: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Build the model of `folder`'s configuration without memory; return parameters with weight decay and without.

    No code of the checkpoint is run: only architectures that transformers itself has.
    """
    message = f"the order of parameters of model type {model_type!r} is not known here"
    if not folder.is_local:
        raise unsupported(folder, message, "copy the checkpoint to this machine")
    try:
        torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
    except ImportError as error:
        raise unsupported(folder, message, f"transformers knows it: {how_to_install('torch')}") from error
    try:
        place = folder.local_path
        config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=True)
        kind = getattr(transformers, config.architectures[0])
        with _build_lock, torch.device("meta"):
            model = kind(config)
    except Exception as error:  # of any kind: a configuration that its class refuses, a package that is not installed
        raise unsupported(folder, f"transformers cannot build model type {model_type!r}: {error}") from error
    decayed = frozenset(transformers.Trainer.get_decay_parameter_names(None, model))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return tuple(n for n in names if n in decayed), tuple(n for n in names if n not in decayed)


# --- read the files of every Hugging Face Trainer directory, whatever keeps its optimizer state ---


TRAINER_STATE_NAME = "trainer_state.json"
SCHEDULER_NAME = "scheduler.pt"
SCALER_NAME = "scaler.pt"
LOSS_SCALER_NAME = "loss_scaler.pt"
"""Of partial checkpoints: the fields of DeepSpeed's loss scaler, which it keeps in its own files."""


def read_json(store: Store, path: Location) -> dict[str, JsonValue]:
    """Read a JSON object of the checkpoint directory, strictly."""
    return parse_object(store.read_small(path, TRAINER_JSON_BYTES), where=path, code="checkpoint.damaged")


def read_config(store: Store, folder: Location) -> dict[str, JsonValue]:
    """Read the model's configuration; empty where there is none."""
    return read_json(store, folder / CONFIG_NAME) if is_file(store, folder / CONFIG_NAME) else {}


def read_global_step(store: Store, folder: Location) -> int:
    """The step the Trainer resumes at."""
    path = folder / TRAINER_STATE_NAME
    step = read_json(store, path).get("global_step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise damaged(path, "'global_step' is not a count")
    return step


def tied_aliases(config: Mapping[str, JsonValue], parameters: Mapping[str, object]) -> dict[str, str]:
    """The head of a model that shares its input embedding, by the names both usually have."""
    if config.get("tie_word_embeddings") is False or "lm_head.weight" in parameters:
        return {}
    embeddings = ("model.embed_tokens.weight", "transformer.wte.weight")
    owner = next((name for name in embeddings if name in parameters), None)
    return {"lm_head.weight": owner} if owner is not None else {}


# --- plain Hugging Face Trainer checkpoints: weights in safetensors, optimizer state in `optimizer.pt` by number ---


HF_FORMAT = "hf-optimizer"
OPTIMIZER_NAME = "optimizer.pt"


def read_hf_checkpoint(store: Store, folder: Location) -> TrainingCheckpoint:
    """Read a Trainer checkpoint directory with an `optimizer.pt`; of tensors, only step counters are read.

    Where the optimizer's states are not known by parameter, there are the weights, and `missing` says why.
    """
    if is_adapter(list_names(store, folder)):
        return _read_adapter(store, folder, read_global_step(store, folder))
    model = open_checkpoint(store, folder)
    archive = read_torch_zip(store, folder / OPTIMIZER_NAME)
    optimizer, config = Node(archive.root, OPTIMIZER_NAME), read_json(store, folder / CONFIG_NAME)
    weights = StoredState.of_model(model, WEIGHT)
    states: dict[tuple[str, str], StoredState] = {}
    steps: list[AdamStep] = []
    missing: list[str] = []
    try:
        names = numbered_parameters(folder, config, model, optimizer)
        for number, name in enumerate(names):
            entry = optimizer.get("state").find(number)
            if entry is not None:
                held, counters = parameter_states(archive, entry, ("state", number), weights[name, WEIGHT])
                states |= held
                steps += counters
        kinds = {kind for _, kind in states}
        missing += [f"optimizer state of {n}" for n in names if any((n, kind) not in states for kind in kinds)]
    except (MismatchError, UnsupportedError) as error:
        states, steps = {}, []
        problem = error.problems[0]
        missing.append(f"the optimizer's state by parameter: {problem.message}; {problem.hint}".removesuffix("; "))
    parameters = {t.name: t.shape for t in model.tensors.values()}
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=HF_FORMAT,
        framework=Framework.TRANSFORMERS,
        world_size=rank_count(store, folder),
        step=read_global_step(store, folder),
        units=model_units(parameters, tied_aliases(config, parameters)),
        parameters=parameters,
        states=weights | states,
        steps=tuple(steps),
        missing=tuple(missing),
    )


def _read_adapter(store: Store, folder: Location, step: int) -> TrainingCheckpoint:
    """Read the checkpoint of a model that PEFT has wrapped: its adapter alone, without the optimizer's state."""
    name = next((name for name in ADAPTER_NAMES if is_file(store, folder / name)), ADAPTER_NAMES[0])
    entries = read_weight_file(store, folder, name, stat_present(store, folder, name)).entries
    parameters = {entry.name: entry.shape for entry in entries}
    return TrainingCheckpoint(
        path=folder,
        root=folder,
        format=HF_FORMAT,
        framework=Framework.TRANSFORMERS,
        world_size=rank_count(store, folder),
        step=step,
        units=model_units(parameters),
        parameters=parameters,
        states={(entry.name, WEIGHT): StoredState.whole(entry.name, WEIGHT, entry) for entry in entries},
        missing=("the base of its adapter, and the optimizer's state by parameter",),
    )


def rank_count(store: Store, folder: Location) -> int:
    """Count the ranks whose random states are saved, one at least."""
    return sum(fnmatchcase(entry.name, "rng_state_*.pth") for entry in store.list(folder)) or 1


def numbered_parameters(
    folder: Location, config: Mapping[str, JsonValue], model: Checkpoint, optimizer: Node
) -> tuple[str, ...]:
    """The parameter behind each number of the optimizer, checked against the groups and the weights."""
    model_type = str(config.get("model_type", ""))
    defined = defined_order(model_type, model.tensors)
    decayed, plain = trainer_order(defined) if defined is not None else ask_transformers(folder, model_type)
    _check_groups(folder, optimizer, len(decayed), len(decayed) + len(plain))
    names = decayed + plain
    absent = next((name for name in names if name not in model.tensors), None)
    if absent is not None:
        raise mismatched(folder, f"parameter {absent!r} is not among the weights")
    beyond = next((key for key in optimizer.get("state").mapping() if key not in range(len(names))), None)
    if beyond is not None:
        raise optimizer.get("state").error(f"state {str(beyond)[:40]!r} belongs to no parameter")
    return names


def _check_groups(folder: Location, optimizer: Node, n_decayed: int, n_all: int) -> None:
    """Each group must hold its parameters' numbers, counted on from the group before."""
    groups = [[n.integer() for n in g.get("params").elements()] for g in optimizer.get("param_groups").elements()]
    expected = [list(range(n_decayed)), list(range(n_decayed, n_all))]
    if [g for g in groups if g] != [g for g in expected if g]:
        raise mismatched(
            folder / OPTIMIZER_NAME,
            f"groups of {[len(g) for g in groups][:8]} parameters; the Trainer makes groups of "
            f"{[len(g) for g in expected]} for this model",
            "only the Trainer's own parameter groups are read, with no frozen parameter",
        )  # fmt: skip


def parameter_states(
    archive: TorchArchive, entry: Node, place: PicklePath, parameter: StoredState
) -> tuple[dict[tuple[str, str], StoredState], list[AdamStep]]:
    """Read the states and the step counter of one parameter, whose `entry` is at `place` in the archive's pickle."""
    name, states = parameter.parameter, {}
    for kind, tensor in optimizer_tensors(archive, entry):
        if tensor.shape != parameter.shape:
            message = f"state {kind!r} of shape {tensor.shape} for a parameter of shape {parameter.shape}"
            hint = "only optimizers whose states have their parameter's shape are read, as AdamW"
            raise unsupported(f"{archive.file}: {entry.path}", message, hint)
        states[name, kind] = StoredState.whole(name, kind, tensor)
    counter = entry.find("step")
    return states, [] if counter is None else [read_counter(archive, counter, (*place, "step"), (name,))]


TRAINER = TrainingFormat(
    HF_FORMAT,
    f"{TRAINER_STATE_NAME} with {OPTIMIZER_NAME} (Hugging Face Trainer)",
    # by two names, whatever stands there: what is no file is refused when it is read
    lambda store, path: {TRAINER_STATE_NAME, OPTIMIZER_NAME} <= list_names(store, path),
    lambda store, path, _: read_hf_checkpoint(store, path),
    state_file=TRAINER_STATE_NAME,
    records_step=True,
    partial_frameworks=frozenset({Framework.TRANSFORMERS}),
)


# --- directories of weights alone, as `save_only_model` leaves them: sources of averages without optimizer state ---


WEIGHTS_FORMAT = "weights-only"
_WEIGHT_NAMES = frozenset(name for files in (SAFETENSORS, TORCH) for name in (files.single, files.index))


def _recognise_weights(store: Store, path: Location) -> bool:
    """Recognise the usual names of weights without an optimizer's; formats that keep more are asked first."""
    names = list_names(store, path)
    has_weights = _WEIGHT_NAMES & names or torch_shards(names) or is_adapter(names)
    return bool(has_weights) and OPTIMIZER_NAME not in names


def read_weights(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """Read weights of one step of a run, without the state that training is resumed with; of tensors, nothing."""
    if is_adapter(list_names(store, path)):
        return _read_adapter(store, path, _step_of_folder(store, path, home))
    model = open_checkpoint(store, path)
    refuse_quantised(store, model)
    if model.kind is not CheckpointKind.FULL:
        raise unsupported(path, "holds differences from a base, not weights", "name weights")
    states = StoredState.of_model(model, WEIGHT)
    parameters = {name: state.shape for (name, _), state in states.items()}
    return TrainingCheckpoint(
        path=path,
        root=path,
        format=WEIGHTS_FORMAT,
        framework=Framework.TRANSFORMERS,
        step=_step_of_folder(store, path, home),
        units=model_units(parameters, tied_aliases(read_config(store, path), parameters)),
        parameters=parameters,
        states=states,
        missing=(NO_OPTIMIZER,),
    )


def _step_of_folder(store: Store, path: Location, home: Location) -> int:
    if is_file(store, path / TRAINER_STATE_NAME):
        return read_global_step(store, path)
    step = step_of_name(home.name)
    if step is None:
        message = f"has only weights, and neither {TRAINER_STATE_NAME} nor its name gives the step"
        raise unsupported(path, message, "name it by its step, as checkpoint-400")
    return step


WEIGHTS = TrainingFormat(
    WEIGHTS_FORMAT,
    f"{SAFETENSORS.single} (weights alone)",
    _recognise_weights,
    read_weights,
    state_file=TRAINER_STATE_NAME,
)


# --- one file of `torch.save`, as loops under torchrun and Lightning leave it: its weights, by their names ---


ONE_FILE_FORMAT = "torch-file"
_STEPS = ("global_step", "step", "iter_num", "iteration")


def read_one_file(store: Store, path: Location, home: Location) -> TrainingCheckpoint:
    """Read a file with a state dict, by itself or under `model`, `state_dict` and the like; of tensors, nothing.

    Its optimizer, if there is one, numbers parameters in an order that the file does not tell: it gives weights alone.
    """
    entries = read_torch_weights(store, path).entries
    named = {entry.name: entry for entry in entries}
    in_order = [named[name] for name in model_units(named).names]  # embeddings own what a head is tied to
    tied = tied_by_place({entry.name: (entry.offset, entry.nbytes) for entry in in_order if entry.nbytes})
    parameters = {entry.name: entry.shape for entry in in_order if entry.name not in tied}
    recorded = recorded_step(read_torch_zip(store, path).root, _STEPS)
    named_step = step_of_name(home.name.rpartition(".")[0] or home.name) or 0
    return TrainingCheckpoint(
        path=path,
        root=path,
        format=ONE_FILE_FORMAT,
        step=named_step if recorded is None else recorded,
        units=model_units(parameters, tied),
        parameters=parameters,
        states={(name, WEIGHT): StoredState.whole(name, WEIGHT, named[name]) for name in parameters},
        missing=(NO_OPTIMIZER,),
        lender=path.parent,
    )


ONE_FILE = TrainingFormat(ONE_FILE_FORMAT, f"a file of torch.save ({', '.join(SUFFIXES)})", is_file, read_one_file)
