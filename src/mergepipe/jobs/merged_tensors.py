"""Merge without writing: pass the merged tensors on one by one, or fill a model of transformers with them."""

from __future__ import annotations

import queue
import tempfile
import threading
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.open_files import check_unchanged
from mergepipe.core.blocks import element_count
from mergepipe.core.strict_json import shown
from mergepipe.engine.make_part import pass_tensors
from mergepipe.engine.segments import Piece
from mergepipe.engine.work import EngineOptions, MergeWork
from mergepipe.errors import MergePipeError, MismatchError, RecipeError, UnsupportedError
from mergepipe.jobs.load import tensors_of
from mergepipe.jobs.merge import IntermediateWriter
from mergepipe.jobs.plan import make_plan, plan_request
from mergepipe.options import MergeOptions
from mergepipe.recipes.tasks import MergeTask
from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.runs.inputs import Inputs, open_inputs, with_known_digests, with_parameters
from mergepipe.runs.small_files import planned_sidecars
from mergepipe.runs.work import CatalogLink, merge_settings, merge_work, output_of
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.output import write_durably
from mergepipe.storage.ranges import aligned_buffer
from mergepipe.storage.stores import Stores

_POLL_SECONDS: Final = 0.05

NamedTensors = Iterator[tuple[str, Any]]


class OpenedMerge:
    """A merge that is opened and planned, and that writes nothing: its small files, and its tensors as often as asked.

    A context: files that it needs on the way (intermediate merges, spilled tensors) lie in a temporary folder.
    """

    def __init__(self, recipe: Location | RecipeText, options: MergeOptions) -> None:
        """Open the inputs and decide what is read. Raises as `api.merge`, before any tensor is read."""
        if options.target_loss is not None:
            message = "looks at merges in folders, and this one is not written"
            raise RecipeError.of("option.conflict", "target_loss", message, "leave it out, or call `merge`")
        settings = merge_settings(options)
        self._store = store = Stores(settings=settings.engine.remote)
        with ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mergepipe-")))
            self._settings = settings = replace(settings, out=self.folder / "merge")
            link = CatalogLink(settings.home)
            intermediates = stack.enter_context(IntermediateWriter(settings, store))
            inputs = open_inputs(
                recipe, store, settings.allow_dropped, intermediates.write, settings.strictness,
                keeps_absolute_paths=True,
            )  # fmt: skip
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

    def tensors(self, framework: str, only: Collection[str] | None = None) -> NamedTensors:
        """Yield the merged tensors with their names, in the order of the shards; raises as a merge that is run."""
        as_tensor = tensors_of(framework)
        tasks = self.inputs.resolution.tasks
        if only is not None:
            _check_names(only, {task.name for task in tasks})
            tasks = tuple(task for task in tasks if task.name in only)
        inputs = replace(self.inputs, resolution=replace(self.inputs.resolution, tasks=tuple(tasks)))
        output = output_of(inputs, self._settings.shard_bytes)
        work = merge_work(self.inputs, output, self._plan, self._settings.seed, self._store, self._link)
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


def changed_names(before: OpenedMerge, after: OpenedMerge) -> frozenset[str]:
    """Return the tensors of `after` that `before` does not make of the same inputs with the same parameters."""
    same = {task.name: task for task in before.inputs.resolution.tasks}
    has_same_rule = before.inputs.recipe.operator.name == after.inputs.recipe.operator.name
    changed = (task.name for task in after.inputs.resolution.tasks if not has_same_rule or same.get(task.name) != task)
    return frozenset(changed)


# --- models of transformers ---


def load_model(merge: OpenedMerge, torch_dtype: Any, device_map: Any) -> Any:
    """Return the model of the merged configuration with the merged tensors; see `api.load_model`."""
    transformers = _transformers()
    small_files = merge.small_files()
    for name, content in small_files.items():
        if "/" not in name and name.endswith(".json"):
            write_durably(merge.folder / name, content, Ledger())
    try:
        config = transformers.AutoConfig.from_pretrained(merge.folder, trust_remote_code=False, local_files_only=True)
        architecture = (config.architectures or [""])[0]
        kind = getattr(transformers, architecture)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _refusal(f"transformers knows no such model: {error}") from error
    placing: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    tensors = dict(merge.tensors("torch"))
    try:
        model = kind.from_pretrained(None, config=config, state_dict=tensors, dtype=torch_dtype or "auto", **placing)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise _refusal(f"transformers cannot load it: {error}") from error
    if model.can_generate() and "generation_config.json" in small_files:
        model.generation_config = transformers.GenerationConfig.from_pretrained(merge.folder)
    return model


def merge_into(model: Any, merge: OpenedMerge, only: Collection[str] | None) -> int:
    """Write the merged tensors into the parameters of the same names; return how many. See `api.merge_into`."""
    torch: Any = import_module("torch")
    own = model.state_dict(keep_vars=True)
    names = {task.name for task in merge.inputs.resolution.tasks} if only is None else only
    missing = sorted(set(names) - own.keys())
    if missing:
        message = f"has no parameter {shown(missing[0])} ({len(missing)} of {len(names)} are missing)"
        raise MismatchError.of("model.mismatch", "model", message, "load the model by `load_model`")
    n_written = 0
    with torch.no_grad():
        for name, tensor in merge.tensors("torch", only):
            if own[name].shape != tensor.shape:
                message = f"{name} has the shape {list(own[name].shape)}, the merged tensor {list(tensor.shape)}"
                raise MismatchError.of("model.mismatch", "model", message, "load the model by `load_model`")
            own[name].copy_(tensor)
            n_written += 1
    return n_written


def _transformers() -> Any:
    try:
        import_module("torch")
        return import_module("transformers")
    except ImportError as error:
        message = f"needs {error.name}, which is not installed"
        raise UnsupportedError.of("extra.missing", "load_model", message, "install mergepipe[torch]") from error


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
            pass_tensors(work, sink, scratch, store, options)
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

    def write_segment(self, pieces: Iterable[Piece], buffer: NDArray[np.uint8]) -> None:
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
