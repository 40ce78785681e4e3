"""Command that measures partial saving: bytes, seconds and the share of training time of saves, against full ones.

`make bench-saving` runs it in the environment of requirements/train.txt. Every strategy trains the same model under the
Trainer, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import deepspeed_cpu
from benchmarks.reproduce.pages import Table
from benchmarks.tailor_training import partial_saves

_FULL = "full"
_STRATEGIES = (_FULL, "paper-parity", "paper-filter", "parity", "filter", "latest-changed")
_SHAPE = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "vocab_size": 4096}
_EVERY = 10  # steps between two saves
_WINDOW_TOKENS = 32

Saves = list[tuple[int, float]]  # of each: its bytes, and the seconds that training waits, all files durable


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every strategy and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path, nargs="?", default=Path(".bench/partial-saving"), help="removed at the end")
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--strategy", choices=_STRATEGIES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.strategy:
        measured = _train(given.strategy, given.work / "run", given.saves)
        (given.work / "saves.json").write_text(json.dumps(measured))
        return
    full_bytes, rows = 0.0, []
    for strategy in _STRATEGIES:
        saves, total_seconds = _measure(strategy, given.work / strategy, given.saves)
        n_bytes, seconds = mean(nbytes for nbytes, _ in saves), [each for _, each in saves]
        full_bytes = full_bytes or n_bytes
        cells = (f"{n_bytes / 1e6:.1f}", f"{n_bytes / full_bytes:.0%}", f"{median(seconds):.2f}")
        rows.append((strategy, *cells, f"{sum(seconds) / total_seconds:.1%}"))
    header = ("strategy", "MB a save", "of a full save", "seconds", "of training time")
    print(Table(header, tuple(rows)).markdown())


def _measure(strategy: str, work: Path, n_saves: int) -> tuple[Saves, float]:
    """Train in a process of its own; the checkpoints are removed afterwards."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    deepspeed_cpu.run_ranks(1, "benchmarks.partial_saving", work, f"--saves={n_saves}", f"--strategy={strategy}")
    saves, seconds = json.loads((work / "saves.json").read_text())
    shutil.rmtree(work)
    return saves, seconds


def _train(strategy: str, out: Path, n_saves: int) -> tuple[Saves, float]:
    """Train with a full save and `n_saves` by the strategy; return these, and the seconds of all but the first."""
    trainer = _trainer(out, (n_saves + 1) * _EVERY, saves_itself=strategy == _FULL)
    saves: Saves = []
    if strategy == _FULL:
        _watch_full_saves(trainer, saves)
    else:
        trainer.add_callback(partial_saves(strategy, _EVERY, trainer.model))
    started = time.perf_counter()
    trainer.train()
    total_seconds = time.perf_counter() - started
    if strategy != _FULL:
        journal: Any = import_module("mergepipe.tailor.saving.unit_choice")
        saves = [(record.saved_bytes, record.seconds) for record in journal.read_journal(out).records]
    assert len(saves) == n_saves + 1, f"{len(saves)} saves, not {n_saves + 1}"
    return saves[1:], total_seconds - saves[0][1]


def _trainer(out: Path, last: int, *, saves_itself: bool) -> Any:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        **_SHAPE, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=_WINDOW_TOKENS,
        tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    rows = torch.randint(1, _SHAPE["vocab_size"], (64, _WINDOW_TOKENS), generator=torch.Generator().manual_seed(2))
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=last, save_strategy="steps" if saves_itself else "no", save_steps=_EVERY,
        per_device_train_batch_size=1, learning_rate=1e-3, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model=transformers.LlamaForCausalLM(config), args=arguments, train_dataset=data)


def _watch_full_saves(trainer: Any, saves: Saves) -> None:
    """Note every checkpoint that the Trainer writes itself, made durable, which it does not do."""
    save = trainer._save_checkpoint

    def timed(*arguments: Any, **options: Any) -> None:
        started = time.perf_counter()
        save(*arguments, **options)
        folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        saves.append((sum(path.stat().st_size for path in files), time.perf_counter() - started))

    trainer._save_checkpoint = timed


if __name__ == "__main__":
    main()
