"""Models in memory: read the tensors of a file by name, take those of a merge one by one, or load them as a model."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, Readable, TensorEntry, files_of
from mergepipe.checkpoints.directory import is_packed
from mergepipe.checkpoints.open_files import check_unchanged, decoded, open_files, read_span
from mergepipe.core.blocks import BlockGrid, DType, DTypeKind, Span, element_count
from mergepipe.core.flags import public_call, several
from mergepipe.core.outcome import warn_of
from mergepipe.core.strict_json import shown
from mergepipe.core.units import one_of
from mergepipe.deltastore.checkpoint import check_original_headers, open_packed
from mergepipe.engine.make_part import pass_tensors
from mergepipe.engine.segments import Piece
from mergepipe.engine.work import EngineOptions, MergeWork
from mergepipe.errors import MergePipeError, MismatchError, RecipeError, UnsupportedError, library
from mergepipe.jobs.merge_run import intermediate_writer
from mergepipe.jobs.plan import make_plan, plan_request
from mergepipe.options import MergeOptions, OutputOptions, PathStyle, threads_of
from mergepipe.recipes.model_location import locate_model
from mergepipe.recipes.tasks import MergeTask
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, open_inputs, open_path, recipe_of, with_known_digests, with_parameters
from mergepipe.runs.merge_settings import settings_without_output
from mergepipe.runs.small_files import planned_sidecars
from mergepipe.runs.work import merge_work, output_of
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output import write_durably
from mergepipe.storage.ranges import aligned_buffer
from mergepipe.storage.stores import Stores

FRAMEWORKS: Final = ("numpy", "torch")
_SPAN_ELEMENTS = 4 << 20  # a multiple of what packed tensors read at once
_NUMPY_TYPES: Mapping[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "U64": np.uint64, "I32": np.int32,
    "U32": np.uint32, "I16": np.int16, "U16": np.uint16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
    "C64": np.complex64,
}  # fmt: skip


class LoadedTensors(Mapping[str, Any]):
    """The tensors of one model by name, in the order of its files; each is read when it is asked for, and not kept.

    Safe to use from many threads. Files are open only while a tensor is read; one that changed since the model was
    opened is refused. Memory: the tensor that is returned, and 16 MiB a thread while a packed one is decoded.
    """

    def __init__(self, checkpoints: tuple[Checkpoint, ...], store: Stores, framework: str, threads: int) -> None:
        self._checkpoints = checkpoints  # the model, then what its tensors are encoded on
        self._tensors = checkpoints[0].tensors
        self._store = store
        self._threads = threads
        self._as_tensor = tensors_of(framework)

    def __getitem__(self, name: str) -> Any:
        """Read one tensor.

        Raises:
            KeyError: there is none of this name.
            ConflictError: `input.changed`, a file changed since the model was opened.
            MismatchError, CorruptError: a block is not what was packed, or the base is another one.
            UnsupportedError: `model.unsupported`, the framework has no such dtype.
        """
        tensor = self._tensors[name]
        with open_files(self._store, files_of([tensor]), self._checkpoints) as files:
            if isinstance(tensor, TensorEntry):
                raw = read_span(tensor, Span(0, tensor.n_elements), files, Purpose.EXPERT)
            else:
                size = tensor.dtype.itemsize
                raw = aligned_buffer(tensor.n_elements * size, is_reused=False)
                fetch = tensor.opened(files)

                def fill(span: Span) -> None:
                    fetch(span, raw[span.start * size : span.stop * size], Purpose.EXPERT)

                with ThreadPoolExecutor(self._threads) as pool:
                    list(pool.map(fill, BlockGrid(tensor.n_elements, _SPAN_ELEMENTS).spans()))
        return self._as_tensor(raw, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __repr__(self) -> str:
        return f"<{len(self)} tensors of {self._checkpoints[0].path}>"

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; reads nothing."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """The dtype in which a tensor is stored, as safetensors spells it (`BF16`); reads nothing."""
        return self._tensors[name].dtype.name


def load_file(
    path: str | Path, *, base: str | Path | None = None, framework: str = "numpy", threads: int | None = None
) -> LoadedTensors:
    """Open a packed expert, or any checkpoint that merges read, as a mapping from names to tensors.

    A tensor is read when it is asked for, and not kept. Those of a packed expert are decoded in memory with the base,
    which must be there; nothing is written.

    Args:
        path: a packed expert, a model's directory, one file of weights, a snapshot; here, in a bucket or on the Hub.
        base: where the base of a packed expert is now, if not where it was.
        framework: `numpy`: arrays, bfloat16 and float8 as float32, which holds their values exactly; `torch`: tensors
            on the host in the dtype that is stored.
        threads: decoding threads; default, one per processor.

    Raises:
        RecipeError: another framework, or a base for what needs none.
        NotFoundError: the model, or the base of a packed expert.
        MismatchError: another base.
        UnsupportedError: an adapter or differences from a base: merge them first.
        CorruptError, StorageError: from opening it.
    """
    tensors_of(framework)  # refuses what is none before anything is opened
    n_threads, store = threads_of(threads), Stores()
    place = locate_model(store, path)
    if is_packed(store, place):
        base_place = None if base is None else locate_model(store, base)
        opened, checkpoint, bases = open_packed(store, place, base_place)
        check_original_headers(store, opened)
        return LoadedTensors((checkpoint, *bases), store, framework, n_threads)
    if base is not None:
        raise RecipeError.of("option.conflict", "--base", f"{place} is not a packed expert", "leave it out")
    return LoadedTensors((open_path(store, place),), store, framework, n_threads)


def tensors_of(framework: str) -> Callable[[NDArray[np.uint8], Readable | MergeTask], Any]:
    """Return what makes tensors of a framework over their bytes. Raises RecipeError for another framework."""
    if one_of("framework", framework, FRAMEWORKS) == "numpy":
        return _as_array
    from mergepipe.tailor.saving.frameworks import tensor_of_bytes

    return lambda raw, tensor: tensor_of_bytes(raw, tensor.dtype, tensor.shape)


def _as_array(raw: NDArray[np.uint8], tensor: Readable | MergeTask) -> NDArray[Any]:
    """View bytes as an array; what numpy has no dtype for as float32, which holds every value of it exactly."""
    dtype: DType = tensor.dtype
    if dtype.name in _NUMPY_TYPES:
        array: NDArray[Any] = raw.view(_NUMPY_TYPES[dtype.name])
        return array.reshape(tensor.shape)
    if dtype.kind is DTypeKind.FLOAT:
        return decoded(raw, dtype.kernel_code).reshape(tensor.shape)
    raise UnsupportedError.of(
        "model.unsupported", shown(tensor.name), f"numpy has no dtype for {dtype.name}", "give framework='torch'"
    )


# --- merges that are not written: their tensors one by one, or a model of transformers that is filled with them ---

_POLL_SECONDS: Final = 0.05


@public_call(MergeOptions)
def merged_tensors(
    recipe: str | Path | Mapping[str, object],
    *,
    framework: str = "numpy",
    only: Collection[str] | None = None,
    options: OutputOptions | None = None,
    **fields: Any,
) -> Iterator[tuple[str, Any]]:
    """Yield what `merge` would write, `(name, tensor)` in the order of its files, bit for bit; nothing is written.

    The inputs are opened and the budget is planned when it is called, tensors are made while they are taken. Memory:
    that of a merge (`memory_bytes`), and three tensors. `load_weights` of vLLM and SGLang takes such an iterator, with
    `framework="torch"`.

    Args:
        only: names of the tensors that are wanted; default, all.

    Raises:
        MergePipeError: as `merge`; of what is found while tensors are made, from the iterator.
    """
    tensors_of(framework)
    merge = OpenedMerge(recipe_of(recipe), MergeOptions.of(options, fields))
    warn_of(merge.inputs.notices)

    def made() -> Iterator[tuple[str, Any]]:
        with merge:
            yield from merge.tensors(framework, only)

    return made()


class OpenedMerge:
    """A merge that is opened and planned, and that writes nothing: its small files, and its tensors as often as asked.

    A context: files that it needs on the way (intermediate merges, spilled tensors) lie in a temporary folder.
    """

    def __init__(self, recipe: Location | RecipeText, options: MergeOptions) -> None:
        """Open the inputs and decide what is read. Raises as `merge`, before any tensor is read."""
        if options.target_loss is not None:
            message = "evaluates merges in folders, but this one is not written"
            raise RecipeError.of("option.conflict", "target_loss", message, "leave it out, or call `merge`")
        settings = settings_without_output(options)
        self._store = store = Stores(settings.engine.connections)
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mergepipe-")))
            self._settings = settings = replace(settings, out=self.folder / "merge")
            link = CatalogLink(settings.home)
            write_intermediate = stack.enter_context(intermediate_writer(settings, store))
            absolute = replace(options, paths=PathStyle.ABSOLUTE.value)  # no folder is there to be relative to
            inputs = open_inputs(recipe, store, absolute, write_intermediate)
            self._plan = None
            if options.budget is not None:
                self._plan = make_plan(store, inputs, plan_request(options.budget, options), link)
                store.ledger.expert_limit_bytes = self._plan.planned_bytes
                inputs = with_parameters(inputs, self._plan)
            self.inputs: Inputs = with_known_digests(inputs, link)
            self._link = link
            self._stack = stack.pop_all()

    def __enter__(self) -> OpenedMerge:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def expert_bytes(self) -> int:
        """The bytes requested of expert files so far, as a budget counts them."""
        return self._store.ledger.usage().expert_bytes

    def small_files(self) -> dict[str, bytes]:
        """Return the configuration and the tokenizer's files as the output has them, by name."""
        return dict(planned_sidecars(self.inputs, self._store))

    def tensors(self, framework: str, only: Collection[str] | None = None) -> Iterator[tuple[str, Any]]:
        """Yield the merged tensors with their names, in the order of the shards; raises as a merge that is run."""
        as_tensor = tensors_of(framework)
        tasks = self.inputs.resolution.tasks
        if only is not None:
            only = set(several(only))
            _check_names(only, {task.name for task in tasks})
            tasks = tuple(task for task in tasks if task.name in only)
        inputs = replace(self.inputs, resolution=replace(self.inputs.resolution, tasks=tuple(tasks)))
        output = output_of(inputs, self._settings.options.shard_bytes)
        work = merge_work(self.inputs, output, self._plan, self._settings.options.seed, self._store, self._link)
        with closing(_passed(work, self.folder, self._store, self._settings.engine)) as passed:
            for task, raw in passed:
                yield task.name, as_tensor(raw, task)
        check_unchanged(self._store, [checkpoint for _, _, checkpoint in self.inputs.leaves()])


def _check_names(names: Collection[str], known: Collection[str]) -> None:
    unknown = sorted(set(names) - set(known))
    if unknown:
        message = (
            f"{len(unknown)} of its {len(names)} names are none of the merge's tensors, {shown(unknown[0])} among them"
        )
        raise RecipeError.of("option.invalid", "only", message, "give names that `merged_tensors` yields")


def _changed_names(before: OpenedMerge, after: OpenedMerge) -> frozenset[str]:
    """Return the tensors of `after` that `before` does not make of the same inputs with the same parameters."""
    same = {task.name: task for task in before.inputs.resolution.tasks}
    has_same_rule = before.inputs.recipe.operator.name == after.inputs.recipe.operator.name
    changed = (task.name for task in after.inputs.resolution.tasks if not has_same_rule or same.get(task.name) != task)
    return frozenset(changed)


# --- models of transformers ---


@public_call(MergeOptions)
def load_model(
    recipe: str | Path | Mapping[str, object],
    *,
    torch_dtype: Any = None,
    device_map: Any = None,
    options: OutputOptions | None = None,
    **fields: Any,
) -> Any:
    """Return a model of transformers with the merged tensors, as `from_pretrained` of a written merge would.

    Args:
        torch_dtype: the parameters' dtype; default, the merge's.
        device_map: as of `from_pretrained`; default, the processor.

    Raises:
        UnsupportedError: `extra.missing` without torch and transformers; `model.unsupported`, an architecture that
            transformers does not have. Code of a model is not run.
    """
    with OpenedMerge(recipe_of(recipe), MergeOptions.of(options, fields)) as merge:
        warn_of(merge.inputs.notices)
        return loaded_model(merge, torch_dtype, device_map)


def loaded_model(merge: OpenedMerge, torch_dtype: Any = None, device_map: Any = None) -> Any:
    """Return the model of the merged configuration with the merged tensors."""
    _, transformers = (library(name, "load_model", "torch") for name in ("torch", "transformers"))
    small_files = merge.small_files()
    for name, content in small_files.items():
        if "/" not in name and name.endswith(".json"):
            write_durably(merge.folder / name, content, Ledger())
    try:
        config = transformers.AutoConfig.from_pretrained(merge.folder, trust_remote_code=False, local_files_only=True)
        architecture = (config.architectures or [""])[0]
        kind = getattr(transformers, architecture)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _refusal(f"transformers does not know this model: {error}") from error
    placing: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    tensors = dict(merge.tensors("torch"))
    try:
        model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch_dtype or "auto", **placing)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise _refusal(f"transformers cannot load it: {error}") from error
    model.name_or_path = model.config.name_or_path = ""  # of no folder: libraries read it as one, and write it down
    if model.can_generate() and "generation_config.json" in small_files:
        model.generation_config = transformers.GenerationConfig.from_pretrained(merge.folder)
    return model


@public_call(MergeOptions)
def merge_into(
    model: Any,
    recipe: str | Path | Mapping[str, object],
    *,
    only: Collection[str] | None = None,
    changed_from: str | Path | Mapping[str, object] | None = None,
    options: OutputOptions | None = None,
    **fields: Any,
) -> int:
    """Write merged tensors into the parameters of a torch module that have the same names; return how many.

    Args:
        only: names of the tensors to write; default, all.
        changed_from: the recipe that the model holds: only tensors that `recipe` makes otherwise are written.
        options: as of `merge`, by keywords too; the same for both recipes.

    Raises:
        MismatchError: a parameter is missing, or has another shape.
        MergePipeError: as `merge`. Tensors that were written until then stay.
    """
    made = MergeOptions.of(options, fields)
    with OpenedMerge(recipe_of(recipe), made) as merge:
        warn_of(merge.inputs.notices)
        known = {task.name for task in merge.inputs.resolution.tasks}
        names = known if only is None else set(several(only))
        _check_names(names, known)
        if changed_from is not None:
            with OpenedMerge(recipe_of(changed_from), made) as before:
                names &= _changed_names(before, merge)
        return _write_into(model, merge, names)


def _write_into(model: Any, merge: OpenedMerge, names: Collection[str]) -> int:
    """Write the merged tensors into the parameters of the same names; return how many."""
    torch: Any = import_module("torch")
    own = model.state_dict(keep_vars=True)
    missing = sorted(name for name in names if name not in own or own[name].is_meta)
    if missing:
        message = f"has no memory for {shown(missing[0])} ({len(missing)} of {len(names)} are missing, or are 'meta')"
        raise MismatchError.of("model.mismatch", "model", message, "load the model by `load_model`")
    n_written = 0
    with torch.no_grad():
        for name, tensor in merge.tensors("torch", names):
            if own[name].shape != tensor.shape:
                message = f"{name} has the shape {list(own[name].shape)}, the merged tensor {list(tensor.shape)}"
                raise MismatchError.of("model.mismatch", "model", message, "load the model by `load_model`")
            own[name].copy_(tensor)
            n_written += 1
    return n_written


def _refusal(message: str) -> MergePipeError:
    hint = "merge into a folder, or load `merged_tensors` into a model of your own"
    return UnsupportedError.of("model.unsupported", "load_model", message, hint)


# --- take the tensors from the engine as they are made ---


def _passed(
    work: MergeWork, scratch: Path, store: Store, options: EngineOptions
) -> Generator[tuple[MergeTask, NDArray[np.uint8]], None, None]:
    """Run a merge in a thread, at most one tensor ahead of who takes them; closing the iterator ends it."""
    sink = _QueueSink(work.output.tasks)

    def run() -> None:
        try:
            pass_tensors(work, sink.take, scratch, store, options)
            sink.finish()
        except BaseException as error:
            sink.put(error)

    thread = threading.Thread(target=run, name="mergepipe-merge", daemon=True)
    thread.start()
    try:
        while (item := sink.queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        sink.is_stopped.set()
        thread.join()


class _NobodyTakesError(Exception):
    """The iterator was closed."""


class _QueueSink:
    """Puts the pieces of each tensor together in memory of its own, and passes on each tensor that is whole."""

    def __init__(self, tasks: Sequence[MergeTask]) -> None:
        self.queue: queue.Queue[tuple[MergeTask, NDArray[np.uint8]] | BaseException | None] = queue.Queue(1)
        self.is_stopped = threading.Event()
        self._waiting = list(reversed(tasks))
        self._raw = np.empty(0, np.uint8)
        self._filled = 0

    def take(self, pieces: Iterable[Piece], buffer: NDArray[np.uint8]) -> None:
        for piece in pieces:
            self._pass_empty()
            task = self._waiting[-1]
            if not self._filled:
                self._raw = aligned_buffer(element_count(task.shape) * task.dtype.itemsize, is_reused=False)
            nbytes = piece.run.span.n_elements * task.dtype.itemsize
            self._raw[self._filled : self._filled + nbytes] = buffer[piece.out_offset : piece.out_offset + nbytes]
            self._filled += nbytes
            if self._filled == len(self._raw):
                self.put((self._waiting.pop(), self._raw))
                self._filled = 0

    def finish(self) -> None:
        """Pass on the empty tensors at the end, and that there are no more."""
        self._pass_empty()
        self.put(None)

    def _pass_empty(self) -> None:
        while self._waiting and not element_count(self._waiting[-1].shape):
            self.put((self._waiting.pop(), np.empty(0, np.uint8)))

    def put(self, item: tuple[MergeTask, NDArray[np.uint8]] | BaseException | None) -> None:
        """Wait until the item before was taken."""
        while not self.is_stopped.is_set():
            try:
                self.queue.put(item, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return
        if not isinstance(item, BaseException):
            raise _NobodyTakesError
