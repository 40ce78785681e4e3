"""Merge LoRA adapters into one adapter, by their factors alone: no base is read, and no product is ever formed.

Legend: M rows, N columns, R rank, E experts, K adapters; U and V columns of the common bases.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.adapted_tensors import read_finite
from mergepipe.checkpoints.adapter_forms import read_adapter
from mergepipe.checkpoints.config_files import Json, parse_config
from mergepipe.checkpoints.contract import TensorEntry
from mergepipe.checkpoints.directory import ADAPTER_CONFIG_NAME
from mergepipe.checkpoints.open_files import open_files
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.checkpoints.stored_adapters import DIFFUSERS, KOHYA, PREFIX, AdaptedModule, StoredAdapter
from mergepipe.core.flags import public_call, several
from mergepipe.core.outcome import private_outputs
from mergepipe.core.strict_json import shown
from mergepipe.core.units import format_percent, one_of
from mergepipe.errors import MergePipeError, MismatchError, RecipeError, UnsupportedError, invalid_option
from mergepipe.jobs.load import load_file
from mergepipe.jobs.merge import merge
from mergepipe.jobs.merge_run import run_merge
from mergepipe.operators.registry import operator_named, operator_specs
from mergepipe.operators.spec import BaseRole
from mergepipe.options import (
    APPLY_MEMORY_BYTES,
    ApplyLoraOptions,
    MergeLoraOptions,
    MergeOptions,
    OutputOptions,
    default_memory_bytes,
)
from mergepipe.recipes.yaml_source import YamlSource, read_yaml, recipe_text
from mergepipe.reports import MergedModule, MergeLoraReport, MergeReport, ProgressCallback
from mergepipe.runs.adapter_output import AdapterFacts, adapter_output, recorded_recipe, relative_name
from mergepipe.runs.adapters import (
    WEIGHTS_NAME,
    AdapterWriter,
    LargestShape,
    adapter_config,
    apply_recipe,
    factor_names,
    located_adapters,
    stated_targets,
    targets_of,
)
from mergepipe.runs.merge_settings import merge_settings
from mergepipe.runs.model_card import base_id, hub_id_of, stated_base_id
from mergepipe.snapshots.manifest import ADAPTER_ROLE, MERGED_ADAPTERS, InputRecord
from mergepipe.storage.contract import ADAPTER_CONFIG_BYTES, Store, is_folder
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output import make_folders
from mergepipe.storage.output_places import ANYWHERE, output_place
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.stores import Stores

CONCATENATION, TRUNCATION = "cat", "svd"
_OF_FILES = {KOHYA: "Kohya's", DIFFUSERS: "those of a file for diffusion models"}
"""Kinds of adapters in one file without a configuration: whose names they have."""
_RECIPE_SUFFIXES = (".yml", ".yaml")
_WITHOUT_FACTORS = {
    "LOKR": "its delta is a Kronecker product, not one of thin factors",
    "IA3": "it scales weights of the base, and has no delta of its own",
}
_LARGEST_FACTOR = 1e75  # the squares of products of two are finite in float64
_ROWS = ".token_adapter.trainable_tokens_delta"
_RECIPE_LINE = re.compile(r"^recipe:\d+ \S+?(: |$)")
_EXTRACT_HINT = "apply it to the base, and extract a LoRA from the result"
_RECIPE_KEYS = ("output", "merge_method", "models", "parameters", "rank")
Matrix = NDArray[np.float64]
Pair = tuple[Matrix, Matrix]
"""Factors of one delta: (M, R) with all scales in it, and (R, N)."""


@public_call(ApplyLoraOptions)
def apply_lora(
    base: str | Path,
    adapters: Sequence[str | Path],
    out: str | Path,
    *,
    options: OutputOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> MergeReport:
    """Add LoRA adapters to `base` and publish the result at `out`, complete or not at all: a merge of `base+adapter`.

    One adapter at weight 1 gives what PEFT's `merge_and_unload` gives; several, or other weights, the base plus the
    weighted sum of what each changes. Sums are taken in float32 and rounded once. Memory: 512 MiB of buffers, or
    `memory_bytes` of the options.

    Args:
        options: `ApplyLoraOptions`: weights, dtype, threads, memory, shards, publishing.

    Raises:
        MismatchError: an adapter changes what the base lacks, or two store one module in full.
    """
    made = ApplyLoraOptions.of(options, fields)
    recipe = apply_recipe(str(base), [str(adapter) for adapter in several(adapters)], made.weights, made.dtype)
    if made.tokenizer_of is not None:
        recipe["adapter_tokenizer"] = made.tokenizer_of
    if made.adapter_names:
        recipe["adapter_names"] = dict(map(renaming, made.adapter_names))
    memory_bytes = made.memory_bytes or min(APPLY_MEMORY_BYTES, default_memory_bytes())
    merging = made.common(MergeOptions, allow_dropped=made.allow_unapplied, memory_bytes=memory_bytes)
    try:
        return merge(recipe, out, options=merging, on_progress=on_progress)
    except MergePipeError as error:  # the lines of a recipe that nobody wrote tell nothing
        problems = (replace(problem, where=_RECIPE_LINE.sub("", problem.where)) for problem in error.problems)
        raise type(error)(*problems) from error


def renaming(text: str) -> tuple[str, str]:
    """Return the two names in `OLD=NEW`."""
    part, sign, other = text.partition("=")
    if not sign or not part.strip("."):
        raise invalid_option("--rename", f"{text!r} is not OLD=NEW", "write a part of a name, and what the base has")
    return part, other


@public_call(MergeLoraOptions)
def merge_lora(
    adapters: Sequence[str | Path], out: str | Path, *, options: MergeLoraOptions | None = None, **fields: Any
) -> MergeLoraReport:
    """Merge LoRA adapters of one base into one adapter, published at `out` as PEFT reads it; no base is read.

    `out` is a folder, a prefix of a bucket or a repository of the Hub, where the adapter appears with a card and a
    record, complete or not at all. `cat` is exact: the factors stand side by side, and ranks add up. `svd` is the best
    approximation of the same sum of a rank. Any operator of recipes (`linear`, `ties`, `dare_ties`, ...) merges the
    cores of the deltas in bases that all adapters share, which loses nothing of a delta, and what comes out is cut to
    `rank`, if there is one. In place of the adapters stands a recipe (`.yml`) of such an operator, with
    `output: adapter`: its filters and gradients hold for the modules of the adapters.

    Raises:
        RecipeError: options that do not fit together.
        MismatchError: adapters of different bases, or two that store one module in full.
        UnsupportedError: DoRA, whose delta depends on the base.
    """
    started = time.perf_counter()
    store, place, core_recipe = Stores(), output_place(out, ANYWHERE), None
    names, made = [str(adapter) for adapter in several(adapters)], MergeLoraOptions.of(options, fields)
    if len(names) == 1 and Path(names[0]).suffix in _RECIPE_SUFFIXES:
        names, core_recipe, made = _read_recipe(store, Path(names[0]), made)
    made = replace(made, weights=made.weights or (1.0,) * len(names))
    _check_options(made, len(names))
    stated_base = stated_base_id(made.base_model_id)
    locations = located_adapters(store, names)
    opened = [read_adapter(store, location) for location in locations]
    entries = [entry for adapter in opened for entry in _entries(adapter)]
    with (
        adapter_output(store, place, locations, made, started) as output,
        open_files(store, {entry.file for entry in entries}) as files,
    ):
        merge = _AdapterMerge(tuple(names), opened, made, files, store.ledger, core_recipe)
        is_file = opened[0].config.kind in _OF_FILES
        path = output.path / (f"{place.model_name}.safetensors" if is_file else WEIGHTS_NAME)
        with AdapterWriter(path, merge.possible(), store.ledger) as writer:
            merge.write(writer)
            weights = writer.finish()
        small = {} if is_file else {ADAPTER_CONFIG_NAME: merge.config(_configs(store, locations))}
        base_model = stated_base or base_id(opened[0].config.base)
        manifest = output.publish(weights, merge.facts(store, place, locations, base_model), small)
    return MergeLoraReport(
        adapters=tuple(names),
        out=place.local_path if place.is_local else place,
        method=made.method,
        modules=tuple(merge.merged),
        saved_modules=tuple(merge.full),
        kept_energy=_share_kept(merge.lost_square, merge.square),
        adapter_bytes=weights.file_bytes,
        read_bytes=store.ledger.usage()[Purpose.EXPERT],
        sid=manifest.sid,
        notices=(*_base_notices(names, opened), *output.link.notices),
        seconds=time.perf_counter() - started,
    )


def _base_notices(names: Sequence[str], adapters: Sequence[StoredAdapter]) -> list[str]:
    """Warn about adapters whose configurations name other bases than the first adapter's does."""
    first_base = adapters[0].config.base
    notices = []
    for name, adapter in zip(names[1:], adapters[1:], strict=True):
        base = adapter.config.base
        if base and first_base and base != first_base:
            notices.append(
                f"{name} was trained on {shown(base)}, and {names[0]} on {shown(first_base)}: "
                "if these are two models, the merged adapter fits neither"
            )
    return notices


def _configs(store: Store, locations: Sequence[Location]) -> list[Json]:
    """Read the configurations of adapters; that of a file is empty."""
    paths = [location / ADAPTER_CONFIG_NAME for location in locations if is_folder(store, location)]
    if not paths:
        return [{}]
    return [parse_config(store.read_small(path, ADAPTER_CONFIG_BYTES), path) for path in paths]


def _read_recipe(
    store: Stores, path: Path, options: MergeLoraOptions
) -> tuple[list[str], Json | None, MergeLoraOptions]:
    """Return the adapters of a recipe with `output: adapter`, that recipe of their cores, and the options in force.

    `cat` and `svd` merge no cores: their weights are among the options.
    """
    source = read_yaml(Location.local(path).absolute(), store)
    root = source.root if isinstance(source.root, dict) else {}
    if root.get("output") != "adapter":
        message = "the recipe makes a model, not an adapter"
        raise RecipeError.of(
            "recipe.value", source.where("output"), message, "write `output: adapter`, or use `mergepipe merge`"
        )
    for key in root:
        if key not in _RECIPE_KEYS:
            message = f"has no effect for an adapter: {', '.join(_RECIPE_KEYS)} have"
            raise RecipeError.of("recipe.unknown-name", source.where(key), message)
    models, method = root.get("models"), root.get("merge_method")
    if not isinstance(models, list) or not isinstance(method, str):
        raise RecipeError.of("recipe.incomplete", source.where(), "`merge_method` and a list of `models` are needed")
    if (options.method, options.weights, options.density) != (CONCATENATION, (), None):
        message = "the recipe sets --method, --weight and --density"
        raise RecipeError.of("option.conflict", "--method", message, "leave them out")
    adapters = []
    for index, entry in enumerate(models):
        text = entry.get("model") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise RecipeError.of("recipe.incomplete", source.where("models", index), "`model` does not name an adapter")
        beside = path.parent / text
        adapters.append(str(beside) if store.stat(Location.local(beside).absolute()) is not None else text)
    made = replace(options, method=method, rank=_recipe_rank(source, root, options.rank))
    entries = [entry for entry in models if isinstance(entry, dict)]
    if method in (CONCATENATION, TRUNCATION):
        weights = tuple(_recipe_weight(source, index, entry) for index, entry in enumerate(entries))
        if root.get("parameters"):
            message = f"has no effect with {method}: give each model its own weight"
            raise RecipeError.of("recipe.unknown-name", source.where("parameters"), message)
        return adapters, None, replace(made, weights=weights)
    cores = [{**entry, "model": f"adapter-{k}"} for k, entry in enumerate(entries)]
    content = {key: value for key, value in root.items() if key not in ("output", "rank")}
    return adapters, {**content, "models": cores}, made


def _recipe_rank(source: YamlSource, root: Json, stated: int | None) -> int | None:
    """Return the rank of a recipe, or the `stated` one of a recipe that has none."""
    rank = root.get("rank")
    if rank is None:
        return stated
    if stated is not None:
        raise RecipeError.of("option.conflict", "--rank", "the recipe also sets a rank", "leave one of the two out")
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise RecipeError.of("recipe.value", source.where("rank"), f"must be a whole number, found {shown(rank)}")
    return rank


def _recipe_weight(source: YamlSource, index: int, entry: Json) -> float:
    """Return the weight of one adapter of a recipe for `cat` or `svd`, 1 where there is none."""
    parameters = entry.get("parameters") or {}
    if isinstance(parameters, dict) and parameters.keys() <= {"weight"}:
        weight = parameters.get("weight", 1.0)
        if isinstance(weight, int | float) and not isinstance(weight, bool):
            return float(weight)
    where = source.where("models", index, "parameters")
    message = f"must be one weight, a number, found {shown(parameters)}"
    raise RecipeError.of("recipe.value", where, message, "filters and gradients need an operator such as linear")


def _entries(adapter: StoredAdapter) -> Iterator[TensorEntry]:
    for parts in adapter.modules.values():
        yield from (*parts.down.stored, *parts.up.stored)
        for vector in (parts.bias, parts.magnitude):
            yield from () if vector is None else vector.stored
    for tensor in (*adapter.full.values(), *adapter.copies.values(), *adapter.tokens.values()):
        yield from tensor.stored


@dataclass(slots=True)
class _AdapterMerge:
    """Goes through the modules of all adapters, one at a time, and keeps what the report says of them."""

    names: tuple[str, ...]
    adapters: list[StoredAdapter]
    options: MergeLoraOptions
    files: Mapping[Location, RangeFile]
    ledger: Ledger
    recipe: Json | None = None  # of an operator; without one, the operator and the weights of the options
    merged: list[MergedModule] = field(default_factory=list)
    square: float = 0.0
    lost_square: float = 0.0
    full: dict[str, StoredTensor] = field(default_factory=dict)
    _modules: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    _experts: dict[str, int] = field(default_factory=dict)

    @property
    def _is_elementwise(self) -> bool:
        """Whether an operator merges the cores, with the weights."""
        return self.options.method not in (CONCATENATION, TRUNCATION)

    def __post_init__(self) -> None:
        kinds = [_OF_FILES.get(adapter.config.kind) for adapter in self.adapters]
        for name, adapter in zip(self.names, self.adapters, strict=True):
            if adapter.config.kind in _WITHOUT_FACTORS:
                message = f"it is {adapter.config.kind}: {_WITHOUT_FACTORS[adapter.config.kind]}"
                raise UnsupportedError.of("adapter.unsupported", name, message, _EXTRACT_HINT)
        if len({*kinds}) > 1:
            index = next(index for index, kind in enumerate(kinds) if kind is not None)
            kind = kinds[index]
            message = f"its names are {kind}, and those of another adapter are not: no module is known to be the same"
            hint = "convert one of them by `mergepipe lora convert --base BASE`"
            raise UnsupportedError.of("adapter.unsupported", self.names[index], message, hint)
        for index, adapter in enumerate(self.adapters):
            for module, parts in adapter.modules.items():
                self._modules[module].append(index)
                self._check_module(index, module, parts)
            tokens = {f"{module}{_ROWS}": rows for module, rows in adapter.tokens.items()}
            for name, entry in {**adapter.full, **tokens}.items():
                if name in self.full:
                    message = f"it stores {shown(name)} in full, and so does another adapter"
                    raise MismatchError.of("adapter.mismatch", self.names[index], message, "leave one of the two out")
                self.full[name] = entry
        changed = Counter([*self._modules, *(name.removesuffix(".weight").removesuffix(_ROWS) for name in self.full)])
        twice = [module for module, count in changed.items() if count > 1]
        if twice:
            message = f"for {shown(twice[0])} the adapters store different things: factors, tokens, or the full tensor"
            raise MismatchError.of("adapter.mismatch", self.names[-1], message, "apply them to the base, all at once")
        if len({adapter.config.is_transposed for adapter in self.adapters}) > 1:
            message = "fan_in_fan_out is true for some adapters and false for others"
            raise MismatchError.of("adapter.mismatch", self.names[0], message, "are they of one base?")
        if len([adapter for adapter in self.adapters if adapter.config.tokens]) > 1:
            message = "it trains single tokens, and so does another adapter"
            raise UnsupportedError.of("adapter.unsupported", self.names[-1], message, "apply them to the base in turn")

    def _check_module(self, index: int, module: str, parts: AdaptedModule) -> None:
        first = self.adapters[self._modules[module][0]].modules[module]
        first_name = self.names[self._modules[module][0]]
        n_experts = self._expert_count(index, module, parts)
        made = (*parts.shape, n_experts, parts.is_embedding, parts.kernel)
        needed = (*first.shape, self._experts.setdefault(module, n_experts), first.is_embedding, first.kernel)
        if made != needed:
            message = f"its factors of {shown(module)} make {_form(made)}, those of {first_name} {_form(needed)}"
            bases = [self.adapters[number].config.base for number in (index, self._modules[module][0])]
            hint = "adapters of one base are merged"
            if all(bases) and len(set(bases)) > 1:
                hint = f"{hint}, and these name {bases[0]} and {bases[1]}"
            raise MismatchError.of("adapter.mismatch", self.names[index], message, hint)
        is_itself = len(self.adapters) == 1 and self.options.weights == (1.0,)
        if parts.magnitude is not None and not is_itself:
            message = f"{shown(module)} is DoRA, whose delta depends on the norms of the base"
            raise UnsupportedError.of("adapter.unsupported", self.names[index], message, _EXTRACT_HINT)

    def _expert_count(self, index: int, module: str, parts: AdaptedModule) -> int:
        """Count the experts that the factors of a module are stacked of: 1 for all but bare parameters."""
        config = self.adapters[index].config
        ranks = {config.rank_of(name) for name in config.nested_parameters(module) or [module]}
        if len(ranks) > 1 or parts.down.shape[0] % min(ranks):
            message = f"{shown(module)} has a rank of {parts.down.shape[0]}, which the configuration does not explain"
            raise UnsupportedError.of("adapter.unsupported", self.names[index], message)
        return parts.down.shape[0] // min(ranks)

    # --- what is written ---

    def possible(self) -> Iterator[LargestShape]:
        """List every tensor of the output with its largest shape."""
        for module, owners in self._modules.items():
            parts = self.adapters[owners[0]].modules[module]
            stacked = sum(self.adapters[owner].modules[module].down.shape[0] for owner in owners)
            down, up = self._factor_names(module, parts)
            yield (down, (stacked, *(parts.kernel or parts.down.shape[1:])))
            yield (up, (parts.up.shape[0], stacked, *_ones(parts)))
            if parts.kernel:
                yield (f"{module}.alpha", ())
                continue
            yield (f"{PREFIX}{module}.lora_B.bias", parts.up.shape[:1])
            yield (f"{PREFIX}{module}.lora_magnitude_vector", parts.up.shape[:1])
        for name, entry in self._whole().items():
            yield (f"{PREFIX}{name}", entry.shape)

    def write(self, writer: AdapterWriter) -> None:
        """Merge module by module, and write the factors as they come."""
        cores = self._merged_cores() if self._is_elementwise else {}
        for module in self._modules:
            self._write_module(writer, module, cores)
        for name, entry in self._whole().items():
            writer.append(f"{PREFIX}{name}", read_finite(entry, self.files, Purpose.EXPERT), entry.shape)

    def _whole(self) -> dict[str, StoredTensor]:
        """Tensors that are stored in full, by the names that PEFT gives to those of modules with factors too."""
        copies = {name: entry for adapter in reversed(self.adapters) for name, entry in adapter.copies.items()}
        split = {name: name.rpartition(".") for name in {**copies, **self.full}}
        return {
            f"{module}.base_layer.{leaf}" if module in self._modules else name: copies.get(name) or self.full[name]
            for name, (module, _, leaf) in split.items()
        }

    def _write_module(self, writer: AdapterWriter, module: str, cores: Mapping[str, Matrix]) -> None:
        merged: list[Pair] = []
        lost = square = 0.0
        owners = self._modules[module]
        for expert, pairs in enumerate(self._pairs(module)):
            if self.options.method == CONCATENATION:
                merged.append((np.hstack([up for up, _ in pairs]), np.vstack([down for _, down in pairs])))
                continue
            bases = common_bases(pairs)
            summed = sum((core_of(pair, bases) for pair in pairs), np.zeros(()))
            core = cores.get(f"{module}.{expert}.weight", summed)
            if not np.isfinite(core).all():
                message = f"the merged delta of {shown(module)} is beyond float32"
                raise UnsupportedError.of("adapter.unsupported", self.names[owners[0]], message, "lower the weights")
            pair, kept, all_energy = truncated(core, bases, self.options.rank)
            merged.append(pair)
            lost, square = lost + all_energy - kept, square + all_energy
        parts = self.adapters[owners[0]].modules[module]
        rank = merged[0][0].shape[1]
        up_MRE = np.stack([up for up, _ in merged], axis=2)
        down, up = self._factor_names(module, parts)
        down_values, up_values = np.vstack([down for _, down in merged]), up_MRE.reshape(len(up_MRE), -1)
        writer.append(
            down, down_values.astype(np.float32), (len(down_values), *(parts.kernel or down_values.shape[1:]))
        )
        writer.append(up, up_values.astype(np.float32), (*up_values.shape, *_ones(parts)))
        if parts.kernel:
            writer.append(f"{module}.alpha", np.array([rank], np.float32), ())
        if any(self.adapters[owner].modules[module].bias for owner in owners):
            if self.recipe is not None:
                message = f"{shown(module)} has a trained bias (lora_bias), which a recipe of cores does not merge"
                raise UnsupportedError.of("adapter.unsupported", self.names[owners[0]], message, "give --weight")
            bias = self._bias(module)
            writer.append(f"{PREFIX}{module}.lora_B.bias", bias, bias.shape)
        if parts.magnitude is not None:
            magnitude = read_finite(parts.magnitude, self.files, Purpose.EXPERT)
            writer.append(f"{PREFIX}{module}.lora_magnitude_vector", magnitude, magnitude.shape)
        self.merged.append(MergedModule(module, rank, _share_kept(lost, square)))
        self.square, self.lost_square = self.square + square, self.lost_square + lost

    @staticmethod
    def _factor_names(module: str, parts: AdaptedModule) -> tuple[str, str]:
        if parts.kernel:
            return f"{module}.lora_down.weight", f"{module}.lora_up.weight"
        return factor_names(module, is_embedding=parts.is_embedding)

    def config(self, stated: Sequence[Json]) -> bytes:
        """Write the configuration: that of a plain LoRA in which alpha equals the rank, module by module.

        `stated` are the configurations of the adapters; the first one's base and task are kept.
        """
        first = stated[0]
        names = {module: self._parameter_names(module) for module in self._modules}
        ranks = {name: module.rank for module in self.merged for name in names[module.module] or [module.module]}
        bare = {name for module in self._modules for name in names[module]}
        saved = {name.rpartition(".")[0] for name in self.full if not name.endswith((".bias", "tokens_delta"))}
        rows: Json = {module: list(tokens) for a in self.adapters for module, tokens in a.config.tokens.items()}
        more: Json = {
            "lora_bias": any(parts.bias for adapter in self.adapters for parts in adapter.modules.values()),
            "target_parameters": sorted(bare) or None,
            "trainable_token_indices": rows.get("", rows) or None,
            "target_modules": stated_targets(
                (module for module in self._modules if not names[module]),
                (target for config in stated for target in targets_of(config)),
            ),
            "use_dora": any(adapter.config.is_dora for adapter in self.adapters),
        }
        if any(name.endswith(".bias") for name in self.full):
            more["bias"] = "lora_only"
        if any(adapter.config.keeps_tied for adapter in self.adapters):
            more["ensure_weight_tying"] = True
        return adapter_config(
            base_model=_text(first.get("base_model_name_or_path", first.get("model"))),
            revision=_text(first.get("revision")),
            ranks=ranks,
            modules=(),
            saved_modules=sorted(saved),
            transposed=self.adapters[0].config.is_transposed,
            task_type=_text(first.get("task_type")),
            more=more,
        )

    def facts(self, store: Store, out: Location, locations: Sequence[Location], base_model: str) -> AdapterFacts:
        """Return what is recorded of the merged adapter, which goes to `out`."""
        names = [relative_name(name, out) for name in self.names]
        by_file = self.ledger.usage().by_file
        inputs = []
        for index, (name, place, adapter) in enumerate(zip(names, locations, self.adapters, strict=True)):
            paths = {str(entry.file) for entry in _entries(adapter)}
            is_repeated = place in locations[:index]  # its files have one count
            read_bytes = 0 if is_repeated else sum(by_file[path, Purpose.EXPERT] for path in paths)
            inputs.append(
                InputRecord(
                    role=ADAPTER_ROLE,
                    model=name,
                    path=str(place),
                    content_id=None,
                    read_bytes=read_bytes,
                    files=tuple(file.id for file in adapter.files),
                    hub_id=hub_id_of(place, store),
                )
            )
        kept = format_percent(_share_kept(self.lost_square, self.square))
        return AdapterFacts(
            operator=MERGED_ADAPTERS,
            method=self.options.method,
            summary=f"LoRA adapters {' and '.join(names)} merged by {self.options.method}: {kept} of their deltas kept",
            recipe=recorded_recipe({"output": "adapter", **self._recipe_with_names(names)}),
            inputs=tuple(inputs),
            quality=f"It keeps {kept} of the squared norm of the merged deltas.",
            base_model=base_model,
            seed=self.options.seed,
        )

    def _recipe_with_names(self, names: Sequence[str]) -> Json:
        """Return the recipe, or the options as one, with the adapters by `names`."""
        recipe = self.recipe or self._stated_recipe()
        listed = recipe["models"]
        entries = listed if isinstance(listed, list) else []
        models = [{**entry, "model": name} for entry, name in zip(entries, names, strict=True)]
        rank = {} if self.options.rank is None else {"rank": self.options.rank}
        return {**recipe, "models": models, **rank}

    def _parameter_names(self, module: str) -> list[str]:
        """List the bare parameters that factors under the name of a module may be of."""
        owners = self._modules[module]
        return sorted({name for owner in owners for name in self.adapters[owner].config.nested_parameters(module)})

    # --- what is merged ---

    def _pairs(self, module: str) -> Iterator[list[Pair]]:
        """Yield the factors of a module, expert by expert: one pair for each adapter that has the module."""
        n_experts = self._experts[module]
        stacks: list[tuple[Matrix, Matrix]] = []
        for owner in self._modules[module]:
            parts = self.adapters[owner].modules[module]
            up = read_finite(parts.up, self.files, Purpose.EXPERT).astype(np.float64) * self._scale(owner, module)
            down = read_finite(parts.down, self.files, Purpose.EXPERT).astype(np.float64)
            largest = max(np.abs(up).max(initial=0.0), np.abs(down).max(initial=0.0))
            if not largest <= _LARGEST_FACTOR:
                message = f"the factors of {shown(module)} reach {largest:.3g} by its scale and weight"
                hint = f"at most {_LARGEST_FACTOR:g} can be merged: lower the weight, or correct lora_alpha"
                raise UnsupportedError.of("adapter.unsupported", self.names[owner], message, hint)
            stacks.append((up.reshape(len(up), -1, n_experts), down.reshape(n_experts, -1, down.shape[1])))
        for expert in range(n_experts):
            yield [(up_MRE[:, :, expert], down_ERN[expert]) for up_MRE, down_ERN in stacks]

    def _scale(self, owner: int, module: str) -> float:
        """Return what a product is multiplied by: its own scale and, where no operator does that, the weight."""
        config, names = self.adapters[owner].config, self._parameter_names(module)
        weight = 1.0 if self._is_elementwise else self.options.weights[owner]
        return config.scale_of(names[0] if names else module) * weight

    def _bias(self, module: str) -> NDArray[np.float32]:
        """Sum the biases of a module's factors, each with its scale and weight."""
        total = np.zeros(self.adapters[self._modules[module][0]].modules[module].up.shape[0])
        for owner in self._modules[module]:
            bias = self.adapters[owner].modules[module].bias
            if bias is not None:
                scale = self.adapters[owner].config.scale_of(module) * self.options.weights[owner]
                total += scale * read_finite(bias, self.files, Purpose.EXPERT).astype(np.float64)
        return total.astype(np.float32)

    def _merged_cores(self) -> dict[str, Matrix]:
        """Merge the cores of all modules by the operator: a merge of small models like any other.

        Each adapter is a model of its cores, in the bases that all of them share, and the base is one of zeros.
        """
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            self._write_cores(root)
            recipe: Json = {**(self.recipe or self._stated_recipe()), "dtype": "float32"}
            if operator_named(self.options.method).spec.base_role is not BaseRole.NONE:
                recipe["base_model"] = "zeros"
            out = root / "merged"
            settings = merge_settings(MergeOptions(catalog=False, seed=self.options.seed, card=False), out)
            with private_outputs():
                run_merge(recipe_text(recipe, Location.local(root)), settings)
            tensors = load_file(out, threads=1)
            return {name: np.asarray(tensors[name], np.float64) for name in tensors}

    def _stated_recipe(self) -> Json:
        density = {} if self.options.density is None else {"density": self.options.density}
        weights = enumerate(self.options.weights)
        models = [{"model": f"adapter-{k}", "parameters": {"weight": weight, **density}} for k, weight in weights]
        return {"merge_method": self.options.method, "models": models}

    def _write_cores(self, root: Path) -> None:
        """Write the models of cores, and the base of zeros: one matrix for each module and expert."""
        cores: list[dict[str, Matrix]] = [{} for _ in self.adapters]
        for module, owners in self._modules.items():
            for expert, pairs in enumerate(self._pairs(module)):
                bases, name = common_bases(pairs), f"{module}.{expert}.weight"
                shape = (bases[0].shape[1], bases[1].shape[1])
                own = dict(zip(owners, pairs, strict=True))
                for index, tensors in enumerate(cores):
                    tensors[name] = core_of(own[index], bases) if index in own else np.zeros(shape)
        zeros = {name: np.zeros_like(core) for name, core in cores[0].items()}
        for name, tensors in (("zeros", zeros), *((f"adapter-{index}", t) for index, t in enumerate(cores))):
            make_folders(root / name)
            possible = [(key, core.shape) for key, core in tensors.items()]
            with AdapterWriter(root / name / "model.safetensors", possible, self.ledger) as writer:
                for key, core in tensors.items():
                    writer.append(key, core.astype(np.float32), core.shape)
                writer.finish()


def _form(made: tuple[object, ...]) -> str:
    """Describe the matrix that factors make, and what else has to be equal."""
    rows, columns, n_experts, is_embedding, kernel = made
    kinds = [f"of {n_experts} experts"] if n_experts != 1 else []
    kinds += ["of an embedding"] if is_embedding else []
    kinds += [f"of a convolution {kernel}"] if kernel else []
    return " ".join([f"a matrix of {rows} x {columns}", *kinds])


def _ones(parts: AdaptedModule) -> tuple[int, ...]:
    """Return the kernel of the `up` of a convolution."""
    return (1, 1) if len(parts.kernel) > 1 else ()


def common_bases(pairs: Sequence[Pair]) -> Pair:
    """Return orthonormal bases of the columns of all left factors, (M, U), and of the rows of all right ones, (N, V).

    Source: A. Panariello et al., "Accurate and efficient low-rank model merging in core space", arXiv 2509.17786: the
    singular vectors of the stacked factors. A rank that exceeds M or N is cut to it, which loses nothing.
    """
    return _singular_vectors(np.hstack([up for up, _ in pairs])), _singular_vectors(np.vstack([d for _, d in pairs]).T)


def _singular_vectors(columns_MK: Matrix) -> Matrix:
    """Return the left singular vectors of a tall matrix, (M, U), largest first: small matrices alone are decomposed.

    Eight adapters of 8B shapes are merged in a quarter of the time that SVDs of M x K take. The Gram matrix of the
    columns, each scaled to length 1, gives vectors that span them, a second one sets right what rounding skewed, and an
    SVD of K x K turns them. A combination of scaled columns that is shorter than 3e-7 is left out: columns in float32
    do not tell it from rounding.
    """
    if columns_MK.shape[0] <= columns_MK.shape[1]:
        return np.asarray(np.linalg.svd(columns_MK, full_matrices=False)[0])
    lengths_K = np.linalg.norm(columns_MK, axis=0)
    scaled_ML = columns_MK[:, lengths_K > 0] / lengths_K[lengths_K > 0]
    squares, vectors = np.linalg.eigh(scaled_ML.T @ scaled_ML)
    skewed_MU = scaled_ML @ (vectors / np.sqrt(np.maximum(squares, 1e-13)))[:, squares > 1e-13]
    squares, vectors = np.linalg.eigh(skewed_MU.T @ skewed_MU)
    basis_MU = skewed_MU @ ((vectors / np.sqrt(squares)) @ vectors.T)
    return np.asarray(basis_MU @ np.linalg.svd(basis_MU.T @ columns_MK, full_matrices=False)[0])


def core_of(pair: Pair, bases: Pair) -> Matrix:
    """Return a delta in the bases, (U, V), from its factors: the delta is `left @ core @ right.T`, exactly."""
    return (bases[0].T @ pair[0]) @ (pair[1] @ bases[1])


def truncated(core: Matrix, bases: Pair, rank: int | None) -> tuple[Pair, float, float]:
    """Return the factors of the best approximation of a rank, and the square sums that they keep and that there is.

    The factors share the singular values evenly. Only the small core is decomposed.
    """
    left, values, right = np.linalg.svd(core, full_matrices=False)
    n_kept = len(values) if rank is None else min(rank, len(values))
    roots = np.sqrt(values[:n_kept])
    pair = bases[0] @ (left[:, :n_kept] * roots), (roots[:, None] * right[:n_kept]) @ bases[1].T
    return pair, float(np.sum(values[:n_kept] ** 2)), float(np.sum(values**2))


def _share_kept(lost: float, square: float) -> float:
    """Return the share that is kept, to the digits that all machines agree on."""
    return round(1.0 - lost / square, 6) if square else 1.0


def _check_options(options: MergeLoraOptions, n_adapters: int) -> None:
    """Refuse options that do not fit together."""
    one_of("--method", options.method, (CONCATENATION, TRUNCATION, *operator_specs()))
    if options.method == TRUNCATION and options.rank is None:
        raise RecipeError.of("option.missing", "--rank", "svd needs a rank, and none is given", "give --rank 16")
    if options.method == CONCATENATION and options.rank is not None:
        message = "has no effect with --method cat: ranks add up"
        raise RecipeError.of("option.conflict", "--rank", message, "leave it out, or use --method svd")
    if options.method in (CONCATENATION, TRUNCATION) and options.density is not None:
        message = f"has no effect with --method {options.method}: deltas are added whole"
        raise RecipeError.of("option.conflict", "--density", message, "leave it out, or use --method ties")
    if len(options.weights) != n_adapters:
        message = f"{len(options.weights)} for {n_adapters} adapters"
        raise RecipeError.of("option.conflict", "--weight", message, "give one for each, in order, or none")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
