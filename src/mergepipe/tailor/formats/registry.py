"""The training formats: each is registered here by one line."""

from __future__ import annotations

from mergepipe.tailor.formats.contract import CheckpointKind, TrainingFormat
from mergepipe.tailor.formats.dcp import DcpFormat
from mergepipe.tailor.formats.deepspeed import ZeroFormat
from mergepipe.tailor.formats.foreign import ForeignKind
from mergepipe.tailor.formats.fsdp import FsdpFormat
from mergepipe.tailor.formats.hf_optimizer import HfFormat
from mergepipe.tailor.formats.partial import PartialKind
from mergepipe.tailor.formats.universal import UniversalFormat
from mergepipe.tailor.formats.weights_only import WeightsFormat

TRAINING_FORMATS: tuple[TrainingFormat, ...] = (
    DcpFormat(),
    UniversalFormat(),
    FsdpFormat(),
    HfFormat(),
    ZeroFormat(),
    WeightsFormat(),
)

CHECKPOINT_KINDS: tuple[CheckpointKind, ...] = (PartialKind(TRAINING_FORMATS), ForeignKind(), *TRAINING_FORMATS)
"""In the order in which directories are tried: a partial checkpoint holds some files of its framework too."""


def format_named(name: str) -> TrainingFormat:
    """The format of that name; see `TrainingCheckpoint.format`.

    Raises:
        KeyError: there is none.
    """
    return {training_format.name: training_format for training_format in TRAINING_FORMATS}[name]
