"""Routers of mixtures of experts that are built from dense models: random, or the base's answer to prompts."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, ComputedTensor, Fetch, Readable, TensorEntry
from mergepipe.checkpoints.gathered_rows import GatheredRows, RowMap
from mergepipe.checkpoints.open_files import decoded_into, once, read_elements
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, TOKENIZER_NAMES
from mergepipe.core.blocks import F32, DType, Span
from mergepipe.errors import MismatchError, RecipeError, library
from mergepipe.storage.contract import Store, sidecar_limit
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.output import write_durably
from mergepipe.storage.range_file import RangeFile

RANDOM_MODES: Final = ("random", "uniform_random")
CHEAP_MODE: Final = "cheap_embed"
GATE_MODES: Final = ("hidden", CHEAP_MODE, *RANDOM_MODES, "hidden_avg", "hidden_last")
_SMALLEST_NORM: Final = 1e-8


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts as token ids, padded on the left to one length, with 1 where a token is the prompt's own."""

    ids: tuple[tuple[int, ...], ...]
    mask: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Gates:
    """The inputs from which the routers of all layers are made.

    `prompts` has for each expert the batch that it answers and the one that it does not, if any; `rows` are the
    embeddings of all their tokens, in order (mode `cheap_embed`); `folder` is the base's, for modes that run it.
    """

    mode: str
    n_layers: int
    n_experts: int
    hidden_size: int
    seed: int = 0
    prompts: tuple[tuple[Batch, Batch | None], ...] = ()
    rows: GatheredRows | None = None
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Router(ComputedTensor):
    """The rows `[first, stop)` of the router of one layer, one row for each expert, in float32.

    A random router depends on the seed and the layer. Any other is worked out as a whole on the first fetch; hidden
    states are kept for as long as the process lives: a float32 row for each layer and expert. The run of the base is
    made by transformers, and what that reads is not counted.
    """

    name: str
    gates: Gates
    layer: int
    first: int
    stop: int
    dtype, is_unit = F32, True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stop - self.first, self.gates.hidden_size

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return () if self.gates.rows is None else self.gates.rows.stored

    @property
    def nbytes(self) -> int:
        return 0 if self.gates.rows is None else self.gates.rows.nbytes

    def cost_bytes(self, span: Span) -> int:
        rows = self.gates.rows
        return 0 if rows is None or not span.n_elements else rows.cost_bytes(Span(0, rows.n_elements))

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps the router of the layer."""

        def computed(purpose: Purpose) -> NDArray[np.float32]:
            values_EH = _layer_values(self.gates, self.layer, files, purpose)
            return np.ascontiguousarray(values_EH[self.first : self.stop], np.float32).reshape(-1)

        values = once(computed)

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            out[:] = values(purpose)[span.start : span.stop].view(np.uint8)

        return fetch


_NOISE_ELEMENTS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Noisy(ComputedTensor):
    """A matrix of an expert with normal noise of the deviation `noise` added, times `factor`; in float32.

    The noise of an element depends on `key` and its place alone.
    """

    matrix: Readable
    noise: float
    factor: float
    key: tuple[int, int, int, int]
    dtype = F32

    @property
    def name(self) -> str:
        return self.matrix.name

    @property
    def stored_dtype(self) -> DType:
        return self.matrix.stored_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    @property
    def is_unit(self) -> bool:
        return self.matrix.is_unit

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return self.matrix.stored

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def cost_bytes(self, span: Span) -> int:
        return self.matrix.cost_bytes(span)

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans; keeps what the matrix keeps."""
        fetch_matrix = self.matrix.opened(files)
        seed, place, layer, role = self.key

        def fetch(span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
            raw = np.empty(span.n_elements * self.matrix.dtype.itemsize, np.uint8)
            fetch_matrix(span, raw, purpose)
            values_N = decoded_into(raw, self.matrix.dtype.kernel_code, out.view(np.float32))
            for first in range(
                span.start // _NOISE_ELEMENTS * _NOISE_ELEMENTS, span.stop if self.noise else 0, _NOISE_ELEMENTS
            ):
                counter, key = [0, 0, 0, first], [seed, place << 40 | layer << 8 | role]
                normal_N = np.random.Generator(np.random.Philox(counter=counter, key=key)).standard_normal(
                    _NOISE_ELEMENTS, np.float32
                )
                start, stop = max(span.start, first), min(span.stop, first + _NOISE_ELEMENTS)
                added_N = normal_N[start - first : stop - first] * np.float32(self.noise)
                values_N[start - span.start : stop - span.start] += added_N
            values_N *= np.float32(self.factor)

        return fetch


def _layer_values(
    gates: Gates, layer: int, files: Mapping[Location, RangeFile], purpose: Purpose
) -> NDArray[np.float32]:
    if gates.mode in RANDOM_MODES:
        generator = np.random.Generator(np.random.Philox(key=[gates.seed, layer]))
        shape = gates.n_experts, gates.hidden_size
        if gates.mode == "random":
            return generator.standard_normal(shape, np.float32)
        bound = gates.hidden_size**-0.5
        return (generator.random(shape, np.float32) * 2 - 1) * np.float32(bound)
    if gates.rows is None:
        values_EH: NDArray[np.float32] = _hidden_values(gates)[layer]
        return values_EH
    raw = read_elements(gates.rows, Span(0, gates.rows.n_elements), files, purpose)
    rows_TH = decoded_into(raw, gates.rows.dtype.kernel_code, np.empty(gates.rows.n_elements, np.float32))
    return _embedded_values(gates, rows_TH.reshape(gates.rows.shape))


def _embedded_values(gates: Gates, rows_TH: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sum the embeddings of each expert's prompts, at length 1, less those of its negative prompts, at length 1.

    Source: mergekit-moe's mode cheap_embed, in its order of sums, by torch.
    """
    torch = _extra("torch")
    done = 0

    def direction(batch: Batch) -> Any:
        nonlocal done
        mask_BS = torch.tensor(batch.mask)
        rows = torch.from_numpy(rows_TH[done : done + mask_BS.numel()])
        done += mask_BS.numel()
        total_1H = (rows.reshape(*mask_BS.shape, -1) * mask_BS[..., None]).sum(dim=1).sum(dim=0, keepdim=True)
        return total_1H / total_1H.norm(dim=-1, keepdim=True).clamp(min=_SMALLEST_NORM)

    values_EH: NDArray[np.float32] = _difference(gates, direction)[0]
    return values_EH


_hidden_lock = threading.Lock()
_hidden: dict[Gates, NDArray[np.float32]] = {}


def _hidden_values(gates: Gates) -> NDArray[np.float32]:
    """Run the base on all prompts, once a process, and return the routers of all layers."""
    with _hidden_lock:
        if gates not in _hidden:
            _hidden.clear()
            _hidden[gates] = _run_base(gates)
        return _hidden[gates]


def _run_base(gates: Gates) -> NDArray[np.float32]:
    """Return for each expert the base's hidden states before each layer, in bfloat16 as mergekit-moe runs it."""
    torch, transformers = _extra("torch"), _extra("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gates.folder, dtype=torch.bfloat16, trust_remote_code=False, local_files_only=True
    )
    is_average = gates.mode == "hidden_avg"

    def direction(batch: Batch) -> Any:
        with torch.no_grad():
            output = model(
                input_ids=torch.tensor(batch.ids), attention_mask=torch.tensor(batch.mask), output_hidden_states=True
            )
        states_LBSH = torch.stack(output.hidden_states[:-1])
        states_LBH = states_LBSH.sum(dim=2) / states_LBSH.shape[2] if is_average else states_LBSH[:, :, -1, :]
        return states_LBH.sum(dim=1) / states_LBH.shape[1]

    return _difference(gates, direction)


def _difference(gates: Gates, direction: Any) -> NDArray[np.float32]:
    """Return the routers (layer, expert, hidden): the direction of the prompts less that of the negative ones."""
    torch = _extra("torch")
    vectors = []
    for positive, negative in gates.prompts:
        vector_LH = direction(positive)
        if negative is not None:
            vector_LH -= direction(negative)
        vector_LH /= vector_LH.norm(p=2, dim=-1, keepdim=True).clamp(min=_SMALLEST_NORM)
        vectors.append(vector_LH)
    values: NDArray[np.float32] = torch.stack(vectors, dim=1).float().numpy()
    return values


def prompt_batches(
    base: Checkpoint, store: Store, prompts: Sequence[tuple[Sequence[str], Sequence[str]]]
) -> tuple[tuple[Batch, Batch | None], ...]:
    """Tokenize the positive and negative prompts of each expert by the base's tokenizer."""
    _extra("torch")
    tokenizer = loaded_tokenizer(base, store)
    tokenizer.padding_side = "left"
    specials = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    tokenizer.pad_token_id = next((special for special in specials if special is not None), 0)  # masked, whatever it is

    def batch(texts: Sequence[str]) -> Batch:
        begun = [(tokenizer.bos_token or "") + text for text in texts]
        encoded = tokenizer(begun, padding=len(begun) > 1, add_special_tokens=False)
        ids, mask = encoded["input_ids"], encoded["attention_mask"]
        for text in (text for text, own in zip(texts, mask, strict=True) if not any(own)):
            message = f"the prompt '{text}' holds no token of the base's tokenizer"
            raise RecipeError.of("recipe.value", base.path, message, "write another, or none")
        return Batch(tuple(map(tuple, ids)), tuple(map(tuple, mask)))

    return tuple((batch(positive), batch(negative) if negative else None) for positive, negative in prompts)


def loaded_tokenizer(model: Checkpoint, store: Store) -> Any:
    """Return a model's tokenizer as transformers reads it.

    Raises:
        UnsupportedError: transformers is not installed.
        MismatchError: transformers cannot read the tokenizer.
    """
    transformers = _extra("transformers")
    names = [name for name in model.sidecars if name in TOKENIZER_NAMES or name == CONFIG_NAME]
    with tempfile.TemporaryDirectory(prefix="mergepipe-tokenizer-") as folder:
        for name in names:
            write_durably(Path(folder) / name, store.read_small(model.root / name, sidecar_limit(name)), Ledger())
        try:
            return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # of many kinds, by the tokenizer
            message = f"transformers cannot read its tokenizer: {error}"
            raise MismatchError.of("model.mismatch", model.root, " ".join(message.split())) from error


def token_rows(embedding: Readable, prompts: Sequence[tuple[Batch, Batch | None]]) -> GatheredRows:
    """Gather the embeddings of all tokens of the prompts, in order."""
    batches = [batch for pair in prompts for batch in pair if batch is not None]
    row_T = np.array([token for batch in batches for ids in batch.ids for token in ids], np.int64)
    if row_T.size and int(row_T.max()) >= embedding.shape[0]:
        message = f"has {embedding.shape[0]} rows, a prompt has the token {int(row_T.max())}"
        raise MismatchError.of("model.mismatch", embedding.name, message, "is it the model's own tokenizer?")
    rows = RowMap(np.zeros(row_T.size, np.int32), row_T)
    return GatheredRows(embedding.name, embedding.dtype, (embedding,), rows)


def _extra(name: str) -> Any:
    instead = "write gate_mode: random, or leave out new_tokens"
    return library(name, "routers from prompts, rows of new tokens", "torch", instead=instead)
