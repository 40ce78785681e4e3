"""Compare two universal checkpoints, value by value: that of DeepSpeed's converter, and ours. Run by a test.

    python compare_universal.py THEIRS OURS

Prints `equal` and the number of files, or what differs. Of the optimizer's options, theirs repeats one rank's flat
tensors in stage 3, which no loader reads.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any


def plain(value: Any) -> Any:
    """Values that compare by content; an object by its type and its fields."""
    torch: Any = import_module("torch")
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.reshape(-1).tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return (type(value).__name__, plain(vars(value))) if hasattr(value, "__dict__") else value


def without_flats(options: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in options.items() if key != "fp32_flat_groups"}
    if "optimizer_state_dict" in kept:
        base = kept["optimizer_state_dict"]
        kept["optimizer_state_dict"] = {**base, "state": {0: {"step": base["state"][0]["step"]}}}
    return kept


def main() -> None:
    torch: Any = import_module("torch")
    import_module("deepspeed")
    theirs, ours = (Path(argument) for argument in sys.argv[1:])
    names = sorted(str(path.relative_to(theirs)) for path in theirs.glob("zero/**/*.pt"))
    made = sorted(str(path.relative_to(ours)) for path in ours.glob("zero/**/*.pt"))
    different = sorted(set(names) ^ set(made))
    for name in names if not different else []:
        a, b = (torch.load(folder / name, weights_only=False) for folder in (theirs, ours))
        if name == "zero/optimizer_state.pt":
            a, b = without_flats(a), without_flats(b)
        different += [] if plain(a) == plain(b) else [name]
    print(*(["different", *different] if different else ["equal", len(names)]))


if __name__ == "__main__":
    main()
