"""Choose the source model and row of each row of an aligned embedding. Pure rules on arrays of ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.computed.gathered_rows import ZERO, RowMap, RowRange, mean_origin
from mergepipe.checkpoints.tokenizers.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Given:
    """A recipe's rule for one output row: row `row` of model `model` (zeros if None), or the usual rule.

    `force`: also for models that have the token.
    """

    force: bool
    is_usual: bool = False
    model: int | None = None
    row: int = 0


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


def fill_rows(rows: TokenRows, donors: Sequence[int], base: int | None, choices: Mapping[int, Given]) -> RowMap:
    """Choose rows for models that lack a token; origins are models. Only `donors` provide rows.

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
            origin_R[row], row_R[row] = (ZERO, 0) if choice.model is None else (choice.model, choice.row)
    return RowMap(origin_R, row_R, tuple(means))


def no_rows(n_rows: int) -> RowMap:
    """Return a map of zero rows: a delta model changes no token that it lacks."""
    return RowMap(np.full(n_rows, ZERO, np.int32), np.zeros(n_rows, np.int64))


def model_rows(
    rows: TokenRows, model: int, fill: RowMap, padding: Sequence[tuple[int, int]], choices: Mapping[int, Given]
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
