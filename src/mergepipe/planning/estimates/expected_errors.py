"""Expected errors of selections: what they leave out of each tensor, with sign elections and without."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.checkpoints.contract import as_leveled
from mergepipe.operators.influence import Election
from mergepipe.planning.candidates.block_columns import Columns
from mergepipe.planning.candidates.items import Candidates
from mergepipe.planning.candidates.operator_rules import Rules
from mergepipe.planning.choices import OnOmit
from mergepipe.planning.estimates.energy_left import energies_by_tensor, energy_left_of_tensor
from mergepipe.planning.estimates.sign_elections import AccessPatterns, ElectionExperts, lost_and_total_energies
from mergepipe.planning.selection.select import Selection

_MOST_PATTERNS = 16  # as four experts have; of more in one tensor some are sampled
_SAMPLED_PATTERNS = 8
_DIGITS = 4  # so that plans do not depend on the last bits of a sum


def expected_energies(
    candidates: Candidates,
    selections: Iterable[Selection],
    score_EB: NDArray[np.float64],
    rules: Rules,
    on_omit: OnOmit = OnOmit.KEEP,
) -> NDArray[np.float64]:
    """Estimate `energy_SET2` by selection, expert, tensor: (energy lost, total), as if deltas were uncorrelated."""
    if rules.elects:
        return election_energies(candidates, selections, score_EB, rules)
    weighed_by = rules if on_omit is OnOmit.RENORMALIZE else None
    return np.stack([energies_by_tensor(candidates, selection, score_EB, weighed_by) for selection in selections])


def expected_error(energy_ET2: NDArray[np.float64]) -> float:
    """Compute the error relative to what the full merge changes."""
    lost, whole = energy_ET2.sum(axis=(0, 1))
    return float(np.sqrt(lost / whole)) if whole > 0 else 0.0


def election_energies(
    candidates: Candidates, selections: Iterable[Selection], score_EB: NDArray[np.float64], rules: Rules
) -> NDArray[np.float64]:
    """Estimate `energy_SET2` by selection of tensors with sign elections: (loss, total), split over experts.

    Zero for tensors without an election (`rules.elections_T`). Selections that agree in a tensor are estimated once,
    those that differ together. Of each selection one byte a block is held.
    """
    forms_EB = [_forms(candidates, selection) for selection in selections]
    energy_SET2 = np.zeros((len(forms_EB), candidates.n_experts, len(candidates.columns.tasks), 2))
    for t, election in enumerate(rules.elections_T):
        inside = candidates.columns.of_tensor(t)
        if election is None or inside.start == inside.stop:
            continue
        tensor = _election_tensor(candidates, score_EB, rules, t, election)
        accesses: dict[bytes, _Access] = {}
        form_by_selection = [form_EB[:, inside].tobytes() for form_EB in forms_EB]
        for form, form_EB in zip(form_by_selection, forms_EB, strict=True):
            if form not in accesses:
                left_EB = energy_left_of_tensor(candidates, form_EB[:, inside], score_EB, t)
                accesses[form] = _access(tensor, form_EB[:, inside], left_EB)
        energies = dict(zip(accesses, _energies(tensor, list(accesses.values())), strict=True))
        for s, form in enumerate(form_by_selection):
            energy_SET2[s, :, t] = energies[form]
    return energy_SET2


@dataclass(frozen=True, slots=True, eq=False)
class _ElectionTensor:
    """The experts of a tensor's election, and by block (B) the elements, scores, and energies of kept elements.

    Scores and energies are 0 of blocks that equal the base; energies are scores without the coefficients.
    """

    experts: ElectionExperts
    scale: float
    n_B: NDArray[np.int64]
    score_EB: NDArray[np.float64]
    energy_EB: NDArray[np.float64]
    square_E1: NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class _Access:
    """The access patterns of a tensor, the elements that they stand for, and the scores left out by expert."""

    patterns: AccessPatterns
    n_P: NDArray[np.float64]
    left_E: NDArray[np.float64]


def _election_tensor(
    candidates: Candidates, score_EB: NDArray[np.float64], rules: Rules, t: int, election: Election
) -> _ElectionTensor:
    columns = candidates.columns
    inside = columns.of_tensor(t)
    share_E = columns.by_expert(t, election.share_E, 0.0)
    tail_E = np.maximum(columns.by_expert(t, election.tail_E, 1.0), share_E)
    weight_E = columns.by_expert(t, election.weight_E, 0.0)
    square_E1 = np.square(rules.coefficient_ET[:, t])[:, None]
    own_EB = np.where(candidates.free_EB[:, inside], 0.0, score_EB[:, inside])
    return _ElectionTensor(
        ElectionExperts(weight_E, share_E, tail_E, election.normalize),
        election.scale,
        columns.n_B[inside],
        own_EB,
        _without_coefficients(own_EB, square_E1),
        square_E1,
    )


def _without_coefficients(score_EB: NDArray[np.float64], square_E1: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(np.divide(score_EB, square_E1, out=np.zeros_like(score_EB), where=square_E1 > 0))


def _forms(candidates: Candidates, selection: Selection) -> NDArray[np.int8]:
    """Return how each block is had: its level, 0 if not at all, -1 served, -2 equal to the base."""
    form_EB = np.where(selection.served_EB, np.int8(-1), selection.level_EB)
    form_EB[candidates.free_EB] = -2
    return form_EB


def _access(tensor: _ElectionTensor, form_EB: NDArray[np.int8], left_EB: NDArray[np.float64]) -> _Access:
    """Group the blocks of a tensor by access pattern, and compute energies per element of those that are sampled."""
    bytes_BE = np.ascontiguousarray((form_EB.view(np.uint8) + np.uint8(3)).T)  # no zeros, which would end strings
    keys_B = bytes_BE.view(f"S{len(form_EB)}")[:, 0]
    _, first_P, pattern_B = np.unique(keys_B, return_index=True, return_inverse=True)
    noise_EB = _without_coefficients(left_EB, tensor.square_E1)
    chosen = _representatives(pattern_B, tensor.energy_EB.sum(axis=0), noise_EB.sum(axis=0))
    chosen_P = np.array([pattern for pattern, _ in chosen], np.int64)
    order_B = np.argsort(pattern_B, kind="stable")
    starts_P = np.searchsorted(pattern_B[order_B], np.arange(len(first_P)))
    n_P, energy_EP, noise_EP = (
        np.add.reduceat(values_B[..., order_B], starts_P, axis=-1)[..., chosen_P]
        for values_B in (tensor.n_B, tensor.energy_EB, noise_EB)
    )
    is_read_PE = form_EB[:, first_P[chosen_P]].T != 0
    noise_PE = np.where(is_read_PE, (noise_EP / n_P).T, 0.0)
    patterns = AccessPatterns((energy_EP / n_P).T, noise_PE, is_read_PE)
    return _Access(patterns, n_P * np.array([factor for _, factor in chosen]), left_EB.sum(axis=1))


def _energies(tensor: _ElectionTensor, accesses: Sequence[_Access]) -> NDArray[np.float64]:
    """Estimate `energy_AE2` of a tensor by access (A) and expert: (loss, total)."""
    patterns = AccessPatterns(
        np.concatenate([access.patterns.energy_PE for access in accesses]),
        np.concatenate([access.patterns.noise_PE for access in accesses]),
        np.concatenate([access.patterns.is_read_PE for access in accesses]),
    )
    n_P = np.concatenate([access.n_P for access in accesses]) * tensor.scale**2
    starts_A = np.cumsum([0, *(len(access.n_P) for access in accesses[:-1])])
    lost_P, whole_P = lost_and_total_energies(tensor.experts, patterns)
    lost_A, whole_A = (np.add.reduceat(values_P * n_P, starts_A) for values_P in (lost_P, whole_P))
    score_E = tensor.score_EB.sum(axis=1)
    energy_AE2 = np.zeros((len(accesses), len(score_E), 2))
    for a, access in enumerate(accesses):
        energy_AE2[a, :, 0] = _distributed(float(lost_A[a]), access.left_E)
        energy_AE2[a, :, 1] = _distributed(float(whole_A[a]), score_E)
    return energy_AE2


def _distributed(total: float, part_E: NDArray[np.float64]) -> NDArray[np.float64]:
    whole = part_E.sum()
    rounded = float(f"{total:.{_DIGITS}g}")
    return rounded * part_E / whole if whole > 0 else np.zeros_like(part_E)


def _representatives(
    pattern_B: NDArray[np.int64], energy_B: NDArray[np.float64], left_B: NDArray[np.float64]
) -> list[tuple[int, float]]:
    """Choose the patterns of a tensor that are sampled, and by what each counts more: all, or some of very many.

    Of many, those of which about the same share is left out are represented by the middle one, by their energies.
    """
    n_patterns = int(pattern_B.max(initial=-1)) + 1
    if n_patterns <= _MOST_PATTERNS:
        return [(pattern, 1.0) for pattern in range(n_patterns)]
    energy_P, left_P = (np.bincount(pattern_B, values_B, n_patterns) for values_B in (energy_B, left_B))
    share_P = np.divide(left_P, energy_P, out=np.zeros(n_patterns), where=energy_P > 0)
    is_partial_P = share_P > 0
    order_P = np.argsort(share_P, kind="stable")
    complete_P, partial_P = order_P[~is_partial_P[order_P]], order_P[is_partial_P[order_P]]
    reached_P = np.cumsum(energy_P[partial_P])
    cuts = np.searchsorted(reached_P, energy_P[partial_P].sum() * np.arange(1, _SAMPLED_PATTERNS) / _SAMPLED_PATTERNS)
    runs = [run for run in (complete_P, *np.split(partial_P, np.unique(cuts))) if energy_P[run].any()]
    middles = [int(run[np.searchsorted(np.cumsum(energy_P[run]), energy_P[run].sum() / 2)]) for run in runs]
    return [(middle, float(energy_P[run].sum() / energy_P[middle])) for run, middle in zip(runs, middles, strict=True)]


def is_error_complete(columns: Columns, rules: Rules) -> bool:
    """Whether the expected error covers everything that is lost.

    Not for other non-additive rules, nor where an expert is trimmed inside a band of its store: there levels differ in
    what is kept, which is not recorded.
    """
    if not rules.elects:
        return rules.is_additive
    for t, election in enumerate(rules.elections_T):
        share_E = columns.by_expert(t, election.tail_E, 1.0) if election is not None else np.ones(columns.n_experts)
        n_elements = columns.tasks[t].base.n_elements
        for e in columns.participants(t) if n_elements else ():
            leveled = as_leveled(columns.source(e, t)) if share_E[e] != 1 else None
            if leveled is not None and not leveled.ends_band(int(share_E[e] * n_elements)):
                return False
    return True
