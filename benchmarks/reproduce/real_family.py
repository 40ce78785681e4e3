"""Command that pre-trains the base of the trained family (33.6M parameters) until it is stopped, and resumes it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import tiny_lm
from benchmarks.local_text import GENERAL, Domain, gather
from benchmarks.tiny_lm import LmShape, Schedule

DEFAULT_ROOT = Path(".bench/real-family")
SHAPE = LmShape(vocab=4096, hidden=512, layers=10, kv_heads=4, head_dim=64, intermediate=1536, context=512)
EXPERT_DOMAINS = ("prose", "headers", "legal", "internet")
STATE_NAME = "base.state"
_PROGRESS_NAME = "pretraining.json"
_TEXT_NAME = "text.json"
_ENDLESS = 10**9
PRETRAINING = Schedule(
    steps=_ENDLESS, peak_rate=2e-3, batch=8, window_tokens=256, muon=True, bf16=True, decay_steps=1
)  # fmt: skip


def read_domains(root: Path) -> tuple[Domain, ...]:
    """Return the general text and the experts' four domains: those in `root`, else this machine's, kept there."""
    path = root / _TEXT_NAME
    if not path.exists():
        by_name = {domain.name: domain for domain in gather(8)}
        domains = [by_name[name] for name in (GENERAL, *EXPERT_DOMAINS)]
        root.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(domain) for domain in domains]))
    return tuple(Domain(**entry) for entry in json.loads(path.read_text()))


class _Progress:
    """Writes how many tokens were seen, with the mean loss since the last time, every 20 steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._losses: list[float] = []
        self._started = time.monotonic()

    def __call__(self, step: int, loss: float) -> None:
        self._losses.append(loss)
        if (step + 1) % 20 == 0:
            entry = {
                "steps": step + 1,
                "tokens": (step + 1) * PRETRAINING.batch * PRETRAINING.window_tokens,
                "loss": round(sum(self._losses) / len(self._losses), 4),
                "seconds": round(time.monotonic() - self._started),
            }
            with self._path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
            self._losses = []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    domains = read_domains(options.root)
    tiny_lm.use_threads(options.threads)
    tokenizer = tiny_lm.make_tokenizer((domain.training for domain in domains), SHAPE.vocab)
    tokens = tiny_lm.tokens_of(tokenizer, domains[0].training)
    progress = _Progress(options.root / _PROGRESS_NAME)
    tiny_lm.train(tiny_lm.new_model(SHAPE, 0), tokens, PRETRAINING, progress, state=options.root / STATE_NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())
