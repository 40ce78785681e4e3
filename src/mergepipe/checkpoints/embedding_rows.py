"""Tensors with one row per token: find them, and choose the source of each row of an aligned one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable
from mergepipe.checkpoints.gathered_rows import ZERO, RowMap, RowRange, mean_origin
from mergepipe.checkpoints.vocabulary import (
    CONFIG_NAME,
    FAST_NAME,
    SETTINGS_NAME,
    VOCABULARY_NAMES,
    TokenizerFiles,
    Vocabulary,
    read_vocabulary,
)
from mergepipe.core.strict_json import shown
from mergepipe.core.units import plural
from mergepipe.errors import MergePipeError, MismatchError
from mergepipe.storage.contract import Store, map_at_once

# --- recognise the names that architectures give to tensors with one row per token ---


_NAME = re.compile(
    r"(?:^|\.)((?:embed_tokens|wte|word_embeddings?|tok_embeddings|token_embeddings?|embed_in|embed_out|shared"
    r"|lm_head|output|vocab_projector|predictions|predictions\.decoder)\.(?:weight|bias))$"
)

_TASK_HEAD = re.compile(r"(?:^|\.)(?:score|classifier|classification_head|qa_outputs|v_head|reward_head)\.")

# Output heads that a model with tied weights does not store: they are its embedding.
TIED_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")


def embedding_ending(name: str) -> str | None:
    """Return the suffix of a name that marks an embedding or an output head; None if there is none.

    Its number of rows decides: `output.weight`, for one, is a usual name for other tensors too.
    """
    match = _NAME.search(name)
    return match[1] if match else None


def is_head(name: str) -> bool:
    """Whether a tensor is an output head, which models with tied weights may not store."""
    return any(name == head or name.endswith(f".{head}") for head in TIED_HEADS)


def is_task_head(name: str) -> bool:
    """Whether a tensor is the head of a reward model, a classifier or another task than the next token."""
    return _TASK_HEAD.search(name) is not None


# --- find a checkpoint's tensors with one row per token, by name and number of rows, for any architecture ---


VOCAB_SIZE_KEY = "vocab_size"


def embeddings_of(model: Checkpoint, vocabulary: Vocabulary, store: Store) -> dict[str, Readable]:
    """Find the tensors of `model` with a row for every token, by name, in storage order; padding rows are allowed."""
    config = TokenizerFiles(model, store).document(CONFIG_NAME)
    stated = (part.get(VOCAB_SIZE_KEY) for part in (config, *config.values()) if isinstance(part, dict))
    vocab_size = next((size for size in stated if type(size) is int), None)
    named = {name: tensor for name, tensor in model.tensors.items() if tensor.shape and embedding_ending(name)}
    embeddings = {
        name: tensor
        for name, tensor in named.items()
        if tensor.shape[0] == vocab_size or tensor.shape[0] >= vocabulary.n_ids
    }
    if named and not embeddings and model.kind is CheckpointKind.FULL:
        name, tensor = next(iter(named.items()))
        message = f"{tensor.shape[0]} rows in '{model.path}', its {vocabulary.file} needs {vocabulary.n_ids}"
        hint = f"is it the model's own tokenizer? If so, state '{VOCAB_SIZE_KEY}' in its {CONFIG_NAME}"
        raise MismatchError.of("model.mismatch", name, message, hint)
    return embeddings


def paired_embeddings(embeddings: Sequence[Mapping[str, Readable]]) -> list[dict[int, Readable]]:
    """Group the corresponding embeddings of the models, each group keyed by model; name prefixes may differ."""
    is_short = all(max(Counter(map(_ending, embedding)).values(), default=0) <= 1 for embedding in embeddings)
    groups: dict[str, dict[int, Readable]] = {}
    for model, named_embeddings in enumerate(embeddings):
        for name, tensor in named_embeddings.items():
            groups.setdefault(_ending(name) if is_short else name, {})[model] = tensor
    return list(groups.values())


def _ending(name: str) -> str:
    return embedding_ending(name) or name


# --- choose the source model and row of each row of an aligned embedding. Pure rules on arrays of ids ---


@dataclass(frozen=True, slots=True)
class TokenRule:
    """A recipe's rule for the embedding of a token: the row of a token of `model`, zeros where that is None.

    The row is that of `token_id`, else of `token`, else of the same token. `is_usual`: as of any other token. `force`:
    also for models that have the token.
    """

    model: int | None = None
    token: str | None = None
    token_id: int | None = None
    is_usual: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """The rows of R output tokens in M models: `row_MR`, -1 where a model has no row for the token.

    `is_token_R` is False for rows that no token has, which pad the embedding.
    """

    row_MR: NDArray[np.int64]
    is_token_R: NDArray[np.bool_]

    @classmethod
    def of(cls, output: Vocabulary, vocabularies: Sequence[Vocabulary], n_rows: int) -> TokenRows:
        """Look up every token of `output` in every vocabulary."""
        is_token_R = np.zeros(n_rows, np.bool_)
        row_MR = np.full((len(vocabularies), n_rows), -1, np.int64)
        rows_T = np.fromiter(output.ids.values(), np.int64, len(output.ids))
        is_token_R[rows_T] = True
        for row_R, vocabulary in zip(row_MR, vocabularies, strict=True):
            ids = vocabulary.ids
            row_R[rows_T] = np.fromiter((ids.get(token, -1) for token in output.ids), np.int64, rows_T.size)
        return cls(row_MR, is_token_R)

    def cut(self, n_rows_M: Sequence[int]) -> TokenRows:
        """Remove rows beyond the end of a model's embedding: the model lacks those tokens."""
        limit_M1 = np.asarray(n_rows_M, np.int64)[:, None]
        return TokenRows(np.where(self.row_MR < limit_M1, self.row_MR, -1), self.is_token_R)


def fill_rows(rows: TokenRows, donors: Sequence[int], base: int | None, choices: Mapping[int, TokenRule]) -> RowMap:
    """Choose rows for models that lack a token; origins are models. Only `donors` provide rows.

    `choices` are the rules of single rows, with ids where they name a model.
    One donor has the token: its row. Several have it: the base's, else the mean of theirs. None has it: zeros.
    """
    n_rows = rows.is_token_R.size
    origin_R, row_R = np.full(n_rows, ZERO, np.int32), np.zeros(n_rows, np.int64)
    present_DR = rows.row_MR[list(donors)] >= 0
    count_R = present_DR.sum(axis=0)
    for donor, present_R in zip(donors, present_DR, strict=True):
        lends_R = present_R & ((count_R == 1) | (donor == base))
        origin_R[lends_R], row_R[lends_R] = donor, rows.row_MR[donor][lends_R]
    is_needed_R = count_R < len(donors)
    is_needed_R[[row for row, choice in choices.items() if choice.force]] = True
    means: list[tuple[RowRange, ...]] = []
    for row in np.flatnonzero(is_needed_R & (count_R > 1) & (origin_R == ZERO)).tolist():
        origin_R[row] = mean_origin(len(means))
        having = (donor for donor, has in zip(donors, present_DR[:, row].tolist(), strict=True) if has)
        means.append(tuple(RowRange(donor, at := int(rows.row_MR[donor, row]), at + 1) for donor in having))
    for row, choice in choices.items():
        if not choice.is_usual:
            origin_R[row] = ZERO if choice.model is None else choice.model
            row_R[row] = choice.token_id or 0
    return RowMap(origin_R, row_R, tuple(means))


def no_rows(n_rows: int) -> RowMap:
    """Return a map of zero rows: a delta model changes no token that it lacks."""
    return RowMap(np.full(n_rows, ZERO, np.int32), np.zeros(n_rows, np.int64))


def model_rows(
    rows: TokenRows, model: int, fill: RowMap, padding: Sequence[tuple[int, int]], choices: Mapping[int, TokenRule]
) -> RowMap:
    """Choose the rows of one model's aligned embedding; origins are models.

    Its own row where it has the token, else that of `fill`. Rows without a token are those of the first
    (model, number of rows) of `padding` that has so many, else zeros.
    """
    own_R = rows.row_MR[model]
    is_own_R = own_R >= 0
    is_own_R[[row for row, choice in choices.items() if choice.force]] = False
    origin_R = np.where(is_own_R, np.int32(model), fill.origin_R)
    row_R = np.where(is_own_R, own_R, fill.row_R)
    place_R = np.arange(own_R.size, dtype=np.int64)
    for lender, n_rows in reversed(padding):
        is_lent_R = ~rows.is_token_R & (place_R < n_rows)
        origin_R[is_lent_R], row_R[is_lent_R] = lender, place_R[is_lent_R]
    return RowMap(origin_R.astype(np.int32), row_R, fill.means)


def of_sources(rows: RowMap, model: int) -> tuple[RowMap, tuple[int, ...]]:
    """Restrict the map's sources to the models it uses, `model` first; return it with those models in order."""
    is_mean_R = rows.origin_R <= mean_origin(0)
    origins, renumbered_R = np.unique(rows.origin_R[is_mean_R], return_inverse=True)
    means = [rows.means[mean_origin(origin)] for origin in origins.tolist()]
    models = set(np.unique(rows.origin_R[rows.origin_R >= 0]).tolist())
    models |= {part.source for mean in means for part in mean}
    order = (model, *sorted(models - {model}))
    place = {source: index for index, source in enumerate(order)}
    place_M = np.full(max(order) + 1, ZERO, np.int32)
    place_M[list(order)] = np.arange(len(order))
    origin_R = np.where(rows.origin_R >= 0, place_M[np.maximum(rows.origin_R, 0)], rows.origin_R)
    origin_R[is_mean_R] = mean_origin(0) - renumbered_R
    renamed = tuple(tuple(RowRange(place[part.source], part.first, part.stop) for part in mean) for mean in means)
    return RowMap(origin_R.astype(np.int32), rows.row_R, renamed), order


# --- report what merging embeddings by row number means where the models' tokenizers differ ---


_MAX_EXAMPLES = 5
_ADVICE = "`tokenizer: {source: union}` in the recipe"


def unaligned_notices(
    models: Sequence[Checkpoint], names: Sequence[str], used: Collection[int], store: Store
) -> tuple[str, ...]:
    """List one notice per difference of a model's tokens or rows from the first model's, whose tokenizer is kept.

    `names` are the models', `used` those whose embeddings are merged. Tokenizer files with the same bytes are not
    parsed. One that cannot be read is a notice, no error: nothing that is merged depends on it.
    """
    first = models[0]
    experts = [index for index in sorted(used) if index > 0 and models[index].kind is CheckpointKind.FULL]
    compared = [first, *(models[index] for index in experts)]
    roots = [model.root for model in compared]
    own_files, *files = map_at_once(store, roots, lambda model: _contents(model, store), compared)
    lines: list[str] = []
    for index, theirs in zip(experts, files, strict=True):
        model, name = models[index], names[index]
        differ = own_files and theirs and own_files != theirs
        tokens = list(_model_notices(first, names[0], model, name, store)) if differ else []
        lines += tokens or _row_notices(first, names[0], model, name)
    return tuple(lines)


def _contents(model: Checkpoint, store: Store) -> tuple[tuple[str, bytes], ...]:
    """Read the files that map tokens to ids."""
    files = TokenizerFiles(model, store)
    names = VOCABULARY_NAMES if FAST_NAME in files else (*VOCABULARY_NAMES, SETTINGS_NAME)
    return tuple((name, files.raw(name)) for name in names if name in files)


def _model_notices(first: Checkpoint, first_name: str, model: Checkpoint, name: str, store: Store) -> Iterator[str]:
    try:
        base, other = read_vocabulary(first, store), read_vocabulary(model, store)
    except MergePipeError as error:
        yield f"the tokens of '{name}' and '{first_name}' cannot be compared: {error}"
        return
    if base is not None and other is not None:
        yield from _token_notices(base, first_name, other, name)


def _token_notices(base: Vocabulary, base_name: str, other: Vocabulary, name: str) -> Iterator[str]:
    by_id = {index: token for token, index in base.ids.items()}
    moved = sum(by_id.get(index, token) != token for token, index in other.ids.items())
    if moved:
        yield (
            f"{plural(moved, 'row')} of embeddings: '{name}' has other tokens there than '{base_name}', and they are "
            f"merged by number; {_ADVICE} merges them by token"
        )
    lost = [token for token in other.ids if token not in base.ids]
    if lost:
        tokens = plural(len(lost), "token")
        yield f"{tokens} of '{name}' not in the output's tokenizer: {examples_of(lost)}; {_ADVICE} adds them"


def examples_of(tokens: Sequence[str]) -> str:
    """List the first of some tokens."""
    return ", ".join(map(shown, tokens[:_MAX_EXAMPLES])) + (", ..." if len(tokens) > _MAX_EXAMPLES else "")


def _row_notices(first: Checkpoint, first_name: str, model: Checkpoint, name: str) -> list[str]:
    """Report rows beyond the output's whose tokens are unknown."""
    rows = {
        (tensor.shape[0], other.shape[0])
        for key, tensor in first.tensors.items()
        if tensor.shape and embedding_ending(key) and (other := model.tensors.get(key)) is not None and other.shape
    }
    return [
        f"embeddings have {more} rows in '{name}', {fewer} in '{first_name}': the rest is left out"
        for fewer, more in sorted(rows)
        if more > fewer
    ]
