"""Plan torch DCP composites of restacked models of another depth: stored items are copied whole under new keys."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

from mergepipe.checkpoints.formats.inert_values import Record
from mergepipe.checkpoints.formats.torch_zip import read_torch_zip
from mergepipe.checkpoints.formats.zip_directory import Window
from mergepipe.core.values import dataclass
from mergepipe.errors import MergePipeError, UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import TrainingCheckpoint
from mergepipe.tailor.composition.archives.archive_rewrite import new_archive
from mergepipe.tailor.composition.archives.torch_writer import InertPickler
from mergepipe.tailor.composition.composition_plan import CompositionPlan, PatchCollector, plan_file
from mergepipe.tailor.composition.copy.plan import CopyRange, FilePlan, Literal, Segment
from mergepipe.tailor.composition.request.assignment import Assignment
from mergepipe.tailor.composition.request.restack import restacked_names
from mergepipe.tailor.composition.skeleton_files import list_skeleton
from mergepipe.tailor.composition.staleness import choose_steps, staleness_of
from mergepipe.tailor.composition.state_overlay import overlay_state
from mergepipe.tailor.formats.dcp import METADATA_NAME, model_keys, read_tensors
from mergepipe.tailor.formats.dcp_metadata import read_dcp_metadata
from mergepipe.tailor.formats.pickle_node import Node

_PARAMETER_LIST = re.compile(r"(?:.*\.)?param_groups\.\d+\.params", re.ASCII)
_PARAMETER_OPTION = re.compile(r"(?:.*\.)?param_groups\.(?P<parameter>.+)\.[^.]+", re.ASCII)  # flattened options


def plan_resized_dcp(store: Store, assignment: Assignment) -> CompositionPlan:
    """Plan a DCP checkpoint of the restacked model, in the chunks of its sources.

    Raises:
        UnsupportedError: a source is partial, or keeps something else by parameter.
    """
    if assignment.state_index is not None or any(source.is_partial for source in assignment.sources):
        partial = next((source for source in assignment.sources if source.is_partial), assignment.state)
        hint = "compose a complete checkpoint of it first, and stack the layers of that"
        raise _refusal(partial.path, "is partial", hint)
    steps = choose_steps(assignment)
    writer = _Writer(store, assignment)
    plans = [*writer.data_files(), FilePlan(METADATA_NAME, (Literal(writer.metadata()),))]
    overlay = overlay_state(store, assignment, list_skeleton(store, assignment.skeleton))
    plans += [
        plan_file(store, file, PatchCollector(store), overlay)
        for file in overlay.files
        if file.name != METADATA_NAME and file.path not in writer.own_files
    ]
    ordered = tuple(sorted(plans, key=lambda plan: plan.name))
    return CompositionPlan(assignment, steps, staleness_of(assignment, steps), ordered)


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
    """A DCP directory: what its metadata says of each key, and the keys of the model's tensors."""

    described: Mapping[object, object]
    planned: Mapping[object, object]
    items: Mapping[str, list[_Item]]
    keys: Mapping[tuple[str, str], str]  # by parameter or alias, and kind


def _read_directory(store: Store, checkpoint: TrainingCheckpoint) -> _Directory:
    root = Node(read_dcp_metadata(store, checkpoint.path), METADATA_NAME).fields("Metadata")
    items: dict[str, list[_Item]] = {}
    for index, node in root.get("storage_data").items():
        fields = node.fields("_StorageInfo")
        file = (checkpoint.path.absolute() / fields.get("relative_path").text()).normal()
        key = Node(index, node.file, node.path).fields("MetadataIndex").get("fqn").text()
        if not isinstance(index, Record) or not isinstance(node.value, Record):
            raise AssertionError("the checkpoint was read")
        item = _Item(index, node.value, file, fields.get("offset").integer(), fields.get("length").integer())
        items.setdefault(key, []).append(item)
    planned = root.find("planner_data")
    keys = model_keys(read_tensors(store, checkpoint.path, checkpoint.path), checkpoint.path)
    described = root.get("state_dict_metadata").mapping()
    return _Directory(described, {} if planned is None else planned.mapping(), items, keys)


class _Writer:
    """Collects items in files named as those that they come from, and the metadata that finds them there."""

    def __init__(self, store: Store, assignment: Assignment) -> None:
        self._store = store
        self._assignment = assignment
        self._files: dict[str, list[Segment]] = {}
        self._sizes: dict[str, int] = {}
        self._described: dict[object, object] = {}
        self._planned: dict[object, object] = {}
        self._stored: dict[object, object] = {}
        self._directory = cache(lambda index: _read_directory(store, assignment.sources[index]))
        self._skeleton = self._directory(assignment.skeleton_index)
        self.own_files = {item.file for items in self._skeleton.items.values() for item in items}
        counted = (name for counter in assignment.model.steps for name in counter.parameters)
        for name, kind in (*assignment.model.states, *((name, "step") for name in counted)):
            self._take(name, kind)
        of_model = set(self._skeleton.keys.values())
        for key in self._skeleton.described:
            if isinstance(key, str) and key not in of_model:
                self._keep(key)

    def data_files(self) -> Iterator[FilePlan]:
        """Return the planned files of items."""
        return (FilePlan(name, tuple(segments)) for name, segments in self._files.items())

    def metadata(self) -> bytes:
        """Write the skeleton's metadata with the entries of the result."""
        metadata = read_dcp_metadata(self._store, self._assignment.skeleton.path)
        fields = Node(metadata, METADATA_NAME).fields("Metadata").mapping()
        fields["state_dict_metadata"], fields["storage_data"] = self._described, self._stored
        if fields.get("planner_data") is not None:
            fields["planner_data"] = self._planned
        return InertPickler().dump(metadata)

    def _take(self, name: str, kind: str) -> None:
        """Copy the items of a tensor of the model from its source."""
        assignment = self._assignment
        owner, before = assignment.model.units.tied.get(name, name), assignment.origin(name)
        source = self._directory(assignment.source_of[owner])
        old, form = source.keys[before, kind], self._skeleton.keys[before, kind]
        key = _renamed(form, before, name)
        self._describe(key, source.described[old], form, before, name)
        for item in source.items.get(old, ()):
            self._store_item(key, item, (CopyRange(item.file, item.offset, item.nbytes, is_skeleton=False),))

    def _keep(self, key: str) -> None:
        """Copy what is no tensor of the model from the skeleton: options of a parameter to every place that it has."""
        skeleton, layers = self._assignment.skeleton, self._assignment.layers or ()
        pairs = restacked_names(tuple(skeleton.parameters), skeleton.units, layers)
        option = _PARAMETER_OPTION.fullmatch(key)
        if option is not None and option["parameter"] in skeleton.parameters:
            for name, before in pairs:
                if before == option["parameter"]:
                    self._copy_value(key, before, name)
            return
        if any(name != before and before in key for name, before in pairs):
            raise _refusal(skeleton.path, f"holds {key} for each parameter", "save it without")
        self._copy_value(key, "", "")

    def _copy_value(self, key: str, before: str, name: str) -> None:
        """Copy the skeleton's items of a key, under the key of the parameter's name; lists name the result's."""
        copied = _renamed(key, before, name)
        self._describe(copied, self._skeleton.described[key], key, before, name)
        for item in self._skeleton.items.get(key, ()):
            kept: tuple[Segment, ...] = (CopyRange(item.file, item.offset, item.nbytes, is_skeleton=True),)
            self._store_item(copied, item, self._listed(item) if _PARAMETER_LIST.fullmatch(key) else kept)

    def _listed(self, item: _Item) -> tuple[Segment, ...]:
        """Write a group's list of parameters anew."""
        skeleton, layers = self._assignment.skeleton, self._assignment.layers or ()
        archive = read_torch_zip(self._store, item.file, Window(item.file, item.offset, item.nbytes))
        names = [node.text() for node in Node(archive.root, str(item.file)).elements()]
        pairs = restacked_names(names, skeleton.units, layers)
        return new_archive(item.file.name, archive.stem, [name for name, _ in pairs], ()).segments

    def _describe(self, key: str, described: object, form: str, before: str, name: str) -> None:
        self._described[key] = described
        path = self._skeleton.planned.get(form)
        if isinstance(path, tuple):
            self._planned[key] = tuple(_renamed(part, before, name) if isinstance(part, str) else part for part in path)

    def _store_item(self, key: str, item: _Item, segments: tuple[Segment, ...]) -> None:
        name, nbytes = item.file.name, sum(segment.nbytes for segment in segments)
        at = self._sizes.get(name, 0)
        self._files.setdefault(name, []).extend(segments)
        self._sizes[name] = at + nbytes
        place = {"relative_path": name, "offset": at, "length": nbytes}
        self._stored[_with(item.index, {"fqn": key})] = _with(item.info, place)


def _renamed(text: str, before: str, name: str) -> str:
    """Put a parameter's name in the place of the one that it has in its source."""
    head, old, tail = text.rpartition(before) if before else (text, "", "")
    return head + name + tail if old else text


def _with(record: Record, fields: Mapping[str, object]) -> Record:
    if not isinstance(record.state, dict):
        raise AssertionError("the checkpoint was read")
    return replace(record, state={**record.state, **fields})


def _refusal(path: Location, message: str, hint: str) -> MergePipeError:
    return UnsupportedError.of(
        "tailor.restack.resized", path, f"{message}: a model of another depth is not made of it", hint
    )
