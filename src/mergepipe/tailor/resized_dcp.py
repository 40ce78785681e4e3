"""Lay out torch DCP directories anew: stored items are copied whole, under the keys of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from mergepipe.checkpoints.inert_pickle import Record
from mergepipe.checkpoints.torch_file import read_torch_zip
from mergepipe.checkpoints.zip_directory import Window
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.archives import new_archive
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Literal, Segment
from mergepipe.tailor.formats.contract import Node, root_of
from mergepipe.tailor.formats.dcp import METADATA_NAME, read_dcp_metadata, tensor_keys
from mergepipe.tailor.pickle_writer import InertPickler
from mergepipe.tailor.resized_model import ResizedModel, no_other_layers
from mergepipe.tailor.restacking import names_after, restacked_names

_PARAMETER_LIST = re.compile(r"(?:.*\.)?param_groups\.\d+\.params", re.ASCII)
_PARAMETER_OPTION = re.compile(r"(?:.*\.)?param_groups\.(?P<parameter>.+)\.[^.]+", re.ASCII)  # flattened options


def dcp_files(result: ResizedModel) -> Iterator[FilePlan]:
    partial = next((source for source in result.assignment.sources if source.is_partial), None)
    if partial is not None:
        raise no_other_layers(
            partial.path, "is partial", "compose a complete checkpoint first, and stack the layers of that"
        )
    yield from _DcpFiles(result).plans()


@dataclass(frozen=True, slots=True)
class _Item:
    """One stored item: its entry of the index, and its place."""

    index: Record
    info: Record
    file: Location
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Directory:
    """What a DCP directory's metadata says of each key, and the keys of its tensors by parameter and kind."""

    described: Mapping[object, object]
    planned: Mapping[object, object]
    items: Mapping[str, list[_Item]]
    keys: Mapping[tuple[str, str], str]


def _read_directory(store: Store, folder: Location) -> _Directory:
    root = Node(read_dcp_metadata(store, folder), METADATA_NAME).fields("Metadata")
    items: dict[str, list[_Item]] = {}
    for index, node in root.get("storage_data").items():
        fields = node.fields("_StorageInfo")
        key = Node(index, node.file, node.path).fields("MetadataIndex").get("fqn").text()
        if not isinstance(index, Record) or not isinstance(node.value, Record):
            raise AssertionError("the checkpoint was read")
        file = (folder.absolute() / fields.get("relative_path").text()).normal()
        item = _Item(index, node.value, file, fields.get("offset").integer(), fields.get("length").integer())
        items.setdefault(key, []).append(item)
    planned = root.find("planner_data")
    described = root.get("state_dict_metadata").mapping()
    return _Directory(described, {} if planned is None else planned.mapping(), items, tensor_keys(store, folder))


class _DcpFiles:
    """Collects stored items in files named as those that they come from, and the metadata that finds them there."""

    def __init__(self, result: ResizedModel) -> None:
        self._result = result
        self._files: dict[str, list[Segment]] = {}
        self._sizes: dict[str, int] = {}
        self._described: dict[object, object] = {}
        self._planned: dict[object, object] = {}
        self._stored: dict[object, object] = {}
        sources = result.assignment.sources
        self._directories = [_read_directory(result.store, source.path) for source in sources]
        self._skeleton = self._directories[result.assignment.skeleton_index]

    def plans(self) -> Iterator[FilePlan]:
        """Plan the files of items and the metadata."""
        model = self._result.model
        for name, kind in model.states:
            self._take(name, kind)
        for counter in model.steps:
            for name in counter.parameters:
                self._take(name, "step")
        of_model = {*self._skeleton.keys.values()}
        for key in self._skeleton.described:
            if isinstance(key, str) and key not in of_model:
                self._keep(key)
        for file, segments in self._files.items():
            yield FilePlan(file, tuple(segments))
        metadata = read_dcp_metadata(self._result.store, self._result.skeleton.path)
        fields = Node(metadata, METADATA_NAME).fields("Metadata").mapping()
        fields["state_dict_metadata"] = self._described
        fields["storage_data"] = self._stored
        if fields.get("planner_data") is not None:
            fields["planner_data"] = self._planned
        yield FilePlan(METADATA_NAME, (Literal(InertPickler().dump(metadata)),))

    def _take(self, name: str, kind: str) -> None:
        """Copy the items of a tensor of the model from its source."""
        assignment = self._result.assignment
        origin = assignment.origin(name)
        owner = self._result.model.units.tied.get(name, name)
        source = self._directories[assignment.source_of[owner]]
        old = source.keys[origin, kind]
        form = self._skeleton.keys[origin, kind]
        key = _renamed(form, origin, name)
        self._describe(key, source.described[old], form, origin, name)
        for item in source.items.get(old, ()):
            self._store(key, item, (CopyRange(item.file, item.offset, item.nbytes, is_skeleton=False),))

    def _keep(self, key: str) -> None:
        """Copy what is no tensor of the model: options of a parameter to every position that it gets."""
        skeleton = self._result.skeleton
        pairs = restacked_names(skeleton.parameters, self._result.layers)
        option = _PARAMETER_OPTION.fullmatch(key)
        if option is not None and option["parameter"] in skeleton.parameters:
            for name, origin in pairs:
                if origin == option["parameter"]:
                    self._copy(key, origin, name)
            return
        if any(name != origin and origin in key for name, origin in pairs):
            raise no_other_layers(skeleton.path, f"holds {key} for each parameter", "save it without")
        self._copy(key, "", "")

    def _copy(self, key: str, origin: str, name: str) -> None:
        """Copy the skeleton's items of a key under that of the parameter `name`; lists name the model's parameters."""
        copied = _renamed(key, origin, name)
        self._describe(copied, self._skeleton.described[key], key, origin, name)
        for item in self._skeleton.items.get(key, ()):
            segments: tuple[Segment, ...] = (CopyRange(item.file, item.offset, item.nbytes, is_skeleton=True),)
            if _PARAMETER_LIST.fullmatch(key):
                segments = self._listed(item)
            self._store(copied, item, segments)

    def _listed(self, item: _Item) -> tuple[Segment, ...]:
        """Write a group's list of parameters anew."""
        archive = read_torch_zip(self._result.store, item.file, Window(item.file, item.offset, item.nbytes))
        names = [node.text() for node in root_of(archive).elements()]
        restacked = names_after(names, self._result.layers)
        return new_archive(item.file.name, archive.stem, list(restacked), ()).segments

    def _describe(self, key: str, described: object, form: str, origin: str, name: str) -> None:
        self._described[key] = described
        path = self._skeleton.planned.get(form)
        if isinstance(path, tuple):
            parts: list[object] = []
            for part in path:
                parts.append(_renamed(part, origin, name) if isinstance(part, str) else part)
            self._planned[key] = tuple(parts)

    def _store(self, key: str, item: _Item, segments: tuple[Segment, ...]) -> None:
        file = item.file.name
        offset = self._sizes.get(file, 0)
        nbytes = sum(segment.nbytes for segment in segments)
        self._files.setdefault(file, []).extend(segments)
        self._sizes[file] = offset + nbytes
        place = {"relative_path": file, "offset": offset, "length": nbytes}
        self._stored[_with(item.index, {"fqn": key})] = _with(item.info, place)


def _renamed(text: str, origin: str, name: str) -> str:
    """Put a parameter's name in the place of the one that it has in its source."""
    head, old, tail = text.rpartition(origin) if origin else (text, "", "")
    return head + name + tail if old else text


def _with(record: Record, fields: Mapping[str, object]) -> Record:
    if not isinstance(record.state, dict):
        raise AssertionError("the checkpoint was read")
    return replace(record, state={**record.state, **fields})
