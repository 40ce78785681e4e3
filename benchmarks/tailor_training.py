"""One training of a small language model under the Trainer, in this process or by ranks under DeepSpeed's ZeRO-3."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import deepspeed_cpu, tiny_lm

_SHAPE = tiny_lm.LmShape(vocab=1024, hidden=96, layers=8, kv_heads=2, head_dim=24, intermediate=256, context=64)
_STAGE = 3
_HELDOUT_BATCH = 6
_BUDGET_BYTES_A_WEIGHT = {"half": 6, "a quarter": 3, "": 4}  # of the 12 of a full save, for the changed units

Losses = Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """One experiment: saves every `every` steps, an interruption at step `at`, `after` steps from there on."""

    at: int
    every: int
    after: int
    rate: float
    schedule: str

    @property
    def last(self) -> int:
        return self.at + self.after


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained: a new small model, or the one in `base`; on `batch` windows of that many tokens a step.

    With more than one of `ranks`, these share each batch, and ZeRO-3 cuts weights, gradients and moments among them.
    """

    base: Path | None
    batch: int
    window_tokens: int
    heldout_windows: int
    warmup_steps: int
    ranks: int = 1

    def model(self, seed: int) -> tiny_lm.LmModel:
        return tiny_lm.new_model(_SHAPE, seed) if self.base is None else tiny_lm.load_model(self.base)

    def tokenizer(self, text: str) -> tiny_lm.LmTokenizer:
        """Return that of `base`, or one of the new model's vocabulary, trained on `text`."""
        if self.base is None:
            return tiny_lm.make_tokenizer([text], _SHAPE.vocab)
        return tiny_lm.load_tokenizer(self.base)


@dataclass(frozen=True, slots=True)
class Text:
    """Token windows to train on and to score with."""

    training: tuple[tuple[int, ...], ...]
    heldout: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Training:
    """A training in `out` from its first step, or from a checkpoint to `resume`, to step `last`.

    It is saved at the steps of `saved_at` and scored on held-out text there, where it begins and where it ends. With a
    `strategy`, the callback of partial saves runs too.
    """

    setting: Setting
    task: Task
    text: Text
    seed: int
    out: Path
    last: int
    saved_at: tuple[int, ...] = ()
    strategy: str = ""
    resume: Path | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """The loss of every step, the mean over ranks, and held-out losses by the step that they were taken after."""

    losses: Losses
    heldout: Losses


def train(training: Training) -> Trained:
    """Run a training, in processes of its own where it has several ranks."""
    if training.task.ranks == 1:
        return _train(training)
    request, result = (training.out.with_suffix(f".{kind}") for kind in ("request", "result"))
    request.write_bytes(pickle.dumps(training))
    deepspeed_cpu.run_ranks(training.task.ranks, "benchmarks.tailor_training", request, result)
    losses, heldout = json.loads(result.read_text())
    return Trained(dict(losses), dict(heldout))


def _train(training: Training) -> Trained:
    transformers: Any = import_module("transformers")
    torch: Any = import_module("torch")
    setting, task = training.setting, training.task
    model = task.model(training.seed)
    where = {"use_cpu": True, "bf16": task.base is not None}
    if task.ranks > 1:
        where = deepspeed_cpu.trainer_options(_STAGE, bf16=True)
    arguments = transformers.TrainingArguments(
        output_dir=str(training.out), max_steps=setting.last, save_strategy="no", eval_on_start=True,
        per_device_train_batch_size=task.batch // task.ranks, per_device_eval_batch_size=_HELDOUT_BATCH,
        learning_rate=setting.rate, lr_scheduler_type=setting.schedule, warmup_steps=task.warmup_steps,
        prediction_loss_only=True, weight_decay=0.1, logging_steps=1, seed=training.seed, report_to=[],
        disable_tqdm=True, **where,
    )  # fmt: skip
    rows, heldout = (
        [{"input_ids": window, "labels": window} for window in torch.tensor(windows)]
        for windows in (training.text.training, training.text.heldout)
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=heldout)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.add_callback(_steering(transformers.TrainerCallback, training.saved_at, training.last))
    if training.strategy:
        trainer.add_callback(partial_saves(training.strategy, setting.every, model))
    trainer.train(resume_from_checkpoint=None if training.resume is None else str(training.resume))
    if (type(trainer.model_wrapped).__name__ == "DeepSpeedEngine") != (task.ranks > 1):
        raise SystemExit("error: the Trainer did not train as it was asked to, with DeepSpeed or without")
    return Trained(*(_logged(trainer.state.log_history, name) for name in ("loss", "eval_loss")))


def _logged(history: Sequence[Mapping[str, Any]], name: str) -> Losses:
    return {entry["step"]: entry[name] for entry in history if name in entry}


def _steering(base: Any, saved_at: Sequence[int], last: int) -> Any:
    """A callback that saves and scores at some steps, and stops after one."""

    def on_step_end(_: Any, __: Any, state: Any, control: Any, **___: Any) -> Any:
        control.should_save |= state.global_step in saved_at
        control.should_evaluate |= state.global_step in (*saved_at, last)
        control.should_training_stop |= state.global_step >= last
        return control

    return type("Steering", (base,), {"on_step_end": on_step_end})()


def partial_saves(name: str, every: int, model: Any) -> Any:
    """The callback that saves in part every so many steps by the strategy of that name."""
    saving: Any = import_module("mergepipe.tailor.saving")
    return saving.PartialCheckpointCallback(every, _strategy(saving, name, model))


def _strategy(saving: Any, name: str, model: Any) -> Any:
    if name in ("parity", "filter", "paper-parity", "paper-filter"):
        return saving.Schedule(name, edge_layers=2, every=5)
    n_elements = sum(parameter.numel() for parameter in model.parameters())
    measure, _, budget = name.partition(", ")
    return saving.LatestChanged(_BUDGET_BYTES_A_WEIGHT[budget] * n_elements, measure)


def be_quiet() -> None:
    """Keep progress bars and the notice about tied embeddings off the terminal."""
    logging: Any = import_module("transformers.utils.logging")
    logging.disable_progress_bar()
    logging.set_verbosity_error()


def main() -> None:
    """Train as one of several ranks; the first writes the losses."""
    request, result = map(Path, sys.argv[1:])
    tiny_lm.use_threads(1)
    be_quiet()
    trained = _train(pickle.loads(request.read_bytes()))
    if import_module("torch.distributed").get_rank() == 0:
        result.write_text(json.dumps([list(losses.items()) for losses in (trained.losses, trained.heldout)]))
    deepspeed_cpu.leave()


if __name__ == "__main__":
    main()
