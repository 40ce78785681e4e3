"""A small Qwen3-style language model: making, training, saving and scoring it."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if TYPE_CHECKING:  # functions import them: that takes seconds, and most who import this module call none
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

LmModel: TypeAlias = "PreTrainedModel"
LmTokenizer: TypeAlias = "PreTrainedTokenizerFast"
Windows: TypeAlias = Sequence[Sequence[int]]
_END = "<|endoftext|>"
_BETAS = (0.9, 0.95)
_MAX_GRADIENT_NORM = 1.0
_SCORE_BATCH = 6
_EAGER_STEPS = 3  # of a training on a GPU, before a step is captured


@dataclass(frozen=True, slots=True)
class LmShape:
    """Sizes of a model; query heads are twice the key-value heads, embeddings are tied."""

    vocab: int = 1024
    hidden: int = 256
    layers: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 768
    context: int = 512


@dataclass(frozen=True, slots=True)
class Schedule:
    """One training: linear warm-up, cosine decay to a tenth of the peak, AdamW; `muon` for the layers' matrices.

    Muon needs about half the steps from scratch; fine-tuning is done with AdamW nearly everywhere, so here too.
    """

    steps: int
    peak_rate: float
    batch: int = 8
    window_tokens: int = 256
    warmup_fraction: float = 0.1
    weight_decay: float = 0.1
    seed: int = 0
    muon: bool = False
    bf16: bool = False  # matrix products in bfloat16; parameters and optimizer stay in float32
    lora_rank: int = 0  # train low-rank deltas of the layers' matrices alone, and add them to these at the end

    def rate(self, step: int) -> float:
        """Learning rate of `step`, counted from 0."""
        warmup = max(1, round(self.warmup_fraction * self.steps))
        if step < warmup:
            return self.peak_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.peak_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def use_threads(n_threads: int) -> None:
    """Set torch's compute threads. The last bits of what is trained depend on their number."""
    import torch

    torch.set_num_threads(n_threads)


def device() -> str:
    """Return where models are loaded to and trained."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def gpu_name() -> str:
    """Return the name of the GPU; empty without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def make_tokenizer(texts: Iterable[str], vocab: int) -> LmTokenizer:
    """Train a byte-level BPE tokenizer of `vocab` entries, which can spell any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrap: Callable[..., LmTokenizer] = PreTrainedTokenizerFast  # untyped in transformers
    return wrap(tokenizer_object=tokenizer, eos_token=_END, pad_token=_END)


def load_tokenizer(directory: Path) -> LmTokenizer:
    """Load the tokenizer that `save_model` wrote beside a model."""
    from transformers import PreTrainedTokenizerFast

    with quiet():
        tokenizer: LmTokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    return tokenizer


def tokens_of(tokenizer: LmTokenizer, text: str) -> list[int]:
    """Encode a text of any length, without special tokens."""
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def new_model(shape: LmShape, seed: int) -> LmModel:
    """Make a model with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=2 * shape.kv_heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def load_model(directory: Path) -> LmModel:
    """Load any causal language model in float32, on the GPU if there is one."""
    import torch
    from transformers import AutoModelForCausalLM

    with quiet():
        model: LmModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    place: Callable[[str], object] = model.to  # untyped in transformers
    place(device())
    return model


def save_model(model: LmModel, tokenizer: LmTokenizer | None, directory: Path) -> None:
    """Write an ordinary Hugging Face directory in bfloat16. The model is rounded in place."""
    with quiet():
        model.bfloat16().save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the progress bars of transformers off the terminal."""
    from transformers.utils import logging as hf_logging

    hide: Callable[[], None] = hf_logging.disable_progress_bar  # untyped in transformers
    show: Callable[[], None] = hf_logging.enable_progress_bar
    was_enabled, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hide()
    hf_logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
        if was_enabled:
            show()


def train(model: LmModel, tokens: Sequence[int], schedule: Schedule, on_step: Callable[[int, float], None]) -> None:
    """Train `model` in place on random windows of `tokens`; the same arguments give the same weights.

    Raises:
        ValueError: there are fewer tokens than one window.
    """
    train_together([Training(model, tokens, schedule)], [on_step])


def train_together(trainings: Sequence[Training], on_steps: Sequence[Callable[[int, float], None]]) -> None:
    """Train models of equally many steps, step by step in turn; on a GPU their steps overlap."""
    for step in range(trainings[0].schedule.steps):
        for training in trainings:
            training.start(step)
        losses = [training.loss() for training in trainings]  # of all before the first is told: that may score a model
        for on_step, loss in zip(on_steps, losses, strict=True):
            on_step(step, loss)
    for training in trainings:
        training.finish()


class Training:
    """The training of one model in place.

    On a GPU a step is captured once as a graph and replayed in a stream of its own: small models are bound by launches.
    """

    def __init__(self, model: LmModel, tokens: Sequence[int], schedule: Schedule) -> None:
        import torch

        self.model, self.schedule = model, schedule
        self._tokens = torch.tensor(tokens, dtype=torch.long)
        self._n_starts = len(tokens) - schedule.window_tokens + 1
        if self._n_starts < 1:
            raise ValueError(f"{len(tokens)} tokens, a window is {schedule.window_tokens}")
        self._generator = torch.Generator().manual_seed(schedule.seed)
        self._remove_low_rank = _add_low_rank(model, schedule) if schedule.lora_rank else None
        self._optimizers = _optimizers(model, schedule)
        self._batch = torch.zeros((schedule.batch, schedule.window_tokens), dtype=torch.long, device=model.device)
        self._loss = torch.zeros(())
        self._lane = torch.cuda.Stream() if model.device.type == "cuda" else None
        self._graph: torch.cuda.CUDAGraph | None = None
        model.train()
        if self._lane is not None:
            torch.cuda.synchronize()

    def start(self, step: int) -> None:
        """Run a step; on a GPU let it run."""
        import torch

        with nullcontext() if self._lane is None else torch.cuda.stream(self._lane):
            self.draw()
            for group in (group for optimizer in self._optimizers for group in optimizer.param_groups):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(self.schedule.rate(step))
                else:
                    group["lr"] = self.schedule.rate(step)
            if self._lane is None or step < _EAGER_STEPS:
                self._run()
            elif self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graph, stream=self._lane):
                    self._run()
            if self._graph is not None:
                self._graph.replay()

    def draw(self) -> None:
        """Take the next batch."""
        import torch

        starts = torch.randint(0, self._n_starts, (self.schedule.batch,), generator=self._generator).tolist()
        windows = [self._tokens[start : start + self.schedule.window_tokens] for start in starts]
        self._batch.copy_(torch.stack(windows))

    def loss(self) -> float:
        """Wait for the step that was started; return its loss."""
        if self._lane is not None:
            self._lane.synchronize()
        return float(self._loss)

    def finish(self) -> None:
        """Leave the model as it was trained, and nothing else."""
        self._graph = None
        self.model.zero_grad(set_to_none=True)
        self.model.train(mode=False)
        if self._remove_low_rank is not None:
            self._remove_low_rank()

    def differentiate(self) -> None:
        """Give the parameters the gradients of the batch."""
        import torch

        with _bf16_products(wanted=self.schedule.bf16, model=self.model):
            with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self.schedule.bf16):
                loss = self.model(input_ids=self._batch, labels=self._batch, use_cache=False).loss
            loss.backward()
        self._loss = loss.detach()

    def _run(self) -> None:
        import torch

        self.differentiate()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def squared_gradients(model: LmModel, tokens: Sequence[int], schedule: Schedule, n: int) -> dict[str, torch.Tensor]:
    """Return the mean square of the gradients of `n` batches, each the mean over its tokens: a diagonal of Fisher's."""
    import torch

    training = Training(model, tokens, replace(schedule, lora_rank=0))
    sums = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    for _ in range(n):
        training.draw()
        training.differentiate()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            sums[name] += parameter.grad.square() / n
        model.zero_grad(set_to_none=True)
    training.finish()
    return sums


def _add_low_rank(model: LmModel, schedule: Schedule) -> Callable[[], None]:
    """Freeze the model and give each matrix of its layers a trainable delta of low rank, which is zero.

    Return what adds the deltas to their matrices and removes them.
    """
    import torch

    generator = torch.Generator().manual_seed(schedule.seed)
    model.requires_grad_(False)
    handles = []
    for linear in _layer_matrices(model):
        rows, columns = linear.weight.shape
        down = torch.nn.Linear(columns, schedule.lora_rank, bias=False)
        up = torch.nn.Linear(schedule.lora_rank, rows, bias=False)
        with torch.no_grad():
            down.weight.copy_(torch.randn(down.weight.shape, generator=generator) / math.sqrt(columns))
            up.weight.zero_()
        linear.low_rank = torch.nn.Sequential(down, up).to(model.device)
        handles.append(linear.register_forward_hook(_with_low_rank))

    def fold() -> None:
        with torch.no_grad():
            for linear, handle in zip(_layer_matrices(model), handles, strict=True):
                handle.remove()
                down, up = linear.low_rank
                linear.weight += up.weight @ down.weight
                del linear.low_rank
        model.requires_grad_(True)

    return fold


def _with_low_rank(linear: torch.nn.Linear, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    return output + linear.low_rank(inputs[0])


def _layer_matrices(model: LmModel) -> list[torch.nn.Linear]:
    import torch

    named = model.named_modules()
    linears = [(name, module) for name, module in named if isinstance(module, torch.nn.Linear)]
    return [module for name, module in linears if ".layers." in name and ".low_rank." not in name]


def _optimizers(model: LmModel, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Decay the matrices, not the norms' scales; Muon never takes the embedding."""
    import torch

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    scales = [parameter for _, parameter in named if parameter.ndim < 2]
    inner = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." in name]
    outer = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." not in name]
    decay, muon = schedule.weight_decay, []
    if schedule.muon:
        muon, inner = [torch.optim.Muon(inner, weight_decay=decay, adjust_lr_fn="match_rms_adamw")], []
    groups = [{"params": outer + inner, "weight_decay": decay}, {"params": scales, "weight_decay": 0.0}]
    is_captured = model.device.type == "cuda"
    rate = torch.zeros((), device=model.device) if is_captured else 0.0
    groups = [group for group in groups if group["params"]]
    return [*muon, torch.optim.AdamW(groups, lr=rate, betas=_BETAS, fused=True, capturable=is_captured)]


def _bf16_products(*, wanted: bool, model: LmModel) -> AbstractContextManager[object]:
    if not wanted or model.device.type != "cpu":
        return nullcontext()
    from benchmarks.bf16_products import bf16_products

    return bf16_products()


def window_losses(
    model: LmModel, windows_by_domain: Mapping[str, Windows], *, bf16: bool = False
) -> dict[str, list[float]]:
    """Return the mean cross-entropy of each window; with `bf16`, matrix products are computed in it."""
    import torch

    model.train(mode=False)
    autocast = torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=bf16)
    with torch.inference_mode(), _bf16_products(wanted=bf16, model=model), autocast:
        return {name: _window_losses(model, windows) for name, windows in windows_by_domain.items()}


def _window_losses(model: LmModel, windows: Windows) -> list[float]:
    import torch

    means: list[float] = []
    ids = torch.tensor(windows, dtype=torch.long, device=model.device)
    for batch in torch.split(ids, _SCORE_BATCH):
        logits, targets = model(input_ids=batch, use_cache=False).logits[:, :-1].float(), batch[:, 1:]
        entropies = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        means += entropies.view(targets.shape).mean(1).tolist()
    return means


def cut_windows(
    texts: Mapping[str, str], tokenizer: LmTokenizer, window_tokens: int, n_windows: int
) -> dict[str, Windows]:
    """Cut `n_windows` windows, evenly spread, out of each text.

    Raises:
        ValueError: a text is too short.
    """
    windows: dict[str, Windows] = {}
    for name, text in texts.items():
        ids = tokens_of(tokenizer, text)
        room = len(ids) - window_tokens
        if room < window_tokens * (n_windows - 1):
            raise ValueError(f"{name}: only {len(ids)} held-out tokens")
        starts = [room * i // (n_windows - 1) for i in range(n_windows)]
        windows[name] = [ids[start : start + window_tokens] for start in starts]
    return windows


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
