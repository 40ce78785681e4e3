"""Extract a LoRA adapter: the difference of a model from its base, matrix by matrix, as products of thin factors."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.adapters import tied_head
from mergepipe.checkpoints.config_files import Json
from mergepipe.checkpoints.contract import Checkpoint, Readable, files_of
from mergepipe.checkpoints.directory import ADAPTER_CONFIG_NAME
from mergepipe.checkpoints.embedding_rows import embedding_ending
from mergepipe.checkpoints.open_files import check_unchanged, decoded, open_files, read_elements
from mergepipe.checkpoints.stacked_experts import fused_name, inputs_first
from mergepipe.checkpoints.stored_adapters import INNER, OUTER, PREFIX
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, TokenizerFiles
from mergepipe.core.blocks import F32, BlockGrid, DTypeKind, Span
from mergepipe.core.flags import public_call
from mergepipe.core.units import format_percent, plural
from mergepipe.errors import CorruptError, MismatchError
from mergepipe.operators.spectral import norm_of, orthonormal
from mergepipe.options import ExtractLoraOptions, home_of
from mergepipe.recipes.model_location import locate_model
from mergepipe.reports import ByteProgress, ExtractedTensor, ExtractLoraReport, NotExtracted, ProgressCallback
from mergepipe.runs.adapter_output import AdapterFacts, adapter_output, recorded_recipe, relative_name
from mergepipe.runs.adapters import (
    WEIGHTS_NAME,
    AdapterWriter,
    LargestShape,
    adapter_config,
    factor_names,
    module_prefixes,
)
from mergepipe.runs.inputs import open_path
from mergepipe.runs.model_card import hub_id_of, stated_base_id
from mergepipe.runs.work import tensor_bytes_by_file, tensor_bytes_read
from mergepipe.snapshots.manifest import BASE_ROLE, EXPERT_ROLE, EXTRACTED_ADAPTER, InputRecord
from mergepipe.snapshots.staging import check_free_space
from mergepipe.snapshots.whole_output import staged_beside
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import ANYWHERE, output_place
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.stores import Stores

_WEIGHT, _BIAS = ".weight", ".bias"
_CHUNK_ELEMENTS = 1 << 24
_TIED_HEAD = "lm_head.weight"
"""A tied head is written under this name alone; PEFT does not load such an adapter where a class calls it otherwise."""
_CONV1D_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_NAMES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
"""Modules that store their weights with inputs first, in models of `_CONV1D_TYPES`."""
_POSITION_NAMES = frozenset({"wpe", "wtt"})
"""Embeddings of positions and of kinds of tokens, of models that do not name them so: no linear layers."""


@public_call(ExtractLoraOptions)
def extract_lora(
    base: str | Path,
    model: str | Path,
    out: str | Path,
    *,
    options: ExtractLoraOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> ExtractLoraReport:
    """Publish the LoRA adapter that brings `base` closest to `model` at `out`, as PEFT reads it.

    `out` is a folder, a prefix of a bucket or a repository of the Hub, where the adapter appears with a card and a
    record, complete or not at all. Every matrix of the difference is decomposed by itself (truncated SVD) and written
    before the next is read. The report names the error that is left, tensor by tensor, and what a LoRA cannot hold.
    `on_progress` tells the bytes of tensors that are done.

    Raises:
        RecipeError: a rank or an energy out of its range, or neither.
        MismatchError: nothing differs.
    """
    started, made = time.perf_counter(), ExtractLoraOptions.of(options, fields)
    place = output_place(out, ANYWHERE)
    stated_base = stated_base_id(made.base_model_id)
    store = Stores()
    model_path = locate_model(store, model)
    base_checkpoint = open_path(store, locate_model(store, base))
    model_checkpoint = open_path(store, model_path, base_checkpoint)
    if not any(_is_counterpart(base_checkpoint, tensor) for tensor in model_checkpoint.tensors.values()):
        message = f"not one of its tensors has a counterpart of its name and shape in {base_checkpoint.path}"
        hint = "name the base that it was trained from"
        raise MismatchError.of("extract.nothing", model_path, message, hint)
    architecture = TokenizerFiles(base_checkpoint, store).document(CONFIG_NAME)
    paths = files_of((*base_checkpoint.tensors.values(), *model_checkpoint.tensors.values()))
    checkpoints = (base_checkpoint, model_checkpoint)
    sources = (base_checkpoint.path, model_checkpoint.path)
    with (
        adapter_output(store, place, sources, made, started) as output,
        open_files(store, paths, checkpoints) as files,
    ):
        progress = ByteProgress(on_progress, "extract", base_checkpoint.tensor_bytes + model_checkpoint.tensor_bytes)
        tied = tied_head(store, base_checkpoint, [_TIED_HEAD])
        is_tied = tied is not None and tied.head == _TIED_HEAD and not architecture.get("is_encoder_decoder")
        is_tied &= _TIED_HEAD not in model_checkpoint.tensors
        prefixes = module_prefixes(architecture, base_checkpoint.tensors)
        extraction = _Extraction(*checkpoints, files, architecture, prefixes, is_tied, made, progress)
        check_free_space(staged_beside(place, home_of(made.home)), extraction.largest_bytes())
        path = output.path / WEIGHTS_NAME
        with AdapterWriter(path, extraction.possible(), store.ledger) as writer:
            extraction.write(writer)
            weights = writer.finish()
        if not extraction.extracted and not extraction.saved:
            message = "none of its matrices differs from the base: there is nothing to extract"
            raise MismatchError.of("extract.nothing", model_path, message, "is it the right model?")
        base_model = stated_base or hub_id_of(base_checkpoint.path, store) or ""
        report = extraction.report(place, weights.file_bytes, base_model or None)
        check_unchanged(store, checkpoints)
        names = (relative_name(str(base), place), relative_name(str(model), place))
        facts = extraction.facts(store, names, base_model, report.relative_error)
        manifest = output.publish(weights, facts, {ADAPTER_CONFIG_NAME: extraction.config(base_model)})
    usage = store.ledger.usage()
    return replace(
        report,
        base_bytes=usage[Purpose.BASE],
        model_bytes=usage[Purpose.EXPERT],
        sid=manifest.sid,
        notices=tuple(output.link.notices),
        seconds=time.perf_counter() - started,
    )


def _is_counterpart(base: Checkpoint, tensor: Readable) -> bool:
    """Whether the base has a tensor of this name and shape."""
    stored = base.tensors.get(tensor.name)
    return stored is not None and stored.shape == tensor.shape


@dataclass(slots=True)
class _Extraction:
    """Goes through the tensors of two models once, in storage order, and keeps what the report says of them."""

    base: Checkpoint
    model: Checkpoint
    files: Mapping[Location, RangeFile]
    architecture: Json
    prefixes: Mapping[str, str]
    is_tied: bool  # an embedding is the head too: PEFT saves and loads the two apart
    options: ExtractLoraOptions
    progress: ByteProgress
    extracted: list[ExtractedTensor] = field(default_factory=list)
    left: list[NotExtracted] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    biases: list[str] = field(default_factory=list)
    squared_norm: float = 0.0
    squared_error: float = 0.0

    def possible(self) -> Iterator[LargestShape]:
        """List every tensor that the adapter may come to hold, with its largest shape."""
        for name, tensor in self.base.tensors.items():
            if self._is_matrix(name, tensor) or _is_stack(tensor):
                rows, columns = tensor.shape[-2:][:: -1 if self._is_transposed(name) else 1]
                rank = min(rows, columns, self.options.rank or max(rows, columns))
                rank *= tensor.shape[0] if _is_stack(tensor) else 1
                down, up = self._factor_names(name)
                yield (down, (rank, columns))
                yield (up, (rows, rank))
            elif self._is_saved(name, tensor):
                shape = self.model.tensors.get(name, tensor).shape
                yield (f"{PREFIX}{self._module(name)}.base_layer{_BIAS}", shape)
                if self.is_tied and embedding_ending(name):
                    yield (f"{PREFIX}{_TIED_HEAD}", shape)

    def largest_bytes(self) -> int:
        """Return the bytes that a fixed rank needs at most; under an energy alone nobody knows them before."""
        if self.options.rank is None:
            return 0
        return sum(F32.itemsize * math.prod(shape) for _, shape in self.possible())

    def write(self, writer: AdapterWriter) -> None:
        """Decompose every matrix that changed, and write its factors as they come."""
        for name in self.model.tensors.keys() - self.base.tensors.keys():
            self.left.append(NotExtracted(name, "the base has no such tensor", None))
        for name, tensor in self.base.tensors.items():
            changed = self.model.tensors.get(name)
            if changed is None and self.model.kind.value == "full":
                self.left.append(NotExtracted(name, "the model has no such tensor", None))
            elif changed is not None and changed.shape != tensor.shape and self._is_resized(name, tensor, changed):
                self._save_module(writer, name)
            elif changed is not None and changed.shape != tensor.shape:
                reason = f"has shape {list(changed.shape)}, in the base {list(tensor.shape)}"
                self.left.append(NotExtracted(name, reason, None))
            elif changed is not None and tensor.dtype.kind is DTypeKind.FLOAT:
                self._take(writer, name, tensor, changed)
            self.progress.add(tensor.nbytes + (0 if changed is None else changed.nbytes))
        adapted = {tensor.module for tensor in self.extracted}
        stacks = {self._in_model(name) for name, tensor in self.base.tensors.items() if _is_stack(tensor)}
        for stack in adapted & stacks:
            experts, _, leaf = stack.rpartition(".")
            if leaf == INNER and f"{experts}.{OUTER}" not in adapted:  # PEFT nests what it adapts of one module
                for nested, plain in zip(self._factor_names(stack), factor_names(experts), strict=True):
                    writer.relabel(nested, plain)
        for name in self.biases:  # PEFT names those of adapted modules otherwise, and weights may come behind them
            module = self._module(name)
            self._append(writer, name, f"{module}.base_layer{_BIAS}" if module in adapted else f"{module}{_BIAS}")
        self.left.sort(key=lambda skipped: skipped.name)

    def config(self, base_model: str) -> bytes:
        """Write the adapter's configuration."""
        identity, _, revision = base_model.partition("@")
        names = self.architecture.get("architectures")
        is_causal = isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)
        modules = [self._module(name) for name in self.base.tensors if name.endswith(_WEIGHT)]
        ranks = {tensor.module: tensor.rank for tensor in self.extracted}
        tied = {"ensure_weight_tying": True} if self.is_tied and _bare(_TIED_HEAD) in self.saved else {}
        stacks = sorted(tensor.module for tensor in self.extracted if not tensor.name.endswith(_WEIGHT))
        return adapter_config(
            base_model=identity or None,
            revision=revision or None,
            ranks=ranks,
            modules=modules,
            saved_modules=self.saved,
            transposed=any(self._is_transposed(t.name) for t in self.extracted if t.name.endswith(_WEIGHT)),
            task_type="CAUSAL_LM" if is_causal else None,
            more={"target_parameters": stacks or None, "bias": "all" if self.biases else "none", **tied},
        )

    def facts(self, store: Store, names: tuple[str, str], base_model: str, relative_error: float) -> AdapterFacts:
        """Return what is recorded of the adapter; `names` are those of base and model as they were given."""
        bytes_by_file = tensor_bytes_by_file(store.ledger.usage())

        def record(role: str, name: str, model: Checkpoint, hub_id: str | None) -> InputRecord:
            return InputRecord(
                role=role,
                model=name,
                path=str(model.path),
                content_id=model.content_id,
                read_bytes=tensor_bytes_read(model, bytes_by_file),
                files=model.file_ids,
                hub_id=hub_id,
            )

        base_name, model_name = names
        options = {"rank": self.options.rank, "energy": self.options.energy}
        parameters = {name: value for name, value in options.items() if value is not None}
        if self.options.save_modules:
            parameters["save_modules"] = True
        recipe = {"output": "adapter", "base_model": base_name, "models": [{"model": model_name}]}
        left = f"{format_percent(relative_error)} of the norm"
        summary = f"LoRA adapter extracted from {model_name} against {base_name}"
        return AdapterFacts(
            operator=EXTRACTED_ADAPTER,
            method="extract",
            summary=f"{summary}: {left} of the difference left out",
            recipe=recorded_recipe({**recipe, "parameters": parameters}),
            inputs=(
                record(BASE_ROLE, base_name, self.base, base_model or None),
                record(EXPERT_ROLE, model_name, self.model, hub_id_of(self.model.path, store)),
            ),
            quality=f"{left} of the difference from the base is left out.",
            base_model=base_model.partition("@")[0],
        )

    def report(self, out: Location, adapter_bytes: int, hub_id: str | None) -> ExtractLoraReport:
        """Report what was extracted; bytes read and the time are added at the end."""
        return ExtractLoraReport(
            base=self.base.path,
            model=self.model.path,
            out=out.local_path if out.is_local else out,
            base_model_id=hub_id,
            tensors=tuple(self.extracted),
            saved_modules=(*self.saved, *map(self._in_model, self.biases)),
            left=tuple(self.left),
            relative_error=math.sqrt(self.squared_error / self.squared_norm) if self.squared_norm else 0.0,
            adapter_bytes=adapter_bytes,
        )

    def _take(self, writer: AdapterWriter, name: str, tensor: Readable, changed: Readable) -> None:
        if not self._is_matrix(name, tensor) and not _is_stack(tensor):
            self._take_whole(writer, name, tensor, changed)
            return
        n_experts, size = math.prod(tensor.shape[:-2]), math.prod(tensor.shape[-2:])
        spans = [Span(expert * size, (expert + 1) * size) for expert in range(n_experts)]
        factors = [self._decomposed(name, tensor, changed, span) for span in spans]
        if any(part.norm for part in factors):
            self._write_factors(writer, name, factors)

    def _decomposed(self, name: str, tensor: Readable, changed: Readable, span: Span) -> Factors:
        delta_MN = self._delta(tensor, changed, span).reshape(tensor.shape[-2:])
        if not np.all(np.isfinite(delta_MN)):
            message = f"the difference of '{name}' from the base holds infinities or NaN"
            hint = "a low-rank adapter cannot represent them"
            raise CorruptError.of("tensor.not-finite", self.model.path, message, hint)
        oriented_MN = delta_MN.T if self._is_transposed(name) else delta_MN
        seed = int.from_bytes(blake3(name.encode()).digest(8), "little")
        return truncated_svd(oriented_MN, self.options.rank, self.options.energy, seed)

    def _write_factors(self, writer: AdapterWriter, name: str, factors: list[Factors]) -> None:
        """Write the factors of a matrix, or of the experts of a stack: all of one rank, experts fastest in `up`."""
        down, up = self._factor_names(name)
        n_rows = factors[0].up_MR.shape[0]
        n_columns = factors[0].down_RN.shape[1]
        rank = max(len(part.down_RN) for part in factors)
        down_ERN = np.zeros((len(factors), rank, n_columns), np.float32)
        up_MRE = np.zeros((n_rows, rank, len(factors)), np.float32)
        for expert, part in enumerate(factors):
            own_rank = len(part.down_RN)
            down_ERN[expert, :own_rank] = part.down_RN
            up_MRE[:, :own_rank, expert] = part.up_MR
        writer.append(down, down_ERN, (down_ERN.shape[0] * rank, n_columns))
        writer.append(up, up_MRE, (n_rows, rank * len(factors)))
        squared_norm = sum(part.norm**2 for part in factors)
        squared_error = sum(part.error**2 for part in factors)
        module = self._in_model(name) if len(factors) > 1 else self._module(name)
        self.extracted.append(ExtractedTensor(name, module, rank, math.sqrt(squared_error / squared_norm)))
        self.squared_norm += squared_norm
        self.squared_error += squared_error

    def _factor_names(self, name: str) -> tuple[str, str]:
        """Return the names of a tensor's factors; PEFT nests the parameters of one module that it adapts."""
        experts, _, leaf = self._in_model(name).rpartition(".")
        if leaf == _WEIGHT[1:]:
            return factor_names(experts)
        return factor_names(f"{experts}.base_layer" if leaf == INNER else experts)

    def _take_whole(self, writer: AdapterWriter, name: str, tensor: Readable, changed: Readable) -> None:
        """Save a tensor that is no product of factors in full, or list it with what it leaves."""
        spans = BlockGrid(tensor.n_elements, _CHUNK_ELEMENTS).spans()
        squared, n_lost = 0.0, 0
        for span in spans:
            delta = self._delta(tensor, changed, span).astype(np.float64)
            finite = delta[np.isfinite(delta)]
            n_lost += delta.size - finite.size
            squared += float(np.vdot(finite, finite))
        self.squared_norm += squared
        if not squared and not n_lost:
            return
        if self._is_saved(name, tensor):
            if self._is_bias(name):
                self.biases.append(name)
            elif self._module(name) not in self.saved:
                self._save_module(writer, name)
            return
        self.squared_error += squared
        reason = self._reason(name, tensor)
        if n_lost:
            reason = f"{reason}; {plural(n_lost, 'value')} of its difference are infinite or NaN"
        self.left.append(NotExtracted(name, reason, math.sqrt(squared)))

    def _save_module(self, writer: AdapterWriter, name: str) -> None:
        """Write weight and bias of a module in full: PEFT keeps a copy of the whole module."""
        for part in (f"{_bare(name)}{_WEIGHT}", f"{_bare(name)}{_BIAS}"):
            if part in self.base.tensors:
                self._append(writer, part, self._in_model(part))
        self.saved.append(self._module(name))
        if self.is_tied and embedding_ending(name):
            self._append(writer, name, _TIED_HEAD)
            self.saved.append(_bare(_TIED_HEAD))

    def _append(self, writer: AdapterWriter, name: str, written_name: str) -> None:
        tensor = self.base.tensors[name]
        changed = self.model.tensors.get(name, tensor)
        values = self._values(tensor, changed, Span(0, changed.n_elements))
        writer.append(f"{PREFIX}{written_name}", values, changed.shape)

    def _reason(self, name: str, tensor: Readable) -> str:
        if embedding_ending(name):
            return "an embedding or output head; --save-modules stores it in full"
        if self._is_norm(name):
            return "part of a norm; --save-modules stores it in full"
        if self._is_bias(name):
            return "a bias; --save-modules stores it in full"
        return f"of shape {list(tensor.shape)}, not a matrix of a module: LoRA cannot change it"

    def _delta(self, tensor: Readable, changed: Readable, span: Span) -> NDArray[np.float32]:
        values = self._read(changed, span, Purpose.EXPERT)
        return values if changed.is_delta else values - self._read(tensor, span, Purpose.BASE)

    def _values(self, tensor: Readable, changed: Readable, span: Span) -> NDArray[np.float32]:
        values = self._read(changed, span, Purpose.EXPERT)
        return values + self._read(tensor, span, Purpose.BASE) if changed.is_delta else values

    def _read(self, tensor: Readable, span: Span, purpose: Purpose) -> NDArray[np.float32]:
        return decoded(read_elements(tensor, span, self.files, purpose), tensor.dtype.kernel_code)

    def _is_matrix(self, name: str, tensor: Readable) -> bool:
        """Whether a tensor is the weight of a linear layer."""
        is_weight = len(tensor.shape) == 2 and name.endswith(_WEIGHT) and not _is_embedding(name)
        return is_weight and min(tensor.shape) > 0 and tensor.dtype.kind is DTypeKind.FLOAT

    def _is_saved(self, name: str, tensor: Readable) -> bool:
        is_float = tensor.dtype.kind is DTypeKind.FLOAT
        is_saved = _is_embedding(name) or self._is_norm(name) or self._is_bias(name)
        return self.options.save_modules and is_float and is_saved

    def _is_resized(self, name: str, tensor: Readable, changed: Readable) -> bool:
        """Whether an embedding that is saved has other tokens than the base's."""
        return self._is_saved(name, tensor) and _is_embedding(name) and changed.shape[1:] == tensor.shape[1:]

    def _is_bias(self, name: str) -> bool:
        """Whether a tensor is the bias of a linear layer."""
        weight = self.base.tensors.get(f"{_bare(name)}{_WEIGHT}")
        return name.endswith(_BIAS) and weight is not None and self._is_matrix(weight.name, weight)

    def _is_norm(self, name: str) -> bool:
        """Whether a tensor is the weight, or the bias, of a module whose weight is a vector."""
        weight = self.base.tensors.get(f"{_bare(name)}{_WEIGHT}")
        return name.endswith((_WEIGHT, _BIAS)) and weight is not None and len(weight.shape) == 1

    def _in_model(self, name: str) -> str:
        """Return the name that the model's own modules give a tensor."""
        stored = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        return name if stored is None else self.prefixes[stored] + name.removeprefix(stored)

    def _module(self, name: str) -> str:
        return _bare(self._in_model(name))

    def _is_transposed(self, name: str) -> bool:
        model_type, leaf = self.architecture.get("model_type"), _bare(name).rpartition(".")[2]
        return inputs_first(name, self.base.tensors) or (model_type in _CONV1D_TYPES and leaf in _CONV1D_NAMES)


def _is_embedding(name: str) -> bool:
    """Whether a tensor is an embedding or output head; `output` is one only at the top of a model."""
    ending, leaf = embedding_ending(name), _bare(name).rpartition(".")[2]
    is_of_positions = leaf in _POSITION_NAMES or "embed" in leaf
    return is_of_positions or (ending is not None and (not ending.startswith("output.") or name == ending))


def _is_stack(tensor: Readable) -> bool:
    """Whether a tensor holds the stacked matrices of a layer's experts."""
    is_stack = len(tensor.shape) == 3 and fused_name(tensor.name) is not None
    return is_stack and min(tensor.shape) > 0 and tensor.dtype.kind is DTypeKind.FLOAT


def _bare(name: str) -> str:
    """Return the name of a tensor's module."""
    return name.removesuffix(_WEIGHT).removesuffix(_BIAS)


# --- a matrix as a product of two thin factors, of a fixed rank or as few as keep a share of its energy ---
# Legend: M rows, N columns, R rank, S columns of a sketch.


Matrix = NDArray[np.float32]

EXACT_SIDE = 768
"""Up to this shorter side LAPACK decomposes the whole matrix in about a second."""
EXACT_SHARE = 3
"""A sketch of more than one `EXACT_SHARE`-th of the shorter side is no cheaper than the whole decomposition."""
_OVERSAMPLING = 16
_POWER_ITERATIONS = 3
_FIRST_RANK = 32
_RESIDUAL_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Factors:
    """`up_MR @ down_RN` approximates a matrix; norms are Frobenius norms in float64, `error` that of the difference.

    The factors share the singular values evenly, so that their entries are of one size.
    """

    up_MR: Matrix
    down_RN: Matrix
    error: float
    norm: float


def truncated_svd(matrix_MN: Matrix, rank: int | None, energy: float | None, seed: int) -> Factors:
    """Decompose a matrix, keeping `rank` singular values at most, and no more than `energy` of its square sum needs.

    Small matrices are decomposed whole (LAPACK, float32). Of large ones a random sketch is refined by power iterations
    and orthonormalised in float64; its error exceeds the least possible one by well under a percent. The error that is
    returned was measured on the factors as they are. Memory: the matrix, and at most twice the factors; three times
    the matrix where it is decomposed whole.

    Source: N. Halko, P. G. Martinsson, J. A. Tropp, "Finding structure with randomness", 2011, algorithms 4.4 and 5.1.
    """
    norm = norm_of(matrix_MN)
    side = min(matrix_MN.shape)
    most = side if rank is None else min(rank, side)
    if not norm:
        return Factors(matrix_MN[:, :0], matrix_MN[:0], 0.0, 0.0)
    tried = most if energy is None else min(most, _FIRST_RANK)
    while True:
        if side <= EXACT_SIDE or (tried + _OVERSAMPLING) * EXACT_SHARE > side:
            left, values, right = _decomposed(matrix_MN)
            return _factors(matrix_MN, left, values, right, _kept(values, norm, most, energy), norm)
        left, values, right = _sketched(matrix_MN, tried, seed)
        n_kept = _kept(values, norm, tried, energy)
        if tried == most or (energy is not None and float(np.sum(values[:n_kept] ** 2)) >= energy * norm**2):
            return _factors(matrix_MN, left, values, right, n_kept, norm)
        tried = min(most, 2 * tried)


def _kept(values: NDArray[np.float64], norm: float, most: int, energy: float | None) -> int:
    """Count the values to keep: `most`, or as few as hold `energy` of the square sum."""
    if energy is None:
        return min(most, len(values))
    sums = np.cumsum(values**2)
    return min(most, len(values), int(np.searchsorted(sums, energy * norm**2)) + 1)


def _decomposed(matrix_MN: Matrix) -> tuple[Matrix, NDArray[np.float64], Matrix]:
    left, values, right = np.linalg.svd(matrix_MN, full_matrices=False)
    return left, values.astype(np.float64), right


def _sketched(matrix_MN: Matrix, rank: int, seed: int) -> tuple[Matrix, NDArray[np.float64], Matrix]:
    """Decompose the part of the matrix that a random sketch of `rank` and some more columns spans."""
    n_columns = min(rank + _OVERSAMPLING, *matrix_MN.shape)
    sketch_NS = np.random.default_rng(seed).standard_normal((matrix_MN.shape[1], n_columns), np.float32)
    basis_MS = orthonormal(matrix_MN @ sketch_NS)
    for _ in range(_POWER_ITERATIONS):
        basis_MS = orthonormal(matrix_MN @ orthonormal(matrix_MN.T @ basis_MS))
    small_SS, values, right = _decomposed(basis_MS.T @ matrix_MN)
    return basis_MS @ small_SS, values, right


def _factors(
    matrix_MN: Matrix, left: Matrix, values: NDArray[np.float64], right: Matrix, rank: int, norm: float
) -> Factors:
    roots_R = np.sqrt(values[:rank]).astype(np.float32)
    up_MR = np.ascontiguousarray(left[:, :rank] * roots_R)
    down_RN = np.ascontiguousarray(roots_R[:, None] * right[:rank])
    return Factors(up_MR, down_RN, _residual(matrix_MN, up_MR, down_RN), norm)


def _residual(matrix_MN: Matrix, up_MR: Matrix, down_RN: Matrix) -> float:
    """Measure the norm of the difference, some rows at a time."""
    total = 0.0
    for start in range(0, matrix_MN.shape[0], _RESIDUAL_ROWS):
        rows = slice(start, start + _RESIDUAL_ROWS)
        total += norm_of(matrix_MN[rows] - up_MR[rows] @ down_RN) ** 2
    return float(np.sqrt(total))
