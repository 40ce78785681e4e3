"""LoRA files for diffusion models: applied to pipelines and one-file models by the names that either may have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import MismatchError
from support.model_folders import recipe_of

D = 8
Tensors = dict[str, NDArray[Any]]
PIPELINE = {
    "_class_name": "Pipeline", "unet": ["diffusers", "UNet2DConditionModel"],
    "transformer": ["diffusers", "FluxTransformer2DModel"], "text_encoder": ["transformers", "CLIPTextModel"],
}  # fmt: skip


def random(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_pipeline(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Path, Tensors]:
    """A pipeline whose components are the first words of names."""
    tensors = random(1, shapes)
    parts = sorted({name.partition(".")[0] for name in shapes})
    folder.mkdir()
    index = {key: value for key, value in PIPELINE.items() if key in (*parts, "_class_name")}
    (folder / "model_index.json").write_text(json.dumps(index))
    for part in parts:
        (folder / part).mkdir()
        (folder / part / "config.json").write_text("{}")
        name = "model.safetensors" if part.startswith("text") else "diffusion_pytorch_model.safetensors"
        own = {name.partition(".")[2]: values for name, values in tensors.items() if name.startswith(f"{part}.")}
        save_file(own, folder / part / name)
    return folder, tensors


def of_pipeline(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in folder.rglob("*.safetensors"):
        part = file.parent.name
        tensors |= {f"{part}.{name}": values for name, values in load_file(file).items()}
    return tensors


def write_lora(path: Path, modules: Mapping[str, tuple[int, ...]], *, alpha: float | None = None) -> dict[str, Any]:
    """A LoRA file of modules (rows, columns, kernel...), with alphas if one is given; returns the deltas."""
    rng = np.random.default_rng(2)
    tensors: Tensors = {}
    deltas = {}
    down_name, up_name = ("lora_A", "lora_B") if alpha is None else ("lora_down", "lora_up")
    for module, (rows, *columns) in modules.items():
        down = rng.standard_normal((2, *columns)).astype(np.float32)
        up = rng.standard_normal((rows, 2, *(1 for _ in columns[1:]))).astype(np.float32)
        tensors |= {f"{module}.{down_name}.weight": down, f"{module}.{up_name}.weight": up}
        if alpha is not None:
            tensors[f"{module}.alpha"] = np.array(alpha, np.float32)
        scale = 1.0 if alpha is None else alpha / 2
        product = up.reshape(rows, 2).astype(np.float64) @ down.reshape(2, -1).astype(np.float64)
        deltas[module] = scale * product.reshape(rows, *columns)
    save_file(tensors, path)
    return deltas


def assert_changed(before: Tensors, after: Tensors, deltas: Mapping[str, NDArray[np.float64]]) -> None:
    """Each weight of `deltas` has its delta on top, and no other weight has changed."""
    assert before.keys() == after.keys()
    for name, values in before.items():
        delta = deltas.get(name, np.zeros(values.shape))
        np.testing.assert_allclose(after[name], values + delta, rtol=1e-5, atol=1e-5, err_msg=name)


UNET = {
    "unet.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (D, D),
    "unet.down_blocks.1.attentions.0.proj_in": (D, D, 1, 1),
    "unet.down_blocks.0.resnets.1.conv1": (D, 4, 3, 3),
    "unet.up_blocks.0.upsamplers.0.conv": (D, D, 3, 3),
    "unet.mid_block.attentions.0.transformer_blocks.0.ff.net.0.proj": (2 * D, D),
    "unet.add_embedding.linear_1": (D, D),
    "text_encoder.text_model.encoder.layers.0.self_attn.q_proj": (D, D),
}
SPELLINGS = {
    "kohya": (
        "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q", "lora_unet_input_blocks_4_1_proj_in",
        "lora_unet_input_blocks_2_0_in_layers_2", "lora_unet_output_blocks_2_2_conv",
        "lora_unet_middle_block_1_transformer_blocks_0_ff_net_0_proj", "lora_unet_label_emb_0_0",
        "lora_te1_text_model_encoder_layers_0_self_attn_q_proj",
    ),
    "flattened diffusers": (
        "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q",
        "lora_unet_down_blocks_1_attentions_0_proj_in", "lora_unet_down_blocks_0_resnets_1_conv1",
        "lora_unet_up_blocks_0_upsamplers_0_conv",
        "lora_unet_mid_block_attentions_0_transformer_blocks_0_ff_net_0_proj", "lora_unet_add_embedding_linear_1",
        "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
    ),
    "diffusers": tuple(UNET),
    "comfyui": (
        "diffusion_model.input_blocks.4.1.transformer_blocks.0.attn1.to_q", "diffusion_model.input_blocks.4.1.proj_in",
        "diffusion_model.input_blocks.2.0.in_layers.2", "diffusion_model.output_blocks.2.2.conv",
        "diffusion_model.middle_block.1.transformer_blocks.0.ff.net.0.proj", "diffusion_model.label_emb.0.0",
        "text_encoder.text_model.encoder.layers.0.self_attn.q_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_apply_lora__to_a_pipeline_of_stable_diffusion_by_any_names(
    tmp_path: Path, spelling: str, alpha: float | None
) -> None:
    shapes = {f"{name}.weight": shape for name, shape in UNET.items()}
    base, before = write_pipeline(tmp_path / "base", {**shapes, "unet.conv_norm_out.weight": (D,)})
    modules = dict(zip(SPELLINGS[spelling], UNET.values(), strict=True))
    deltas = write_lora(tmp_path / "style.safetensors", modules, alpha=alpha)
    mergepipe.apply_lora(base, [tmp_path / "style.safetensors"], tmp_path / "out", catalog=False)
    named = dict(zip((f"{name}.weight" for name in UNET), deltas.values(), strict=True))
    assert_changed(before, of_pipeline(tmp_path / "out"), named)


ORIGINAL_FLUX = {
    "double_blocks.0.img_attn.qkv": (3 * D, D), "double_blocks.0.txt_mlp.2": (D, 4 * D),
    "single_blocks.1.linear1": (7 * D, D),
}  # fmt: skip
DIFFUSERS_FLUX = {
    "transformer_blocks.0.attn.to_q": (D, D), "transformer_blocks.0.attn.to_k": (D, D),
    "transformer_blocks.0.attn.to_v": (D, D), "transformer_blocks.0.ff_context.net.2": (D, 4 * D),
    "single_transformer_blocks.1.attn.to_q": (D, D), "single_transformer_blocks.1.attn.to_k": (D, D),
    "single_transformer_blocks.1.attn.to_v": (D, D), "single_transformer_blocks.1.proj_mlp": (4 * D, D),
}  # fmt: skip
_QKV = ("to_q", "to_k", "to_v")


@pytest.mark.parametrize("prefix", ["diffusion_model.", "transformer.", "lora_unet_", "model.diffusion_model."])
def test_apply_lora__splits_the_fused_matrices_of_flux_for_a_pipeline(tmp_path: Path, prefix: str) -> None:
    shapes = {f"transformer.{name}.weight": shape for name, shape in DIFFUSERS_FLUX.items()}
    base, before = write_pipeline(tmp_path / "base", shapes)
    prefix = prefix.removeprefix("model.")
    flat = prefix == "lora_unet_"
    modules = {prefix + (name.replace(".", "_") if flat else name): shape for name, shape in ORIGINAL_FLUX.items()}
    qkv, mlp, linear = write_lora(tmp_path / "style.safetensors", modules, alpha=1.0).values()
    mergepipe.apply_lora(base, [tmp_path / "style.safetensors"], tmp_path / "out", catalog=False)
    named = {
        "transformer.transformer_blocks.0.ff_context.net.2.weight": mlp,
        "transformer.single_transformer_blocks.1.proj_mlp.weight": linear[3 * D :],
    }
    for place, name in enumerate(_QKV):
        rows = slice(place * D, (place + 1) * D)
        named[f"transformer.transformer_blocks.0.attn.{name}.weight"] = qkv[rows]
        named[f"transformer.single_transformer_blocks.1.attn.{name}.weight"] = linear[rows]
    assert_changed(before, of_pipeline(tmp_path / "out"), named)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_apply_lora__of_diffusers_fits_the_fused_matrices_of_a_file(tmp_path: Path, prefix: str) -> None:
    before = random(1, {f"{prefix}{name}.weight": shape for name, shape in ORIGINAL_FLUX.items()})
    save_file(before, tmp_path / "flux.safetensors")
    adapted = {name: shape for name, shape in DIFFUSERS_FLUX.items() if not name.endswith("to_k")}
    deltas = write_lora(tmp_path / "l.safetensors", {f"transformer.{name}": shape for name, shape in adapted.items()})
    out = tmp_path / "out.safetensors"
    mergepipe.apply_lora(tmp_path / "flux.safetensors", [tmp_path / "l.safetensors"], out, catalog=False)
    zero = np.zeros((D, D))
    of = {name: deltas.get(f"transformer.{name}", zero) for name in DIFFUSERS_FLUX}
    double = np.vstack([of[f"transformer_blocks.0.attn.{name}"] for name in _QKV])
    single = [of[f"single_transformer_blocks.1.attn.{name}"] for name in _QKV]
    named = {
        f"{prefix}double_blocks.0.img_attn.qkv.weight": double,
        f"{prefix}double_blocks.0.txt_mlp.2.weight": of["transformer_blocks.0.ff_context.net.2"],
        f"{prefix}single_blocks.1.linear1.weight": np.vstack([*single, of["single_transformer_blocks.1.proj_mlp"]]),
    }
    assert_changed(before, load_file(out), named)


WAN = {
    "blocks.0.attn1.to_q": "blocks.0.self_attn.q", "blocks.0.attn2.to_out.0": "blocks.0.cross_attn.o",
    "blocks.0.ffn.net.0.proj": "blocks.0.ffn.0", "condition_embedder.time_proj": "time_projection.1",
}  # fmt: skip


@pytest.mark.parametrize("own", ["original", "diffusers"])
def test_apply_lora__knows_both_names_of_wan(tmp_path: Path, own: str) -> None:
    names = list(WAN.values()) if own == "original" else list(WAN)
    others = list(WAN) if own == "original" else list(WAN.values())
    before = random(1, {f"{name}.weight": (D, D) for name in names})
    save_file(before, tmp_path / "wan.safetensors")
    deltas = write_lora(tmp_path / "l.safetensors", {f"diffusion_model.{name}": (D, D) for name in others})
    out = tmp_path / "out.safetensors"
    mergepipe.apply_lora(tmp_path / "wan.safetensors", [tmp_path / "l.safetensors"], out, catalog=False)
    named = dict(zip((f"{name}.weight" for name in names), deltas.values(), strict=True))
    assert_changed(before, load_file(out), named)


def test_convert_lora__gives_a_file_the_names_of_its_base(tmp_path: Path) -> None:
    shapes = {f"transformer.{name}.weight": shape for name, shape in DIFFUSERS_FLUX.items()}
    base, before = write_pipeline(tmp_path / "base", shapes)
    modules = {f"diffusion_model.{name}": shape for name, shape in ORIGINAL_FLUX.items()}
    write_lora(tmp_path / "style.safetensors", modules)
    mergepipe.convert_lora(tmp_path / "style.safetensors", tmp_path / "made", form="diffusers", base=base)
    made = tmp_path / "made" / "made.safetensors"
    assert {name.rpartition(".lora_")[0] for name in load_file(made)} == {f"transformer.{n}" for n in DIFFUSERS_FLUX}
    for adapter, out in ((tmp_path / "style.safetensors", "x"), (made, "y")):
        mergepipe.apply_lora(base, [adapter], tmp_path / out, catalog=False)
    first, second = of_pipeline(tmp_path / "x"), of_pipeline(tmp_path / "y")
    assert first.keys() == before.keys()
    for name, values in first.items():
        np.testing.assert_allclose(values, second[name], rtol=1e-5, atol=1e-5)


def test_apply_lora__reads_the_scales_that_diffusers_states_in_the_header(tmp_path: Path) -> None:
    before = random(1, {"blocks.0.attn1.to_q.weight": (D, D), "blocks.0.attn1.to_k.weight": (D, D)})
    save_file(before, tmp_path / "wan.safetensors")
    modules = {"transformer.blocks.0.attn1.to_q": (D, D), "transformer.blocks.0.attn1.to_k": (D, D)}
    deltas = write_lora(tmp_path / "l.safetensors", modules)
    options = {"transformer.r": 2, "transformer.lora_alpha": 6, "transformer.alpha_pattern": {"to_k": 1}}
    tensors = load_file(tmp_path / "l.safetensors")
    save_file(tensors, tmp_path / "l.safetensors", {"lora_adapter_metadata": json.dumps(options), "format": "pt"})
    out = tmp_path / "out.safetensors"
    mergepipe.apply_lora(tmp_path / "wan.safetensors", [tmp_path / "l.safetensors"], out, catalog=False)
    scales = {"to_q": 3.0, "to_k": 0.5}
    named = {f"{n.partition('.')[2]}.weight": scales[n[-4:]] * delta for n, delta in deltas.items()}
    assert_changed(before, load_file(out), named)


def test_merge__takes_a_file_for_a_pipeline_as_an_expert(tmp_path: Path) -> None:
    shapes = {f"{name}.weight": shape for name, shape in UNET.items()}
    base, before = write_pipeline(tmp_path / "base", shapes)
    lora = tmp_path / "style.safetensors"
    deltas = write_lora(lora, dict(zip(SPELLINGS["kohya"], UNET.values(), strict=True)), alpha=2.0)
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(json.dumps(recipe_of("task_arithmetic", {f"{base}+{lora}": {"weight": 0.5}}, base)))
    mergepipe.merge(recipe, tmp_path / "out", catalog=False)
    named = {f"{name}.weight": 0.5 * delta for name, delta in zip(UNET, deltas.values(), strict=True)}
    assert_changed(before, of_pipeline(tmp_path / "out"), named)


def test_apply_lora__refuses_a_file_that_does_not_fit(tmp_path: Path) -> None:
    save_file(random(1, {"blocks.0.attn1.to_q.weight": (D, D)}), tmp_path / "wan.safetensors")
    for modules, words in (
        (
            {"diffusion_model.blocks.9.self_attn.q": (D, D)},
            r"'diffusion_model.blocks.9.self_attn.q' has no counterpart",
        ),
        ({"diffusion_model.blocks.0.self_attn.q": (D, 4)}, r"make \[8, 4\], the base has \[8, 8\]"),
    ):
        write_lora(tmp_path / "l.safetensors", modules)
        with pytest.raises(MismatchError, match=words):
            mergepipe.apply_lora(
                tmp_path / "wan.safetensors", [tmp_path / "l.safetensors"], tmp_path / "out.safetensors"
            )
    assert not (tmp_path / "out.safetensors").exists()
