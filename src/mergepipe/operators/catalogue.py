"""The list of operators a recipe can name. Importing it loads no compiled code."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mergepipe.operators.spec import BaseRole, OperatorSpec, ParameterSpec, Scope

_WEIGHT = ParameterSpec("weight", Scope.MODEL, "coefficient of this model", required=True)
_DENSITY = ParameterSpec(
    "density", Scope.MODEL, "share of the delta's elements that is kept", default=1.0, low=0.0, high=1.0, low_open=True
)
_LAMBDA = ParameterSpec("lambda", Scope.GLOBAL, "scale of the merged delta", default=1.0)
_INT8_MASK = ParameterSpec(
    "int8_mask", Scope.GLOBAL, "mask storage in mergekit; no effect here", default=False, is_flag=True, ignored=True
)


def _normalize(default: bool) -> ParameterSpec:
    return ParameterSpec("normalize", Scope.GLOBAL, "divide by the sum of weights", default=default, is_flag=True)


def _delta_rule(
    name: str,
    title: str,
    source: str,
    *special: ParameterSpec,
    normalize: bool,
    rescale: ParameterSpec,
    conflict: Callable[[Mapping[str, float | bool]], str] | None = None,
) -> OperatorSpec:
    """A rule that sparsifies deltas, weights and adds them, with the parameters that all of those share."""
    shared = (_normalize(normalize), rescale, _LAMBDA, _INT8_MASK)
    return OperatorSpec(name, title, source, BaseRole.REQUIRED, (_WEIGHT, *special, *shared), conflict=conflict)


def spread_conflict(model: Mapping[str, float | bool]) -> str:
    """Whether elements of one model survive with probabilities outside of (0, 1); at density 1 all survive."""
    if not {"density", "epsilon"} <= model.keys():
        return ""
    density, epsilon = float(model["density"]), float(model["epsilon"])
    low, high = density - epsilon, density + epsilon
    if density == 1.0 or (low > 0.0 and high < 1.0):
        return ""
    return f"density {density:g} with epsilon {epsilon:g} gives probabilities from {low:g} to {high:g}, outside (0, 1)"


def _rescale(default: bool, what: str) -> ParameterSpec:
    return ParameterSpec("rescale", Scope.GLOBAL, what, default=default, is_flag=True)


_L1 = "multiply what is kept so that the sum of magnitudes stays"
_BY_DENSITY = "multiply surviving elements by 1/density"
_NO_RESCALE = ParameterSpec(
    "rescale", Scope.GLOBAL, "nothing is trimmed; no effect", default=False, is_flag=True, ignored=True
)
_GAMMA = ParameterSpec(
    "gamma", Scope.MODEL, "share of the delta's largest elements that is dropped", default=0.01, low=0.0, high=1.0
)
_SPREAD = ParameterSpec(
    "epsilon",
    Scope.MODEL,
    "the smallest element of a row survives with density - epsilon, the largest with density + epsilon",
    default=0.15,
    low=0.0,
    high=0.5,
)
_CHANGED = ParameterSpec("epsilon", Scope.GLOBAL, "a larger |delta| counts as a change", default=1e-5, low=0.0)
_T = ParameterSpec("t", Scope.GLOBAL, "0 is the base, 1 the other model", required=True, low=0.0, high=1.0)

_ILHARCO, _YADAV = "Ilharco et al. 2022, arXiv 2212.04089", "Yadav et al. 2023, arXiv 2306.01708"
_YU, _DAVARI = "Yu et al. 2023, arXiv 2311.03099", "Davari and Belilovsky 2023, arXiv 2312.06795"
_DEEP, _RAM = "Deep et al. 2024, arXiv 2406.11617", "arXiv 2601.13572"

_DELTA_RULES = (
    _delta_rule("task_arithmetic", "sum of task vectors", _ILHARCO, normalize=False, rescale=_NO_RESCALE),
    _delta_rule(
        "ties", "trim, elect sign, disjoint merge", _YADAV, _DENSITY, normalize=True, rescale=_rescale(False, _L1)
    ),
    _delta_rule(
        "dare_linear", "drop and rescale, then sum", _YU, _DENSITY, normalize=False, rescale=_rescale(True, _BY_DENSITY)
    ),
    _delta_rule(
        "dare_ties",
        "drop and rescale, elect sign, disjoint merge",
        f"{_YU}; {_YADAV}",
        _DENSITY,
        normalize=False,
        rescale=_rescale(True, _BY_DENSITY),
    ),
    _delta_rule(
        "breadcrumbs",
        "drop the largest and the smallest, then sum",
        _DAVARI,
        _DENSITY,
        _GAMMA,
        normalize=False,
        rescale=_rescale(False, _L1),
    ),
    _delta_rule(
        "breadcrumbs_ties",
        "drop the largest and the smallest, elect sign, disjoint merge",
        f"{_DAVARI}; {_YADAV}",
        _DENSITY,
        _GAMMA,
        normalize=False,
        rescale=_rescale(False, _L1),
    ),
    _delta_rule(
        "della",
        "drop by rank in the row, elect sign, disjoint merge",
        _DEEP,
        _DENSITY,
        _SPREAD,
        normalize=True,
        rescale=_rescale(True, _L1),
        conflict=spread_conflict,
    ),
    _delta_rule(
        "della_linear",
        "drop by rank in the row, then sum",
        _DEEP,
        _DENSITY,
        _SPREAD,
        normalize=False,
        rescale=_rescale(True, _L1),
        conflict=spread_conflict,
    ),
)

_SPHERICAL_RULES = (
    OperatorSpec(
        "slerp",
        "spherical interpolation of two models",
        "Shoemake 1985; mergekit's documented parameters",
        BaseRole.REQUIRED,
        (_T,),
        max_experts=1,
    ),
    OperatorSpec(
        "nuslerp",
        "spherical interpolation of two models, or of their deltas",
        "Shoemake 1985; mergekit's documented parameters",
        BaseRole.ORIGIN,
        (
            _WEIGHT,
            ParameterSpec(
                "nuslerp_row_wise",
                Scope.GLOBAL,
                "with flatten off: along the first dimension, not the last",
                default=False,
                is_flag=True,
            ),
            ParameterSpec(
                "nuslerp_flatten", Scope.GLOBAL, "the whole tensor is one vector", default=True, is_flag=True
            ),
        ),
        min_experts=2,
        max_experts=2,
    ),
    OperatorSpec(
        "multislerp",
        "barycentric interpolation on a hypersphere",
        "Goddard, goddard.blog/posts/multislerp-wow-what-a-cool-idea",
        BaseRole.ORIGIN,
        (
            _WEIGHT,
            ParameterSpec(
                "normalize_weights", Scope.GLOBAL, "divide the weights by their sum", default=True, is_flag=True
            ),
            ParameterSpec("eps", Scope.GLOBAL, "smallest length that is told from zero", default=1e-8, low=0.0),
        ),
    ),
    OperatorSpec(
        "karcher",
        "mean of directions on a hypersphere, all models alike",
        "arXiv 2603.04972",
        BaseRole.OPTIONAL,
        (
            ParameterSpec(
                "max_iter", Scope.GLOBAL, "most steps towards the mean", default=10.0, low=0.0, is_whole=True
            ),
            ParameterSpec("tol", Scope.GLOBAL, "a shorter step ends the search", default=1e-5, low=0.0),
        ),
        min_experts=0,
    ),
    OperatorSpec(
        "model_stock",
        "average of the models, drawn to the base by the angle between their deltas",
        "Jang et al. 2024, arXiv 2403.19522",
        BaseRole.REQUIRED,
        (ParameterSpec("filter_wise", Scope.GLOBAL, "angles row by row", default=False, is_flag=True),),
        min_experts=2,
    ),
)

_SELECTING_RULES = (
    OperatorSpec(
        "sce",
        "select by variance, weigh by energy, erase minority signs",
        "Wan et al. 2024, arXiv 2408.07990",
        BaseRole.REQUIRED,
        (
            ParameterSpec(
                "select_topk",
                Scope.GLOBAL,
                "share of the elements with any variance that is kept",
                default=1.0,
                low=0.0,
                high=1.0,
            ),
            _INT8_MASK,
        ),
    ),
    OperatorSpec("ram", "average what several change, keep what one changes", _RAM, BaseRole.REQUIRED, (_CHANGED,)),
    OperatorSpec(
        "ramplus_tl",
        "as ram, with what one model changes amplified tensor by tensor",
        _RAM,
        BaseRole.REQUIRED,
        (
            ParameterSpec("r", Scope.GLOBAL, "strength of the amplification", default=0.1),
            ParameterSpec("alpha", Scope.GLOBAL, "largest ratio of shared to own changes", default=0.2, low=0.0),
            _CHANGED,
        ),
    ),
    OperatorSpec(
        "nearswap",
        "towards the other model where it is near",
        "alchemonaut, QuartetAnemoi-70B-t0.0001",
        BaseRole.REQUIRED,
        (ParameterSpec("t", Scope.GLOBAL, "largest step of an element", required=True),),
        max_experts=1,
    ),
    OperatorSpec(
        "arcee_fusion",
        "the other model's most important changes",
        "Arcee AI, arcee.ai",
        BaseRole.REQUIRED,
        (),
        max_experts=1,
    ),
)

OPERATORS: dict[str, OperatorSpec] = {
    spec.name: spec
    for spec in (
        OperatorSpec(
            "linear",
            "weighted average",
            "Wortsman et al. 2022, arXiv 2203.05482",
            BaseRole.OPTIONAL,
            (_WEIGHT, _normalize(True)),
            min_experts=0,
        ),
        *_DELTA_RULES,
        *_SPHERICAL_RULES,
        *_SELECTING_RULES,
        OperatorSpec(
            "passthrough",
            "copy of one model",
            "mergekit's documented parameters",
            BaseRole.NONE,
            (ParameterSpec("scale", Scope.MODEL, "factor on every tensor", default=1.0),),
            min_experts=0,
            max_experts=0,
        ),
    )
}
