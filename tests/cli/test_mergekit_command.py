"""`mergepipe-yaml` takes every flag of mergekit-yaml: done, always so, noticed or refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mergepipe.cli import main, mergekit_main
from mergepipe.cli.mergekit import build_command, shard_bytes_of
from mergepipe.errors import RecipeError
from support.command_line import Runner, Workplace
from support.public_names import MERGEKIT_CONFIG_NAME

FLAGS_OF_MERGEKIT = [
    "--allow-crimes", "--no-allow-crimes", "--unsafe-truncate-embeddings", "--no-unsafe-truncate-embeddings",
    "--trust-remote-code", "--no-trust-remote-code", "--transformers-cache", "--lora-merge-cache",
    "--lora-merge-dtype", "--random-seed", "-v", "--quiet", "--no-quiet", "--cuda", "--no-cuda", "--device",
    "--low-cpu-memory", "--no-low-cpu-memory", "--lazy-unpickle", "--no-lazy-unpickle", "--read-to-gpu",
    "--no-read-to-gpu", "--multi-gpu", "--no-multi-gpu", "-j", "--num-threads", "--gpu-rich", "--async-write",
    "--no-async-write", "--write-threads", "--out-shard-size", "--copy-tokenizer", "--no-copy-tokenizer",
    "--clone-tensors", "--no-clone-tensors", "--write-model-card", "--no-write-model-card", "--safe-serialization",
    "--no-safe-serialization",
]  # fmt: skip
"""What `mergekit-yaml --help` of mergekit 0.1.5 lists."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys, mergekit_main)


def test_flags__are_those_of_mergekit_and_the_guide_names_each() -> None:
    flags = {name for param in build_command().params for name in (*param.opts, *param.secondary_opts)}
    assert set(FLAGS_OF_MERGEKIT) <= flags
    guide = Path(__file__).resolve().parents[2] / "docs/guide/from-mergekit.md"
    text = guide.read_text(encoding="utf-8")
    assert [flag for flag in FLAGS_OF_MERGEKIT if not flag.startswith("--no-") and f"`{flag}" not in text] == []


def test_merge__is_the_same_as_with_the_command_merge(work: Workplace, run: Runner) -> None:
    standing = ["--lazy-unpickle", "--clone-tensors", "--async-write", "--write-threads", 2, "--safe-serialization"]
    ran = run(work.recipe, work.out, "--random-seed", 7, "-j", 1, "--quiet", *standing)
    assert (ran.exit_code, ran.out, ran.err) == (0, "", "")
    assert main(["merge", str(work.recipe), str(work.root / "other"), "--seed", "7", "-q"]) == 0
    other = work.root / "other"
    assert (work.out / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
    written = {path.name for path in work.out.iterdir()}
    assert written == {path.name for path in other.iterdir()}
    assert MERGEKIT_CONFIG_NAME in written
    assert (work.out / MERGEKIT_CONFIG_NAME).read_text() == work.recipe.read_text()
    assert json.loads((work.out / "mergepipe.json").read_text())["seed"] == 7
    assert main(["verify", str(work.out), "-q"]) == 0
    (work.out / MERGEKIT_CONFIG_NAME).write_text("damaged")
    assert main(["repair", str(work.out), "-q"]) == 0
    assert (work.out / MERGEKIT_CONFIG_NAME).read_text() == work.recipe.read_text()


def test_merge__takes_relative_paths_from_the_working_folder(work: Workplace, run: Runner) -> None:
    """As mergekit does: where both folders have a model of that name, the recipe's own is another one."""
    (work.root / "recipes/family").mkdir(parents=True)
    recipe = work.recipe.rename(work.root / "recipes" / "recipe.yml")
    assert run(recipe, work.out, "--quiet").exit_code == 0
    manifest = json.loads((work.out / "mergepipe.json").read_text())
    assert [Path(source["path"]).name for source in manifest["inputs"]] == ["base", "expert-1", "expert-2"]
    assert main(["replay", str(work.out), str(work.root / "again"), "-q"]) == 0
    assert main(["check", str(recipe)]) == 3


def test_merge__says_that_the_recipe_s_folder_has_what_it_names(work: Workplace, run: Runner) -> None:
    (work.root / "recipes").mkdir()
    recipe = work.recipe.rename(work.root / "recipes" / "recipe.yml")
    work.family.base.parent.rename(work.root / "recipes" / "family")
    ran = run(recipe, work.out, "--quiet")
    assert ran.exit_code == 3
    assert ran.error_lines[0] == (
        "error: recipe.yml:2 base_model: there is no folder 'family/base'; paths are relative to the working folder, "
        "and the recipe's folder has one: write recipes/family/base [model.not-found]"
    )
    assert main(["check", str(recipe)]) == 0


def test_merge__leaves_out_card_and_tokenizer_and_cuts_files(work: Workplace, run: Runner) -> None:
    (work.root / "family/base/tokenizer.json").write_text("{}")
    options = ["--no-write-model-card", "--no-copy-tokenizer", "--out-shard-size", "30k", "-v"]
    ran = run(work.recipe, work.out, *options)
    assert ran.exit_code == 0
    assert ran.out.startswith("operator ")
    names = {path.name for path in work.out.iterdir()}
    assert names.isdisjoint({"README.md", "tokenizer.json"})
    assert "model.safetensors.index.json" in names
    assert main(["verify", str(work.out), "-q"]) == 0


def test_out_that_is_one_file__takes_no_shard_size(work: Workplace, run: Runner) -> None:
    out = work.root / "one.safetensors"
    refused = run(work.recipe, out, "--out-shard-size", "30k")
    assert (refused.exit_code, out.exists()) == (2, False)
    message = "is one file, and a size of shards is given; leave the size out, or name a folder [option.conflict]"
    assert refused.err == f"error: {out}: {message}\n"
    assert (run(work.recipe, out).exit_code, out.is_file()) == (0, True)


def test_flags__that_mean_something_else_here_are_noticed_once(work: Workplace, run: Runner) -> None:
    gpu = ["--cuda", "--gpu-rich", "--device", "cuda:0"]
    ran = run(work.recipe, work.out, *gpu, "--trust-remote-code", "--allow-crimes", "--transformers-cache", "x")
    assert ran.exit_code == 0
    notices = [line for line in ran.error_lines if line.startswith("notice: ")]
    assert [line.split(": ")[1] for line in notices] == [
        "--cuda, --device, --gpu-rich", "--trust-remote-code", "--allow-crimes", "--transformers-cache",
    ]  # fmt: skip


def test_notices_of_the_recipe__are_told_once_and_refused_if_strict(work: Workplace, run: Runner) -> None:
    recipe = work.recipe.read_text()
    work.recipe.write_text(recipe + "residual_weight: 1\n")
    refused = run(work.recipe, work.out, "--strict")
    assert (refused.exit_code, refused.err.count("residual_weight: the key")) == (2, 1)
    ran = run(work.recipe, work.out)
    assert (ran.exit_code, ran.out, ran.err.count("notice: ")) == (0, "", 1)
    assert run(work.recipe, work.out, "-v", "--force").out.count("residual_weight: the key") == 1
    assert run(work.recipe, work.out, "--quiet", "--force").err == ""


def test_densities_above_1__are_taken_as_1_with_a_warning_that_quiet_leaves(work: Workplace, run: Runner) -> None:
    recipe = work.write_recipe("ties").read_text() + "parameters: {density: 40}\n"
    work.recipe.write_text(recipe)
    assert "did you mean 0.4?" in run(work.recipe, work.out).err
    ran = run(work.recipe, work.out, "--quiet", "--lenient")
    (line,) = ran.error_lines
    assert (ran.exit_code, ran.out) == (0, "")
    assert line.startswith("warning: recipe.yml:9 parameters.density: density is 40, read as 1;")


@pytest.mark.parametrize("flag", [["--no-safe-serialization"], ["--lora-merge-dtype", "float16"]])
def test_flags__that_cannot_be_honoured_are_refused_by_name(work: Workplace, run: Runner, flag: list[str]) -> None:
    ran = run(work.recipe, work.out, *flag)
    assert (ran.exit_code, len(ran.error_lines)) == (6, 1)
    assert ran.err.startswith(f"error: {flag[0]}: ")
    assert not work.out.exists()


def test_shard_size__counts_as_mergekit_does_and_takes_sizes() -> None:
    assert [shard_bytes_of(text) for text in ("5B", "30k", "2M", "5GB", "1GiB", "2000000")] == [
        5 * 10**9, 30_000, 2_000_000, 5 * 10**9, 1 << 30, 2_000_000,
    ]  # fmt: skip
    for text in ("much", "5"):
        with pytest.raises(RecipeError):
            shard_bytes_of(text)
