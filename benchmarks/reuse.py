"""What reuse saves, and what copying inside the kernel would.

`python -m benchmarks.reuse WORK [--experts 3] [--repeats 3]` makes a family of Qwen3-0.6B's shape in WORK, if needed,
and prints one JSON line per repeat: seconds of a merge from scratch, of the same merge that takes every block from an
earlier snapshot (read, hashed, compared, written), of `copy_file_range` of that snapshot's weights followed by fsync
(nothing hashed), and of only reading and hashing them. Everything is cold.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cold import make_cold
from mergepipe import api as keeping
from mergepipe import api as session
from mergepipe.options import MergeOptions
from mergepipe.reports import MergeReport
from support.families import write_family
from support.family_shapes import QWEN3_0_6B

RECIPE = """\
merge_method: task_arithmetic
base_model: family/base
models:
{models}
"""


def prepared(work: Path, experts: int) -> Path:
    """The recipe, with its models."""
    if not (work / "family").exists():
        write_family(work / "family", QWEN3_0_6B, experts)
    lines = [f"- {{model: family/expert-{i}, parameters: {{weight: 0.3}}}}" for i in range(1, experts + 1)]
    recipe = work / "recipe.yml"
    recipe.write_text(RECIPE.format(models="\n".join(lines)))
    return recipe


def merged(work: Path, recipe: Path, name: str, *, reuse: bool) -> MergeReport:
    """Merge from cold inputs; the output replaces nothing."""
    shutil.rmtree(work / name, ignore_errors=True)
    make_cold([work / "family", *([work / "first"] if (work / "first").exists() else [])])
    return session.merge(recipe, work / name, options=MergeOptions(home=work / "home", reuse=reuse))


def copied(source: Path, target: Path) -> None:
    """Copy weight files inside the kernel, and make the copies durable."""
    target.mkdir()
    for path in sorted(source.glob("*.safetensors")):
        with path.open("rb") as reader, (target / path.name).open("wb") as writer:
            left = path.stat().st_size
            while left:
                left -= os.copy_file_range(reader.fileno(), writer.fileno(), left)
            os.fsync(writer.fileno())


def seconds_of(action: Callable[[], object], cold: Sequence[Path]) -> float:
    """Wall seconds from cold files."""
    make_cold(cold)
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    work: Path = options.work
    recipe = prepared(work, options.experts)
    first = work / "first"
    merged(work, recipe, "first", reuse=False)
    for _ in range(options.repeats):
        shutil.rmtree(work / "copy", ignore_errors=True)
        scratch, reusing = (merged(work, recipe, "again", reuse=reuse) for reuse in (False, True))
        found = {
            "output_bytes": scratch.output_bytes,
            "scratch_seconds": scratch.seconds,
            "scratch_expert_bytes": scratch.expert_bytes,
            "reusing_seconds": reusing.seconds,
            "reusing_expert_bytes": reusing.expert_bytes,
            "reused_bytes": reusing.reused_bytes,
            "copy_file_range_seconds": seconds_of(lambda: copied(first, work / "copy"), [first]),
            "verify_seconds": seconds_of(lambda: keeping.verify(first), [first]),
        }
        print(json.dumps({key: round(value, 2) for key, value in found.items()}), flush=True)


if __name__ == "__main__":
    main()
