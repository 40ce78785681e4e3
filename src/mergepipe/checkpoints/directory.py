"""A Hugging Face directory, or one bare file of weights, opened as a checkpoint."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Final

from mergepipe.checkpoints.config_files import _HINT, _parsed, parse_config
from mergepipe.checkpoints.contract import GGUF_SUFFIX, Checkpoint, CheckpointFile, Readable, TensorEntry
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.checkpoints.sharded_tensors import ShardedTensor, joined_shards
from mergepipe.checkpoints.torch_file import SUFFIXES as TORCH_SUFFIXES
from mergepipe.checkpoints.torch_file import read_torch_weights
from mergepipe.checkpoints.vocabulary import CONFIG_NAME
from mergepipe.core.strict_json import JsonValue, object_members, shown
from mergepipe.core.units import first_names
from mergepipe.errors import (
    CorruptError,
    MergePipeError,
    NotFoundError,
    Problem,
    UnsupportedError,
    damaged,
    unsupported,
)
from mergepipe.storage.contract import (
    CONFIG_BYTES,
    WEIGHT_INDEX_BYTES,
    FileId,
    FileKind,
    FileStatus,
    Store,
    is_file,
    is_folder,
    map_at_once,
)
from mergepipe.storage.location import Location

# --- check the files that a checkpoint directory names ---
# regular ones inside it, or blobs of the same hub cache folder


def is_contained(name: str) -> bool:
    """Whether a relative name lies inside the folder that it is relative to."""
    path = PurePosixPath(name)
    return bool(name) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def is_plain_name(name: str) -> bool:
    """Whether `name` is one file name: no separator of any system, no `.` or `..`, printable as UTF-8."""
    if name in ("", ".", "..") or "/" in name or "\\" in name:
        return False
    return not any(unicodedata.category(c) in ("Cc", "Cs") for c in name)


def require_text_path(path: Location) -> None:
    """Check that the absolute form of a path can be written into a record of what was read."""
    text = str(path.normal())
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "has bytes that are not UTF-8, and records are UTF-8"
        raise UnsupportedError.of("path.encoding", ascii(text), message, "rename it") from None


def stat_regular(store: Store, root: Location, name: str) -> FileStatus | None:
    """Look up the file `name` (relative, posix) of the checkpoint directory `root`; None if there is none."""
    if not all(is_plain_name(part) for part in name.split("/")):
        raise damaged(root, f"the file name {shown(name)} cannot be used")
    path = root / name
    target = store.real_path(path)
    status = None if target is None else store.stat(target)
    if target is None or status is None:
        return None
    _check_contained(path, target, store.real_path(root) or root)
    if not status.is_file:
        raise damaged(path, "must be a regular file")
    return status


def is_linked_folder(store: Store, folder: Location, name: str) -> bool:
    """Whether the folder `name` of `folder` is a link, so that what is below it lies elsewhere too."""
    return store.real_path(folder / name) != (store.real_path(folder) or folder) / name


def _check_contained(path: Location, target: Location, root: Location) -> None:
    """Check that what the link `path` leads to belongs to the checkpoint in `root` (both resolved)."""
    if target.is_relative_to(root):
        return
    blobs = _hub_blobs(root)
    if blobs is not None and target.is_relative_to(blobs):
        return
    raise damaged(path, f"is a link to {target}, outside the checkpoint {root}", "copy the file into the checkpoint")


def _hub_blobs(root: Location) -> Location | None:
    """The blob folder that links of a hub cache snapshot (`models--X/snapshots/REV[/...]`) point into."""
    for folder in (root, *root.parents):
        snapshots, repository = folder.parent, folder.parent.parent
        if snapshots.name == "snapshots" and repository.name.startswith("models--"):
            return repository / "blobs"
    return None


# --- choose the file of a directory that holds the weights, from the names alone ---


SAFETENSORS_SUFFIXES = (".safetensors",)
ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_NAMES = ("adapter_model.safetensors", "adapter_model.bin", "adapters.safetensors")
STORE_HEADER_NAME = "mergepipe-store.json"
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.[a-z]+$", re.ASCII)
_INDEX_ENDING = ".index.json"
_INDEX = re.compile(r".*(?P<suffix>\.\w+)\.index(\.\w+)?\.json", re.ASCII)  # of a variant: `.index.fp16.json`
_DCP_SHARD = re.compile(r"shard-(\d+)-model-(\d+)-of-(\d+)\.safetensors", re.ASCII)  # of torch's Hugging Face writer
GGUF_MAGIC = b"GGUF"
_FOREIGN_SUFFIXES = (".gguf", ".h5", ".msgpack", ".onnx")
_LFS_POINTER = b"version https://git-lfs"
# What training leaves beside the weights, in files of the same kind.
_NOT_WEIGHTS = (
    "training_args.bin", "optimizer*", "scheduler*", "scaler*", "rng_state*", "*optim_states.pt", "adapter_model.*",
    "adapters.safetensors", "*_adapters.safetensors", "*.distcp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Format:
    """The file names of one format. `single` and `index` win over other names."""

    suffixes: tuple[str, ...]
    single: str
    index: str

    def files(self, names: Sequence[str]) -> list[str]:
        return [
            name for name in names
            if name.endswith(self.suffixes) and not any(fnmatchcase(name, other) for other in _NOT_WEIGHTS)
        ]  # fmt: skip

    def indices(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if (match := _INDEX.fullmatch(name)) and match["suffix"] in self.suffixes]


SAFETENSORS = _Format(SAFETENSORS_SUFFIXES, "model.safetensors", f"model.safetensors{_INDEX_ENDING}")
TORCH = _Format(TORCH_SUFFIXES, "pytorch_model.bin", f"pytorch_model.bin{_INDEX_ENDING}")


def is_adapter(names: Collection[str]) -> bool:
    """Whether a directory holds an adapter and no weights of a model beside it."""
    if ADAPTER_CONFIG_NAME not in names and not any(name in names for name in ADAPTER_NAMES):
        return False
    return not _has_weights(names)


def torch_shards(names: Collection[str]) -> list[str]:
    """List the shards of torch's Hugging Face writer that are all the weights of a folder."""
    files = SAFETENSORS.files(_visible(names))
    is_all = bool(files) and all(map(_DCP_SHARD.fullmatch, files)) and not SAFETENSORS.indices(files)
    return files if is_all else []


def choose_weights(root: Location, names: Collection[str], hint: str = "") -> str:
    """Decide from the file names of the directory `root` which of them holds the tensors; safetensors come first.

    Returns the name of an index (`.json`), or of the only file of weights. `hint` says what to do where there is none.
    """
    visible = _visible(names)
    if STORE_HEADER_NAME in names:
        message = f"is a delta store (it has a {STORE_HEADER_NAME}), read only as an expert of a recipe"
        hint = "restore the model with `mergepipe unpack`, and use the restored model"
        raise UnsupportedError.of("model.unsupported", root, message, hint)
    for fmt in (SAFETENSORS, TORCH):
        if preferred := [name for name in (fmt.index, fmt.single) if name in visible]:
            return preferred[0]
        indices, singles = fmt.indices(visible), fmt.files(visible)
        if len(indices) == 1:
            return indices[0]
        candidates = indices or singles
        if len(candidates) > 1:
            listed = f"{len(candidates)} candidates: {names_shown(candidates)}"
            message = f"there is neither {fmt.index} nor {fmt.single}, but {listed}"
            raise damaged(root, message, "add the index of the shards, or name one file")
        if singles:
            shard = _SHARD.search(singles[0])
            if shard and int(shard[2]) > 1:
                message = f"holds only {shown(singles[0])}, one of {int(shard[2])} shards, and no {fmt.index}"
                raise damaged(root, message, "download it again")
            return singles[0]
    raise _no_weights(root, visible, hint)


def _visible(names: Collection[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def _no_weights(root: Location, visible: list[str], hint: str) -> MergePipeError:
    if is_adapter(visible):
        message = "this is an adapter, which needs its base"
        hint = "use it as an expert, or write base+adapter; `mergepipe lora merge` merges adapters alone"
        return unsupported(root, message, hint)
    foreign = [name for name in visible if name.endswith(_FOREIGN_SUFFIXES)]
    if gguf := [name for name in foreign if name.endswith(GGUF_SUFFIX)]:
        message = f"holds {names_shown(gguf)}, GGUF files"
        return unsupported(root, message, f"name the file: {root / gguf[0]}")
    if foreign:
        return unsupported(root, f"holds {names_shown(foreign)}: not yet read", "convert to safetensors")
    message = f"no weights here, found: {names_shown(visible) or 'nothing'}"
    if "snapshots" in visible:  # of the Hub
        hint = f"give the folder of a revision: {root / 'snapshots'}/..."
    return NotFoundError.of("checkpoint.incomplete", root, message, hint)


def hint_of_adapters(store: Store, root: Location, names: Iterable[str]) -> str:
    """Say which of the names in the folder `root` are folders of adapters; empty where none of the first is."""
    folders = []
    for name in sorted(names)[:_MOST_FOLDERS]:
        if is_folder(store, root / name) and ADAPTER_CONFIG_NAME in list_names(store, root / name):
            folders.append(name)
    return f"name one of the adapters in it: {names_shown(folders)}" if folders else ""


def names_shown(names: Sequence[str]) -> str:
    """At most ten names for a message."""
    return first_names([shown(name) for name in names], 10)


# --- a Hugging Face directory, or one bare file of weights, opened as a checkpoint ---


MAX_PROBLEMS = 20
_MOST_FOLDERS = 50
TEMPLATE_FOLDER = "additional_chat_templates"
# Code (*.py named by auto_map) is left out on purpose: nothing executable passes from an input to an output.
SIDECAR_NAMES = frozenset({
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tekken.json", "vocab.json", "vocab.txt", "merges.txt",
    "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json",
    "hf_quant_config.json",
    "spiece.model", "sentencepiece.bpe.model",
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "model_index.json",
})  # fmt: skip
_SIDECAR_PATTERNS = ("*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*", "COPYING*", "USE_POLICY*")
MODULES_NAME = "modules.json"  # of sentence-transformers: a list of modules with their folders
PIPELINE_NAME = "model_index.json"  # of diffusers: each component's folder, with its library and class
_COMPONENT_SUFFIXES = (".json", ".txt", ".model", ".jinja")  # of small files in the folders of components
_MODEL_STEM, _PIPELINE_STEM = "model", "diffusion_pytorch_model"
# Without variants (`diffusion_pytorch_model.fp16.safetensors`), which loaders read on request alone.
_OF_PIPELINE = re.compile(rf"{_PIPELINE_STEM}(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?", re.ASCII)
_LOADED_NAME = re.compile(rf"model(-\d+-of-\d+)?\.safetensors|pytorch_model(-\d+-of-\d+)?\.bin|{_OF_PIPELINE.pattern}")
_COPIES = ("checkpoint-*", "global_step*", "original", ".*")  # folders with the same model in another form or state


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of tensors: what it says it holds."""

    source: CheckpointFile
    entries: tuple[TensorEntry, ...]
    offsets: Mapping[str, tuple[int, ...]] | None = None  # of a shard: see `WeightHeader`
    metadata: Mapping[str, str] = field(default_factory=dict)


def open_checkpoint(store: Store, path: Location) -> Checkpoint:
    """Open a directory or a bare file of weights; reads headers, the index and names, never tensor bytes.

    A link given as `path` itself is followed; links inside a directory must stay in it, or in its hub cache folder.
    """
    status = store.stat(path)
    if status is None:
        raise NotFoundError.of("model.not-found", shown(str(path)), "there is no such path")
    if status.is_folder:
        return _open_directory(store, path)
    if not status.is_file:
        raise damaged(path, "must be a directory or a regular file")
    if path.suffix == GGUF_SUFFIX:
        from mergepipe.checkpoints.gguf_files import open_gguf

        _refuse_other(store, path)
        return open_gguf(store, path, status)
    suffixes = (*SAFETENSORS.suffixes, *TORCH.suffixes, GGUF_SUFFIX)
    if path.suffix not in suffixes:
        _refuse_other(store, path)
        message = f"a single file must end in one of {', '.join(suffixes)}"
        raise unsupported(path, message, "name its folder" if path.suffix == ".json" else "convert it to safetensors")
    file = read_weight_file(store, path.parent, path.name, status)
    is_part = any(any(offsets) for offsets in (file.offsets or {}).values())
    if is_part or (file.offsets is not None and _DCP_SHARD.fullmatch(path.name)):
        message = "is a shard of torch's Hugging Face writer: it holds one rank's part of each tensor"
        raise unsupported(path, message, f"name its folder, with the shards of all ranks: {path.parent}")
    return _checkpoint(path, path.parent, [file], ())


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
        message = f"{what} is stored in {len(homes)} shards: {names_shown(homes)}"
    elif listed is None:
        message = f"{what} is stored in {shown(homes[0])}, but the index does not list it"
    elif not homes:
        message = f"{what} is listed in {shown(listed)}, which does not hold it"
    else:
        message = f"{what} is listed in {shown(listed)}, but stored in {shown(homes[0])}"
    return Problem("checkpoint.damaged", "", message)


def _open_directory(store: Store, path: Location) -> Checkpoint:
    entries = store.list(path)
    names = frozenset(entry.name for entry in entries)
    folders = {folder: list_names(store, path / folder) for folder in _listed_components(store, path, names)}
    components = {folder: stem for folder, listed in folders.items() if (stem := _component_stem(listed))}
    at_root = _has_weights(names) and not (components and PIPELINE_NAME in names)
    files = _read_weights(store, path, names) if at_root else []
    for folder in components:
        files += _read_component(store, path, folder, folders[folder])
    if files or CONFIG_NAME in names:  # and no folder of models
        tensors = {stored_name(entry.name, file.source.id.name) for file in files for entry in file.entries}
        candidates = [entry.name for entry in entries if entry.kind is FileKind.FOLDER and entry.name not in folders]
        for folder, listed, own in _unlisted_components(store, path, candidates, tensors):
            folders[folder], components[folder] = listed, _component_stem(listed)
            files += own
    if not files:
        choose_weights(path, names, hint_of_adapters(store, path, names))  # tells what is there instead
    sidecars = find_sidecars(store, path, names, folders)
    opened = _checkpoint(path, path, files, sidecars)
    ignored = _ignored(names, {file.source.id.name for file in files}) if at_root else ()
    return replace(opened, components=MappingProxyType(components), ignored=ignored)


def _ignored(names: Collection[str], used: Collection[str]) -> tuple[str, ...]:
    """List the files of weights of a folder that are not read: of the format that is, and adapters."""
    formats = [fmt for fmt in (SAFETENSORS, TORCH) if any(name.endswith(fmt.suffixes) for name in used)]
    weights = [name for fmt in formats for name in fmt.files(_visible(names)) if name not in used]
    adapters = [name for name in ADAPTER_NAMES if name in names]
    return (*weights, *adapters)


def _read_weights(store: Store, path: Location, names: Collection[str]) -> list[WeightFile]:
    """Read what the weight files of a folder say they hold."""
    if shards := torch_shards(names):
        return _read_torch_shards(store, path, shards)
    name = choose_weights(path, names)
    if not name.endswith(".json"):
        return [read_weight_file(store, path, name, stat_present(store, path, name))]
    stat_present(store, path, name)
    weight_map = _weight_map(path / name, store.read_small(path / name, WEIGHT_INDEX_BYTES))
    single = next(fmt.single for fmt in (SAFETENSORS, TORCH) if name.startswith(fmt.single) or fmt is TORCH)
    if single in names and single not in weight_map.values():
        raise damaged(path, f"holds {single} and {name}, which does not name it", "remove one of them")
    return _read_shards(store, path, name, weight_map)


def _read_torch_shards(store: Store, root: Location, names: Sequence[str]) -> list[WeightFile]:
    """Read the headers of the shards of all ranks; their tensors are put together by `_checkpoint`."""
    matches = [match for name in names if (match := _DCP_SHARD.fullmatch(name))]
    ranks = {int(match[1]) for match in matches}
    gone = next((rank for rank in range(1, max(ranks) + 1) if rank not in ranks), None)
    if gone is not None:
        message = f"holds shards of the ranks up to {max(ranks)}, and none of rank {gone}"
        raise NotFoundError.of("checkpoint.incomplete", root, message, "copy the files of all ranks")
    read = partial(read_weight_file, store, root)
    return map_at_once(store, [root], lambda name: read(name, stat_present(store, root, name)), names)


# --- packed experts: what opens them is named here, and loaded with the first of them ---


_OPENER: Final = "mergepipe.deltastore.checkpoint"


def is_packed(store: Store, path: Location) -> bool:
    """Whether `path` is the folder of a packed expert."""
    return is_file(store, path / STORE_HEADER_NAME)


def open_packed_expert(store: Store, path: Location, base: Checkpoint | None) -> Checkpoint:
    """Open a packed expert as the full checkpoint that was packed, relative to `base` if any; reads its header."""
    opened: Checkpoint = import_module(_OPENER).open_store(store, path, base)
    return opened


# --- components: folders of a model with weights of their own ---


def _listed_components(store: Store, root: Location, names: Collection[str]) -> list[str]:
    """The folders that the lists of modules and of a pipeline name, in their order, of those that are there."""
    listed: list[object] = []
    for name in (MODULES_NAME, PIPELINE_NAME):
        if name in names:
            stat_present(store, root, name)
            listed += _listed_folders(root / name, store.read_small(root / name, CONFIG_BYTES))
    folders: list[str] = []
    for folder in dict.fromkeys(folder for folder in listed if folder):
        if not isinstance(folder, str) or not all(is_plain_name(part) for part in folder.split("/")):
            raise damaged(root, f"the folder {shown(folder)} of a module cannot be used")
        if is_folder(store, root / folder):
            target = store.real_path(root / folder)
            _check_contained(root / folder, target or root / folder, store.real_path(root) or root)
            folders.append(folder)
    return folders


def _listed_folders(path: Location, raw: bytes) -> Iterator[object]:
    """The folders of `modules.json`, `[{"path": FOLDER}]`, or of `model_index.json`, `{FOLDER: [LIBRARY, CLASS]}`."""
    if path.name == PIPELINE_NAME:
        content = parse_config(raw, path)
        yield from (folder for folder, value in content.items() if isinstance(value, list) and any(value))
        return
    modules = _parsed(raw, path)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise damaged(path, f"is not a list of modules, found {shown(modules)}", _HINT)
    yield from (str(module.get("path", "")).rstrip("/") for module in modules)


def _unlisted_components(
    store: Store, root: Location, folders: Iterable[str], tensors: Collection[str]
) -> Iterator[tuple[str, frozenset[str], list[WeightFile]]]:
    """Read those of some folders that hold weights under names that loaders look for: their names, and the weights.

    The model once more is no component: a training checkpoint, `original`, the architecture of the model itself, or
    nothing but `tensors` of it.
    """
    others = [folder for folder in folders if not any(fnmatchcase(folder, pattern) for pattern in _COPIES)]
    listed = {folder: list_names(store, root / folder) for folder in others}
    loaded = [folder for folder, names in listed.items() if any(map(_LOADED_NAME.fullmatch, names))]
    own = _architecture(store, root) if loaded else None
    for folder in loaded:
        if is_linked_folder(store, root, folder) or (own and own == _architecture(store, root / folder)):
            continue
        names = listed[folder]
        files = _read_component(store, root, folder, names)
        if any(stored_name(entry.name, f"{folder}/") not in tensors for file in files for entry in file.entries):
            yield folder, names, files


def _architecture(store: Store, folder: Location) -> object:
    """What the configuration in a folder says that its model is; None where there is none."""
    path = folder / CONFIG_NAME
    if not is_file(store, path):
        return None
    return parse_config(store.read_small(path, CONFIG_BYTES), path).get("architectures")


def _read_component(store: Store, root: Location, folder: str, names: Collection[str]) -> list[WeightFile]:
    """Read what the weight files of a component say they hold; files and tensors are named by its folder."""
    files = []
    for file in _read_weights(store, root / folder, list(filter(_OF_PIPELINE.fullmatch, names)) or names):
        entries = tuple(replace(entry, name=f"{folder}/{entry.name}") for entry in file.entries)
        below_root = replace(file.source.id, name=f"{folder}/{file.source.id.name}")
        files.append(replace(file, source=replace(file.source, id=below_root), entries=entries))
    return files


def _has_weights(names: Collection[str]) -> bool:
    visible = _visible(names)
    return any(fmt.files(visible) or fmt.indices(visible) for fmt in (SAFETENSORS, TORCH))


def _component_stem(names: Collection[str]) -> str:
    """Return the beginning of the names of a component's weight files; empty where it has no weights."""
    if not _has_weights(names):
        return ""
    return _PIPELINE_STEM if any(name.startswith(_PIPELINE_STEM) for name in names) else _MODEL_STEM


def component_of(tensor: str, folders: Iterable[str]) -> str:
    """The folder, of those of a checkpoint's components, that a tensor belongs to; empty for its own folder."""
    return max((folder for folder in folders if tensor.startswith(f"{folder}/")), key=len, default="")


def stored_name(tensor: str, file: str) -> str:
    """The name of a tensor in the header of its file: without the folder of its component."""
    folder = file.rpartition("/")[0]
    return tensor.removeprefix(f"{folder}/") if folder else tensor


def list_names(store: Store, folder: Location) -> frozenset[str]:
    """The names in a directory."""
    return frozenset(entry.name for entry in store.list(folder))


def stat_present(store: Store, root: Location, name: str) -> FileStatus:
    """Look up a file that was listed."""
    status = stat_regular(store, root, name)
    if status is None:
        raise NotFoundError.of("checkpoint.incomplete", root / name, "is a link to a file that does not exist")
    return status


def read_weight_file(store: Store, root: Location, name: str, status: FileStatus) -> WeightFile:
    """Read what the file `name` of the directory `root` says it holds, whatever its format.

    `status` was taken before: a change in between shows as another version later.
    """
    path = root / name
    try:
        header = (read_torch_weights if path.suffix in TORCH.suffixes else read_header)(store, path)
    except (CorruptError, UnsupportedError):
        _refuse_other(store, path)
        raise
    identity = FileId(name, header.size_bytes, status.version, header.digest)
    return WeightFile(CheckpointFile(path, identity), header.entries, header.offsets, header.metadata)


def _refuse_other(store: Store, path: Location) -> None:
    """Refuse a file that is no weights, or GGUF, by its first bytes, whatever it is called."""
    start = store.read_metadata(path, 0, len(_LFS_POINTER))
    refuse_pointer(path, start)
    if start.startswith(GGUF_MAGIC) and path.suffix != GGUF_SUFFIX:
        hint = f"rename it to {path.stem}{GGUF_SUFFIX}"
        raise unsupported(path, "is a GGUF file by its first bytes", hint)


def refuse_pointer(path: Location, start: bytes) -> None:
    """Refuse a file that begins as a pointer of git LFS does."""
    if start.startswith(_LFS_POINTER):
        raise damaged(path, "is a git LFS pointer instead of the file", "fetch it with `git lfs pull`")


def _weight_map(path: Location, raw: bytes) -> dict[str, str]:
    """Parse an index: the shard of each tensor. Memory: 6 times the index."""
    checked: dict[str, str] = {}
    shards: dict[str, str] = {}  # one text each, however often it is named
    listed: JsonValue = {}
    for outer, key, value in object_members(raw, where=path, code="checkpoint.damaged", nested="weight_map"):
        if not outer:
            listed = value if key == "weight_map" else listed
        elif isinstance(value, str):
            checked[key] = shards.setdefault(value, value)
        else:
            raise damaged(path, f"the shard of tensor {shown(key)} must be a string, found {shown(value)}")
    if not checked:
        message = f"'weight_map' must be a non-empty object of tensor names and shard names, found {shown(listed)}"
        raise damaged(path, message)
    suffixes = next(fmt.suffixes for fmt in (SAFETENSORS, TORCH) if fmt.indices([path.name]))
    for shard in sorted(shards):
        if not is_plain_name(shard) or not shard.endswith(suffixes):
            message = f"a shard must be a plain file name ending in {' or '.join(suffixes)}, found {shown(shard)}"
            raise damaged(path, message)
    return checked


def _read_shards(store: Store, root: Location, index_name: str, weight_map: Mapping[str, str]) -> list[WeightFile]:
    """Read the header of every shard, in the order of their names, and check them against the index."""
    shards = sorted(set(weight_map.values()))
    statuses = map_at_once(store, [root], lambda shard: stat_regular(store, root, shard), shards)
    stats = dict(zip(shards, statuses, strict=True))
    missing = [shard for shard, status in stats.items() if status is None]
    if missing:
        where = str(root / index_name)
        raise NotFoundError(
            *(Problem("checkpoint.incomplete", where, f"the shard {shown(s)} is missing") for s in missing)
        )
    present = [(shard, status) for shard, status in stats.items() if status is not None]
    files = map_at_once(store, [root], lambda pair: read_weight_file(store, root, *pair), present)
    stored = {file.source.id.name: [entry.name for entry in file.entries] for file in files}
    _raise_capped(root / index_name, disagreements(weight_map, stored))
    return files


def _raise_capped(path: Location, problems: Iterator[Problem]) -> None:
    first = list(islice(problems, MAX_PROBLEMS))
    if not first:
        return
    located = [Problem(p.code, str(path), p.message) for p in first]
    n_more = sum(1 for _ in problems)
    if n_more:
        located.append(Problem("problems.more", str(path), f"and {n_more} more"))
    raise CorruptError(*located)


def find_sidecars(
    store: Store, root: Location, names: Collection[str], folders: Mapping[str, Collection[str]] = MappingProxyType({})
) -> tuple[str, ...]:
    """Names of the files that belong to the model beside its tensors, each checked to be a file of the checkpoint.

    `folders` are the names in the folders of its components.
    """
    sidecars = [
        name for name in names
        if name in SIDECAR_NAMES or any(fnmatchcase(name, pattern) for pattern in _SIDECAR_PATTERNS)
    ]  # fmt: skip
    if TEMPLATE_FOLDER in names and is_folder(store, root / TEMPLATE_FOLDER):
        templates = list_names(store, root / TEMPLATE_FOLDER)
        sidecars += [f"{TEMPLATE_FOLDER}/{name}" for name in templates if name.endswith(".jinja")]
    for folder, files in folders.items():
        small = (name for name in files if name.endswith(_COMPONENT_SUFFIXES) and not _INDEX.fullmatch(name))
        sidecars += [f"{folder}/{name}" for name in small]
    for name in sorted(sidecars):
        stat_present(store, root, name)
    return tuple(sorted(sidecars))


_WRAPPERS = frozenset({"_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def without_wrappers(name: str) -> str:
    """Return the name of a tensor without the modules that torch.compile, FSDP and Lightning wrap around others."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _checkpoint(path: Location, root: Location, files: list[WeightFile], sidecars: tuple[str, ...]) -> Checkpoint:
    stored: dict[str, Readable] = {entry.name: entry for file in files for entry in file.entries}
    stored |= _joined(root, [file for file in files if file.offsets is not None])
    tensors: dict[str, Readable] = {}
    for name, tensor in stored.items():
        plain = without_wrappers(name)
        if plain in tensors:
            message = f"{shown(name)} and another tensor are both {shown(plain)}, without the wrappers of training"
            raise damaged(path, message, "save the model again, unwrapped")
        tensors[plain] = tensor if plain == name else _renamed(tensor, plain)
    return Checkpoint(path, root, MappingProxyType(tensors), tuple(file.source for file in files), sidecars)


def _renamed(tensor: Readable, name: str) -> Readable:
    """Return a stored tensor, or one that is put together of shards, under another name."""
    match tensor:
        case TensorEntry():
            return replace(tensor, name=name)
        case ShardedTensor():
            return replace(tensor, name=name)
    raise TypeError(f"{tensor.name} is not read as it is stored")


def _joined(root: Location, files: Iterable[WeightFile]) -> dict[str, Readable]:
    """Put the tensors of shards together."""
    shards: dict[str, list[tuple[tuple[int, ...], TensorEntry]]] = {}
    for file in files:
        offsets = file.offsets or {}
        for entry in file.entries:
            stored = stored_name(entry.name, file.source.id.name)
            shards.setdefault(entry.name, []).append((offsets[stored], entry))
    return {name: joined_shards(name, parts, root) for name, parts in shards.items()}
