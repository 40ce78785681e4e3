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

from mergepipe.cli.render.explain_page import explain_page, layer_charts
from mergepipe.cli.render.plans import explain_table
from mergepipe.cli.render.verdicts import larger_budget_text, verdict_sentence
from mergepipe.reports import BudgetVerdict, ExpertCoverage, ExpertShare, Explanation, LayerShare

MADE = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
WIDTHS = (360, 768, 1280)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def verdict(error: float | None = 0.41) -> BudgetVerdict:
    return BudgetVerdict(
        expected_error=error,
        is_least=False,
        meaning="a part of the merge",
        experts=(ExpertCoverage("expert-<1>", 0.5),),
        unread=(),
        full_bytes=1_000_000_000,
        larger_budget_bytes=375_000_000,
        larger_expected_error=0.29,
    )


def explained(n_layers: int = 3, n_experts: int = 2) -> Explanation:
    """A plan of 25 % over some layers."""
    names = ["expert-<1>", *(f"organisation/a-rather-long-model-name-{e}" for e in range(1, n_experts))]
    return Explanation(
        kind="plan", path=Path("plan.json"), sid=None, plan_digest="ab" * 16, operator="ties", policy="norm",
        on_omit="keep", seed=0, budget_bytes=250_000_000, planned_bytes=249_000_000, full_bytes=1_000_000_000,
        realized_bytes=None, bound=None, relative_bound=None, block_elements=131_072, blocks=4 * n_layers,
        touched=2 * n_layers, fallbacks=(), adjustments=(), tensors=(), verdict=verdict(),
        experts=tuple(
            ExpertShare(name, f"/models/{e}", n_layers, 0, 1, 3 * n_layers - 1, 500_000_000, 125_000_000, None)
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
    assert body[1:3] == ["Expected error 0.41: a part of the merge.", "A budget of 375 MB (37.5 %) would leave 0.29."]
    assert "budget 25 % (250 MB of 1.00 GB)" in body[3]
    assert body[3].endswith("2026-01-02 03:04 UTC.")
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
    assert [dot.title for dot in chart.lines[0].dots] == [
        "expert-<1>: 0, 0 %",
        "expert-<1>: 1, 25 %",
        "expert-<1>: 2, 50 %",
    ]
    assert layer_charts(replace(explained(), layers=())) == ()
    for line in chart.lines:
        assert all(0 <= dot.x <= 100 and 0 <= dot.y <= 100 for dot in line.dots)


def test_explain_page__of_a_full_merge_needs_no_plan() -> None:
    full = replace(explained(), verdict=None, budget_bytes=None, planned_bytes=None, full_bytes=None, policy=None)
    assert "A full merge: every expert is everywhere." in explain_page(full)


def test_verdict__says_what_is_known() -> None:
    assert verdict_sentence(replace(verdict(), is_least=True)).startswith("Expected error at least 0.41:")
    assert verdict_sentence(replace(verdict(None), meaning="not known")) == "Expected error: not known."
    assert larger_budget_text(verdict(0.0)) == ""


def test_explain_table__says_the_verdict_first_within_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = explain_table(explained()).splitlines()
    assert lines[0].split()[:4] == ["verdict", "Expected", "error", "0.41:"]
    assert lines[1].startswith("more budget")
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", WIDTHS)
def test_explain_page__is_drawn_by_a_browser(tmp_path: Path, width: int) -> None:
    """The screenshot is the artefact; a page wider than the window would have a scroll bar, which the title tells."""
    assert CHROMIUM is not None
    probe = "<script>document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script>"
    page = tmp_path / "page.html"
    page.write_text(explain_page(explained(28, 4), MADE).replace("</body>", f"{probe}</body>"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    frame = tmp_path / "frame.html"  # windows of a browser have a least width: the page is framed instead
    frame.write_text(f'<iframe src="page.html" style="border:0;width:{width}px;height:2000px"></iframe>')
    shot = tmp_path / f"explain-{width}.png"
    subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--allow-file-access-from-files",
         f"--window-size={width + 20},2000", f"--screenshot={shot}", frame.as_uri()],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert shot.stat().st_size > 10_000
