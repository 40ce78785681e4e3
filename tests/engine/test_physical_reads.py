"""The bytes that a merge reports against those that the operating system counted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from support.disk_families import make_models, write_family, write_recipe
from support.faults import drop_from_page_cache
from support.oracle import MergeCase
from support.slow_cases import slow_unless

WEIGHTS, DENSITIES = (0.7, 0.5), (0.2, 0.37)
CASES = {
    "linear": MergeCase("linear", WEIGHTS, DENSITIES),
    "ties": MergeCase("ties", WEIGHTS, DENSITIES, normalize=True),
    "dare_ties": MergeCase("dare_ties", WEIGHTS, DENSITIES, normalize=True),
}
AMPLE, TIGHT = 1 << 30, 10_000_000
# A metadata read touches up to two pages more than it asks for, one at either end; each file has four or fewer.
PAGES_PER_FILE = 8
PAGE_BYTES = 4096

PROGRAM = """
import json, os, sys
from pathlib import Path
import mergepipe

def counted():
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])

recipe, out, memory = sys.argv[1:]
options = mergepipe.MergeOptions(memory_bytes=int(memory), catalog=False)
mergepipe.merge(recipe, out + "-warm", options=options)
sys.stdin.readline()
before = counted()
report = mergepipe.merge(recipe, out, options=options)
physical = counted() - before
print(json.dumps({"physical": physical, "reported": report.read_bytes, "analysis": report.analysis_bytes,
                  "tensors": report.base_bytes + report.expert_bytes}))
"""


def _run(recipe: Path, memory_bytes: int, folder: Path, cold: list[Path]) -> dict[str, int]:
    """Merge `recipe` twice in a process of its own, the second time with cold inputs, when all code is loaded."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(recipe), str(folder / "out"), str(memory_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        while not (folder / "out-warm").exists() and process.poll() is None:
            time.sleep(0.01)
        drop_from_page_cache(*cold)
        answer, _ = process.communicate("go\n")
    counts: dict[str, int] = json.loads(answer)
    return counts


@pytest.mark.parametrize(
    ("operator", "memory_bytes"),
    slow_unless(
        {("linear", AMPLE), ("ties", TIGHT), ("dare_ties", TIGHT)}.__contains__, product(CASES, (AMPLE, TIGHT))
    ),
)
def test_merge__reads_no_more_than_it_reports(tmp_path: Path, operator: str, memory_bytes: int) -> None:
    case = CASES[operator]
    if not Path("/proc/self/io").exists():
        pytest.skip("the operating system does not count reads per process")
    rng = np.random.default_rng(0)
    models = make_models(2)
    large = tuple(dict(model, large=rng.standard_normal(700_001).astype(np.float32)) for model in models)
    family = write_family(tmp_path / "cold", large)
    recipe = write_recipe(tmp_path / "recipe.yml", case, family)
    n_files = sum(1 for place in family.places for path in [place, *place.rglob("*")] if path.is_file())
    for turn in range(2):  # pages of the program that memory pressure took away are read again, by chance
        counts = _run(recipe, memory_bytes, tmp_path / f"turn-{turn}", [*family.places, recipe])
        if counts["physical"] <= counts["reported"] + n_files * PAGES_PER_FILE * PAGE_BYTES:
            break
    assert counts["physical"] <= counts["reported"] + n_files * PAGES_PER_FILE * PAGE_BYTES
    assert counts["analysis"] > 0 or case.operator == "linear" or memory_bytes == 1 << 30
    if counts["physical"] == 0:
        pytest.skip("this file system's reads are not counted")
    assert counts["physical"] >= 0.9 * counts["tensors"]
