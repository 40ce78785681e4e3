"""A Hugging Face directory, or one bare safetensors file, opened as a checkpoint."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, Problem, StorageError, UnsupportedError
from mergepipe.readers.base import Checkpoint, FileFingerprint, TensorEntry
from mergepipe.readers.contained import is_plain_name, stat_regular
from mergepipe.readers.safetensors import SafetensorsHeader, read_header
from mergepipe.readers.strict_json import JsonValue, parse_object, shown
from mergepipe.storage.base import Store

MAX_INDEX_BYTES = 64 * 1024 * 1024
MAX_PROBLEMS = 20
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
TEMPLATE_FOLDER = "additional_chat_templates"
# Code (*.py named by auto_map) is left out on purpose: nothing executable passes from an input to an output.
SIDECAR_NAMES = frozenset({
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "spiece.model", "sentencepiece.bpe.model",
})  # fmt: skip
_SIDECAR_PATTERN = "*.tiktoken"
_ADAPTER_NAMES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_FOREIGN_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$", re.ASCII)


@dataclass(frozen=True, slots=True)
class Weights:
    """Where a directory keeps its tensors: the `name` of an index, or of the only safetensors file."""

    name: str
    is_index: bool


@dataclass(frozen=True, slots=True)
class _File:
    """One safetensors file of a checkpoint, header read."""

    fingerprint: FileFingerprint
    header: SafetensorsHeader


def open_checkpoint(store: Store, path: Path) -> Checkpoint:
    """Open a directory or a bare `.safetensors` file; reads headers, the index and names, never tensor bytes.

    A link given as `path` itself is followed; links inside a directory must stay in it, or in its hub cache folder.

    Raises:
        NotFoundError: the path, its weights or some shards do not exist.
        CorruptError: a header or the index lies, or a link leads out of the checkpoint.
        UnsupportedError: weights of another format, or an adapter.
        StorageError: the operating system refused to look.
    """
    found = _stat_given(path)
    if stat.S_ISDIR(found.st_mode):
        return _open_directory(store, path)
    if not stat.S_ISREG(found.st_mode):
        raise CorruptError.of("checkpoint.files.not_regular", path, "must be a directory or a regular file")
    if path.suffix != SUFFIX:
        raise UnsupportedError.of(
            "checkpoint.path.format", path, f"a single file must be a {SUFFIX} file", "convert it to safetensors"
        )
    return _checkpoint(path, path.parent, [_read_file(store, path.parent, path.name, found)], ())


def choose_weights(root: Path, names: Collection[str]) -> Weights:
    """Decide from the file names of the directory `root` which of them holds the tensors.

    Raises:
        NotFoundError, UnsupportedError, CorruptError: nothing, nothing readable, or no single answer.
    """
    visible = sorted(name for name in names if not name.startswith("."))
    indices = [name for name in visible if name.endswith(INDEX_SUFFIX)]
    singles = [name for name in visible if name.endswith(SUFFIX)]
    if INDEX_NAME in indices:
        return Weights(INDEX_NAME, is_index=True)
    if SINGLE_NAME in singles:
        return Weights(SINGLE_NAME, is_index=False)
    if any(name in visible for name in _ADAPTER_NAMES):
        raise UnsupportedError.of(
            "checkpoint.directory.adapter", root, "this is an adapter; adapters are not yet merged",
            "merge it into its base model first",
        )  # fmt: skip
    if len(indices) == 1:
        return Weights(indices[0], is_index=True)
    if not indices and len(singles) == 1:
        return _whole_file(root, singles[0])
    raise _no_weights(root, visible, indices or singles)


def _whole_file(root: Path, name: str) -> Weights:
    shard = _SHARD.search(name)
    if shard and int(shard[2]) > 1:
        raise CorruptError.of(
            "checkpoint.directory.incomplete", root,
            f"holds only {shown(name)}, one of {int(shard[2])} shards, and no {INDEX_NAME}", "download it again",
        )  # fmt: skip
    return Weights(name, is_index=False)


def _no_weights(root: Path, visible: list[str], candidates: list[str]) -> MergePipeError:
    if candidates:
        return CorruptError.of(
            "checkpoint.directory.ambiguous", root,
            f"there is neither {INDEX_NAME} nor {SINGLE_NAME}, but {len(candidates)} candidates: {_listed(candidates)}",
            "add the index of the shards, or name one file",
        )  # fmt: skip
    foreign = [name for name in visible if name.endswith(_FOREIGN_SUFFIXES)]
    if foreign:
        return UnsupportedError.of(
            "checkpoint.directory.format", root, f"holds {_listed(foreign)}: not yet read", "convert to safetensors"
        )
    return NotFoundError.of(
        "checkpoint.directory.no_weights", root, f"no {SUFFIX} file here, found: {_listed(visible) or 'nothing'}"
    )


def disagreements(weight_map: Mapping[str, str], stored: Mapping[str, Collection[str]]) -> Iterator[Problem]:
    """Compare the index (tensor -> shard) with what each shard stores (shard -> tensors), tensor by tensor."""
    homes: dict[str, list[str]] = {}
    for shard, tensors in stored.items():
        for tensor in tensors:
            homes.setdefault(tensor, []).append(shard)
    for tensor in sorted(weight_map.keys() | homes.keys()):
        found, listed = homes.get(tensor, []), weight_map.get(tensor)
        if found != [listed]:
            yield _disagreement(tensor, listed, found)


def _disagreement(tensor: str, listed: str | None, found: list[str]) -> Problem:
    what = f"tensor {shown(tensor)}"
    if len(found) > 1:
        code, message = "tensor_twice", f"{what} is stored in {len(found)} shards: {_listed(found)}"
    elif listed is None:
        code, message = "tensor_unlisted", f"{what} is stored in {shown(found[0])}, but the index does not list it"
    elif not found:
        code, message = "tensor_missing", f"{what} is listed in {shown(listed)}, which does not hold it"
    else:
        code, message = "tensor_misplaced", f"{what} is listed in {shown(listed)}, but stored in {shown(found[0])}"
    return Problem(f"checkpoint.index.{code}", "", message)


def _stat_given(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:  # ValueError: a NUL in the path
        raise NotFoundError.of("checkpoint.path.not_found", shown(str(path)), "there is no such path") from error
    except OSError as error:
        raise StorageError.of("storage.stat", path, f"cannot be looked at: {error.strerror}") from error


def _open_directory(store: Store, path: Path) -> Checkpoint:
    names = _list_names(path)
    weights = choose_weights(path, names)
    if weights.is_index:
        weight_map = _read_index(store, path, weights.name)
        if SINGLE_NAME in names and SINGLE_NAME not in weight_map.values():
            raise CorruptError.of(
                "checkpoint.directory.ambiguous", path,
                f"holds {SINGLE_NAME} beside {weights.name}, which does not name it", "remove one of them",
            )  # fmt: skip
        files = _read_shards(store, path, weights.name, weight_map)
    else:
        files = [_read_file(store, path, weights.name, _stat_present(path, weights.name))]
    return _checkpoint(path, path, files, _find_sidecars(path, names))


def _list_names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise StorageError.of("storage.list", folder, f"cannot be listed: {error.strerror}") from error


def _stat_present(root: Path, name: str) -> os.stat_result:
    found = stat_regular(root, name)
    if found is None:
        raise NotFoundError.of("checkpoint.files.dangling_link", root / name, "is a link to a file that does not exist")
    return found


def _read_file(store: Store, root: Path, name: str, found: os.stat_result) -> _File:
    # `found` was taken before the header is read: a change in between shows as a newer time stamp later.
    header = read_header(store, root / name)
    return _File(FileFingerprint(name, header.size_bytes, found.st_mtime_ns, header.header_digest), header)


def _read_index(store: Store, root: Path, name: str) -> dict[str, str]:
    _stat_present(root, name)
    path = root / name
    size_bytes = store.size_bytes(path)
    if size_bytes > MAX_INDEX_BYTES:
        raise CorruptError.of(
            "checkpoint.index.too_long", path, f"the index has {size_bytes} bytes, at most {MAX_INDEX_BYTES} are read"
        )
    raw = store.read_metadata(path, 0, size_bytes)
    return _weight_map(path, parse_object(raw, where=path, code="checkpoint.index"))


def _weight_map(path: Path, document: Mapping[str, JsonValue]) -> dict[str, str]:
    listed = document.get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CorruptError.of(
            "checkpoint.index.weight_map", path,
            f"'weight_map' must be a non-empty object of tensor names and shard names, found {shown(listed)}",
        )  # fmt: skip
    checked: dict[str, str] = {}
    for tensor, shard in listed.items():
        if not isinstance(shard, str):
            raise CorruptError.of(
                "checkpoint.index.weight_map", path,
                f"the shard of tensor {shown(tensor)} must be a string, found {shown(shard)}",
            )  # fmt: skip
        checked[tensor] = shard
    for shard in sorted(set(checked.values())):
        if not is_plain_name(shard) or not shard.endswith(SUFFIX):
            raise CorruptError.of(
                "checkpoint.index.shard_name", path,
                f"a shard must be a plain file name ending in {SUFFIX}, found {shown(shard)}",
            )  # fmt: skip
    return checked


def _read_shards(store: Store, root: Path, index_name: str, weight_map: Mapping[str, str]) -> list[_File]:
    """Read the header of every shard, in the order of their names, and check them against the index."""
    stats = {shard: stat_regular(root, shard) for shard in sorted(set(weight_map.values()))}
    missing = [shard for shard, found in stats.items() if found is None]
    if missing:
        where = str(root / index_name)
        raise NotFoundError(
            *(Problem("checkpoint.index.shard_missing", where, f"the shard {shown(s)} is missing") for s in missing)
        )
    files = [_read_file(store, root, shard, found) for shard, found in stats.items() if found is not None]
    stored = {file.fingerprint.name: [entry.name for entry in file.header.entries] for file in files}
    _raise_capped(root / index_name, disagreements(weight_map, stored))
    return files


def _raise_capped(path: Path, problems: Iterator[Problem]) -> None:
    first = list(islice(problems, MAX_PROBLEMS))
    if not first:
        return
    located = [Problem(p.code, str(path), p.message) for p in first]
    n_more = sum(1 for _ in problems)
    if n_more:
        located.append(Problem("checkpoint.index.more", str(path), f"and {n_more} more"))
    raise CorruptError(*located)


def _find_sidecars(root: Path, names: Collection[str]) -> tuple[str, ...]:
    """Names of the files that belong to the model beside its tensors, each checked to be a file of the checkpoint."""
    sidecars = [name for name in names if name in SIDECAR_NAMES or fnmatchcase(name, _SIDECAR_PATTERN)]
    if TEMPLATE_FOLDER in names and (root / TEMPLATE_FOLDER).is_dir():
        templates = _list_names(root / TEMPLATE_FOLDER)
        sidecars += [f"{TEMPLATE_FOLDER}/{name}" for name in templates if name.endswith(".jinja")]
    for name in sorted(sidecars):
        _stat_present(root, name)
    return tuple(sorted(sidecars))


def _checkpoint(path: Path, root: Path, files: list[_File], sidecars: tuple[str, ...]) -> Checkpoint:
    tensors: dict[str, TensorEntry] = {entry.name: entry for file in files for entry in file.header.entries}
    return Checkpoint(path, root, MappingProxyType(tensors), tuple(f.fingerprint for f in files), sidecars)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(shown(name) for name in names[:10]) + more
