"""Command that scores any Hugging Face model directory on a trained family's held-out text, domain by domain."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = Path(".bench/trained")
FILE_NAME = "heldout.json"


@dataclass(frozen=True, slots=True)
class Heldout:
    """Token windows of equal length by domain, never trained on, and how many bytes of text they spell."""

    windows: Mapping[str, Sequence[Sequence[int]]]
    text_bytes: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.windows or self.windows.keys() != self.text_bytes.keys():
            raise ValueError("held-out text needs at least one domain, and the bytes of each")
        if len({len(window) for windows in self.windows.values() for window in windows}) != 1:
            raise ValueError("held-out windows differ in length, or there are none")

    def to_json(self) -> str:
        """`from_json(to_json(h)) == h`."""
        return json.dumps({"windows": self.windows, "text_bytes": self.text_bytes}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Heldout:
        content = json.loads(text)
        return cls(content["windows"], content["text_bytes"])


def read_heldout(root: Path) -> Heldout:
    """Read the held-out text of the family in `root`."""
    return Heldout.from_json((root / FILE_NAME).read_text())


def heldout_losses(model: Path, heldout: Heldout, *, as_bf16: bool = False) -> dict[str, float]:
    """Load `model` in float32, rounded to bfloat16 first if `as_bf16`; return nats per token for each domain."""
    from benchmarks import tiny_lm

    loaded = tiny_lm.load_model(model)
    if as_bf16:
        tiny_lm.round_to_bf16(loaded)
    return tiny_lm.losses(loaded, heldout.windows)


def mean(losses: Mapping[str, float]) -> float:
    """The plain mean over domains."""
    return sum(losses.values()) / len(losses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    try:
        heldout = read_heldout(options.root)
    except FileNotFoundError:
        print(f"error: no {FILE_NAME} in {options.root}: run benchmarks.trained_family first", file=sys.stderr)
        return 1
    from benchmarks import tiny_lm

    tiny_lm.use_threads(options.threads)
    losses = heldout_losses(options.model, heldout)
    print(json.dumps({"model": str(options.model), "losses": losses, "mean": mean(losses)}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
