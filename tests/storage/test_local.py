"""Local files: exact, metered, direct or not, whatever the kernel delivers, with the calls of Linux and without."""

from __future__ import annotations

import ast
import ctypes
import errno
import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mergepipe
from mergepipe.cli import main
from mergepipe.errors import CorruptError, MergePipeError, NotFoundError, StorageError, UnsupportedError
from mergepipe.storage import owned, owners
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalFile, LocalStore, resident_fraction
from mergepipe.storage.location import Location
from mergepipe.storage.ranges import PAGE_BYTES, aligned_buffer, os_error, round_up, switch_direct
from support.families import TINY, write_family
from support.faults import Fault, drop_from_page_cache, open_descriptors, replaced, short_reads, system_error
from support.model_folders import recipe_of
from support.refusals import refuses
from support.source_code import trees_with


def make_file(folder: Path, nbytes: int) -> tuple[Path, bytes]:
    content = np.random.default_rng(nbytes).bytes(nbytes)
    path = folder / f"file-{nbytes}"
    path.write_bytes(content)
    return path, content


def open_cold(store: LocalStore, path: Path) -> LocalFile:
    """Open for direct reads; skips where the file system has none."""
    drop_from_page_cache(path)
    file = store.open(Location.local(path), direct=True)
    if file.alignment == 1:
        file.close()
        pytest.skip("this file system has no direct reads")
    return file


def read(file: LocalFile, start: int, stop: int, purpose: Purpose = Purpose.BASE) -> tuple[int, bytes]:
    """Read `[start, stop)` rounded outwards to the file's grid; the count, and the bytes of the range."""
    first = start // file.alignment * file.alignment
    last = round_up(stop, file.alignment)
    buffer = aligned_buffer(max(PAGE_BYTES, last - first))
    got = file.read_into(first, buffer.data[: last - first], purpose)
    return got, bytes(buffer[start - first : min(stop - first, got)])


@given(st.data())
@pytest.mark.parametrize("is_direct", [False, True], ids=["cached", "direct"])
@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "short"])
def test_read_into__fills_the_buffer_up_to_the_end_of_the_file(
    tmp_path: Path, is_direct: bool, is_short: bool, data: st.DataObject
) -> None:
    nbytes = data.draw(st.sampled_from([1, 4095, 4096, 4097, 40_000, 40_960]))
    start = data.draw(st.integers(0, nbytes))
    stop = data.draw(st.integers(start, nbytes))
    path, content = make_file(tmp_path, nbytes)
    store = LocalStore()
    file = open_cold(store, path) if is_direct else store.open(Location.local(path))
    with replaced(os, "preadv", short_reads if is_short else lambda preadv: preadv):
        got, found = read(file, start, stop)
    file.close()
    assert found == content[start:stop]
    first, last = start // file.alignment * file.alignment, round_up(stop, file.alignment)
    assert got == min(last, nbytes) - first
    assert store.ledger.usage()[Purpose.BASE] == last - first


def test_read_into__tells_of_a_file_that_has_shrunk(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 20_000)
    for is_direct in (False, True):
        path.write_bytes(content)
        store = LocalStore()
        file = open_cold(store, path) if is_direct else store.open(Location.local(path))
        os.truncate(path, 10_000)
        got, found = read(file, 4096, 20_000)
        file.close()
        assert (got, found) == (10_000 - 4096, content[4096:10_000])


def test_read_into__names_the_file_that_failed(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    file = LocalStore().open(Location.local(path))
    with (
        replaced(os, "preadv", Fault(0, system_error(errno.EIO)).wrap),
        pytest.raises(StorageError, match="reading 10 bytes at 0") as caught,
    ):
        read(file, 0, 10)
    file.close()
    assert str(path) in str(caught.value)


def test_open__reads_a_file_in_the_page_cache_from_there(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 50_000)
    store = LocalStore()
    file = store.open(Location.local(path), direct=True)
    file.close()
    assert file.alignment == 1
    assert store.ledger.total_bytes() == 0


def test_open__for_direct_reads_reads_nothing(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 50_000)
    store = LocalStore()
    calls = Fault(None)
    with replaced(os, "preadv", calls.wrap), replaced(os, "pread", calls.wrap):
        open_cold(store, path).close()
    assert calls.calls == 0
    assert store.ledger.total_bytes() == 0
    assert resident_pages(path) == 0


def resident_pages(path: Path) -> int:
    """Whether any page of a file lies in the page cache: 0 if none does."""
    with path.open("rb") as stream:
        return round(resident_fraction(stream.fileno(), path.stat().st_size) * 1e6)


@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "short"])
def test_read_into__reads_the_ordinary_way_where_a_direct_read_is_refused(tmp_path: Path, is_short: bool) -> None:
    """As file systems do that take the flag and then refuse the read; what is asked for is counted once."""
    path, content = make_file(tmp_path, 50_001)
    store = LocalStore()
    file = open_cold(store, path)

    def without_direct_reads(preadv: Callable[..., int]) -> Callable[..., int]:
        def read_ordinary(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if is_short:
                return preadv(descriptor, [buffers[0][:999]], offset)
            return preadv(descriptor, buffers, offset)

        return read_ordinary

    with replaced(os, "preadv", without_direct_reads):
        assert read(file, 5000, 20_000) == (16_384 + 4096 - 4096, content[5000:20_000])
        assert read(file, 49_000, 50_001)[1] == content[49_000:]
    file.close()
    assert store.ledger.usage()[Purpose.BASE] == 16_384 + 8192


def test_open__leaves_no_descriptor_when_it_fails(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    before = open_descriptors()
    with replaced(os, "posix_fadvise", Fault(0).wrap), pytest.raises(StorageError):
        LocalStore().open(Location.local(path))
    assert open_descriptors() <= before


def test_read_metadata__tells_of_a_file_that_shrinks(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100)
    before = open_descriptors()
    with replaced(os, "pread", lambda _: lambda *_: b""), refuses(CorruptError, "storage.shrunk"):
        LocalStore().read_metadata(Location.local(path), 0, 10)
    assert open_descriptors() <= before


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (errno.ENOENT, NotFoundError, "storage.not-found"),
        (errno.ENOSPC, StorageError, "storage.no-space"),
        (errno.EDQUOT, StorageError, "storage.no-space"),
        (errno.EROFS, StorageError, "storage.permission"),
        (errno.EMFILE, StorageError, "storage.exhausted"),
        (errno.EIO, StorageError, "storage.io"),
    ],
)
def test_os_error__keeps_the_meaning(number: int, kind: type[MergePipeError], code: str) -> None:
    error = os_error(system_error(number), Path("/x/y"), "testing")
    assert (type(error), error.code) == (kind, code)
    assert "/x/y" in str(error)


def test_resident_fraction__sees_what_is_cached(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 1 << 20)
    descriptor = os.open(path, os.O_RDONLY)
    assert resident_fraction(descriptor, 1 << 20) == 1.0
    drop_from_page_cache(path)
    assert resident_fraction(descriptor, 1 << 20) < 0.1
    os.close(descriptor)
    assert resident_fraction(descriptor, 1 << 20) == 0.0


PATH_METHODS = frozenset({
    "exists", "is_dir", "is_file", "is_symlink", "iterdir", "lstat", "read_bytes", "read_text", "readlink", "resolve",
    "stat",
})  # fmt: skip
PATH_METHODS_WITH_PATTERN = frozenset({"glob", "rglob"})
OS_FUNCTIONS = frozenset({
    "access", "fstat", "listdir", "lstat", "open", "pread", "preadv", "read", "readlink", "scandir", "stat", "walk",
})  # fmt: skip
OS_PATH_FUNCTIONS = frozenset({"exists", "isdir", "isfile", "islink", "ismount", "realpath", "samefile", "samestat"})
REGULAR_FUNCTIONS = frozenset({"open_regular", "read_descriptor", "read_head", "read_small", "regular_status"})
READ_MODES = ("r", "rb")
_NAMES = PATH_METHODS | PATH_METHODS_WITH_PATTERN | OS_FUNCTIONS | OS_PATH_FUNCTIONS

OWN = "our own files: home, catalog, staging, outputs"
ALLOWED = {
    "checkpoints/architectures.py": ("read_text", "a table of the package"),
    "checkpoints/architecture_names.py": ("read_text", "a table of the package"),
    "runs/model_card.py": ("exists", "whether a name that looks like one of the Hub is a folder here"),
    "catalog/catalog.py": ("is_dir is_file is_symlink lstat os.path.realpath regular.read_small stat", OWN),
    "catalog/snapshots.py": ("is_dir os.path.realpath os.walk", OWN),
    "cli/__init__.py": ("os.open", "/dev/null"),
    "cli/commands/budgets.py": ("exists is_dir is_file is_symlink", OWN),
    "cli/guard.py": ("os.open", "/dev/null"),
    "cli/pages.py": ("read_text", "a template of the package"),
    "deltastore/builder.py": ("is_dir", OWN),
    "deltastore/writer.py": ("regular.read_head stat", OWN),
    "jobs/push.py": ("exists", "whether a name is a folder of this machine, or a model of the Hub"),
    "jobs/repair.py": ("is_file is_symlink open os.fstat resolve stat", "a snapshot that is repaired"),
    "jobs/sweep.py": ("is_dir", OWN),
    "checkpoints/gguf_adapters.py": ("stat", OWN),
    "checkpoints/gguf_files.py": ("stat", OWN),
    "jobs/without.py": ("exists", OWN),
    "jobs/evaluate.py": ("os.read read_bytes read_text rglob", "what its own process measures, and what it prints"),
    "kernels/library.py": ("is_file read_bytes read_text", "the library of kernels, their sources, the processor"),
    "planning/plan.py": ("exists is_file is_symlink regular.read_head", OWN),
    "runs/remote_output.py": ("read_bytes", OWN),
    "runs/progress.py": ("is_dir is_file stat", OWN),
    "recipes/references.py": ("os.path.realpath", "the folder that paths are written relative to"),
    "jobs/snapshots.py": ("exists glob is_dir is_file is_symlink os.walk stat", OWN),
    "snapshots/object_upload.py": ("stat", OWN),
    "snapshots/parts_places.py": ("is_dir is_symlink lstat", OWN),
    "snapshots/manifest.py": ("os.path.realpath", "the folder that paths are written relative to"),
    "snapshots/staging.py": (
        "exists glob is_dir is_file is_symlink iterdir lstat os.fstat os.path.samestat os.walk resolve stat",
        OWN,
    ),
    "snapshots/work_log.py": ("stat", OWN),
    "tailor/saving/callback.py": ("glob is_dir", OWN),
    "tailor/saving/frameworks.py": ("is_file", OWN),
    "tailor/saving/partial_run.py": ("exists is_dir os.fstat", OWN),
    "tailor/saving/save_log.py": ("exists regular.read_small", OWN),
}


def direct_reads(tree: ast.AST) -> Iterator[str]:
    """Names of the calls that look at or read a file of this machine, and of imported functions that do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "mergepipe.storage.ranges":
            yield from (f"regular.{each.name}" for each in node.names if each.name in REGULAR_FUNCTIONS)
        elif isinstance(node, ast.Call) and _called_name(node.func) in _NAMES:
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if _is_direct(owner, name, node.args):
                yield f"{owner}.{name}" if owner in ("os", "os.path") else name


def _called_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_direct(owner: str, name: str, arguments: list[ast.expr]) -> bool:
    if owner in ("os", "os.path"):
        return name in (OS_FUNCTIONS if owner == "os" else OS_PATH_FUNCTIONS)
    if name == "open":
        return any(_is_read_mode(argument) for argument in arguments[:2])
    if owner and name in PATH_METHODS_WITH_PATTERN:
        return len(arguments) == 1
    return bool(owner) and name in PATH_METHODS and not arguments


def _is_read_mode(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value in READ_MODES


def seen(code: str) -> list[str]:
    return list(direct_reads(ast.parse(code)))


def test_direct_reads__are_seen() -> None:
    assert seen("p.read_bytes(); p.read_text(encoding='utf-8'); p.open('rb'); open(p, 'r')") == [
        "read_bytes", "read_text", "open", "open",
    ]  # fmt: skip
    assert seen("p.stat(); p.glob('*'); os.walk(p); os.path.realpath(p)") == [
        "stat", "glob", "os.walk", "os.path.realpath",
    ]  # fmt: skip
    assert seen("from mergepipe.storage.ranges import os_error, read_small") == ["regular.read_small"]
    assert seen("store.open(path); store.stat(p); p.open('xb'); is_file(store, p); os.path.join(p)") == []


def test_package__touches_files_above_storage_only_where_it_is_listed() -> None:
    found: dict[str, set[str]] = {}
    for module, tree in trees_with():
        if not module.startswith(("storage/", "testing/")):
            for name in direct_reads(tree):
                found.setdefault(module, set()).add(name)
    assert {module: " ".join(sorted(names)) for module, names in found.items()} == {
        module: names for module, (names, _) in ALLOWED.items()
    }


ONLY_LINUX = ("posix_fadvise", "posix_fallocate", "O_DIRECT", "O_PATH", "preadv", "sched_getaffinity")


class NoLibrary:
    """A C library that has neither `renameat2` nor `mincore`."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


def take_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove from this process what macOS does not have."""
    for name in ONLY_LINUX:
        monkeypatch.delattr(os, name)
    monkeypatch.setattr(ctypes, "CDLL", NoLibrary)
    monkeypatch.setattr(owners, "_BOOT_ID", tmp_path / "no-such-file")
    monkeypatch.setattr(owners, "_PROCESSES", tmp_path / "no-such-folder")


def test_merge__without_the_calls_of_linux_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = write_family(tmp_path, TINY, 2)
    recipe = recipe_of("ties", {place: {"weight": 0.5, "density": 0.5} for place in family.experts}, family.base)
    mergepipe.merge(recipe, tmp_path / "linux")
    take_away(monkeypatch, tmp_path)
    options = mergepipe.MergeOptions()
    for _ in range(2):  # the second one replaces the first, without an exchange
        mergepipe.merge(recipe, tmp_path / "other", force=True, options=options)
    assert mergepipe.verify(tmp_path / "other").is_sound
    weights = [tmp_path / name / "model.safetensors" for name in ("linux", "other")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_store__without_the_calls_of_linux_reads_exact_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, tmp_path)
    content = bytes(range(256)) * 40
    path = Location.local(tmp_path / "file")
    (tmp_path / "file").write_bytes(content)
    file = LocalStore().open(path, direct=True)
    buffer = memoryview(bytearray(300))
    assert (file.alignment, file.read_into(10_000, buffer, Purpose.BASE)) == (1, 240)
    assert bytes(buffer[:240]) == content[10_000:]
    file.close()
    assert LocalStore().read_metadata(path, 5, 20) == content[5:25]


def test_reserve__without_fallocate_gives_a_new_file_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, tmp_path)
    descriptor = os.open(tmp_path / "new", os.O_WRONLY | os.O_CREAT)
    try:
        owned.reserve(descriptor, 12_345)
        assert not switch_direct(descriptor, wanted=True)
    finally:
        os.close(descriptor)
    assert (tmp_path / "new").stat().st_size == 12_345


def test_owner__without_proc_a_living_process_is_told_from_a_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch, tmp_path)
    living = owners.this_process()
    assert living.boot
    assert owners.is_alive(living, 0.0)
    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitpid(child, 0)
    assert not owners.is_alive(owners.Owner(child, living.started, living.boot, living.host), 0.0)


def test_sync_file__on_macos_goes_through_the_cache_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[int] = []
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda _, command: commands.append(command))
    with (tmp_path / "file").open("wb") as stream:
        owned.sync_file(stream.fileno())
    assert commands == [51]


def test_mergepipe__refuses_windows_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "name", "nt")
    exit_code = main(["--version"])
    with pytest.raises(UnsupportedError):
        _ = mergepipe.merge
    monkeypatch.undo()
    printed = capsys.readouterr()
    assert (exit_code, printed.out) == (6, "")
    assert printed.err == (
        "error: mergepipe runs on Linux, and this system is 'nt'; on Windows, run it inside WSL "
        "[platform.unsupported]\n"
    )
