"""Run in the environment of the frameworks: `save FOLDER` writes two models each of three libraries, `load` compares.

Writes `sentences-1`, `pipeline-1`, `folders-1` and the same with 2; `load` opens `sentences`, `pipeline` and `folders`,
which are their means, and prints the largest difference of each from the mean of its two.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from sentence_transformers import SentenceTransformer
from sentence_transformers import models as modules
from transformers import AutoModel, BertConfig, BertModel, BertTokenizerFast, LlamaConfig, LlamaModel

TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz")


def save(folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    body = folder / f"body-{seed}"
    body.mkdir()
    (body / "vocab.txt").write_text("\n".join(TOKENS))
    BertTokenizerFast(str(body / "vocab.txt")).save_pretrained(body)
    config = BertConfig(
        vocab_size=len(TOKENS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    BertModel(config).save_pretrained(body)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaModel(LlamaConfig(**sizes, vocab_size=32)).save_pretrained(folder / f"folders-{seed}")
    BertModel(config).save_pretrained(folder / f"folders-{seed}" / "encoder")
    parts = [modules.Transformer(str(body)), modules.Pooling(16), modules.Dense(16, 8)]
    SentenceTransformer(modules=parts).save(str(folder / f"sentences-{seed}"))
    unet = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(str(folder / f"pipeline-{seed}"))


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    if name.startswith("sentences"):
        model = SentenceTransformer(str(folder / name))
    elif name.startswith("folders"):
        parts = [AutoModel.from_pretrained(folder / name, subfolder=part) for part in ("", "encoder")]
        model = torch.nn.ModuleList(parts)
    else:
        model = DDPMPipeline.from_pretrained(str(folder / name)).unet
    return dict(model.state_dict())


def largest_difference(folder: Path, name: str) -> float:
    mean, one, two = (weights(folder, f"{name}{which}") for which in ("", "-1", "-2"))
    return max(float((mean[key] - (one[key] + two[key]) / 2).abs().max()) for key in one)


if __name__ == "__main__":
    place = Path(sys.argv[2])
    if sys.argv[1] == "save":
        for seed in (1, 2):
            save(place, seed)
    else:
        print(*(largest_difference(place, name) for name in ("sentences", "pipeline", "folders")))
