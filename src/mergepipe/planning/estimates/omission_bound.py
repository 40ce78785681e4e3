"""Bound the error of omission, for operators with fixed or renormalised coefficients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.planning.candidates.block_columns import Columns
from mergepipe.planning.candidates.known_statistics import KnownStatistics
from mergepipe.planning.candidates.operator_rules import Rules
from mergepipe.planning.choices import OnOmit
from mergepipe.planning.plan import OmissionBound

SAFETY = 1e-6  # of the sum itself; the norms are upper bounds already
_RELATIVE_DIGITS = 4


@dataclass(frozen=True, slots=True)
class NoBound:
    """The reason why there is no bound."""

    reason: str


def omission_bound(
    columns: Columns,
    known_statistics: KnownStatistics,
    rules: Rules,
    present_EB: NDArray[np.bool_],
    left_EB: NDArray[np.float64],
    on_omit: OnOmit,
    cosine_TEE: NDArray[np.float64],
) -> OmissionBound | NoBound:
    """`[sum_b (sum_i |alpha_i - alpha'_i| ||delta_i,b||)^2]^(1/2)`, `alpha'` being the coefficients under the plan.

    `left_EB` is the norm of what reading in part leaves of a delta that is present: it counts by `alpha'`.
    `present_EB` tells which deltas are known to the merge: read, served or free. With `OnOmit.KEEP`, `alpha'` is
    `alpha` where the delta is present and 0 where it is omitted: the bound of DESIGN.md 5. With `OnOmit.RENORMALIZE` it
    is `w_i / (w_anchor + sum of the present w)` where present: since `M_A = M_0 + sum_i alpha'_i delta_i` in either
    case, `M_full - M_A = sum_i (alpha_i - alpha'_i) delta_i`, and the triangle inequality gives the bound per block.
    """
    total_B = np.zeros(columns.n_columns)
    unknown = 0
    divisor_B = present_weight(columns, rules, present_EB) if on_omit is OnOmit.RENORMALIZE else None
    for e in range(len(present_EB)):
        drift_B = _drift(e, columns, rules, present_EB[e], divisor_B)
        unknown += int(np.count_nonzero((drift_B != 0) & ~known_statistics.exact_ET[e][columns.tensor_B]))
        kept_B = np.abs(rules.coefficient_ET[e][columns.tensor_B]) + drift_B
        total_B += np.multiply(kept_B, left_EB[e], out=np.zeros_like(total_B), where=left_EB[e] != 0)
        total_B += np.multiply(drift_B, known_statistics.norm_EB[e], out=np.zeros_like(total_B), where=drift_B != 0)
    if unknown:
        return NoBound(f"the norms of {unknown} omitted blocks are not known, or only estimated")
    absolute = math.sqrt(math.fsum(np.square(total_B).tolist())) * (1 + SAFETY)
    if not math.isfinite(absolute):
        return NoBound("an omitted delta is not finite")
    return OmissionBound(absolute, _relative(absolute, columns, known_statistics, rules, cosine_TEE))


def present_weight(columns: Columns, rules: Rules, present_EB: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Compute `w_anchor + sum of the present w` per block, 1 where that is zero."""
    anchor_T = np.array([0.0 if average is None else average.anchor_weight for average in rules.average_T])
    weight_TE = np.array([[] if average is None else average.weights_E for average in rules.average_T])
    sum_B = anchor_T[columns.tensor_B]
    for e in range(len(present_EB)):
        sum_B += np.where(present_EB[e], weight_TE[columns.tensor_B, e], 0.0)
    return np.where(sum_B == 0, 1.0, sum_B)


def _drift(
    e: int, columns: Columns, rules: Rules, present_B: NDArray[np.bool_], divisor_B: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Compute `|alpha_e - alpha'_e|` per block."""
    full_B = rules.coefficient_ET[e][columns.tensor_B]
    if divisor_B is None:
        return np.where(present_B, 0.0, np.abs(full_B))
    weight_T = np.array([0.0 if average is None else average.weights_E[e] for average in rules.average_T])
    planned_B = (weight_T[columns.tensor_B] / divisor_B).astype(np.float32).astype(np.float64)
    return np.asarray(np.abs(full_B - np.where(present_B, planned_B, 0.0)))


def _relative(
    absolute: float, columns: Columns, known_statistics: KnownStatistics, rules: Rules, cosine_TEE: NDArray[np.float64]
) -> float | None:
    """Divide `absolute` by an estimate of ||M_full - M_0|| from block norms and sketched cosines.

    `||M_full - M_0||^2 ~ sum_b sum_ij alpha_i alpha_j ||delta_i,b|| ||delta_j,b|| c_ij`, with `c_ii = 1`.
    """
    if not known_statistics.exact_ET[:, columns.tensor_B].all() or bool((rules.anchor_scale_T != 1).any()):
        return None
    square = 0.0
    for t in range(len(columns.tasks)):
        signed_EB = rules.coefficient_ET[:, t, None] * known_statistics.norm_EB[:, columns.of_tensor(t)]
        cosine_EE = cosine_TEE[t].copy()
        np.fill_diagonal(cosine_EE, 1.0)
        square += float((cosine_EE * (signed_EB @ signed_EB.T)).sum())
    if not (math.isfinite(square) and square > 0):
        return None
    return float(f"{absolute / math.sqrt(square):.{_RELATIVE_DIGITS}g}")
