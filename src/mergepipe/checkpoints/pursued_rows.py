"""Rows of tokens that a model lacks, each made from its rows as another model's row is made from that model's rows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import ComputedTensor, Fetch, Readable, TensorEntry
from mergepipe.checkpoints.gathered_rows import gathered_rows
from mergepipe.checkpoints.open_files import decoded, read_elements, whole_cost_bytes
from mergepipe.core.blocks import F32, Span, element_count
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile

_MOST_BASIS_BYTES = 1 << 28


@dataclass(frozen=True, slots=True, eq=False)
class PursuedRows(ComputedTensor):
    """Rows that stand to a model's rows as a donor's do to the donor's, in float32.

    Orthogonal matching pursuit: each row `wanted_N` of the donor's is approximated by at most `n_atoms` of its rows
    `donor_C`, one after another that with the largest inner product with what is left, all with the weights of least
    squares at every step. The same combination of the model's rows `own_C` is the result. Source: Pati et al., 1993;
    atoms are not normalised, as in mergekit-tokensurgeon. Memory: the donor's rows in float32, and 256 MiB.
    """

    own: Readable
    donor: Readable
    own_C: NDArray[np.int64]
    donor_C: NDArray[np.int64]
    wanted_N: NDArray[np.int64]
    n_atoms: int
    dtype = F32

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.wanted_N.size, *self.own.shape[1:])

    @property
    def stored(self) -> tuple[TensorEntry, ...]:
        return (*self.own.stored, *self.donor.stored)

    def cost_bytes(self, span: Span) -> int:
        return whole_cost_bytes((self.own, self.donor))

    def opened(self, files: Mapping[Location, RangeFile]) -> Fetch:
        """Return a fetch of spans, of which the first reads the donor's rows; keeps these."""
        return _OpenedPursuit(self, files)


class _OpenedPursuit:
    """Fetches the spans of pursued rows, one at a time and each on all processors; keeps the donor's rows."""

    def __init__(self, tensor: PursuedRows, files: Mapping[Location, RangeFile]) -> None:
        self._tensor = tensor
        self._files = files
        self._lock = threading.Lock()
        self._atoms_CD: NDArray[np.float32] | None = None

    def __call__(self, span: Span, out: NDArray[np.uint8], purpose: Purpose) -> None:
        tensor = self._tensor
        width = element_count(tensor.shape[1:])
        first = span.start // width
        stop = -(-span.stop // width)
        parts: list[NDArray[np.float64]] = []
        with self._lock:
            if self._atoms_CD is None:
                self._atoms_CD = self._rows(tensor.donor, tensor.donor_C, purpose)
            step = max(1, _MOST_BASIS_BYTES // (8 * tensor.n_atoms * self._atoms_CD.shape[1]))
            for at in range(first, stop, step):
                wanted_N = tensor.wanted_N[at : min(at + step, stop)]
                parts.append(self._made(self._atoms_CD, wanted_N, purpose))
        skipped = span.start - first * width
        out[:] = np.concatenate(parts, dtype=np.float32)[skipped : skipped + span.n_elements].view(np.uint8)

    def _rows(self, tensor: Readable, row_R: NDArray[np.int64], purpose: Purpose) -> NDArray[np.float32]:
        """Read rows of a tensor."""
        chosen = gathered_rows(tensor, row_R)
        raw = read_elements(chosen, Span(0, chosen.n_elements), self._files, purpose)
        return decoded(raw, chosen.dtype.kernel_code).reshape(row_R.size, -1)

    def _made(
        self, atoms_CD: NDArray[np.float32], wanted_N: NDArray[np.int64], purpose: Purpose
    ) -> NDArray[np.float64]:
        """Return the elements of some wanted rows: combinations of the model's own rows, one row after another."""
        tensor = self._tensor
        targets_ND = self._rows(tensor.donor, wanted_N, purpose)
        chosen_NK, weights_NK = pursued(atoms_CD, targets_ND, tensor.n_atoms)
        used, place_NK = np.unique(chosen_NK, return_inverse=True)
        own_UW = self._rows(tensor.own, tensor.own_C[used], purpose).astype(np.float64)
        pairs = zip(place_NK.reshape(chosen_NK.shape), weights_NK, strict=True)
        return np.concatenate([weight_K @ own_UW[place_K] for place_K, weight_K in pairs])


@dataclass(slots=True)
class _Pursuit:
    """The state of a pursuit of N targets after some of K steps; D is the width of a row.

    `basis_NKD` is the orthonormal basis of the atoms chosen so far, in float64. `triangle_NKK` writes each chosen atom
    in that basis, `weights_NK` the approximation; `left_ND` is what is left of the targets.
    """

    left_ND: NDArray[np.float64]
    basis_NKD: NDArray[np.float64]
    triangle_NKK: NDArray[np.float64]
    chosen_NK: NDArray[np.int64]
    weights_NK: NDArray[np.float64]

    @classmethod
    def of(cls, targets_ND: NDArray[np.float32], n_atoms: int) -> _Pursuit:
        """Begin with nothing chosen."""
        n_targets, width = targets_ND.shape
        return cls(
            left_ND=targets_ND.astype(np.float64),
            basis_NKD=np.zeros((n_targets, n_atoms, width)),
            triangle_NKK=np.tile(np.eye(n_atoms), (n_targets, 1, 1)),
            chosen_NK=np.zeros((n_targets, n_atoms), np.int64),
            weights_NK=np.zeros((n_targets, n_atoms)),
        )

    def choose(self, k: int, atoms_CD: NDArray[np.float32]) -> None:
        """Choose as atom k the one with the largest inner product with what is left, and subtract its part."""
        products_NC = np.abs(self.left_ND.astype(np.float32) @ atoms_CD.T)
        np.put_along_axis(products_NC, self.chosen_NK[:, :k], -1, axis=1)
        self.chosen_NK[:, k] = products_NC.argmax(axis=1)
        self._extend_basis(k, atoms_CD[self.chosen_NK[:, k]].astype(np.float64))
        self.weights_NK[:, k] = np.einsum("nd,nd->n", self.basis_NKD[:, k], self.left_ND)
        self.left_ND -= self.weights_NK[:, k, None] * self.basis_NKD[:, k]

    def _extend_basis(self, k: int, atom_ND: NDArray[np.float64]) -> None:
        """Add atoms to the basis (Gram-Schmidt); one that adds nothing to those before it gets a zero vector."""
        size_N = np.linalg.norm(atom_ND, axis=1)
        along_NK = np.zeros((len(atom_ND), k))
        for _ in range(2):  # twice is enough for orthogonality
            part_NK = np.einsum("nkd,nd->nk", self.basis_NKD[:, :k], atom_ND)
            atom_ND -= np.einsum("nk,nkd->nd", part_NK, self.basis_NKD[:, :k])
            along_NK += part_NK
        rest_N = np.linalg.norm(atom_ND, axis=1)
        is_new_N = rest_N > 1e-6 * size_N
        divisor_N = np.where(is_new_N, rest_N, 1)
        self.basis_NKD[:, k] = np.where(is_new_N[:, None], atom_ND / divisor_N[:, None], 0)
        self.triangle_NKK[:, :k, k] = np.where(is_new_N[:, None], along_NK, 0)
        self.triangle_NKK[:, k, k] = divisor_N


def pursued(
    atoms_CD: NDArray[np.float32], targets_ND: NDArray[np.float32], n_atoms: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Approximate targets by `n_atoms` atoms each, or all: return the atoms' numbers and their weights, (N, K) both.

    An atom that adds nothing to those before it weighs 0. The chosen atoms' orthonormal basis is kept in float64.
    """
    n_atoms = min(n_atoms, len(atoms_CD))
    pursuit = _Pursuit.of(targets_ND, n_atoms)
    for k in range(n_atoms):
        pursuit.choose(k, atoms_CD)
    weights_NK = np.linalg.solve(pursuit.triangle_NKK, pursuit.weights_NK[:, :, None])[:, :, 0].astype(np.float64)
    return pursuit.chosen_NK, weights_NK
