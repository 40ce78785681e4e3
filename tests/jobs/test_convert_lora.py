"""Adapters in other forms: the delta of every module stays, there and back, and what a form cannot hold is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import MergePipeError, RecipeError, UnsupportedError
from support.model_folders import PREFIX, write_adapter, write_model

HIDDEN, INNER, EXPERTS, TOKENS, RANK = 8, 6, 3, 10, 4
LAYER = "model.layers.0"
PLAIN = {
    f"{LAYER}.self_attn.q_proj": (HIDDEN, HIDDEN),
    f"{LAYER}.self_attn.k_proj": (HIDDEN, HIDDEN),
    f"{LAYER}.mlp.up_proj": (INNER, HIDDEN),
}
EMBEDDING = "model.embed_tokens"
Tensors = dict[str, NDArray[Any]]
Deltas = dict[str, NDArray[np.float64]]


def random(rng: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    """Values that bfloat16 holds."""
    bits = rng.standard_normal(shape).astype(np.float32).view(np.uint32) & 0xFFFF0000
    return bits.view(np.float32)


def write_plain(folder: Path, *, embedding: bool = True, dtype: Any = np.float32, **options: Any) -> Path:
    """An adapter of linear layers and of the embedding, as PEFT saves it."""
    rng = np.random.default_rng(3)
    tensors: Tensors = {}
    for module, (rows, columns) in PLAIN.items():
        rank = options.get("rank_pattern", {}).get(module.rpartition(".")[2], RANK)
        tensors[f"{module}.lora_A.weight"] = random(rng, rank, columns).astype(dtype)
        tensors[f"{module}.lora_B.weight"] = random(rng, rows, rank).astype(dtype)
    if embedding:
        tensors[f"{EMBEDDING}.lora_embedding_A"] = random(rng, RANK, TOKENS).astype(dtype)
        tensors[f"{EMBEDDING}.lora_embedding_B"] = random(rng, HIDDEN, RANK).astype(dtype)
    return write_adapter(folder, tensors, target_modules=[m.rpartition(".")[2] for m in PLAIN], **options)


def write_base(folder: Path, model_type: str = "qwen3", *, experts: str = "") -> Path:
    """A model of one layer; its experts are `single` or `stacked`."""
    rng = np.random.default_rng(9)
    shapes: dict[str, tuple[int, ...]] = {f"{module}.weight": shape for module, shape in PLAIN.items()}
    shapes[f"{EMBEDDING}.weight"] = (TOKENS, HIDDEN)
    stem = f"{LAYER}.mlp.experts"
    if experts:
        del shapes[f"{LAYER}.mlp.up_proj.weight"]
    if experts == "stacked":
        shapes |= {f"{stem}.gate_up_proj": (EXPERTS, 2 * INNER, HIDDEN), f"{stem}.down_proj": (EXPERTS, HIDDEN, INNER)}
    for expert in range(EXPERTS) if experts == "single" else ():
        shapes |= {f"{stem}.{expert}.{role}_proj.weight": (INNER, HIDDEN) for role in ("gate", "up")}
        shapes[f"{stem}.{expert}.down_proj.weight"] = (HIDDEN, INNER)
    config = {
        "model_type": model_type, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "hidden_size": HIDDEN, "architectures": ["Qwen3ForCausalLM"],
    }  # fmt: skip
    return write_model(folder, {name: random(rng, *shape) for name, shape in shapes.items()}, config)


def of_folder(path: Path) -> tuple[dict[str, Any], Tensors]:
    """The configuration and the tensors of a folder."""
    weights = next(file for file in path.iterdir() if file.suffix == ".safetensors")
    return json.loads((path / "adapter_config.json").read_text()), load_file(weights)


def peft_scale(config: dict[str, Any], module: str) -> float:
    """What PEFT multiplies by: alpha over rank, by the first pattern that the end of a name matches."""

    def stated(patterns: dict[str, Any], default: Any) -> Any:
        return next((v for k, v in (patterns or {}).items() if re.fullmatch(rf"(?:.*\.)?{k}", module)), default)

    rank = stated(config.get("rank_pattern", {}), config["r"])
    alpha = stated(config.get("alpha_pattern", {}), config["lora_alpha"])
    return float(alpha / np.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def peft_deltas(path: Path) -> Deltas:
    """The oracle: what PEFT adds to each weight, in float64; of an embedding transposed."""
    config, tensors = of_folder(path)
    deltas = {}
    for name in tensors:
        if not name.endswith(("lora_A.weight", "lora_embedding_A")):
            continue
        module = re.sub(r"\.lora_(A\.weight|embedding_A)$", "", name).removeprefix(PREFIX)
        down, up = tensors[name], tensors[name.replace("lora_A", "lora_B").replace("embedding_A", "embedding_B")]
        delta = peft_scale(config, module) * up.astype(np.float64) @ down.astype(np.float64)
        deltas[module] = delta.T if "embedding" in name else delta
    return deltas


def mlx_deltas(path: Path) -> Deltas:
    """The oracle of MLX: one scale, times the transposed product of both."""
    config, tensors = of_folder(path)
    scale = config["lora_parameters"]["scale"]
    deltas = {}
    for name, down in tensors.items():
        if name.endswith(".lora_a"):
            module = name.removesuffix(".lora_a")
            up = tensors[f"{module}.lora_b"].astype(np.float64)
            assert {down.shape[-1], up.shape[-2]} >= {config["lora_parameters"]["rank"]} or down.ndim == 3
            if down.ndim == 3:
                for expert in range(len(down)):
                    name_of = module.replace(".switch_mlp.", f".experts.{expert}.")
                    deltas[name_of] = scale * up[expert] @ down[expert].astype(np.float64)
            elif module == EMBEDDING:
                deltas[module] = scale * down.astype(np.float64) @ up
            else:
                deltas[module] = scale * (down.astype(np.float64) @ up).T
    return deltas


def file_deltas(path: Path) -> Deltas:
    """The oracle of files: alpha over rank where there is one, by whatever names the factors have."""
    tensors = load_file(path)
    deltas = {}
    for name, down in tensors.items():
        match = re.fullmatch(r"(.+)\.(lora_down|lora_A)\.weight", name)
        if match is None:
            continue
        up = tensors[f"{match[1]}.{ {'lora_down': 'lora_up', 'lora_A': 'lora_B'}[match[2]] }.weight"]
        alpha = float(tensors.get(f"{match[1]}.alpha", np.float32(len(down))))
        product = up.reshape(len(up), -1).astype(np.float64) @ down.reshape(len(down), -1).astype(np.float64)
        deltas[match[1]] = alpha / len(down) * product
    return deltas


GGUF_NAMES = {
    "attn_q": f"{LAYER}.self_attn.q_proj", "attn_k": f"{LAYER}.self_attn.k_proj", "ffn_up": f"{LAYER}.mlp.up_proj",
}  # fmt: skip


def gguf_deltas(path: Path) -> Deltas:
    """The oracle of llama.cpp: alpha over the rank of B, and its own reader of the file."""
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.type"].contents() == "adapter"
    assert reader.fields["adapter.type"].contents() == "lora"
    alpha = reader.fields["adapter.lora.alpha"].contents()
    tensors = {tensor.name: np.asarray(tensor.data, np.float64) for tensor in reader.tensors}
    deltas = {}
    for name, down in tensors.items():
        if not name.endswith(".lora_a"):
            continue
        up = tensors[name.replace(".lora_a", ".lora_b")]
        scale = alpha / up.shape[-1]
        if name.startswith("token_embd"):
            deltas[EMBEDDING] = scale * down @ up.T
        elif down.ndim == 3:
            role = name.split(".")[2].removesuffix("_exps").removeprefix("ffn_")
            for expert in range(len(down)):
                deltas[f"{LAYER}.mlp.experts.{expert}.{role}_proj"] = scale * up[expert] @ down[expert]
        else:
            deltas[GGUF_NAMES[name.split(".")[2]]] = scale * up @ down
    return deltas


def assert_equal(first: Deltas, second: Deltas) -> None:
    assert first.keys() == second.keys()
    for name, delta in first.items():
        np.testing.assert_allclose(delta, second[name], rtol=1e-6, atol=1e-6, err_msg=name)


ORACLES = {"peft": peft_deltas, "vllm": peft_deltas, "sglang": peft_deltas, "mlx": mlx_deltas}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"up_proj": 5}},
}


@pytest.mark.parametrize("form", ORACLES)
@pytest.mark.parametrize("name", OPTIONS)
def test_convert_lora__to_a_folder_keeps_every_delta_there_and_back(tmp_path: Path, form: str, name: str) -> None:
    adapter = write_plain(tmp_path / "a", **OPTIONS[name])
    report = mergepipe.convert_lora(adapter, tmp_path / "b", form=form)
    assert (report.read_form, report.form, len(report.modules)) == ("peft", form, 4)
    assert_equal(peft_deltas(adapter), ORACLES[form](tmp_path / "b"))
    mergepipe.convert_lora(tmp_path / "b", tmp_path / "c")
    assert_equal(peft_deltas(adapter), peft_deltas(tmp_path / "c"))
    assert mergepipe.verify(tmp_path / "b").is_sound


@pytest.mark.parametrize("form", ["vllm", "sglang", "mlx"])
def test_convert_lora__for_programs_with_one_scale_has_one_rank_and_no_patterns(tmp_path: Path, form: str) -> None:
    adapter = write_plain(tmp_path / "a", **OPTIONS["patterns"])
    report = mergepipe.convert_lora(adapter, tmp_path / "b", form=form)
    config, tensors = of_folder(tmp_path / "b")
    assert not config.get("rank_pattern")
    assert not config.get("alpha_pattern")
    assert report.ranks == (RANK,)
    assert {values.shape[1] for name, values in tensors.items() if name.endswith("lora_B.weight")} <= {RANK}
    assert report.folded_in_float32 or report.folded_exactly


@pytest.mark.parametrize("form", ["kohya", "comfyui", "diffusers"])
@pytest.mark.parametrize("name", OPTIONS)
def test_convert_lora__to_a_file_keeps_every_delta_there_and_back(tmp_path: Path, form: str, name: str) -> None:
    adapter = write_plain(tmp_path / "a", embedding=False, **OPTIONS[name])
    mergepipe.convert_lora(adapter, tmp_path / "b", form=form)
    prefix = {"kohya": "lora_unet_", "comfyui": "diffusion_model.", "diffusers": "transformer."}[form]
    file = tmp_path / "b" / "b.safetensors"
    expected = {}
    for module, delta in peft_deltas(adapter).items():
        expected[prefix + (module.replace(".", "_") if form == "kohya" else module)] = delta
    assert_equal(expected, file_deltas(file))
    assert ("alpha" in str(load_file(file).keys())) == (form == "kohya")
    base = write_base(tmp_path / "base")
    mergepipe.convert_lora(file, tmp_path / "c", base=base)
    assert_equal(peft_deltas(adapter), peft_deltas(tmp_path / "c"))
    assert mergepipe.verify(tmp_path / "b").is_sound


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("name", OPTIONS)
def test_convert_lora__to_gguf_is_what_the_package_reads(tmp_path: Path, model_type: str, name: str) -> None:
    adapter, base = write_plain(tmp_path / "a", **OPTIONS[name]), write_base(tmp_path / "base", model_type)
    mergepipe.convert_lora(adapter, tmp_path / "b", form="gguf", base=base)
    file = tmp_path / "b" / "b.gguf"
    deltas = gguf_deltas(file)
    expected = peft_deltas(adapter)
    if model_type == "llama":  # its rows of Q and K are neighbours, which were halves of a head
        for module in (f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj"):
            halves = expected[module].reshape(2, 2, HIDDEN // 4, HIDDEN)
            expected[module] = halves.swapaxes(1, 2).reshape(HIDDEN, HIDDEN)
    assert_equal(expected, deltas)
    mergepipe.convert_lora(file, tmp_path / "c", base=base)
    assert_equal(peft_deltas(adapter), peft_deltas(tmp_path / "c"))
    assert mergepipe.verify(tmp_path / "b").is_sound


def write_experts(folder: Path, **options: Any) -> tuple[Path, Deltas]:
    """An adapter of stacked experts as PEFT saves it since 0.19, with the delta of each matrix of an expert."""
    rng = np.random.default_rng(5)
    stem = f"{LAYER}.mlp.experts"
    tensors: Tensors = {}
    deltas: Deltas = {}
    for nested, rows, columns in ((f"{stem}.base_layer", 2 * INNER, HIDDEN), (stem, HIDDEN, INNER)):
        down, up = random(rng, RANK * EXPERTS, columns), random(rng, rows, RANK * EXPERTS)
        tensors |= {f"{nested}.lora_A.weight": down, f"{nested}.lora_B.weight": up}
        for expert in range(EXPERTS):
            own = down.reshape(EXPERTS, RANK, columns)[expert].astype(np.float64)
            delta = 2.0 * up.reshape(rows, RANK, EXPERTS)[:, :, expert].astype(np.float64) @ own
            if nested == stem:
                deltas[f"{stem}.{expert}.down_proj"] = delta
            else:
                deltas |= {f"{stem}.{expert}.gate_proj": delta[:INNER], f"{stem}.{expert}.up_proj": delta[INNER:]}
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return write_adapter(folder, tensors, target_modules=[], target_parameters=parameters, **options), deltas


@pytest.mark.parametrize("experts", ["stacked", "single"])
@pytest.mark.parametrize("form", ["vllm", "sglang", "mlx", "gguf"])
def test_convert_lora__of_stacked_experts_gives_programs_those_that_they_read(
    tmp_path: Path, form: str, experts: str
) -> None:
    adapter, deltas = write_experts(tmp_path / "a")
    base = write_base(tmp_path / "base", "qwen3_moe", experts=experts)
    mergepipe.convert_lora(adapter, tmp_path / "b", form=form, base=base)
    made = gguf_deltas(tmp_path / "b" / "b.gguf") if form == "gguf" else ORACLES[form](tmp_path / "b")
    assert_equal(deltas, made)
    back = tmp_path / "b" / "b.gguf" if form == "gguf" else tmp_path / "b"
    mergepipe.convert_lora(back, tmp_path / "c", experts="single")
    assert_equal(deltas, peft_deltas(tmp_path / "c"))


def applied(base: Path, adapter: Path, out: Path) -> Tensors:
    mergepipe.apply_lora(base, [adapter], out, catalog=False)
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("experts", ["stacked", "single"])
def test_convert_lora__stacks_single_experts_for_transformers_5_and_splits_them_for_4(
    tmp_path: Path, experts: str
) -> None:
    adapter, deltas = write_experts(tmp_path / "a")
    base = write_base(tmp_path / "base", "qwen3_moe", experts=experts)
    mergepipe.convert_lora(adapter, tmp_path / "single", experts="single", base=base)
    assert_equal(deltas, peft_deltas(tmp_path / "single"))
    mergepipe.convert_lora(tmp_path / "single", tmp_path / "stacked", experts="stacked")
    config, _ = of_folder(tmp_path / "stacked")
    assert len(config["target_parameters"]) == 2
    expected = applied(base, adapter, tmp_path / "x")
    for number, name in enumerate(("single", "stacked")):
        for key, values in applied(base, tmp_path / name, tmp_path / f"y{number}").items():
            np.testing.assert_allclose(values, expected[key], rtol=1e-5, atol=1e-5, err_msg=key)


@pytest.mark.parametrize("form", ["kohya", "comfyui", "diffusers", "gguf"])
def test_convert_lora__refuses_a_scale_that_a_file_cannot_hold(tmp_path: Path, form: str) -> None:
    write_plain(tmp_path / "adapter", embedding=False, lora_alpha=1e300)
    base = write_base(tmp_path / "base") if form == "gguf" else None
    with pytest.raises(UnsupportedError, match="numbers beyond float32"):
        mergepipe.convert_lora(tmp_path / "adapter", tmp_path / "out", form=form, base=base)
    assert not (tmp_path / "out").exists()


def test_convert_lora__writes_a_large_alpha_so_that_it_can_be_read(tmp_path: Path) -> None:
    write_plain(tmp_path / "adapter", embedding=False, lora_alpha=1e38)
    mergepipe.convert_lora(tmp_path / "adapter", tmp_path / "once", form="vllm")
    mergepipe.convert_lora(tmp_path / "once", tmp_path / "twice", form="peft")
    assert of_folder(tmp_path / "twice")[0]["lora_alpha"] == 1e38


def test_convert_lora__reads_the_order_of_experts_of_unsloth(tmp_path: Path) -> None:
    adapter, deltas = write_experts(tmp_path / "a")
    config, tensors = of_folder(adapter)
    by_expert = {
        name: values.reshape(len(values), RANK, EXPERTS).swapaxes(1, 2).reshape(values.shape)
        if name.endswith("lora_B.weight")
        else values
        for name, values in tensors.items()
    }
    (tmp_path / "u").mkdir()
    save_file(
        {name: np.ascontiguousarray(v) for name, v in by_expert.items()}, tmp_path / "u/adapter_model.safetensors"
    )
    (tmp_path / "u" / "adapter_config.json").write_text(json.dumps(config))
    base = write_base(tmp_path / "base", "qwen3_moe", experts="single")
    mergepipe.convert_lora(tmp_path / "u", tmp_path / "b", base=base, experts="single", unsloth_experts=True)
    assert_equal(deltas, peft_deltas(tmp_path / "b"))
    mergepipe.convert_lora(tmp_path / "u", tmp_path / "c", unsloth_experts=True)
    again, written = of_folder(tmp_path / "c")
    assert peft_scale(again, "x") == peft_scale(config, "x")
    for name, values in tensors.items():
        np.testing.assert_array_equal(values, written[name])


@pytest.mark.parametrize("shared", [False, True])
def test_convert_lora__reads_the_experts_of_tinker(tmp_path: Path, *, shared: bool) -> None:
    rng = np.random.default_rng(7)
    tensors: Tensors = {}
    deltas: Deltas = {}
    for matrix, role, rows, columns in (
        ("w1", "gate_proj", INNER, HIDDEN), ("w2", "down_proj", HIDDEN, INNER), ("w3", "up_proj", INNER, HIDDEN),
    ):  # fmt: skip
        down = random(rng, 1 if shared and matrix != "w2" else EXPERTS, RANK, columns)
        up = random(rng, 1 if shared and matrix == "w2" else EXPERTS, rows, RANK)
        stem = f"{LAYER}.mlp.experts"
        tensors |= {f"{stem}.{matrix}.lora_A.weight": down, f"{stem}.{matrix}.lora_B.weight": up}
        for expert in range(EXPERTS):
            product = up[expert % len(up)].astype(np.float64) @ down[expert % len(down)].astype(np.float64)
            deltas[f"{stem}.{expert}.{role}"] = 2.0 * product
    head = random(rng, RANK, HIDDEN), random(rng, TOKENS, RANK)
    tensors |= {"model.unembed_tokens.lora_A.weight": head[0], "model.unembed_tokens.lora_B.weight": head[1]}
    deltas["lm_head"] = 2.0 * head[1].astype(np.float64) @ head[0].astype(np.float64)
    adapter = write_adapter(tmp_path / "a", tensors, target_modules="all-linear")
    mergepipe.convert_lora(adapter, tmp_path / "b")
    assert_equal(deltas, peft_deltas(tmp_path / "b"))


def test_convert_lora__puts_a_scale_into_a_factor_exactly_or_in_float32(tmp_path: Path) -> None:
    for name, alpha, folded in (("half", 2, "folded_exactly"), ("third", 21, "folded_in_float32")):
        adapter = write_plain(tmp_path / name, embedding=False, dtype=np.float16, lora_alpha=alpha)
        report = mergepipe.convert_lora(adapter, tmp_path / f"{name}-out", form="comfyui")
        assert len(getattr(report, folded)) == len(PLAIN)
        written = load_file(tmp_path / f"{name}-out" / f"{name}-out.safetensors")
        dtypes = {values.dtype for key, values in written.items() if "lora_B" in key}
        assert dtypes == {np.dtype(np.float16 if name == "half" else np.float32)}
        assert all(values.dtype == np.float16 for key, values in written.items() if "lora_A" in key)


@pytest.mark.parametrize(
    ("options", "more", "words"),
    [
        ({"use_dora": True}, {"lora_magnitude_vector": (HIDDEN,)}, r"is magnitudes \(DoRA\), which the form vllm"),
        ({"lora_bias": True}, {"lora_B.bias": (HIDDEN,)}, r"is a trained bias \(lora_bias\), which the form vllm"),
        ({"modules_to_save": ["norm"]}, {"model.norm.weight": (HIDDEN,)}, "is a tensor stored in full"),
    ],
)
def test_convert_lora__refuses_by_name_what_a_form_cannot_hold(
    tmp_path: Path, options: dict[str, Any], more: dict[str, tuple[int, ...]], words: str
) -> None:
    module = f"{LAYER}.self_attn.q_proj"
    tensors = {f"{module}.lora_A.weight": np.ones((RANK, HIDDEN)), f"{module}.lora_B.weight": np.ones((HIDDEN, RANK))}
    for name, shape in more.items():
        tensors[name if name.startswith("model") else f"{module}.{name}"] = np.ones(shape)
    adapter = write_adapter(tmp_path / "a", {name: v.astype(np.float32) for name, v in tensors.items()}, **options)
    with pytest.raises(UnsupportedError, match=words):
        mergepipe.convert_lora(adapter, tmp_path / "b", form="vllm")
    assert not (tmp_path / "b").exists()
    mergepipe.convert_lora(adapter, tmp_path / "c")
    for name, values in of_folder(adapter)[1].items():
        np.testing.assert_array_equal(values, of_folder(tmp_path / "c")[1][name])


def test_convert_lora__refuses_what_only_the_base_tells(tmp_path: Path) -> None:
    experts, _ = write_experts(tmp_path / "experts")
    plain = write_plain(tmp_path / "plain", embedding=False)
    mergepipe.convert_lora(plain, tmp_path / "kohya", form="kohya")
    flat = tmp_path / "kohya" / "kohya.safetensors"
    llama = write_base(tmp_path / "llama", "llama")
    mergepipe.convert_lora(plain, tmp_path / "gguf", form="gguf", base=llama)
    odd = write_base(tmp_path / "odd", "mamba")
    for adapter, options, words in (
        (experts, {"form": "vllm"}, "nothing in it says which dimension is which"),
        (plain, {"form": "gguf"}, "the names in GGUF depend on the architecture"),
        (plain, {"form": "gguf", "base": odd}, "the base is of the type 'mamba'"),
        (flat, {"form": "diffusers"}, "only the base says where its dots were"),
        (tmp_path / "gguf" / "gguf.gguf", {}, "only the base says how many heads there are"),
    ):
        with pytest.raises(MergePipeError, match=words):
            mergepipe.convert_lora(adapter, tmp_path / "out", **options)
    with pytest.raises(RecipeError, match="onnx"):
        mergepipe.convert_lora(plain, tmp_path / "out", form="onnx")
    with pytest.raises(RecipeError, match="has no effect with form vllm"):
        mergepipe.convert_lora(plain, tmp_path / "out", form="vllm", experts="stacked")
    assert not (tmp_path / "out").exists()


def test_convert_lora__changes_parts_of_names_as_apply_does(tmp_path: Path) -> None:
    adapter = write_plain(tmp_path / "a", **OPTIONS["patterns"])
    renames = ("model.layers=model.language_model.layers",)
    mergepipe.convert_lora(adapter, tmp_path / "b", adapter_names=renames)
    expected = {
        name.replace("model.layers", "model.language_model.layers"): d for name, d in peft_deltas(adapter).items()
    }
    assert_equal(expected, peft_deltas(tmp_path / "b"))


def test_merge_lora__merges_adapters_of_llama_cpp_with_those_of_peft(tmp_path: Path) -> None:
    adapter, base = write_plain(tmp_path / "a"), write_base(tmp_path / "base")
    mergepipe.convert_lora(adapter, tmp_path / "g", form="gguf", base=base)
    for number, adapters in enumerate(((tmp_path / "g" / "g.gguf", adapter), (adapter, tmp_path / "g" / "g.gguf"))):
        out = tmp_path / f"out{number}"
        mergepipe.merge_lora(adapters, out, weights=(0.25, 0.5))
        assert_equal({name: 0.75 * delta for name, delta in peft_deltas(adapter).items()}, peft_deltas(out))


def test_merge_lora__merges_files_for_diffusion_models(tmp_path: Path) -> None:
    adapter = write_plain(tmp_path / "a", embedding=False)
    mergepipe.convert_lora(adapter, tmp_path / "d", form="diffusers")
    file = tmp_path / "d" / "d.safetensors"
    mergepipe.merge_lora([file, file], tmp_path / "out", weights=(0.25, 0.5))
    expected = {f"transformer.{module}": 0.75 * delta for module, delta in peft_deltas(adapter).items()}
    assert_equal(expected, file_deltas(tmp_path / "out" / "out.safetensors"))
    with pytest.raises(UnsupportedError, match="its names are those of a file for diffusion models"):
        mergepipe.merge_lora([file, adapter], tmp_path / "other")


@pytest.mark.parametrize("experts", ["stacked", "single"])
def test_apply_lora__takes_every_form_as_it_takes_that_of_peft(tmp_path: Path, experts: str) -> None:
    adapter, _ = write_experts(tmp_path / "a")
    base = write_base(tmp_path / "base", "qwen3_moe", experts=experts)
    expected = applied(base, adapter, tmp_path / "x")
    for form in ("vllm", "mlx", "gguf"):
        mergepipe.convert_lora(adapter, tmp_path / form, form=form, base=base)
        made = tmp_path / form / "gguf.gguf" if form == "gguf" else tmp_path / form
        for name, values in applied(base, made, tmp_path / f"y-{form}").items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-5, atol=1e-5, err_msg=f"{form}: {name}")
