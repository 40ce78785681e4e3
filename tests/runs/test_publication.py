"""What a snapshot says of its inputs: Hub ids, an inherited card, files left out, and no path of this machine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

import mergepipe
from mergepipe.cli.printing import report_text
from mergepipe.errors import NotFoundError, RecipeError
from mergepipe.options import MergeOptions, OutputOptions
from mergepipe.recipes.references import with_renamed
from mergepipe.runs.model_card import InputCard, parse_base_model_ids, parse_card
from mergepipe.runs.small_files import reason_of
from mergepipe.snapshots.manifest import (
    UNCHANGED,
    absolute_reference,
    changed_by,
    changing_adapters,
    relative_reference,
)
from mergepipe.storage.location import Location
from support.bucket_outputs import files_below, new_prefix, objects_below
from support.disk_families import make_models, write_family
from support.refusals import refuses
from support.s3_server import S3Server

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CARD = """---
license: apache-2.0
language: [en, de]
library_name: transformers
pipeline_tag: text-generation
tags: [chat, "license:apache-2.0", 1]
base_model: org/older
---
# The base
"""
NO_CATALOG = MergeOptions(catalog=False)


@pytest.fixture
def family(tmp_path: Path) -> Path:
    """A base in the Hub cache's layout, two experts beside it, one with a card of its own."""
    write_family(tmp_path / "odd", make_models(2))
    snapshot = tmp_path / "hub" / "models--org--base" / "snapshots" / COMMIT
    shutil.copytree(tmp_path / "odd" / "base", snapshot)
    (snapshot / "README.md").write_text(CARD)
    (snapshot / "LICENSE").write_text("all yours")
    (snapshot / "modeling.py").write_text("raise SystemExit")
    (tmp_path / "odd" / "expert1" / "README.md").write_text(CARD.replace("apache-2.0", "mit").replace("older", "tuned"))
    return tmp_path


def recipe_of(family: Path) -> Path:
    """A recipe by absolute paths, in a folder of its own."""
    path = family / "recipes" / "merge.yml"
    path.parent.mkdir()
    base = family / "hub" / "models--org--base" / "snapshots" / COMMIT
    path.write_text(
        f"# tuned: {family}/odd/expert1, {base}\n"
        f"merge_method: task_arithmetic\nbase_model: {base} # the base\nparameters: {{int8_mask: 1.0}}\nmodels:\n"
        f"- {{model: '{family}/odd/expert1', parameters: {{weight: 0.5}}}}\n"
        f"- {{model: {family}/odd/expert2-bare.safetensors, parameters: {{weight: 0.2}}}}\n"
    )
    return path


def test_merge__publishes_no_path_of_this_machine_and_is_still_replayed(family: Path) -> None:
    out = family / "out"
    report = mergepipe.merge(recipe_of(family), out, options=NO_CATALOG)
    check_names_no_path(files_below(out), family)
    assert report.recipe_notices
    manifest = json.loads((out / "mergepipe.json").read_bytes())
    assert [source["path"] for source in manifest["inputs"]][1:] == [
        "../odd/expert1",
        "../odd/expert2-bare.safetensors",
    ]
    assert manifest["inputs"][0]["hub_id"] == f"org/base@{COMMIT}"
    assert {"name": "modeling.py", "reason": reason_of("modeling.py")} in manifest["left_out"]
    assert [file.name for file in report.left_out] == [record["name"] for record in manifest["left_out"]]
    assert (out / "LICENSE").read_text() == "all yours"
    assert not (out / "modeling.py").exists()
    assert mergepipe.verify(out, deep_fraction=1.0).is_sound
    moved = family / "moved"  # the whole tree
    moved.mkdir()
    for name in ("out", "odd", "hub"):
        (family / name).rename(moved / name)
    assert mergepipe.verify(moved / "out", deep_fraction=1.0).is_sound
    (moved / "out" / "README.md").write_text("damaged")
    mergepipe.repair(moved / "out")
    assert mergepipe.verify(moved / "out").is_sound
    again = mergepipe.replay(moved / "out", family / "again")
    assert again.sid == report.sid


def check_names_no_path(files: dict[str, bytes], folder: Path) -> None:
    """No file of an output holds a path of this machine."""
    names = {name.rpartition("/")[2] for name in files}
    assert {"README.md", "mergepipe.json", "mergekit_config.yml", "config.json"} <= names
    assert [name for name, content in files.items() if str(folder).encode() in content] == []


def test_merge__into_a_bucket_names_inputs_as_if_beside_it(
    server: S3Server, family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(family)
    prefix = new_prefix(server, monkeypatch)
    mergepipe.merge(recipe, f"{prefix}/merged", home=family / "home")
    files = objects_below(f"{prefix}/merged")
    check_names_no_path(files, family)
    manifest = json.loads(files["mergepipe.json"])
    places = [source["path"] for source in manifest["inputs"]]
    assert places == [f"../{COMMIT}", "../expert1", "../expert2-bare.safetensors"]
    with pytest.raises(NotFoundError, match=rf"{prefix}/expert1.*does not exist any more") as caught:
        mergepipe.verify(f"{prefix}/merged", deep_fraction=1.0, catalog=False)
    assert "move both together" in str(caught.value)
    copy = family / "odd" / "copy"
    for name, content in files.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(content)
    (family / "hub" / "models--org--base" / "snapshots" / COMMIT).rename(family / "odd" / COMMIT)
    assert mergepipe.verify(copy, deep_fraction=1.0, catalog=False).is_sound


def test_merge__copies_or_lists_every_file_of_the_base(family: Path) -> None:
    base = family / "hub" / "models--org--base" / "snapshots" / COMMIT
    copied = {"modules.json": '[{"path": ""}, {"path": "1_Pooling"}]', "1_Pooling/config.json": "{}"}
    left = {
        "modeling.py": "code is never copied", "nested/util.py": "code is never copied", "odd.xyz": "not known",
        "model.gguf": "another form", "optimizer.pt": "training run", "README.md": "a card of its own",
        "tokenizer.json": "another tokenizer",
    }  # fmt: skip
    for name, content in (copied | dict.fromkeys(left, "{}") | {"README.md": CARD}).items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(content)
    out = family / "out"
    report = mergepipe.merge(recipe_of(family), out, catalog=False, tokenizer=False)
    assert {name: (out / name).read_text() for name in copied} == copied
    reasons = {file.name: file.reason for file in report.left_out}
    assert [name for name, reason in left.items() if reason not in reasons.get(name, "")] == []
    inputs = {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()}
    outputs = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert inputs - outputs - reasons.keys() <= {"model.safetensors.index.json"} | {
        name for name in inputs if name.startswith("model-")
    }
    card = (out / "README.md").read_text()
    assert "not here" not in card
    assert 'library_name: "transformers"' in card  # the base's own card says so
    assert "modeling.py" in report_text(report)


def test_merge__the_card_names_hub_ids_and_inherits_from_the_base(family: Path) -> None:
    out = family / "out"
    stated = f"{family}/odd/expert2-bare.safetensors=me/second"
    mergepipe.merge(recipe_of(family), out, catalog=False, base_model_ids=(stated, "me/third"))
    card = (out / "README.md").read_text()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["base_model"] == ["org/base", "org/tuned", "me/second", "me/third"]
    assert metadata["base_model_relation"] == "merge"
    assert (metadata["license"], metadata["language"]) == ("apache-2.0", ["en", "de"])
    assert (metadata["pipeline_tag"], metadata["tags"]) == ("text-generation", ["chat", "1", "merge", "mergepipe"])
    assert f"| base | `org/base` | `{COMMIT}` |" in card
    assert "- `expert1`: mit" in card
    assert "| expert | `expert1` |" in card
    assert "../" not in str(yaml.safe_load(card.split("```yaml\n")[1].split("```")[0]))
    recipe = card.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(recipe)["base_model"] == f"org/base@{COMMIT}"
    assert (out / "mergekit_config.yml").read_text() == recipe
    mergepipe.replay(out, family / "again", catalog=False)
    assert (family / "again" / "README.md").read_text().split("---\n")[1] == card.split("---\n")[1]


def test_merge__the_card_tells_sizes_and_how_to_load_the_output(family: Path) -> None:
    base = family / "hub" / "models--org--base" / "snapshots" / COMMIT
    loaded = {
        "LlamaForCausalLM": "from transformers import AutoModelForCausalLM, AutoTokenizer\n",
        "BertModel": "from transformers import AutoModel, AutoTokenizer\n",
    }
    recipe = recipe_of(family)
    (base / "vocab.txt").write_text("a\n")
    for architecture, imports in loaded.items():
        (base / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": [architecture]}))
        mergepipe.merge(recipe, family / "out", budget="60%", force=True, options=NO_CATALOG)
        card = (family / "out" / "README.md").read_text()
        assert f"```python\n{imports}" in card
        assert re.search(r"\d{5,} ?bytes|_bytes:", card) is None
        assert re.search(r"reads [0-9.]+ [kM]B of the\n[0-9.]+ [kM]B that a full read", card)
    (base / "config.json").write_text(json.dumps({"model_type": "odd", "auto_map": {"AutoModel": "modeling.Odd"}}))
    mergepipe.merge(recipe, family / "out", force=True, options=NO_CATALOG)
    assert "## Use" not in (family / "out" / "README.md").read_text()  # its code is not there


def test_merge__takes_text_of_the_bases_card_as_text(family: Path) -> None:
    base = family / "hub" / "models--org--base" / "snapshots" / COMMIT
    text = "x\n---\n# <b>evil</b>\n```"
    card = {"license": text, "license_name": text, "language": [text], "tags": [text], "library_name": text}
    (base / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")
    (base / "```\n# <b>odd").write_text("{}")
    mergepipe.merge(recipe_of(family), family / "out", options=NO_CATALOG)
    _, front, body = (family / "out" / "README.md").read_text().split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata.keys() == {
        "base_model", "base_model_relation", "license", "license_name", "language", "library_name", "tags", "merge",
    }  # fmt: skip
    assert "evil" in metadata["license"]
    assert [line for line in body.splitlines() if line.startswith("# <")] == []
    assert "<b>" not in re.sub(r"(`+).*?\1", "", body)


def test_merge__keeps_absolute_paths_where_they_are_wanted(family: Path) -> None:
    mergepipe.merge(recipe_of(family), family / "out", catalog=False, paths="absolute")
    manifest = json.loads((family / "out" / "mergepipe.json").read_bytes())
    assert manifest["inputs"][1]["path"] == manifest["inputs"][1]["model"] == f"{family}/odd/expert1"


@pytest.mark.parametrize("in_parts", [False, True])
def test_run__of_a_plan_takes_the_path_style_and_hub_ids_of_a_merge(family: Path, *, in_parts: bool) -> None:
    plan = mergepipe.plan(recipe_of(family), "50%")
    ids = ("me/whole", f"{family}/odd/expert1=me/tuned")
    if in_parts:
        mergepipe.run_part(plan, family / "out", (1, 1), paths="absolute", base_model_ids=ids)
    else:
        mergepipe.run(plan, family / "out", paths="absolute", base_model_ids=ids)
    manifest = json.loads((family / "out" / "mergepipe.json").read_bytes())
    assert str(family / "odd" / "expert1") in [source["path"] for source in manifest["inputs"]]
    card = yaml.safe_load((family / "out" / "README.md").read_text().split("---")[1])
    assert card["base_model"] == ["org/base", "me/tuned", "me/whole"]


def test_run__of_a_plan_refuses_an_id_of_a_model_that_is_not_in_it(family: Path) -> None:
    plan = mergepipe.plan(recipe_of(family), "50%")
    for call in (mergepipe.run, mergepipe.run_part):
        with pytest.raises(RecipeError, match="the recipe names no model 'nobody'"):
            call(plan, family / "out", options=OutputOptions(base_model_ids=("nobody=me/x",)))
        with pytest.raises(RecipeError, match="paths"):
            call(plan, family / "out", options=OutputOptions(paths="short"))
    assert not (family / "out").exists()


def test_replay__finds_the_inputs_of_a_snapshot_that_was_moved_alone(family: Path) -> None:
    mergepipe.merge(recipe_of(family), family / "out")
    (family / "elsewhere" / "deep").mkdir(parents=True)
    (family / "out").rename(family / "elsewhere" / "deep" / "out")
    assert mergepipe.verify(family / "elsewhere" / "deep" / "out", deep_fraction=1.0).is_sound
    with pytest.raises(NotFoundError, match="relative to its own folder, so move both together"):
        mergepipe.replay(family / "elsewhere" / "deep" / "out", family / "again", catalog=False)


def test_relative_reference__absolute_reference_undoes_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "out"
    for text in (
        "/x/y",
        f"{tmp_path}/a/b+/c",
        f"{folder.parent}/m+{tmp_path}/lora",
        "hf://org/name@main",
        f"{folder}/x",
    ):
        stored = relative_reference(text, folder)
        assert not any(part.startswith("/") for part in stored.split("+"))
        assert absolute_reference(stored, Location.local(folder)) == text


def test_with_renamed__changes_values_only_and_keeps_the_rest() -> None:
    text = "# /m\n/m: &a '/m' # /m\nx: [*a, /m, \"/m\", {filter: /m}]\ny: |\n  /m\n"
    renamed = with_renamed(text, lambda value: "a b" if value == "/m" else value)
    assert renamed == '# /m\n/m: &a "a b" # /m\nx: [*a, "a b", "a b", {filter: /m}]\ny: |\n  /m\n'


@pytest.mark.parametrize(
    "raw", [b"", b"# no metadata", b"---\n[1\n---\n", b"---\n- 1\n---\n", b"---\nlicense: {a: b}\n---\n"]
)
def test_parse_card__of_what_is_none_inherits_nothing(raw: bytes) -> None:
    assert parse_card(raw) == InputCard()


@pytest.mark.parametrize("text", ["/abs/path", "a/b/c", "=org/name", "m=", "org/na me"])
def test_parse_base_model_ids__refuses_what_is_no_id(text: str) -> None:
    with refuses(RecipeError, "option.invalid"):
        parse_base_model_ids([text])


@pytest.mark.parametrize("adapters", [(), (0,), (0, 2, 11)])
def test_reasons__name_the_adapters_that_change_a_tensor(adapters: tuple[int, ...]) -> None:
    """Law: `changing_adapters(changed_by(a)) == a`."""
    assert changing_adapters(changed_by(adapters) if adapters else UNCHANGED) == adapters
    for other in ("", "no expert has it", "changed by adapter", "changed by adapter x", "changed by adapter 1,"):
        assert changing_adapters(other) is None
