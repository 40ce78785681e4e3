"""DeepSeek-V4 as it is published, FP8 and FP4 with scales of powers of two, is read as transformers reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mergepipe import apply_lora
from mergepipe import merge as run_merge
from mergepipe.errors import UnsupportedError
from support.architectures import adapted, loaded, saved
from support.coded_weights import codes_of, exponents
from support.model_folders import write_model

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # of transformers and PEFT
CLASS = "DeepseekV4ForCausalLM"
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"]
SIZES = {
    "vocab_size": 64, "hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "q_lora_rank": 64, "o_lora_rank": 32, "o_groups": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 32, "num_hash_layers": 1, "qk_rope_head_dim": 16,
    "layer_types": KINDS,
}  # fmt: skip
PUBLISHED_NAMES = (
    (r"^model\.", ""), (r"^embed_tokens\.", "embed."), (r"^hc_head\.hc_", "hc_head_"),
    (r"\.compressor\.indexer\.(scorer\.)?(weights_proj|wq_b|q_b_proj)\.", r".indexer.\2."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."), (r"\.q_b_proj\.", ".wq_b."),
)  # fmt: skip
STATED = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip
HALVES = {"parameters": {"weight": 0.5}}
IN_BLOCKS = re.compile(r".*\.(wq_a|wq_b|wkv|wo_a|wo_b|w[123])\.weight")
OF_EXPERTS = re.compile(r".*\.experts\.\d+\.w[123]\.weight")


def published(folder: Path, seed: int) -> Path:
    """Write a small model as DeepSeek-V4 is published, with random codes."""
    from safetensors.numpy import load_file

    plain = saved(CLASS, "DeepseekV4Config", SIZES, folder / "plain")
    rng = np.random.default_rng(seed)
    tensors: dict[str, NDArray[Any]] = {}
    for loaded_name, values in load_file(plain / "model.safetensors").items():
        name = loaded_name
        for pattern, replacement in PUBLISHED_NAMES:
            name = re.sub(pattern, replacement, name)
        number = len(tensors) + 1000 * seed
        if OF_EXPERTS.fullmatch(name):
            rows, columns = values.shape
            tensors[name] = codes_of(number, 256, rows, columns // 2).astype(np.uint8).view(np.int8)
            tensors[name.replace(".weight", ".scale")] = exponents(number, rows, columns // 32)
        elif IN_BLOCKS.fullmatch(name) and ".compressor." not in name:
            shape = [-(-size // 128) for size in values.shape]
            tensors[name] = (rng.normal(size=values.shape) * 40).astype(ml_dtypes.float8_e4m3fn)
            tensors[name.replace(".weight", ".scale")] = exponents(number, *shape)
        elif name.endswith("tid2eid"):
            tensors[name] = values.astype(np.int32)
        elif values.dtype == np.float32 and values.ndim == 2:
            tensors[name] = rng.normal(size=values.shape).astype(ml_dtypes.bfloat16)
        else:
            tensors[name] = values
    stated = {"quantization_config": STATED, "expert_dtype": "fp4", "dtype": "bfloat16"}
    config = json.loads((plain / "config.json").read_text())
    return write_model(folder / "published", tensors, {**config, **stated})


def read_by_transformers(folder: Path, dtype: str = "bfloat16") -> Any:
    """Load the model as numbers."""
    import transformers

    read = transformers.FineGrainedFP8Config(**{**STATED, "expert_dtype": "fp4", "dequantize": True})
    model, info = transformers.DeepseekV4ForCausalLM.from_pretrained(
        folder, quantization_config=read, dtype=dtype, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


def test_a_published_model__is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    model = published(tmp_path, 1)
    recipe = {"merge_method": "passthrough", "models": [{"model": str(model)}]}
    report = run_merge(recipe, tmp_path / "out", catalog=False)
    assert any("is quantised (FP8 with scales that are powers of two, MXFP4)" in str(n) for n in report.recipe_notices)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization_config", "expert_dtype"} & config.keys()
    made = loaded(CLASS, tmp_path / "out").state_dict()
    wanted = read_by_transformers(model).state_dict()
    assert made.keys() == wanted.keys()
    for name, values in wanted.items():
        if values.is_floating_point():
            assert made[name].dtype == values.dtype, name
        assert made[name].equal(values.to(made[name].dtype)), name


def test_merges__of_published_models_are_those_of_their_numbers(tmp_path: Path) -> None:
    models = [published(tmp_path / str(seed), seed) for seed in (1, 2)]
    recipe = {"merge_method": "linear", "models": [{"model": str(model)} for model in models], **HALVES}
    run_merge({**recipe, "dtype": "float32"}, tmp_path / "out", catalog=False)
    made = loaded(CLASS, tmp_path / "out", dtype="float32").state_dict()
    first, second = (read_by_transformers(model, "float32").state_dict() for model in models)
    for name, values in first.items():
        if values.is_floating_point():
            values = (values.double() + second[name].double()) / 2
        assert made[name].double().allclose(values.double(), rtol=1e-6, atol=1e-9), name


def test_an_adapter__of_a_published_model_gives_what_peft_gives(tmp_path: Path) -> None:
    model = published(tmp_path, 1)
    made = adapted(read_by_transformers(model, "float32"))
    made.save_pretrained(tmp_path / "adapter")
    wanted = made.merge_and_unload().state_dict()
    apply_lora(model, [tmp_path / "adapter"], tmp_path / "out", dtype="float32", catalog=False)
    got = loaded(CLASS, tmp_path / "out", dtype="float32").state_dict()
    for name, values in wanted.items():
        assert got[name].allclose(values.to(got[name].dtype), rtol=1e-5, atol=1e-5), name


def test_a_merge__is_not_written_like_a_published_base(tmp_path: Path) -> None:
    model = published(tmp_path, 1)
    recipe = {"merge_method": "linear", "models": [{"model": str(model)}], "base_model": str(model), **HALVES}
    with pytest.raises(UnsupportedError, match="only FP8 with floating-point scales can be written like the base"):
        run_merge({**recipe, "out_dtype": "like_base"}, tmp_path / "out", catalog=False)
    assert not (tmp_path / "out").exists()
