"""Megatron-Core's distributed checkpoints and DCP tensors in grids of chunks, which torch itself writes."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from composing import checkpoint_at, hidden
from safetensors.numpy import load_file

from mergepipe import tailor
from mergepipe.core.blocks import Span
from mergepipe.errors import MergePipeError
from mergepipe.storage.local import LocalStore
from mergepipe.tailor import Averager
from mergepipe.tailor.checkpoint import WEIGHT, StateReader
from mergepipe.tailor.composition_plan import unpacked
from support.late_modules import LateModule, torch

dcp: Any = LateModule("torch.distributed.checkpoint")
pytestmark = [pytest.mark.transformers, pytest.mark.filterwarnings("ignore")]

State = dict[str, np.ndarray]
Parts = Mapping[str, Sequence[Sequence[int]]]
LAYERS, WIDTH, HEADS, GROUPS, HEAD, FFN, VOCABULARY, PADDED, EXPERTS = 2, 12, 4, 2, 4, 10, 37, 40, 3


class Grid:
    """An array that torch's writer is given in chunks: `ends` are the edges of the chunks, by dimension."""

    def __init__(self, array: np.ndarray, ends: Sequence[Sequence[int]]) -> None:
        self.tensor = torch.from_numpy(np.ascontiguousarray(array))
        places = product(*(pairwise(dimension) for dimension in ends))
        self.chunks = {tuple(a for a, _ in place): tuple(slice(a, b) for a, b in place) for place in places}

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        metadata, planner = dcp.metadata, dcp.planner
        properties = metadata.TensorProperties(dtype=self.tensor.dtype)
        items = []
        for number, (offsets, place) in enumerate(self.chunks.items()):
            sizes = torch.Size(s.stop - s.start for s in place)
            chunk = metadata.ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=sizes)
            index = metadata.MetadataIndex(fqn, torch.Size(offsets), number)
            data = planner.TensorWriteData(chunk=chunk, properties=properties, size=self.tensor.size())
            items.append(planner.WriteItem(index=index, type=planner.WriteItemType.SHARD, tensor_data=data))
        return items

    def chunk(self, offsets: Sequence[int]) -> Any:
        return self.tensor[self.chunks[tuple(offsets)]].clone()


def even(shape: Sequence[int], *parts: int) -> list[list[int]]:
    """Edges of that many chunks a dimension, one where nothing is said."""
    counts = [*parts, *[1] * (len(shape) - len(parts))]
    return [[length * n // count for n in range(count + 1)] for length, count in zip(shape, counts, strict=True)]


def save(folder: Path, arrays: State, ends: Parts) -> None:
    class GridPlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
        """Gives torch's writer the chunks of grids, as it gets those of DTensors."""

        def lookup_object(self, index: Any) -> Any:
            value = self.state_dict[index.fqn]
            return value.chunk(index.offset) if isinstance(value, Grid) else super().lookup_object(index)

    keyed = {n: Grid(a, ends[n]) if n in ends else torch.from_numpy(a.copy()) for n, a in arrays.items()}
    dcp.save(keyed, checkpoint_id=str(folder), no_dist=True, planner=GridPlanner())


# --- grids


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("shape", "ends"),
    [
        ((7, 9), [[0, 7], [0, 4, 9]]),
        ((7, 9), [[0, 2, 7], [0, 1, 5, 9]]),
        ((3, 8, 5), [[0, 1, 2, 3], [0, 8], [0, 2, 5]]),
        ((3, 8, 5), [[0, 1, 2, 3], [0, 3, 8], [0, 2, 5]]),
        ((4, 6, 5), [[0, 2, 4], [0, 3, 6], [0, 5]]),
        ((2, 3, 4, 6), [[0, 1, 2], [0, 1, 2, 3], [0, 4], [0, 2, 6]]),
        ((600, 700), [[0, 299, 600], [0, 64, 700]]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export__puts_chunks_of_a_grid_together(
    tmp_path: Path, shape: tuple[int, ...], ends: list[list[int]], dtype: str
) -> None:
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    save(tmp_path / "step-3", {"w": array}, {"w": ends})
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    tailor.export(
        tmp_path / "step-3", tmp_path / "out", config=tmp_path / "config", dtype=dtype, self_check="full",
        memory_bytes=16 << 20,
    )  # fmt: skip
    (made,) = load_file(tmp_path / "out" / "model.safetensors").values()
    wanted = array if dtype == "float32" else array.astype(ml_dtypes.bfloat16)
    assert made.tobytes() == wanted.tobytes()
    opened = checkpoint_at(tmp_path / "step-3")
    with StateReader(LocalStore()) as reader:
        state = unpacked(LocalStore(), opened.states["w", WEIGHT])
        for first, last in np.sort(np.random.default_rng(2).integers(0, array.size, (20, 2)), axis=1):
            raw = reader.read(state, Span(int(first), int(last)))
            assert raw.tobytes() == array.reshape(-1)[first:last].tobytes()


def test_average__of_grids_is_that_of_their_values(tmp_path: Path) -> None:
    arrays = [np.random.default_rng(n).standard_normal((6, 9)).astype(np.float32) for n in range(3)]
    for n, array in enumerate(arrays):
        save(tmp_path / f"step-{n}", {"w": array}, {"w": [[0, 6], [0, 4, 9]] if n else [[0, 2, 6], [0, 9]]})
    config = tmp_path / "config"
    config.mkdir()
    (config / "config.json").write_text("{}")
    tailor.average([tmp_path / f"step-{n}" for n in range(3)], tmp_path / "out", config=config, self_check="full")
    (made,) = load_file(tmp_path / "out" / "model.safetensors").values()
    np.testing.assert_allclose(made, np.mean(np.array(arrays, np.float64), axis=0), rtol=0, atol=1e-6)


def test_compose__refuses_parts_that_are_cut_along_columns(tmp_path: Path) -> None:
    for step in (1, 2):
        arrays = {"model.w": np.full((4, 6), step, np.float32)}
        arrays |= {f"optim.state.w.{kind}": np.full((4, 6), step, np.float32) for kind in ("exp_avg", "exp_avg_sq")}
        arrays["optim.state.w.step"] = np.array(step, np.float32)
        save(tmp_path / f"step-{step}", arrays, {"model.w": [[0, 4], [0, 3, 6]]})
    (tmp_path / "r.yml").write_text("default: step-1\nstate_from: step-2\n")
    with pytest.raises(MergePipeError, match="w: is cut along columns, as tensor parallel training does"):
        tailor.compose(tmp_path / "r.yml", tmp_path / "out")
    assert ((tmp_path / "out").exists(), hidden(tmp_path)) == (False, [])


# --- Megatron: what transformers names, as Megatron-Core's `sharded_state_dict` methods lay it out


def model_states(kind: str, step: int = 100) -> State:
    """A model as transformers names it."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        rows = {"q": HEADS * HEAD, "k": GROUPS * HEAD, "v": GROUPS * HEAD}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (size, WIDTH) for n, size in rows.items()}
        shapes |= {f"{at}.self_attn.{n}_proj.bias": (size,) for n, size in rows.items() if kind == "qwen2"}
        shapes |= {f"{at}.self_attn.{n}_norm.weight": (HEAD,) for n in "qk" if kind == "qwen3"}
        shapes[f"{at}.self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD)
        shapes |= {f"{at}.{n}_layernorm.weight": (WIDTH,) for n in ("input", "post_attention")}
        if kind == "mixtral":
            moe = f"{at}.block_sparse_moe"
            shapes[f"{moe}.gate.weight"] = (EXPERTS, WIDTH)
            sizes = {"w1": (FFN, WIDTH), "w2": (WIDTH, FFN), "w3": (FFN, WIDTH)}
            shapes |= {f"{moe}.experts.{e}.{n}.weight": size for e in range(EXPERTS) for n, size in sizes.items()}
        else:
            shapes |= {f"{at}.mlp.{n}_proj.weight": (FFN, WIDTH) for n in ("gate", "up")}
            shapes[f"{at}.mlp.down_proj.weight"] = (WIDTH, FFN)
    generator = np.random.default_rng(step)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def fused(model: State, at: str, leaf: str) -> np.ndarray:
    """Queries, keys and values, group by group."""
    q, k, v = (model[f"{at}.self_attn.{n}_proj.{leaf}"] for n in "qkv")
    grouped = [part.reshape(GROUPS, -1, HEAD, *part.shape[1:]) for part in (q, k, v)]
    return np.concatenate(grouped, axis=1).reshape(-1, *q.shape[1:])


def megatron_layer(model: State, layer: int, kind: str, *, fuses_norms: bool) -> State:
    at = f"model.layers.{layer}"
    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    if not fuses_norms:
        norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    made = {norms[0]: model[f"{at}.input_layernorm.weight"], norms[1]: model[f"{at}.post_attention_layernorm.weight"]}
    leaves = ("weight", "bias") if kind == "qwen2" else ("weight",)
    made |= {f"self_attention.linear_qkv.{leaf}": fused(model, at, leaf) for leaf in leaves}
    made["self_attention.linear_proj.weight"] = model[f"{at}.self_attn.o_proj.weight"]
    for n in "qk" if kind == "qwen3" else "":
        made[f"self_attention.{n}_layernorm.weight"] = model[f"{at}.self_attn.{n}_norm.weight"]
    if kind != "mixtral":
        gate_up = [model[f"{at}.mlp.{n}_proj.weight"] for n in ("gate", "up")]
        return made | {
            "mlp.linear_fc1.weight": np.concatenate(gate_up),
            "mlp.linear_fc2.weight": model[f"{at}.mlp.down_proj.weight"],
        }
    moe = f"{at}.block_sparse_moe"
    experts = [[model[f"{moe}.experts.{e}.{n}.weight"] for n in ("w1", "w3", "w2")] for e in range(EXPERTS)]
    made["mlp.router.weight"] = model[f"{moe}.gate.weight"]
    made["mlp.experts.experts.linear_fc1.weight"] = np.array([np.concatenate(expert[:2]) for expert in experts])
    return made | {"mlp.experts.experts.linear_fc2.weight": np.array([expert[2] for expert in experts])}


CUT = {"linear_qkv": 0, "linear_fc1": 0, "linear_proj": 1, "linear_fc2": 1}
"""The dimension along which tensor parallel training cuts a layer's matrix."""


def write_megatron(
    folder: Path, model: State, kind: str, *, prefix: str = "", is_stacked: bool = True, masters: int = 0
) -> None:
    layers = [megatron_layer(model, layer, kind, fuses_norms=is_stacked) for layer in range(LAYERS)]
    stacked = {f"decoder.layers.{n}": np.array([layer[n] for layer in layers]) for n in layers[0]}
    single = {f"decoder.layers.{number}.{n}": a for number, layer in enumerate(layers) for n, a in layer.items()}
    arrays = stacked if is_stacked else single
    padding = np.full((PADDED - VOCABULARY, WIDTH), 9, np.float32)
    arrays["embedding.word_embeddings.weight"] = np.concatenate([model["model.embed_tokens.weight"], padding])
    arrays["output_layer.weight"] = np.concatenate([model["lm_head.weight"], padding])
    arrays["decoder.final_layernorm.weight"] = model["model.norm.weight"]
    ends: dict[str, list[list[int]]] = {}
    for name, array in arrays.items():
        module = name.split(".")[-2]
        if module in CUT and name.endswith(".weight"):
            parts = [1] * array.ndim
            parts[: array.ndim - 2] = array.shape[: array.ndim - 2]
            parts[array.ndim - 2 + CUT[module]] = 4 if module == "linear_fc1" else 2
            ends[name] = even(array.shape, *parts)
        elif name.startswith(("embedding", "output")):
            ends[name] = even(array.shape, 2)
    stored = {prefix + name: array for name, array in arrays.items()}
    stored_ends = {prefix + name: e for name, e in ends.items()}
    for name in [*stored] if masters else ():
        stored[f"optimizer.state.fp32_param.{name}"] = stored[name] + masters
        stored[f"optimizer.state.exp_avg.{name}"] = stored[name]
        stored_ends |= {f"optimizer.state.fp32_param.{name}": stored_ends[name]} if name in stored_ends else {}
    stored["rng_state"] = np.zeros(3, np.float32)
    save(folder, stored, stored_ends)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "common_backend": "torch"}))
    torch.save({"iteration": 100, "args": Namespace(lr=0.1), "checkpoint_version": 3.0}, folder / "common.pt")


def config_of(folder: Path, kind: str, **changes: object) -> Path:
    config = {
        "model_type": kind, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
        "head_dim": HEAD, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
    }  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mixtral"])
@pytest.mark.parametrize("is_stacked", [True, False])
def test_export__of_megatron_is_the_model_of_transformers(tmp_path: Path, kind: str, is_stacked: bool) -> None:
    model = model_states(kind)
    write_megatron(tmp_path / "run" / "iter_0000100", model, kind, is_stacked=is_stacked)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("100")
    config = config_of(tmp_path / "config", kind)
    report = tailor.export(tmp_path / "run", tmp_path / "out", config=config, self_check="full")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == model.keys()
    assert [name for name in model if made[name].tobytes() != model[name].tobytes()] == []
    assert (report.plan.assignment.skeleton.step, report.plan.notices) == (100, ())


def test_export__of_nemo_takes_masters_and_averages(tmp_path: Path) -> None:
    models = [model_states("llama", step) for step in (1, 2, 3)]
    config = config_of(tmp_path / "config", "llama")
    paths = [tmp_path / f"step={number}" for number in (1, 2, 3)]
    for number, (path, model) in enumerate(zip(paths, models, strict=True), 1):
        (path / "context").mkdir(parents=True)
        write_megatron(path / "weights", model, "llama", prefix="module.", masters=4)
        torch.save({"global_step": number}, path / "weights" / "common.pt")
    tailor.export(paths[0], tmp_path / "one", config=config, self_check="full")
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert [name for name in one if not np.array_equal(one[name], models[0][name] + np.float32(4))] == []
    tailor.average(paths, tmp_path / "out", config=config, self_check="full")
    with Averager(tmp_path / "running", config=config) as averager:
        for path in paths:
            averager.fold(path)
    for folder in ("out", "running"):
        made = load_file(tmp_path / folder / "model.safetensors")
        assert made.keys() == models[0].keys()
        for name, array in made.items():
            wanted = np.mean([model[name].astype(float) + 4 for model in models], axis=0)
            np.testing.assert_allclose(array, wanted, rtol=0, atol=4e-6)


def test_export__of_an_unknown_megatron_model_keeps_its_names_and_says_so(tmp_path: Path) -> None:
    write_megatron(tmp_path / "iter_0000100", model_states("llama"), "llama")
    config = config_of(tmp_path / "config", "gpt2", num_hidden_layers=None)
    report = tailor.export(tmp_path / "iter_0000100", tmp_path / "out", config=config)
    assert "keep Megatron's names" in report.plan.notices[0]
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made["decoder.layers.self_attention.linear_proj.weight"].shape == (LAYERS, WIDTH, HEADS * HEAD)


def _cut_file(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:400])


DAMAGES: dict[str, tuple[Any, str]] = {
    "rank": (lambda folder: (folder / "__0_0.distcp").unlink(), "lacks file __0_0.distcp"),
    "cut": (_cut_file, "__0_0.distcp: has 400 bytes, .metadata needs"),
    "common": (lambda folder: (folder / "common.pt").unlink(), "there is no common.pt"),
    "backend": (
        lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "the backend is 'zarr', torch_dist is read",
    ),
    "latest": (
        lambda folder: (folder.parent / "latest_checkpointed_iteration.txt").write_text("release"),
        "names 'release', a number of iterations is needed",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_export__refuses_damaged_megatron_in_one_line(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run" / "iter_0000100"
    write_megatron(folder, model_states("llama"), "llama")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("100\n")
    DAMAGES[name][0](folder)
    config = config_of(tmp_path / "config", "llama")
    with pytest.raises(MergePipeError, match=DAMAGES[name][1]) as caught:
        tailor.export(tmp_path / "run", tmp_path / "out", config=config)
    assert (len(caught.value.problems), (tmp_path / "out").exists(), hidden(tmp_path)) == (1, False, [])


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"head_dim": 6}])
def test_export__refuses_groups_that_are_none_of_the_model(tmp_path: Path, changes: dict[str, object]) -> None:
    write_megatron(tmp_path / "iter_0000100", model_states("llama"), "llama")
    config = config_of(tmp_path / "config", "llama", **changes)
    with pytest.raises(MergePipeError, match=r"linear_qkv.weight: has 32 rows, not \d groups of \d+"):
        tailor.export(tmp_path / "iter_0000100", tmp_path / "out", config=config)


# --- weights in nested mappings: none is lost


ONES = np.ones((2, 2), np.float32)


def adam(*names: str) -> dict[str, Any]:
    return {name: {"step": 3.0, "exp_avg": ONES, "exp_avg_sq": ONES} for name in names}


def tensors(content: Any) -> Any:
    """The same nested mappings with torch tensors in place of arrays."""
    if isinstance(content, dict):
        return {key: tensors(value) for key, value in content.items()}
    return torch.tensor(content)


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ({"model": {"enc": {"w": ONES}, "dec": {"w": np.ones((8, 8), np.float32)}}}, {"enc.w", "dec.w"}),
        ({"model": {"w": ONES}, "ema": {"w": ONES, "n": ONES[0]}}, {"w"}),
        (
            {"model": {"enc": {"w": ONES}, "frozen": {"w": 0 * ONES}}, "optim": {"state": adam("enc.w")}},
            {"enc.w", "frozen.w"},
        ),
        ({"w": ONES, "optim": {"state": adam("w")}, "train_state": {"step": 3}}, {"w"}),
    ],
)
def test_export__has_the_weights_of_nested_mappings(tmp_path: Path, content: dict[str, Any], names: set[str]) -> None:
    dcp.save(tensors(content), checkpoint_id=str(tmp_path / "step-3"), no_dist=True)
    tailor.export(tmp_path / "step-3", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == names


def test_export__of_an_asynchronous_save_is_that_of_a_synchronous_one(tmp_path: Path) -> None:
    w = np.arange(12, dtype=np.float32).reshape(4, 3)
    content = tensors({"model": {"w": w}, "optim": {"state": {"w": {"step": 3.0, "exp_avg": w, "exp_avg_sq": w}}}})
    dcp.save(content, checkpoint_id=str(tmp_path / "sync-3"), no_dist=True)
    dcp.async_save(content, checkpoint_id=str(tmp_path / "async-3"), no_dist=True).result()
    for name in ("sync-3", "async-3"):
        tailor.export(tmp_path / name, tmp_path / f"out-{name}", self_check="full")
    kept = [(tmp_path / name / "__0_0.distcp").stat().st_size for name in ("sync-3", "async-3")]
    made = [(tmp_path / f"out-{name}" / "model.safetensors").read_bytes() for name in ("sync-3", "async-3")]
    assert (kept[0], made[0]) == (kept[1], made[1])
    opened = [tailor.inspect(tmp_path / name).checkpoints[0] for name in ("sync-3", "async-3")]
    assert (opened[0].units, opened[0].step, opened[0].missing) == (opened[1].units, 3, ())
