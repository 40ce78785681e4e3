"""Command that trains a small language model, resumes it from composites, and compares the losses with no interruption.

`make bench-resuming` runs it in the environment of requirements/train.txt. For every seed, one run saves in full and
goes on to the end; others save in part, each with its strategy. Composites are made of all by `mergepipe tailor`
and resumed by the Trainer: the same batches, rates and random states. With `--base`, a model on disk is fine-tuned, and
composites are made of full saves alone, by the paper's strategies; with `--ranks 2`, by two ranks under DeepSpeed's
ZeRO-3.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

from benchmarks import tiny_lm
from benchmarks.local_text import gather
from benchmarks.reproduce.pages import Table
from benchmarks.tailor_training import Losses, Setting, Task, Text, Trained, Training, be_quiet, train
from mergepipe.tailor import api
from mergepipe.tailor.composition import CompositionReport
from mergepipe.tailor.saving.save_log import LOG_NAME, read_journal

_CHARACTERS = 2_000_000
_PAPER_FILTER_AGE = 5  # saves between one half of the middle layers and the other
_OPTIMIZER = "optimizer.pt"
_CHANGED = ("latest-changed, half", "latest-changed, a quarter", "important, half", "important, a quarter")
_PARTIAL = ("parity", "filter", *_CHANGED)
_WINDOWS = ((1, 5), (6, 20), (21, 50), (51, 100))  # steps after resuming, both ends included
RECOVERED_NATS = 0.01
_RECOVERED_STEPS = 10
RESULT = "resuming.json"

NEW = Task(None, batch=8, window_tokens=64, heldout_windows=96, warmup_steps=50)


def fine_tuning(base: Path, *, window_tokens: int = 256, ranks: int = 1) -> Task:
    """Return the task of training a model on disk further."""
    return Task(base, batch=2, window_tokens=window_tokens, heldout_windows=24, warmup_steps=4, ranks=ranks)


@dataclass(frozen=True, slots=True)
class Resumed:
    """One checkpoint, resumed. `ages` are those of its units in steps; `excess` what each step's loss is above that of
    the run that was not interrupted, on the same batch; `saved_fraction` what a partial save has of a full one's bytes;
    `final_loss` the mean loss of the last `_RECOVERED_STEPS` steps.
    """

    name: str
    seed: int
    ages: tuple[int, ...]
    saved_fraction: float | None
    heldout_at: float
    heldout_after: float | None
    excess: tuple[float, ...]
    final_loss: float | None = None

    @property
    def recovered_after(self) -> int | None:
        """Steps until the mean excess of the next `_RECOVERED_STEPS` steps is within `RECOVERED_NATS`."""
        for step in range(len(self.excess) - _RECOVERED_STEPS + 1):
            if mean(self.excess[step : step + _RECOVERED_STEPS]) < RECOVERED_NATS:
                return step
        return None

    @property
    def final_excess(self) -> float:
        """The mean excess of the last `_RECOVERED_STEPS` steps."""
        return mean(self.excess[-_RECOVERED_STEPS:])


def read_text(task: Task, n_windows: int) -> Text:
    """Cut windows, without overlap, out of text of this machine: general text, or the last domain for fine-tuning."""
    if task.base is None:
        (domain,) = gather(0, general_characters=_CHARACTERS)
    else:
        domain = gather(8, general_characters=1)[-1]
    tokenizer = task.tokenizer(domain.training)

    def windows(text: str, count: int) -> tuple[tuple[int, ...], ...]:
        ids, size = tiny_lm.tokens_of(tokenizer, text), task.window_tokens
        found = [tuple(ids[i : i + size]) for i in range(0, len(ids) - size, size)]
        if len(found) < count:
            raise SystemExit(f"error: {count} windows of text needed, this machine has {len(found)}")
        return tuple(found[:: len(found) // count][:count])

    return Text(windows(domain.training, n_windows), windows(domain.heldout, task.heldout_windows))


class Experiment:
    """The runs and composites of one seed, in `work`."""

    def __init__(self, work: Path, setting: Setting, task: Task, text: Text, seed: int) -> None:
        self._work = work
        self._setting = setting
        self._task = task
        self._text = text
        self._seed = seed
        self._full = work / "full"
        self._uninterrupted = Trained({}, {})

    def run(self) -> Iterator[Resumed]:
        """Train, compose, resume; yield each result as it is there."""
        return self._fine_tuned() if self._task.base is not None else self._trained()

    def _fine_tuned(self) -> Iterator[Resumed]:
        """Resume the checkpoint itself, and what the paper's strategies would have saved of it and of older ones."""
        at, every = self._setting.at, self._setting.every
        ages = {"paper-parity": every, "paper-filter": _PAPER_FILTER_AGE * every}
        last = self._setting.last
        self._uninterrupted = self._train(self._full, last, saved_at=(at, *(at - age for age in ages.values())))
        losses, heldout = self._uninterrupted.losses, self._uninterrupted.heldout
        yield Resumed("not interrupted", self._seed, (), None, heldout[at], heldout[last], (), _final(losses, last))
        for age in ages.values():
            yield self._scored(f"whole checkpoint, {age} steps before", age)
        yield self._resumed("the checkpoint itself", (), self._checkpoint(at))
        for strategy, age in ages.items():
            yield self._of_full_saves(strategy, age)

    def _of_full_saves(self, strategy: str, age: int) -> Resumed:
        """Compose what a run with partial saves by a strategy would have: its older half is `age` steps old."""
        run, at = self._work / strategy, self._setting.at
        run.mkdir()
        for step in (at, at - age):
            (run / f"checkpoint-{step}").symlink_to(self._checkpoint(step), target_is_directory=True)
        recipe = self._work / f"{strategy}.yml"
        recipe.write_text(api.recipe(run, strategy=strategy, at=at, folder=self._work))
        out = self._work / f"{strategy}-composite" / f"checkpoint-{at}"
        out.parent.mkdir()
        report = api.compose(recipe, out)
        resumed = self._resumed(f"{strategy} of full saves, {age} steps apart", _ages(report), out)
        shutil.rmtree(out.parent)
        return resumed

    def _trained(self) -> Iterator[Resumed]:
        at, age = self._setting.at, 4 * self._setting.every
        self._uninterrupted = self._train(self._full, self._setting.last, saved_at=(at, at - age))
        yield self._resumed("the checkpoint itself", (), self._checkpoint(at))
        for strategy in _PARTIAL:
            yield self._partial(strategy)
        yield self._parity(age)
        yield self._old_moments(age)

    def _checkpoint(self, step: int) -> Path:
        return self._full / f"checkpoint-{step}"

    def _partial(self, strategy: str) -> Resumed:
        """Save in part up to the interruption, compose what the log implies, resume that."""
        at, run = self._setting.at, self._work / strategy
        self._train(run, at, strategy=strategy)
        recipe = run / "recipe.yml"
        recipe.write_text(api.recipe(run, from_log=run / LOG_NAME, at=at, folder=run))
        report = api.compose(recipe, run / f"checkpoint-{at}", state_from=run / f"partial-{at}", self_check="full")
        records = [record for record in read_journal(run).records if not record.is_full]
        fraction = mean(record.saved_bytes / record.full_bytes for record in records)
        name = f"{strategy}: a save every {self._setting.every}"
        return self._resumed(name, _ages(report), run / f"checkpoint-{at}", saved_fraction=fraction)

    def _parity(self, age: int) -> Resumed:
        at, out = self._setting.at, self._parity_folder(age)
        recipe = self._work / f"parity-{age}.yml"
        recipe.write_text(
            f"default: full/checkpoint-{at}\n"
            f"take: [{{from: full/checkpoint-{at - age}, units: [layers odd, embed, norm]}}]\n"
        )
        out.parent.mkdir()
        report = api.compose(recipe, out, self_check="full")
        return self._resumed(f"parity of full saves {age} apart", _ages(report), out)

    def _old_moments(self, age: int) -> Resumed:
        """Resume the checkpoint with the optimizer of the parity composite alone."""
        out = self._work / "moments"
        shutil.copytree(self._checkpoint(self._setting.at), out)
        shutil.copyfile(self._parity_folder(age) / _OPTIMIZER, out / _OPTIMIZER)
        return self._resumed(f"the same {age} apart, moments alone old", (), out)

    def _parity_folder(self, age: int) -> Path:
        return self._work / f"parity-{age}" / f"checkpoint-{self._setting.at}"

    def _scored(self, name: str, age: int) -> Resumed:
        heldout = self._uninterrupted.heldout[self._setting.at - age]
        return Resumed(name, self._seed, (), None, heldout, None, ())

    def _resumed(
        self, name: str, ages: tuple[int, ...], checkpoint: Path, *, saved_fraction: float | None = None
    ) -> Resumed:
        at, last, before = self._setting.at, self._setting.last, self._uninterrupted.losses
        trained = self._train(self._work / "resumed", last, resume=checkpoint)
        excess = tuple(trained.losses[step] - before[step] for step in range(at + 1, last + 1))
        heldout, final = trained.heldout, _final(trained.losses, last)
        return Resumed(name, self._seed, ages, saved_fraction, heldout[at], heldout[last], excess, final)

    def _train(
        self, out: Path, last: int, *, saved_at: tuple[int, ...] = (), strategy: str = "", resume: Path | None = None
    ) -> Trained:
        request = Training(self._setting, self._task, self._text, self._seed, out, last, saved_at, strategy, resume)
        return train(request)


def _final(losses: Losses, last: int) -> float:
    return mean(losses[step] for step in range(max(1, last - _RECOVERED_STEPS + 1), last + 1))


def _ages(report: CompositionReport) -> tuple[int, ...]:
    return tuple(max(source.age for source in unit.sources) for unit in report.plan.staleness)


def table_of(setting: Setting, found: Sequence[Resumed]) -> Table:
    """Means over the seeds, with the lowest and highest; columns in which no row has anything are left out."""
    by_name: dict[str, list[Resumed]] = {}
    for each in found:
        by_name.setdefault(each.name, []).append(each)
    windows = [(first, last) for first, last in _WINDOWS if last <= setting.after]
    steps = [f"steps {first}-{last}" for first, last in windows]
    header = (
        "resumed from", "of a full save", "old units (oldest)", "held-out", *steps, "recovered", "last losses",
        "held-out after",
    )  # fmt: skip
    rows = [(name, *_origin(runs), *_row(runs, windows)) for name, runs in by_name.items()]
    filled = [number for number, _ in enumerate(header) if any(row[number] for row in rows)]
    return Table(tuple(header[n] for n in filled), tuple(tuple(row[n] for n in filled) for row in rows))


def _origin(runs: Sequence[Resumed]) -> tuple[str, str]:
    fractions = [run.saved_fraction for run in runs if run.saved_fraction is not None]
    ages = runs[0].ages
    old = f"{sum(age > 0 for age in ages)} of {len(ages)} ({max(ages)})" if ages else ""
    return (f"{mean(fractions):.0%}" if fractions else "", old)


def _row(runs: Sequence[Resumed], windows: Sequence[tuple[int, int]]) -> list[str]:
    excess = ["" for _ in windows]
    recovered = ""
    if runs[0].excess:
        excess = [_spread([mean(run.excess[a - 1 : b]) for run in runs], "{:+.3f}") for a, b in windows]
        steps = [run.recovered_after for run in runs]
        recovered = "not" if None in steps else _spread([float(step) for step in steps if step is not None], "{:.0f}")
    at, final, after = (
        _spread([value for value in values if value is not None], "{:.3f}")
        for values in zip(*((run.heldout_at, run.final_loss, run.heldout_after) for run in runs), strict=True)
    )
    return [at, *excess, recovered, final, after]


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return ""
    if max(values) == min(values):
        return form.format(values[0])
    return f"{form} ({form}..{form})".format(mean(values), min(values), max(values))


def run_all(
    work: Path, setting: Setting, task: Task, seeds: Sequence[int], on_result: Callable[[Resumed], None]
) -> list[Resumed]:
    """Run every seed in a directory of its own, which is removed."""
    text = read_text(task, task.batch * (setting.at + setting.after))
    found: list[Resumed] = []
    for seed in seeds:
        folder = work / f"seed-{seed}"
        folder.mkdir(parents=True)
        for each in Experiment(folder, setting, task, text, seed).run():
            on_result(each)
            found.append(each)
        shutil.rmtree(folder)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the experiment and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    work_help = "a directory for the runs; the results stay in it"
    parser.add_argument("work", type=Path, nargs="?", default=Path(".bench/tailor-resuming"), help=work_help)
    parser.add_argument("--at", type=int, default=400, help="the step of the interruption")
    parser.add_argument("--every", type=int, default=50, help="steps between two saves")
    parser.add_argument("--after", type=int, default=100, help="steps after resuming")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate after 50 steps of warm-up")
    parser.add_argument("--schedule", default="constant_with_warmup", help="the Trainer's name of it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--base", type=Path, help="a Hugging Face directory to fine-tune, at a rate such as 2e-5")
    parser.add_argument("--window-tokens", type=int, default=256, help="of each of the two windows of a step of --base")
    parser.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="2: --base is trained under ZeRO-3")
    given = parser.parse_args(arguments)
    n_needed = 4 if given.base is None else _PAPER_FILTER_AGE
    if given.at % given.every or given.at <= n_needed * given.every:
        parser.error(f"--at {given.at}: give a multiple of --every, beyond {n_needed * given.every}")
    setting = Setting(given.at, given.every, given.after, given.rate, given.schedule)
    tiny_lm.use_threads(1)
    be_quiet()
    started = time.process_time()
    task = NEW
    if given.base is not None:
        task = fine_tuning(given.base, window_tokens=given.window_tokens, ranks=given.ranks)
    found = run_all(given.work, setting, task, given.seeds, _tell)
    document: Mapping[str, object] = {
        "setting": asdict(setting),
        "step_tokens": task.batch * task.window_tokens,
        "results": [asdict(each) for each in found],
    }
    given.work.mkdir(parents=True, exist_ok=True)
    (given.work / RESULT).write_text(json.dumps(document, indent=1))
    print(table_of(setting, found).markdown())
    print(f"{time.process_time() - started:.0f} s of processor time", file=sys.stderr)


def _tell(each: Resumed) -> None:
    first = f"{mean(each.excess[:5]):+.4f}" if each.excess else "-"
    print(f"seed {each.seed}: {each.name}: held-out {each.heldout_at:.3f}, first losses {first}", file=sys.stderr)


if __name__ == "__main__":
    main()
