"""A merge that reads half of the bytes and says what is missing. `python examples/budgeted_merge.py [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from example_models import write_small_models

import mergepipe


def main(folder: Path) -> None:
    """Write small models into `folder`, look at them once, and merge them under a budget."""
    base, experts = write_small_models(folder)
    recipe = {
        "merge_method": "task_arithmetic",
        "base_model": str(base),
        "models": [{"model": str(expert), "parameters": {"weight": 0.7}} for expert in experts],
    }
    mergepipe.analyze(base, experts)  # once: what it learns serves all later plans
    report = mergepipe.merge(recipe, folder / "half", budget="50%", force=True)
    assert report.verdict is not None
    print(f"read {report.expert_bytes:,} of at most {report.budget_bytes:,} bytes")
    for expert in report.verdict.experts:
        print(f"{expert.model}: {expert.share:.0%} of the blocks that it changes")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "example"))
