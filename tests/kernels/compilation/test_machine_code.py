"""Machine code of kernels is kept on disk, gives the bits that numba gives, and is compiled again when damaged."""

from __future__ import annotations

import ast
import errno
import importlib.util
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from mergepipe.errors import UnsupportedError
from mergepipe.kernels.compilation import machine_code
from mergepipe.kernels.compilation.compiled import Kernel, sources_digest
from support.source_code import trees_with

SOURCE = """
import numpy as np
from mergepipe.kernels.compilation.compiled import kernel


@kernel
def _scaled(values, factor):
    copy = np.empty(values.shape[0], np.float32)  # a temporary of the runtime
    for i in range(values.shape[0]):
        copy[i] = values[i] * factor
    return copy


@kernel
def fill(values, table_RC, factor, flag, key):
    table_RC[:, :] = 0.0
    copy = _scaled(values, factor)
    total = 0.0
    for i in range(copy.shape[0]):
        table_RC[i % table_RC.shape[0], i % table_RC.shape[1]] += copy[i]
        total += copy[i] if flag else -copy[i]
    return total + (key >> np.uint64(60))
"""


def import_kernels(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("kept_kernels", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kernels") / "kept_kernels.py"
    path.write_text(SOURCE, encoding="utf-8")
    return path


def kept_files(source: Path) -> list[Path]:
    return sorted((source.parent / "__pycache__").glob(f"*{machine_code.SUFFIX}"))


def call(module: ModuleType, *, key: object = np.uint64(3 << 60)) -> tuple[float, bytes]:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)[::3]
    table_RC = np.ones((3, 5))
    total = module.fill(values, table_RC, np.float32(0.3), True, key)
    return total, table_RC.tobytes()


def uses_numba(kernel: Kernel) -> bool:
    return "dispatcher" in vars(kernel)


def test_kernel__loaded_from_disk_gives_the_same_bits_without_numba(source: Path) -> None:
    first, second = import_kernels(source), import_kernels(source)
    made = call(first)
    assert uses_numba(first.fill)
    assert len(kept_files(source)) == 1
    assert call(second) == made == call(second)
    assert not uses_numba(second.fill)


def test_kernel__with_arguments_that_no_entry_takes_runs_through_numba(source: Path) -> None:
    module = import_kernels(source)
    assert call(module, key=3 << 62)[0] - call(module, key=np.uint64(3 << 60))[0] == pytest.approx(9)
    assert uses_numba(module.fill)


def test_kernel__frees_its_temporary_arrays(source: Path) -> None:
    module = import_kernels(source)
    values, table_RC = np.zeros(3 << 19, np.float32)[::3], np.ones((3, 5))  # with a copy of 2 MiB

    def run(times: int) -> None:
        for _ in range(times):
            module.fill(values, table_RC, np.float32(0.3), True, np.uint64(1))

    run(3)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run(200)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB, of 400 MiB


def test_kernel__of_a_damaged_file_is_compiled_again(source: Path) -> None:
    made = call(import_kernels(source))
    (path,) = kept_files(source)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    again = import_kernels(source)
    assert call(again) == made
    assert uses_numba(again.fill)
    assert path.read_bytes() == whole


def test_kernel__whose_code_cannot_be_kept_still_runs(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = call(import_kernels(source))
    monkeypatch.setattr(machine_code, "_platform_key", lambda: "")
    assert call(import_kernels(source)) == made


def without_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Write kernels where no `__pycache__` can be made and no user has a home; return their file."""
    path = tmp_path / "kept_kernels.py"
    path.write_text(SOURCE, encoding="utf-8")
    (tmp_path / "__pycache__").write_text("a file")
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(path / "none"))
    monkeypatch.setenv("HOME", str(path))
    return path


def test_kernel__runs_where_no_folder_takes_its_code(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert call(import_kernels(without_folders(monkeypatch, tmp_path))) == call(import_kernels(source))


def test_kernel__of_a_package_that_cannot_be_written_is_kept_in_the_users_cache(
    source: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = without_folders(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = call(import_kernels(path))
    second = import_kernels(path)
    assert call(second) == made == call(import_kernels(source))
    assert not uses_numba(second.fill)
    assert len(list((tmp_path / "cache").rglob(f"*{machine_code.SUFFIX}"))) == 1


def test_folders_for__of_two_rooms_are_two_and_none_is_below_an_unknown_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    one, two = (machine_code.folders_for(tmp_path / room / "tiles" / "encode.py") for room in ("a", "b"))
    assert one != two
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert machine_code.folders_for(tmp_path / "encode.py") == [tmp_path / "__pycache__"]


def test_kernel__whose_code_cannot_be_stored_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = call(import_kernels(source))
    for path in kept_files(source):
        path.unlink()

    def refuse(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left", str(path), None, str(target))

    monkeypatch.setattr(Path, "replace", refuse)
    assert call(import_kernels(source)) == made
    assert not [path for path in (source.parent / "__pycache__").iterdir() if machine_code.SUFFIX in path.name]


def test_remove_outdated__removes_other_versions_and_what_killed_writers_left(tmp_path: Path) -> None:
    def name(sources: str, signature: str, writer: str = "") -> str:
        return f"merge.add-{sources}-{signature}{machine_code.SUFFIX}{writer}"

    kept = {name("1a", "0"), name("1a", "1"), name("1a", "2", f".{os.getpid()}"), "merge.add-1a.py311.nbi"}
    removed = {name("2b", "0"), name("2b", "1"), name("1a", "3", f".{1 << 40}"), f"merge.add-0{machine_code.SUFFIX}"}
    for file in kept | removed:
        (tmp_path / file).touch()
    machine_code.remove_outdated(tmp_path, name("1a", "0"))
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_can_keep__is_false_for_dtypes_that_a_signature_does_not_tell_apart() -> None:
    structured = machine_code.signature_of((np.zeros(2, [("a", "<i2")]),))
    assert structured == machine_code.signature_of((np.zeros(2, [("b", "<f2")]),))
    assert not machine_code.can_keep(structured)
    assert machine_code.can_keep(machine_code.signature_of((np.zeros(2, ">i2"), np.zeros(1, np.bool_), 1.0)))


def test_kernel__under_a_small_address_space_is_refused_before_llvm_ends_the_process(source: Path) -> None:
    """LLVM may be loaded only once its address space was checked, in a process that has imported nothing of it."""
    call(import_kernels(source))
    code = f"""
import importlib.util, resource
spec = importlib.util.spec_from_file_location("kept_kernels", {str(source)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
import numpy
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
module.fill(numpy.zeros(3, numpy.float32), numpy.zeros((3, 5)), numpy.float32(1), True, numpy.uint64(1))
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # threads of numpy map address space too
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "memory.address-space" in ended.stderr


def test_kernel__with_the_compiler_turned_off_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mergepipe.kernels.compilation.compiler import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(UnsupportedError, match="NUMBA_DISABLE_JIT"):
        _ = import_kernels(source).fill.dispatcher


def test_sources__are_those_at_the_import(tmp_path: Path) -> None:
    path = tmp_path / "kept_kernels.py"
    path.write_text(SOURCE, encoding="utf-8")
    imported = import_kernels(path)
    path.write_text(SOURCE.replace("0.0", "1.0"), encoding="utf-8")
    sources_digest.cache_clear()
    assert imported.fill.sources != import_kernels(path).fill.sources
    sources_digest.cache_clear()


def test_signature_of__tells_arrays_apart_as_numba_does() -> None:
    whole = np.zeros((4, 4), np.float32)
    fixed = whole.copy()
    fixed.flags.writeable = False
    arrays = (whole, whole.T, whole[:, ::2], whole.astype(np.float64), whole.astype(">f4"), whole[0], fixed)
    assert len({machine_code.signature_of((array,)) for array in arrays}) == len(arrays)
    assert machine_code.signature_of((1, 1.0, True, 1 << 63)) == (int, float, bool, machine_code.LARGE)


class CountedJit:
    """Stands in for LLVM: counts linkers, and gives each library the address of its code's length."""

    def __init__(self) -> None:
        self.linkers = 0

    def create_lljit_compiler(self) -> int:
        self.linkers += 1
        time.sleep(0.01)  # other threads come by meanwhile
        return self.linkers

    def JITLibraryBuilder(self) -> CountedJit:
        return self

    def add_object_img(self, code: bytes) -> CountedJit:
        assert code
        return self

    def add_current_process(self) -> CountedJit:
        return self

    def export_symbol(self, name: str) -> CountedJit:
        assert name == "entry"
        return self

    def link(self, linker: int, name: str) -> dict[str, int]:
        assert name
        return {"entry": linker}


def test_link__by_many_threads_at_once_makes_one_linker(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is forgotten would take away the code that it linked."""
    jit = CountedJit()
    monkeypatch.setattr(machine_code, "load_llvm", lambda: jit)
    monkeypatch.setattr(machine_code, "_linked", [])
    monkeypatch.setattr(machine_code, "_linker", cache(jit.create_lljit_compiler))
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(machine_code._link, [b"code"] * 8)) == {1}
    assert jit.linkers == 1


def test_kernels__that_other_rooms_call_return_nothing_or_one_number() -> None:
    """Others run through numba, which costs a command that is short more than all else it does."""
    statements = (
        node
        for place, tree in trees_with("mergepipe.kernels.")
        if not place.startswith("kernels/")
        for node in ast.walk(tree)
    )
    imported = {
        (node.module, name.name)
        for node in statements
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mergepipe.kernels.")
        for name in node.names
    }
    kernels = [getattr(import_module(module or ""), name) for module, name in sorted(imported)]
    results = {k.__name__: k.function.__annotations__["return"] for k in kernels if isinstance(k, Kernel)}
    assert len(results) > 20
    assert {name: result for name, result in results.items() if result not in ("None", "int", "float", "bool")} == {}
