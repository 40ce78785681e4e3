"""Protocols of tensors are told by classes, without computing the properties of every instance."""

from __future__ import annotations

from mergepipe.checkpoints.contract import IndexedFiles, NeedsBase
from mergepipe.storage.location import Location


class Indexed:
    """A tensor that counts how often its files are listed."""

    def __init__(self) -> None:
        self.n_listed = 0

    @property
    def files(self) -> frozenset[Location]:
        self.n_listed += 1
        return frozenset()


def test_protocols__look_at_one_instance_of_a_class() -> None:
    assert isinstance(Indexed(), IndexedFiles)
    other = Indexed()
    assert isinstance(other, IndexedFiles)
    assert not isinstance(other, NeedsBase)
    assert other.n_listed <= 1  # by the first look for NeedsBase, if at all
    assert not isinstance(object(), IndexedFiles)
