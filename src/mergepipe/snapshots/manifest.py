"""The manifest of a snapshot or a composite, `mergepipe.json`: a frozen value with its canonical JSON and its id (sid).

Paths of this machine are kept out of what is written: records hold relative ones, other files last names. A reference
is `path` or `path+adapter`, as `reference_text` writes it. Relative parts begin with `./` or `../`. Law:
`absolute_reference(relative_reference(text, folder), Location.local(folder)) == text` for normal paths.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Final

from mergepipe.checkpoints.directory import is_contained
from mergepipe.core.outcome import DroppedTensor
from mergepipe.core.records import RecordFormat, Seed, Size, decode, encode
from mergepipe.core.strict_json import JsonValue, digest_of, shown
from mergepipe.errors import MergePipeError
from mergepipe.storage.contract import BESIDE, MANIFEST_BYTES, Digested, FileId, Store
from mergepipe.storage.ledger import Purpose, Usage
from mergepipe.storage.location import Location

MANIFEST_NAME = "mergepipe.json"
CARD_NAME = "README.md"
MANIFEST_FORMAT_NAME = "mergepipe-manifest"
MANIFEST_VERSION = 5
"""Of the one format of manifests, of which each `kind` has its own record: snapshot, composite, pack, partial."""
BASE_ROLE = "base"
EXPERT_ROLE = "expert"
ADAPTER_ROLE = "adapter"
MERGED_ADAPTERS = "lora merge"
EXTRACTED_ADAPTER = "lora extract"
CONVERTED_ADAPTER = "lora convert"
SPARSE_PATCH = "pack --to sparse"
"""The operators of snapshots that are adapters: the commands that made them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One model that a snapshot was made from: `read_bytes` of its tensors were requested.

    `role` is base, expert, or adapter: of a LoRA that was folded into the base, or merged with others.

    `path` is as recorded; `sid` is set where the model was a snapshot itself, and that is known.
    """

    role: str
    model: str
    path: str
    content_id: str | None
    read_bytes: Size
    sid: str | None = None

    @property
    def is_expert(self) -> bool:
        """Whether the snapshot has changes from it: it is an expert or an adapter."""
        return self.role != BASE_ROLE


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord(Input):
    """An input in a manifest, with its files as they were read.

    `path` is absolute here and, unless asked otherwise, relative to the snapshot in its file.
    `hub_id` is `org/name` or `org/name@commit` where the model is known to be one of the Hub.
    """

    files: tuple[FileId, ...]
    hub_id: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", tuple(file.without_place() for file in self.files))


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor as written: the digest of its blocks, and how it was computed.

    `kept`: the share of its change from the base that rounding kept, where that is known.
    """

    name: str
    dtype: str
    shape: tuple[Size, ...]
    file: str
    blake3: str
    action: str
    reason: str
    kept: float | None = None


_CHANGED_BY = "changed by adapter "
UNCHANGED = "no adapter changes it"
"""The reason of a tensor that stays as the base has it, of a snapshot with adapters folded in."""


def changed_by(adapters: Sequence[int]) -> str:
    """Return the reason of a tensor that these of the folded adapters change, counted from 0."""
    return _CHANGED_BY + ", ".join(str(adapter + 1) for adapter in adapters)


def changing_adapters(reason: str) -> tuple[int, ...] | None:
    """Return the adapters of a reason; None for any other. Law: `changing_adapters(changed_by(a)) == a`."""
    if reason == UNCHANGED:
        return ()
    numbers = reason.removeprefix(_CHANGED_BY).split(", ")
    if not reason.startswith(_CHANGED_BY) or not all(number.isdecimal() for number in numbers):
        return None
    return tuple(int(number) - 1 for number in numbers)


@dataclass(frozen=True, slots=True)
class LeftOutFile:
    """A file of the model that lends configuration and tokenizer that is not copied into the snapshot."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RealizedBytes:
    """Bytes requested from and written to storage."""

    base: Size
    expert: Size
    analysis: Size
    metadata: Size
    output: Size

    @classmethod
    def of(cls, usage: Usage) -> RealizedBytes:
        """Sum what was used by purpose."""
        return cls(**{field.name: usage[Purpose(field.name)] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Coverage:
    """The coverage of a planned merge: blocks of the merged tensors in total, blocks read from any expert, per expert.

    `free` blocks equal the base's and need no read.
    """

    blocks: Size
    touched: Size
    read: tuple[Size, ...]
    free: tuple[Size, ...]


NOTICES_KEY = "recipe_notices"  # in `Manifest.run`: what has no effect in the recipe, a line each

FILE_SUFFIXES: Final = (".safetensors", ".gguf")
"""Of outputs that are one file. Their record is a folder beside them, from which they are `../NAME`."""
_RECORD_SUFFIX = ".mergepipe"
_USUAL_NAME: Final = "model.safetensors"

ROUNDING_KEY = "rounding_kept"  # in `Manifest.run`: the share of the change from the base that rounding kept
SUMMARY_KEY = "summary"  # in `Manifest.run`: what the snapshot is, where `Merge by OPERATOR` does not say it
LINEAR_ALGEBRA_KEY = "linear_algebra"  # in `Manifest.run`: the build that decided last bits, where it did
BASE_MODEL_IDS_KEY = "base_model_ids"  # in `Manifest.run`: Hub ids that were stated of the merge, between spaces


@dataclass(frozen=True, slots=True)
class Manifest:
    """The immutable record of one merge. `sid` identifies the result; `run` describes the run and is not part of it.

    `plan` is the whole plan of a merge under a budget: its runs of blocks are the touch map.
    `blocks` is the table of block digests and `sidecars` are the other small files,
    `left_out` those of the base that were not copied.

    Law: `Manifest.sid` is the same for the same recipe, seed, inputs and version, whatever the run.
    """

    version: str
    operator: str
    recipe: str
    seed: Seed
    inputs: tuple[InputRecord, ...]
    files: tuple[Digested, ...]
    tensors: tuple[OutputTensor, ...]
    dropped: tuple[DroppedTensor, ...]
    realized: RealizedBytes
    plan_digest: str | None
    plan: Mapping[str, object] | None
    coverage: Coverage | None
    run: Mapping[str, float | int | str]
    blocks: Digested
    sidecars: tuple[Digested, ...] = ()
    left_out: tuple[LeftOutFile, ...] = ()

    @property
    def sid(self) -> str:
        """32 hex digits: BLAKE3-128 of the recipe, the seed, the version and the output's digests."""
        identity = {
            "version": self.version,
            "recipe": self.recipe,
            "seed": self.seed,
            "files": encode(self.in_folder().files),
        }
        return digest_of(identity)

    @property
    def is_adapter(self) -> bool:
        """Whether the snapshot is a LoRA adapter or a sparse patch, not a model."""
        return self.operator in (MERGED_ADAPTERS, EXTRACTED_ADAPTER, CONVERTED_ADAPTER, SPARSE_PATCH)

    @property
    def summary(self) -> str:
        """One line that says what an adapter, or a model with adapters folded in, is; empty for any other merge."""
        return str(self.run.get(SUMMARY_KEY, ""))

    @property
    def title(self) -> str:
        """One line that says what the snapshot is."""
        return self.summary or f"Merge by {self.operator}"

    def in_folder(self) -> Manifest:
        """Return the record of the same output as a folder: a file has the usual name there, whatever its own."""
        beside = [file for file in (*self.files, *self.sidecars) if file.name.startswith(BESIDE)]
        if not beside:
            return self
        files = tuple(replace(file, name=_USUAL_NAME) for file in beside)
        return replace(self, files=files, tensors=tuple(replace(tensor, file=_USUAL_NAME) for tensor in self.tensors))

    def to_json(self) -> bytes:
        """Encode as readable JSON with a stable order of keys. Law: `parse_manifest(m.to_json(), where) == m`."""
        return MANIFEST_FORMAT.to_json(self)


def record_folder(out: Path) -> Path:
    """The folder of an output's manifest: the output itself, or the one beside an output that is a file."""
    return out.with_suffix(_RECORD_SUFFIX) if out.suffix in FILE_SUFFIXES else out


MANIFEST_FORMAT: Final = RecordFormat(
    MANIFEST_FORMAT_NAME,
    MANIFEST_VERSION,
    Manifest,
    "merge again",
    stated=("sid",),
    variant="snapshot",
    elsewhere="`mergepipe tailor inspect` says what a composite holds",
)


def parse_manifest(raw: bytes, where: object = "manifest") -> Manifest:
    """Parse the output of `Manifest.to_json`."""
    return MANIFEST_FORMAT.parse(raw, where)


CACHED_MODEL = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})(?:/|$)")
"""A folder in the cache of the Hub's tools."""
_RELATIVE_STARTS = ("./", "../")
_RELATIVE_WHOLES = (".", "..")
_JSON_STRING = re.compile(rb'"((?:[^"\\]++|\\.)*+)(?:"|\Z)(\s*+:)?', re.DOTALL)
_MAY_BE_PATH = re.compile(rb"/|~|file:|[A-Za-z]:|\\")
_ABSOLUTE = re.compile(r"(?:file://)?(?:/|~[^/\\]*/|[A-Za-z]:[\\/]|\\\\)")
_SEPARATORS = re.compile(r"[\\/]+")
_PATH_KEY = re.compile(rb"path|file|dir|folder|name", re.IGNORECASE)
_TEXT_KEY = re.compile(rb"content|\d*|.*(?:tokens?|template|prompt|pattern|regex)", re.IGNORECASE | re.DOTALL)
_TOKENS_NAMES = ("tokenizer.json", "vocab.json", "added_tokens.json", "special_tokens_map.json")
"""JSON files whose strings are tokens, whatever they look like."""


def relative_reference(text: str, folder: Path | None) -> str:
    """Write the absolute local paths of a reference relative to a snapshot's `folder`; remote locations stay.

    Without a folder the snapshot goes to another machine: of a path its last name is left, as if beside the snapshot.
    """
    real_folder = None if folder is None else os.path.realpath(folder)
    return _by_part(text, lambda part: _relative(part, real_folder) if part.startswith("/") else part)


def absolute_reference(text: str, directory: Location) -> str:
    """Resolve the relative paths of a reference against the folder of a snapshot, wherever it lies."""
    folder = Location.local(Path(os.path.realpath(directory.path))) if directory.is_local else directory
    return _by_part(text, lambda part: str((folder / part).normal()) if is_relative_part(part) else part)


def is_relative_part(text: str) -> bool:
    """Whether a part of a reference is a relative path."""
    return text.startswith(_RELATIVE_STARTS) or text in _RELATIVE_WHOLES


def with_changed_paths(manifest: Manifest, change: Callable[[str], str]) -> Manifest:
    """Return the manifest with every path of an input changed, also those in its plan, which no digest covers."""
    inputs = tuple(replace(record, path=change(record.path)) for record in manifest.inputs)
    return replace(manifest, inputs=inputs, plan=_plan_with_paths(manifest.plan, change))


def with_absolute_paths(manifest: Manifest, directory: Location) -> Manifest:
    """Return the manifest that was read from a snapshot at `directory` with absolute paths."""
    return with_changed_paths(manifest, lambda text: absolute_reference(text, directory))


def record_without_paths(value: JsonValue, folder: Path | None) -> JsonValue:
    """Return the JSON value of a record with strings that are absolute paths as `relative_reference` writes them."""
    if isinstance(value, dict):
        return {key: record_without_paths(item, folder) for key, item in value.items()}
    if isinstance(value, list):
        return [record_without_paths(item, folder) for item in value]
    is_path = isinstance(value, str) and value.startswith("/")
    return relative_reference(str(value), folder) if is_path else value


def file_without_paths(name: str, raw: bytes) -> bytes:
    """Return the content of a small file of a model in which no value is an absolute path, wherever it points to.

    In JSON a path is replaced by its last name, a folder in the cache of the Hub's tools by the model's id; everything
    else stays byte for byte. Values that are tokens or texts are no paths, and no other files hold any.
    """
    if not name.endswith(".json") or PurePosixPath(name).name in _TOKENS_NAMES:
        return raw
    key = b""

    def replaced(match: re.Match[bytes]) -> bytes:
        nonlocal key
        if match[2] is not None:
            key = match[1]
        elif _MAY_BE_PATH.match(match[1]) and not _TEXT_KEY.fullmatch(key):
            name = _name_of_path(match[0], needs_folders=not _PATH_KEY.search(key))
            return match[0] if name is None else json.dumps(name, ensure_ascii=False, allow_nan=False).encode()
        return match[0]

    return _JSON_STRING.sub(replaced, raw)


def _name_of_path(quoted: bytes, *, needs_folders: bool) -> str | None:
    """Return the name that stands for an absolute path; None for any other text. One of one part may be a word."""
    try:
        text = str(json.loads(quoted))
    except ValueError:  # no JSON, or no UTF-8: whoever parses it says so
        return None
    parts = [part for part in _SEPARATORS.split(text.removeprefix("file://")) if part]
    if not _ABSOLUTE.match(text) or not text.isprintable() or len(parts) < (2 if needs_folders else 1):
        return None
    cached = CACHED_MODEL.search(text)
    return cached["name"].replace("--", "/") if cached and parts[-1] == cached["commit"] else parts[-1]


def _plan_with_paths(plan: Mapping[str, object] | None, change: Callable[[str], str]) -> Mapping[str, object] | None:
    """Change the paths of a plan's models and of the importance that it follows."""
    if plan is None:
        return None
    changed = dict(plan)
    models = changed.get("models")
    if isinstance(models, list | tuple):
        changed["models"] = [_record_with_path(model, change) for model in models]
    if "importance" in changed:
        changed["importance"] = _record_with_path(changed["importance"], change)
    return changed


def _record_with_path(record: object, change: Callable[[str], str]) -> object:
    if isinstance(record, Mapping) and isinstance(record.get("path"), str):
        return {**record, "path": change(record["path"])}
    return record


def _by_part(text: str, change: Callable[[str], str]) -> str:
    return "+".join(change(part) for part in text.split("+"))


def _relative(part: str, folder: str | None) -> str:
    if folder is None:
        return f"../{PurePosixPath(part).name}"
    relative = os.path.relpath(part, folder)
    return relative if is_relative_part(relative) else f"./{relative}"


# --- the manifest of a composite: a training checkpoint of parts of several, or an average ---


_HEAD_BYTES = 96  # a manifest's format and kind are its first keys


class StepPolicy(StrEnum):
    """The rule that chose a step counter."""

    EXACT = "exact"  # the counter's parameters come from one source: that source's value
    NEWEST = "newest"  # one counter serves parameters of several sources: the largest of their values


class Thoroughness(StrEnum):
    """The extent to which a composite is read back."""

    SAMPLED = "sampled"  # both ends of every contiguous piece
    FULL = "full"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Counts of compared states, elements, and copies of weights."""

    thoroughness: Thoroughness
    states: Size
    elements: Size
    copies: Size


@dataclass(frozen=True, slots=True)
class UnitSource:
    """A source of a unit. Ages are in steps behind the one training resumes at; a negative one is of a newer part."""

    path: str
    step: int
    age: int


@dataclass(frozen=True, slots=True)
class UnitStaleness:
    """One unit: its sources, and the step counters it resumes with.

    `origin` is the unit that it is in its sources, where that is another: a layer in another position.
    """

    unit: str
    parameters: Size
    sources: tuple[UnitSource, ...]
    adam_steps: tuple[float, ...]
    step_policies: tuple[StepPolicy, ...]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class CompositeInput:
    """One source: its step, the files read and the bytes taken. `role` is skeleton or part."""

    path: str
    step: int
    role: str
    files: tuple[FileId, ...]
    read_bytes: Size


@dataclass(frozen=True, slots=True)
class AverageRecord:
    """How checkpoints were averaged: the scheme's name, each one's weight and step, and the optimizer's state.

    Records of earlier versions have no `steps`.
    """

    scheme: str
    weights: tuple[float, ...]
    optimizer: str
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ComposedCheckpoint:
    """The format and layout of a composed training checkpoint, its step, and the source of its state."""

    format: str
    framework: str
    stage: int | None
    world_size: Size
    step: int
    state_from: str


@dataclass(frozen=True, slots=True)
class CompositeManifest:
    """The immutable record of one composition or average; `files` are digested as a whole.

    Law: `sid` is the same for the same recipe, version and bytes written.
    """

    version: str
    recipe: str
    checkpoint: ComposedCheckpoint
    inputs: tuple[CompositeInput, ...]
    units: tuple[UnitStaleness, ...]
    files: tuple[Digested, ...]
    self_check: SelfCheck
    realized: Mapping[str, int]
    run: Mapping[str, float]
    average: AverageRecord | None = None

    def __post_init__(self) -> None:
        for file in self.files:
            if not is_contained(file.name):
                raise ValueError(f"the file {shown(file.name)} is not in the folder of the composite")

    @property
    def is_model(self) -> bool:
        """Whether it is an average of weights alone, with no state of an optimizer."""
        return self.average is not None and self.average.optimizer == "none"

    @property
    def sid(self) -> str:
        """32 hex digits: BLAKE3-128 of the recipe, the version and the files' digests."""
        return digest_of({"version": self.version, "recipe": self.recipe, "files": encode(self.files)})

    def to_json(self) -> bytes:
        """Encode as readable JSON with a stable order of keys."""
        return COMPOSITE_FORMAT.to_json(self)

    def without_paths(self, folder: Path | None) -> CompositeManifest:
        """Return the manifest with paths relative to its folder; without one only their last names are left."""
        return decode(CompositeManifest, record_without_paths(encode(self), folder))


COMPOSITE_FORMAT: Final = RecordFormat(
    MANIFEST_FORMAT_NAME, MANIFEST_VERSION, CompositeManifest, "compose it again", stated=("sid",), variant="composite"
)


def is_composite(store: Store, path: Location) -> bool:
    """Whether a directory holds the manifest of a composite."""
    try:
        return COMPOSITE_FORMAT.recognises(store.read_metadata(path / MANIFEST_NAME, 0, _HEAD_BYTES))
    except MergePipeError:
        return False


def read_composite(store: Store, path: Location) -> CompositeManifest:
    """Read the manifest of a composite."""
    manifest = path / MANIFEST_NAME
    return COMPOSITE_FORMAT.parse(store.read_small(manifest, MANIFEST_BYTES), manifest)
