"""The Trainer's own state taken from a partial checkpoint: step, scheduler, random states and learning rates."""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mergepipe.errors import CorruptError, MismatchError, UnsupportedError
from mergepipe.readers.contained import stat_regular
from mergepipe.readers.torch_zip import read_torch_zip
from mergepipe.storage.base import Store
from mergepipe.tailor.assignment import Assignment
from mergepipe.tailor.checkpoint import Format
from mergepipe.tailor.copy_plan import Literal, Patch
from mergepipe.tailor.formats.hf_optimizer import OPTIMIZER_NAME
from mergepipe.tailor.formats.partial import read_partial_manifest
from mergepipe.tailor.partial_manifest import MANIFEST_NAME
from mergepipe.tailor.pickle_node import Node
from mergepipe.tailor.skeleton_files import SkeletonFile
from mergepipe.tailor.trainer_files import TRAINER_STATE_NAME, read_global_step

_STATE_FILES = re.compile(r"trainer_state\.json|scheduler\.pt|rng_state(_\d{1,6})?\.pth", re.ASCII)
_RATE = "lr"


@dataclass(frozen=True, slots=True)
class StateOverlay:
    """`files` are the skeleton's with the state's in place of their namesakes; `rates` patch `optimizer.pt`."""

    files: tuple[SkeletonFile, ...]
    rates: tuple[Patch, ...]


def require_own_state(assignment: Assignment) -> None:
    """Refuse a state from a partial checkpoint where it is not supported.

    Raises:
        UnsupportedError: always, if there is one.
    """
    if assignment.state_index is not None:
        raise UnsupportedError.of(
            "tailor.state.format", assignment.state.path, "is partial, and gives step and scheduler only to composites "
            "of plain Trainer checkpoints (optimizer.pt)",
            "name a complete checkpoint in state_from",
        )  # fmt: skip


def overlay_state(store: Store, assignment: Assignment, files: Sequence[SkeletonFile]) -> StateOverlay:
    """Plan which small files and numbers the state replaces.

    Raises:
        UnsupportedError: another format, or learning rates that are not plain numbers.
        CorruptError, MismatchError: the state lacks what the Trainer needs, or has other parameter groups.
    """
    if assignment.state_index is None:
        return StateOverlay(tuple(files), ())
    if assignment.skeleton.format is not Format.HF_OPTIMIZER:
        require_own_state(assignment)
    folder = assignment.state.path
    if not (folder / MANIFEST_NAME).is_file() or stat_regular(folder, TRAINER_STATE_NAME) is None:
        raise CorruptError.of("tailor.state.files", folder, f"holds no {TRAINER_STATE_NAME} to resume from")
    if read_global_step(store, folder) != assignment.state.step:
        raise CorruptError.of("tailor.state.step", folder, f"{TRAINER_STATE_NAME} is of another step")
    given = {f.name: f for f in _state_files(folder)}
    lacking = [f.name for f in files if _STATE_FILES.fullmatch(f.name) and f.name not in given]
    if lacking:
        raise CorruptError.of("tailor.state.files", folder, f"holds no {lacking[0]}, which the skeleton has")
    kept = [f for f in files if f.name not in given]
    return StateOverlay(tuple(sorted([*kept, *given.values()], key=lambda f: f.name)), tuple(_rates(store, assignment)))


def _state_files(folder: Path) -> Iterator[SkeletonFile]:
    for path in sorted(folder.iterdir()):
        if _STATE_FILES.fullmatch(path.name):
            status = stat_regular(folder, path.name)
            if status is not None:
                yield SkeletonFile(path.name, path, status.st_size, status.st_mtime_ns)


def _rates(store: Store, assignment: Assignment) -> Iterator[Patch]:
    """Put the state's learning rates into the skeleton's parameter groups: they drive the first resumed step."""
    path = assignment.skeleton.root / OPTIMIZER_NAME
    archive = read_torch_zip(store, path)
    raw = store.read_metadata(path, archive.pickle.offset, archive.pickle.nbytes)
    groups = Node(archive.root, OPTIMIZER_NAME).get("param_groups").elements()
    old = [group.get(_RATE).value for group in groups]
    spots = list(_spots(raw))
    if [value for _, value in spots] != old:
        raise UnsupportedError.of("tailor.state.rates", path, "learning rates are not plain numbers, one a group")
    options = read_partial_manifest(store, assignment.state.path).options
    new = [option.get(_RATE) for option in options]
    if len(new) != len(old) or not all(isinstance(rate, float) for rate in new):
        raise MismatchError.of("tailor.state.rates", assignment.state.path, f"has learning rates {new}, not {len(old)}")
    for (offset, value), rate in zip(spots, new, strict=True):
        if isinstance(rate, float) and rate != value:
            yield Patch(archive.pickle.offset + offset, Literal(struct.pack(">d", rate)))


def _spots(raw: bytes) -> Iterator[tuple[int, float]]:
    """Each floating number that is the value of a key `lr`: where its eight bytes are, and what it is.

    The pickle was read before, so its instructions are sound; they are listed here, never executed.
    """
    names: dict[int, bool] = {}
    is_rate = just_pushed = False
    for opcode, argument, position in pickletools.genops(raw):
        if opcode.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            index = len(names) if opcode.name == "MEMOIZE" else int(argument or 0)
            names[index] = just_pushed and is_rate
            continue
        if opcode.name == "BINFLOAT" and is_rate and position is not None and isinstance(argument, float):
            yield position + 1, argument
        is_text = "UNICODE" in opcode.name
        is_recall = opcode.name in ("BINGET", "LONG_BINGET")
        is_rate = (is_text and argument == _RATE) or (is_recall and names.get(int(argument or 0), False))
        just_pushed = is_text
