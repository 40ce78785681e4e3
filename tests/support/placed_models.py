"""The same folder of files at every kind of place: here, on the Hub, in a bucket and on a web server."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from support.bucket_outputs import bucket_server, files_below
from support.fault_server import FaultServer
from support.hub_server import HubServer, hub_server, lead_to_hub
from support.remote_stores import set_environment
from support.s3_server import S3Server

PLACES: Final = ("folder", "hub", "revision", "bucket", "web")
"""The kinds of places that a folder of files can lie at; a revision of the Hub is a branch with a slash in its name."""

_numbers = itertools.count()


@dataclass(slots=True)
class PlacedModels:
    """Stand-ins of all servers that the environment leads to, and the folders that were put there."""

    root: Path
    hub: HubServer
    bucket: S3Server
    web: FaultServer
    _placed: dict[tuple[Path, str], str] = field(default_factory=dict)

    def lead(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Lead the environment of a test to all of them."""
        lead_to_hub(monkeypatch, self.hub, self.root / "hub-home")
        set_environment(monkeypatch, self.bucket.url)

    def put(self, folder: Path, place: str) -> str:
        """Put the files of a folder of this machine, or one file, at a place, and return its name on a command line."""
        if place == "folder":
            return str(folder)
        if (folder, place) not in self._placed:
            self._placed[folder, place] = self._put(folder, place, folder.stem)
        return self._placed[folder, place]

    def _put(self, folder: Path, place: str, name: str) -> str:
        number = next(_numbers)
        files = files_of(folder)
        file = f"/{folder.name}" if folder.is_file() else ""
        match place:
            case "hub":
                self.hub.commit(f"org-{number}/{name}", files)
                return f"hf://org-{number}/{name}{file}" if file else f"org-{number}/{name}"
            case "revision":
                self.hub.commit(f"org-{number}/{name}", {"README.md": b"of another branch"})
                self.hub.commit(f"org-{number}/{name}", files, "try/second")
                return f"hf://org-{number}/{name}@try%2Fsecond{file}"
            case "bucket":
                self.bucket.put("bucket", {f"{number}/{name}/{key}": content for key, content in files.items()})
                return f"s3://bucket/{number}/{name}{file}"
            case "web":
                for key, content in files.items():
                    self.web.put(f"{number}/{name}/{key}", content)
                return f"{self.web.url}/{number}/{name}{file}"
        raise ValueError(place)


def files_of(folder: Path) -> Mapping[str, bytes]:
    """The files of a folder by their names relative to it, at any depth; of a file itself."""
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    return files_below(folder)


@contextmanager
def placed_models(root: Path) -> Iterator[PlacedModels]:
    """Start a stand-in of every server while the context lasts."""
    with hub_server() as hub, bucket_server() as bucket, FaultServer({}) as web:
        yield PlacedModels(root, hub, bucket, web)
