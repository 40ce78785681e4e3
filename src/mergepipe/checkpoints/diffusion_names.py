"""Names of the modules of diffusion models: of diffusers, of the original files, and flattened by Kohya's scripts.

A LoRA has one of them, its base another. A fused matrix of one (`qkv`) is several of the other: `Part` says which rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

# The parts of a diffusers pipeline and of one-file models, by what their names begin with: how LoRA files call them.
_DENOISERS: Final = ("diffusion_model.", "transformer.", "unet.", "")
_DENOISER_FLAT: Final = ("lora_unet_", "lora_transformer_")
_COMPONENTS: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "model.diffusion_model.": (_DENOISERS, _DENOISER_FLAT),
    "diffusion_model.": (_DENOISERS, _DENOISER_FLAT),
    "unet.": (_DENOISERS, _DENOISER_FLAT),
    "transformer.": (_DENOISERS, _DENOISER_FLAT),
    "text_encoder.": (("text_encoder.",), ("lora_te_", "lora_te1_")),
    "text_encoder_2.": (("text_encoder_2.",), ("lora_te2_",)),
    "text_encoder_3.": (("text_encoder_3.",), ("lora_te3_",)),
    "cond_stage_model.transformer.": (("text_encoder.",), ("lora_te_", "lora_te1_")),
    "conditioner.embedders.0.transformer.": (("text_encoder.",), ("lora_te1_",)),
    "text_encoders.clip_l.transformer.": (("text_encoder.",), ("lora_te1_",)),
    "": (_DENOISERS, _DENOISER_FLAT),
}
DENOISER_COMPONENTS: Final = ("transformer", "unet", "diffusion_model")


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index` of `count` row blocks of a fused matrix: each as high as the matrix is wide, the last has the rest.

    Of the whole matrix `count` is 1.
    """

    index: int = 0
    count: int = 1

    def rows(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the rows of this part of a matrix of `shape`."""
        if self.count == 1:
            return 0, shape[0]
        height = shape[1]
        last = self.index == self.count - 1
        return self.index * height, shape[0] if last else (self.index + 1) * height


WHOLE: Final = Part()


def _unet_pairs() -> Iterator[tuple[str, str]]:
    """Pair the names that diffusers gives to the blocks of a UNet with those of Stable Diffusion's files."""
    resnet = (
        ("norm1", "in_layers.0"), ("conv1", "in_layers.2"), ("norm2", "out_layers.0"), ("conv2", "out_layers.3"),
        ("time_emb_proj", "emb_layers.1"), ("conv_shortcut", "skip_connection"),
    )  # fmt: skip
    blocks = [("mid_block.resnets.0", "middle_block.0"), ("mid_block.resnets.1", "middle_block.2")]
    for level in range(4):
        for layer in range(3):
            blocks.append((f"down_blocks.{level}.resnets.{layer}", f"input_blocks.{3 * level + layer + 1}.0"))
            blocks.append((f"up_blocks.{level}.resnets.{layer}", f"output_blocks.{3 * level + layer}.0"))
            attentions = f"down_blocks.{level}.attentions.{layer}", f"input_blocks.{3 * level + layer + 1}.1"
            yield f"{attentions[0]}.*", f"{attentions[1]}.*"
            yield f"up_blocks.{level}.attentions.{layer}.*", f"output_blocks.{3 * level + layer}.1.*"
        yield f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{3 * level + 3}.0.op"
        for place in (1, 2):  # behind an attention, or without one
            yield f"up_blocks.{level}.upsamplers.0.conv", f"output_blocks.{3 * level + 2}.{place}.conv"
    yield "mid_block.attentions.0.*", "middle_block.1.*"
    for block, original in blocks:
        for name, other in resnet:
            yield f"{block}.{name}", f"{original}.{other}"
    yield "conv_in", "input_blocks.0.0"
    yield "conv_out", "out.2"
    yield "time_embedding.linear_1", "time_embed.0"
    yield "time_embedding.linear_2", "time_embed.2"
    yield "add_embedding.linear_1", "label_emb.0.0"
    yield "add_embedding.linear_2", "label_emb.0.2"


_FLUX: Final = (
    ("transformer_blocks.#.attn.to_q", "double_blocks.#.img_attn.qkv", Part(0, 3)),
    ("transformer_blocks.#.attn.to_k", "double_blocks.#.img_attn.qkv", Part(1, 3)),
    ("transformer_blocks.#.attn.to_v", "double_blocks.#.img_attn.qkv", Part(2, 3)),
    ("transformer_blocks.#.attn.add_q_proj", "double_blocks.#.txt_attn.qkv", Part(0, 3)),
    ("transformer_blocks.#.attn.add_k_proj", "double_blocks.#.txt_attn.qkv", Part(1, 3)),
    ("transformer_blocks.#.attn.add_v_proj", "double_blocks.#.txt_attn.qkv", Part(2, 3)),
    ("transformer_blocks.#.attn.to_out.0", "double_blocks.#.img_attn.proj", WHOLE),
    ("transformer_blocks.#.attn.to_add_out", "double_blocks.#.txt_attn.proj", WHOLE),
    ("transformer_blocks.#.ff.net.0.proj", "double_blocks.#.img_mlp.0", WHOLE),
    ("transformer_blocks.#.ff.net.2", "double_blocks.#.img_mlp.2", WHOLE),
    ("transformer_blocks.#.ff_context.net.0.proj", "double_blocks.#.txt_mlp.0", WHOLE),
    ("transformer_blocks.#.ff_context.net.2", "double_blocks.#.txt_mlp.2", WHOLE),
    ("transformer_blocks.#.norm1.linear", "double_blocks.#.img_mod.lin", WHOLE),
    ("transformer_blocks.#.norm1_context.linear", "double_blocks.#.txt_mod.lin", WHOLE),
    ("single_transformer_blocks.#.attn.to_q", "single_blocks.#.linear1", Part(0, 4)),
    ("single_transformer_blocks.#.attn.to_k", "single_blocks.#.linear1", Part(1, 4)),
    ("single_transformer_blocks.#.attn.to_v", "single_blocks.#.linear1", Part(2, 4)),
    ("single_transformer_blocks.#.proj_mlp", "single_blocks.#.linear1", Part(3, 4)),
    ("single_transformer_blocks.#.proj_out", "single_blocks.#.linear2", WHOLE),
    ("single_transformer_blocks.#.norm.linear", "single_blocks.#.modulation.lin", WHOLE),
    ("x_embedder", "img_in", WHOLE),
    ("context_embedder", "txt_in", WHOLE),
    ("time_text_embed.timestep_embedder.linear_1", "time_in.in_layer", WHOLE),
    ("time_text_embed.timestep_embedder.linear_2", "time_in.out_layer", WHOLE),
    ("time_text_embed.guidance_embedder.linear_1", "guidance_in.in_layer", WHOLE),
    ("time_text_embed.guidance_embedder.linear_2", "guidance_in.out_layer", WHOLE),
    ("time_text_embed.text_embedder.linear_1", "vector_in.in_layer", WHOLE),
    ("time_text_embed.text_embedder.linear_2", "vector_in.out_layer", WHOLE),
    ("proj_out", "final_layer.linear", WHOLE),
)
_WAN: Final = (
    *(
        (f"blocks.#.{attention}.{name}", f"blocks.#.{original}.{other}", WHOLE)
        for attention, original in (("attn1", "self_attn"), ("attn2", "cross_attn"))
        for name, other in (
            ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"), ("add_k_proj", "k_img"),
            ("add_v_proj", "v_img"),
        )
    ),
    ("blocks.#.ffn.net.0.proj", "blocks.#.ffn.0", WHOLE),
    ("blocks.#.ffn.net.2", "blocks.#.ffn.2", WHOLE),
    ("condition_embedder.time_embedder.linear_1", "time_embedding.0", WHOLE),
    ("condition_embedder.time_embedder.linear_2", "time_embedding.2", WHOLE),
    ("condition_embedder.time_proj", "time_projection.1", WHOLE),
    ("condition_embedder.text_embedder.linear_1", "text_embedding.0", WHOLE),
    ("condition_embedder.text_embedder.linear_2", "text_embedding.2", WHOLE),
    ("proj_out", "head.head", WHOLE),
)  # fmt: skip
_TABLE: Final = (*((name, other, WHOLE) for name, other in _unet_pairs()), *_FLUX, *_WAN)
"""Names of diffusers and of the original files, `#` for a number and `*` for the rest, and which part of the latter."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """A line of the table, read in one direction."""

    pattern: re.Pattern[str]
    other: str
    part: Part
    is_from_original: bool


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\#", r"(\d+)").replace("#", r"(\d+)").replace(r"\*", "(.+)"))


_RULES: Final = tuple(
    rule
    for name, original, part in _TABLE
    for rule in (_Rule(_pattern(name), original, part, False), _Rule(_pattern(original), name, part, True))
)


@dataclass(frozen=True, slots=True)
class Target:
    """Where a module of a LoRA goes: a module of the base, `own` of its rows, from the rows `of_lora`."""

    module: str
    own: Part = WHOLE
    of_lora: Part = WHOLE


def dotted_name(module: str) -> str:
    """Return the name of a module of a pipeline as LoRA files write it: the component's folder is a word of it."""
    return module.replace("/", ".", 1)


def lora_names(module: str) -> Iterator[tuple[str, Target]]:
    """Yield the names by which LoRA files may call a module of a base, each with the rows of both that it is about."""
    name_in_pipeline = dotted_name(module)
    component = next(component for component in _COMPONENTS if name_in_pipeline.startswith(component))
    inside = name_in_pipeline.removeprefix(component)
    dotted, flat = _COMPONENTS[component]
    spelled = [(inside, WHOLE, WHOLE)]
    for rule in _RULES:
        match = rule.pattern.fullmatch(inside)
        if match is None:
            continue
        name = rule.other
        for value in match.groups():
            name = name.replace("#", value, 1) if "#" in name else name.replace("*", value, 1)
        # A base with the original names has whole matrices, of which the LoRA's modules are parts, and vice versa.
        if rule.is_from_original:
            spelled.append((name, rule.part, WHOLE))
        else:
            spelled.append((name, WHOLE, rule.part))
    for name, own, of_lora in spelled:
        target = Target(module, own, of_lora)
        for prefix in dotted:
            yield f"{prefix}{name}", target
        for prefix in flat:
            yield prefix + name.replace(".", "_"), target
