"""All blocks of all merged tensors side by side, and what reading each of them costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.cost import block_costs_bytes
from mergepipe.recipe.resolve import MergeTask


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """One column per block (B), tensor after tensor (T). Tensor `t` owns columns `[first_T[t], first_T[t + 1])`.

    `first_T` has T + 1 entries; `element_B` and `n_B` are a block's first element and its number of elements.
    """

    tasks: tuple[MergeTask, ...]
    first_T: NDArray[np.int64]
    tensor_B: NDArray[np.int64]
    element_B: NDArray[np.int64]
    n_B: NDArray[np.int64]

    @property
    def n_columns(self) -> int:
        return len(self.tensor_B)

    def of_tensor(self, tensor: int) -> slice:
        """The columns of one tensor."""
        return slice(int(self.first_T[tensor]), int(self.first_T[tensor + 1]))


def lay_out_columns(tasks: Sequence[MergeTask], block_elements: int) -> Columns:
    """The columns of `tasks` in blocks of `block_elements`."""
    elements_T = np.array([task.base.n_elements for task in tasks], np.int64)
    blocks_T = -(-elements_T // block_elements)
    first_T = np.concatenate([[0], np.cumsum(blocks_T)]).astype(np.int64)
    tensor_B = np.repeat(np.arange(len(tasks)), blocks_T)
    element_B = (np.arange(first_T[-1]) - first_T[tensor_B]) * block_elements
    n_B = np.minimum(block_elements, elements_T[tensor_B] - element_B)
    return Columns(tuple(tasks), first_T, tensor_B, element_B, n_B)


def read_costs(columns: Columns, n_experts: int) -> NDArray[np.int64]:
    """`cost_EB`: bytes requested of each expert's file to read each block alone."""
    cost_EB = np.empty((n_experts, columns.n_columns), np.int64)
    for e in range(n_experts):
        entries = [task.experts[e] for task in columns.tasks]
        offset_T = np.array([entry.offset for entry in entries], np.int64)
        itemsize_T = np.array([entry.dtype.itemsize for entry in entries], np.int64)
        tensor_B = columns.tensor_B
        cost_EB[e] = block_costs_bytes(offset_T[tensor_B], itemsize_T[tensor_B], columns.element_B, columns.n_B)
    return cost_EB
