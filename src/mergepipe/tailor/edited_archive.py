"""Plans torch.save archives whose pickle has changed: members are laid out anew, tensors stay byte for byte."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mergepipe.readers.torch_zip import read_torch_zip
from mergepipe.readers.zip_directory import ZipMember
from mergepipe.storage.base import Store
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Patch, Segment, joined
from mergepipe.tailor.pickle_edit import edit_pickle
from mergepipe.tailor.pickle_node import PicklePath
from mergepipe.tailor.skeleton_files import SkeletonFile
from mergepipe.tailor.zip_layout import MemberPlan, lay_out_archive, literal_member


def plan_edited(
    store: Store, file: SkeletonFile, patches: Sequence[Patch], edits: Mapping[PicklePath, object]
) -> FilePlan:
    """Plan a copy of one archive with `edits` in its pickle and `patches` (by offsets of the original) in its tensors.

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
            members.append(literal_member(name, edit_pickle(raw, edits, file.name)))
        else:
            members.append(_member(name, member, file, ordered))
    plan = lay_out_archive(file.name, archive.stem, members)
    return replace(plan, segments=tuple(joined(plan.segments)))


def _member(name: str, member: ZipMember, file: SkeletonFile, patches: Sequence[Patch]) -> MemberPlan:
    """One member as it is, but for the patches inside it."""
    segments: list[Segment] = []
    position, stop = member.offset, member.offset + member.nbytes
    first = bisect_left(patches, position, key=lambda patch: patch.offset)
    inside = patches[first : bisect_left(patches, stop, key=lambda patch: patch.offset)]
    for patch in inside:
        segments += [CopyRange(file.path, position, patch.offset - position, is_skeleton=True), patch.segment]
        position = patch.stop
    segments.append(CopyRange(file.path, position, stop - position, is_skeleton=True))
    return MemberPlan(name, tuple(s for s in segments if s.nbytes), None if inside else member.crc32)
