"""Buckets that outputs go to: what lies in them, and folders that record their requests and die at one of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mergepipe.snapshots.manifest import parse_manifest
from mergepipe.storage.location import Location
from mergepipe.storage.remote.objects import BucketFolder
from support.public_names import MANIFEST_NAME
from support.remote_stores import set_environment
from support.s3_server import S3Server, s3_server

_numbers = itertools.count()  # one for all: servers of one process share what lies in their buckets


@contextmanager
def bucket_server() -> Iterator[S3Server]:
    """A server with a bucket that outputs go to."""
    with s3_server() as server:
        server.make_bucket("bucket")
        yield server


def new_prefix(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix that nothing lies under, on a server that the environment leads to from now on."""
    set_environment(monkeypatch, server.url)
    return f"s3://bucket/out-{next(_numbers)}"


class Killed(BaseException):
    """The process is dead: it makes no request any more."""


@dataclass(slots=True)
class Requests:
    """The changes that were asked of all buckets; from number `fails_at` on each fails, that one `after` its effect."""

    changes: list[tuple[str, str]] = field(default_factory=list)
    fails_at: int | None = None
    after: bool = False
    error: Callable[[], BaseException] = Killed
    is_dead: bool = False

    def made(self, kind: str) -> list[str]:
        """The names of the objects that were asked for by a kind of request."""
        return [key.rpartition("/")[2] for made, key in self.changes if made == kind]

    @contextmanager
    def change(self, kind: str, key: str) -> Iterator[None]:
        self.check()
        is_last = self.fails_at is not None and len(self.changes) == self.fails_at
        self.changes.append((kind, key))
        if is_last and not self.after:
            self.is_dead = True
            self.check()
        try:
            yield
        finally:  # whatever the store says
            if is_last:
                self.is_dead = True
                self.check()

    def check(self) -> None:
        if self.is_dead:
            raise self.error()


def watch_buckets(monkeypatch: pytest.MonkeyPatch) -> Requests:
    """Record what every folder changes from now on."""
    requests = Requests()
    originals = {kind: getattr(BucketFolder, kind) for kind in ("create", "overwrite", "delete", "exchange", "look")}

    def wrapped(kind: str) -> Callable[..., object]:
        def method(self: BucketFolder, name: str, *arguments: object) -> object:
            if kind == "look":
                requests.check()
                return originals[kind](self, name)
            with requests.change(kind, (self.location / name).key):
                return originals[kind](self, name, *arguments)

        return method

    for kind in originals:
        monkeypatch.setattr(BucketFolder, kind, wrapped(kind))
    return requests


def ignore_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all stores write whatever is there."""

    def create(self: BucketFolder, name: str, content: bytes | Path, digest: str = "") -> bool:
        self.overwrite(name, content, digest)
        return True

    monkeypatch.setattr(BucketFolder, "create", create)


def bucket_folder(location: str) -> BucketFolder:
    """A place in a bucket, to look at or to change."""
    return BucketFolder(Location.parse(location))


def objects_below(location: str) -> dict[str, bytes]:
    """All objects below a place, by name."""
    folder = bucket_folder(location)
    return {name: folder.read(name, facts.size_bytes) or b"" for name, facts in sorted(folder.list_all().items())}


def names_below(location: str) -> list[str]:
    """The names of all objects below a place."""
    return sorted(bucket_folder(location).list_all())


def files_below(folder: Path) -> dict[str, bytes]:
    """All files below a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def check_published(files: Mapping[str, bytes], local: Path) -> None:
    """What was published is the snapshot, to the byte; of the manifests, all that does not describe the run."""
    wanted = files_below(local)
    assert files.keys() == wanted.keys()
    assert [name for name in wanted if files[name] != wanted[name] and name != MANIFEST_NAME] == []
    ours, theirs = (parse_manifest(held[MANIFEST_NAME]) for held in (files, wanted))
    assert (ours.sid, ours.files, ours.tensors) == (theirs.sid, theirs.files, theirs.tensors)
    assert ours.sidecars == theirs.sidecars
