"""The parts of `make reproduce`, in the order of the index."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.reproduce import (
    compose,
    memory,
    mergekit,
    models,
    overheads,
    payoff,
    published,
    resuming,
    scaling,
    sweep,
    tasks,
    trained,
)
from benchmarks.reproduce.parts import Part

PARTS: Mapping[str, Part] = {
    part.name: part
    for part in (
        mergekit.PART,
        scaling.PART,
        models.PART,
        memory.PART,
        sweep.PART,
        overheads.PART,
        payoff.PART,
        published.PART,
        trained.TRAINED,
        trained.RULES_PART,
        tasks.PART,
        compose.PART,
        resuming.PART,
    )
}
