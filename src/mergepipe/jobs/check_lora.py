"""Check an adapter against its base, or tell whether a model is the two: tensor by tensor, by what is stored."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mergepipe.checkpoints.adapted_tensors import Adapted, LowRankDelta
from mergepipe.checkpoints.adapter_forms import read_adapter
from mergepipe.checkpoints.adapters import (
    apply_adapter,
    base_names,
    changes_nothing,
    open_adapter,
    tied_head,
    with_own_head,
)
from mergepipe.checkpoints.codes import CodedTensor
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable, TensorEntry, files_of
from mergepipe.checkpoints.embedding_rows import is_head
from mergepipe.checkpoints.open_files import check_unchanged, open_files, read_span
from mergepipe.checkpoints.stored_adapters import name_in_peft_file
from mergepipe.checkpoints.stored_changes import (
    CHUNK_ELEMENTS,
    Agreement,
    Change,
    Comparison,
    Files,
    Read,
    change_of,
    delta_reader,
    grid_of,
    matrices_of,
    measure,
    reader,
)
from mergepipe.core.blocks import BlockGrid, DTypeKind, Span
from mergepipe.core.flags import public_call
from mergepipe.core.rounding import RoundingMode
from mergepipe.core.strict_json import shown
from mergepipe.core.units import format_percent, plural
from mergepipe.errors import MergePipeError, MismatchError, UnsupportedError, mismatched
from mergepipe.jobs.merge_lora import renaming
from mergepipe.jobs.snapshots import read_manifest_value
from mergepipe.options import CheckLoraOptions, threads_of
from mergepipe.recipes.model_location import locate_model
from mergepipe.recipes.references import locate_reference
from mergepipe.recipes.yaml_source import parse_documents
from mergepipe.reports import ByteProgress, CheckedTensor, CheckLoraReport, ProgressCallback, Verdict
from mergepipe.runs.adapters import located_adapters
from mergepipe.runs.inputs import open_model, open_path
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

_ALL = ("*",)


@public_call(CheckLoraOptions)
def check_lora(
    base: str | Path,
    adapter: str | Path,
    model: str | Path | None = None,
    *,
    options: CheckLoraOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> CheckLoraReport:
    """Tell whether `model` is `base` with `adapter` applied; without a model whether the adapter fits the base.

    Every tensor of the model is compared with the exact result, rounded to the dtype in which the model is stored: see
    `checkpoints.stored_changes.measure` for the bound. Base and model are read once, those that disagree once or twice
    more to find out what they hold instead. Nothing is written. Memory: 64 MiB and the factors of a tensor for each
    thread, and 4 KiB for each matrix.

    Raises:
        MismatchError: nothing that the adapter changes is in the base, or in the model.
        CorruptError: with a model, factors hold infinities or NaN.
    """
    started = time.perf_counter()
    made = CheckLoraOptions.of(options, fields)
    n_threads = threads_of(made.threads)
    names = dict(map(renaming, made.adapter_names))
    store = Stores()
    (adapter_path,) = located_adapters(store, [str(adapter)])
    opened = open_path(store, locate_model(store, base))
    weights = with_own_head(store, opened, adapter_path, names)
    applied, notices = _applied(store, weights, adapter_path, names)
    (account,) = applied.adapters[-1:]
    left_over = [_checked(name, Verdict.NO_MODULE) for name in account.left_over]
    report = CheckLoraReport(
        base=opened.path,
        adapter=adapter_path,
        model=None,
        trained_on=account.trained_on,
        tensors=(),
        others=(),
        unchanged_tensors=0,
        extra_tensors=(),
        read_bytes=0,
        seconds=0.0,
        notices=notices,
    )
    if model is None:
        tensors = _checked_adapter(store, weights, applied)
        report = replace(report, tensors=(*tensors, *left_over))
    else:
        merged = _opened_model(store, model, weights)
        weights, applied = _with_tied_heads(store, weights, applied, merged)
        in_model = _names_in_model(store, weights, applied, merged)
        paths = files_of((*weights.tensors.values(), *applied.tensors.values(), *merged.tensors.values()))
        is_stabilised = read_adapter(store, adapter_path).config.is_rank_stabilised
        is_stochastic = _is_rounded_stochastically(store, merged)
        with open_files(store, paths, (applied, merged)) as files:
            check = _Check(files, weights, applied, merged, in_model, n_threads, is_stabilised, is_stochastic)
            check.run(ByteProgress(on_progress, "check", opened.tensor_bytes + merged.tensor_bytes))
        check_unchanged(store, (applied, merged))
        report = check.report(report, left_over)
    seconds = time.perf_counter() - started
    return replace(report, read_bytes=store.ledger.usage().total_bytes, seconds=seconds)


def _applied(
    store: Store, weights: Checkpoint, adapter: Location, names: Mapping[str, str]
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Apply an adapter; if the base lacks some of its modules, without them, and with the error as a notice."""
    try:
        return apply_adapter(weights, open_adapter(store, adapter, weights, (), names)), ()
    except MismatchError as error:
        partial = open_adapter(store, adapter, weights, _ALL, names)
        if not partial.tensors:
            raise
        return apply_adapter(weights, partial), tuple(map(str, error.problems))


def _checked_adapter(store: Store, weights: Checkpoint, applied: Checkpoint) -> Iterator[CheckedTensor]:
    """Check the factors of every tensor that would be changed: their values, once each."""
    changed = {name: tensor for name, tensor in applied.tensors.items() if tensor is not weights.tensors[name]}
    of_base = {file.location for file in weights.files}
    entries = dict.fromkeys(entry for tensor in changed.values() for entry in tensor.stored)
    factors = [entry for entry in entries if entry.file not in of_base and entry.dtype.kind is DTypeKind.FLOAT]
    with open_files(store, files_of(factors)) as files:
        damaged = {entry for entry in factors if not _is_finite(entry, files)}
    for name, tensor in changed.items():
        change = change_of(weights.tensors[name], tensor)
        if not damaged.isdisjoint(tensor.stored):
            yield _checked(name, Verdict.NOT_FINITE, change)
        elif change.scale == 0 or changes_nothing(store, tensor):
            yield _checked(name, Verdict.NOTHING, change)
        else:
            yield _checked(name, Verdict.FITS, change)


def _is_finite(entry: TensorEntry, files: Files) -> bool:
    read = reader(entry, files)
    return all(np.isfinite(read(span)).all() for span in BlockGrid(entry.n_elements, CHUNK_ELEMENTS).spans())


def _checked(name: str, verdict: Verdict, change: Change | None = None, **more: Any) -> CheckedTensor:
    """Make the row of a tensor."""
    rank = None if change is None else change.rank or None
    return CheckedTensor(name, _kind(name), verdict, rank, None if change is None else change.scale, **more)


def _kind(name: str) -> str:
    """Return what tensors of all layers have in common: the last part of the name of their module."""
    words = [word for word in name.removesuffix(".weight").split(".") if not word.isdigit()]
    n_kept = 1 + (words[-1] == "bias") + ("experts" in words[:-1])
    return ".".join(words[-n_kept:])


def _opened_model(store: Store, model: str | Path, weights: Checkpoint) -> Checkpoint:
    """Open the model in the names and the layout of the base."""
    merged = open_model(store, locate_reference(store, model), weights, as_weights=True)
    if merged.kind is CheckpointKind.ADAPTER:
        hint = "name the model that it was applied to"
        raise UnsupportedError.of("model.unsupported", merged.path, "is an adapter, and a merged model is needed", hint)
    beside = [name for name in merged.tensors if name_in_peft_file(name) is not None]
    if beside:
        message = f"it holds factors beside its weights ({shown(beside[0])}): the adapter was saved, and not merged"
        raise UnsupportedError.of("model.unsupported", merged.path, message, "merge it by peft before it is saved")
    return merged


def _is_rounded_stochastically(store: Store, model: Checkpoint) -> bool:
    """Whether the record of a snapshot says so; of a model that has none nothing is known."""
    try:
        manifest = read_manifest_value(store, model.root)
        roots = [document.root for document in parse_documents(model.root / "recipe", manifest.recipe)]
    except MergePipeError:
        return False
    return any(isinstance(root, dict) and root.get("rounding") == RoundingMode.STOCHASTIC for root in roots)


def _with_tied_heads(
    store: Store, weights: Checkpoint, applied: Checkpoint, merged: Checkpoint
) -> tuple[Checkpoint, Checkpoint]:
    """Add the head that the base ties to its embedding, where the model stores one: it must be that embedding."""
    tied = tied_head(store, weights, [*filter(is_head, merged.tensors)])
    copies = {} if tied is None else dict(tied.copies)
    heads = {head: source for head, source in copies.items() if head in merged.tensors and head not in weights.tensors}
    before = {**weights.tensors, **{head: weights.tensors[source] for head, source in heads.items()}}
    after = {**applied.tensors, **{head: applied.tensors[source] for head, source in heads.items()}}
    return replace(weights, tensors=before), replace(applied, tensors=after)


def _names_in_model(store: Store, weights: Checkpoint, applied: Checkpoint, merged: Checkpoint) -> dict[str, str]:
    """Map the base's names to the model's; a head that the model ties to its embedding is that."""
    changed = [name for name, tensor in applied.tensors.items() if tensor is not weights.tensors[name]]
    rest = [name for name in weights.tensors if name not in {*changed}]
    names: dict[str, str] = {}
    for wanted in (changed, rest):
        names |= base_names(wanted, merged.tensors, merged.path, wanted)
    tied = tied_head(store, merged, [*filter(is_head, weights.tensors)])
    if tied is not None:
        heads = {name: tied.embedding for name in weights.tensors if name not in names and name in tied.copies}
        names |= heads
    if changed and not names.keys() & {*changed}:
        message = f"it has no tensor that the adapter changes, such as {shown(changed[0])}"
        raise mismatched(merged.path, message, "is it a model of this base?")
    return names


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of a tensor, and how the model agrees with it."""

    change: Change
    stored: Readable
    compared: Comparison
    agreement: Agreement
    verdict: Verdict
    found_scale: float | None = None
    detail: str = ""


@dataclass(slots=True)
class _Check:
    """Compares all tensors of a model with a base and what an adapter makes of it, some at a time.

    `adapted` and `others` are what `run` finds; `n_unchanged` counts the tensors that are as in the base, and should.
    """

    _files: Files
    _weights: Checkpoint
    _applied: Checkpoint
    _merged: Checkpoint
    _in_model: Mapping[str, str]
    _n_threads: int
    _is_stabilised: bool
    _is_stochastic: bool
    adapted: list[CheckedTensor] = field(default_factory=list)
    others: list[CheckedTensor] = field(default_factory=list)
    n_unchanged: int = 0

    def run(self, progress: ByteProgress) -> None:
        """Measure every tensor, then look for what the ones that disagree hold instead."""
        names = [*self._applied.tensors]
        measured: dict[str, list[_Matrix] | CheckedTensor] = {}
        with ThreadPoolExecutor(self._n_threads, "mergepipe-check") as pool:
            for name, result in zip(names, pool.map(self._measured, names), strict=True):
                measured[name] = result
                stored = self._stored(name)
                progress.add(self._weights.tensors[name].nbytes + (0 if stored is None else stored.nbytes))
            matrices = [matrix for result in measured.values() if isinstance(result, list) for matrix in result]
            explained = dict(zip(map(id, matrices), pool.map(self._searcher(matrices), matrices), strict=True))
        for name in names:
            result = measured[name]
            if isinstance(result, CheckedTensor):
                row = result
            else:
                row = self._row(name, [explained[id(matrix)] for matrix in result])
            if self._change(name).is_change:
                self.adapted.append(row)
            elif row.verdict is Verdict.APPLIED:
                self.n_unchanged += 1
            else:
                self.others.append(row)

    def report(self, report: CheckLoraReport, left_over: Sequence[CheckedTensor]) -> CheckLoraReport:
        """Add what was found to a report, and the modules that the base lacks."""
        used = {*self._in_model.values()}
        return replace(
            report,
            model=self._merged.path,
            tensors=(*self.adapted, *left_over),
            others=tuple(self.others),
            unchanged_tensors=self.n_unchanged,
            extra_tensors=tuple(name for name in self._merged.tensors if name not in used),
        )

    def _change(self, name: str) -> Change:
        return change_of(self._weights.tensors[name], self._applied.tensors[name])

    def _stored(self, name: str) -> Readable | None:
        return self._merged.tensors.get(self._in_model.get(name, ""))

    def _measured(self, name: str) -> list[_Matrix] | CheckedTensor:
        """Measure the matrices of a tensor, or judge it without."""
        change = self._change(name)
        stored = self._stored(name)
        if stored is None:
            return _checked(name, Verdict.MISSING, change)
        if stored.shape != change.after.shape:
            is_of_base = stored.shape == change.before.shape
            detail = f"of shape {list(stored.shape)}, and not {list(change.after.shape)}"
            return _checked(name, Verdict.ABSENT if is_of_base else Verdict.CHANGED, change, detail=detail)
        if not change.is_change and self._is_equal(change.before, stored):
            return _checked(name, Verdict.APPLIED, change)
        if DTypeKind.FLOAT not in (change.before.dtype.kind, stored.dtype.kind):
            return _checked(name, Verdict.CHANGED, change)
        grid = grid_of(stored, change.before, self._files)
        spans = matrices_of(change.after) if change.is_change else (Span(0, change.after.n_elements),)
        matrices = []
        for span in spans:
            compared = Comparison(change, stored, grid or stored.stored_dtype, span, is_stochastic=self._is_stochastic)
            agreement = measure(self._files, compared)
            if agreement.n_outside and grid not in (None, stored.dtype):  # its first values alone are on that grid
                compared = replace(compared, grid=stored.dtype)
                agreement = measure(self._files, compared)
            if grid is None:
                detail = f"the model is quantised; its difference is about {agreement.scale:.3g} times the change"
                matrices.append(_Matrix(change, stored, compared, agreement, Verdict.UNKNOWN, detail=detail))
            else:
                matrices.append(self._judged(compared, agreement))
        return matrices

    def _is_equal(self, tensor: Readable, other: Readable) -> bool:
        """Whether two stored tensors have the same bytes, or the same codes and scales."""
        if isinstance(tensor, CodedTensor) and isinstance(other, CodedTensor) and tensor.scheme == other.scheme:
            return all(map(self._is_equal, tensor.stored, other.stored))
        if not isinstance(tensor, TensorEntry) or not isinstance(other, TensorEntry):
            return False
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return False
        for span in BlockGrid(tensor.n_elements, CHUNK_ELEMENTS).spans():
            raw = read_span(tensor, span, self._files, Purpose.ANALYSIS)
            if not np.array_equal(raw, read_span(other, span, self._files, Purpose.ANALYSIS)):
                return False
        return True

    def _judged(self, compared: Comparison, agreement: Agreement) -> _Matrix:
        """Judge a matrix by itself; another pass tells whether a multiple of the change explains every element."""
        change = compared.change
        made = _Matrix(change, compared.stored, compared, agreement, Verdict.CHANGED)
        if agreement.n_not_finite:
            detail = f"{plural(agreement.n_not_finite, 'value')} of {agreement.n}"
            return replace(made, verdict=Verdict.NOT_FINITE, detail=detail)
        if not change.is_change:
            verdict = Verdict.APPLIED if agreement.n_outside == 0 else Verdict.CHANGED
            detail = f"{plural(agreement.n_outside, 'element')} of {agreement.n} differ"
            return replace(made, verdict=verdict, detail=detail if agreement.n_outside else "")
        if agreement.n_outside == 0:
            is_applied_on_average = agreement.is_multiple and abs(agreement.scale - 1) <= agreement.scale_error
            if agreement.n_told or (compared.is_stochastic and is_applied_on_average):
                return replace(made, verdict=Verdict.APPLIED, found_scale=1.0)
            if compared.is_stochastic and agreement.is_multiple:
                return self._judged_by_scale(made)
            what = "equal to the base" if change.is_saved else "its delta is zero"
            lost = f"every change is less than half a step of {compared.grid.name}"
            return replace(made, verdict=Verdict.UNKNOWN, detail=lost if agreement.n_moving else what)
        if agreement.n_changed == 0:
            return replace(made, verdict=Verdict.ABSENT, found_scale=0.0)
        if agreement.n_moving == 0:
            return made
        return self._judged_by_scale(made)

    def _judged_by_scale(self, made: _Matrix) -> _Matrix:
        agreement = made.agreement
        scale = agreement.scale
        error = agreement.scale_error
        if made.change.is_saved or not agreement.is_multiple:
            return self._judged_by_place(made)
        if abs(scale - 1) <= error:
            detail = f"{plural(agreement.n_outside, 'element')} of {agreement.n} off by more than rounding to nearest"
            return replace(made, verdict=Verdict.APPLIED, found_scale=1.0, detail=detail)
        scaled = replace(
            made, verdict=Verdict.SCALED, found_scale=scale, detail=self._reason_of(scale, error, made.change)
        )
        again = measure(self._files, replace(made.compared, factor=scale, slack=error))
        if again.n_outside == 0:
            return scaled
        partly = self._judged_by_place(made)
        return partly if partly.verdict is Verdict.PARTLY else scaled

    @staticmethod
    def _judged_by_place(made: _Matrix) -> _Matrix:
        """Judge a matrix of which some elements are as they should be, and all others as in the base."""
        agreement = made.agreement
        if agreement.n_outside_changed or not agreement.n_told_applied:
            return made
        share = agreement.n_told_applied / agreement.n_told
        return replace(made, verdict=Verdict.PARTLY, detail=f"{format_percent(share)} of its elements, the rest not")

    def _reason_of(self, scale: float, error: float, change: Change) -> str:
        """Name the usual mistake that a multiple of the change comes from."""
        root = math.sqrt(max(change.rank, 1))
        known = {"applied twice": 2.0, "subtracted": -1.0}
        if change.scale:
            known["without its scale"] = 1 / change.scale
        if self._is_stabilised:
            known["scaled by alpha / r, and rsLoRA is alpha / sqrt(r)"] = 1 / root
        else:
            known["scaled by alpha / sqrt(r), as rsLoRA"] = root
        slack = error + 2.0**-8 * abs(scale)
        return next((name for name, factor in known.items() if abs(factor - scale) <= slack), "")

    def _searcher(self, matrices: Sequence[_Matrix]) -> _Search:
        """Return the search among all changes; none where most other tensors differ too, as those of another base."""
        others = [matrix for matrix in matrices if not matrix.change.is_change]
        n_changed = sum(matrix.verdict is Verdict.CHANGED for matrix in others)
        n_others = len(self._applied.tensors) - len(self._in_changed())
        candidates = [matrix for matrix in matrices if matrix.change.is_change and matrix.agreement.change_square]
        if 2 * n_changed > n_others > 1:
            candidates = []
        return _Search(self._files, candidates)

    def _in_changed(self) -> list[str]:
        return [name for name in self._applied.tensors if self._change(name).is_change]

    def _row(self, name: str, matrices: Sequence[_Matrix]) -> CheckedTensor:
        """Sum up the matrices of a tensor."""
        change = matrices[0].change
        verdicts = [matrix.verdict for matrix in matrices]
        telling = {*verdicts} - {Verdict.UNKNOWN} or {Verdict.UNKNOWN}
        n_moving = sum(matrix.agreement.n_moving for matrix in matrices)
        n_lost = sum(matrix.agreement.n_rounded_away for matrix in matrices)
        scales = {matrix.found_scale for matrix in matrices if matrix.verdict in telling}
        details = dict.fromkeys(matrix.detail for matrix in matrices if matrix.verdict in telling and matrix.detail)
        if len(telling) == 1:
            verdict = telling.pop()
            detail = next(iter(details), "")
        else:
            verdict = Verdict.PARTLY
            counts = {kind: verdicts.count(kind) for kind in dict.fromkeys(verdicts)}
            detail = f"of {len(matrices)} experts: {', '.join(f'{count} {kind}' for kind, count in counts.items())}"
        tied = self._in_model[name]
        if tied != name and tied in self._weights.tensors:
            detail = "; ".join(filter(None, (detail, f"the model ties it to {tied}")))
        return _checked(
            name,
            verdict,
            change,
            found_scale=scales.pop() if len(scales) == 1 else None,
            rounded_share=n_lost / n_moving if n_moving else None,
            detail=detail,
        )


class _Search:
    """Finds the change that explains a matrix which its own change does not, among those of all others of its shape.

    Sketches choose the likeliest one, a pass over the matrix decides.
    """

    def __init__(self, files: Files, candidates: Sequence[_Matrix]) -> None:
        self._files = files
        self._candidates = candidates

    def __call__(self, matrix: _Matrix) -> _Matrix:
        if matrix.verdict is not Verdict.CHANGED or matrix.agreement.stored_square == 0:
            return matrix
        for other, what in self._others(matrix):
            compared = replace(matrix.compared, other=other)
            agreement = measure(self._files, compared)
            if (agreement.n_outside == 0 and agreement.n_told) or agreement.is_multiple:
                return replace(matrix, verdict=Verdict.MISPLACED, detail=what)
        return matrix

    def _others(self, matrix: _Matrix) -> Iterator[tuple[Read, str]]:
        """Yield what may have been added instead, each with its name."""
        change = matrix.change
        delta = change.delta
        if isinstance(delta, LowRankDelta) and delta.shape == delta.shape[::-1] and len(delta.shape) == 2:
            yield reader(replace(delta, transposed=not delta.transposed), self._files), "its own change, transposed"
        after = change.after
        if change.has_norms and isinstance(after, Adapted) and after.weights is change.before:
            yield reader(after.delta, self._files), "its own delta, without the magnitudes"
        likeliest = max(self._alike(matrix), key=lambda other: self._likeness(matrix, other), default=None)
        if likeliest is not None:
            offset = likeliest.compared.span.start - matrix.compared.span.start
            read = delta_reader(likeliest.change, self._files)
            of_expert = ""
            if len(likeliest.change.after.shape) == 3:
                n_elements = likeliest.compared.span.n_elements
                of_expert = f", expert {likeliest.compared.span.start // n_elements}"
            name = likeliest.change.after.name
            yield lambda span: read(Span(span.start + offset, span.stop + offset)), f"that of {name}{of_expert}"

    def _alike(self, matrix: _Matrix) -> Iterator[_Matrix]:
        shape = matrix.change.after.shape[-2:]
        for other in self._candidates:
            if other is not matrix and other.change.after.shape[-2:] == shape and not other.change.is_saved:
                yield other

    @staticmethod
    def _likeness(matrix: _Matrix, other: _Matrix) -> float:
        product = matrix.agreement.stored_sketch_S @ other.agreement.change_sketch_S
        return abs(float(product)) / math.sqrt(other.agreement.change_square)
