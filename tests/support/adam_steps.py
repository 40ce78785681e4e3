"""Step counters of training checkpoints, for tests."""

from __future__ import annotations

from mergepipe.tailor.checkpoint import AdamStep, TrainingCheckpoint


def step_of(checkpoint: TrainingCheckpoint, parameter: str) -> AdamStep | None:
    """The step counter that serves a parameter; None for a frozen one."""
    return next((step for step in checkpoint.steps if parameter in step.parameters), None)
