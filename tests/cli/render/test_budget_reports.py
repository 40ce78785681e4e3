"""Tables and the page of budgets: grouped, shortened, escaped, nothing lost."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mergepipe import __version__
from mergepipe.catalog.rows import LineageNode
from mergepipe.cli.printing import REPORT_FORMAT, report_json
from mergepipe.cli.render.budgets import plan_table, sweep_table, verdict_text
from mergepipe.cli.render.layout import columns_text
from mergepipe.cli.render.pages import Line, charts_of, draw_chart, sweep_page
from mergepipe.cli.render.snapshots import lineage_tree
from mergepipe.planning.plan import Plan, PlannedModel
from mergepipe.reports import Fallback, SweepPoint, SweepReport
from mergepipe.storage.location import Location


def point(budget: str, policy: str, share: float, error: float | None) -> SweepPoint:
    used = round(share * 1_000_000)
    flattering = None if error is None else error / 100
    return SweepPoint(budget, policy, used, used, used, 1.5, error, flattering)


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
        point("50%", "norm", 0.5, 0.4),
        point("50%", "random", 0.5, 0.7),
        point("10%", "norm", 0.1, 0.9),
        point("10%", "random", 0.1, None),
    ),
)


def plan_with(fallbacks: tuple[Fallback, ...]) -> Plan:
    models = tuple(
        PlannedModel(role, name, "/x", "ab" * 16, None, (), 4096, 0) for role, name in (("base", "b"), ("expert", "e"))
    )
    return Plan(
        operator="linear",
        block_elements=100,
        seed=0,
        policy="norm",
        on_omit="keep",
        budget_bytes=10,
        planned_bytes=0,
        full_cost_bytes=4096,
        recipe="",
        models=models,
        parameters=(),
        tensors=(),
        fallbacks=fallbacks,
    )


def fallback_lines(plan: Plan) -> list[str]:
    return [line for line in plan_table(plan, None).splitlines() if line.startswith("fallback")]


def test_plan_table__groups_fallbacks_that_differ_in_names_and_numbers() -> None:
    alike = tuple(
        Fallback(f"expert 'e{i}'", f"{i} of 9 tensors are read whole, from 'a.{i}' on", "no statistics")
        for i in range(20)
    )
    other = Fallback("budget", "stopped", "the rest does not fit")
    lines = fallback_lines(plan_with((*alike, other)))
    assert len(lines) == 2
    assert "expert 'e3' and 16 more: 0 of 9 tensors" in lines[0]
    assert "stopped (the rest does not fit)" in lines[1]


def test_plan_table__many_kinds_of_fallbacks_are_cut_and_counted() -> None:
    lines = fallback_lines(plan_with(tuple(Fallback("x", f"decision {chr(97 + i)}", "why") for i in range(9))))
    assert len(lines) == 7
    assert lines[-1].endswith("and 3 more: see the plan")


def test_sweep_table__one_row_a_point_with_what_could_not_be_measured_marked() -> None:
    rows = [line.split() for line in sweep_table(SWEPT).splitlines()[-4:]]
    assert [row[:2] for row in rows] == [["50%", "norm"], ["50%", "random"], ["10%", "norm"], ["10%", "random"]]
    assert rows[0][-2:] == ["0.4", "0.004"]
    assert rows[3][-2:] == ["-", "-"]


def test_sweep_page__escapes_what_comes_from_files() -> None:
    text = sweep_page(SWEPT)
    assert "<b>recipe" not in text
    assert "&lt;b&gt;recipe" in text


def test_sweep_page__tells_every_point() -> None:
    text = sweep_page(SWEPT)
    assert text.count("<tr><td ") == 4
    assert "after rounding to BF16" in text


def test_charts__lines_go_by_rising_bytes_and_leave_out_what_is_unknown() -> None:
    error, _ = charts_of(SWEPT)
    by_name = {line.name: line for line in error.lines}
    assert [len(line.dots) for line in by_name.values()] == [2, 1]
    xs = [dot.x for dot in by_name["norm"].dots]
    assert xs == sorted(xs)


@pytest.mark.parametrize("values", [(0.0, 0.0), (1e-9, 3e-9), (3.0, 7e6), (1.0, 1.0)])
def test_draw_chart__everything_lies_inside_the_box_and_axes_begin_at_zero(values: tuple[float, float]) -> None:
    line = Line("a", "chosen", ((values[0], values[1]), (values[1], values[0])))
    chart = draw_chart("t", "x", "y", [line, Line("empty", "random", ())], "{:g}".format, "{:g}".format)
    assert [drawn.name for drawn in chart.lines] == ["a"]
    for dot in chart.lines[0].dots:
        assert chart.x_ticks[0].at <= dot.x <= chart.x_ticks[-1].at
        assert chart.y_ticks[-1].at <= dot.y <= chart.y_ticks[0].at
    assert (chart.x_ticks[0].label, chart.y_ticks[0].label) == ("0", "0")
    assert 2 <= len(chart.x_ticks) <= 7


def test_lineage_tree__draws_branches() -> None:
    def node(depth: int, role: str, model: str) -> LineageNode:
        return LineageNode(depth, role, model, "/m", None, None, None)

    nodes = (node(0, "snapshot", "s"), node(1, "expert", "a"), node(2, "base", "b"), node(1, "expert", "c\n"))
    assert lineage_tree(nodes).splitlines() == ["snapshot /m", "├─ expert a", "│  └─ base b", "└─ expert c\\n"]


def test_columns_text__aligns() -> None:
    assert columns_text(["a", "bb"], [["long", "1"], ["x", "22"]]).splitlines() == [
        "a     bb",
        "long   1",
        "x     22",
    ]


def test_report_json__knows_paths_times_and_nothing_else() -> None:
    assert report_json({"at": datetime(2026, 1, 2, tzinfo=UTC), "p": [Path("/a")]}) == (
        f'{{"format": "{REPORT_FORMAT}", "at": "2026-01-02T00:00:00+00:00", "p": ["/a"]}}'
    )
    with pytest.raises(TypeError):
        report_json({"x": object()})


def test_sweep_page__has_verdict_experts_version_and_date_before_the_charts() -> None:
    text = sweep_page(replace(SWEPT, experts=("math", "<code>")), datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
    head = text.partition("<svg")[0]
    assert all(
        part in head
        for part in ("measure a loss with --evaluate", "math, &lt;code&gt;", "2026-01-02 03:04 UTC", __version__)
    )
    assert "@media print" in head
    assert "http" not in text


def test_sweep_page__shares_are_of_what_budgets_are_shares_of() -> None:
    error, _ = charts_of(SWEPT)
    assert error.lines[0].dots[-1].title.startswith("norm: 45.5 %")
    assert "45.5 %" in sweep_table(SWEPT)


def test_sweep__says_first_that_distances_are_no_gain() -> None:
    assert verdict_text(SWEPT) == "distances say nothing of a gain: measure a loss with --evaluate"
    assert "right on average" in verdict_text(replace(SWEPT, policy="sample"))
    assert verdict_text(replace(SWEPT, full_loss=2.5)).startswith("the loss of the full merge is 2.5")
    assert sweep_table(SWEPT).startswith("verdict ")
