"""The list of operators a recipe can name. Importing it loads no compiled code."""

from __future__ import annotations

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


_NO_RESCALE = ParameterSpec(
    "rescale", Scope.GLOBAL, "restore the norm after trimming", default=False, is_flag=True, only_default=True
)
_RESCALE = ParameterSpec(
    "rescale", Scope.GLOBAL, "multiply surviving elements by 1/density", default=True, is_flag=True
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
        OperatorSpec(
            "task_arithmetic",
            "sum of task vectors",
            "Ilharco et al. 2022, arXiv 2212.04089",
            BaseRole.REQUIRED,
            (_WEIGHT, _normalize(False), _NO_RESCALE, _LAMBDA, _INT8_MASK),
        ),
        OperatorSpec(
            "ties",
            "trim, elect sign, disjoint merge",
            "Yadav et al. 2023, arXiv 2306.01708",
            BaseRole.REQUIRED,
            (_WEIGHT, _DENSITY, _normalize(True), _NO_RESCALE, _LAMBDA, _INT8_MASK),
        ),
        OperatorSpec(
            "dare_linear",
            "drop and rescale, then sum",
            "Yu et al. 2023, arXiv 2311.03099",
            BaseRole.REQUIRED,
            (_WEIGHT, _DENSITY, _normalize(False), _RESCALE, _LAMBDA, _INT8_MASK),
        ),
        OperatorSpec(
            "dare_ties",
            "drop and rescale, elect sign, disjoint merge",
            "Yu et al. 2023, arXiv 2311.03099; Yadav et al. 2023, arXiv 2306.01708",
            BaseRole.REQUIRED,
            (_WEIGHT, _DENSITY, _normalize(False), _RESCALE, _LAMBDA, _INT8_MASK),
        ),
        OperatorSpec(
            "slerp",
            "spherical interpolation of two models",
            "Shoemake 1985; mergekit's documented parameters",
            BaseRole.REQUIRED,
            (ParameterSpec("t", Scope.GLOBAL, "0 is the base, 1 the other model", required=True, low=0.0, high=1.0),),
            max_experts=1,
        ),
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
