"""Write the elements in which models differ from their base as sparse patches, and restore the models from them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.content_id import content_id
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable, files_of
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.open_files import check_unchanged, open_files, read_elements
from mergepipe.checkpoints.sparse_patches import (
    GAPS,
    PATCH_FORMAT,
    PATCH_NAME,
    POSITIONS,
    VALUES,
    can_be_patched,
    differing,
    gaps_of,
    read_patch,
)
from mergepipe.core.blocks import BlockGrid
from mergepipe.core.strict_json import shown
from mergepipe.core.units import format_percent, plural
from mergepipe.errors import MergePipeError, MismatchError, RecipeError, UnsupportedError
from mergepipe.jobs.merge import merge
from mergepipe.jobs.snapshots import content_id_at, read_manifest_value
from mergepipe.options import AdapterOptions, MergeOptions, PackOptions, UnpackOptions
from mergepipe.recipes.model_location import locate_model
from mergepipe.reports import ByteProgress, PackedExpert, PackReport, ProgressCallback, UnpackReport
from mergepipe.runs.adapter_output import AdapterFacts, adapter_output, recorded_recipe, relative_name
from mergepipe.runs.adapters import AdapterWriter, LargestShape, apply_recipe
from mergepipe.runs.model_card import hub_id_of
from mergepipe.runs.work import tensor_bytes_by_file, tensor_bytes_read
from mergepipe.snapshots.manifest import BASE_ROLE, EXPERT_ROLE, SPARSE_PATCH, InputRecord
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.stores import Stores

_CHUNK_ELEMENTS = 1 << 22
Counts = tuple[int, int, int]
"""The tensors that differ, the elements in which they do, and all elements of both."""


def pack_sparse(
    bases: Sequence[Location], experts: Sequence[Location], folder: Location, options: PackOptions,
    on_progress: ProgressCallback | None,
) -> PackReport:  # fmt: skip
    """Write each expert as a patch of the base in `folder/NAME`, complete or not at all.

    Memory: what one tensor changes in, some times, and 64 MiB.
    """
    started = time.perf_counter()
    store = Stores()
    if len(bases) != 1:
        message = "a sparse patch is made on one base"
        raise RecipeError.of("option.conflict", "--base", message, "name the one base")
    base = _opened(store, bases[0])
    packed = [_packed(store, base, expert, folder, options, on_progress) for expert in experts]
    usage = store.ledger.usage()
    return PackReport(
        base=bases[0],
        experts=tuple(packed),
        base_bytes=usage[Purpose.BASE],
        expert_bytes=usage[Purpose.EXPERT],
        seconds=time.perf_counter() - started,
    )


def _opened(store: Stores, location: Location) -> Checkpoint:
    checkpoint = open_checkpoint(store, store.pin(location))
    if checkpoint.kind is not CheckpointKind.FULL:
        message = "holds differences from a base, not weights"
        raise UnsupportedError.of("pack.unsupported", location, message, "name a model")
    return checkpoint


def _packed(
    store: Stores, base: Checkpoint, location: Location, folder: Location, options: PackOptions,
    on_progress: ProgressCallback | None,
) -> PackedExpert:  # fmt: skip
    """Write the patch of one expert."""
    started = time.perf_counter()
    expert = _opened(store, location)
    _check_equal(base, expert)
    place = folder / location.absolute().name.removesuffix(".safetensors")
    progress = ByteProgress(on_progress, "pack", expert.tensor_bytes)
    made = AdapterOptions(home=options.home)
    checkpoints = (base, expert)
    paths = files_of((*base.tensors.values(), *expert.tensors.values()))
    with (
        adapter_output(store, place, (base.path, expert.path), made, started) as output,
        open_files(store, paths, checkpoints) as files,
    ):
        largest = _metadata((1 << 62, 1 << 62, 1 << 62))
        path = output.path / PATCH_NAME
        with AdapterWriter(path, _possible(expert), store.ledger, largest) as writer:
            counts = _write(writer, base, expert, files, progress)
            weights = writer.finish(_metadata(counts))
        content_ids = (content_id(base, files), content_id(expert, files))
        check_unchanged(store, checkpoints)
        output.publish(weights, _facts(store, place, base, expert, counts, content_ids), {})
    return PackedExpert(
        expert=location,
        store=place.local_path if place.is_local else place,
        tensor_bytes=expert.tensor_bytes,
        store_bytes=weights.file_bytes,
        blocks={},
        outside_bands={},
        seconds=time.perf_counter() - started,
        is_new=True,
    )


def _check_equal(base: Checkpoint, expert: Checkpoint) -> None:
    """Refuse an expert whose tensors are not those of the base, by name, dtype and shape."""
    for name in [*expert.tensors, *base.tensors]:
        own = expert.tensors.get(name)
        stored = base.tensors.get(name)
        if own is None or stored is None:
            missing = expert.path if own is None else base.path
            message = f"a patch holds values of tensors that both have, and {missing} has no {shown(name)}"
        elif (own.dtype, own.shape) != (stored.dtype, stored.shape):
            kinds = f"{own.dtype.name} {list(own.shape)}, in the base {stored.dtype.name} {list(stored.shape)}"
            message = f"{shown(name)} is {kinds}"
        elif not can_be_patched(own.dtype, own.shape):
            message = f"{shown(name)} is {own.dtype.name} {list(own.shape)}, which positions of 32 bits do not reach"
        else:
            continue
        raise UnsupportedError.of("pack.unsupported", expert.path, message, "pack it without --to sparse")


def _possible(expert: Checkpoint) -> Iterator[LargestShape]:
    for name, tensor in expert.tensors.items():
        yield f"{name}{POSITIONS}", (tensor.n_elements,)
        yield f"{name}{VALUES}", (tensor.n_elements,)


def _write(
    writer: AdapterWriter, base: Checkpoint, expert: Checkpoint, files: Mapping[Location, RangeFile],
    progress: ByteProgress,
) -> Counts:  # fmt: skip
    """Write positions and values of every tensor that differs."""
    n_tensors = 0
    n_changed = 0
    for name, tensor in expert.tensors.items():
        pairs = _pieces(base.tensors[name], tensor, files)
        positions, values = differing(tensor.dtype, pairs)
        progress.add(tensor.nbytes)
        if not len(positions):
            continue
        gaps, dtype = gaps_of(positions)
        writer.append(f"{name}{VALUES}", values, (len(positions),), tensor.dtype.name)
        writer.append(f"{name}{POSITIONS}", gaps, (len(positions),), dtype)
        n_tensors += 1
        n_changed += len(positions)
    return n_tensors, n_changed, sum(tensor.n_elements for tensor in expert.tensors.values())


def _pieces(
    first: Readable, second: Readable, files: Mapping[Location, RangeFile]
) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    for span in BlockGrid(second.n_elements, _CHUNK_ELEMENTS).spans():
        yield read_elements(first, span, files, Purpose.BASE), read_elements(second, span, files, Purpose.EXPERT)


def _metadata(counts: Counts) -> dict[str, str]:
    """Return the header's texts, as TRL writes them."""
    n_tensors, n_changed, n_elements = counts
    return {
        "format": PATCH_FORMAT,
        "version": "1",
        "sparse": "True",
        "model_version": "0",
        "num_changed_params": str(n_tensors),
        "total_changed_elements": str(n_changed),
        "total_elements": str(n_elements),
        "sparsity": f"{1 - n_changed / max(n_elements, 1):.12f}",
        "encoding": GAPS,
    }


def _facts(
    store: Stores, place: Location, base: Checkpoint, expert: Checkpoint, counts: Counts, content_ids: tuple[str, str]
) -> AdapterFacts:
    """Return what is recorded of a patch."""
    bytes_by_file = tensor_bytes_by_file(store.ledger.usage())
    records = []
    for role, model, identity in zip((BASE_ROLE, EXPERT_ROLE), (base, expert), content_ids, strict=True):
        records.append(
            InputRecord(
                role=role,
                model=relative_name(str(model.path), place),
                path=str(model.path),
                content_id=identity,
                read_bytes=tensor_bytes_read(model, bytes_by_file),
                files=model.file_ids,
                hub_id=hub_id_of(model.path, store),
            )
        )
    names = [record.model for record in records]
    changed = f"{format_percent(counts[1] / max(counts[2], 1))} of the elements"
    return AdapterFacts(
        operator=SPARSE_PATCH,
        method="sparse",
        summary=f"Sparse patch of {names[1]} on {names[0]}: {changed} in {plural(counts[0], 'tensor')}",
        recipe=recorded_recipe({"output": "patch", "base_model": names[0], "models": [{"model": names[1]}]}),
        inputs=tuple(records),
        quality="It holds every element that differs from the base, bit for bit.",
        base_model=(records[0].hub_id or "").partition("@")[0],
    )


def unpack_sparse(
    path: Location, out: str | Path, options: UnpackOptions, on_progress: ProgressCallback | None
) -> UnpackReport:
    """Write the model of a patch and its base into the new directory `out`, with the base's other files."""
    started = time.perf_counter()
    if options.base is None:
        message = f"{path} holds the values that differ, and no base"
        raise RecipeError.of("option.missing", "--base", message, "name the model that it was made on")
    _check_base(path, options.base)
    recipe = apply_recipe(str(options.base), [str(path)], (), None)
    merge(recipe, out, options=MergeOptions(threads=options.threads, catalog=False), on_progress=on_progress)
    store = Stores()
    base = locate_model(store, options.base)
    tensor_bytes = open_checkpoint(store, base).tensor_bytes
    return UnpackReport(path, base, Path(out), tensor_bytes, time.perf_counter() - started)


def _check_base(path: Location, base: str | Path) -> None:
    """Refuse another base than the one that a patch was made on, where its record and the base's samples tell.

    Raises:
        MismatchError: `base.mismatch`.
    """
    try:
        inputs = read_manifest_value(Stores(), path).inputs
    except MergePipeError:
        return  # a patch that another program sent
    recorded = next((record for record in inputs if record.role == BASE_ROLE), None)
    base_id = content_id_at(base)
    if recorded is None or None in (recorded.content_id, base_id) or recorded.content_id == base_id:
        return
    message = f"it was made on {recorded.model}, and {base} holds other values"
    raise MismatchError.of("base.mismatch", path, message, "name the base that the patch was made on")


def is_sparse(store: Stores, path: Location) -> bool:
    """Whether there is a sparse patch at `path`."""
    return read_patch(store, path) is not None
