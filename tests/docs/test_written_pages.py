"""Hand-written pages: links lead somewhere, named commands are there, and the README prints what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mergepipe.cli import main
from mergepipe.cli.app import build_command
from support.families import TINY, FamilyShape, write_family
from support.training_trees import decay_groups, decoder_shapes, known_states, write_trainer_files, write_zero12

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
    root = build_command()
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
    commands: dict[str, Any] = dict(build_command().commands)
    for name in ("merge", "run", "replay", "pack"):
        texts = [param.help or "" for param in commands[name].params if param.name == "out"]
        assert [text for text in texts if "prefix of a bucket" in text] == texts != []
    packed = (ROOT / "docs/guide/packed-experts.md").read_text(encoding="utf-8")
    assert "writes to this machine only" not in packed
    assert "Packing straight into a bucket" not in packed


def test_reference__writes_what_may_be_left_out_in_one_pair_of_brackets() -> None:
    assert "[[" not in (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")


README = Path(__file__).resolve().parents[2] / "README.md"
ADAPTER = "lora extract models/base models/code -o models/adapter --rank 16 --quiet"
VARIES = re.compile(r"\b[0-9a-f]{32}\b|\d[\d.,]*( ?[kMG]?B\b| s\b| ?%|/s\b)*")


def write_inputs(root: Path, shape: FamilyShape, *, layers: int, width: int, vocabulary: int) -> None:
    """Write what the README's commands read below `root`: `models`, `experts.yml`, and the checkpoints in `run`."""
    family = write_family(root / "models", shape, 2)
    for model, name in zip(family.experts, ("math", "code"), strict=True):
        model.rename(root / "models" / name)
    (root / "experts.yml").write_text(blocks("yaml")[0], encoding="utf-8")
    shapes = decoder_shapes(layers, width, vocabulary, tied=True)
    for number, step in enumerate((300, 400)):
        known = known_states(shapes, seed=number, step=step)
        folder = root / "run" / f"checkpoint-{step}"
        write_trainer_files(folder, known, tied=True)
        write_zero12(folder / f"global_step{step}", known, decay_groups(shapes), 2)
        (folder / "latest").write_text(f"global_step{step}", encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def shown() -> list[tuple[str, list[str]]]:
    """The README's commands and the lines that each prints there."""
    text = "\n".join(blocks("console"))
    return [(part.splitlines()[0], part.splitlines()[1:]) for part in re.split(r"^\$ mergepipe ", text, flags=re.M)[1:]]


def arguments(command: str) -> list[str]:
    """The words of a command line, with the names that its patterns stand for in this folder."""
    here = Path()
    return [
        name for word in shlex.split(command) for name in (sorted(map(str, here.glob(word))) if "*" in word else [word])
    ]


def without_numbers(lines: list[str]) -> list[str]:
    return [" ".join(VARIES.sub("N", line).split()) for line in lines if line.strip()]


def test_readme__commands_print_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "120")
    write_inputs(tmp_path, TINY, layers=2, width=16, vocabulary=32)
    assert main(shlex.split(ADAPTER)) == 0
    assert len(shown()) > 4
    for command, lines in shown():
        capsys.readouterr()
        assert main(arguments(command)) == 0, command
        printed = without_numbers(capsys.readouterr().out.splitlines())
        assert [line for line in without_numbers(lines) if line != "..." and line not in printed] == [], command
