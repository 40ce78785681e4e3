"""Rules that sparsify each delta before combining: ties, dare_linear, dare_ties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import MagnitudeCut, OperatorInput, Reduced, ReductionRequest
from mergepipe.operators.catalogue import OPERATORS
from mergepipe.operators.elementwise import ElementwiseRule, Keep
from mergepipe.operators.linear import fixed_coefficients
from mergepipe.operators.spec import OperatorSpec
from mergepipe.statistics import rank_of_density


def densities_E(given: OperatorInput) -> NDArray[np.float64]:
    """The experts' densities."""
    return np.array([float(p["density"]) for p in given.experts], np.float64)


@dataclass(frozen=True, slots=True)
class Ties:
    """Trim to the top `density` share by magnitude, elect the sign of `sum_i w_i delta_i`, merge what agrees.

    Source: Yadav et al. 2023 (arXiv 2306.01708), Algorithm 1. `floor(density * n)` elements are the target; all
    elements equal to the last one kept are kept too. A zero vote counts as positive.
    """

    spec: OperatorSpec = OPERATORS["ties"]
    is_random: bool = False

    def reduction(self, given: OperatorInput) -> ReductionRequest | None:
        kept_E = tuple(rank_of_density(float(p["density"]), given.n_elements) for p in given.experts)
        return None if all(kept == given.n_elements for kept in kept_E) else MagnitudeCut(kept_E)

    def block_function(self, given: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return _consensus(given, keep=Keep.LARGE, threshold_bits_E=reduced.threshold_bits_E)


@dataclass(frozen=True, slots=True)
class DareLinear:
    """Drop each element with probability `1 - density`, rescale the survivors, then `M_0 + lambda sum_i w_i delta_i`.

    Source: Yu et al. 2023 (arXiv 2311.03099), Eq. 2-4.
    """

    spec: OperatorSpec = OPERATORS["dare_linear"]
    is_random: bool = True

    def reduction(self, given: OperatorInput) -> ReductionRequest | None:
        return None

    def block_function(self, given: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        cuts_E, scales_E = _drop_and_rescale(given)
        return ElementwiseRule(
            coefficients_E=fixed_coefficients(given),
            keep=Keep.RANDOM,
            stream_keys_E=np.array(given.stream_keys, np.uint64),
            cuts_E=cuts_E,
            scales_E=scales_E,
        )


@dataclass(frozen=True, slots=True)
class DareTies:
    """Drop and rescale as DARE, then elect signs and merge as TIES.

    Source: Yu et al. 2023 (arXiv 2311.03099) with the consensus of Yadav et al. 2023 (arXiv 2306.01708).
    """

    spec: OperatorSpec = OPERATORS["dare_ties"]
    is_random: bool = True

    def reduction(self, given: OperatorInput) -> ReductionRequest | None:
        return None

    def block_function(self, given: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        cuts_E, scales_E = _drop_and_rescale(given)
        return _consensus(
            given,
            keep=Keep.RANDOM,
            stream_keys_E=np.array(given.stream_keys, np.uint64),
            cuts_E=cuts_E,
            scales_E=scales_E,
        )


def _drop_and_rescale(given: OperatorInput) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    density_E = densities_E(given)
    cuts_E = np.rint(density_E * 2.0**32).astype(np.uint64)
    scales_E = 1.0 / density_E if given.globals["rescale"] else np.ones_like(density_E)
    return cuts_E, scales_E.astype(np.float32)


def _consensus(
    given: OperatorInput,
    *,
    keep: Keep,
    threshold_bits_E: NDArray[np.uint32] | None = None,
    stream_keys_E: NDArray[np.uint64] | None = None,
    cuts_E: NDArray[np.uint64] | None = None,
    scales_E: NDArray[np.float32] | None = None,
) -> ElementwiseRule:
    return ElementwiseRule(
        coefficients_E=given.weights_E().astype(np.float32),
        keep=keep,
        threshold_bits_E=threshold_bits_E,
        stream_keys_E=stream_keys_E,
        cuts_E=cuts_E,
        scales_E=scales_E,
        consensus=True,
        normalize=bool(given.globals["normalize"]),
        delta_scale=float(given.globals["lambda"]),
    )
