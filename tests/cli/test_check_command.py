"""`mergepipe check`: what it states, and that it lists everything that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from command_line import Runner, Workplace, make_workplace

from mergepipe.reports import CheckReport
from support.families import TINY


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def test_check__states_bytes_and_tensors(work: Workplace, run: Runner) -> None:
    ran = run("check", work.recipe)
    assert (ran.exit_code, ran.err) == (0, "")
    lines = {tuple(part.strip() for part in line.split("  ", 1)) for line in ran.out.splitlines()}
    assert {
        ("operator", "linear"),
        ("base", "family/base (24 tensors, 82.3 kB)"),
        ("expert", "family/expert-1 (24 tensors, 82.3 kB)"),
        ("reads", "base 82.3 kB, experts 165 kB"),
        ("writes", "82.3 kB in 1 file"),
        ("tensors", "24 merged, 0 copied, 0 dropped"),
    } <= lines
    assert "needed" in ran.out
    assert "free here" in ran.out


def test_check__json_is_the_report(work: Workplace, run: Runner) -> None:
    ran = run("check", work.recipe, "--json")
    content = ran.json()
    assert content.keys() == {field.name for field in fields(CheckReport)} | {"format", "free_bytes"}
    assert (content["base_bytes"], content["expert_bytes"], content["output_bytes"]) == (82304, 164608, 82304)
    assert content["free_bytes"] > 0
    assert ran.err == ""


def test_check__shard_size_decides_the_number_of_files(work: Workplace, run: Runner) -> None:
    assert run("check", work.recipe, "--shard-size", "40KB", "--json").json()["shards"] >= 3


def test_check__writes_nothing(work: Workplace, run: Runner) -> None:
    before = sorted(work.root.rglob("*"))
    run("check", work.recipe)
    assert sorted(work.root.rglob("*")) == before


def test_check__lists_every_problem_of_a_recipe_with_a_suggestion(work: Workplace, run: Runner) -> None:
    work.recipe.write_text(
        "merge_method: tiess\nbase_modl: family/base\nmodels:\n"
        "- {model: family/expert-1, parametrs: {weight: 1}}\ndtype: bfloat61\n"
    )
    ran = run("check", work.recipe)
    assert ran.exit_code == 2
    assert ran.out == ""
    assert all(line.startswith("error: ") and line.endswith("]") for line in ran.error_lines)
    for suggestion in ("'ties'", "'base_model'", "'parameters'", "'bfloat16'"):
        assert sum(f"did you mean {suggestion}?" in line for line in ran.error_lines) == 1


def test_check__json_lists_the_same_problems(work: Workplace, run: Runner) -> None:
    work.recipe.write_text("merge_method: tiess\nbase_modl: x\nmodels: []\n")
    ran = run("check", work.recipe, "--json")
    problems = ran.json()["error"]["problems"]
    assert len(problems) == len(ran.error_lines) >= 3
    assert {tuple(problem) for problem in problems} == {("code", "where", "message", "hint")}


def _missing_recipe(work: Workplace) -> None:
    work.recipe.unlink()


def _unknown_operator(work: Workplace) -> None:
    work.write_recipe("lineer")


def _missing_model(work: Workplace) -> None:
    work.recipe.write_text(work.recipe.read_text().replace("expert-1", "expert-9"))


def _truncated_file(work: Workplace) -> None:
    path = work.family.experts[0] / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _edit_embedding(model: Path, **changes: object) -> None:
    """Change what the header says of the embedding."""
    path = model / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["model.embed_tokens.weight"] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def _add_tensor(model: Path, name: str) -> None:
    """Append one element."""
    path = model / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    end = len(content) - 8 - size
    header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :] + bytes(4))


def _other_shape(work: Workplace) -> None:
    _edit_embedding(work.family.experts[1], shape=[TINY.hidden, TINY.vocab])


def _dtype_that_cannot_be_merged(work: Workplace) -> None:
    _edit_embedding(work.family.base, dtype="F8_E8M0", shape=[TINY.vocab, TINY.hidden * 2])


@pytest.mark.parametrize(
    ("spoil", "exit_code"),
    [
        (_unknown_operator, 2),
        (_missing_recipe, 3),
        (_missing_model, 3),
        (_truncated_file, 4),
        (_other_shape, 5),
        (_dtype_that_cannot_be_merged, 6),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)).strip("_"),
)
@pytest.mark.parametrize("command", ["check", "merge"])
def test_commands__exit_codes_tell_the_class(
    work: Workplace, run: Runner, command: str, spoil: Callable[[Workplace], None], exit_code: int
) -> None:
    spoil(work)
    before = work.names()
    ran = run(command, work.recipe, *([work.out] if command == "merge" else []), "--json")
    assert ran.exit_code == exit_code
    assert ran.json()["error"]["exit_code"] == exit_code
    assert all(line.startswith("error: ") for line in ran.error_lines)
    assert "Traceback" not in ran.err
    assert work.names() == before


def test_check__debug_adds_the_traceback(work: Workplace, run: Runner) -> None:
    ran = run("check", work.root / "nowhere.yml", "--debug")
    assert ran.exit_code == 3
    assert "Traceback (most recent call last):" in ran.err
    assert ran.error_lines[-1].startswith("error: ")


def test_check__debug_behind_a_double_dash_is_a_file_name(run: Runner) -> None:
    ran = run("check", "--", "--debug")
    assert ran.exit_code == 3
    assert "Traceback" not in ran.err


def test_check__bad_sizes_are_refused(work: Workplace, run: Runner) -> None:
    assert run("check", work.recipe, "--shard-size", "big").exit_code == 2
    assert run("check", work.recipe, "--shard-size", "0").exit_code == 10


def test_check__refuses_what_the_base_does_not_have_unless_it_is_allowed(work: Workplace, run: Runner) -> None:
    _add_tensor(work.family.experts[0], "extra.weight")
    ran = run("check", work.recipe)
    assert ran.exit_code == 5
    assert ran.error_lines[-1].endswith("to leave it out: --allow-dropped 'extra.weight' [model.unexpected-tensor]")
    allowed = run("check", work.recipe, "--allow-dropped", "none", "--allow-dropped", "extra.*")
    assert (allowed.exit_code, allowed.err) == (0, "")
    assert "1 dropped" in allowed.out


def test_check__prints_the_schema_of_recipes(run: Runner) -> None:
    assert run("check", "--schema").json()["title"] == "MergePipe recipe"
