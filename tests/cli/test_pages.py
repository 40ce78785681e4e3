"""Pages of explained merges and sweeps: self-contained, verdict first, every value told, nothing clipped."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report_texts import SWEPT

from mergepipe import __version__
from mergepipe.cli.pages import Line, charts_of, draw_chart, explain_page, layer_charts, sweep_page
from mergepipe.cli.printing import report_text
from mergepipe.reports import BudgetVerdict, ExpertCoverage, ExpertShare, Explanation, LayerShare

MADE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
WIDTHS = (320, 768, 1440)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def verdict() -> BudgetVerdict:
    return BudgetVerdict(
        policy="norm",
        is_full=False,
        planned_bytes=249_000_000,
        full_bytes=1_000_000_000,
        experts=(ExpertCoverage("expert-<1>", 0.5),),
        unread=(),
        measured="docs/benchmarks/trained.md",
    )


VERDICT = (
    "24.9 % of the experts' bytes are read, by policy 'norm'. "
    "What such merges kept of a gain: docs/benchmarks/trained.md."
)


def explained(n_layers: int = 3, n_experts: int = 2) -> Explanation:
    """A plan of 25 % over some layers."""
    names = ["expert-<1>", *(f"organisation/a-rather-long-model-name-{e}" for e in range(1, n_experts))]
    return Explanation(
        kind="plan", path=Path("plan.json"), sid=None, plan_digest="ab" * 16, operator="ties", policy="norm",
        on_omit="keep", seed=0, budget_bytes=250_000_000, planned_bytes=249_000_000, full_bytes=1_000_000_000,
        realized_bytes=None, block_elements=131_072, blocks=4 * n_layers,
        touched=2 * n_layers, fallbacks=(), adjustments=(), tensors=(), verdict=verdict(),
        experts=tuple(
            ExpertShare(
                model=name, path=f"/models/{e}", read=n_layers, free=1, omitted=3 * n_layers - 1,
                full_bytes=500_000_000, planned_bytes=125_000_000, realized_bytes=None,
            )
            for e, name in enumerate(names)
        ),
        layers=tuple(
            LayerShare(str(layer), 4, 2, tuple((layer + e) % 5 for e in range(n_experts))) for layer in range(n_layers)
        ),
    )  # fmt: skip


class _Page(HTMLParser):
    """Collects tags, attributes that load something, and text in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open_tags: list[str] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href")]
        if tag in ("script", "link", "iframe", "img"):
            self.loads.append(tag)
        if tag in ("svg", "table", "section", "p", "div", "h1", "h2"):
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open_tags and tag == self.open_tags[-1]:
            self.open_tags.pop()

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())


def test_explain_page__is_self_contained_and_says_the_verdict_first() -> None:
    page = explain_page(explained(), MADE)
    parsed = _Page(page)
    assert parsed.loads == []
    assert parsed.open_tags == []
    body = parsed.texts[parsed.texts.index("What is in plan abababababab: ties", 1) :]
    assert body[1] == VERDICT
    assert "budget 25 % (250 MB of 1.00 GB)" in body[2]
    assert body[2].endswith("2026-01-02 03:04 UTC.")
    assert "<1>" not in page
    assert page.count("expert-&lt;1&gt;") >= 3
    assert "@media print" in page
    assert "prefers-color-scheme: dark" in page
    assert "url(" not in page
    assert "font: 16px" in page


def test_explain_page__draws_what_the_numbers_say() -> None:
    page = explain_page(explained(), MADE)
    widths = [
        float(width) for width in re.findall(r'<rect class="(?:read|same|omitted)" x="[\d.]+%" width="([\d.]+)%"', page)
    ]
    assert len(widths) == 6
    assert sum(widths) == pytest.approx(200, abs=0.01)
    (chart,) = layer_charts(explained())
    assert chart.lines[0].name == "expert-<1>"
    assert chart.lines[0].titles == ("expert-<1>: 0, 0 %", "expert-<1>: 1, 25 %", "expert-<1>: 2, 50 %")
    assert layer_charts(replace(explained(), layers=())) == ()
    assert all(0 <= x <= 100 and 0 <= y <= 100 for line in chart.lines for x, y in line.points)


def test_explain_page__of_a_full_merge_needs_no_plan() -> None:
    full = replace(explained(), verdict=None, budget_bytes=None, planned_bytes=None, full_bytes=None, policy=None)
    assert "A full merge: every expert is everywhere." in explain_page(full)


def test_explain__says_the_verdict_first_within_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = report_text(explained(28, 4)).splitlines()
    assert lines[0].split()[:3] == ["verdict", "24.9", "%"]
    assert all(len(line) <= 80 for line in lines)


def test_sweep_page__escapes_what_comes_from_files_and_tells_every_point() -> None:
    page = sweep_page(replace(SWEPT, experts=("math", "<code>")), MADE)
    assert "<b>recipe" not in page
    assert page.count("<tr><td ") == 4
    assert "http" not in page
    head = page.partition("<svg")[0]
    parts = (
        "measure a loss with --evaluate",
        "&lt;b&gt;recipe",
        "math, &lt;code&gt;",
        "2026-01-02 03:04 UTC",
        __version__,
    )
    assert all(part in head for part in (*parts, "after rounding to BF16", "@media print"))


def test_charts__lines_go_by_rising_share_of_all_bytes_and_leave_out_what_is_unknown() -> None:
    error, _ = charts_of(SWEPT)
    by_name = {line.name: line for line in error.lines}
    assert [len(line.points) for line in by_name.values()] == [2, 1]
    assert sorted(by_name["norm"].points) == list(by_name["norm"].points)
    assert by_name["norm"].titles[-1].startswith("norm: 45.5 %")


@pytest.mark.parametrize("values", [(0.0, 0.0), (1e-9, 3e-9), (3.0, 7e6), (1.0, 1.0)])
def test_draw_chart__everything_lies_inside_the_box_and_axes_begin_at_zero(values: tuple[float, float]) -> None:
    line = Line("a", "chosen", ((values[0], values[1]), (values[1], values[0])))
    chart = draw_chart("t", "x", "y", [line, Line("empty", "random", ())], "{:g}".format, "{:g}".format)
    assert [drawn.name for drawn in chart.lines] == ["a"]
    for x, y in chart.lines[0].points:
        assert chart.x_ticks[0][0] <= x <= chart.x_ticks[-1][0]
        assert chart.y_ticks[-1][0] <= y <= chart.y_ticks[0][0]
    assert (chart.x_ticks[0][1], chart.y_ticks[0][1]) == ("0", "0")
    assert 2 <= len(chart.x_ticks) <= 7


PAGES = {"explain": lambda: explain_page(explained(28, 4), MADE), "sweep": lambda: sweep_page(SWEPT, MADE)}
MEASURE = """
const d = this.contentDocument.documentElement, sizes = [...d.querySelectorAll('body *')].map(
    each => parseFloat(getComputedStyle(each).fontSize));
const colour = getComputedStyle(d.querySelector('p')).color;
document.title = [d.scrollWidth, d.clientWidth, Math.min(...sizes), colour].join('|')
"""


def browse(page: str, folder: Path, width: int, *flags: str) -> str:
    """Open a page in a frame of some width, for windows of a browser have a least one; return what the browser says."""
    assert CHROMIUM is not None
    (folder / "page.html").write_text(page)
    frame = folder / "frame.html"
    frame.write_text(f'<iframe src="page.html" style="border:0;width:{width}px;height:2500px" onload="{MEASURE}">')
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *flags]
    command += [f"--user-data-dir={folder / 'profile'}", "--allow-file-access-from-files"]
    ran = subprocess.run(
        [*command, f"--window-size={width + 20},2500", frame.as_uri()], check=True, capture_output=True, timeout=120
    )
    return ran.stdout.decode()


def measured(page: str, folder: Path, width: int, *flags: str) -> list[str]:
    """Return how wide a drawn page is, what it has for that, its smallest text and its colour of text."""
    found = re.search("<title>(.*)</title>", browse(page, folder, width, "--dump-dom", *flags))
    assert found is not None
    return found[1].split("|")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_page__fits_a_browser_of_any_width(tmp_path: Path, name: str, width: int) -> None:
    page = PAGES[name]()
    drawn, available, smallest, colour = measured(page, tmp_path, width)
    assert (int(drawn), int(available), float(smallest)) == (width, width, 16.0)
    assert measured(page, tmp_path, width, "--blink-settings=preferredColorScheme=0")[3] != colour  # dark
    browse(page, tmp_path, width, f"--screenshot={tmp_path / f'{name}-{width}.png'}")  # to be looked at
    browse(page, tmp_path, width, f"--print-to-pdf={tmp_path / f'{name}-{width}.pdf'}")
    assert (tmp_path / f"{name}-{width}.pdf").read_bytes().startswith(b"%PDF")
