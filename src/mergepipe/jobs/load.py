"""Read the tensors of a model by name, one at a time: of a packed expert, or of any checkpoint that is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, Readable, TensorEntry, files_of
from mergepipe.checkpoints.open_files import decoded, open_files, read_span
from mergepipe.checkpoints.packed import is_packed
from mergepipe.core.blocks import BlockGrid, DType, DTypeKind, Span
from mergepipe.core.strict_json import shown
from mergepipe.deltastore.checkpoint import check_original_headers, open_packed
from mergepipe.errors import RecipeError, UnsupportedError
from mergepipe.recipes.tasks import MergeTask
from mergepipe.runs.inputs import open_path
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
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


def load_tensors(path: Location, *, base: Location | None, framework: str, threads: int) -> LoadedTensors:
    """Open a model for reading by name; see `api.load_file`."""
    tensors_of(framework)  # refuses what is none before anything is opened
    store = Stores()
    if is_packed(store, path):
        opened, checkpoint, bases = open_packed(store, path, base)
        check_original_headers(store, opened)
        return LoadedTensors((checkpoint, *bases), store, framework, threads)
    if base is not None:
        raise RecipeError.of("option.conflict", "--base", f"{path} is no packed expert", "leave it out")
    return LoadedTensors((open_path(store, path),), store, framework, threads)


def tensors_of(framework: str) -> Callable[[NDArray[np.uint8], Readable | MergeTask], Any]:
    """Return what makes tensors of a framework over their bytes. Raises RecipeError for another framework."""
    if framework not in FRAMEWORKS:
        hint = f"give one of {', '.join(FRAMEWORKS)}"
        raise RecipeError.of("option.invalid", "framework", f"{framework!r} was given", hint)
    if framework == "numpy":
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
