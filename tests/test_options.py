"""Numbers that callers give: absurd ones end in one typed error, through every function that takes them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import mergepipe
from mergepipe import api as keeping
from mergepipe import api as session
from mergepipe import options as asked
from mergepipe.cli.failures import failure_of
from mergepipe.errors import LimitError, MergePipeError, RecipeError
from mergepipe.jobs import pack as packing
from mergepipe.jobs import unpack as unpacking
from mergepipe.kernels import address_space
from mergepipe.tailor import api as tailor

TOO_MANY = 99999999999999999999
THREADS = [(0, "option.not-positive"), (-1, "option.not-positive"), (asked.MOST_THREADS + 1, "option.too-large"),
           (TOO_MANY, "option.too-large"), (10**5000, "option.too-large")]  # fmt: skip
SIZES = [(0, "option.not-positive"), (-1, "option.not-positive"), (2**63, "option.too-large"),
         (2**64, "option.too-large"), (10**5000, "option.too-large")]  # fmt: skip
SEEDS = [(-(2**63) - 1, "option.seed"), (2**64, "option.seed"), (10**5000, "option.seed"), (-(10**5000), "option.seed")]
BLOCKS = [(value, "option.block-elements") for value in (0, -16384, 1, 2**63, 2**41, 2**64 * 16384, 10**5000)]
NAN, INFINITY = float("nan"), float("inf")
SHARES = (-1.0, NAN, INFINITY, -INFINITY, 1.5, 1e308)
X = Path("nothing/is/looked/at")

Call = Callable[..., object]
TABLE: list[tuple[str, Call, str, list[tuple[int, str]] | list[tuple[float, str]]]] = [
    ("merge", lambda **k: mergepipe.merge(X, X, **k), "threads", THREADS),
    ("merge", lambda **k: mergepipe.merge(X, X, **k), "memory_bytes", SIZES),
    ("merge", lambda **k: mergepipe.merge(X, X, **k), "shard_bytes", SIZES),
    ("merge", lambda **k: mergepipe.merge(X, X, **k), "seed", SEEDS),
    ("merge", lambda **k: mergepipe.merge(X, X, budget="1%", **k), "block_elements", BLOCKS),
    ("merge", lambda **k: mergepipe.merge(X, X, **k), "target_error", [(v, "option.error") for v in (-1.0, NAN)]),
    ("merge", lambda **k: mergepipe.merge(X, X, budget="1%", **k), "adjust_min_density",
     [(v, "option.density") for v in (0.0, *SHARES)]),
    ("plan", lambda **k: mergepipe.plan(X, "1%", **k), "seed", SEEDS),
    ("plan", lambda **k: mergepipe.plan(X, "1%", **k), "block_elements", BLOCKS),
    ("check", lambda **k: session.check(X, **k), "shard_bytes", SIZES),
    ("analyze", lambda **k: session.analyze(X, [X], **k), "threads", THREADS),
    ("analyze", lambda **k: session.analyze(X, [X], **k), "memory_bytes", SIZES),
    ("analyze", lambda **k: session.analyze(X, [X], **k), "block_elements", BLOCKS),
    ("analyze", lambda **k: session.analyze(X, [X], **k), "probe_fraction", [(v, "option.probe") for v in SHARES]),
    ("sweep", lambda **k: session.sweep(X, ["1%"], **k), "threads", THREADS),
    ("sweep", lambda **k: session.sweep(X, ["1%"], **k), "memory_bytes", SIZES),
    ("sweep", lambda **k: session.sweep(X, ["1%"], **k), "seed", SEEDS),
    ("verify", lambda **k: keeping.verify(X, **k), "threads", THREADS),
    ("verify", lambda **k: keeping.verify(X, **k), "memory_bytes", SIZES),
    ("verify", lambda **k: keeping.verify(X, **k), "deep_fraction", [(v, "option.sample") for v in SHARES]),
    ("repair", lambda **k: keeping.repair(X, **k), "threads", THREADS),
    ("repair", lambda **k: keeping.repair(X, **k), "memory_bytes", SIZES),
    ("replay", lambda **k: keeping.replay(X, X, **k), "threads", THREADS),
    ("replay", lambda **k: keeping.replay(X, X, **k), "memory_bytes", SIZES),
    ("materialise", lambda **k: keeping.materialise(X, X, **k), "threads", THREADS),
    ("pack", lambda **k: packing.pack(X, [X], X, **k), "threads", THREADS),
    ("unpack", lambda **k: unpacking.unpack(X, X, **k), "threads", THREADS),
    ("tailor", lambda **k: tailor.compose(X, X, **k), "memory_bytes", SIZES),
    ("tailor", lambda **k: tailor.compose(X, X, **k), "world_size",
     [(0, "option.not-positive"), (-1, "option.not-positive"), (TOO_MANY, "option.too-large"),
      (10**5000, "option.too-large")]),
    ("tailor", lambda **k: tailor.recipe_text("filter", X, **k), "ends",
     [(v, "option.negative") for v in (-1, -(10**5000))]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "name"), [(row[1], row[2]) for row in TABLE], ids=[f"{r[0]}-{r[2]}" for r in TABLE])
def test_api__absurd_numbers_end_in_a_typed_error_before_anything_is_opened(call: Call, name: str) -> None:
    (values,) = (row[3] for row in TABLE if row[1] is call)
    codes = []
    for value, _ in values:
        with pytest.raises(MergePipeError) as caught:
            call(**{name: value})
        codes.append(caught.value.code)
        assert len(str(caught.value)) < 300
    assert codes == [code for _, code in values]


@pytest.mark.parametrize(("value", "kind"), [(1, None), (1024, None), (0, LimitError), (1025, RecipeError)])
def test_threads_asked__takes_up_to_its_bound(value: int, kind: type[MergePipeError] | None) -> None:
    if kind is None:
        assert asked.threads_asked(value) == value
        return
    with pytest.raises(kind):
        asked.threads_asked(value)


@pytest.mark.parametrize("value", [0, -(2**63), 2**64 - 1])
def test_seed_asked__takes_64_bits(value: int) -> None:
    assert asked.seed_asked(value) == value


@pytest.mark.parametrize("command", [["pack", "b", "e", "--out", "s"], ["merge", "r.yml", "o"], ["verify", "s"],
                                     ["analyze", "b", "e"], ["unpack", "s", "--out", "o"]])  # fmt: skip
def test_cli__too_little_address_space_is_told_in_one_line(command: list[str], tmp_path: Path) -> None:
    limit = address_space.COMPILER_ADDRESS_BYTES + 2 * address_space.THREAD_ADDRESS_BYTES - 1
    done = subprocess.run(
        [sys.executable, "-m", "mergepipe", *command, "--threads", "2"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "MERGEPIPE_HOME": str(tmp_path / "home"), "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        check=False,
    )
    assert (done.returncode, done.stdout) == (10, "")
    assert done.stderr.endswith("[memory.address-space]\n")
    assert done.stderr.count("\n") == 1


def test_pack__from_python_too_little_address_space_is_an_error_and_no_abort(tmp_path: Path) -> None:
    limit = address_space.COMPILER_ADDRESS_BYTES // 2
    done = subprocess.run(
        [sys.executable, "-c", "import mergepipe; mergepipe.pack('base', ['expert'], 'packed')"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "LimitError: ulimit -v: the address space is limited to 512 MiB" in done.stderr.splitlines()[-1]


def test_failure_of__a_library_that_does_not_fit_the_address_space_is_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(address_space, "address_space_limit_bytes", lambda: 1 << 20)
    failure = failure_of(OSError("Could not find/load shared object file 'libllvmlite.so'"), 130)
    assert failure.problems[0].code == "storage.out-of-memory"
