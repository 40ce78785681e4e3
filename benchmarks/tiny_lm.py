"""A small Qwen3-style language model: making, training, saving and scoring it; the only importer of torch here."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if TYPE_CHECKING:  # functions import them: that takes seconds, and most who import this module call none
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

LmModel: TypeAlias = "Qwen3ForCausalLM"
LmTokenizer: TypeAlias = "PreTrainedTokenizerFast"
Windows: TypeAlias = Sequence[Sequence[int]]
_END = "<|endoftext|>"
_BETAS = (0.9, 0.95)
_MAX_GRADIENT_NORM = 1.0
_SCORE_BATCH = 6
_EXTENSIBLE_WARMUP_STEPS = 50
_STATE_EVERY_STEPS = 20


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

    Muon needs about half the steps from scratch; fine-tuning is done with AdamW nearly everywhere, so here too. With
    `decay_steps` the rate stays at its peak until these last steps, in which it falls linearly: what is trained before
    them does not depend on how many steps there are, so that a training can be made longer.
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
    decay_steps: int | None = None
    lora_rank: int = 0  # train low-rank deltas of the layers' matrices alone, and add them to these at the end

    def rate(self, step: int) -> float:
        """Learning rate of `step`, counted from 0."""
        if self.decay_steps is not None:
            left = (self.steps - step) / max(1, self.decay_steps)
            return self.peak_rate * min(1.0, (step + 1) / _EXTENSIBLE_WARMUP_STEPS, left)
        warmup = max(1, round(self.warmup_fraction * self.steps))
        if step < warmup:
            return self.peak_rate * (step + 1) / warmup
        progress = (step - warmup) / max(1, self.steps - warmup)
        return self.peak_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def use_threads(n_threads: int) -> None:
    """Set torch's compute threads. The last bits of what is trained depend on their number."""
    import torch

    torch.set_num_threads(n_threads)


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

    with _quiet():
        tokenizer: LmTokenizer = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
    return tokenizer


def tokens_of(tokenizer: LmTokenizer, text: str) -> list[int]:
    """Encode a text of any length, without special tokens."""
    ids: list[int] = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def text_of(tokenizer: LmTokenizer, ids: Sequence[int]) -> str:
    """Decode what `tokens_of` returned."""
    text: str = tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)
    return text


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
    """Load any causal language model of this family in float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    with _quiet():
        model: LmModel = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    return model


def round_to_bf16(model: LmModel) -> None:
    """Round the parameters in place, which stay float32; buffers, which no checkpoint holds, keep their precision."""
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def save_model(model: LmModel, tokenizer: LmTokenizer, directory: Path) -> None:
    """Write an ordinary Hugging Face directory in bfloat16. The model is rounded in place."""
    with _quiet():
        model.bfloat16().save_pretrained(directory)
        tokenizer.save_pretrained(directory)


@contextmanager
def _quiet() -> Iterator[None]:
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


def train(
    model: LmModel,
    tokens: Sequence[int],
    schedule: Schedule,
    on_step: Callable[[int, float], None],
    *,
    state: Path | None = None,
) -> None:
    """Train `model` in place on random windows of `tokens`; the same arguments give the same weights.

    A training that was ended is resumed from the file `state`, to which everything is written every 20 steps.

    Raises:
        ValueError: there are fewer tokens than one window.
    """
    import torch

    stream = torch.tensor(tokens, dtype=torch.long)
    last_start = len(stream) - schedule.window_tokens
    if last_start < 0:
        raise ValueError(f"{len(stream)} tokens, a window is {schedule.window_tokens}")
    generator = torch.Generator().manual_seed(schedule.seed)
    if schedule.lora_rank:
        _add_low_rank(model, schedule)
    optimizers = _optimizers(model, schedule)
    first = 0 if state is None or not state.exists() else _read_state(state, model, optimizers, generator)
    model.train()
    for step in range(first, schedule.steps):
        starts = torch.randint(0, last_start + 1, (schedule.batch,), generator=generator).tolist()
        batch = torch.stack([stream[start : start + schedule.window_tokens] for start in starts])
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = schedule.rate(step)
        on_step(step, _train_step(model, batch, optimizers, bf16=schedule.bf16))
        if state is not None and (step + 1) % _STATE_EVERY_STEPS == 0:
            _write_state(state, step + 1, model, optimizers, generator)
    model.train(mode=False)
    if schedule.lora_rank:
        _fold_low_rank(model)


def _add_low_rank(model: LmModel, schedule: Schedule) -> None:
    """Freeze the model and give each matrix of its layers a trainable delta of low rank, which is zero."""
    import torch

    generator = torch.Generator().manual_seed(schedule.seed)

    class LowRank(torch.nn.Module):  # type: ignore[misc]  # torch is taken as untyped
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            down = torch.randn(schedule.lora_rank, weight.shape[1], generator=generator)
            self.down = torch.nn.Parameter(down / math.sqrt(weight.shape[1]))
            self.up = torch.nn.Parameter(torch.zeros(weight.shape[0], schedule.lora_rank))

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + self.up @ self.down

    model.requires_grad_(False)
    for linear in _layer_matrices(model):
        low_rank = LowRank(linear.weight)
        torch.nn.utils.parametrize.register_parametrization(linear, "weight", low_rank)


def _fold_low_rank(model: LmModel) -> None:
    """Add the deltas to their matrices."""
    import torch

    for linear in _layer_matrices(model):
        torch.nn.utils.parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)
    model.requires_grad_(True)


def _layer_matrices(model: LmModel) -> list[torch.nn.Linear]:
    import torch

    named = model.named_modules()
    return [module for name, module in named if isinstance(module, torch.nn.Linear) and ".layers." in name]


def _write_state(
    path: Path, steps: int, model: LmModel, optimizers: Sequence[torch.optim.Optimizer], generator: torch.Generator
) -> None:
    import torch

    content = {
        "steps": steps,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "generator": generator.get_state(),
    }
    partial = path.with_suffix(".partial")
    torch.save(content, partial)
    partial.replace(path)


def state_steps(path: Path) -> int:
    """Return how many steps the training in a state file has done."""
    import torch

    return int(torch.load(path, weights_only=True, mmap=True)["steps"])


def _read_state(
    path: Path, model: LmModel, optimizers: Sequence[torch.optim.Optimizer], generator: torch.Generator
) -> int:
    """Restore what `_write_state` wrote; return the steps that are done."""
    import torch

    content = torch.load(path, weights_only=True)
    model.load_state_dict(content["model"])
    for optimizer, saved in zip(optimizers, content["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    generator.set_state(content["generator"])
    return int(content["steps"])


def _optimizers(model: LmModel, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Decay the matrices, not the norms' scales; Muon never takes the embedding."""
    import torch

    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    scales = [parameter for _, parameter in named if parameter.ndim < 2]
    inner = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." in name]
    outer = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." not in name]
    decay = schedule.weight_decay
    if schedule.muon:
        groups = [{"params": outer, "weight_decay": decay}, {"params": scales, "weight_decay": 0.0}]
        muon = torch.optim.Muon(inner, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        return [muon, torch.optim.AdamW(groups, betas=_BETAS, fused=True)]
    groups = [{"params": outer + inner, "weight_decay": decay}, {"params": scales, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, betas=_BETAS, fused=True)]


def _train_step(
    model: LmModel, batch: torch.Tensor, optimizers: Sequence[torch.optim.Optimizer], *, bf16: bool
) -> float:
    import torch

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRADIENT_NORM)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def losses(model: LmModel, windows_by_domain: Mapping[str, Windows]) -> dict[str, float]:
    """Mean cross-entropy in nats per predicted token, domain by domain."""
    model.train(mode=False)
    return {name: _loss(model, windows) for name, windows in windows_by_domain.items()}


def _loss(model: LmModel, windows: Windows) -> float:
    import torch

    ids = torch.tensor(windows, dtype=torch.long)
    total = 0.0
    with torch.inference_mode():
        for batch in torch.split(ids, _SCORE_BATCH):
            logits = model(input_ids=batch).logits[:, :-1].float()
            targets = batch[:, 1:].reshape(-1)
            flat = logits.reshape(len(targets), -1)
            total += float(torch.nn.functional.cross_entropy(flat, targets, reduction="sum"))
    return total / int(ids.shape[0] * (ids.shape[1] - 1))
