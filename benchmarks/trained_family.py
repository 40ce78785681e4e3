"""Command that trains a small base model from scratch and fine-tunes experts on different kinds of text."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import heldout as heldout_module
from benchmarks import tiny_lm
from benchmarks.deltas import DeltaSize, delta_size
from benchmarks.heldout import DEFAULT_ROOT, Heldout, heldout_losses, mean
from benchmarks.local_text import GENERAL, Domain, TextError, gather
from benchmarks.tiny_lm import LmModel, LmShape, LmTokenizer, Schedule

_REQUEST_FILE = "request.json"
_REPORT_FILE = "family.json"
_HELDOUT_WINDOWS = 6


@dataclass(frozen=True, slots=True)
class TrainedRequest:
    """Which family is wanted. The same request on the same text, machine and torch gives the same bytes.

    `expert.seed` tells families of one base apart.
    """

    experts: int
    seed: int
    shape: LmShape
    base: Schedule
    expert: Schedule
    threads: int

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def has_base_of(self, content: Mapping[str, object]) -> bool:
        """Whether the request that `content` is the JSON of asks for this base and held-out text, but for threads."""
        free = {"expert": None, "threads": None}
        return {**asdict(self), **free} == {**content, **free}


@dataclass(frozen=True, slots=True)
class Member:
    """One trained model: its kind of text, and held-out losses by domain."""

    name: str
    domain: str
    training_tokens: int
    losses: dict[str, float]
    delta: DeltaSize | None


class FamilyError(Exception):
    """Another family is in the way, or another family's base is not the one that was asked for."""


def train_family(
    root: Path,
    request: TrainedRequest,
    domains: Sequence[Domain],
    *,
    only: Collection[int] | None = None,
    base_of: Path | None = None,
) -> list[Member]:
    """Write `base`, `expert-1`.. and `heldout.json` into `root`, going on from whole models that are there already.

    `domains` are the base's text, then one for each expert; of each, six windows are scored. `only` these
    experts are made. The base of the family `base_of`, which is what would be trained here, is linked to.

    Raises:
        FamilyError: `root` holds a family made by another request, or `base_of` has another base.
        TextError: a domain is too short.
    """
    if len(domains) != request.experts + 1:
        raise ValueError(f"{len(domains)} domains for a base and {request.experts} experts")
    numbers = range(1, request.experts + 1) if only is None else sorted(only)
    if not set(numbers) <= set(range(1, request.experts + 1)):
        raise FamilyError(f"experts {list(numbers)} were asked for; the family has 1 to {request.experts}")
    _claim(root, request)
    tiny_lm.use_threads(request.threads)
    if base_of is None:
        tokenizer = tiny_lm.make_tokenizer((domain.training for domain in domains), request.shape.vocab)
        heldout = cut_heldout(domains, tokenizer, request.base.window_tokens, _HELDOUT_WINDOWS)
        maker = _Maker(root, request, tokenizer, heldout)
        base = maker.base(domains[0])
    else:
        base = _link_base(root, request, base_of)
        heldout = heldout_module.read_heldout(base_of)
        maker = _Maker(root, request, tiny_lm.load_tokenizer(root / base.name), heldout)
    (root / heldout_module.FILE_NAME).write_text(heldout.to_json())
    members = [base, *(maker.expert(number, domains[number]) for number in numbers)]
    content = {"request": asdict(request), "members": [asdict(member) for member in members]}
    (root / _REPORT_FILE).write_text(json.dumps(content, indent=2) + "\n")
    return members


def finished(root: Path, request: TrainedRequest) -> list[Member] | None:
    """What `train_family` returned for this request when it ended last, or None.

    Raises:
        FamilyError: `root` holds a family made by another request.
    """
    if not (root / _REPORT_FILE).exists():
        return None
    _claim(root, request)
    return _members(root)


def _members(root: Path) -> list[Member]:
    return [_member_of(entry) for entry in json.loads((root / _REPORT_FILE).read_text())["members"]]


def _member_of(entry: Mapping[str, Any]) -> Member:
    delta = entry["delta"]
    return Member(
        name=entry["name"],
        domain=entry["domain"],
        training_tokens=entry["training_tokens"],
        losses=entry["losses"],
        delta=None if delta is None else DeltaSize(**delta),
    )


def _claim(root: Path, request: TrainedRequest) -> None:
    root.mkdir(parents=True, exist_ok=True)
    marker = root / _REQUEST_FILE
    if not marker.exists():
        marker.write_text(request.to_json())
    elif marker.read_text() != request.to_json():
        raise FamilyError(f"{root} holds a family made with other options; remove it or choose another --root")


def _link_base(root: Path, request: TrainedRequest, other: Path) -> Member:
    try:
        found = json.loads((other / _REQUEST_FILE).read_text())
        base = _members(other)[0]
    except FileNotFoundError as error:
        raise FamilyError(f"{other} holds no family: it has no {Path(error.filename).name}; train it first") from None
    if not request.has_base_of(found):
        raise FamilyError(f"{other} has a base made with other options; only those of experts and --threads may differ")
    if not (root / base.name).exists():
        (root / base.name).symlink_to(os.path.relpath(other / base.name, root), target_is_directory=True)
    return base


def cut_heldout(domains: Sequence[Domain], tokenizer: LmTokenizer, window_tokens: int, n_windows: int) -> Heldout:
    """Cut `n_windows` windows, evenly spread, out of each domain's held-out text.

    Raises:
        TextError: a domain is too short.
    """
    windows: dict[str, list[list[int]]] = {}
    for domain in domains:
        ids = tiny_lm.tokens_of(tokenizer, domain.heldout)
        room = len(ids) - window_tokens
        if room < window_tokens * (n_windows - 1):
            raise TextError(f"{domain.name}: only {len(ids)} held-out tokens")
        starts = [room * i // (n_windows - 1) for i in range(n_windows)]
        windows[domain.name] = [ids[start : start + window_tokens] for start in starts]
    text_bytes = {
        name: sum(len(tiny_lm.text_of(tokenizer, window).encode()) for window in of_domain)
        for name, of_domain in windows.items()
    }
    return Heldout(windows, text_bytes)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Trains one model at a time; each has its own seed, so that going on gives the same bytes as going through."""

    root: Path
    request: TrainedRequest
    tokenizer: LmTokenizer
    heldout: Heldout

    def base(self, domain: Domain) -> Member:
        schedule = replace(self.request.base, seed=self.request.seed * 1000)
        return self._member("base", domain, schedule, lambda: tiny_lm.new_model(self.request.shape, schedule.seed))

    def expert(self, number: int, domain: Domain) -> Member:
        seed = self.request.seed * 1000 + self.request.expert.seed * 100 + number
        schedule = replace(self.request.expert, seed=seed)
        return self._member(f"expert-{number}", domain, schedule, lambda: tiny_lm.load_model(self.root / "base"))

    def _member(self, name: str, domain: Domain, schedule: Schedule, start: Callable[[], LmModel]) -> Member:
        directory, partial = self.root / name, self.root / f"{name}.partial"
        tokens = tiny_lm.tokens_of(self.tokenizer, domain.training)
        if not directory.exists():
            shutil.rmtree(partial, ignore_errors=True)
            model = start()
            printer = StepPrinter(f"{name} ({domain.name})", schedule.steps)
            tiny_lm.train(model, tokens, schedule, printer)
            tiny_lm.save_model(model, self.tokenizer, partial)
            partial.rename(directory)
        losses = heldout_losses(directory, self.heldout)
        delta = None if name == "base" else delta_size(self.root / "base", directory)
        return Member(name, domain.name, len(tokens), losses, delta)


class StepPrinter:
    """Prints the mean loss of every tenth of a training."""

    def __init__(self, title: str, steps: int) -> None:
        self._title = title
        self._steps = steps
        self._every = max(1, steps // 10)
        self._recent: list[float] = []
        self._start = time.perf_counter()

    def __call__(self, step: int, loss: float) -> None:
        self._recent.append(loss)
        if (step + 1) % self._every == 0 or step + 1 == self._steps:
            seconds = time.perf_counter() - self._start
            average = sum(self._recent) / len(self._recent)
            print(f"{self._title}: step {step + 1}/{self._steps}, loss {average:.3f}, {seconds:.0f} s", flush=True)
            self._recent = []


def table(members: Sequence[Member]) -> str:
    """Markdown: for every expert its own domain's held-out loss before and after, and the size of its delta."""
    base = members[0]
    lines = [
        f"Base: {GENERAL} {base.losses[GENERAL]:.3f} nats/token, mean over all domains {mean(base.losses):.3f}.",
        "",
        "| expert | domain | base loss | expert loss | its loss on general | relative delta norm | changed elements |",
        "|---|---|---|---|---|---|---|",
    ]
    for member in members[1:]:
        own, delta = member.domain, member.delta
        assert delta is not None  # every expert has one
        lines.append(
            f"| {member.name} | {own} | {base.losses[own]:.3f} | {member.losses[own]:.3f} "
            f"| {member.losses[GENERAL]:.3f} | {delta.relative_norm:.4f} | {delta.changed_fraction:.1%} |"
        )
    return "\n".join(lines) + "\n"


def request_of(options: argparse.Namespace) -> TrainedRequest:
    """What the arguments that `add_options` declares ask for."""
    shape = LmShape(
        vocab=options.vocab,
        hidden=options.hidden,
        layers=options.layers,
        kv_heads=options.kv_heads,
        intermediate=options.intermediate,
    )
    base = Schedule(options.steps, options.rate, options.batch, muon=True, bf16=options.bf16)
    expert = replace(
        base,
        steps=options.expert_steps,
        peak_rate=options.expert_rate,
        batch=options.expert_batch or options.batch,
        window_tokens=options.expert_window,
        weight_decay=0.0,
        seed=options.expert_seed,
        muon=False,
    )
    return TrainedRequest(options.experts, options.seed, shape, base, expert, options.threads)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare everything that decides what a family is."""
    shape, schedule = LmShape(), Schedule(0, 0.0)
    parser.add_argument("--root", type=Path, default=DEFAULT_ROOT)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    for field in ("vocab", "hidden", "layers", "kv_heads", "intermediate"):
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=getattr(shape, field))
    parser.add_argument("--steps", type=int, default=700, help="steps of the base")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate of the base")
    parser.add_argument("--batch", type=int, default=8, help="windows a step")
    parser.add_argument("--expert-steps", type=int, default=40)
    parser.add_argument("--expert-rate", type=float, default=2e-4, help="peak learning rate of the experts")
    parser.add_argument("--expert-batch", type=int, help="windows a step of the experts, if not --batch")
    parser.add_argument("--expert-window", type=int, default=schedule.window_tokens, help="tokens of their windows")
    parser.add_argument("--expert-seed", type=int, default=0, help="tells families of one base apart")
    parser.add_argument("--threads", type=int, default=1, help="part of what decides the result")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 products: faster on CPUs that have them")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--only", type=int, nargs="*", metavar="NUMBER", help="make only these experts, or none")
    parser.add_argument("--base-of", type=Path, metavar="ROOT", help="link to the base of this family")
    return parser.parse_args()


def main() -> int:
    options = _options()
    start = time.perf_counter()
    try:
        members = train_family(
            options.root,
            request_of(options),
            gather(options.experts),
            only=options.only,
            base_of=options.base_of,
        )
    except (FamilyError, TextError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(members))
    print(f"{len(members)} models in {options.root} ({time.perf_counter() - start:.0f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
