"""Plan torch.save archives with an edited pickle: members are laid out again, tensors copied byte for byte."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mergepipe.checkpoints.formats.torch_zip import read_torch_zip
from mergepipe.checkpoints.formats.zip_directory import ZipMember
from mergepipe.storage.contract import Store
from mergepipe.tailor.composition.archives.pickle_edit import edit_pickle
from mergepipe.tailor.composition.archives.torch_writer import InertPickler
from mergepipe.tailor.composition.archives.zip_layout import MemberPlan, lay_out_archive, literal_member
from mergepipe.tailor.composition.copy.plan import CopyRange, FilePlan, Patch, Segment, joined
from mergepipe.tailor.composition.skeleton_files import SkeletonFile
from mergepipe.tailor.formats.pickle_node import PicklePath


def plan_edited(
    store: Store, file: SkeletonFile, patches: Sequence[Patch], edits: Mapping[PicklePath, object]
) -> FilePlan:
    """Plan a copy of one archive with `edits` in its pickle and `patches` (by offsets of the original) in its tensors.

    The empty path stands for all of the pickle.

    Raises:
        CorruptError, UnsupportedError: the archive cannot be read, or lacks what is to be changed.
    """
    archive = read_torch_zip(store, file.path)
    pickle = archive.pickle
    raw = store.read_metadata(file.path, pickle.offset, pickle.nbytes)
    ordered = sorted(patches, key=lambda patch: patch.offset)
    members = []
    for member in archive.members.values():
        name = member.name.removeprefix(f"{archive.stem}/")
        if member.offset == pickle.offset:
            content = InertPickler().dump(edits[()]) if () in edits else edit_pickle(raw, edits, file.name)
            members.append(literal_member(name, content))
        else:
            members.append(_member(name, member, file, ordered))
    plan = lay_out_archive(file.name, archive.stem, members)
    return replace(plan, segments=tuple(joined(plan.segments)))


def _member(name: str, member: ZipMember, file: SkeletonFile, patches: Sequence[Patch]) -> MemberPlan:
    """Plan one member with the patches inside it."""
    segments: list[Segment] = []
    position, stop = member.offset, member.offset + member.nbytes
    first = bisect_left(patches, position, key=lambda patch: patch.offset)
    inside = patches[first : bisect_left(patches, stop, key=lambda patch: patch.offset)]
    for patch in inside:
        segments += [CopyRange(file.path, position, patch.offset - position, is_skeleton=True), patch.segment]
        position = patch.stop
    segments.append(CopyRange(file.path, position, stop - position, is_skeleton=True))
    return MemberPlan(name, tuple(s for s in segments if s.nbytes), None if inside else member.crc32)
