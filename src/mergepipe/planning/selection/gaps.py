"""Close short gaps in what is selected: reading on is cheaper than another request, and what is read is merged too."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.candidates.items import Candidates, Items
from mergepipe.planning.selection.policy_order import Order


class Gaps:
    """The unselected blocks between selected ones of one expert's tensor, as far as they could be selected as well.

    A gap is short where its bytes are fewer than a request of that expert is worth. Gaps with blocks that are not to be
    read (equal to the base, served by another expert, with levels) stay. Ranges of different tensors are different
    requests: they are merged at different times.
    """

    def __init__(self, candidates: Candidates, items: Items) -> None:
        self._items = items
        self._worth_E = candidates.request_bytes_E
        if self.is_priced:
            self._describe(candidates)

    @property
    def is_priced(self) -> bool:
        """Whether a request of any expert costs anything."""
        return bool(self._worth_E.any())

    def _describe(self, candidates: Candidates) -> None:
        """Number the chains of neighbouring blocks, and sum up their bytes."""
        items, n = self._items, self._items.n_single
        expert_S, column_S = items.expert_I[:n], items.column_I[:n]
        is_plain_S = np.ones(n, np.bool_)
        for e, t in candidates.ladders:
            inside = candidates.columns.of_tensor(t)
            is_plain_S &= ~((expert_S == e) & (column_S >= inside.start) & (column_S < inside.stop))
        follows_S = np.zeros(n, np.bool_)
        follows_S[1:] = (np.diff(items.flat_I[:n]) == 1) & (np.diff(items.tensor_I[:n]) == 0)
        follows_S[1:] &= (np.diff(expert_S) == 0) & is_plain_S[1:] & is_plain_S[:-1]
        self._chain_S = np.cumsum(~follows_S)
        self._bytes_before_S = np.concatenate([[0], np.cumsum(items.cost_I[:n])])
        self._worth_S = self._worth_E[expert_S]

    def closed(self, selected: Order) -> NDArray[np.bool_]:
        """Return a mask of the `selected` items and of those in the short gaps between them.

        Law: the more is selected, the more is returned.
        """
        chosen_I = np.zeros(len(self._items), np.bool_)
        chosen_I[selected] = True
        n = self._items.n_single
        place_C = np.flatnonzero(chosen_I[:n])
        if len(place_C) < 2:
            return chosen_I
        before_G, after_G = place_C[:-1], place_C[1:]
        gap_bytes_G = self._bytes_before_S[after_G] - self._bytes_before_S[before_G + 1]
        is_short_G = (self._chain_S[before_G] == self._chain_S[after_G]) & (gap_bytes_G < self._worth_S[before_G])
        change_S = np.zeros(n + 1, np.int64)
        np.add.at(change_S, before_G[is_short_G], 1)
        np.add.at(change_S, after_G[is_short_G], -1)
        chosen_I[:n] |= np.cumsum(change_S[:n]) > 0
        return chosen_I
