"""`pack` and `unpack`: what they print, and how they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Runner, Workplace, file_bytes, make_workplace


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def test_pack__says_sizes_and_unpack_gives_the_expert_back(work: Workplace, run: Runner) -> None:
    expert = work.family.experts[0]
    ran = run("pack", work.family.base, expert, "-o", work.root / "stores", "--quiet")
    assert (ran.exit_code, ran.out, ran.err) == (0, "", "")
    again = run("pack", work.family.base, expert, "-o", work.root / "stores")
    assert again.exit_code == 0
    assert "was packed before" in again.out
    back = run("unpack", work.root / "stores" / "expert-1", "-o", work.root / "back")
    assert back.exit_code == 0
    assert "restored" in back.out
    assert file_bytes(work.root / "back") == file_bytes(expert)


def test_pack__as_json_names_every_expert(work: Workplace, run: Runner) -> None:
    ran = run("pack", work.family.base, *work.family.experts, "-o", work.root / "stores", "--json")
    experts = ran.json()["experts"]
    assert [Path(expert["store"]).name for expert in experts] == ["expert-1", "expert-2"]
    assert all(expert["is_new"] and not expert["is_original_removed"] for expert in experts)
    assert all(sum(expert["blocks"].values()) > 0 for expert in experts)


def test_pack__replace_says_how_to_get_the_original_back(work: Workplace, run: Runner) -> None:
    expert = work.family.experts[0]
    ran = run("pack", work.family.base, expert, "-o", work.root / "stores", "--replace")
    assert ran.exit_code == 0
    assert not expert.exists()
    assert f"mergepipe unpack {work.root / 'stores' / 'expert-1'} -o {expert}" in ran.out
    assert str(work.family.base) in ran.out


def test_pack__refuses_to_write_into_the_base(work: Workplace, run: Runner) -> None:
    ran = run("pack", work.family.base, work.family.experts[0], "-o", work.family.base)
    assert ran.exit_code == 7
    assert "overlaps the input" in ran.err
    assert not (work.family.base / "expert-1").exists()


def test_unpack__refuses_what_is_no_store(work: Workplace, run: Runner) -> None:
    ran = run("unpack", work.family.base, "-o", work.root / "back")
    assert ran.exit_code == 3
    assert "mergepipe-store.json" in ran.err
