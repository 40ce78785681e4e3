"""`mergepipe delta` and `apply`: there and back on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import Runner, Workplace, make_workplace

from mergepipe.readers.hf import open_checkpoint
from mergepipe.storage.local import LocalStore
from mergepipe.testing.fetching import fetched


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


def stored_bytes(model: Path) -> dict[str, bytes]:
    return {n: fetched(t).tobytes() for n, t in open_checkpoint(LocalStore(), model).tensors.items()}


def test_delta__and_apply_give_the_expert_back(work: Workplace, run: Runner) -> None:
    base, expert = work.family.base, work.family.experts[0]
    ran = run("delta", base, expert, "-o", work.root / "delta")
    assert (ran.exit_code, ran.error_lines[0][:7]) == (0, "delta: ")
    assert ran.out.splitlines()[1:] == [
        "tensors: 15 as differences, 9 as in the base, 0 in full", "base + delta is the expert, bit for bit"
    ]  # fmt: skip
    ran = run("apply", base, work.root / "delta", "--out", work.root / "again")
    assert (ran.exit_code, ran.error_lines[0][:7]) == (0, "apply: ")
    assert stored_bytes(work.root / "again") == stored_bytes(expert)


def test_delta__json_is_the_report(work: Workplace, run: Runner) -> None:
    content = run("delta", work.family.base, work.family.base, "-o", work.root / "delta", "--json").json()
    assert (content["unchanged"], content["as_delta"], content["inexact"]) == (24, 0, [])
    assert content["out"] == str(work.root / "delta")


def test_delta__quiet_says_nothing(work: Workplace, run: Runner) -> None:
    ran = run("delta", work.family.base, work.family.experts[0], "-o", work.root / "delta", "-q")
    assert (ran.exit_code, ran.out, ran.err) == (0, "", "")


def test_apply__names_the_wrong_base(work: Workplace, run: Runner) -> None:
    run("delta", work.family.base, work.family.experts[0], "-o", work.root / "delta")
    ran = run("apply", work.family.experts[1], work.root / "delta", "-o", work.root / "again")
    assert (ran.exit_code, ran.out, len(ran.error_lines)) == (5, "", 1)
    assert "holds differences from the base" in ran.error_lines[0]
    assert not (work.root / "again").exists()


def test_delta__force_replaces_a_delta_and_nothing_else(work: Workplace, run: Runner) -> None:
    base, (first, second, *_) = work.family.base, work.family.experts
    out = work.root / "delta"
    assert run("delta", base, first, "-o", out, "-q").exit_code == 0
    assert "or replace it with --force" in run("delta", base, second, "-o", out).error_lines[-1]
    assert run("delta", base, second, "-o", out, "--force", "-q").exit_code == 0
    assert run("apply", base, out, "-o", work.root / "again", "-q").exit_code == 0
    assert stored_bytes(work.root / "again") == stored_bytes(second)
    assert "replaces only what mergepipe made" in run("delta", base, first, "-o", work.root / "again", "--force").err
    refused = run("apply", base, out, "-o", work.root / "again")
    assert refused.error_lines == [f"error: {work.root / 'again'}: already exists; choose another name [output.exists]"]
