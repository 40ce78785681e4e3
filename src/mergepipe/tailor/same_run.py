"""Tell whether checkpoints are of one run, by what the Trainer records beside them."""

from __future__ import annotations

from collections.abc import Sequence

from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import MismatchError
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.formats.trainer_files import TRAINER_STATE_NAME, read_config, read_json

_SHOWN_KEYS = ("model_type", "architectures")


def check_same_run(store: Store, checkpoints: Sequence[TrainingCheckpoint]) -> None:
    """Compare architectures and training histories, where they are recorded.

    Raises:
        MismatchError: `tailor.architecture`, two are of different architectures; `tailor.runs`, one has logged other
            values for a step than another, so that they are of two runs, or of two branches of one.
    """
    ordered = sorted(checkpoints, key=lambda checkpoint: checkpoint.step)
    histories = [(checkpoint.path, _history(store, checkpoint.path)) for checkpoint in ordered]
    described = [(checkpoint.path, read_config(store, checkpoint.path)) for checkpoint in ordered]
    for path, architecture in described:
        _compare_architectures(*described[-1], path, architecture)
    newest_path, newest = histories[-1]
    for path, history in histories[:-1]:
        other_step = next((step for step in sorted(history) if step in newest and history[step] != newest[step]), None)
        if other_step is not None:
            raise MismatchError.of(
                "tailor.runs", path, f"its log of step {other_step} is not that of {newest_path}: they are of two "
                "runs, or of two branches of one", "take checkpoints that follow one another",
            )  # fmt: skip


def _compare_architectures(
    newest: Location, wanted: dict[str, JsonValue], path: Location, architecture: dict[str, JsonValue]
) -> None:
    key = next((k for k in _SHOWN_KEYS if k in wanted and k in architecture and wanted[k] != architecture[k]), None)
    if key is not None:
        raise MismatchError.of(
            "tailor.architecture", path, f"{key} is {architecture[key]}, that of {newest} is {wanted[key]}"
        )


def _history(store: Store, folder: Location) -> dict[int, list[JsonValue]]:
    """Losses that the Trainer has logged, by step."""
    if not is_file(store, folder / TRAINER_STATE_NAME):
        return {}
    logged = read_json(store, folder / TRAINER_STATE_NAME).get("log_history")
    losses: dict[int, list[JsonValue]] = {}
    for entry in logged if isinstance(logged, list) else []:
        match entry:
            case {"step": int(step), "loss": int() | float() as loss}:
                losses.setdefault(step, []).append(loss)
    return losses
