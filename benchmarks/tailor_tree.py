"""Command that writes 8B-shaped ZeRO-3 checkpoints scaled to a size: every byte a real one has, no framework needed."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mergepipe.checkpoints.inert_pickle import Global, PickledStorage, PickledTensor, Record
from mergepipe.core.blocks import F32
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.archive_layout import MemberPlan, lay_out_archive, literal_member
from mergepipe.tailor.copy_plan import CopyRange, Literal, Segment
from mergepipe.tailor.copy_writer import write_files
from mergepipe.tailor.pickle_writer import InertPickler, torch_size

LAYERS = 32
_BYTES_PER_PARAMETER = 12  # masters and both moments; stage 3 stores no 16-bit weights
_POOL_BYTES = 64 << 20
_STATES = ("exp_avg", "exp_avg_sq")


def checkpoint_name(index: int) -> str:
    """The directory of the checkpoint with this number, from 0, the oldest."""
    return f"global_step{100 * (index + 1)}"


def scaled_shapes(size_bytes: int) -> dict[str, tuple[int, ...]]:
    """Llama-3-8B's shapes with every width scaled so that a checkpoint has about `size_bytes`."""
    scale = 1.0
    for _ in range(60):
        shapes = _shapes(scale)
        total = sum(math.prod(shape) for shape in shapes.values()) * _BYTES_PER_PARAMETER
        scale *= (size_bytes / total) ** 0.5
    return shapes


def _shapes(scale: float) -> dict[str, tuple[int, ...]]:
    def width(full: int) -> int:
        return max(1, round(full * scale))

    h, ffn, kv, vocabulary = width(4096), width(14336), width(1024), width(128256)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, h)}
    for index in range(LAYERS):
        for module, shape in (
            ("self_attn.q_proj", (h, h)), ("self_attn.k_proj", (kv, h)), ("self_attn.v_proj", (kv, h)),
            ("self_attn.o_proj", (h, h)), ("mlp.gate_proj", (ffn, h)), ("mlp.up_proj", (ffn, h)),
            ("mlp.down_proj", (h, ffn)), ("input_layernorm", (h,)), ("post_attention_layernorm", (h,)),
        ):  # fmt: skip
            shapes[f"model.layers.{index}.{module}.weight"] = shape
    return shapes | {"model.norm.weight": (h,), "lm_head.weight": (vocabulary, h)}


def write_checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]], ranks: int, step: int, pool: Path) -> None:
    """Write a ZeRO-3 tag directory whose tensors are cut out of `pool`."""
    folder.mkdir(parents=True)
    groups = [[n for n in shapes if "norm" not in n], [n for n in shapes if "norm" in n]]
    for rank in range(ranks):
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        for kind, (root, members) in (
            ("optim", _optimizer(shapes, groups, ranks, step, pool)),
            ("model", _model(shapes, groups, ranks, step)),
        ):
            head = [literal_member("data.pkl", InertPickler().dump(root)), literal_member("byteorder", b"little")]
            name = f"{prefix}_{kind}_states.pt"
            plan = lay_out_archive(name, "archive", [*head, *members, literal_member("version", b"3\n")])
            write_files(LocalStore(), [(plan, folder / name)], 256 << 20, lambda _: None)


def _model(
    shapes: dict[str, tuple[int, ...]], groups: list[list[str]], ranks: int, step: int
) -> tuple[object, list[MemberPlan]]:
    root = {
        "module": {},
        "buffer_names": [],
        "param_shapes": [{n: torch_size(shapes[n]) for n in group} for group in groups],
        "shared_params": {},
        "global_steps": step,
        "dp_world_size": ranks,
    }
    return root, []


def _optimizer(
    shapes: dict[str, tuple[int, ...]], groups: list[list[str]], ranks: int, step: int, pool: Path
) -> tuple[object, list[MemberPlan]]:
    members: list[MemberPlan] = []

    def flat(n_elements: int) -> PickledTensor:
        segments = tuple(_from_pool(pool, n_elements * 4, len(members)))
        return tensor(segments, (n_elements,))

    def tensor(segments: tuple[Segment, ...], shape: tuple[int, ...]) -> PickledTensor:
        key, n_elements = str(len(members)), math.prod(shape)
        members.append(MemberPlan(f"data/{key}", segments))
        return PickledTensor(PickledStorage(key, F32, n_elements), F32, 0, shape, (1,) * len(shape))

    sizes = [sum(-(-math.prod(shapes[n]) // ranks) for n in group) for group in groups]
    counter = (Literal(np.float32(step).tobytes()),)
    root = {
        "optimizer_state_dict": {
            "zero_stage": Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,)),
            "partition_count": ranks,
            "optimizer_state_dict": {
                "state": {
                    i: {"step": tensor(counter, ()), **{k: flat(n) for k in _STATES}} for i, n in enumerate(sizes)
                },
                "param_groups": [{"params": [i], "lr": 1e-4} for i in range(len(groups))],
            },
            "fp32_flat_groups": [flat(n) for n in sizes],
        }
    }
    return root, members


def _from_pool(pool: Path, nbytes: int, seed: int) -> Iterator[CopyRange]:
    start = seed * 4096 % _POOL_BYTES
    while nbytes:
        take = min(nbytes, _POOL_BYTES - start)
        yield CopyRange(Location.local(pool), start, take, is_skeleton=True)
        nbytes, start = nbytes - take, 0


def main(folder: str, size_gb: str, n_checkpoints: str, ranks: str) -> None:
    """Write so many checkpoints of `size_gb` each into a folder."""
    directory = Path(folder)
    directory.mkdir(parents=True, exist_ok=True)
    pool = directory / "pool"
    values = np.random.default_rng(0).standard_normal(_POOL_BYTES // 4).astype(np.float32)
    pool.write_bytes(values.tobytes())
    shapes = scaled_shapes(int(float(size_gb) * 1e9))
    vocabulary, width = shapes["lm_head.weight"]
    config = {"model_type": "llama", "hidden_size": width, "num_hidden_layers": LAYERS, "vocab_size": vocabulary}
    (directory / "config.json").write_text(json.dumps(config))
    for index in range(int(n_checkpoints)):
        step = 100 * (index + 1)
        write_checkpoint(directory / checkpoint_name(index), shapes, int(ranks), step, pool)
    pool.unlink()


if __name__ == "__main__":
    main(*sys.argv[1:])
