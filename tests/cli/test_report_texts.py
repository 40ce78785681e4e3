"""What reports say to people: every fact under its label, in the terminal's width and colours, nothing lost."""

from __future__ import annotations

import io
import json
from dataclasses import fields, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.catalog.snapshots import LineageNode
from mergepipe.cli.commands.snapshots import lineage_tree
from mergepipe.cli.printing import (
    coloured_failure,
    coloured_report,
    columns_text,
    facts_text,
    report_json,
    report_text,
    shows_colours,
)
from mergepipe.core.display import Displayed, Table
from mergepipe.core.outcome import DroppedTensor
from mergepipe.reports import (
    BaseMatch,
    BudgetVerdict,
    CheckReport,
    CopiedTensor,
    ExpertCoverage,
    Fallback,
    MergeReport,
    ModelUse,
    PackedExpert,
    PackReport,
    SweepPoint,
    SweepReport,
    VerifyReport,
    grouped_choices,
)
from mergepipe.storage.location import Location
from support.public_names import REPORT_FORMAT

MERGED = MergeReport(
    out=Path("/models/merged"),
    sid="ab" * 16,
    operator="ties",
    merged_tensors=310,
    copied_tensors=2,
    dropped_tensors=1,
    base_bytes=1_191_000_000,
    expert_bytes=7_150_000_000,
    analysis_bytes=0,
    metadata_bytes=100_000,
    output_bytes=1_191_000_000,
    seconds=8.0,
    peak_rss_bytes=700_000_000,
)
CHECKED = CheckReport(
    recipe="/r.yml",
    operator="linear",
    models=(ModelUse("base", "base", 4, 4000), ModelUse("expert", "tuned", 1, 2000)),
    merged_tensors=2,
    copied=tuple(CopiedTensor(f"layers.{i}.steps", "integer or boolean buffer") for i in range(2)),
    dropped=(DroppedTensor("tuned", "extra.weight", "not in the base"),),
    base_bytes=4000,
    expert_bytes=2000,
    output_bytes=4000,
    disk_bytes=5000,
    free_bytes=10**9,
    shards=1,
)
VERIFIED = VerifyReport(
    path=Path("/s"), sid="ab" * 16, files=1, tensors=3, blocks=4, read_bytes=100, seconds=1.0, damages=(), notices=()
)
VERDICT = BudgetVerdict(
    policy="sample", is_full=False, planned_bytes=375, full_bytes=1000, unread=("expert 'code'",),
    experts=(ExpertCoverage("code", 0.0), ExpertCoverage("math", 0.376), ExpertCoverage("chat", 1.0, 0.5)),
    measured="34 % to 72 % (rules.md)", most_factor=4.891,
)  # fmt: skip
# What README.md and docs/guide/first-merge.md print is compared there: merges, what they keep, `verify`.
FACTS: dict[str, tuple[Displayed, dict[str, list[str]]]] = {
    "resumed merge": (
        replace(MERGED, analysis_bytes=2_500_000, earlier_expert_bytes=2000),
        {"read again": ["2.50 MB"], "read before": ["up to 2.00 kB of it, by interrupted runs"]},
    ),
    "merge under a budget": (
        replace(MERGED, verdict=replace(VERDICT, unspent_bytes=750, unspent_reason="the rest comes in larger pieces")),
        {
            "verdict": [
                "37.5 % of the experts' bytes are read, by policy 'sample', with changes scaled by up to 4.89. "
                "Gain that such merges kept: 34 % to 72 % (rules.md)."
            ],
            "expert": [
                "code: nothing of it is read",
                "math: 62.4 % of the bytes that it changes are not read",
                "chat: all bytes that it changes are read, 50 % of its blocks are approximate",
            ],
            "unspent": ["750 B: the rest comes in larger pieces."],
        },
    ),
    "full merge by a plan": (
        replace(MERGED, verdict=replace(VERDICT, is_full=True)),
        {"verdict": ["The full merge: everything of the experts is read."], "unspent": []},
    ),
    "check": (CHECKED, {
        "base": ["base (4 tensors, 4.00 kB)"], "expert": ["tuned (1 tensor, 2.00 kB)"],
        "reads": ["base 4.00 kB, experts 2.00 kB"], "writes": ["4.00 kB in 1 file"],
        "disk": ["5.00 kB needed, 1.00 GB free here"], "tensors": ["2 merged, 2 copied, 1 dropped"],
        "copied": ["integer or boolean buffer: layers.*.steps (2)"],
        "dropped": ["tuned, not in the base: extra.weight"],
    }),
    "check without room": (
        replace(CHECKED, free_bytes=4999), {"disk": ["5.00 kB needed, 5.00 kB free here: not enough"]},
    ),
    "verify a composite": (replace(VERIFIED, files=4, tensors=0), {"checked": ["4 files, every byte"]}),
}  # fmt: skip


def values(text: str, label: str) -> list[str]:
    """The values of the lines with a label."""
    facts = [line.split("  ", 1) for line in text.splitlines() if "  " in line]
    return [value.strip() for name, value in facts if name.strip() == label]


@pytest.mark.parametrize("case", FACTS)
def test_report__tells_each_fact_under_its_label(case: str) -> None:
    report, facts = FACTS[case]
    text = report_text(report)
    assert {label: values(text, label) for label in facts} == facts


def test_report__escapes_what_names_from_files_could_do_to_a_terminal() -> None:
    hostile = report_text(replace(CHECKED, dropped=(DroppedTensor("tuned", "\x1b]0;x\x07\nrow", "not in the base"),)))
    assert "\x1b" not in hostile
    assert len(hostile.splitlines()) == len(report_text(CHECKED).splitlines())


def test_json__holds_every_field_and_what_follows_from_them_and_no_object_of_another_kind() -> None:
    content = json.loads(report_json(MERGED))
    computed = {"format", "read_bytes", "bytes_per_second"}
    assert content.keys() == {field.name for field in fields(MergeReport)} | computed
    assert content["out"] == "/models/merged"
    assert content["read_bytes"] == 1_191_000_000 + 7_150_000_000 + 100_000
    assert content["bytes_per_second"] == (content["read_bytes"] + 1_191_000_000) / 8
    assert report_json({"at": datetime(2026, 1, 2, tzinfo=UTC), "p": [Path("/a")]}) == (
        f'{{"format": "{REPORT_FORMAT}", "at": "2026-01-02T00:00:00+00:00", "p": ["/a"]}}'
    )
    with pytest.raises(TypeError):
        report_json({"x": object()})


def test_pack__has_a_row_for_each_expert_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, outside = {"same": 44, "bands": 80, "bytes": 1}, {"fewer than 4096 elements": 1}
    math = PackedExpert(
        expert=Location.local(Path("/m/math")), store=Path("/p/math"), tensor_bytes=33_800_000,
        store_bytes=6_770_000, blocks=blocks, outside_bands=outside, seconds=1.7, is_new=True,
    )  # fmt: skip
    code = replace(math, store=Path("/p/code"), is_new=False)
    base = Location.local(Path("/m/base"))
    report = PackReport(base=base, experts=(math, code), base_bytes=0, expert_bytes=0, seconds=1.0)
    monkeypatch.setenv("COLUMNS", "240")
    lines = report_text(report).splitlines()
    assert [line.split()[0] for line in lines] == ["store", "/p/math", "/p/code"]
    assert all(part in lines[1] for part in ("6.77 MB", "20 %", "1.7 s", "19.9 MB/s", "44 blocks equal to the base"))
    assert "packed before" in lines[2]
    match = BaseMatch(base, 0.015, 40, 0.95, Location.local(Path("/m/other")), 1.41)
    chosen = report_text(replace(report, experts=(replace(math, match=match),)))
    expected = (
        "/p/math: /m/base, deltas of 1.5 % of the weights, nearest at 95 % of 40 samples; next is /m/other with 141 %"
    )
    assert values(chosen, "base") == [expected]
    unsure = replace(math, match=replace(match, next_delta=0.016))
    assert report_text(replace(report, experts=(unsure,))).endswith("; uncertain")
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, report_text(report).splitlines())) <= 80
    assert "4096" in report_text(report)


def point(budget: str, policy: str, share: float, error: float | None) -> SweepPoint:
    used = round(share * 1_100_000)
    return SweepPoint(
        budget=budget, policy=policy, budget_bytes=used, planned_bytes=used, expert_bytes=used, share=share,
        seconds=1.5, error=error, flattering_error=None if error is None else error / 100,
    )  # fmt: skip


SWEPT = SweepReport(
    recipe=Location.local(Path("/r/<b>recipe</b>.yml")),
    operator="ties",
    policy="norm",
    seed=0,
    dtypes=("BF16",),
    full_cost_bytes=1_100_000,
    full_expert_bytes=1_000_000,
    full_seconds=9.0,
    changed_norm=2.0,
    full_norm=100.0,
    points=(
        point("50%", "norm", 0.455, 0.4),
        point("50%", "random", 0.455, 0.7),
        point("10%", "norm", 0.091, 0.9),
        point("10%", "random", 0.091, None),
    ),
)


def test_sweep__has_a_row_a_point_with_what_could_not_be_measured_marked() -> None:
    text = report_text(SWEPT)
    rows = [line.split() for line in text.splitlines()[-4:]]
    assert [row[:2] for row in rows] == [["50%", "norm"], ["50%", "random"], ["10%", "norm"], ["10%", "random"]]
    assert rows[0][-2:] == ["0.4", "0.004"]
    assert rows[3][-2:] == ["-", "-"]
    assert "45.5 %" in text
    assert "loss" not in text.splitlines()[-5]


def test_sweep__says_first_that_distances_are_no_gain() -> None:
    assert report_text(SWEPT).startswith("verdict ")
    assert SWEPT.verdict == "distances do not measure quality: measure a loss with --evaluate"
    assert "right on average" in replace(SWEPT, policy="sample").verdict
    assert replace(SWEPT, full_loss=2.5).verdict.startswith("the loss of the full merge is 2.5")


def test_choices__that_differ_in_names_and_numbers_are_one_line_and_many_kinds_are_counted() -> None:
    alike = [
        Fallback(f"expert 'e{i}'", f"{i} of 9 tensors are read whole, from 'a.{i}' on", "no statistics")
        for i in range(20)
    ]
    lines = grouped_choices([*alike, Fallback("budget", "stopped", "the rest does not fit")])
    assert len(lines) == 2
    assert "expert 'e3' and 16 more: 0 of 9 tensors" in lines[0]
    assert lines[1] == "budget: stopped (the rest does not fit)"
    many = grouped_choices(Fallback("x", f"decision {chr(97 + i)}", "why") for i in range(9))
    assert (len(many), many[-1]) == (7, "and 3 more: see the plan")


def test_lineage_tree__draws_branches() -> None:
    def node(depth: int, role: str, model: str) -> LineageNode:
        return LineageNode(depth, role, model, "/m", None, None, None)

    nodes = (node(0, "snapshot", "s"), node(1, "expert", "a"), node(2, "base", "b"), node(1, "expert", "c\n"))
    assert lineage_tree(nodes).splitlines() == ["snapshot /m", "├─ expert a", "│  └─ base b", "└─ expert c\\n"]


# --- width and colours of the terminal ---

WORDS = st.text("abcdefgh/.-", min_size=1, max_size=60)


def without_spaces(text: str) -> str:
    return "".join(sorted("".join(text.split())))


@given(cells=st.lists(st.lists(WORDS, min_size=5, max_size=5), min_size=1, max_size=4), columns=st.integers(60, 200))
def test_columns__fit_and_nothing_is_dropped(cells: list[list[str]], columns: int) -> None:
    head = ("expert", "read", "of its own", "blocks read", "error expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        text = columns_text(Table(head, tuple(map(tuple, cells))))
    assert max(map(len, text.splitlines())) <= columns
    written = without_spaces(text)
    assert all(written.count(letter) >= cell.count(letter) for row in cells for cell in row for letter in set(cell))


@given(values=st.lists(WORDS, min_size=1, max_size=6), columns=st.integers(40, 200))
def test_facts__fit_and_nothing_is_dropped(values: list[str], columns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", str(columns))
        text = facts_text([("label", " ".join(values))])
    assert max(map(len, text.splitlines())) <= columns
    assert without_spaces(text) == without_spaces("label" + "".join(values))


def test_columns__align_numbers_right_and_become_paragraphs_where_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table(("a", "bb", "c"), (("long", "1.50 MB", "x"), ("x", "-", "longer")))
    assert columns_text(table).splitlines() == ["a          bb  c", "long  1.50 MB  x", "x           -  longer"]
    assert columns_text(Table(("name",), (("x" * 500,),))).splitlines()[1] == "x" * 500
    monkeypatch.setenv("COLUMNS", "40")
    text = columns_text(Table(tuple(f"column {i}" for i in range(5)), (("a" * 15,) * 5, ("b",) * 5)))
    assert text.split("\n\n")[1].splitlines() == [f"column {i}  b" for i in range(5)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours__are_for_terminals_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert (shows_colours(Terminal()), shows_colours(io.StringIO()), shows_colours(None)) == (True, False, False)
    monkeypatch.setenv("TERM", "dumb")
    assert not shows_colours(Terminal())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shows_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not shows_colours(Terminal())


def test_colours__mark_failures_warnings_and_key_figures_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    red, yellow, bold, off = "\x1b[1;31m", "\x1b[1;33m", "\x1b[1m", "\x1b[0m"
    assert coloured_failure("error: x: y [z]\n") == f"{red}error{off}: x: y [z]\n"
    assert coloured_failure("interrupted: x\n") == f"{yellow}interrupted{off}: x\n"
    report = "operator  ties\nbudget    1 GB\nnotice    error  x\nx.budget  1"
    assert coloured_report(report) == (
        f"operator  ties\n{bold}budget{off}    1 GB\n{yellow}notice{off}    error  x\nx.budget  1"
    )
