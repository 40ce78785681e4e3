"""Align the embedding rows of checkpoints with different vocabularies by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.added_tokens import extended, extended_files
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable
from mergepipe.checkpoints.embedding_rows import (
    TokenRows,
    TokenRule,
    embedding_ending,
    embeddings_of,
    examples_of,
    fill_rows,
    model_rows,
    no_rows,
    of_sources,
    paired_embeddings,
)
from mergepipe.checkpoints.gathered_rows import ZERO, GatheredRows, RowMap, RowRange, common_dtype, mean_origin
from mergepipe.checkpoints.pursued_rows import PursuedRows
from mergepipe.checkpoints.vocabulary import AddedToken, TokenizerFiles, Vocabulary, read_vocabulary
from mergepipe.core.blocks import DTypeKind
from mergepipe.core.strict_json import canonical_json, shown
from mergepipe.core.units import plural
from mergepipe.errors import MismatchError, NotFoundError, RecipeError, UnsupportedError, did_you_mean
from mergepipe.recipes.recipe import TokenizerRequest
from mergepipe.recipes.tokenizer_source import OMP, SUBWORD
from mergepipe.storage.contract import Store


@dataclass(frozen=True, slots=True)
class Alignment:
    """The result of aligning vocabularies.

    `checkpoints`: the given ones in order, their embeddings as aligned ones of `n_rows` rows; a tensor that already
    is aligned stays itself. `lender`: whose tokenizer the output has; `files` are those of its tokenizer files that
    change, with their new content. `dropped`: by model its tokens that the output does not have. `words`: the tokens
    that a union takes of other models' ordinary vocabularies.
    `digest` (32 hex digits) is of the output's tokens and of where every row comes from: tokenizer files may change
    where weights do not.
    """

    checkpoints: tuple[Checkpoint, ...]
    n_rows: int
    lender: int
    files: Mapping[str, bytes]
    dropped: Mapping[int, tuple[str, ...]]
    digest: str
    words: tuple[str, ...] = ()

    def notices(self, names: Sequence[str]) -> tuple[str, ...]:
        """Format a line per model that loses tokens, and one of ordinary tokens; `names` are the models' names."""
        notices = [
            f"{plural(len(tokens), 'token')} of '{names[model]}' not in the output's tokenizer, "
            f"embeddings left out: {examples_of(tokens)}"
            for model, tokens in self.dropped.items()
        ]
        if self.words:
            text = f"the union adds {plural(len(self.words), 'ordinary token')} of other models"
            effect = "which are matched before the base's own rules split a text, so texts are split differently"
            notices.append(f"{text} ({examples_of(self.words)}), {effect}")
        return tuple(notices)


def align_vocabulary(
    request: TokenizerRequest, models: Sequence[Checkpoint], store: Store, *, has_base: bool
) -> Alignment:
    """Align the embeddings of `models` (of `Recipe.inputs()`) with the requested tokenizer.

    `has_base`: the recipe names a `base_model`, which is `models[0]`; its row is used for a token that some model
    lacks, else the mean of those that have one. Models without tokenizer files have that of `models[0]`. A donor's own
    embeddings are not aligned.
    """
    vocabularies = _vocabularies(models, store)
    lender = request.model
    embeddings = [embeddings_of(model, vocab, store) for model, vocab in zip(models, vocabularies, strict=True)]
    n_ids_of_models = []
    for named, vocabulary in zip(embeddings, vocabularies, strict=True):
        rows = [tensor.shape[0] for tensor in named.values()]
        n_ids_of_models.append(min(rows, default=vocabulary.n_ids))
    added = _added_tokens(request, vocabularies, n_ids_of_models, lender)
    output = extended(vocabularies[lender], added)
    aligner = _Aligner(request, models, vocabularies, output, 0 if has_base else None, store)
    if request.donor is not None:
        aligner.donated = embeddings[lender]
        embeddings[lender] = {}
    groups = paired_embeddings(embeddings)
    n_rows = aligner.n_rows([group[lender] for group in groups if lender in group])
    replaced: list[dict[str, Readable]] = [{} for _ in models]
    for group in groups:
        for index, tensor in aligner.aligned(group, n_rows).items():
            replaced[index][group[index].name] = tensor
    words = set[str]()
    dropped = {}
    for model, vocabulary in enumerate(vocabularies):
        words.update(vocabulary.ids.keys() - vocabulary.added.keys())
        missing = tuple(token for token in vocabulary.ids if token not in output.ids)
        if missing:
            dropped[model] = missing
    return Alignment(
        tuple(
            replace(model, tensors=MappingProxyType({**model.tensors, **tensors})) if tensors else model
            for model, tensors in zip(models, replaced, strict=True)
        ),
        n_rows,
        lender,
        MappingProxyType(extended_files(TokenizerFiles(models[lender], store), output, added)),
        dropped,
        _digest(output, replaced),
        tuple(token.content for token in added if token.content in words),
    )


def _digest(output: Vocabulary, replaced: Sequence[Mapping[str, Readable]]) -> str:
    hasher = blake3(canonical_json([list(output.ids.items()), output.n_ids]))
    for model, tensors in enumerate(replaced):
        for name, tensor in sorted(tensors.items()):
            hasher.update(canonical_json([model, name, list(tensor.shape), tensor.dtype.name]))
            if isinstance(tensor, GatheredRows):
                hasher.update(tensor.rows.origin_R.tobytes())
                hasher.update(tensor.rows.row_R.tobytes())
                means = [list(map(astuple, mean)) for mean in tensor.rows.means]
                hasher.update(canonical_json(means))
    return hasher.hexdigest(length=16)


def _vocabularies(models: Sequence[Checkpoint], store: Store) -> tuple[Vocabulary, ...]:
    """Read every model's vocabulary; adapters and deltas have the first model's."""
    first = read_vocabulary(models[0], store)
    if first is None:
        message = "no tokenizer file found, and the recipe asks for aligned tokens"
        hint = "put a tokenizer.json into the model's folder, or leave out the recipe's tokenizer"
        raise NotFoundError.of("checkpoint.incomplete", models[0].path, message, hint)
    read = (read_vocabulary(model, store) if model.kind is CheckpointKind.FULL else None for model in models[1:])
    return (first, *(other or first for other in read))


def _added_tokens(
    request: TokenizerRequest, vocabularies: Sequence[Vocabulary], n_ids_of_models: Sequence[int], lender: int
) -> list[AddedToken]:
    """List the tokens added to the lender's vocabulary in order of new id: by model and id, then the recipe's own."""
    added: dict[str, AddedToken] = {}
    lender_ids = vocabularies[lender].ids
    if request.is_union:
        for vocabulary, n_ids in zip(vocabularies, n_ids_of_models, strict=True):
            for token, index in vocabulary.ids.items():
                if index < n_ids and token not in lender_ids:
                    added.setdefault(token, vocabulary.as_added(token))
    for token in request.tokens:
        if token not in lender_ids:
            added.setdefault(token, AddedToken(token))
    return list(added.values())


class _Aligner:
    """Aligns groups of paired embeddings."""

    def __init__(
        self,
        request: TokenizerRequest,
        models: Sequence[Checkpoint],
        vocabularies: Sequence[Vocabulary],
        output: Vocabulary,
        base: int | None,
        store: Store,
    ) -> None:
        self.donated: Mapping[str, Readable] = {}  # the embeddings of a donor, by name
        self._store = store
        self._words: dict[int, list[list[int]]] = {}  # by model, see `_subwords`
        self._request = request
        self._models = models
        self._vocabularies = vocabularies
        self._output = output
        self._lender = request.model
        self._base = base

    def n_rows(self, lent: Sequence[Readable]) -> int:
        """Return the output's rows: those of the lender's embeddings plus added tokens, or the requested padding."""
        n_tokens, multiple = self._output.n_ids, self._request.pad_to_multiple_of
        if multiple:
            return -(-n_tokens // multiple) * multiple
        return max((n_tokens, *(tensor.shape[0] for tensor in lent)))

    def aligned(self, group: Mapping[int, Readable], n_rows: int) -> dict[int, Readable]:
        """Align the embeddings of one group: by model, with `n_rows` rows each."""
        self._check(group)
        multiple = self._request.pad_to_multiple_of
        n_mapped = self._output.n_ids if multiple else n_rows
        limits = [group[m].shape[0] if m in group else 0 for m in range(len(self._models))]
        donated = self._donated_like(group)
        limits[self._lender] = limits[self._lender] if donated is None else donated.shape[0]
        rows = TokenRows.of(self._output, self._vocabularies, n_mapped).cut(limits)
        token_rules = self._token_rules(group)
        donors = [model for model, tensor in group.items() if not tensor.is_delta]
        fill = fill_rows(rows, donors, self._base if self._base in group else None, token_rules)
        return {
            model: _padded(self._tensor(group, model, rows, fill, token_rules), n_rows)
            if multiple
            else self._tensor(group, model, rows, fill, token_rules)
            for model in group
        }

    def _tensor(
        self, group: Mapping[int, Readable], model: int, rows: TokenRows, fill: RowMap, rules: Mapping[int, TokenRule]
    ) -> Readable:
        stored = group[model]
        if stored.is_delta:
            fill = no_rows(rows.is_token_R.size)
        chosen = model_rows(rows, model, fill, self._padding(group, model), rules)
        new_N = np.flatnonzero((chosen.origin_R == ZERO) & rows.is_token_R)
        new_N = np.setdiff1d(new_N, [row for row, rule in rules.items() if not rule.is_usual])
        makes_rows = bool(self._request.new_tokens) and new_N.size > 0 and not stored.is_delta
        if makes_rows and self._request.new_tokens == SUBWORD:
            chosen = self._with_means(chosen, new_N, model, stored.shape[0])
        row_map, order = of_sources(chosen, model)
        if row_map.is_identity(stored.shape[0]):
            return stored
        sources = tuple(group[source] for source in order)
        if makes_rows and self._request.new_tokens == OMP:
            row_map.origin_R[new_N], row_map.row_R[new_N] = len(sources), np.arange(new_N.size)
            sources = (*sources, self._pursued(group, model, rows, new_N))
        # The first model lends the output's dtype: rows of others are rounded to it, as the output is.
        dtype = stored.dtype if model == 0 else common_dtype(sources)
        return GatheredRows(stored.name, dtype, sources, row_map, stored.is_delta)

    def _with_means(self, chosen: RowMap, new_N: NDArray[np.int64], model: int, n_rows: int) -> RowMap:
        """Make the rows `new_N` means of a model's rows of the tokens that it reads in the new tokens' texts."""
        if model not in self._words:
            self._words[model] = self._subwords(model)
        origin_R, means = chosen.origin_R.copy(), list(chosen.means)
        for row in new_N.tolist():
            if words := [word for word in self._words[model][row] if word < n_rows]:
                origin_R[row] = mean_origin(len(means))
                means.append(tuple(RowRange(model, word, word + 1) for word in words))
        return RowMap(origin_R, chosen.row_R, tuple(means))

    def _subwords(self, model: int) -> list[list[int]]:
        """Return by id of the output what a model's tokenizer reads in the text of a token that it lacks."""
        from mergepipe.checkpoints.routers import loaded_tokenizer  # an extra

        # Models without tokenizer files have the first one's.
        named = model if self._vocabularies[model] is not self._vocabularies[0] else 0
        own, lender = (loaded_tokenizer(self._models[index], self._store) for index in (named, self._lender))
        words: list[list[int]] = [[] for _ in range(self._output.n_ids)]
        lent = self._vocabularies[self._lender].ids
        for token, row in self._output.ids.items():
            if token not in self._vocabularies[model].ids:
                # Twice, since decoding takes the space before the first word away.
                text = lender.decode([row, row])[len(lender.decode([row])) :] if token in lent else token
                words[row] = own(text, add_special_tokens=False)["input_ids"]
        return words

    def _donated_like(self, group: Mapping[int, Readable]) -> Readable | None:
        """Return the donor's tensor of the kind of a group; of tied ones, its embedding; None where none is merged."""
        ending = embedding_ending(next(iter(group.values())).name)
        alike = (tensor for name, tensor in self.donated.items() if embedding_ending(name) == ending)
        return next(alike, None) or next(iter(self.donated.values()), None)

    def _pursued(
        self, group: Mapping[int, Readable], model: int, rows: TokenRows, new_N: NDArray[np.int64]
    ) -> PursuedRows:
        """Make new rows of a model's rows of the tokens that the donor of the tokenizer has, too."""
        donated, (own_R, lent_R) = self._donated_like(group), rows.row_MR[[model, self._lender]]
        common_C = np.flatnonzero((own_R >= 0) & (lent_R >= 0))
        if donated is None or not common_C.size:
            message = f"has no token that '{self._models[self._lender].path}' has, to make the rows of new ones of"
            raise MismatchError.of("model.mismatch", group[model].name, message, "write new_tokens: subword")
        own_C, lent_C = own_R[common_C], lent_R[common_C]
        return PursuedRows(group[model], donated, own_C, lent_C, lent_R[new_N], self._request.n_atoms)

    def _padding(self, group: Mapping[int, Readable], model: int) -> list[tuple[int, int]]:
        """Choose the models that provide rows without tokens: the model itself if its ids match, then the lender."""
        lenders = [model] if self._vocabularies[model].ids == self._output.ids else []
        if self._lender in group and not group[self._lender].is_delta and not group[model].is_delta:
            lenders.append(self._lender)
        return [(lender, group[lender].shape[0]) for lender in lenders]

    def _check(self, group: Mapping[int, Readable]) -> None:
        first, *further = group
        for model in further:
            if group[model].shape[1:] != group[first].shape[1:]:
                raise MismatchError.of(
                    "model.mismatch", group[model].name,
                    f"shape {list(group[model].shape)} in '{self._models[model].path}', "
                    f"{list(group[first].shape)} in '{self._models[first].path}': only the number of rows may differ",
                )  # fmt: skip
        for model, tensor in group.items():
            if tensor.dtype.kind is not DTypeKind.FLOAT:
                message = f"{tensor.dtype.name} in '{self._models[model].path}' cannot be aligned"
                raise UnsupportedError.of("tokenizer.unsupported", tensor.name, message, "convert the model first")

    def _token_rules(self, group: Mapping[int, Readable]) -> dict[int, TokenRule]:
        """Return the recipe's rules for single tokens, by output row, with the ids of the tokens that they name."""
        return {
            self._output.ids[token]: rule
            if rule.model is None
            else replace(rule, token_id=self._row_of(token, rule, rule.model, group))
            for token, rule in self._request.tokens.items()
        }

    def _row_of(self, token: str, rule: TokenRule, model: int, group: Mapping[int, Readable]) -> int:
        path = self._models[model].path
        if model not in group or group[model].is_delta:
            name = next(iter(group.values())).name
            content = "only differences of it" if model in group else "none"
            raise self._error(token, f"the row of '{name}' in '{path}' is needed, the model has {content}")
        n_rows = group[model].shape[0]
        row = self._id_of(token, rule, model)
        if not 0 <= row < n_rows:
            raise self._error(token, f"the row {row} of '{path}' is needed, its '{group[model].name}' has {n_rows}")
        return row

    def _id_of(self, token: str, rule: TokenRule, model: int) -> int:
        if rule.token_id is not None:
            return rule.token_id
        source_token = token if rule.token is None else rule.token
        ids = self._vocabularies[model].ids
        if source_token not in ids:
            message = f"'{self._models[model].path}' has no token {shown(source_token)}"
            raise self._error(token, message, did_you_mean(source_token, list(self._vocabularies[model].added)))
        return ids[source_token]

    def _error(self, token: str, message: str, hint: str = "") -> RecipeError:
        error = RecipeError.of("recipe.value", self._request.where, f"token {shown(token)}: {message}", hint)
        assert isinstance(error, RecipeError)
        return error


def _padded(tensor: Readable, n_rows: int) -> Readable:
    """Append the mean of the tensor's rows up to `n_rows` rows."""
    n_own = tensor.shape[0]
    if n_own == n_rows:
        return tensor
    origin_R = np.full(n_rows, mean_origin(0), np.int32)
    origin_R[:n_own] = 0
    row_R = np.arange(n_rows, dtype=np.int64)
    rows = RowMap(origin_R, row_R, ((RowRange(0, 0, n_own),),))
    return GatheredRows(tensor.name, tensor.dtype, (tensor,), rows, tensor.is_delta)
