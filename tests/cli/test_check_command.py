"""`mergepipe check`: what it states, and that it lists everything that is wrong."""

from __future__ import annotations

import json
from pathlib import Path

from support.command_line import Runner, Workplace


def test_check__writes_nothing(work: Workplace, run: Runner) -> None:
    before = sorted(work.root.rglob("*"))
    run("check", work.recipe)
    assert sorted(work.root.rglob("*")) == before


def test_check__json_lists_the_same_problems(work: Workplace, run: Runner) -> None:
    work.recipe.write_text("merge_method: tiess\nbase_modl: x\nmodels: []\n")
    ran = run("check", work.recipe, "--json")
    problems = ran.json()["error"]["problems"]
    assert len(problems) == len(ran.error_lines) >= 3
    assert {tuple(problem) for problem in problems} == {("code", "where", "message", "hint")}


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


def test_check__debug_behind_a_double_dash_is_a_file_name(run: Runner) -> None:
    ran = run("check", "--", "--debug")
    assert ran.exit_code == 3
    assert "Traceback" not in ran.err


def test_check__refuses_what_the_base_does_not_have_unless_it_is_allowed(work: Workplace, run: Runner) -> None:
    _add_tensor(work.family.experts[0], "extra.weight")
    ran = run("check", work.recipe)
    assert ran.exit_code == 5
    assert ran.error_lines[-1].endswith("to leave it out: --allow-dropped 'extra.weight' [model.unexpected-tensor]")
    allowed = run("check", work.recipe, "--allow-dropped", "none", "--allow-dropped", "extra.*")
    assert (allowed.exit_code, allowed.err) == (0, "")
    assert "1 dropped" in allowed.out
