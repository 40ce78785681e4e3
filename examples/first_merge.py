"""A first merge: two experts into one model, by TIES. `python examples/first_merge.py [FOLDER]`."""

from __future__ import annotations

import sys
from pathlib import Path

from example_models import write_small_models

import mergepipe


def main(folder: Path) -> None:
    """Write small models into `folder`, merge them, and verify what came out."""
    base, experts = write_small_models(folder)
    recipe = {
        "merge_method": "ties",
        "base_model": str(base),
        "models": [{"model": str(expert), "parameters": {"weight": 0.5, "density": 0.2}} for expert in experts],
        "dtype": "bfloat16",
    }
    checked = mergepipe.check(recipe)  # reads headers, no tensor data
    print(f"a merge reads {checked.expert_bytes:,} bytes of the experts")
    report = mergepipe.merge(recipe, folder / "merged", force=True)
    print(f"read {report.expert_bytes:,}, wrote {report.output_bytes:,} bytes to {report.out}")
    print(f"every byte is as it was written: {mergepipe.verify(folder / 'merged').is_sound}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "example"))
