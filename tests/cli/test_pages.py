"""Pages of explained merges and sweeps: self-contained, verdict first, every value told, nothing clipped."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from test_report_texts import SWEPT

from mergepipe import __version__
from mergepipe.cli.pages import Line, charts_of, draw_chart, explain_page, layer_charts, sweep_page
from mergepipe.cli.printing import report_text
from mergepipe.reports import BudgetVerdict, ExpertCoverage, ExpertShare, Explanation, LayerShare, Overlap

MADE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
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
    "24.9 % of the experts' bytes are read, by policy 'norm'. Gain that such merges kept: docs/benchmarks/trained.md."
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
    title = "ties of expert-<1>, organisation/a-rather-long-model-name-1: 24.9 % of the expert bytes read"
    body = parsed.texts[parsed.texts.index(title, 1) :]
    assert body[1] == VERDICT
    assert body[2].startswith("plan abababababab in plan.json, 2 experts, ")
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
    page = explain_page(full)
    assert "A full merge: all experts are read in full." in page
    assert "name-1: all of the expert bytes read</h1>" in page


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
    assert "<h1>ties of math, &lt;code&gt;: 9.1 % to 45.5 % of the expert bytes read</h1>" in page
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


def overlaps(n_layers: int) -> tuple[Overlap, ...]:
    """Layers in which cosines rise from -0.1 to 0.4, and tensors outside of them."""
    rising = [-0.1 + 0.5 * layer / n_layers for layer in range(n_layers + 1)]
    layers = [*map(str, range(n_layers)), ""]
    return tuple(
        Overlap(
            first="math", second="code", layer=layer, norms=(1.0, 1.0), cosine=cosine, cosine_error=0.02,
            changed=(60, 80), both=40.0, both_least=30, both_most=60,
        )
        for layer, cosine in zip(layers, rising, strict=True)
    )  # fmt: skip


def test_explain_page__has_a_scale_of_colours_layer_numbers_and_values_to_point_at() -> None:
    page = explain_page(replace(explained(28), overlaps=overlaps(28)), MADE)
    cosines = page[page.index("Cosines between experts") : page.index("Elements that both")]
    _, scale, strip = cosines.split('<svg class="bar"')
    labels = re.findall("<text[^>]*>([^<]*)</text>", scale)
    assert labels == ["-0.4", "-0.2", "0", "0.2", "0.4"]
    assert re.findall("<text[^>]*>([^<]*)</text>", strip) == ["0", "4", "8", "12", "16", "20", "others"]

    cells = re.findall(
        'class="([a-z]+)" .*fill-opacity="([0-9.]+)"><title>(layer|others)[^<]*: cosine ([-0-9.]+)', strip
    )
    assert len(cells) == 29
    for style, opacity, _, cosine in cells:
        assert (style == "against") == (float(cosine) < 0)
        assert float(opacity) == pytest.approx(abs(float(cosine)) / 0.4, abs=0.02)


EXPLAINED = replace(explained(28, 4), overlaps=overlaps(28))
PAGES = {"explain": lambda: explain_page(EXPLAINED, MADE), "sweep": lambda: sweep_page(SWEPT, MADE)}
MEASURE = """
const d = this.contentDocument.documentElement, sizes = [...d.querySelectorAll('body *')].map(
    each => parseFloat(getComputedStyle(each).fontSize));
const colour = getComputedStyle(d.querySelector('p')).color;
document.title += [d.scrollWidth, d.clientWidth, Math.min(...sizes), colour].join('|') + ';';
console.log('measured');
"""
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
    "--allow-file-access-from-files",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawn:
    """A page in a frame of a browser: how wide it is, what it has for that, its smallest text, its colour of text."""

    width: int
    available: int
    smallest: float
    colour: str


def browse(folder: Path, names: Iterable[str], widths: Sequence[int], *flags: str) -> tuple[list[Drawn], list[str]]:
    """Open pages in frames of some widths, for windows of a browser have a least one; return what its console says."""
    assert CHROMIUM is not None
    frames = ""
    for name in names:
        (folder / f"{name}.html").write_text(PAGES[name]())
        for width in widths:
            style = f"border:0;display:block;width:{width}px;height:2500px"
            frames += f'<iframe src="{name}.html" style="{style}" onload="{MEASURE}"></iframe>'
    (folder / "frames.html").write_text(f"<title></title><body style='margin:0'>{frames}")
    profile = tempfile.mkdtemp(prefix="chromium-")
    command = [CHROMIUM, *QUIET, *flags, f"--user-data-dir={profile}", f"--window-size={max(widths)},2500"]
    ran = subprocess.run(
        [*command, "--dump-dom", (folder / "frames.html").as_uri()],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    title = re.search("<title>(.*);</title>", ran.stdout)
    assert title is not None
    drawn = []
    for frame in title[1].split(";"):
        width_text, available, smallest, colour = frame.split("|")
        drawn.append(Drawn(int(width_text), int(available), float(smallest), colour))
    return drawn, re.findall(r'CONSOLE.*?"(.*?)"', ran.stderr)


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: install it to have the pages drawn")


@needs_chromium
def test_pages__fit_a_phone_and_a_desktop_without_an_error(tmp_path: Path) -> None:
    drawn, said = browse(tmp_path, PAGES, (400, 1300))
    sizes = sorted((frame.width, frame.available) for frame in drawn)
    assert sizes == [(width, width) for width in (400, 1300) for _ in PAGES]
    assert {frame.smallest for frame in drawn} == {16.0}
    assert said == ["measured"] * 2 * len(PAGES)


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [320, 768, 1440])
def test_page__fits_a_browser_of_any_width_dark_and_on_paper(tmp_path: Path, name: str, width: int) -> None:
    (drawn,), _ = browse(tmp_path, [name], [width])
    assert (drawn.width, drawn.available, drawn.smallest) == (width, width, 16.0)
    pdf, screenshot = tmp_path / "page.pdf", tmp_path / f"{name}-{width}.png"
    flags = (f"--print-to-pdf={pdf}", f"--screenshot={screenshot}")  # the picture is to be looked at
    (dark,), _ = browse(tmp_path, [name], [width], "--blink-settings=preferredColorScheme=0", *flags)
    assert dark.colour != drawn.colour
    assert pdf.read_bytes().startswith(b"%PDF")
