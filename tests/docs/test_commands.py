"""Commands, options and error codes that hand-written pages name are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from mergepipe.cli.app import build_command

ROOT = Path(__file__).resolve().parents[2]
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
