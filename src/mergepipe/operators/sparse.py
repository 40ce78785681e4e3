"""Rules that sparsify each delta before combining: ties, dare_linear, dare_ties, breadcrumbs, breadcrumbs_ties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mergepipe.operators.base import (
    NOTHING_REDUCED,
    Influence,
    KeptMagnitudes,
    MagnitudeBand,
    MagnitudeCut,
    Operator,
    OperatorInput,
    Plain,
    Products,
    Reduced,
    ReductionRequest,
    RowSums,
)
from mergepipe.operators.elementwise import ElementwiseRule, Keep
from mergepipe.operators.linear import fixed_coefficients, nonzero_sum
from mergepipe.operators.spec import DENSITY, OperatorSpec, ParameterSpec, Scope, delta_spec, rescale_to_magnitudes
from mergepipe.operators.statistics import NOTHING_KEPT, rank_of_density

SMALLEST_SUM = 1e-7  # of magnitudes, to be divided by
_YADAV, _YU = "Yadav et al. 2023, arXiv 2306.01708", "Yu et al. 2023, arXiv 2311.03099"
_DAVARI = "Davari and Belilovsky 2023, arXiv 2312.06795"
_RESCALE_BY_DENSITY = ParameterSpec(
    "rescale", Scope.GLOBAL, "multiply surviving elements by 1/density", default=True, is_flag=True
)
_GAMMA = ParameterSpec(
    "gamma", Scope.MODEL, "share of the delta's largest elements that is dropped", default=0.01, low=0.0, high=1.0
)


def densities_E(inputs: OperatorInput) -> NDArray[np.float64]:
    """The experts' densities."""
    return np.array([float(p["density"]) for p in inputs.experts], np.float64)


@dataclass(frozen=True, slots=True)
class Ties(Plain):
    """Trim to the top `density` share by magnitude, elect the sign of `sum_i w_i delta_i`, merge what agrees.

    Source: Yadav et al. 2023 (arXiv 2306.01708), Algorithm 1. Exactly `floor(density * n)` elements are kept: of equal
    magnitudes those with the smallest hashes of their index. A zero vote counts as positive. `rescale` multiplies what
    is kept so that the sum of magnitudes stays, as mergekit does.
    """

    spec: ClassVar[OperatorSpec] = delta_spec(
        "ties",
        "trim, elect sign, disjoint merge",
        _YADAV,
        DENSITY,
        normalize=True,
        rescale=rescale_to_magnitudes(False),
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """Trimming is exact; of the consensus only the weights are kept, not which elements agree."""
        coefficients_E = consensus_coefficients(inputs)
        return Influence(coefficients_E, np.ones_like(coefficients_E), trims=True)

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        kept_E = tuple(rank_of_density(float(p["density"]), inputs.n_elements) for p in inputs.experts)
        if all(n_kept == inputs.n_elements for n_kept in kept_E):
            return None
        return MagnitudeCut(kept_E) if reduced.cuts_E3 is None else _sums_to_rescale(inputs, reduced)

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return consensus_rule(
            inputs,
            keep=Keep.LARGE,
            cuts_E3=reduced.cuts_E3,
            scales_E=scales_of_sums(inputs, reduced),
        )


class _Band(Plain):
    """The common part of both rules of breadcrumbs: the cuts above and below what is kept."""

    __slots__ = ()

    def reduction(self, inputs: OperatorInput, reduced: Reduced = NOTHING_REDUCED) -> ReductionRequest | None:
        ranks = [band_ranks(inputs.n_elements, float(p["density"]), float(p["gamma"])) for p in inputs.experts]
        if all(rank == (inputs.n_elements, 0) for rank in ranks):
            return None
        if reduced.cuts_E3 is None or reduced.upper_cuts_E3 is None:
            return MagnitudeBand(tuple(n_kept for n_kept, _ in ranks), tuple(n_dropped for _, n_dropped in ranks))
        return _sums_to_rescale(inputs, reduced)


def band_ranks(n_elements: int, density: float, gamma: float) -> tuple[int, int]:
    """Ranks by magnitude of the last element kept and of the last one dropped above; `gamma` gives way to `density`."""
    if density >= 1.0:
        return n_elements, 0
    target = rank_of_density(density, n_elements)
    dropped = min(rank_of_density(gamma, n_elements), n_elements - target)
    return dropped + target, dropped


@dataclass(frozen=True, slots=True)
class Breadcrumbs(_Band):
    """Drop the `gamma` share of largest elements, keep the next `density` share, then `M_0 + lambda sum_i w_i delta_i`.

    Source: Davari and Belilovsky 2023 (arXiv 2312.06795), section 3. Exactly as many elements are dropped and kept as
    the shares say; equal magnitudes are ordered as in TIES.
    """

    spec: ClassVar[OperatorSpec] = delta_spec(
        "breadcrumbs",
        "drop the largest and the smallest, then sum",
        _DAVARI,
        DENSITY,
        _GAMMA,
        normalize=False,
        rescale=rescale_to_magnitudes(False),
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        """Return an unknown influence: the band's share of a block does not follow from its octaves."""
        coefficients_E = fixed_coefficients(inputs).astype(np.float64)
        return Influence(coefficients_E, np.ones_like(coefficients_E))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return ElementwiseRule(
            fixed_coefficients(inputs),
            keep=Keep.ALL if reduced.upper_cuts_E3 is None else Keep.BAND,
            cuts_E3=reduced.cuts_E3,
            upper_cuts_E3=reduced.upper_cuts_E3,
            scales_E=scales_of_sums(inputs, reduced),
        )


@dataclass(frozen=True, slots=True)
class BreadcrumbsTies(_Band):
    """Drop as breadcrumbs, elect signs and merge as TIES."""

    spec: ClassVar[OperatorSpec] = delta_spec(
        "breadcrumbs_ties",
        "drop the largest and the smallest, elect sign, disjoint merge",
        f"{_DAVARI}; {_YADAV}",
        DENSITY,
        _GAMMA,
        normalize=False,
        rescale=rescale_to_magnitudes(False),
    )

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        coefficients_E = consensus_coefficients(inputs)
        return Influence(coefficients_E, np.ones_like(coefficients_E))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        return consensus_rule(
            inputs,
            keep=Keep.ALL if reduced.upper_cuts_E3 is None else Keep.BAND,
            cuts_E3=reduced.cuts_E3,
            upper_cuts_E3=reduced.upper_cuts_E3,
            scales_E=scales_of_sums(inputs, reduced),
        )


def _sums_to_rescale(inputs: OperatorInput, reduced: Reduced) -> ReductionRequest | None:
    """Sums of magnitudes before and after trimming, where they are wanted and not known."""
    if not inputs.globals["rescale"] or reduced.sums or reduced.cuts_E3 is None:
        return None
    upper_E3 = reduced.upper_cuts_E3
    if upper_E3 is None:
        upper_E3 = np.array([NOTHING_KEPT] * len(inputs.experts), np.uint32)
    return RowSums(KeptMagnitudes(reduced.cuts_E3, upper_E3), max(1, inputs.n_elements))


@np.errstate(all="ignore")
def scales_of_sums(inputs: OperatorInput, reduced: Reduced) -> NDArray[np.float32]:
    """Return the factors of each expert's kept elements that keep the sum of magnitudes; 1 where nothing is summed."""
    if not reduced.sums:
        return np.ones(len(inputs.experts), np.float32)
    before_E, after_E = reduced.sums[-1].sum(axis=0).reshape(-1, 2).T
    is_small_E = (before_E < SMALLEST_SUM) | (after_E < SMALLEST_SUM)
    ratio_E: NDArray[np.float64] = np.divide(before_E, after_E, out=np.ones_like(after_E), where=~is_small_E)
    return ratio_E.astype(np.float32)


@dataclass(frozen=True, slots=True)
class DareLinear(Plain):
    """Drop each element with probability `1 - density`, rescale the survivors, then `M_0 + lambda sum_i w_i delta_i`.

    Source: Yu et al. 2023 (arXiv 2311.03099), Eq. 2-4.
    """

    spec: ClassVar[OperatorSpec] = delta_spec(
        "dare_linear", "drop and rescale, then sum", _YU, DENSITY, normalize=False, rescale=_RESCALE_BY_DENSITY
    )
    is_random = True

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        return Influence(fixed_coefficients(inputs).astype(np.float64), dropped_energy(inputs))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        limits_E, scales_E = _drop_and_rescale(inputs)
        return ElementwiseRule(
            coefficients_E=fixed_coefficients(inputs),
            keep=Keep.RANDOM,
            stream_keys_E=np.array(inputs.stream_keys, np.uint64),
            limits_E=limits_E,
            scales_E=scales_E,
        )


@dataclass(frozen=True, slots=True)
class DareTies(Plain):
    """Drop and rescale as DARE, then elect signs and merge as TIES.

    Source: Yu et al. 2023 (arXiv 2311.03099) with the consensus of Yadav et al. 2023 (arXiv 2306.01708).
    """

    spec: ClassVar[OperatorSpec] = delta_spec(
        "dare_ties",
        "drop and rescale, elect sign, disjoint merge",
        f"{_YU}; {_YADAV}",
        DENSITY,
        normalize=False,
        rescale=_RESCALE_BY_DENSITY,
    )
    is_random = True

    def influence(self, inputs: OperatorInput, products_E3: Products | None) -> Influence:
        return Influence(consensus_coefficients(inputs), dropped_energy(inputs))

    def block_function(self, inputs: OperatorInput, reduced: Reduced) -> ElementwiseRule:
        limits_E, scales_E = _drop_and_rescale(inputs)
        return consensus_rule(
            inputs,
            keep=Keep.RANDOM,
            stream_keys_E=np.array(inputs.stream_keys, np.uint64),
            limits_E=limits_E,
            scales_E=scales_E,
        )


def _drop_and_rescale(inputs: OperatorInput) -> tuple[NDArray[np.uint64], NDArray[np.float32]]:
    density_E = densities_E(inputs)
    limits_E = np.rint(density_E * 2.0**32).astype(np.uint64)
    scales_E = _inverse(density_E) if inputs.globals["rescale"] else np.ones_like(density_E)
    return limits_E, scales_E.astype(np.float32)


def consensus_rule(
    inputs: OperatorInput,
    *,
    keep: Keep,
    cuts_E3: NDArray[np.uint32] | None = None,
    upper_cuts_E3: NDArray[np.uint32] | None = None,
    stream_keys_E: NDArray[np.uint64] | None = None,
    limits_E: NDArray[np.uint64] | None = None,
    scales_E: NDArray[np.float32] | None = None,
    marks_MB: NDArray[np.uint8] | None = None,
) -> ElementwiseRule:
    """Combine what is kept as TIES does: elect the sign of the weighted sum, merge what agrees."""
    return ElementwiseRule(
        coefficients_E=inputs.weights_E().astype(np.float32),
        keep=keep,
        cuts_E3=cuts_E3,
        upper_cuts_E3=upper_cuts_E3,
        stream_keys_E=stream_keys_E,
        limits_E=limits_E,
        scales_E=scales_E,
        marks_MB=marks_MB,
        consensus=True,
        normalize=bool(inputs.globals["normalize"]),
        delta_scale=float(inputs.globals["lambda"]),
    )


def consensus_coefficients(inputs: OperatorInput) -> NDArray[np.float64]:
    """The experts' weights as far as they are known before signs are elected."""
    weights_E = inputs.weights_E()
    divisor = nonzero_sum(np.abs(weights_E)) if inputs.globals["normalize"] else 1.0
    return weights_E * (float(inputs.globals["lambda"]) / divisor)


def dropped_energy(inputs: OperatorInput) -> NDArray[np.float64]:
    """`E ||scale * kept||^2 / ||delta||^2`: `density * (1 / density)^2` when rescaled, else `density`."""
    density_E = densities_E(inputs)
    return _inverse(density_E) if inputs.globals["rescale"] else density_E


def _inverse(density_E: NDArray[np.float64]) -> NDArray[np.float64]:
    """`1 / density`; 0 where nothing is kept."""
    inverse_E: NDArray[np.float64] = np.divide(1.0, density_E, out=np.zeros_like(density_E), where=density_E > 0.0)
    return inverse_E


OPERATORS: tuple[Operator, ...] = (Ties(), DareLinear(), DareTies(), Breadcrumbs(), BreadcrumbsTies())
