"""Command that measures partial saving: bytes and seconds of each save, against full saves and the machine's floor.

Run with the interpreter of requirements/train.txt and PYTHONPATH=src:. `python -m benchmarks.partial_saving WORK`.
Every strategy trains the same model in a process of its own (two gloo ranks for `--kind zero2`): the Trainer's full
checkpoints, all units by the writer of partial saves, some of them, and some behind the training step. The floor of
each is a plain write and fsync of as many bytes as one of its saves has, measured right after it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks import deepspeed_cpu

_FULL = "full"
_EVERYTHING = "everything"
_IN_BACKGROUND = "parity-background"
_STRATEGIES = (_FULL, _EVERYTHING, "parity", "filter", "latest-changed", _IN_BACKGROUND)
_RESULT = "result.json"
_N_RANKS = {"plain": 1, "zero2": 2}
_BUDGET_FRACTION = 0.25  # of a full save, for latest-changed
_WINDOW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Request:
    """What is measured: a Llama of this size, saved `saves` times, `every` steps apart, after one full save."""

    kind: str
    hidden: int
    layers: int
    vocab: int
    saves: int
    every: int


@dataclass(frozen=True, slots=True)
class Measured:
    """The saves of one strategy after the first: `seconds` are those that training waits, all files durable but for a
    save in the background. Making the Trainer's files durable is added, which it does not do itself."""

    strategy: str
    saved_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    training_seconds: float
    floor_seconds: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every strategy and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--kind", choices=tuple(_N_RANKS), default="plain")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--strategy", choices=_STRATEGIES, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    request = Request(given.kind, given.hidden, given.layers, given.vocab, given.saves, given.every)
    if given.strategy:
        _train(request, given.strategy, given.work)
        return
    measured = [_measure(request, strategy, given.work / strategy) for strategy in _STRATEGIES]
    _print_table(request, measured)
    (given.work / _RESULT).write_text(json.dumps([asdict(m) for m in measured], indent=2))


def _measure(request: Request, strategy: str, work: Path) -> Measured:
    """Train in processes of their own; the checkpoints are removed afterwards."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    n_ranks = _N_RANKS[request.kind]
    options = [f"--{key}={value}" for key, value in asdict(request).items()]
    deepspeed_cpu.run_ranks(n_ranks, "benchmarks.partial_saving", work, *options, f"--strategy={strategy}")
    found = json.loads((work / _RESULT).read_text())
    shutil.rmtree(work)
    floor = _floor_seconds(work.parent, round(mean(found["bytes"])))
    return Measured(strategy, tuple(found["bytes"]), tuple(found["seconds"]), found["training"], floor)


def _train(request: Request, strategy: str, work: Path) -> None:
    """One process of one training; rank 0 leaves the result."""
    last = (request.saves + 1) * request.every
    trainer = _trainer(request, work / "run", last, saves_itself=strategy == _FULL)
    full_saves = _watch_full_saves(trainer)
    if strategy != _FULL:
        train: Any = import_module("mergepipe.tailor.saving")
        chosen, background = _strategy(strategy, trainer.model), strategy == _IN_BACKGROUND
        trainer.add_callback(train.PartialCheckpointCallback(request.every, chosen, background=background))
    started = time.perf_counter()
    trainer.train()
    training = time.perf_counter() - started
    if trainer.args.process_index == 0:
        rows = full_saves[1:] if strategy == _FULL else _partial_saves(work / "run")
        assert len(rows) == request.saves, f"{len(rows)} saves, not {request.saves}"
        sizes, seconds = zip(*rows, strict=True)
        document = {"bytes": sizes, "seconds": seconds, "training": training}
        (work / _RESULT).write_text(json.dumps(document))
    if _N_RANKS[request.kind] > 1:
        deepspeed_cpu.leave()


def _trainer(request: Request, out: Path, last: int, *, saves_itself: bool) -> Any:
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=request.vocab, hidden_size=request.hidden, intermediate_size=8 * request.hidden // 3,
        num_hidden_layers=request.layers, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=_WINDOW_TOKENS, tie_word_embeddings=False, pad_token_id=0,
    )  # fmt: skip
    rows = torch.randint(1, request.vocab, (64, _WINDOW_TOKENS), generator=torch.Generator().manual_seed(2))
    arguments = transformers.TrainingArguments(
        output_dir=str(out), max_steps=last, save_strategy="steps" if saves_itself else "no", save_steps=request.every,
        per_device_train_batch_size=1, learning_rate=1e-3, report_to=[], disable_tqdm=True,
        **(deepspeed_cpu.trainer_options(2) if request.kind == "zero2" else {"use_cpu": True}),
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.Trainer(model=transformers.LlamaForCausalLM(config), args=arguments, train_dataset=data)


def _strategy(name: str, model: Any) -> Any:
    train: Any = import_module("mergepipe.tailor.saving")
    if name in ("parity", _IN_BACKGROUND):
        return train.Parity()
    if name == _EVERYTHING:
        return train.Filter(edge_layers=model.config.num_hidden_layers, every=1)
    if name == "filter":
        return train.Filter(edge_layers=2, every=5)
    n_elements = sum(parameter.numel() for parameter in model.parameters())
    return train.LatestChanged(budget_bytes=int(_BUDGET_FRACTION * 16 * n_elements))


def _watch_full_saves(trainer: Any) -> list[tuple[int, float]]:
    """Collect bytes and seconds of every checkpoint the Trainer writes itself, made durable."""
    found: list[tuple[int, float]] = []
    save = trainer._save_checkpoint

    def timed(*arguments: Any, **options: Any) -> None:
        started = time.perf_counter()
        save(*arguments, **options)
        folder = Path(trainer.args.output_dir) / f"checkpoint-{trainer.state.global_step}"
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in files if trainer.args.process_index == 0 else []:
            _sync(path)
        found.append((sum(path.stat().st_size for path in files), time.perf_counter() - started))

    trainer._save_checkpoint = timed
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _partial_saves(run: Path) -> list[tuple[int, float]]:
    journal: Any = import_module("mergepipe.tailor.saving.save_log")
    records = [record for record in journal.read_journal(run).records if not record.is_full]
    return [(record.saved_bytes, record.seconds) for record in records]


def _floor_seconds(work: Path, nbytes: int) -> float:
    """Writing and making durable `nbytes`, the best of three."""
    chunk = os.urandom(8 << 20)
    times = []
    for _ in range(3):
        path = work / "floor"
        started = time.perf_counter()
        with path.open("wb") as stream:
            for start in range(0, nbytes, len(chunk)):
                stream.write(chunk[: nbytes - start])
            stream.flush()
            os.fsync(stream.fileno())
        times.append(time.perf_counter() - started)
        path.unlink()
    return min(times)


def _print_table(request: Request, measured: Sequence[Measured]) -> None:
    print(request)
    print(
        "| strategy | MB a save | s a save (min-max) | floor s | x floor | s of everything | share of training time |"
    )
    print("|---|---|---|---|---|---|---|")
    everything = next(median(each.seconds) for each in measured if each.strategy == _EVERYTHING)
    for each in measured:
        seconds, floor = median(each.seconds), each.floor_seconds
        print(
            f"| {each.strategy} | {mean(each.saved_bytes) / 1e6:.1f} "
            f"| {seconds:.3f} ({min(each.seconds):.3f}-{max(each.seconds):.3f}) | {floor:.3f} | {seconds / floor:.2f} "
            f"| {seconds / everything:.1%} | {sum(each.seconds) / each.training_seconds:.1%} |"
        )


if __name__ == "__main__":
    main()
