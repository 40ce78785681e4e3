"""Plan torch.save archives whose pickle and tensors change: literal headers, members from any source, checksums."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from mergepipe.checkpoints.torch_file import TorchArchive, read_torch_zip, walk_tensors
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.archive_layout import MemberPlan, lay_out_archive, literal_member
from mergepipe.tailor.checkpoint import PicklePath
from mergepipe.tailor.copy_plan import CopyRange, FilePlan, Patch, joined, patched_range
from mergepipe.tailor.pickle_writer import InertPickler, edit_pickle


def plan_edited(
    store: Store, file: str, path: Location, patches: Sequence[Patch], edits: Mapping[PicklePath, object]
) -> FilePlan:
    """Plan a copy of one archive with `edits` in its pickle and `patches` (by offsets in the original) of tensors.

    Members are laid out again, tensors are copied byte for byte. The empty path stands for all of the pickle.
    """
    archive = read_torch_zip(store, path)
    pickle = archive.pickle
    raw = store.read_metadata(path, pickle.offset, pickle.nbytes)
    ordered = sorted(patches, key=lambda patch: patch.offset)
    members = []
    for member in archive.members.values():
        name = member.name.removeprefix(f"{archive.stem}/")
        if member.offset == pickle.offset:
            content = InertPickler().dump(edits[()]) if () in edits else edit_pickle(raw, edits, file)
            members.append(literal_member(name, content))
        else:
            start = member.offset
            stop = start + member.nbytes
            first = bisect_left(ordered, start, key=lambda patch: patch.offset)
            after_last = bisect_left(ordered, stop, key=lambda patch: patch.offset)
            inside = ordered[first:after_last]
            segments = patched_range(path, start, stop, inside)
            members.append(MemberPlan(name, tuple(segments), None if inside else member.crc32))
    plan = lay_out_archive(file, archive.stem, members)
    return replace(plan, segments=tuple(joined(plan.segments)))


def plan_rewritten(name: str, archive: TorchArchive, root: object, new: Mapping[str, MemberPlan]) -> FilePlan:
    """Plan an archive of the value `root`: storages whose keys are in `new` from there, the others from `archive`."""
    members: dict[str, MemberPlan] = {}
    for _, tensor in walk_tensors(root):
        key = tensor.storage.key
        if key in new:
            members[key] = new[key]
        elif key not in members:
            old = archive.storage(tensor)
            segments = (CopyRange(archive.file, old.offset, old.nbytes, is_skeleton=True),) if old.nbytes else ()
            members[key] = MemberPlan(f"data/{key}", segments, old.crc32)
    return new_archive(name, archive.stem, root, members.values())


def new_archive(name: str, stem: str, root: object, members: Iterable[MemberPlan]) -> FilePlan:
    """Plan a torch.save archive of `root`, whose tensors' storages are `members`."""
    head = [literal_member("data.pkl", InertPickler().dump(root)), literal_member("byteorder", b"little")]
    return lay_out_archive(name, stem, [*head, *members, literal_member("version", b"3\n")])
