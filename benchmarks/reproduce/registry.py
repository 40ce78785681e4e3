"""The parts of `make reproduce`, in the order of the index."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.reproduce import (
    compose,
    memory,
    mergekit,
    methods,
    models,
    overheads,
    payoff,
    published,
    remote,
    resuming,
    rules,
    scaling,
    start_up,
    sweep,
    trained,
)
from benchmarks.reproduce.parts import Part

PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        mergekit.PART,
        methods.PART,
        scaling.PART,
        models.PART,
        memory.PART,
        sweep.PART,
        overheads.PART,
        payoff.PART,
        published.PART,
        trained.PART,
        rules.PART,
        compose.PART,
        resuming.PART,
        remote.PART,
        start_up.PART,
    )
}
