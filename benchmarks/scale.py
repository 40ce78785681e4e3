"""Command that plans a merge of 405 B parameters in parts, over files that hold holes instead of tensors."""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

import mergepipe
from mergepipe.engine.work import split
from mergepipe.options import DEFAULT_SHARD_BYTES, OutputOptions
from mergepipe.planning.plan import Plan
from mergepipe.runs.parts import open_output
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.stores import Stores
from support.bucket_outputs import bucket_server, new_prefix
from support.disk_families import write_single
from support.sparse_models import decoder, write_sparse

LLAMA = (16384, 53248, 128256, 1024)  # hidden, intermediate, vocabulary, keys
T = TypeVar("T")


def timed(what: str, call: Callable[[], T]) -> T:
    """Call, and print the seconds that it took, on the wall and of the processor."""
    started, cpu = time.perf_counter(), time.process_time()
    result = call()
    print(f"{what}: {time.perf_counter() - started:.1f} s, {time.process_time() - cpu:.1f} s of the processor")
    return result


def show_parts(plan: Plan, n_parts: int) -> None:
    """Print what a worker reads before it begins, and how evenly the parts are dealt out."""
    store = Stores()
    planned = timed("a worker opens plan and inputs", lambda: open_output(plan, DEFAULT_SHARD_BYTES, store))
    n_files = sum(len(checkpoint.files) for checkpoint in planned.inputs.checkpoints)
    metadata = store.ledger.usage()[Purpose.METADATA]
    print(f"headers and indices of {n_files} files: {metadata / 1e6:.1f} MB")
    parts = split(planned.output, n_parts)
    sizes = [sum(planned.output.shards[shard].file_bytes for shard in part.shards) for part in parts]
    print(f"{len(planned.output.shards)} output files, parts of {max(sizes) / 1e9:.1f} to {min(sizes) / 1e9:.1f} GB")


def count_requests(work: Path, n_files: int, n_parts: int) -> None:
    """Print what all workers together ask of the bucket of an output with as many files, which are tiny here."""
    from werkzeug.serving import WSGIRequestHandler

    rng = np.random.default_rng(0)
    for name in ("base", "expert"):
        model = {f"layers.{i}.w": rng.standard_normal(64).astype(np.float32) for i in range(n_files)}
        write_single(work / name, model)
    lines = ["merge_method: linear", f"base_model: {work / 'base'}", f"models: [{{model: {work / 'expert'}}}]"]
    (work / "recipe.yml").write_text("\n".join([*lines, "parameters: {weight: 0.5}"]))
    plan = mergepipe.plan(work / "recipe.yml", everything=True, home=work / "home")
    answer, kinds = WSGIRequestHandler.run_wsgi, Counter[str]()

    def counted(handler: WSGIRequestHandler) -> None:
        kinds[handler.command] += 1
        answer(handler)

    with bucket_server() as server, pytest.MonkeyPatch.context() as patched:
        out = new_prefix(server, patched)
        patched.setattr(WSGIRequestHandler, "run_wsgi", counted)
        options = OutputOptions(home=work / "home", catalog=False, threads=1, shard_bytes=400)
        largest = 0
        for number in range(1, n_parts + 1):
            before = kinds.total()
            report = mergepipe.run_part(plan, out, (number, n_parts), options=options)
            largest = max(largest, kinds.total() - before) if not report.is_published else largest
        last = kinds.total() - before
    print(f"requests for {report.n_shards} files by {n_parts} workers: {kinds.total()}, {dict(kinds)}")
    print(f"of a worker: at most {largest}; of the one that publishes: {last}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures of `docs/internals/benchmarks.md`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--experts", type=int, default=20)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--requests", type=int, metavar="FILES", help="count the requests for an output of FILES files")
    chosen = parser.parse_args(arguments)
    work = Path(tempfile.mkdtemp(dir=chosen.work))
    try:
        if chosen.requests:
            count_requests(work, chosen.requests, chosen.parts)
            return
        names = ("base", *(f"expert-{e}" for e in range(1, chosen.experts + 1)))
        shapes = decoder(chosen.layers, *LLAMA)
        base, *experts = (write_sparse(work / name, shapes) for name in names)
        lines = [f"  - {{model: {expert}, parameters: {{weight: 0.05, density: 0.2}}}}" for expert in experts]
        recipe = work / "recipe.yml"
        recipe.write_text("\n".join(["merge_method: ties", f"base_model: {base}", "models:", *lines]))
        plan = timed("plan --all", lambda: mergepipe.plan(recipe, everything=True, home=work / "home"))
        print(f"to be read of experts: {plan.planned_bytes / 1e12:.2f} TB")
        print(f"plan file: {len(plan.to_json()) / 1e6:.1f} MB")
        show_parts(plan, chosen.parts)
        print(f"memory at its peak: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
