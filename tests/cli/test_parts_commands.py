"""`run --part`, `run --finish` and `status`: two shells make one output."""

from __future__ import annotations

from pathlib import Path

from support.command_line import Runner, make_workplace


def test_pack__in_parts_gives_what_one_command_gives(run: Runner, tmp_path: Path) -> None:
    work = make_workplace(tmp_path)
    assert run("pack", work.family.base, *work.family.experts, "-o", tmp_path / "whole").exit_code == 0
    for part in ("2/2", "1/2", "2/2"):
        ran = run("pack", work.family.base, *work.family.experts, "-o", tmp_path / "parts", "--part", part, "--json")
        assert len(ran.json()["experts"]) == 1
    assert tree(tmp_path / "parts") == tree(tmp_path / "whole")
    refused = run("pack", work.family.base, *work.family.experts, "-o", tmp_path / "parts", "--part", "3/3")
    assert (refused.exit_code, "use at most 2 parts" in refused.err) == (2, True)


def test_analyze__in_parts_gives_what_one_command_gives(run: Runner, tmp_path: Path) -> None:
    work, whole, home = make_workplace(tmp_path), tmp_path / "whole", tmp_path / "home"
    models = (work.family.base, *work.family.experts)
    assert run("analyze", *models, "--home", whole).exit_code == 0
    for number in (1, 2):
        ran = run("analyze", *models, "--part", f"{number}/2", "--home", home, "--json")
        assert len(ran.json()["experts"]) == 1
    assert tree(home / "statistics") == tree(whole / "statistics") != {}
    together = run("analyze", *models, "--home", home, "--json").json()
    assert [expert["analyzed_tensors"] for expert in together["experts"]] == [0, 0]
    for place in (whole, home):
        assert run("plan", work.recipe, "--budget", "50%", "--out", place / "plan", "--home", place).exit_code == 0
    assert (home / "plan").read_bytes() == (whole / "plan").read_bytes()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
