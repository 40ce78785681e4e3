"""Links between the pages, and from the README into them, lead to files and headings that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *SITE]
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
CODE = re.compile(r"`([\w-]+(?:/[\w-]+)+\.py)`")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as the site and code hosts make them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", each).strip().lower().replace(" ", "-") for each in headings}


def broken(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in LINK.findall(text) if not re.match(r"[a-z]+:", link)]
    found = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(f"{page.name}: {link}")
    return found


def test_links__lead_to_files_and_headings() -> None:
    assert [each for page in PAGES for each in broken(page)] == []


def test_links__that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[good](#a-heading) [gone](gone.md) [lost](#lost)\n", encoding="utf-8")
    assert {link.rpartition(" ")[2] for link in broken(page)} == {"gone.md", "#lost"}


def test_site__lists_every_page() -> None:
    listed = set(re.findall(r"([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in SITE}


def test_pages__name_code_that_exists() -> None:
    named = {(page.name, path) for page in SITE for path in CODE.findall(page.read_text(encoding="utf-8"))}
    assert len(named) > 30
    assert [
        each for each in sorted(named) if not any((ROOT / at / each[1]).exists() for at in ("", "src/mergepipe"))
    ] == []
