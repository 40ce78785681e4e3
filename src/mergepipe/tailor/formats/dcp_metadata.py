"""The metadata of torch DCP directories as inert values that are changed and written back."""

from __future__ import annotations

from mergepipe.checkpoints.contained_files import is_plain_name
from mergepipe.checkpoints.formats.inert_pickle import load_inert
from mergepipe.checkpoints.formats.inert_values import Record
from mergepipe.errors import MismatchError, UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.limits import PICKLE_BYTES
from mergepipe.storage.location import Location
from mergepipe.tailor.composition.archives.torch_writer import Size
from mergepipe.tailor.formats.dcp import METADATA_NAME
from mergepipe.tailor.formats.pickle_node import Node

_SIZED_FIELDS = {
    "TensorStorageMetadata": ("size",),
    "ChunkStorageMetadata": ("offsets", "sizes"),
    "MetadataIndex": ("offset",),
}
_DESCRIBED = "state_dict_metadata"
_STORED = "storage_data"
_KEYS = "planner_data"
_MAX_NAMED = 3


def read_dcp_metadata(store: Store, folder: Location) -> object:
    """Read `.metadata`; shapes are `Size`, so that it can be written back."""
    path = folder / METADATA_NAME
    metadata = load_inert(store.read_small(path, PICKLE_BYTES), str(path))
    _restore_sizes(metadata)
    return metadata


def _restore_sizes(root: object) -> None:
    """Make shapes `torch.Size` again, which the inert reader turns into tuples."""
    waiting, seen = [root], set()
    while waiting:
        value = waiting.pop()
        if not isinstance(value, dict | list | tuple | Record) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            waiting.extend([*value, *value.values()])
        elif isinstance(value, Record):
            waiting.append(value.state)
            state = value.state if isinstance(value.state, dict) else {}
            for field in _SIZED_FIELDS.get(value.kind.name, ()):
                if isinstance(state.get(field), tuple):
                    state[field] = Size(state[field])
        else:
            waiting.extend(value)


def merge_state(metadata: object, folder: Location, state: object, state_folder: Location) -> dict[str, str]:
    """Take every entry of `state` into `metadata` (changed in place), in place of entries of the same key.

    Returns the state's files with the names they must have beside `metadata`.

    Raises:
        MismatchError: `metadata` has values that are no tensors and that the state lacks.
        UnsupportedError: the state's files do not lie in its directory.
    """
    metadata_root, new = _root(metadata, folder), _root(state, state_folder)
    described, added = metadata_root.get(_DESCRIBED).mapping(), new.get(_DESCRIBED).mapping()
    lacking = [str(k) for k, v in described.items() if _is_plain_value(v) and k not in added]
    if lacking:
        more = f" and {len(lacking) - _MAX_NAMED} more" if len(lacking) > _MAX_NAMED else ""
        raise MismatchError.of(
            "tailor.state.files", state_folder, f"lacks {', '.join(lacking[:_MAX_NAMED])}{more}, which {folder} holds",
            "save the same state with every partial checkpoint, or name a complete one in state_from",
        )  # fmt: skip
    described.update(added)
    keys, added_keys = metadata_root.find(_KEYS), new.find(_KEYS)
    if keys is not None and added_keys is not None:
        keys.mapping().update(added_keys.mapping())
    stored = metadata_root.get(_STORED).mapping()
    for index in [index for index in stored if _key(index, metadata_root) in added]:
        del stored[index]
    renamed: dict[str, str] = {}
    for index, place in new.get(_STORED).items():
        fields = place.fields("_StorageInfo")
        relative = fields.get("relative_path").text()
        if not is_plain_name(relative):
            raise UnsupportedError.of("tailor.state.files", state_folder, f"its state lies in {relative[:80]!r}")
        renamed[relative] = f"state-{relative}"
        fields.mapping()["relative_path"] = renamed[relative]
        stored[index] = place.value
    return renamed


def _root(metadata: object, folder: Location) -> Node:
    return Node(metadata, str(folder / METADATA_NAME)).fields("Metadata")


def _is_plain_value(described: object) -> bool:
    """Whether an entry is no tensor."""
    return isinstance(described, Record) and described.kind.name == "BytesStorageMetadata"


def _key(index: object, where: Node) -> str:
    return Node(index, where.file, where.path).fields("MetadataIndex").get("fqn").text()
