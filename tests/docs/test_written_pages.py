"""Hand-written pages: links lead somewhere, named commands are there, and what they print is what is shown.

`--update-goldens` writes what has changed of shown output into the pages.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from support.command_line import command_tree
from support.console_blocks import WIDTH, PageRun, blocks

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


def test_seconds_and_memory__are_the_same_on_all_pages() -> None:
    readme, index, alternatives = (
        (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/index.md", "docs/alternatives.md")
    )
    rows = re.findall(r"^\| .+, [\d.]+B \| .+$", readme, re.MULTILINE)
    assert len(rows) == 7
    assert rows == [row for row in index.splitlines() if row in rows]
    merges = [row for row in rows if "mergekit: " in row]
    assert len(merges) == 4
    for row in merges:
        _, name, ours, theirs, _ = (cell.strip() for cell in row.split("|"))
        assert f"{ours} | {theirs.removeprefix('mergekit: ')} |" in alternatives, name


def test_files_of_a_release__name_one_version_and_one_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == project["version"]
    assert f"\n## [{project['version']}] - " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    address = project["urls"]["Repository"]
    assert citation["repository-code"] == address
    for page in ("README.md", "mkdocs.yml", "docs/guide/install.md", "docs/index.md"):
        named = set(re.findall(r"https://github\.com/\w+/mergepipe\b", (ROOT / page).read_text(encoding="utf-8")))
        assert named == {address}, page


WRITTEN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guide").glob("*.md"))]
COMMAND = re.compile(r"^(?:\$ |\.venv/bin/)mergepipe (.*)$", re.MULTILINE)
FILE_ENDINGS = ("json", "md", "yml", "html", "py", "bin", "txt", "safetensors")


def wrong_parts(line: str, command: Any) -> list[str]:
    """Words of a command line that are no command, or no option of it."""
    words = shlex.split(line, comments=True)
    while hasattr(command, "commands"):
        if not words or words[0] not in command.commands:
            return words[:1] or ["nothing"]
        command = command.commands[words.pop(0)]
    known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
    return [word for word in words if word.startswith("--") and word not in known]


def test_pages__show_commands_with_options_that_exist() -> None:
    shown = [(page.name, line) for page in WRITTEN for line in COMMAND.findall(page.read_text(encoding="utf-8"))]
    root = command_tree()
    assert len(shown) > 40
    assert [(page, line) for page, line in shown if wrong_parts(line, root)] == []
    assert wrong_parts("merge recipe.yml out/ --bugdet 3%", root) == ["--bugdet"]
    assert wrong_parts("tailor combine a b", root) == ["combine"]


def test_pages__name_error_codes_that_exist() -> None:
    codes = set(re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8"), re.M))
    groups = {code.partition(".")[0] for code in codes}
    named = [
        (page.name, name)
        for page in WRITTEN
        for name in re.findall(r"(?:\(`|\[)([a-z]+\.[a-z.-]*[a-z])(?:`\)|\](?!\())", page.read_text(encoding="utf-8"))
        if name.partition(".")[0] in groups and not name.endswith(FILE_ENDINGS)
    ]
    assert len(named) > 8
    assert [(page, name) for page, name in named if name not in codes] == []


def test_pages__and_help_agree_on_where_outputs_may_be() -> None:
    commands: dict[str, Any] = dict(command_tree().commands)
    for name in ("merge", "run", "replay", "pack"):
        texts = [param.help or "" for param in commands[name].params if param.name == "out"]
        assert [text for text in texts if "prefix of a bucket" in text] == texts != []
    packed = (ROOT / "docs/guide/packed-experts.md").read_text(encoding="utf-8")
    assert "writes to this machine only" not in packed
    assert "Packing straight into a bucket" not in packed


def test_reference__writes_what_may_be_left_out_in_one_pair_of_brackets() -> None:
    assert "[[" not in (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")


@pytest.fixture
def page_run(
    demo_files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> Iterator[PageRun]:
    """Runs pages in a fresh folder after `make demo`; with `--update-goldens` it changes what they show."""
    with TemporaryDirectory(dir=demo_files.parent) as parent:
        folder = Path(parent) / "mergepipe"
        shutil.copytree(demo_files, folder, copy_function=os.link)
        monkeypatch.chdir(folder)
        monkeypatch.setenv("MERGEPIPE_HOME", f"{parent}/home")
        monkeypatch.setenv("COLUMNS", WIDTH)
        yield PageRun(capsys, is_rewritten=request.config.getoption("--update-goldens"))
        monkeypatch.chdir(ROOT)


FIRST_PAGES = ("README.md", "docs/guide/first-merge.md")
OTHER_PAGES = [
    str(page.relative_to(ROOT))
    for page in WRITTEN
    if str(page.relative_to(ROOT)) not in FIRST_PAGES
    and any(block.language == "console" and block.is_run for block in blocks(page))
]


def test_first_pages__show_what_their_commands_print(page_run: PageRun) -> None:
    problems = [problem for page in FIRST_PAGES for problem in page_run.run(ROOT / page)]
    assert problems == [], "\n\n".join(problems)


@pytest.mark.slow
@pytest.mark.parametrize("page", OTHER_PAGES)
def test_page__shows_what_its_commands_print(page: str, page_run: PageRun) -> None:
    problems = page_run.run(ROOT / page)
    assert problems == [], "\n\n".join(problems)
