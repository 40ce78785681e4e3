"""What is promised of sizes: memory and disk under their caps, many tensors and experts, and a quick end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.options import MergeOptions
from support.hub_server import written_hub
from support.local_models import open_local
from support.model_folders import recipe_of
from support.sparse_models import Shapes, decoder, nbytes_of, write_sparse

# Runs the rest of the script in the address space that it has after its imports and a first merge, and so much more.
CAPPED = """
import mmap, resource, sys, time
from pathlib import Path
import mergepipe
mergepipe.merge(
    sys.argv[1], sys.argv[2], options=mergepipe.MergeOptions(threads={threads}, catalog=False)
)
def address_space(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
before = address_space("VmSize")
limit = before + {allowed_bytes}
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
started = time.perf_counter()
{body}
print("seconds", time.perf_counter() - started)
print("grown_bytes", address_space("VmPeak") - before)
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a capped script measured of itself."""

    seconds: float
    grown_bytes: int


def write_recipe(path: Path, operator: str, base: Path, experts: Sequence[Path]) -> Path:
    parameters = {"weight": 0.5} | ({"density": 0.2} if operator in ("ties", "dare_ties") else {})
    path.write_text(json.dumps(recipe_of(operator, dict.fromkeys(experts, parameters), base)))
    return path


def write_family(root: Path, shapes: Shapes, n_experts: int, shard_bytes: int = 5_000_000_000) -> list[Path]:
    """A base and experts, sparse all of them."""
    names = ["base", *(f"expert-{i}" for i in range(n_experts))]
    return [write_sparse(root / name, shapes, shard_bytes) for name in names]


def environment(root: Path) -> dict[str, str]:
    """Of a child: one heap for all threads, since every other one reserves 64 MiB of addresses that it does not use."""
    return {**os.environ, "MERGEPIPE_HOME": str(root / "home"), "MALLOC_ARENA_MAX": "1"}


def run_capped(root: Path, operator: str, body: str, allowed_bytes: int, *, patience_seconds: float = 600) -> Figures:
    """Run `body` in a process that may take `allowed_bytes` of addresses more than it has when it begins."""
    tiny = write_family(root / "tiny", {"a.weight": (300, 100), "b": (7,)}, 2)
    recipe = write_recipe(root / "tiny.yml", operator, tiny[0], tiny[1:])
    script = CAPPED.format(allowed_bytes=allowed_bytes, body=textwrap.dedent(body), threads=2)
    done = subprocess.run(
        [sys.executable, "-c", script, str(recipe), str(root / "tiny-out")],
        capture_output=True, text=True, timeout=patience_seconds, env=environment(root), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = dict(line.split() for line in done.stdout.splitlines() if line.startswith(("seconds", "grown_bytes")))
    return Figures(float(found["seconds"]), int(found["grown_bytes"]))


MEMORY_BYTES = 64 << 20
OVERHEAD_BYTES = 224 << 20
"""Addresses beside the cap on buffers: stacks of threads, counters of reductions, compiled loops, small things."""
TENSOR_BYTES = 16 << 10
"""What is known of one tensor in all models: names, places, digests, its line of the record."""

OPTIONS = "mergepipe.MergeOptions(threads=2, memory_bytes={memory}, catalog=False)"
MERGE = f"mergepipe.merge({{recipe!r}}, {{out!r}}, options={OPTIONS})"
PLAN = "plan = mergepipe.plan({recipe!r}, {budget!r})\nassert 0 < plan.planned_bytes <= plan.budget_bytes"

# Fails unless a merge is refused by an error that the command line has a line for.
EXPECT_REFUSAL = """
from mergepipe.errors import LimitError, StorageError
try:
    {merge}
except (LimitError, StorageError, MemoryError) as error:
    print("refused", type(error).__name__)
else:
    raise SystemExit("it was not refused")
"""

# Runs a command line that the parent will interrupt, as a terminal does.
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from mergepipe.cli import main
sys.exit(main(sys.argv[1:]))
"""


def merge_capped(root: Path, operator: str, recipe: Path, n_tensors: int = 1) -> Figures:
    """Merge into `root/out` in the address space that is promised."""
    body = MERGE.format(recipe=str(recipe), out=str(root / "out"), memory=MEMORY_BYTES)
    return run_capped(root, operator, body, MEMORY_BYTES + OVERHEAD_BYTES + n_tensors * TENSOR_BYTES)


@pytest.mark.thorough
@pytest.mark.parametrize("operator", [pytest.param("linear", marks=pytest.mark.slow), "ties"])
def test_merge__of_more_than_memory_holds_runs_at_the_promised_bound(tmp_path: Path, operator: str) -> None:
    models = write_family(tmp_path, {"large.weight": (9000, 5000), "norm": (9000,)}, 3)
    recipe = write_recipe(tmp_path / "recipe.yml", operator, models[0], models[1:])
    merge_capped(tmp_path, operator, recipe)
    out = tmp_path / "out" / "model.safetensors"
    assert out.stat().st_size > 90_000_000
    with out.open("rb") as stream:
        stream.seek(-(1 << 20), 2)
        assert not np.frombuffer(stream.read(), np.uint8).any()


@pytest.mark.thorough
def test_merge__the_bound_of_these_tests_is_one(tmp_path: Path) -> None:
    """A process that takes what no promise covers does not pass for one that keeps it."""
    body = f"import numpy\nlarge = numpy.ones({2 * (MEMORY_BYTES + OVERHEAD_BYTES)}, numpy.uint8)"
    with pytest.raises(AssertionError, match="MemoryError"):
        run_capped(tmp_path, "linear", body, MEMORY_BYTES + OVERHEAD_BYTES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "spare_bytes",
    [4 << 20, 40 << 20, pytest.param(20 << 20, marks=pytest.mark.slow), pytest.param(70 << 20, marks=pytest.mark.slow)],
)
def test_merge__with_less_than_it_needs_says_so_and_publishes_nothing(tmp_path: Path, spare_bytes: int) -> None:
    models = write_family(tmp_path, {"large.weight": (5000, 5000)}, 2)
    recipe = write_recipe(tmp_path / "recipe.yml", "linear", models[0], models[1:])
    merge = MERGE.format(recipe=str(recipe), out=str(tmp_path / "out"), memory=MEMORY_BYTES)
    run_capped(tmp_path, "linear", EXPECT_REFUSAL.format(merge=merge), spare_bytes)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["linear", "ties", "dare_ties"])
def test_merge__of_many_times_the_memory_runs_at_the_promised_bound(tmp_path: Path, operator: str) -> None:
    shapes = {f"layers.{i}.weight": (20_000, 10_000) for i in range(4)}
    models = write_family(tmp_path, shapes, 4)
    recipe = write_recipe(tmp_path / "recipe.yml", operator, models[0], models[1:])
    show(f"{operator} of 5 x {nbytes_of(shapes) / 1e9:.1f} GB", merge_capped(tmp_path, operator, recipe))


@pytest.mark.thorough
def test_merge__of_a_thousand_tensors_keeps_its_bound(tmp_path: Path) -> None:
    merge_many_tensors(tmp_path, 1000)


@pytest.mark.slow
def test_merge__of_ten_thousand_tensors_keeps_its_bound(tmp_path: Path) -> None:
    merge_many_tensors(tmp_path, 10_000)


def merge_many_tensors(root: Path, n_tensors: int) -> None:
    """Their reductions are more than the bound, were they held all at once."""
    shapes = {f"layers.{i}.weight": (64,) for i in range(n_tensors)}
    models = write_family(root, shapes, 2)
    recipe = write_recipe(root / "recipe.yml", "ties", models[0], models[1:])
    show(f"ties of {n_tensors} tensors", merge_capped(root, "ties", recipe, n_tensors))
    assert open_local(root / "out").tensors.keys() == shapes.keys()


@pytest.mark.thorough
def test_plan__of_a_hundred_experts_reads_headers_only(tmp_path: Path) -> None:
    plan_many_experts(tmp_path, 100)


@pytest.mark.slow
def test_plan__of_a_thousand_experts_keeps_its_bound(tmp_path: Path) -> None:
    plan_many_experts(tmp_path, 1000)


@pytest.mark.slow
def test_merge__of_a_thousand_experts_in_full_is_right(tmp_path: Path) -> None:
    recipe = many_experts(tmp_path, 1000)
    body = MERGE.format(recipe=str(recipe), out=str(tmp_path / "out"), memory=512 << 20)
    show("linear of 1000 experts", run_capped(tmp_path, "linear", body, (512 << 20) + OVERHEAD_BYTES))
    assert len(open_local(tmp_path / "out").tensors) == 20


def many_experts(root: Path, n_experts: int) -> Path:
    models = write_family(root, {f"layers.{i}.weight": (8, 8) for i in range(20)}, n_experts)
    return write_recipe(root / "recipe.yml", "linear", models[0], models[1:])


def plan_many_experts(root: Path, n_experts: int) -> None:
    body = PLAN.format(recipe=str(many_experts(root, n_experts)), budget="50%")
    show(f"plan of {n_experts} experts", run_capped(root, "linear", body, MEMORY_BYTES + OVERHEAD_BYTES))


@pytest.mark.thorough
@pytest.mark.parametrize("n_layers", [4, pytest.param(126, marks=pytest.mark.slow)])
def test_plan__of_a_terabyte_takes_bounded_memory(tmp_path: Path, n_layers: int) -> None:
    plan_terabytes(tmp_path, 1, n_layers)


@pytest.mark.slow
def test_plan__of_experts_of_a_terabyte_each_takes_bounded_memory(tmp_path: Path) -> None:
    plan_terabytes(tmp_path, 4)


def plan_terabytes(root: Path, n_experts: int, n_layers: int = 126) -> None:
    """Plan for experts of a terabyte each, or of fewer layers in as much less memory."""
    shapes = decoder(n_layers, 20480, 53248, 128256)
    assert nbytes_of(shapes) > n_layers / 126 * 1e12
    models = write_family(root, shapes, n_experts)
    recipe = write_recipe(root / "recipe.yml", "linear", models[0], models[1:])
    body = PLAN.format(recipe=str(recipe), budget="25%")
    figures = run_capped(
        root, "linear", body, (128 << 20) * n_layers // 126 + n_experts * OVERHEAD_BYTES, patience_seconds=300
    )
    show(f"plan of 1 + {n_experts} x {nbytes_of(shapes) / 1e12:.2f} TB", figures)


@pytest.mark.thorough
@pytest.mark.parametrize("operator", [pytest.param("linear", marks=pytest.mark.slow), "ties"])
def test_merge__of_gigabytes_ends_soon_after_it_is_interrupted(tmp_path: Path, operator: str) -> None:
    models = write_family(tmp_path, {"large.weight": (50_000, 20_000)}, 2)
    recipe = write_recipe(tmp_path / "recipe.yml", operator, models[0], models[1:])
    seconds = interrupt(tmp_path, ["merge", str(recipe), str(tmp_path / "out")], until=".out.mergepipe-*/*")
    print(f"{operator} of 3 x 2 GB ended {seconds:.2f} s after Ctrl-C")
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
def test_plan__of_a_terabyte_ends_soon_after_it_is_interrupted(tmp_path: Path) -> None:
    shapes = decoder(126, 20480, 53248, 128256)
    base = write_sparse(tmp_path / "base", shapes)
    experts = [write_sparse(tmp_path / f"expert-{i}", shapes) for i in range(6)]
    recipe = write_recipe(tmp_path / "recipe.yml", "ties", base, experts)
    seconds = interrupt(tmp_path, ["plan", str(recipe), "--budget", "10%"], until="recipe.yml", after_seconds=2.0)
    print(f"a plan of 7 TB ended {seconds:.2f} s after Ctrl-C")


def interrupt(root: Path, arguments: list[str], until: str, after_seconds: float = 0.3) -> float:
    """Send SIGINT to a command soon after a file is there; it must end with 130. Seconds it took to end."""
    child = subprocess.Popen(
        [sys.executable, "-c", COMMAND, *arguments], env=environment(root), stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, cwd=root,
    )  # fmt: skip
    with child:
        while not any(root.glob(until)) and child.poll() is None:
            time.sleep(0.01)
        time.sleep(after_seconds)
        assert child.poll() is None, "it had ended before"
        child.send_signal(signal.SIGINT)
        sent = time.monotonic()
        try:
            exit_code = child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            raise
        seconds = time.monotonic() - sent
    assert exit_code == 130
    return seconds


def show(what: str, figures: Figures) -> None:
    """For `pytest -s`: the figures of docs/internals/reliability.md."""
    print(f"{what}: {figures.seconds:.1f} s, {figures.grown_bytes / 2**20:.0f} MiB of addresses taken")


SCALE = int(os.environ.get("MERGEPIPE_DISK_SCALE", "10"))
"""The part of a 70B model, of 10 GB of disk, and of shards of 9 GB that is tried."""
WIDTH = round((1 / SCALE) ** 0.5 * 64) * 128
SHAPES = decoder(80, WIDTH, WIDTH * 7 // 2, 128_256 * WIDTH // 8192, keys=WIDTH // 8)
DISK_BYTES, SHARD_BYTES = 10**10 // SCALE, 9 * 10**9 // SCALE


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of so many bytes."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(place)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only who may mount a file system can limit one")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.slow
def test_merge__of_seventy_billion_weights_to_the_hub_fits_on_ten_gigabytes(
    tmp_path: Path, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("base", "expert"):
        write_sparse(tmp_path / name, SHAPES, SHARD_BYTES)
    recipe = recipe_of("task_arithmetic", {tmp_path / "expert": {"weight": 0.5}}, tmp_path / "base")
    options = MergeOptions(home=disk / "home", threads=2, shard_bytes=SHARD_BYTES)
    monkeypatch.setenv("TMPDIR", str(disk))
    with written_hub(monkeypatch, disk / "hf") as hub:
        hub.keeps_content = False
        hub.commit("user/merged", {})
        report = mergepipe.merge(recipe, "hf://user/merged", options=options)
        index = json.loads(hub.model_files("user/merged")["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == nbytes_of(SHAPES) > 10 * DISK_BYTES
    assert nbytes_of(SHAPES) < hub.uploaded_bytes <= report.output_bytes
    assert not list(disk.rglob("*.safetensors"))
