"""A Hugging Face directory, or one bare file of weights, opened as a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from types import MappingProxyType

from mergepipe.checkpoints.contained_files import is_plain_name, stat_regular
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, FileFingerprint, TensorEntry
from mergepipe.checkpoints.formats.delta_mark import DeltaMark, mark_of
from mergepipe.checkpoints.formats.safetensors import read_header
from mergepipe.checkpoints.formats.torch_weights import read_torch_weights
from mergepipe.checkpoints.formats.weight_files import (
    GGUF_MAGIC,
    SAFETENSORS,
    TORCH,
    choose_weights,
    gguf_refusal,
    names_shown,
)
from mergepipe.core.strict_json import JsonValue, object_members, shown
from mergepipe.errors import CorruptError, NotFoundError, Problem, UnsupportedError
from mergepipe.storage.contract import FileStatus, Store, is_folder
from mergepipe.storage.limits import WEIGHT_INDEX_BYTES
from mergepipe.storage.location import Location
from mergepipe.storage.traffic import concurrent_map

MAX_PROBLEMS = 20
TEMPLATE_FOLDER = "additional_chat_templates"
# Code (*.py named by auto_map) is left out on purpose: nothing executable passes from an input to an output.
SIDECAR_NAMES = frozenset({
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "spiece.model", "sentencepiece.bpe.model",
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
})  # fmt: skip
_SIDECAR_PATTERNS = ("*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*")
_MODULES_NAME = "modules.json"  # of sentence-transformers: lists the folders of further modules
_MODULE_FOLDER = re.compile(r"[0-9]+_[A-Za-z0-9_]+")
_MODULE_SUFFIXES = (".json", ".txt", ".safetensors")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of tensors: what it says it holds; `mark` where those are differences from a base."""

    fingerprint: FileFingerprint
    entries: tuple[TensorEntry, ...]
    mark: DeltaMark | None = None


def open_checkpoint(store: Store, path: Location) -> Checkpoint:
    """Open a directory or a bare file of weights; reads headers, the index and names, never tensor bytes.

    A link given as `path` itself is followed; links inside a directory must stay in it, or in its hub cache folder.

    Raises:
        NotFoundError: the path, its weights or some shards do not exist.
        CorruptError: a header or the index lies, or a link leads out of the checkpoint.
        UnsupportedError: weights of another format, or an adapter.
        StorageError: the operating system refused to look.
    """
    status = store.stat(path)
    if status is None:
        raise NotFoundError.of("checkpoint.path.not_found", shown(str(path)), "there is no such path")
    if status.is_folder:
        return _open_directory(store, path)
    if not status.is_file:
        raise CorruptError.of("checkpoint.files.not_regular", path, "must be a directory or a regular file")
    suffixes = (*SAFETENSORS.suffixes, *TORCH.suffixes)
    if path.suffix not in suffixes:
        _refuse_gguf(store, path)
        raise UnsupportedError.of(
            "checkpoint.path.format", path, f"a single file must end in one of {', '.join(suffixes)}",
            "name its folder" if path.suffix == ".json" else "convert it to safetensors",
        )  # fmt: skip
    return _checkpoint(path, path.parent, [read_weight_file(store, path.parent, path.name, status)], ())


def disagreements(weight_map: Mapping[str, str], stored: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Compare the index (tensor -> shard) with what each shard stores (shard -> tensors), tensor by tensor."""
    homes: dict[str, list[str]] = {}
    for shard, tensors in stored.items():
        for tensor in tensors:
            homes.setdefault(tensor, []).append(shard)
    for tensor in sorted(weight_map.keys() | homes.keys()):
        homes_of_tensor, listed = homes.get(tensor, []), weight_map.get(tensor)
        if homes_of_tensor != [listed]:
            yield _disagreement(tensor, listed, homes_of_tensor)


def _disagreement(tensor: str, listed: str | None, homes: list[str]) -> Problem:
    what = f"tensor {shown(tensor)}"
    if len(homes) > 1:
        code, message = "tensor_twice", f"{what} is stored in {len(homes)} shards: {names_shown(homes)}"
    elif listed is None:
        code, message = "tensor_unlisted", f"{what} is stored in {shown(homes[0])}, but the index does not list it"
    elif not homes:
        code, message = "tensor_missing", f"{what} is listed in {shown(listed)}, which does not hold it"
    else:
        code, message = "tensor_misplaced", f"{what} is listed in {shown(listed)}, but stored in {shown(homes[0])}"
    return Problem(f"checkpoint.index.{code}", "", message)


def _open_directory(store: Store, path: Location) -> Checkpoint:
    names = list_names(store, path)
    weights = choose_weights(path, names)
    if weights.is_index:
        weight_map = _read_index(store, path, weights.name)
        single = next(fmt.single for fmt in (SAFETENSORS, TORCH) if weights.name.startswith(fmt.single) or fmt is TORCH)
        if single in names and single not in weight_map.values():
            raise CorruptError.of(
                "checkpoint.directory.ambiguous", path,
                f"holds {single} beside {weights.name}, which does not name it", "remove one of them",
            )  # fmt: skip
        files = _read_shards(store, path, weights.name, weight_map)
    else:
        files = [read_weight_file(store, path, weights.name, stat_present(store, path, weights.name))]
    return _checkpoint(path, path, files, find_sidecars(store, path, names))


def list_names(store: Store, folder: Location) -> frozenset[str]:
    """The names in a directory."""
    return frozenset(entry.name for entry in store.list(folder))


def stat_present(store: Store, root: Location, name: str) -> FileStatus:
    """Look up a file that was listed."""
    status = stat_regular(store, root, name)
    if status is None:
        raise NotFoundError.of("checkpoint.files.dangling_link", root / name, "is a link to a file that does not exist")
    return status


def read_weight_file(store: Store, root: Location, name: str, status: FileStatus) -> WeightFile:
    """Read what the file `name` of the directory `root` says it holds, whatever its format.

    `status` was taken before: a change in between shows as another version later.
    """
    path = root / name
    try:
        if path.suffix in TORCH.suffixes:
            weights = read_torch_weights(store, path)
            digest = weights.digest
            return WeightFile(FileFingerprint(name, weights.size_bytes, status.version, digest), weights.entries)
        header = read_header(store, path)
    except (CorruptError, UnsupportedError):
        _refuse_gguf(store, path)
        raise
    fingerprint = FileFingerprint(name, header.size_bytes, status.version, header.header_digest)
    return WeightFile(fingerprint, header.entries, mark_of(header.metadata, path))


def _refuse_gguf(store: Store, path: Location) -> None:
    """Refuse a file that is GGUF by its first bytes, whatever it is called."""
    if store.read_metadata(path, 0, len(GGUF_MAGIC)) == GGUF_MAGIC:
        raise gguf_refusal(path, "is a GGUF file: weights as llama.cpp quantises them")


def _read_index(store: Store, root: Location, name: str) -> dict[str, str]:
    stat_present(store, root, name)
    path = root / name
    return _weight_map(path, store.read_small(path, WEIGHT_INDEX_BYTES))


def _weight_map(path: Location, raw: bytes) -> dict[str, str]:
    """Parse an index: the shard of each tensor. Memory: 6 times the index."""
    checked: dict[str, str] = {}
    shards: dict[str, str] = {}  # one text each, however often it is named
    listed: JsonValue = {}
    for outer, key, value in object_members(raw, where=path, code="checkpoint.index.not_json", nested="weight_map"):
        if not outer:
            listed = value if key == "weight_map" else listed
        elif isinstance(value, str):
            checked[key] = shards.setdefault(value, value)
        else:
            raise CorruptError.of(
                "checkpoint.index.weight_map", path,
                f"the shard of tensor {shown(key)} must be a string, found {shown(value)}",
            )  # fmt: skip
    if not checked:
        raise CorruptError.of(
            "checkpoint.index.weight_map", path,
            f"'weight_map' must be a non-empty object of tensor names and shard names, found {shown(listed)}",
        )  # fmt: skip
    suffixes = next(fmt.suffixes for fmt in (SAFETENSORS, TORCH) if fmt.indices([path.name]))
    for shard in sorted(shards):
        if not is_plain_name(shard) or not shard.endswith(suffixes):
            raise CorruptError.of(
                "checkpoint.index.shard_name", path,
                f"a shard must be a plain file name ending in {' or '.join(suffixes)}, found {shown(shard)}",
            )  # fmt: skip
    return checked


def _read_shards(store: Store, root: Location, index_name: str, weight_map: Mapping[str, str]) -> list[WeightFile]:
    """Read the header of every shard, in the order of their names, and check them against the index."""
    shards = sorted(set(weight_map.values()))
    with concurrent_map(store, [root]) as map_all:
        stats = dict(zip(shards, map_all(lambda shard: stat_regular(store, root, shard), shards), strict=True))
    missing = [shard for shard, status in stats.items() if status is None]
    if missing:
        where = str(root / index_name)
        raise NotFoundError(
            *(Problem("checkpoint.index.shard_missing", where, f"the shard {shown(s)} is missing") for s in missing)
        )
    present = [(shard, status) for shard, status in stats.items() if status is not None]
    with concurrent_map(store, [root]) as map_all:
        files = list(map_all(lambda pair: read_weight_file(store, root, *pair), present))
    stored = {file.fingerprint.name: [entry.name for entry in file.entries] for file in files}
    _raise_capped(root / index_name, disagreements(weight_map, stored))
    return files


def _raise_capped(path: Location, problems: Iterator[Problem]) -> None:
    first = list(islice(problems, MAX_PROBLEMS))
    if not first:
        return
    located = [Problem(p.code, str(path), p.message) for p in first]
    n_more = sum(1 for _ in problems)
    if n_more:
        located.append(Problem("checkpoint.index.more", str(path), f"and {n_more} more"))
    raise CorruptError(*located)


def find_sidecars(store: Store, root: Location, names: Collection[str]) -> tuple[str, ...]:
    """Names of the files that belong to the model beside its tensors, each checked to be a file of the checkpoint."""
    sidecars = [name for name in names if _is_sidecar(name)]
    if TEMPLATE_FOLDER in names and is_folder(store, root / TEMPLATE_FOLDER):
        templates = list_names(store, root / TEMPLATE_FOLDER)
        sidecars += [f"{TEMPLATE_FOLDER}/{name}" for name in templates if name.endswith(".jinja")]
    if _MODULES_NAME in names:
        for folder in sorted(filter(_MODULE_FOLDER.fullmatch, names)):
            if is_folder(store, root / folder):
                files = list_names(store, root / folder)
                sidecars += [f"{folder}/{name}" for name in files if name.endswith(_MODULE_SUFFIXES)]
    for name in sorted(sidecars):
        stat_present(store, root, name)
    return tuple(sorted(sidecars))


def _is_sidecar(name: str) -> bool:
    return name in SIDECAR_NAMES or any(fnmatchcase(name, pattern) for pattern in _SIDECAR_PATTERNS)


def _checkpoint(path: Location, root: Location, files: list[WeightFile], sidecars: tuple[str, ...]) -> Checkpoint:
    tensors: dict[str, TensorEntry] = {entry.name: entry for file in files for entry in _as_marked(file)}
    base = _common_base(path, files)
    return Checkpoint(
        path,
        root,
        MappingProxyType(tensors),
        tuple(file.fingerprint for file in files),
        sidecars,
        CheckpointKind.FULL if base is None else CheckpointKind.DELTA,
        base,
    )


def _as_marked(file: WeightFile) -> Iterator[TensorEntry]:
    for entry in file.entries:
        is_delta = file.mark is not None and entry.name not in file.mark.full
        yield replace(entry, is_delta=True) if is_delta else entry


def _common_base(path: Location, files: list[WeightFile]) -> str | None:
    """The base that all files are differences from; None for plain weights."""
    bases = {None if file.mark is None else file.mark.base for file in files}
    if len(bases) > 1:
        raise CorruptError.of(
            "delta.mixed", path, "some of its files are differences from a base and others are not, or from another one"
        )
    return next(iter(bases), None)
