"""Public calls with the fields of their options as plain keywords, for tables of cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from mergepipe import api
from mergepipe.options import MergeOptions, PlanOptions, RunOptions

Result = TypeVar("Result")

_PLAN_FIELDS = {field.name for field in fields(PlanOptions)}


def call_flat(call: Callable[..., Result], *arguments: Any, **given: Any) -> Result:
    """Call a function of the public API; what is no parameter of it goes into its options."""
    parameters = inspect.signature(call).parameters
    own = {name: value for name, value in given.items() if name in parameters}
    rest = {name: value for name, value in given.items() if name not in parameters}
    if call is api.plan:
        return call(*arguments, **own, options=PlanOptions(**rest))
    planned = {name: rest.pop(name) for name in _PLAN_FIELDS & rest.keys()}
    if call is api.merge:
        return call(*arguments, **own, options=MergeOptions(plan=PlanOptions(**planned), **rest))
    if call is api.sweep:
        own["plan"] = PlanOptions(**planned)
    elif planned:
        raise TypeError(f"{call.__name__} takes no {sorted(planned)}")
    return call(*arguments, **own, options=RunOptions(**rest))
