"""Small random models of many architectures, saved and loaded by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

NARROW = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 4,
}  # fmt: skip
HEADS = {"num_key_value_heads": 2}
TEXT = {**NARROW, **HEADS, "max_position_embeddings": 64}
MOE = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip
MLA = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}


def saved(model: str, config: str, options: dict[str, Any], folder: Path) -> Path:
    """Save a model of a class with random values; return its folder."""
    import torch
    import transformers

    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**options))
    made.save_pretrained(folder)
    return folder


def loaded(model: str, folder: Path, **options: Any) -> Any:
    """Load a model as its class; all of its weights must be those of the files."""
    import transformers

    made, info = getattr(transformers, model).from_pretrained(folder, output_loading_info=True, **options)
    lost = {key: info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info.get(key)}
    assert not lost, lost
    return made


def tensors_of(folder: Path) -> dict[str, Any]:
    """Read the tensors of a model."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def small_model(name: str, model_type: str) -> Any:
    """Return a small model of a class with random values."""
    import torch
    import transformers
    from tools.architectures import built

    torch.manual_seed(0)
    config = built(model_type, name).config
    model = getattr(transformers, name)._from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn_like(parameter)
    return model.eval()


def adapted(model: Any) -> Any:
    """Return the model with a LoRA of every linear layer and of fused experts, whose factors are random."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    experts = {
        name.split(".", 3)[-1]
        for name, parameter in model.named_parameters()
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")) and parameter.dim() == 3
    }
    head = model.get_output_embeddings()
    linear: set[str] = set()
    others: set[str] = set()
    for name, module in model.named_modules():
        is_linear = isinstance(module, torch.nn.Linear | Conv1D) and module is not head
        (linear if is_linear else others).add(name)
    of_others = {name.rpartition(".")[2] for name in others}
    last_words = {name: name.rpartition(".")[2] for name in linear}
    linear = {name if last in of_others else last for name, last in last_words.items()}
    if "mamba" in model.config.model_type or model.config.model_type in ("falcon_h1", "nemotron_h"):
        linear.discard("out_proj")  # which PEFT refuses
    config = LoraConfig(r=2, lora_alpha=4, target_modules=sorted(linear), target_parameters=sorted(experts) or None)
    made = get_peft_model(model, config)
    draw = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        if parameter.requires_grad:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=draw)
    return made.eval()
