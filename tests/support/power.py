"""A model of power loss: what a trace of storage operations may have left if what was not made durable was lost."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from mergepipe.storage import owned
from support.faults import replaced


class Kind(Enum):
    """What an operation does. The first three change a file's bytes, the others the names in a directory."""

    WRITE = auto()
    SIZE = auto()
    ALLOCATE = auto()
    CREATE = auto()
    MAKE_DIRECTORY = auto()
    REMOVE = auto()
    RENAME = auto()
    EXCHANGE = auto()
    SYNC = auto()


@dataclass(frozen=True, slots=True)
class Traced:
    """One operation that was carried out, on a path below the root; `offset` is the new size for `SIZE`."""

    kind: Kind
    path: str
    other: str = ""
    offset: int = 0
    content: bytes = b""


@dataclass(slots=True)
class Trace:
    """Records what a run does below `root`, which must not exist before."""

    root: Path
    operations: list[Traced] = field(default_factory=list)
    _open: dict[int, str] = field(default_factory=dict)
    _ends: dict[int, int] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def _place(self, path: object, folder: int | None = None) -> str | None:
        """The path below the root, if it is there: `folder` is the open directory that it is relative to."""
        text = os.fspath(path) if isinstance(path, str | Path) else ""
        if text and folder is not None:
            text = str(Path(f"/proc/self/fd/{folder}").readlink() / text)
        return text if text.startswith(f"{self.root}/") or text == str(self.root) else None

    def _note(self, kind: Kind, path: str | None, other: str = "", offset: int = 0, content: bytes = b"") -> None:
        if path is not None:
            self.operations.append(Traced(kind, path, other, offset, content))

    def open(self, function: Callable[..., int]) -> Callable[..., int]:
        """Opening, which may create."""

        def opened(path: object, flags: int, *args: Any, **options: Any) -> int:
            with self._lock:
                place = self._place(path, options.get("dir_fd"))
                is_new = place is not None and bool(flags & os.O_CREAT) and not os.path.lexists(place)
                descriptor = function(path, flags, *args, **options)
                self._open.pop(descriptor, None)
                if place is not None:
                    self._open[descriptor] = place
                    self._ends[descriptor] = 0 if is_new else os.fstat(descriptor).st_size
                    if is_new:
                        self._note(Kind.CREATE, place)
                return descriptor

        return opened

    def on_descriptor(self, make: Callable[[str, int, tuple[Any, ...]], Traced]) -> Callable[..., Any]:
        """Operations on open files: noted once they have worked."""

        def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(descriptor: int, *args: Any) -> Any:
                with self._lock:
                    result = function(descriptor, *args)
                    place = self._open.get(descriptor)
                    if place is not None:
                        end = self._ends[descriptor]
                        self.operations.append(make(place, end, args))
                        self._ends[descriptor] = os.fstat(descriptor).st_size
                    return result

            return call

        return wrapped

    def on_path(self, kind: Kind) -> Callable[..., Any]:
        """Operations on names."""

        def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: object, *args: Any, **options: Any) -> Any:
                with self._lock:
                    result = function(path, *args, **options)
                    place = self._place(path, options.get("dir_fd", options.get("src_dir_fd")))
                    other = ""
                    if kind is Kind.RENAME and place is not None:
                        other = self._place(args[0], options.get("dst_dir_fd")) or str(args[0])
                        self._move(place, other)
                    self._note(kind, place, other)
                    return result

            return call

        return wrapped

    def _move(self, old: str, new: str) -> None:
        for descriptor, place in self._open.items():
            if place == old or place.startswith(f"{old}/"):
                self._open[descriptor] = new + place[len(old) :]

    def exchange(self, function: Callable[..., bool]) -> Callable[..., bool]:
        """`renameat2`."""

        def call(old_path: Path, new_path: Path, flags: int) -> bool:
            with self._lock:
                done = function(old_path, new_path, flags)
                old, new = self._place(old_path), self._place(new_path)
                if done and old is not None and new is not None:
                    self._note(Kind.EXCHANGE if flags == 2 else Kind.RENAME, old, new)
                    self._move(old, new)
                return done

        return call

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the context lasts."""
        writes = self.on_descriptor(lambda p, end, a: Traced(Kind.WRITE, p, "", end, bytes(a[0])))
        pwrites = self.on_descriptor(lambda p, _, a: Traced(Kind.WRITE, p, "", a[1], bytes(a[0])))
        wrappers: tuple[tuple[object, str, Callable[..., Any]], ...] = (
            (os, "open", self.open),
            (os, "write", writes),
            (os, "pwrite", pwrites),
            (os, "ftruncate", self.on_descriptor(lambda p, _, a: Traced(Kind.SIZE, p, "", a[0]))),
            (os, "posix_fallocate", self.on_descriptor(lambda p, _, a: Traced(Kind.ALLOCATE, p, "", a[0] + a[1]))),
            (os, "fsync", self.on_descriptor(lambda p, _, __: Traced(Kind.SYNC, p))),
            (os, "mkdir", self.on_path(Kind.MAKE_DIRECTORY)),
            (os, "unlink", self.on_path(Kind.REMOVE)),
            (os, "rmdir", self.on_path(Kind.REMOVE)),
            (os, "rename", self.on_path(Kind.RENAME)),
            (owned, "renameat2", self.exchange),
        )
        with ExitStack() as stack:
            for owner, name, wrapper in wrappers:
                stack.enter_context(replaced(owner, name, wrapper))
            yield


# --- what may be left ---


@dataclass(slots=True)
class _Node:
    """A file or a directory of the model."""

    is_directory: bool
    content: bytearray = field(default_factory=bytearray)
    names: dict[str, _Node] = field(default_factory=dict)


def undurable(operations: Sequence[Traced]) -> list[int]:
    """Positions of the operations that nothing made durable: no later sync of the file, or of the directory."""
    lost = []
    for position, operation in enumerate(operations):
        if operation.kind is Kind.SYNC:
            continue
        of_names = operation.kind in (Kind.CREATE, Kind.MAKE_DIRECTORY, Kind.REMOVE, Kind.RENAME, Kind.EXCHANGE)
        target = operation.other or operation.path
        synced = str(Path(target).parent) if of_names else operation.path
        if not any(o.kind is Kind.SYNC and o.path == synced for o in operations[position + 1 :]):
            lost.append(position)
    return lost


def leave(operations: Sequence[Traced], lost: Collection[int], root: Path, place: Path) -> None:
    """Write to `place` what would be found at `root` if the operations at the positions `lost` had never happened.

    What cannot be, because what it needs was lost, did not happen either.
    """
    model = _Node(is_directory=True)
    files: dict[str, _Node] = {}
    for position, operation in enumerate(operations):
        if operation.kind is not Kind.SYNC:
            _carry_out(model, files, operation, root, is_lost=position in lost)
    _write(model, place)


def _parts(path: str, root: Path) -> tuple[str, ...]:
    return Path(path).relative_to(root).parts


def _parent(model: _Node, path: str, root: Path) -> tuple[_Node | None, str]:
    *folders, name = _parts(path, root) or ("",)
    node: _Node | None = model
    for folder in folders:
        node = node.names.get(folder) if node is not None else None
    return node, name


def _carry_out(model: _Node, files: dict[str, _Node], operation: Traced, root: Path, *, is_lost: bool) -> None:
    """One operation. Bytes go to the file whatever its name: `files` are those that are open, by their path."""
    parent, name = _parent(model, operation.path, root)
    match operation.kind:
        case Kind.CREATE | Kind.MAKE_DIRECTORY:
            node = _Node(operation.kind is Kind.MAKE_DIRECTORY)
            files[operation.path] = node
            if parent is not None and name and not is_lost:
                parent.names.setdefault(name, node)
        case Kind.REMOVE if parent is not None and not is_lost:
            parent.names.pop(name, None)
        case Kind.RENAME | Kind.EXCHANGE if parent is not None and not is_lost:
            _rename(model, operation, parent, name, root)
        case Kind.WRITE | Kind.SIZE | Kind.ALLOCATE if not is_lost:
            _change(files.get(operation.path) or _Node(is_directory=False), operation)


def _rename(model: _Node, operation: Traced, parent: _Node, name: str, root: Path) -> None:
    other, new_name = _parent(model, operation.other, root)
    if other is None or name not in parent.names:
        return
    moved, replaced_node = parent.names.pop(name), other.names.pop(new_name, None)
    other.names[new_name] = moved
    if operation.kind is Kind.EXCHANGE and replaced_node is not None:
        parent.names[name] = replaced_node


def _change(node: _Node, operation: Traced) -> None:
    end = operation.offset + len(operation.content)
    if len(node.content) < end:
        node.content.extend(bytes(end - len(node.content)))
    if operation.kind is Kind.WRITE:
        node.content[operation.offset : end] = operation.content
    elif operation.kind is Kind.SIZE:
        del node.content[operation.offset :]


def _write(node: _Node, place: Path) -> None:
    if not node.is_directory:
        place.write_bytes(bytes(node.content))
        return
    place.mkdir(parents=True, exist_ok=True)
    for name, child in node.names.items():
        _write(child, place / name)
