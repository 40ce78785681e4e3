"""Convert an adapter to the form that another program reads: the same deltas, by other names, in other files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.adapted_tensors import read_finite
from mergepipe.checkpoints.adapter_forms import read_adapter
from mergepipe.checkpoints.adapters import matched_adapter
from mergepipe.checkpoints.config_files import Json, parse_config
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.diffusion_names import dotted_name
from mergepipe.checkpoints.directory import ADAPTER_CONFIG_NAME
from mergepipe.checkpoints.open_files import open_files
from mergepipe.checkpoints.sharded_tensors import StoredTensor
from mergepipe.checkpoints.stored_adapters import (
    DIFFUSERS,
    KOHYA,
    LLAMA_CPP,
    MLX,
    PREFIX,
    StoredAdapter,
    unsupported_adapter,
)
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, TokenizerFiles
from mergepipe.core.blocks import DTYPES, F32
from mergepipe.core.flags import public_call
from mergepipe.core.units import one_of, plural
from mergepipe.errors import MergePipeError, RecipeError, UnsupportedError
from mergepipe.jobs.merge_lora import renaming
from mergepipe.options import ConvertLoraOptions
from mergepipe.recipes.model_location import locate_model
from mergepipe.reports import ConvertLoraReport
from mergepipe.runs.adapter_output import AdapterFacts, AdapterOutput, adapter_output, recorded_recipe, relative_name
from mergepipe.runs.adapters import AdapterWriter, LargestShape, WrittenWeights, located_adapters, module_prefixes
from mergepipe.runs.inputs import open_path
from mergepipe.runs.lora_forms import FORMS, Experts, Kind, LoraForm, Scaling, Written, alpha_of, names_of_modules
from mergepipe.runs.lora_modules import (
    LoraModule,
    all_entries,
    count_of_experts,
    experts_by_matrix,
    modules_of_base,
    own_modules,
    single_experts,
    stacked_experts,
    with_columns_by_expert,
    without_loss,
)
from mergepipe.runs.model_card import base_id, hub_id_of, stated_base_id
from mergepipe.snapshots.manifest import ADAPTER_ROLE, CONVERTED_ADAPTER, InputRecord
from mergepipe.storage.contract import ADAPTER_CONFIG_BYTES, Digested, Store, is_folder
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import ANYWHERE, output_place
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.stores import Stores

_READ_FORMS = {MLX: "mlx", KOHYA: "kohya", DIFFUSERS: "diffusers", LLAMA_CPP: "gguf"}
_WITHOUT_FACTORS = {"LOKR": "a LoKr, whose delta is no product of thin factors", "IA3": "an (IA)^3, which has no delta"}
_OF_MODULES = ("peft", "vllm", "sglang")
_LARGEST = float(np.finfo(np.float32).max)
_LAYOUTS = {"stacked": Experts.STACKED, "single": Experts.SINGLE}


@public_call(ConvertLoraOptions)
def convert_lora(
    adapter: str | Path, out: str | Path, *, options: ConvertLoraOptions | None = None, **fields: Any
) -> ConvertLoraReport:
    """Write `adapter` at `out` in another form: the delta of every module stays what it is.

    The form of `adapter` is recognised: a folder of PEFT, MLX or Tinker, a file of Kohya's scripts, diffusers or
    ComfyUI, or llama.cpp's GGUF. `out` is a folder, a prefix of a bucket or a repository of the Hub, where the adapter
    appears with a card and a record, complete or not at all. Where the form has no place for the scale of a module, it
    goes into its factor B, which keeps its dtype if that holds the product exactly, and is float32 else.

    Args:
        options: `ConvertLoraOptions`: the form, and the base, whose headers alone are read.

    Raises:
        UnsupportedError: the form cannot hold what the adapter has, or needs the base.
        MismatchError: the adapter does not fit the base.
    """
    started = time.perf_counter()
    made = ConvertLoraOptions.of(options, fields)
    form = FORMS[one_of("--to", made.form, tuple(FORMS))]
    if made.experts is not None and form.experts is not Experts.ANY:
        message = f"has no effect with --to {form.name}, which has experts {form.experts.value}"
        raise RecipeError.of("option.conflict", "--experts", message, "leave it out")
    store = Stores()
    place = output_place(out, ANYWHERE)
    [location] = located_adapters(store, [str(adapter)])
    base = None if made.base is None else open_path(store, locate_model(store, made.base))
    base_config: Json = {} if base is None else TokenizerFiles(base, store).document(CONFIG_NAME)
    names = dict(map(renaming, made.adapter_names))
    stored = read_adapter(store, location, base_config).renamed(names)
    stated_base = stated_base_id(made.base_model_id)
    modules = _modules(store, stored, base, base_config, made, form)
    stated = _stated_config(store, location)
    conversion = _Conversion(str(adapter), stored, form, modules, stated, base_config)
    conversion.check()
    with (
        adapter_output(store, place, [location], made, started) as output,
        open_files(store, {entry.file for entry in conversion.entries()}) as files,
    ):
        base_model = stated_base or base_id(stored.config.base)
        weights = conversion.write(output, place.model_name, files)
        small = {}
        if form.config is not None:
            small[ADAPTER_CONFIG_NAME] = form.config(conversion.written(base_model or stored.config.base or None))
        manifest = output.publish(weights, conversion.facts(store, place, location, base_model), small)
    return replace(
        conversion.report(place),
        read_bytes=store.ledger.usage()[Purpose.EXPERT],
        sid=manifest.sid,
        notices=tuple(output.link.notices),
        seconds=time.perf_counter() - started,
    )


def _stated_config(store: Store, location: Location) -> Json:
    """Read the configuration of a folder of PEFT or MLX; nothing of a file."""
    if not is_folder(store, location):
        return {}
    path = location / ADAPTER_CONFIG_NAME
    return parse_config(store.read_small(path, ADAPTER_CONFIG_BYTES), path)


def _modules(
    store: Store, stored: StoredAdapter, base: Checkpoint | None, base_config: Json, options: ConvertLoraOptions,
    form: LoraForm,
) -> list[LoraModule]:  # fmt: skip
    """List the modules of an adapter as a form has them, by the names of its base if one is named."""
    if stored.config.kind in _WITHOUT_FACTORS:
        message = f"it is {_WITHOUT_FACTORS[stored.config.kind]}"
        raise unsupported_adapter(stored.path, message, "apply it to its base, and extract a LoRA from the result")
    if base is None:
        modules = own_modules(stored, by_expert=options.unsloth_experts)
        n_experts = 0
        tensors: Mapping[str, Any] = {}
    else:
        adapter = with_columns_by_expert(stored) if options.unsloth_experts else stored
        opened = matched_adapter(store, adapter, base)
        modules = [replace(one, name=dotted_name(one.name)) for one in modules_of_base(opened, base)]
        n_experts = count_of_experts(base)
        tensors = base.tensors
    layout = _LAYOUTS.get(options.experts or "", form.experts)
    if layout is not Experts.ANY:
        modules = single_experts(modules, stored.path, tensors)
    if layout is Experts.STACKED:
        modules = list(stacked_experts(modules, stored.path, n_experts))
    elif layout is Experts.BY_MATRIX:
        modules = list(experts_by_matrix(modules, stored.path, n_experts))
    if base is not None and form.name in _OF_MODULES:
        prefixes = module_prefixes(base_config, base.tensors)
        modules = [replace(module, name=_in_model(module.name, prefixes)) for module in modules]
    return modules


def _beyond_float32(module: str, scale: float) -> MergePipeError:
    message = f"with its scale of {scale:.3g} it has numbers beyond float32"
    return UnsupportedError.of(
        "adapter.unsupported", module, message, "convert it to peft, which holds the scale apart"
    )


def _in_model(name: str, prefixes: Mapping[str, str]) -> str:
    """Return the name that the model's own modules give a module of its files."""
    stored = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if stored is None else prefixes[stored] + name.removeprefix(stored)


@dataclass(slots=True)
class _Conversion:
    """Goes through the modules of an adapter, one at a time, and keeps what the report says of them."""

    name: str
    adapter: StoredAdapter
    form: LoraForm
    modules: list[LoraModule]
    stated: Json
    base_config: Json
    scales: dict[str, float] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    folded_exactly: list[str] = field(default_factory=list)
    folded_in_float32: list[str] = field(default_factory=list)
    file_bytes: int = 0

    def __post_init__(self) -> None:
        """Choose the scale and rank that each module gets in the form."""
        own_ranks = {module.name: module.rank for module in self.modules}
        largest = max(own_ranks.values(), default=1)
        is_common = self.form.scaling is Scaling.ONE
        self.ranks = {name: largest if is_common else rank for name, rank in own_ranks.items()}
        scales = {scale for module in self.modules for scale in module.scales}
        for module in self.modules:
            stated = scales if is_common else module.scales
            scale = next(iter(stated)) if len(stated) == 1 else 1.0
            is_kept = scale != 0 and self.form.scaling is not Scaling.NONE
            if is_kept and self.form.config is None:  # alpha is a number of float32
                is_kept = alpha_of(scale, self.ranks[module.name]) is not None
            self.scales[module.name] = scale if is_kept else 1.0

    @property
    def _rank(self) -> int:
        return max(self.ranks.values(), default=1)

    @property
    def _scale(self) -> float:
        return next(iter(self.scales.values()), 1.0)

    def entries(self) -> list[Any]:
        """List the stored tensors that are read."""
        return all_entries(self.modules, list(self._whole().values()))

    def _whole(self) -> dict[str, StoredTensor]:
        """Tensors that are stored in full, and rows of trained tokens, by the names that PEFT gives them."""
        whole: dict[str, StoredTensor] = {}
        for name, entry in {**self.adapter.full, **self.adapter.copies}.items():
            module, _, leaf = name.rpartition(".")
            nested = f"{module}.base_layer.{leaf}" if module in self.adapter.modules else name
            whole[nested] = entry
        rows = {f"{name}.token_adapter.trainable_tokens_delta": entry for name, entry in self.adapter.tokens.items()}
        return {**whole, **rows}

    def check(self) -> None:
        """Refuse what the form cannot hold, before anything is written."""
        held: list[tuple[Kind, str]] = []
        for module in self.modules:
            kinds = {
                Kind.EMBEDDING: module.is_embedding,
                Kind.CONVOLUTION: bool(module.kernel),
                Kind.MAGNITUDE: module.magnitude is not None,
                Kind.BIAS: module.bias is not None,
            }
            held += [(kind, module.name) for kind, is_held in kinds.items() if is_held]
        held += [(Kind.SAVED, name) for name in (*self.adapter.full, *self.adapter.copies)]
        held += [(Kind.TOKENS, name) for name in self.adapter.tokens]
        for kind, name in held:
            if kind not in self.form.holds:
                raise self.form.refused(kind, name, self.name)
        if not self.modules and not self.adapter.full:
            raise unsupported_adapter(self.name, "it adapts no module")
        names_of_modules(self.form, self.modules)
        if self.form.name == "gguf":
            if not self.base_config:
                message = "the names in GGUF depend on the architecture, which the base's configuration states"
                raise unsupported_adapter(self.name, message, "name the base: --base BASE")
            self._gguf().names([module.name for module in self.modules])

    def _gguf(self) -> Any:
        from mergepipe.checkpoints.gguf_adapters import GGUFAdapter

        return GGUFAdapter(self.name, self.base_config)

    def write(self, output: AdapterOutput, name: str, files: Mapping[Location, RangeFile]) -> WrittenWeights | Digested:
        """Write the file of weights module by module, and return what was written."""
        path = output.path / self.form.file_name(name)
        if self.form.name == "gguf":
            record: Digested = self._write_gguf(path, files)
            self.file_bytes = record.size_bytes
            return record
        with AdapterWriter(path, self._possible(), output.store.ledger) as writer:
            for tensor, values, shape, dtype in self._tensors(files):
                writer.append(tensor, values, shape, dtype)
            weights = writer.finish()
        self.file_bytes = weights.file_bytes
        return weights

    def _write_gguf(self, path: Path, files: Mapping[Location, RangeFile]) -> Digested:
        gguf = self._gguf()
        stored_names = gguf.names([module.name for module in self.modules])

        def named() -> Iterator[tuple[str, NDArray[Any], str]]:
            for tensor, values, shape, dtype in self._tensors(files):
                module, _, part = tensor.rpartition(".")
                ordered = np.ascontiguousarray(values).reshape(shape)
                if part == "lora_b":
                    ordered = gguf.in_file_order(module, ordered)
                yield f"{stored_names[module]}.{part}", ordered, dtype

        record: Digested = gguf.write(path, self._scale * self._rank, named())
        return record

    def _possible(self) -> Iterator[LargestShape]:
        """List every tensor of the output with its shape."""
        names = names_of_modules(self.form, self.modules)
        for module in self.modules:
            name = names[module.name]
            rank = self.ranks[module.name]
            rows, columns = module.shape
            # Arrays of one element that stand for the factors: nothing is read for their names and shapes.
            up = np.broadcast_to(np.float32(0), (len(module.experts), rows, rank))
            down = np.broadcast_to(np.float32(0), (len(module.experts), rank, columns))
            for tensor, _, shape in self.form.tensors(name, module, up, down):
                yield tensor, shape
            if self._has_alpha:
                yield f"{name}.alpha", ()
            if module.bias is not None:
                yield f"{PREFIX}{name}.lora_B.bias", module.bias.shape
            if module.magnitude is not None:
                yield self.form.magnitude.format(name), module.magnitude.shape
        for name, entry in self._whole().items():
            yield f"{PREFIX}{name}", entry.shape

    @property
    def _has_alpha(self) -> bool:
        """Whether a file holds the alpha of each module beside its factors."""
        return self.form.scaling is Scaling.BY_MODULE and self.form.config is None

    def _tensors(self, files: Mapping[Location, RangeFile]) -> Iterator[tuple[str, NDArray[Any], tuple[int, ...], str]]:
        """Yield name, values, shape and dtype of every tensor. Memory: some times the factors of one module."""
        names = names_of_modules(self.form, self.modules)
        for module in self.modules:
            name = names[module.name]
            rank = self.ranks[module.name]
            scale = self.scales[module.name]
            if self.form.config is None and abs(scale * rank) > _LARGEST:
                raise _beyond_float32(module.name, scale)
            yield from self._factors(name, module, files)
            if self._has_alpha:
                alpha = alpha_of(scale, rank)
                yield f"{name}.alpha", np.asarray(scale * rank, np.float32) if alpha is None else alpha, (), F32.name
            for vector, vector_name in (
                (module.bias, f"{PREFIX}{name}.lora_B.bias"), (module.magnitude, self.form.magnitude.format(name)),
            ):  # fmt: skip
                if vector is not None:
                    yield self._stored(vector_name, vector, files)
        for name, entry in self._whole().items():
            yield self._stored(f"{PREFIX}{name}", entry, files)

    def _factors(
        self, name: str, module: LoraModule, files: Mapping[Location, RangeFile]
    ) -> Iterator[tuple[str, NDArray[Any], tuple[int, ...], str]]:
        """Yield the factors of a module, and note where its scale went."""
        rank = self.ranks[module.name]
        scale = self.scales[module.name]
        parts = [module.factors(expert, rank, scale, files) for expert in range(len(module.experts))]
        up_dtype = parts[0].up_dtype if len({part.up_dtype for part in parts}) == 1 else F32
        down_dtype = parts[0].down_dtype if len({part.down_dtype for part in parts}) == 1 else F32
        exact_EMR = np.stack([part.up_MR for part in parts])
        if np.max(np.abs(exact_EMR), initial=0.0) > _LARGEST:
            raise _beyond_float32(module.name, scale)
        up_EMR, up_name = without_loss(exact_EMR, up_dtype)
        down_ERN, down_name = without_loss(np.stack([part.down_RN for part in parts]), down_dtype)
        if any(part.is_folded for part in parts):
            is_exact = up_name == up_dtype.name
            if up_dtype == F32:
                is_exact = np.array_equal(up_EMR.astype(np.float64), exact_EMR)
            (self.folded_exactly if is_exact else self.folded_in_float32).append(module.name)
        tensors = self.form.tensors(name, module, up_EMR, down_ERN)
        for (tensor, values, shape), dtype in zip(tensors, (down_name, up_name), strict=True):
            yield tensor, values, shape, dtype

    @staticmethod
    def _stored(
        name: str, tensor: StoredTensor, files: Mapping[Location, RangeFile]
    ) -> tuple[str, NDArray[Any], tuple[int, ...], str]:
        """Return a tensor as it is stored."""
        values, dtype = without_loss(read_finite(tensor, files, Purpose.EXPERT), DTYPES[tensor.dtype.name])
        return name, values, tensor.shape, dtype

    def written(self, base_model: str | None) -> Written:
        """Return what the configuration of the output is made from."""
        rows: Json = {module: list(tokens) for module, tokens in self.adapter.config.tokens.items()}
        saved = {name.rpartition(".")[0] for name in self.adapter.full if not name.endswith(".bias")}
        return Written(
            modules=self.modules,
            scales=self.scales,
            ranks=self.ranks,
            rank=self._rank,
            scale=self._scale,
            base_model=base_model,
            stated=self.stated,
            saved=tuple(sorted(saved)),
            tokens=rows.get("", rows) or None,
        )

    def report(self, out: Location) -> ConvertLoraReport:
        """Report what was converted; bytes read and the time are added at the end."""
        return ConvertLoraReport(
            adapter=self.name,
            read_form=_READ_FORMS.get(self.adapter.config.kind, "peft"),
            form=self.form.name,
            modules=tuple(names_of_modules(self.form, self.modules).values()),
            ranks=tuple(sorted(set(self.ranks.values()))),
            saved_modules=tuple(self.adapter.full),
            folded_exactly=tuple(self.folded_exactly),
            folded_in_float32=tuple(self.folded_in_float32),
            out=out.local_path if out.is_local else out,
            adapter_bytes=self.file_bytes,
        )

    def facts(self, store: Store, out: Location, location: Location, base_model: str) -> AdapterFacts:
        """Return what is recorded of the converted adapter, which goes to `out`."""
        name = relative_name(self.name, out)
        recipe = {"output": "adapter", "form": self.form.name, "models": [{"model": name}]}
        record = InputRecord(
            role=ADAPTER_ROLE,
            model=name,
            path=str(location),
            content_id=None,
            read_bytes=store.ledger.usage()[Purpose.EXPERT],
            files=tuple(file.id for file in self.adapter.files),
            hub_id=hub_id_of(location, store),
        )
        quality = "The delta of every module is that of the adapter it was made from."
        if self.folded_in_float32:
            rounded = plural(len(self.folded_in_float32), "module")
            quality = f"{quality} The scale of {rounded} is part of its factor B, rounded to float32."
        return AdapterFacts(
            operator=CONVERTED_ADAPTER,
            method="convert",
            summary=f"LoRA adapter {name} converted to the form {self.form.name}",
            recipe=recorded_recipe(recipe),
            inputs=(record,),
            quality=quality,
            base_model=base_model.partition("@")[0],
        )
