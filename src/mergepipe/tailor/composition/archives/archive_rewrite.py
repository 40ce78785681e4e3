"""Plan torch.save archives whose pickle and tensors are changed: new tensors from any source, the others copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mergepipe.checkpoints.formats.inert_values import PickledStorage, PickledTensor
from mergepipe.checkpoints.formats.torch_zip import TorchArchive, walk_tensors
from mergepipe.core.blocks import DType, element_count
from mergepipe.tailor.composition.archives.torch_writer import InertPickler
from mergepipe.tailor.composition.archives.zip_layout import MemberPlan, lay_out_archive, literal_member
from mergepipe.tailor.composition.copy.plan import CopyRange, FilePlan, Segment


class ArchiveRewrite:
    """Collects the new tensors of an archive whose inert `root` the caller changes in place."""

    def __init__(self, archive: TorchArchive) -> None:
        keys = [tensor.storage.key for _, tensor in walk_tensors(archive.root)]
        self._archive = archive
        self._next = 1 + max((int(key) for key in keys if key.isdecimal()), default=-1)
        self._new: dict[str, MemberPlan] = {}

    def tensor(self, segments: Sequence[Segment], dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
        """Add a contiguous tensor of these bytes, and return its value for the pickle."""
        key = str(self._next)
        self._next += 1
        self._new[key] = MemberPlan(f"data/{key}", tuple(segments))
        return new_tensor(key, dtype, shape)

    def plan(self, name: str) -> FilePlan:
        """Plan the archive with the tensors that its pickle still holds."""
        archive = self._archive
        members: dict[str, MemberPlan] = {}
        for _, tensor in walk_tensors(archive.root):
            key = tensor.storage.key
            if key in self._new:
                members[key] = self._new[key]
            elif key not in members:
                old = archive.storage(tensor)
                segments = (CopyRange(archive.file, old.offset, old.nbytes, is_skeleton=True),) if old.nbytes else ()
                members[key] = MemberPlan(f"data/{key}", segments, old.crc32)
        return new_archive(name, archive.stem, archive.root, members.values())


def new_archive(name: str, stem: str, root: object, members: Iterable[MemberPlan]) -> FilePlan:
    """Plan a torch.save archive of `root`, whose tensors' storages are `members`."""
    head = [literal_member("data.pkl", InertPickler().dump(root)), literal_member("byteorder", b"little")]
    return lay_out_archive(name, stem, [*head, *members, literal_member("version", b"3\n")])


def new_tensor(key: str, dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
    """Make the value of a contiguous tensor with a storage of its own."""
    stride = tuple(element_count(shape[place + 1 :]) for place in range(len(shape)))
    return PickledTensor(PickledStorage(key, dtype, element_count(shape)), dtype, 0, shape, stride)
