"""Score blocks by the energy that they contribute to the merge, after the operator's sparsification."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.statistics import N_OCTAVES, OCTAVE_SHARES
from mergepipe.planning.candidates.block_columns import ABSENT, Columns
from mergepipe.planning.candidates.known_statistics import KnownStatistics
from mergepipe.planning.candidates.level_ladders import NO_LADDERS, Ladders
from mergepipe.planning.candidates.operator_rules import UNKNOWN, Rules


def score_blocks(
    columns: Columns, known_statistics: KnownStatistics, rules: Rules, ladders: Ladders = NO_LADDERS
) -> NDArray[np.float64]:
    """Compute `score_EB`: squared coefficient times the energy of the delta that the operator keeps.

    The energy is `||delta||^2`, times the share above the tensor's cut for operators that trim, times the expected
    share left by random dropping and rescaling; of what can be read in part it is on record. Where nothing is known it
    is `n` times the typical energy of an element: the median over all known blocks that differ from the base, 1 if
    there are none; and every expert counts by the mean of the squared coefficients.
    """
    passing_EB = np.square(known_statistics.usable_norm_EB)
    for e in range(len(passing_EB)):
        passing_EB[e] *= rules.energy_factor_ET[e][columns.tensor_B]
        if rules.trims:
            passing_EB[e] *= _surviving_share(e, columns, known_statistics, rules)
    for (e, t), ladder in ladders.items():
        factor = rules.energy_factor_ET[e, t]
        passing_EB[e, columns.of_tensor(t)] = np.where(
            known_statistics.free_EB[e, columns.of_tensor(t)], 0.0, ladder.unread_B * factor
        )
    n_experts_T = np.maximum(1, (columns.slot_ET != ABSENT).sum(axis=0))
    even_T = np.square(rules.coefficient_ET).sum(axis=0) / n_experts_T
    typical = _typical_energy(passing_EB, columns, known_statistics)
    for e in range(len(passing_EB)):
        unknown_B = ~known_statistics.informed_ET[e][columns.tensor_B]
        passing_EB[e, unknown_B] = columns.n_B[unknown_B] * typical
        square_T = np.square(rules.coefficient_ET[e])
        factor_T = np.where(known_statistics.informed_ET[e] | (square_T == 0), square_T, even_T)
        passing_EB[e] *= factor_T[columns.tensor_B]
    return passing_EB


def _surviving_share(e: int, columns: Columns, known_statistics: KnownStatistics, rules: Rules) -> NDArray[np.float64]:
    """Estimate the share of each block's energy at or above its tensor's cut, from energies by octave of magnitude.

    Inside the octave that holds the cut, energy is taken to be spread evenly over the logarithm of magnitude: the
    share above the cut at `x` of the octave's upper end is `-log2 x`, here `(1 - x) (1 + 1 / 2x)`, which is within 0.01
    of it and the same on every machine.
    """
    bits_T = rules.cut_bits_ET[e]
    cut_T = np.where(bits_T == UNKNOWN, 0, bits_T).astype(np.uint32).view(np.float32)
    cut_T = np.where(np.isnan(cut_T), np.float32(np.inf), cut_T)
    position_B = octave_position(known_statistics.largest_EB[e], cut_T[columns.tensor_B])
    above_B, total_B = np.zeros_like(position_B), np.zeros_like(position_B)
    for octave in range(N_OCTAVES):
        share_B = OCTAVE_SHARES[known_statistics.octaves_EOB[e, octave]]
        total_B += share_B
        above_B += share_B * np.clip(position_B - np.float32(octave), np.float32(0), np.float32(1))
    return np.divide(above_B, total_B, out=np.zeros_like(total_B), where=total_B > 0).astype(np.float64)


def octave_position(largest_B: NDArray[np.float32], cut_B: NDArray[np.float32]) -> NDArray[np.float32]:
    """Count the octaves between `cut` and `largest`; the octave of the cut counts by its share of energy."""
    ratio_B = np.full_like(largest_B, np.inf)
    np.divide(largest_B, cut_B, out=ratio_B, where=(cut_B > 0) & np.isfinite(largest_B))
    mantissa_B, exponent_B = np.frexp(np.where(np.isfinite(ratio_B) & (ratio_B >= 1), ratio_B, np.float32(1)))
    octave_B = np.clip(exponent_B - 1, 0, N_OCTAVES - 1)
    in_last_B = octave_B == N_OCTAVES - 1
    cut_in_octave_B = np.ldexp(np.float32(0.5) / mantissa_B, np.minimum(octave_B - (exponent_B - 1), 0)).astype(
        np.float32
    )
    above_B = np.float32(1) - cut_in_octave_B
    above_B = np.where(in_last_B, above_B, above_B * (np.float32(1) + np.float32(0.5) / cut_in_octave_B))
    position_B = np.where(ratio_B < 1, np.float32(0), octave_B.astype(np.float32) + above_B)
    return np.where(np.isposinf(ratio_B), np.float32(N_OCTAVES), position_B).astype(np.float32)


def _typical_energy(passing_EB: NDArray[np.float64], columns: Columns, known_statistics: KnownStatistics) -> float:
    if known_statistics.informed_ET.all():
        return 1.0  # not used
    counts_EB = known_statistics.informed_ET[:, columns.tensor_B] & ~known_statistics.free_EB
    energies = (passing_EB / columns.n_B)[counts_EB]
    return float(np.median(energies)) if len(energies) else 1.0


def amplitudes(score_EB: NDArray[np.float64], columns: Columns, rules: Rules) -> NDArray[np.float64]:
    """Compute the square roots of the scores, with the signs of the coefficients."""
    signs_ET = np.where(rules.coefficient_ET < 0, -1.0, 1.0)
    return np.sqrt(score_EB) * signs_ET[:, columns.tensor_B]
