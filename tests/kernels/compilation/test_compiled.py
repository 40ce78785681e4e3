"""Kernels are compiled once, by any thread, and renewed when a source changes that they can depend on."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pytest

import mergepipe
from mergepipe.core.blocks import BF16, F16, DType
from mergepipe.deltastore import symbols
from mergepipe.errors import UnsupportedError
from mergepipe.kernels import merge, reduce
from mergepipe.kernels.compiled import BLOCKS, Kernel, kernel, sources_digest
from support.families import write_family
from support.family_shapes import TINY
from support.source_code import trees_with

LESS_COMMON = {"codec._decode_less_common", "codec._encode_less_common"}
DELTASTORE = Path(symbols.__file__).parent


@kernel
def added(x: int, y: int) -> int:
    return x + y


def test_kernel__is_renewed_with_the_sources_of_all_kernels_of_its_package_and_of_the_blocks() -> None:
    one, beside = cast(Any, reduce.sum_products), cast(Any, symbols.encode_numbers)
    assert one.sources == sources_digest(BLOCKS) + sources_digest()
    assert beside.sources == sources_digest(BLOCKS) + sources_digest(DELTASTORE) + sources_digest()


def test_modules_of_kernels__depend_on_no_other_module_of_core_than_the_blocks() -> None:
    """The hash of a kernel's sources covers its own room, the kernels, and `core.blocks`."""
    modules = {
        node.module
        for _, tree in trees_with("@kernel")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mergepipe.core")
    }
    assert modules == {"mergepipe.core.blocks"}


def test_kernel__has_one_dispatcher_whichever_threads_ask() -> None:
    fresh = Kernel(added.function)  # type: ignore[attr-defined]
    with ThreadPoolExecutor(8) as pool:
        assert len({id(each) for each in pool.map(lambda _: fresh.dispatcher, range(64))}) == 1


def test_kernel__with_the_compiler_turned_off_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(UnsupportedError, match="NUMBA_DISABLE_JIT"):
        _ = Kernel(added.function).dispatcher  # type: ignore[attr-defined]


def test_kernel__under_a_small_address_space_is_refused_before_llvm_ends_the_process() -> None:
    code = """
import resource
from mergepipe.kernels import reduce
import numpy
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
reduce.count_nonzero(numpy.zeros(3, numpy.float32))
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # threads of numpy map address space too
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert "memory.too-small" in ended.stderr


def test_sources_digest__changes_with_any_source(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "one.py").write_text("a = 1\n")
    (tmp_path / "below/two.py").write_text("b = 1\n")
    before = sources_digest(tmp_path)
    (tmp_path / "below/two.py").write_text("b = 2\n")
    sources_digest.cache_clear()
    assert sources_digest(tmp_path) != before


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "used"), [(BF16, set()), pytest.param(F16, LESS_COMMON, marks=pytest.mark.slow)], ids=["bf16", "f16"]
)
def test_first_merge__compiles_what_it_needs_alone(tmp_path: Path, dtype: DType, used: set[str]) -> None:
    """A linear merge selects nothing; code of dtypes that it does not have takes half of the time."""
    models = write_family(tmp_path, TINY, 1, dtype=dtype).models
    weighted = [{"model": str(model), "parameters": {"weight": 1}} for model in models]
    recipe = {"merge_method": "linear", "models": weighted}
    script = f"import mergepipe; mergepipe.merge({recipe!r}, {str(tmp_path / 'out')!r})"
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "code")}
    subprocess.run([sys.executable, "-c", script], env=settings, check=True)
    kept = {path.name.rpartition("-")[0] for path in (tmp_path / "code").rglob("*-*")}
    assert "merge.merge_block" in kept
    assert kept & {*LESS_COMMON, "merge._keep_random", "merge.keep_varied"} == used
    for module, _, name in (code.rpartition(".") for code in (*LESS_COMMON, "merge._keep_random", "merge.keep_varied")):
        assert hasattr(import_module(f"mergepipe.kernels.{module}"), name)


def test_merge_nothing__has_the_types_of_a_real_merge(tmp_path: Path) -> None:
    models = write_family(tmp_path, TINY, 2).models
    weighted = [{"model": str(model), "parameters": {"weight": 1, "density": 0.5}} for model in models[1:]]
    recipe = {"merge_method": "ties", "base_model": str(models[0]), "models": weighted}
    mergepipe.merge(recipe, tmp_path / "out")
    block_kernel: Any = merge.merge_block
    compiled = set(block_kernel.dispatcher.overloads)
    merge.merge_nothing()
    assert set(block_kernel.dispatcher.overloads) == compiled


PAIR = """
from mergepipe.kernels.compiled import compile_in_parallel, kernel

@kernel
def first(x):
    return x + 1

@kernel
def then(x):
    return x * 2

def call():
    then(1)

compile_in_parallel(first, then, call)
"""


@pytest.mark.thorough
@pytest.mark.skipif(os.cpu_count() == 1, reason="one core compiles one kernel at a time")
def test_compile_in_parallel__lets_a_second_process_compile_what_comes_next(tmp_path: Path) -> None:
    (tmp_path / "pair.py").write_text(PAIR)
    script = """
from pair import call, first, then
first(1)
call()
print(*(sum(each.dispatcher._cache_misses.values()) for each in (first, then)))
"""
    settings = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "code"), "PYTHONPATH": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", script], env=settings, check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["1", "0"]


def test_count_magnitudes__has_a_second_process_compile_the_merge() -> None:
    counting: Any = reduce.count_magnitudes
    merging: Any = merge.merge_block
    compile_elsewhere = counting.before_compiling
    assert compile_elsewhere.func == merging.compile_elsewhere
    assert compile_elsewhere.args == ("from mergepipe.kernels.merge import merge_nothing as call; call()",)


def test_compile_elsewhere__starts_nothing_where_no_folder_takes_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", "relative")
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    Kernel(merge.merge_nothing).compile_elsewhere("")
