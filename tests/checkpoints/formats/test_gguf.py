"""GGUF files are read with the bits of the package gguf, and written so that it and transformers read the model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - names bfloat16 to numpy
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import mergepipe
from mergepipe.errors import MergePipeError, UnsupportedError
from support.fuzz_seeds import sentencepieces
from support.late_modules import torch, transformers

gguf = pytest.importorskip("gguf")

HIDDEN, HEADS, KV_HEADS, HEAD, WIDE, LAYERS, VOCAB, EXPERTS = 256, 2, 1, 128, 512, 2, 260, 3
TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
SPLIT_LIKE_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
Tensors = dict[str, NDArray[Any]]


def layer_shapes(family: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer by their names in GGUF and in Hugging Face's models."""
    shapes = {
        "attn_norm.weight input_layernorm.weight": (HIDDEN,),
        "ffn_norm.weight post_attention_layernorm.weight": (HIDDEN,),
        "attn_q.weight self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
        "attn_k.weight self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "attn_v.weight self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
        "attn_output.weight self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
        "ffn_gate.weight mlp.gate_proj.weight": (WIDE, HIDDEN),
        "ffn_up.weight mlp.up_proj.weight": (WIDE, HIDDEN),
        "ffn_down.weight mlp.down_proj.weight": (HIDDEN, WIDE),
    }
    if family == "qwen2":
        shapes |= {
            f"attn_{x}.bias self_attn.{x}_proj.bias": (n * HEAD,)
            for x, n in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
        }
    if family in ("mixtral", "qwen3moe"):
        matrices = {key: shapes.pop(key) for key in list(shapes) if key.startswith("ffn_") and "mlp" in key}
        for key, shape in matrices.items():
            shapes[key.replace(".weight ", "_exps.weight ").replace("mlp.", "mlp.experts.")] = (EXPERTS, *shape)
        shapes["ffn_gate_inp.weight mlp.gate.weight"] = (EXPERTS, HIDDEN)
    if family in ("qwen3", "qwen3moe"):
        shapes |= {f"attn_{x}_norm.weight self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
    return shapes


def names_and_shapes(family: str) -> list[tuple[str, str, tuple[int, ...]]]:
    rows: list[tuple[str, str, tuple[int, ...]]] = [
        ("token_embd.weight", "model.embed_tokens.weight", (VOCAB, HIDDEN)),
        ("output_norm.weight", "model.norm.weight", (HIDDEN,)),
        ("output.weight", "lm_head.weight", (VOCAB, HIDDEN)),
    ]
    for layer in range(LAYERS):
        for both, shape in layer_shapes(family).items():
            stored, name = both.split()
            rows.append((f"blk.{layer}.{stored}", f"model.layers.{layer}.{name}", shape))
    return rows


def unpaired(values: NDArray[Any], stored: str, family: str) -> NDArray[Any]:
    """Undo the order of rows that llama.cpp gives to Q and K, one row after the other."""
    is_paired = family in ("llama", "mixtral")
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stored.split(".")[-2], 0) if is_paired else 0
    if not heads:
        return values
    out = np.empty_like(values)
    for head in range(heads):
        for row in range(HEAD):
            half, pair = divmod(row, HEAD // 2)
            out[head * HEAD + row] = values[head * HEAD + 2 * pair + half]
    return out


def write_gguf(
    path: Path, family: str, kinds: Sequence[str], *, seed: int = 0, change: Callable[[Any], None] = lambda _: None
) -> Tensors:
    """Write random blocks of types in turn (vectors are float32); return what gguf reads, by names of Hugging Face."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama" if family == "mixtral" else family)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_token_list([f"t{i}" for i in range(VOCAB)])
    writer.add_token_scores([0.5] * VOCAB)
    change(writer)
    for number, (stored, _, shape) in enumerate(names_and_shapes(family)):
        kind = kinds[number % len(kinds)]
        if len(shape) == 1 or kind in ("F32", "F16"):
            values = rng.normal(0, 0.05, shape)
            writer.add_tensor(stored, values.astype(np.float16 if kind == "F16" and len(shape) > 1 else np.float32))
            continue
        type_ = gguf.GGMLQuantizationType[kind]
        block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        raw = rng.integers(0, 60, (*shape[:-1], shape[-1] // block * block_bytes), np.uint8)  # no scale is infinite
        writer.add_tensor(stored, raw, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = {stored: name for stored, name, _ in names_and_shapes(family)}
    read = {
        names[t.name]: unpaired(gguf.dequantize(t.data, t.tensor_type), t.name, family)
        for t in gguf.GGUFReader(path).tensors if t.name in names
    }  # fmt: skip
    stacks = {name: read.pop(name) for name in list(read) if ".experts." in name}
    one_by_one = ((name, expert) for name in stacks for expert in range(EXPERTS))
    return read | {name.replace(".experts.", f".experts.{e}."): stacks[name][e] for name, e in one_by_one}


def merged(root: Path, recipe: Mapping[str, object], out: str = "out", **options: Any) -> Path:
    (root / f"{out}.yml").write_text(json.dumps(recipe))
    mergepipe.merge(root / f"{out}.yml", root / out, catalog=False, **options)
    return root / out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "first"), [("llama", 0), ("llama", 8), ("qwen2", 0), ("qwen3", 0), ("mixtral", 3), ("qwen3moe", 8)]
)
def test_gguf__is_read_with_the_bits_of_gguf(tmp_path: Path, family: str, first: int) -> None:
    theirs = write_gguf(tmp_path / "m.gguf", family, (*TYPES[first:], *TYPES[:first]))
    recipe = {"merge_method": "passthrough", "dtype": "float32", "models": [{"model": str(tmp_path / "m.gguf")}]}
    ours = load_file(merged(tmp_path, recipe) / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name].tobytes() == values.astype(np.float32).tobytes(), name


def test_gguf__is_an_expert_like_the_numbers_it_stands_for(tmp_path: Path) -> None:
    rows = names_and_shapes("llama")
    base = {name: np.random.default_rng(9).normal(size=shape).astype(np.float32) for _, name, shape in rows}
    save_file(base, tmp_path / "base.safetensors")
    save_file(write_gguf(tmp_path / "q.gguf", "llama", ("Q4_K",)), tmp_path / "q.safetensors")
    outs = []
    for expert in ("q.gguf", "q.safetensors"):
        models = [{"model": str(tmp_path / expert), "parameters": {"weight": 0.4, "density": 0.3}}]
        recipe = {"merge_method": "ties", "base_model": str(tmp_path / "base.safetensors"), "models": models}
        outs.append(load_file(merged(tmp_path, recipe, expert.replace(".", "-")) / "model.safetensors"))
    for name in base:
        assert outs[0][name].tobytes() == outs[1][name].tobytes(), name
    report = mergepipe.plan({**recipe, "models": [{**models[0], "model": str(tmp_path / "q.gguf")}]}, "50%")
    assert report.planned_bytes <= report.budget_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.add_string("general.architecture", "gemma3"), "architecture 'gemma3'"),
        (lambda w: w.add_tensor("blk.0.ssm_a", np.zeros(4, np.float32)), "llama models have no such tensor"),
        (lambda w: w.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((4, 4), np.float32)), "is not a stack of experts"),
        (lambda w: w.add_uint16("split.count", 3), "is one of 3 files"),
        (lambda w: w.add_uint32("llama.attention.head_count_kv", 3), "128 rows for 3 heads"),
        (lambda w: w.add_string("llama.block_count", "many"), "does not say how many layers and heads"),
        (
            lambda w: w.add_uint32("llama.block_count", 1_000_000),
            r"says that it has 1000000 layers, and has \d+ tensors",
        ),
        (
            lambda w: w.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((500, 0, 4), np.float32)),
            "is not a stack of experts",
        ),
    ],
)
def test_gguf__of_another_kind_is_refused(tmp_path: Path, change: Callable[[Any], None], message: str) -> None:
    def changed(writer: Any) -> None:
        add = writer.add_key_value

        def replace_value(key: str, *rest: Any) -> None:
            writer.kv_data[0].pop(key, None)
            add(key, *rest)

        writer.add_key_value = replace_value
        change(writer)

    write_gguf(tmp_path / "m.gguf", "llama", ("F16",), change=changed)
    with pytest.raises(MergePipeError, match=message):
        mergepipe.check({"merge_method": "passthrough", "models": [{"model": str(tmp_path / "m.gguf")}]})


@pytest.mark.parametrize("length", [0, 3, 20, 100, 3000, -1])
def test_gguf__cut_off_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    write_gguf(tmp_path / "m.gguf", "llama", ("F16",))
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:length])
    with pytest.raises(MergePipeError, match=r"cut off|beyond the file|not GGUF"):
        mergepipe.check({"merge_method": "passthrough", "models": [{"model": str(tmp_path / "m.gguf")}]})


def test_gguf__without_the_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "model", "qwen2")
    write_gguf(tmp_path / "m.gguf", "llama", ("F16",))
    monkeypatch.setitem(sys.modules, "gguf", None)
    for model, out in (("m.gguf", "out"), ("model", "out.gguf")):
        with pytest.raises(UnsupportedError, match=r'pip install "\.\[gguf\]"'):
            merged(tmp_path, {"merge_method": "passthrough", "models": [{"model": str(tmp_path / model)}]}, out)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.gguf").exists()


# --- writing ---


def write_model(folder: Path, family: str, *, config: Mapping[str, object] = {}, tokenizer: Any = None) -> Tensors:
    folder.mkdir()
    rng = np.random.default_rng(5)
    tensors = {name: rng.normal(0, 0.05, shape).astype(np.float32) for _, name, shape in names_and_shapes(family)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    stated = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD, "intermediate_size": WIDE, "vocab_size": VOCAB,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 50000.0, "bos_token_id": 257,
        "eos_token_id": 258, "tie_word_embeddings": False, "torch_dtype": "float32", "hidden_act": "silu", **config,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(stated))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_LIKE_QWEN}, "behavior": "Isolated", "invert": False}
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(moved)} | {"th": 256}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 257 + i, "content": text, "special": True, **flags} for i, text in enumerate(("<s>", "</s>"))]
    document = {
        "version": "1.0", "added_tokens": added, "normalizer": None, "decoder": byte_level, "post_processor": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["t h"]},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document if tokenizer is None else tokenizer))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tensors


CONFIGS: Mapping[str, Mapping[str, object]] = {"llama": {"rope_scaling": LLAMA3_ROPE}, "qwen2": {}, "qwen3": {}}


@pytest.mark.thorough
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    ("name", "dtype"), [("m", "bfloat16"), ("m-F16", "float32"), ("m.f32", "float32"), ("m-q8_0", "bfloat16")]
)
def test_gguf_out__is_what_gguf_makes_of_the_merge(tmp_path: Path, family: str, name: str, dtype: str) -> None:
    write_model(tmp_path / "model", family, config=CONFIGS[family])
    recipe = {"merge_method": "passthrough", "dtype": dtype, "models": [{"model": str(tmp_path / "model")}]}
    out = merged(tmp_path, recipe, f"{name}.gguf")
    expected = load_file(merged(tmp_path, {**recipe, "dtype": dtype}, "folder") / "model.safetensors")
    kind = {"m": "BF16", "m-F16": "F16", "m.f32": "F32", "m-q8_0": "Q8_0"}[name]
    reader = gguf.GGUFReader(out)
    names = {stored: hf for stored, hf, _ in names_and_shapes(family)}
    extra = {tensor.name for tensor in reader.tensors} - names.keys()
    assert extra == ({"rope_freqs.weight"} if family == "llama" else set())
    for tensor in reader.tensors:
        if tensor.name in extra:
            continue
        values = expected[names[tensor.name]].astype(np.float32)
        type_ = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        assert tensor.tensor_type == type_, tensor.name
        wanted = gguf.dequantize(gguf.quantize(values, type_), type_)
        read = unpaired(gguf.dequantize(tensor.data, tensor.tensor_type), tensor.name, family)
        assert read.tobytes() == wanted.tobytes(), tensor.name
    made = {path.name for path in tmp_path.glob(f"{name}.*")}
    assert made == {f"{name}.gguf", f"{name}.gguf.yml", f"{name}.mergepipe"}
    assert mergepipe.verify(out).is_sound
    with pytest.raises(UnsupportedError, match="is the record of a GGUF file"):
        mergepipe.verify(out, deep_fraction=1.0)
    mergepipe.replay(out, tmp_path / "again" / out.name, catalog=False)
    assert (tmp_path / "again" / out.name).read_bytes() == out.read_bytes()
    out.write_bytes(out.read_bytes()[:-1] + b"?")
    assert not mergepipe.verify(out).is_sound


@pytest.mark.thorough
@pytest.mark.transformers
@pytest.mark.parametrize("family", CONFIGS)
def test_gguf_out__transformers_reads_the_same_model_and_tokenizer(tmp_path: Path, family: str) -> None:
    write_model(tmp_path / "model", family)
    recipe = {"merge_method": "passthrough", "dtype": "float32", "models": [{"model": str(tmp_path / "model")}]}
    merged(tmp_path, recipe, "m-F32.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m-F32.gguf", dtype=torch.float32)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, atol=1e-5)
    texts = ["the 123 things,\n isn't it?", "<s>Ünïcode </s>"]
    load_tokenizer = transformers.AutoTokenizer.from_pretrained
    tokenizers = [load_tokenizer(tmp_path / "model"), load_tokenizer(tmp_path, gguf_file="m-F32.gguf")]
    ids_of = [[t(text, add_special_tokens=False)["input_ids"] for text in texts] for t in tokenizers]
    assert ids_of[0] == ids_of[1]


def test_gguf_out__of_sentencepieces_has_the_tokens_that_other_files_add(tmp_path: Path) -> None:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 3 + i, "content": text, "special": not i, **flags} for i, text in enumerate(("<|x|>", "tool"))]
    model = {"type": "BPE", "vocab": {"<unk>": 0, "a": 1, "é": 2}, "merges": []}
    stated = {"model": model, "added_tokens": added}
    write_model(tmp_path / "model", "llama", config={"pad_token_id": -1}, tokenizer=stated)
    (tmp_path / "model" / "tokenizer.model").write_bytes(sentencepieces()[0])
    (tmp_path / "model" / "tokenizer_config.json").write_text('{"add_prefix_space": false}')
    tokenizer = {"tokens": {"<|new|>": {"source": {"kind": "zero"}}}}
    recipe = {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "model")}], "tokenizer": tokenizer}
    fields = gguf.GGUFReader(merged(tmp_path, recipe, "m.gguf")).fields
    lists = [fields[f"tokenizer.ggml.{key}"].contents()[:7] for key in ("tokens", "token_type", "scores")]
    assert lists[0] == ["<unk>", "a", "é", "<|x|>", "tool", "<|new|>", "[PAD6]"]
    assert lists[1:] == [[1, 1, 1, 3, 4, 4, 5], [1.0, 1.0, 1.0, *[-1000.0] * 4]]
    assert not fields["tokenizer.ggml.add_space_prefix"].contents()
    assert "tokenizer.ggml.padding_token_id" not in fields


@pytest.mark.parametrize(
    ("name", "config", "tokenizer", "message"),
    [
        ("m-Q4_K_M.gguf", {}, None, "Q4_K_M is not written.*llama-quantize"),
        ("m.gguf", {"model_type": "gemma3"}, None, "type 'gemma3'.*convert_hf_to_gguf.py"),
        ("m.gguf", {"num_hidden_layers": 1}, None, "tensors have no name in GGUF, 'model.layers.1"),
        ("m.gguf", {"rope_scaling": {"rope_type": "longrope"}}, None, "'longrope'"),
        ("m.gguf", {"rope_scaling": "linear"}, None, "rotary embedding is of a type that is not written"),
        ("m.gguf", {"rope_scaling": {"rope_type": "llama3"}}, None, "states None as 'factor'"),
        ("m.gguf", {"intermediate_size": None}, None, "states None as 'intermediate_size'"),
        ("m.gguf", {"num_attention_heads": 3}, None, "'model.layers.0.self_attn.q_proj.weight' has 256 rows for 3"),
        ("m.gguf", {}, {"model": {"type": "WordPiece"}}, "splits text in another way"),
        ("m.gguf", {}, {"pre_tokenizer": {"pretokenizers": []}}, "splits text in another way"),
    ],
)
def test_gguf_out__of_another_kind_is_refused(
    tmp_path: Path, name: str, config: Mapping[str, object], tokenizer: Any, message: str
) -> None:
    write_model(tmp_path / "model", "llama", config=config, tokenizer=tokenizer)
    with pytest.raises(MergePipeError, match=message):
        merged(tmp_path, {"merge_method": "passthrough", "models": [{"model": str(tmp_path / "model")}]}, name)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{name}.yml", "model"]
