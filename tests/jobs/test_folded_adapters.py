"""A LoRA folded into its base describes itself as that: in report, explanation, list, card and record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import mergepipe
from mergepipe.cli.printing import report_text
from mergepipe.errors import RecipeError
from support.families import FamilyShape, write_family
from support.model_folders import recipe_of
from support.refusals import refuses

SHAPE = FamilyShape(hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate=96, vocab=260, tied=True)
N_TENSORS, N_CHANGED = 24, 14
ONE = f"LoRA models/adapter folded into models/base: {N_CHANGED} of {N_TENSORS} tensors changed"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base and two adapters of it in `models`, in the working folder; the second one of attention alone."""
    monkeypatch.chdir(tmp_path)
    write_family(tmp_path / "models", SHAPE, 2)
    for name, expert in (("adapter", 1), ("other", 2)):
        mergepipe.extract_lora("models/base", f"models/expert-{expert}", f"models/{name}", rank=4)
    return tmp_path


def manifest_of(folder: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / "mergepipe.json").read_text())
    return content


def card_of(folder: str) -> tuple[dict[str, Any], str]:
    _, metadata, text = (Path(folder) / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


def tensor_bytes(folder: str, name: str) -> int:
    path = Path(folder) / name
    return path.stat().st_size - 8 - int.from_bytes(path.read_bytes()[:8], "little")


FOLDS = {
    "lora apply": lambda: mergepipe.apply_lora("models/base", ["models/adapter"], "out"),
    "recipe": lambda: mergepipe.merge(
        recipe_of("passthrough", {"models/base+models/adapter": {}}, dtype="auto"), "out"
    ),
}


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("kind", FOLDS)
def test_folded_adapter__says_so_in_report_explanation_list_card_and_record(kind: str) -> None:
    report = FOLDS[kind]()
    assert (report.summary, report.merged_tensors, report.copied_tensors) == (ONE, N_CHANGED, N_TENSORS - N_CHANGED)
    assert report_text(report).splitlines()[0].endswith(ONE)
    assert "passthrough" not in report_text(report)
    (row,) = (row for row in mergepipe.list_snapshots() if row.path.name == "out")
    assert row.summary == mergepipe.show("out").summary == manifest_of("out")["run"]["summary"] == ONE
    explanation = mergepipe.explain("out")
    assert (explanation.summary, explanation.touched, explanation.blocks) == (ONE, N_CHANGED, N_TENSORS)
    (adapter,) = explanation.experts
    assert (adapter.model, adapter.read, adapter.free) == ("models/adapter", N_CHANGED, N_TENSORS - N_CHANGED)
    metadata, text = card_of("out")
    assert metadata["tags"] == ["lora", "merge", "mergepipe"]
    assert f"# {ONE}\n" in text
    assert "| base | `models/base` |\n| adapter | `models/adapter` |\n" in text


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("kind", FOLDS)
def test_folded_adapter__tells_the_bytes_of_base_and_adapter_apart(kind: str) -> None:
    report = FOLDS[kind]()
    base, adapter = manifest_of("out")["inputs"]
    assert [(base["role"], base["model"], base["path"]), (adapter["role"], adapter["model"], adapter["path"])] == [
        ("base", "models/base", "../models/base"),
        ("adapter", "models/adapter", "../models/adapter"),
    ]
    assert (report.base_bytes, report.expert_bytes) == (base["read_bytes"], adapter["read_bytes"])
    stored_bytes = tensor_bytes("models/adapter", "adapter_model.safetensors")
    assert stored_bytes <= report.expert_bytes <= stored_bytes + 28 * 8192  # requests are of whole pages
    assert report.base_bytes >= tensor_bytes("models/base", "model.safetensors")
    assert {file["name"] for file in adapter["files"]} == {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.usefixtures("models")
def test_folded_adapters__are_described_with_their_weights_and_what_each_one_changes() -> None:
    tensors = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    attention = recipe_of("task_arithmetic", {"models/expert-2": {"weight": [*filtered("q_proj"), *OTHERWISE]}},
                          "models/base", dtype="auto")  # fmt: skip
    mergepipe.merge(attention, "models/tuned")
    mergepipe.extract_lora("models/base", "models/tuned", "models/small", rank=4)
    report = mergepipe.apply_lora("models/base", ["models/small", "models/adapter"], "out", weights=(0.5, 0.25))
    names = "models/small (weight 0.5) and models/adapter (weight 0.25)"
    assert report.summary == f"LoRA {names} folded into models/base: {N_CHANGED} of {N_TENSORS} tensors changed"
    small, adapter = mergepipe.explain("out").experts
    assert (small.model, small.read, small.free) == ("models/small", len(tensors), N_TENSORS - len(tensors))
    assert (adapter.model, adapter.read) == ("models/adapter", N_CHANGED)
    reasons = {tensor["name"]: (tensor["action"], tensor["reason"]) for tensor in manifest_of("out")["tensors"]}
    assert {reasons[name] for name in tensors} == {("merge", "changed by adapter 1, 2")}
    assert reasons["model.layers.0.mlp.up_proj.weight"] == ("merge", "changed by adapter 2")
    assert reasons["model.norm.weight"] == ("copy", "no adapter changes it")
    assert mergepipe.verify("out", deep_fraction=1.0).is_sound


def filtered(name: str) -> list[dict[str, object]]:
    return [{"filter": name, "value": 1.0}]


OTHERWISE: list[dict[str, object]] = [{"value": 0.0}]


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("stated", "base_models", "relation"),
    [
        (("org/base",), ["org/base"], "finetune"),
        (("models/base=org/base@v1",), ["org/base"], "finetune"),
        (("models/base=org/base", "models/adapter=org/lora"), ["org/base", "org/lora"], "merge"),
    ],
)
def test_folded_adapter__names_its_base_on_the_hub(
    stated: tuple[str, ...], base_models: list[str], relation: str
) -> None:
    mergepipe.apply_lora("models/base", ["models/adapter"], "out", base_model_ids=stated)
    metadata, _ = card_of("out")
    assert (metadata["base_model"], metadata["base_model_relation"]) == (base_models, relation)
    with refuses(RecipeError, "option.invalid", "models/base, models/adapter"):
        mergepipe.apply_lora("models/base", ["models/adapter"], "none", base_model_ids=("models/bas=org/base",))


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("weights", [(), (0.5, 0.25)])
def test_folded_adapter__has_a_recipe_of_the_form_that_mergekit_reads(weights: tuple[float, ...]) -> None:
    """mergekit's reference is `{model, lora}` of two texts, each of which may have an @revision."""
    adapters = ["models/adapter", "models/other"][: len(weights) or 1]
    stated = ("models/base=org/base@v1",)
    mergepipe.apply_lora("models/base", adapters, "out", weights=weights, base_model_ids=stated)
    recipe = yaml.safe_load((Path("out") / "mergekit_config.yml").read_text())
    assert [entry["model"] for entry in recipe["models"]] == [
        {"model": "org/base@v1", "lora": adapter} for adapter in adapters
    ]


@pytest.mark.usefixtures("models")
def test_folded_adapter__is_made_again_from_its_record(tmp_path: Path) -> None:
    mergepipe.apply_lora("models/base", ["models/adapter"], "out")
    assert mergepipe.verify("out", deep_fraction=1.0).is_sound
    mergepipe.replay("out", tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == Path("out/model.safetensors").read_bytes()


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("name", ["models/b+c", "models/base"])
def test_folded_adapter__may_have_a_plus_in_its_names(name: str) -> None:
    if name != "models/base":
        Path("models/base").rename(name)
    Path("models/adapter").rename("models/a+b")
    report = mergepipe.apply_lora(name, ["models/a+b"], "out")
    assert report.summary.startswith(f"LoRA models/a+b folded into {name}: ")
    assert mergepipe.verify("out", deep_fraction=1.0).is_sound


@pytest.mark.usefixtures("models")
def test_merges_that_do_more__are_no_folds() -> None:
    both = {"models/base+models/adapter": {"weight": 0.5}, "models/expert-2": {"weight": 0.5}}
    report = mergepipe.merge(recipe_of("task_arithmetic", both, "models/base", dtype="auto"), "out")
    assert (report.summary, mergepipe.show("out").summary) == ("", "")
    scaled = recipe_of("passthrough", {"models/base+models/adapter": {"scale": 0.5}}, dtype="auto")
    assert mergepipe.merge(scaled, "scaled").summary == ""
