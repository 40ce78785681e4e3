"""Sound contents of every format that fuzzing begins from."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import yaml
from numpy.typing import NDArray

from mergepipe.planning.plan import parse_plan
from mergepipe.tailor.saving.save_log import SaveRecord
from mergepipe.tailor.selection import EMBED, LM_HEAD, NORM, layer
from support.coded_weights import COLUMNS, GROUP, ROWS, SCHEMES
from support.disk_families import write_sharded, write_single
from support.torch_bytes import Call, Member, Named, View, zip_bytes

SAFETENSORS_HEADERS = (
    b'{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
    b'"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}',
    b'{"__metadata__":{"format":"pt"},"x":{"dtype":"I64","shape":[],"data_offsets":[0,8]},'
    b'"e":{"dtype":"F16","shape":[0,5],"data_offsets":[8,8]},'
    b'"y":{"dtype":"BOOL","shape":[3],"data_offsets":[8,11]}}   ',
    b"{}",
)  # fmt: skip
TOKENIZER_SETTINGS = json.dumps({
    "tokenizer_class": "LlamaTokenizer", "model_max_length": 10**30, "bos_token": "<s>",
    "added_tokens_decoder": {
        "3": {"content": "<x>", "special": True, "lstrip": False},
        "4": {"content": "<y>", "special": False, "normalized": True},
    },
}).encode()  # fmt: skip
RECIPES = (
    b"merge_method: linear\nbase_model: base\nmodels:\n- model: a\n  parameters: {weight: 0.5}\n- model: b\n"
    b"  parameters:\n    weight: 1e-1\nparameters:\n  normalize: true\ndtype: bfloat16\n",
    b"merge_method: ties\nbase_model: base\nmodels:\n  - model: a\n    parameters:\n      density: 0.2\n"
    b"      weight:\n        - filter: norm\n          value: 0.3\n        - value: [0.1, 0.9]\n  - model: b\n"
    b"    parameters: &p {density: 1, weight: 1}\nparameters:\n  lambda: 0.7\n",
    b"slices:\n- sources:\n  - {model: a, layer_range: [0, 1]}\n  - {model: b, layer_range: [0, 1]}\n"
    b"- sources: [{model: a, layer_range: [1, 2]}, {model: b, layer_range: [1, 2]}]\nmerge_method: slerp\n"
    b"base_model: a\nparameters:\n  t:\n  - filter: mlp\n    value: [0, 0.5, 1]\n  - value: 0.5\n",
    b"name: first\nmerge_method: task_arithmetic\nbase_model: base\nmodels:\n- model: a\n"
    b"  parameters: {weight: 1}\n---\n"
    b"merge_method: dare_ties\nbase_model: base\nmodels:\n- {model: first, parameters: {weight: 1, density: .5}}\n"
    b"- {model: b, parameters: {weight: -1, density: 0.9}}\ntokenizer_source: union\nchat_template: auto\n",
    b"merge_method: passthrough\nslices:\n- sources:\n  - model: base+lora\n    layer_range: [0, 2]\n- sources:\n"
    b"  - model: base\n    layer_range: [0, 1]\n    parameters: {scale: 2}\n",
)
RECIPE_WORDS = (
    b"merge_method", b"linear", b"ties", b"slerp", b"dare_linear", b"model_stock", b"della", b"karcher", b"models:\n",
    b"- model: a\n", b"base_model", b"parameters:", b"&x ", b"*x", b"<<: *p", b"!!python/object:os.system ", b"? ",
    b"---\n", b"...\n", b"|\n", b"{}", b"[]", b"~", b".nan", b".inf", b"1e400", b"0x10", b"0o7", b"1_000", b"\t", b"#",
    b"2001-01-01", b"tokenizer:\n  source: union\n", b"tokens:\n", b"modules:\n", b"filter:", b"value:", b"+", b"@",
    b"layer_range: [0, 9]", b"dtype: float32\n", b"out_dtype: auto\n", b"%YAML 1.1\n", b"\xef\xbb\xbf", b"\xff\xfe",
    b"first", b"base+lora",
)  # fmt: skip
ADAPTER_CONFIGS = (
    b'{"peft_type":"LORA","r":2,"lora_alpha":4,"target_modules":["q"],"rank_pattern":{"^layers.0":2},'
    b'"alpha_pattern":{"q|k":8.5},"use_rslora":false,"fan_in_fan_out":false,"bias":"none"}',
    b'{"peft_type":"LORA","r":2,"lora_alpha":4.0,"use_rslora":true,"init_lora_weights":"gaussian","use_dora":false}',
)
ADAPTER_WORDS = (
    b"use_dora", b"(a+)+$", b".*" * 8, b"[a-z]*", b"(((", b"\\", b"pissa", b"r", b"lora_alpha", b"DORA", b"x{9}",
)  # fmt: skip
PLAN_WORDS = (
    b"0-1", b"0-1,1-2", b"0-99999999999", b"0-1@0", b"expert", b"base", b"format", b"mergepipe-plan/4", b",", b"@",
)  # fmt: skip
COMPOSITIONS = (
    b"default: old\ntake:\n- from: new\n  units: [layers 0, embed, norm]\n- from: old\n  units: lm_head\n"
    b"state_from: new\n",
    b"merge_method: passthrough\nslices:\n- sources:\n  - model: old\n    layer_range: [0, 1]\n- sources:\n"
    b"  - {model: new, layer_range: [1, 1]}\ndtype: bfloat16\n",
)  # fmt: skip
COMPOSITION_WORDS = (
    b"default", b"take:", b"units:", b"layers 0-9", b"layers even", b"state_from", b"old", b"new", b"even", b"odd",
)  # fmt: skip


def as_trees(recipes: Sequence[bytes]) -> tuple[bytes, ...]:
    """Those recipes that are one document, as JSON, which is YAML. What YAML 1.1 takes for text is written out."""
    single = (recipe.replace(b"1e-1", b"0.1") for recipe in recipes if b"\n---" not in recipe)
    return tuple(json.dumps(yaml.safe_load(recipe)).encode() for recipe in single)


def state_dicts() -> tuple[object, ...]:
    """Values that `torch.save` would be given."""
    array = np.arange(12, dtype=np.float32)
    ordered = Call(Named("collections", "OrderedDict"))
    return (
        {"a.weight": array.reshape(3, 4), "b": View(array, 2, (2, 2)), "empty": View(array, 0, (0, 3))},
        {"state_dict": {"x": View(array, 0, (12,))}, "epoch": 3, "args": ("a", None, True, 2.5, 1 << 70), "m": ordered},
    )


def write_sharded_model(folder: Path) -> Path:
    """A directory of two shards and an index."""
    return write_sharded(folder, {name: np.full(4, i, np.float32) for i, name in enumerate("abcde")}, 2)


def write_recipe_models(folder: Path) -> Path:
    """Models `base`, `a` and `b` of two layers, and the adapter `lora`."""
    names = [f"model.layers.{i}.{part}.weight" for i in range(2) for part in ("mlp.up_proj", "self_attn.q_proj")]
    for seed, model in enumerate(("base", "a", "b")):
        rng = np.random.default_rng(seed)
        tensors = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in names}
        tensors["model.embed_tokens.weight"] = rng.standard_normal((6, 4)).astype(np.float32)
        tensors["model.norm.weight"] = rng.standard_normal(4).astype(np.float32)
        write_single(folder / model, tensors)
        config = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 6}
        (folder / model / "config.json").write_text(json.dumps(config))
        (folder / model / "tokenizer.json").write_bytes(fast_tokenizers()[0])
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    factors = {
        f"{module}.lora_A.weight": np.ones((2, 4), np.float32),
        f"{module}.lora_B.weight": np.ones((4, 2), np.float32),
    }
    write_single(folder / "lora", factors)
    (folder / "lora" / "model.safetensors").rename(folder / "lora" / "adapter_model.safetensors")
    (folder / "lora" / "adapter_config.json").write_bytes(ADAPTER_CONFIGS[0])
    return folder


def coded_weights() -> Mapping[str, tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]]:
    """Weights of codes of every scheme, and what a configuration states of them."""
    seeded: dict[str, tuple[Mapping[str, NDArray[Any]], Mapping[str, Any]]] = {}
    for scheme, make in SCHEMES.items():
        tensors, _ = make(0)
        stated: dict[str, Any] = {}
        if scheme.startswith("GPTQ"):
            stated = {"bits": int(scheme[8]), "group_size": GROUP}
        seeded[scheme] = tensors, stated
    codes = np.zeros((ROWS, COLUMNS), ml_dtypes.float8_e4m3fn)
    scales = np.ones((-(-ROWS // 128), COLUMNS // 128), np.float32)
    blocks = {"weight_block_size": [128, 128], "method": "fp8"}
    seeded["FP8"] = {"l.weight": codes, "l.weight_scale_inv": scales}, blocks
    stacked = {"l.up_blocks": np.zeros((2, 32, 2, 16), np.uint8), "l.up_scales": np.full((2, 32, 2), 127, np.uint8)}
    seeded["MXFP4, stacked"] = stacked, {"method": "mxfp4"}
    return seeded


def plans(folder: Path) -> tuple[bytes, ...]:
    """Plans of a small family under two budgets, as they are stored."""
    import mergepipe

    write_recipe_models(folder)
    found = []
    for number, budget in ((0, "40%"), (1, "100%")):
        recipe = folder / "recipe.yml"
        recipe.write_bytes(RECIPES[number])
        found.append(mergepipe.plan(recipe, budget, home=folder / "home").to_json())
        parse_plan(found[-1])
    return tuple(found)


def fast_tokenizers() -> tuple[bytes, ...]:
    """A word-level and a unigram `tokenizer.json`."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": 3, "content": "<x>", **flags}, {"id": 4, "content": "<y>", **flags}]
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}
    unigram = {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.5], ["c", -2.0]], "unk_id": 0}
    return tuple(json.dumps({"version": "1.0", "added_tokens": added, "model": m}).encode() for m in (words, unigram))


def save_logs() -> tuple[bytes, ...]:
    """A log of partial saves, and the same without its starts."""
    units = (EMBED, layer(0), layer(1), NORM, LM_HEAD)
    records = [SaveRecord(step, units[:step], f"step-{step}", step == 5, units) for step in (1, 3, 5)]
    logs = ([SaveRecord(0), *records, SaveRecord(3), records[-1]], records)
    return tuple("".join(record.to_line() for record in log).encode() for log in logs)


def sentencepieces() -> tuple[bytes, ...]:
    """Sentencepiece models of some pieces."""

    def message(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2, len(content)]) + content

    pieces = [message(1, message(1, t.encode()) + b"\x15\0\0\x80\x3f\x18\1") for t in ("<unk>", "a", "é")]
    return (b"".join(pieces) + message(2, b"\x18\1" + message(1, b"corpus")), b"".join(pieces[:1]))


def partial_manifest(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    """The manifest of a partial checkpoint with two parameters in it."""
    first, second = list(shapes)[:2]
    sizes = [int(np.prod(shapes[name])) for name in (first, second)]
    tensors: list[Sequence[object]] = [[first, "exp_avg", "F32", 0, sizes[0]], [second, "fp32", "F32", 1, sizes[1]]]
    shard = {"name": "rank-0.safetensors", "size_bytes": 4096, "counters": [0], "tensors": tensors}
    document = {
        "format": "mergepipe-manifest/5", "kind": "partial", "origin": "deepspeed-zero", "framework": "transformers",
        "stage": 2, "world_size": 2, "step": 7, "parameters": {name: list(shape) for name, shape in shapes.items()},
        "tied": {}, "flat_groups": [list(shapes)], "units": ["embed_tokens"], "counters": [[first]],
        "options": [{"lr": 0.1}], "shards": [shard],
    }  # fmt: skip
    return json.dumps(document).encode()


def pickle_in(raw: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The pickle of a `torch.save` file, and what puts another one into its place."""
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    place = next(name for name in contents if name.endswith("data.pkl"))

    def wrap(pickled: bytes) -> bytes:
        return zip_bytes(Member(name, pickled if name == place else content) for name, content in contents.items())

    return contents[place], wrap
