"""`mergepipe merge`: every option, what it prints, and how it refuses."""

from __future__ import annotations

from typing import NamedTuple

import pytest

import mergepipe
from mergepipe.options import MergeOptions
from mergepipe.reports import MergeReport
from support.command_line import Runner, Workplace


def test_merge__progress_goes_to_standard_error_only(work: Workplace, run: Runner) -> None:
    ran = run("merge", work.recipe, work.out)
    assert any(line.startswith("publish: 100%") for line in ran.error_lines)
    assert "publish: 100%" not in ran.out


@pytest.mark.parametrize("option", ["--quiet", "-q"])
def test_merge__quiet_says_nothing(work: Workplace, run: Runner, option: str) -> None:
    ran = run("merge", work.recipe, work.out, option)
    assert (ran.exit_code, ran.out, ran.err) == (0, "", "")
    assert work.out.is_dir()


def test_merge__quiet_and_json_together_still_give_the_report(work: Workplace, run: Runner) -> None:
    assert run("merge", work.recipe, work.out, "--quiet", "--json").json()["out"] == str(work.out)


class Given(NamedTuple):
    """Arguments of `mergepipe.merge`, as the command line filled them in."""

    recipe: str
    out: str
    keywords: dict[str, object]


def given_to_api(monkeypatch: pytest.MonkeyPatch, run: Runner, *arguments: object) -> Given:
    """Run a merge command with `mergepipe.merge` replaced by one that fails after noting what it was given."""
    noted: list[Given] = []

    def merge(recipe: str, out: str, **keywords: object) -> MergeReport:
        keywords.pop("on_progress")
        noted.append(Given(recipe, out, keywords))
        raise mergepipe.errors.ConflictError.of("test.noted", "", "noted")

    monkeypatch.setattr(mergepipe, "merge", merge)
    assert run("merge", *arguments).exit_code == 9
    return noted[0]


def test_merge__defaults_are_those_of_the_api(monkeypatch: pytest.MonkeyPatch, run: Runner) -> None:
    assert given_to_api(monkeypatch, run, "r.yml", "o") == Given("r.yml", "o", {"options": MergeOptions()})


def test_merge__hands_every_option_on(monkeypatch: pytest.MonkeyPatch, run: Runner) -> None:
    options = ["--threads", 3, "--memory", "1.5GiB", "--seed", 7, "--force", "--shard-size", "2GB"]
    budget = ["--budget", "25%", "--select", "random", "--where-omitted", "renormalize"]
    rest = ["--min-density", "0.1", "--home", "h", "--no-catalog", "--allow-dropped", "*.x"]
    more = ["--block-elements", 65536, "--no-resume"]
    given = given_to_api(monkeypatch, run, "r.yml", "o", *options, *budget, *rest, *more)
    expected = MergeOptions(
        budget="25%",
        force=True,
        seed=7,
        threads=3,
        memory_bytes=3 << 29,
        home="h",
        catalog=False,
        select="random",
        where_omitted="renormalize",
        min_density=0.1,
        block_elements=65536,
        shard_bytes=2_000_000_000,
        resume=False,
        allow_dropped=("*.x",),
    )
    assert given.keywords == {"options": expected}
    resumed = given_to_api(monkeypatch, run, "r.yml", "o", "--resume").keywords["options"]
    assert resumed == MergeOptions(resume=True)


def test_merge__debug_adds_the_traceback(work: Workplace, run: Runner) -> None:
    work.out.mkdir()
    (work.out / "x").touch()
    ran = run("merge", work.recipe, work.out, "--debug")
    assert ran.exit_code == 7
    assert ran.err.startswith("Traceback (most recent call last):")
    assert ran.error_lines[-1].endswith("[output.exists]")
