"""A configuration that decides how weights are read belongs to the key of a run, to plans and to parts.

Between an interruption and the same command, a plan and its run, one part and the next, the configuration of a
quantised model is corrected: the output is that of an undisturbed run, or the change is refused.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import mergepipe
from mergepipe.errors import ConflictError, MergePipeError
from mergepipe.options import MergeOptions, OutputOptions
from mergepipe.runs.progress import MergeProgress
from mergepipe.snapshots import work_log
from support.coded_weights import COLUMNS, ROWS, SCHEMES
from support.disk_families import weights_digest
from support.faults import replaced
from support.model_folders import recipe_of, write_adapter, write_model
from support.training_trees import known_states, write_hf

LAYERS = 6
WORDS = "abcdefghijklmnopqrstuvwxyz"
OPTIONS = MergeOptions(catalog=False, threads=1, shard_bytes=20_000)
OF_PARTS = OutputOptions(catalog=False, threads=1, shard_bytes=20_000)


def write_quantised(folder: Path) -> None:
    """Write a GPTQ model, whose configuration says whether its zero points are one less than they say."""
    random = np.random.default_rng(0)
    tensors = {}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}.mlp.up_proj"
        tensors[f"{name}.qweight"] = random.integers(0, 2**31 - 1, (16, 64), dtype=np.int32)
        tensors[f"{name}.qzeros"] = random.integers(0, 2**31 - 1, (1, 8), dtype=np.int32)
        tensors[f"{name}.scales"] = np.full((1, 64), 0.01, np.float16)
        tensors[f"{name}.g_idx"] = np.zeros(128, np.int32)
    write_model(folder, tensors)


def configure(folder: Path, checkpoint_format: str) -> None:
    stated = {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": checkpoint_format}
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": stated}))


@pytest.fixture(name="recipe")
def make_recipe(tmp_path: Path) -> dict[str, object]:
    write_quantised(tmp_path / "quantised")
    configure(tmp_path / "quantised", "gptq")
    zeros = {f"model.layers.{i}.mlp.up_proj.weight": np.zeros((64, 128), ml_dtypes.bfloat16) for i in range(LAYERS)}
    write_model(tmp_path / "plain", zeros)
    half = {"weight": 0.5}
    return recipe_of("linear", {tmp_path / "quantised": half, tmp_path / "plain": half})


def undisturbed(recipe: dict[str, object], tmp_path: Path) -> str:
    mergepipe.merge(recipe, tmp_path / "undisturbed", options=OPTIONS)
    return weights_digest(tmp_path / "undisturbed")


def interrupt(recipe: dict[str, object] | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin the merge, and stop it behind its first durable tensors."""
    monkeypatch.setattr(work_log, "UNIT_SECONDS", 0.0)
    monkeypatch.setattr(work_log, "UNIT_BYTES", 1)
    log = tmp_path / ".out.mergepipe-staging" / "log"

    def stopping(note: Callable[..., object]) -> Callable[..., object]:
        def note_or_stop(*arguments: object) -> object:
            if log.exists() and b'"unit"' in log.read_bytes():
                raise KeyboardInterrupt
            return note(*arguments)

        return note_or_stop

    with replaced(MergeProgress, "note", stopping), pytest.raises(KeyboardInterrupt):
        mergepipe.merge(recipe, tmp_path / "out", options=OPTIONS)
    assert b'"unit"' in log.read_bytes()


def test_merge__resumed_after_its_configuration_changed_is_an_undisturbed_run(
    tmp_path: Path, recipe: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(recipe, tmp_path, monkeypatch)
    configure(tmp_path / "quantised", "gptq_v2")
    mergepipe.merge(recipe, tmp_path / "out", options=OPTIONS)
    assert weights_digest(tmp_path / "out") == undisturbed(recipe, tmp_path)


def test_run__refuses_a_plan_whose_configuration_changed(tmp_path: Path, recipe: dict[str, object]) -> None:
    plan = mergepipe.plan(recipe, everything=True, home=tmp_path / "home")
    configure(tmp_path / "quantised", "gptq_v2")
    with pytest.raises(ConflictError, match="changed"):
        mergepipe.run(plan, tmp_path / "out", options=OPTIONS)
    assert not (tmp_path / "out").exists()


def test_run_part__refuses_a_second_part_after_the_configuration_changed(
    tmp_path: Path, recipe: dict[str, object]
) -> None:
    plan = mergepipe.plan(recipe, everything=True, home=tmp_path / "home")
    mergepipe.run_part(plan, tmp_path / "out", (1, 2), options=OF_PARTS)
    configure(tmp_path / "quantised", "gptq_v2")
    with pytest.raises(MergePipeError, match="changed"):
        mergepipe.run_part(plan, tmp_path / "out", (2, 2), options=OF_PARTS)
    assert not (tmp_path / "out").exists()


UP = "model.layers.{}.mlp.up_proj"


def write_small_adapter(folder: Path, seed: int = 0, **options: object) -> None:
    random = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = UP.format(layer)
        tensors[f"{name}.lora_A.weight"] = random.normal(size=(4, 128)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = random.normal(size=(64, 4)).astype(np.float32)
    write_adapter(folder, tensors, target_modules=["up_proj"], **options)


def write_fp8(folder: Path, block_rows: int) -> None:
    """Write weights with scales that two sizes of blocks explain alike by their shapes."""
    random = np.random.default_rng(0)
    tensors: dict[str, NDArray[Any]] = {}
    for layer in range(LAYERS):
        codes = random.normal(size=(64, 128)).astype(ml_dtypes.float8_e4m3fn)
        tensors[f"{UP.format(layer)}.weight"] = codes
        tensors[f"{UP.format(layer)}.weight_scale_inv"] = random.uniform(1, 2, (2, 1)).astype(np.float32)
    stated = {"quant_method": "fp8", "weight_block_size": [block_rows, 128]}
    write_model(folder, tensors, {"model_type": "x", "quantization_config": stated})


def plain_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{UP.format(layer)}.weight": (64, 128) for layer in range(LAYERS)}
    return shapes | {"model.embed_tokens.weight": (len(WORDS), 128), "model.norm.weight": (128,)}


def write_plain(folder: Path, seed: int, **config: object) -> None:
    """Write a model with an embedding, and its tokenizer."""
    random = np.random.default_rng(seed)
    shapes = plain_shapes()
    tensors = {name: random.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()}
    write_model(folder, tensors, {"model_type": "llama", **config})
    write_tokenizer(folder)


def write_tokenizer(folder: Path, words: str = WORDS) -> None:
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(words)}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))


@dataclass(frozen=True)
class Kind:
    """A kind of input: how it is written below a folder, how one of its files changes, and the recipe that reads it."""

    write: Callable[[Path], object]
    change: Callable[[Path], object]
    recipe: Callable[[Path], dict[str, object] | Path]
    decides: bool = True
    """Whether the changed file decides tensors, and not small files alone."""
    plans: bool = True
    """Whether the recipe can be planned."""


def write_family(folder: Path, **config: object) -> None:
    """Write two models of one shape, `base` and `expert`."""
    write_plain(folder / "base", 0, **config)
    write_plain(folder / "expert", 1, **config)


def of_family(method: str = "task_arithmetic", **more: object) -> Callable[[Path], dict[str, object]]:
    """Merge `base` and `expert`, which is a change of the base."""

    def recipe(folder: Path) -> dict[str, object]:
        return recipe_of(method, {folder / "expert": {"weight": 0.5}}, folder / "base", **more)

    return recipe


def with_changed(method: str = "task_arithmetic") -> Callable[[Path], dict[str, object]]:
    """Merge `changed` with a plain base."""

    def recipe(folder: Path) -> dict[str, object]:
        return recipe_of(method, {folder / "changed": {"weight": 0.5}}, folder / "base")

    return recipe


def write_with_base(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def both(folder: Path) -> None:
        write_plain(folder / "base", 0)
        write(folder / "changed")

    return both


def write_coded(scheme: str, seed: int = 0, **stated: str) -> Callable[[Path], None]:
    """Write a model whose weights are codes of a scheme."""

    def write(folder: Path) -> None:
        tensors: dict[str, NDArray[Any]] = {}
        for layer in range(LAYERS):
            made, _ = SCHEMES[scheme](seed + layer)
            tensors |= {name.replace("l.", f"{UP.format(layer)}.", 1): tensor for name, tensor in made.items()}
        config = {"quant_method": "gptq", "bits": 4, **stated}
        write_model(folder, tensors, {"model_type": "x", "quantization_config": config})

    return write


def coded(scheme: str, **change: str) -> Kind:
    """A coded model, whose configuration changes, or, without `change`, whose weights do."""

    def write(folder: Path) -> None:
        write_coded(scheme)(folder / "changed")
        zeros = np.zeros((ROWS, COLUMNS), ml_dtypes.bfloat16)
        write_model(folder / "base", {f"{UP.format(layer)}.weight": zeros for layer in range(LAYERS)})

    changed = write_coded(scheme, 0, **change) if change else write_coded(scheme, 50)
    return Kind(write, lambda folder: changed(folder / "changed"), with_changed())


def write_weights(folder: Path, seed: int) -> None:
    shapes = plain_shapes()
    random = np.random.default_rng(seed)
    save_file({n: random.random(s).astype(np.float32) for n, s in shapes.items()}, folder / "weights.safetensors")


def write_numbers(folder: Path, first: float) -> None:
    names = [f"{UP.format(layer)}.weight" for layer in range(LAYERS)]
    names += ["model.embed_tokens.weight", "model.norm.weight"]
    (folder / "weights.json").write_text(json.dumps({name: first + i for i, name in enumerate(names)}))


def write_moments(folder: Path, seed: int) -> None:
    shapes = plain_shapes()
    known = known_states(shapes, seed=seed)
    for name in shapes:
        known.arrays[name, "exp_avg_sq"][...] = np.square(known.arrays[name, "exp_avg_sq"])
    (folder / "training").mkdir(exist_ok=True)
    write_hf(folder / "training", known)


def weighed_by(file: str, method: str = "fisher") -> Callable[[Path], dict[str, object]]:
    def recipe(folder: Path) -> dict[str, object]:
        models: dict[Path, Mapping[str, object]] = {
            folder / "expert": {"weight": {"file": str(folder / file)}},
            folder / "other": {"weight": 0.3},
        }
        return recipe_of(method, models, folder / "base")

    return recipe


def weighed(file: str, write: Callable[[Path, int], object], method: str = "fisher") -> Kind:
    def write_all(folder: Path) -> None:
        write_family(folder)
        write_plain(folder / "other", 2)
        write(folder, 1)

    return Kind(write_all, lambda folder: write(folder, 2), weighed_by(file, method))


def pack(folder: Path, seed: int, base: str | None = "base") -> None:
    """Pack a model as `packs/plain`, in the place of what is there."""
    shutil.rmtree(folder / "packs", ignore_errors=True)
    write_plain(folder / "plain", seed)
    beside = None if base is None else folder / base
    mergepipe.pack(beside, [folder / "plain"], folder / "packs", home=folder / "home")


def of_packed(folder: Path) -> dict[str, object]:
    return recipe_of("task_arithmetic", {folder / "packs" / "plain": {"weight": 0.5}}, folder / "base")


def of_packed_base(folder: Path) -> dict[str, object]:
    return recipe_of("task_arithmetic", {folder / "expert": {"weight": 0.5}}, folder / "packs" / "plain")


def write_named(name: str, content: object) -> Callable[[Path], object]:
    """Write a small file of the base."""
    return lambda folder: (folder / "base" / name).write_text(json.dumps(content))


def family_and(*writes: Callable[[Path], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        write_family(folder)
        for one in writes:
            one(folder)

    return write


def small_file(name: str) -> Kind:
    """A file of the base that is copied, or stated again in the output."""
    before = family_and(write_named(name, {"x": 1}))
    return Kind(before, write_named(name, {"x": 2}), of_family(), decides=False)


def write_mixture(folder: Path) -> None:
    random = np.random.default_rng(0)
    for name in ("base", "expert", "other"):
        tensors = {"model.embed_tokens.weight": random.normal(size=(len(WORDS), 16)).astype(np.float32)}
        tensors["model.norm.weight"] = np.ones(16, np.float32)
        for layer in range(LAYERS):
            for role, shape in {"gate": (24, 16), "up": (24, 16), "down": (16, 24)}.items():
                matrix = random.normal(size=shape).astype(np.float32)
                tensors[f"model.layers.{layer}.mlp.{role}_proj.weight"] = matrix
        write_model(folder / name, tensors, {"model_type": "llama", "num_hidden_layers": LAYERS})
    write_tokenizer(folder / "base")


def of_mixture(folder: Path) -> dict[str, object]:
    experts = [
        {"source_model": str(folder / name), "positive_prompts": [prompt]}
        for name, prompt in (("expert", "b"), ("other", "c"))
    ]
    return {"base_model": str(folder / "base"), "gate_mode": "cheap_embed", "experts": experts}


def write_scaled_base(folder: Path, **stated: object) -> None:
    for seed, name in enumerate(("base", "expert")):
        random = np.random.default_rng(seed)
        tensors: dict[str, NDArray[Any]] = {}
        for layer in range(LAYERS):
            tensors[f"{UP.format(layer)}.weight"] = random.normal(size=(128, 128)).astype(ml_dtypes.float8_e4m3fn)
            scales = random.uniform(1, 2, (1, 1)).astype(np.float32)
            tensors[f"{UP.format(layer)}.weight_scale_inv"] = scales
        config = {"quant_method": "fp8", "weight_block_size": [128, 128], **stated}
        write_model(folder / name, tensors, {"model_type": "x", "quantization_config": config})


def write_blocks(folder: Path) -> None:
    write_fp8(folder / "changed", 32)
    zeros = np.zeros((64, 128), ml_dtypes.bfloat16)
    write_model(folder / "base", {f"{UP.format(layer)}.weight": zeros for layer in range(LAYERS)})


def of_documents(folder: Path) -> Path:
    """Merge by two documents, of which the first aligns tokens."""
    first = {**of_family(tokenizer={"source": "base"})(folder), "name": "first"}
    second = recipe_of("task_arithmetic", {"first": {"weight": 0.5}}, folder / "base")
    (folder / "documents.yml").write_text("\n---\n".join(map(json.dumps, (first, second))))
    return folder / "documents.yml"


def write_gguf(folder: Path, seed: int) -> None:
    """Write a GGUF model of the base's tensors."""
    gguf = pytest.importorskip("gguf")
    random = np.random.default_rng(seed)
    (folder / "changed").mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(folder / "changed" / "model.gguf", "qwen2")
    writer.add_block_count(LAYERS)
    writer.add_head_count(2)
    tensors = {f"blk.{layer}.ffn_up.weight": (64, 128) for layer in range(LAYERS)}
    for name, shape in (tensors | {"token_embd.weight": (len(WORDS), 128)}).items():
        writer.add_tensor(name, random.normal(size=shape).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(128, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_gguf(folder: Path) -> dict[str, object]:
    return recipe_of("task_arithmetic", {folder / "changed" / "model.gguf": {"weight": 0.5}}, folder / "base")


CHANGED_FILES: dict[str, Kind] = {
    "configuration of an adapter": Kind(
        write_with_base(write_small_adapter),
        lambda folder: write_small_adapter(folder / "changed", lora_alpha=16),
        with_changed(),
    ),
    "weights of an adapter": Kind(
        write_with_base(write_small_adapter), lambda folder: write_small_adapter(folder / "changed", 1), with_changed()
    ),
    "blocks of FP8": Kind(
        write_blocks,
        lambda folder: write_fp8(folder / "changed", 40),
        with_changed(),
    ),
    "format of GPTQ": coded("GPTQ of 4 bits", checkpoint_format="gptq_v2"),
    "weights of AWQ": coded("AWQ of 4 bits"),
    "weights of bitsandbytes NF4": coded("bitsandbytes NF4"),
    "weights of bitsandbytes int8": coded("bitsandbytes int8"),
    "scales of the output, as the base has them": Kind(
        write_scaled_base,
        lambda folder: write_scaled_base(folder, scale_fmt="ue8m0"),
        of_family(out_dtype="like_base"),
        plans=False,
    ),
    "tokenizer of an expert": Kind(
        write_family,
        lambda folder: write_tokenizer(folder / "expert", WORDS[::-1]),
        of_family(tokenizer={"source": "base"}),
    ),
    "tokenizer of the base": Kind(
        write_family,
        lambda folder: write_tokenizer(folder / "base", WORDS[::-1]),
        of_family(tokenizer={"source": "base"}),
    ),
    "tokenizer of a union": Kind(
        write_family,
        lambda folder: write_tokenizer(folder / "expert", WORDS[::-1]),
        of_family(tokenizer={"source": "union"}),
    ),
    "tokenizer that is copied": Kind(
        write_family, lambda folder: write_tokenizer(folder / "base", WORDS[::-1]), of_family(), decides=False
    ),
    "chat template that is copied": small_file("tokenizer_config.json"),
    "chat template that is chosen": Kind(
        family_and(write_named("tokenizer_config.json", {"chat_template": "one"})),
        write_named("tokenizer_config.json", {"chat_template": "other"}),
        of_family(chat_template="auto"),
        decides=False,
    ),
    "generation_config.json": small_file("generation_config.json"),
    "hf_quant_config.json": small_file("hf_quant_config.json"),
    "tied weights": Kind(
        family_and(write_named("config.json", {"model_type": "llama", "tie_word_embeddings": True})),
        write_named("config.json", {"model_type": "llama", "tie_word_embeddings": False}),
        of_family(),
        decides=False,
    ),
    "weights by element": weighed("weights.safetensors", write_weights),
    "weights by tensor": weighed("weights.json", write_numbers, "task_arithmetic"),
    "weights of a training checkpoint": weighed("training", write_moments),
    "packed expert": Kind(family_and(lambda folder: pack(folder, 3)), lambda folder: pack(folder, 4), of_packed),
    "base of a packed expert": Kind(
        family_and(lambda folder: pack(folder, 3)), lambda folder: write_plain(folder / "base", 5), of_packed
    ),
    "packed base": Kind(
        family_and(lambda folder: pack(folder, 3, None)), lambda folder: pack(folder, 4, None), of_packed_base
    ),
    "weights of GGUF": Kind(
        family_and(lambda folder: write_gguf(folder, 3)), lambda folder: write_gguf(folder, 4), of_gguf
    ),
    "tokenizer of a document that another merges": Kind(
        write_family, lambda folder: write_tokenizer(folder / "expert", WORDS[::-1]), of_documents, plans=False
    ),
    "prompts of a mixture": Kind(
        write_mixture, lambda folder: write_tokenizer(folder / "base", WORDS[::-1]), of_mixture
    ),
}


def files_digest(out: Path) -> dict[str, str]:
    """Digest the files of an output, other than its record and its card."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.iterdir())
        if path.name not in ("mergepipe.json", "README.md")
    }


def made(kind: Kind, folder: Path, name: str) -> dict[str, str]:
    """Merge undisturbed, and digest the output; nothing where the merge is refused."""
    try:
        mergepipe.merge(kind.recipe(folder), folder / name, options=OPTIONS)
    except MergePipeError:
        return {}
    return files_digest(folder / name)


ORDERS = [
    (name, between)
    for name, kind in CHANGED_FILES.items()
    for between in ("kill and repeat", "plan and run", "part and part")
    if kind.plans or between == "kill and repeat"
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "between"), ORDERS)
def test_merge__after_a_file_of_an_input_changed_is_an_undisturbed_run_or_refused(
    tmp_path: Path, name: str, between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, out = CHANGED_FILES[name], tmp_path / "out"
    kind.write(tmp_path)
    before = made(kind, tmp_path, "before")
    go_on = begin(kind.recipe(tmp_path), tmp_path, between, monkeypatch)
    kind.change(tmp_path)
    after = made(kind, tmp_path, "after")
    assert before
    changed = [file for file, digest in before.items() if after.get(file) != digest]
    assert any(file.endswith(".safetensors") for file in changed) == kind.decides
    try:
        go_on()
    except MergePipeError:
        assert between != "kill and repeat" or not after
        assert not out.exists()
    else:
        assert files_digest(out) == after


@pytest.mark.parametrize("name", [name for name, kind in CHANGED_FILES.items() if not kind.plans])
def test_plan__refuses_recipes_of_which_it_does_not_record_all_that_is_read(tmp_path: Path, name: str) -> None:
    CHANGED_FILES[name].write(tmp_path)
    with pytest.raises(MergePipeError, match="a budget cannot be used"):
        mergepipe.plan(CHANGED_FILES[name].recipe(tmp_path), everything=True, home=tmp_path / "home")


def begin(
    recipe: dict[str, object] | Path, tmp_path: Path, between: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], object]:
    """Do the first half of an output, and return what does the second."""
    out = tmp_path / "out"
    if between == "kill and repeat":
        interrupt(recipe, tmp_path, monkeypatch)
        return partial(mergepipe.merge, recipe, out, options=OPTIONS)
    plan = mergepipe.plan(recipe, everything=True, home=tmp_path / "home")
    if between == "plan and run":
        return partial(mergepipe.run, plan, out, options=OPTIONS)
    mergepipe.run_part(plan, out, (1, 2), options=OF_PARTS)
    return partial(mergepipe.run_part, plan, out, (2, 2), options=OF_PARTS)
