"""Names from inputs that try to break lines, turn them around, colour them or leave their cell."""

from __future__ import annotations

import json
import re
import unicodedata
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mergepipe import cli
from mergepipe.cli.pages import sweep_page
from mergepipe.planning.plan import PLAN_FORMAT
from mergepipe.reports import SweepPoint, SweepReport
from mergepipe.storage.location import Location
from support.command_line import Ran, run_command
from support.model_folders import recipe_of, write_model
from support.public_names import REPORT_FORMAT

CLI = Path(cli.__file__).parent
NASTY = "\u202ex\u2028y\x1b[31mz\nINJECTED|`<b>&\x85[bold]\u2066"
FOLDER = "expert\u202ex\u2028y\nINJECTED|`<b>&\x85[bold]\u2066"  # recipes hold no other control characters
TENSOR = "layers.\u202e0\u2028x.<b>|`[bold]\u2066.weight"  # control characters are refused in headers
LINE = re.compile(r"^\W*INJECTED", re.MULTILINE)


class Strict(json.JSONDecoder):
    """Refuses NaN and infinities."""

    def __init__(self) -> None:
        super().__init__(parse_constant=self._refuse)

    @staticmethod
    def _refuse(constant: str) -> object:
        raise ValueError(constant)


@pytest.fixture(name="place", scope="module")
def make_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hostile")
    rng = np.random.default_rng(0)
    base = {TENSOR: rng.standard_normal((64, 96)).astype(np.float32), "norm": np.ones(8, np.float32)}
    for name in ("base", FOLDER, f"{FOLDER}2"):
        tensors = {n: (t + 0.01 * rng.standard_normal(t.shape)).astype(np.float32) for n, t in base.items()}
        extra = {} if name == "base" else {"extra\u202e": np.ones(3, np.float32)}
        write_model(root / name, {**tensors, **extra}, {"model_type": "test"})
    recipe = recipe_of("task_arithmetic", {place: {"weight": 0.5} for place in (FOLDER, f"{FOLDER}2")}, "base")
    (root / "recipe.yml").write_text(yaml.safe_dump(recipe))
    return root


ALLOWED = ["--allow-dropped", "extra*"]
COMMANDS: dict[str, list[str]] = {
    "check": ["check", "recipe.yml", *ALLOWED],
    "check-dropped": ["check", "recipe.yml"],
    "plan": ["plan", "recipe.yml", "--budget", "60%", "--select", "norm", *ALLOWED, "--out", "p.plan.json"],
    "merge": ["merge", "recipe.yml", "out\u202e", *ALLOWED, "--force"],
    "merge-dropped": ["merge", "recipe.yml", "other"],
    "run": ["run", "p.plan.json", "planned", "--force"],
    "explain": ["explain", "planned"],
    "show": ["explain", "planned", "--tensor", "layers*"],
    "verify": ["verify", "out\u202e"],
    "diff": ["diff", "out\u202e", "planned"],
    "lineage": ["lineage", "out\u202e"],
    "ls": ["ls"],
    "shown": ["show", "out\u202e"],
    "analyze": ["analyze", "base", FOLDER],
    "pack": ["pack", "base", FOLDER, "--out", "packed"],
    "sweep": ["sweep", "recipe.yml", "--budgets", "95%", *ALLOWED, "--html", "sweep.html"],
    "missing": ["merge", NASTY.replace("\n", ""), "x"],
    "option": ["merge", "recipe.yml", "x", "--threads", NASTY],
}


def raw_characters(text: str) -> list[str]:
    """Control, format and separating characters that are there as they are; line feeds may be."""
    return [hex(ord(c)) for c in text if c != "\n" and unicodedata.category(c) in {"Cc", "Cf", "Zl", "Zp"}]


@pytest.fixture(name="ran", scope="module")
def run_all(place: Path) -> dict[str, tuple[Ran, Ran]]:
    """Every command as a table and as JSON, in the order above."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("MERGEPIPE_HOME", str(place / "home"))
        return {name: (run_command(command), run_command([*command, "--json"])) for name, command in COMMANDS.items()}


def test_outputs__show_nothing_raw_and_break_no_line(ran: dict[str, tuple[Ran, Ran]]) -> None:
    outputs = {f"{name} {kind}": each.out + each.err for name, pair in ran.items()
               for kind, each in zip(("table", "json"), pair, strict=True)}  # fmt: skip
    assert {name: raw for name, text in outputs.items() if (raw := raw_characters(text))} == {}
    assert [name for name, text in outputs.items() if LINE.search(text)] == []
    assert "\\u202e" in outputs["merge table"]


def test_outputs__succeed_or_fail_by_name(ran: dict[str, tuple[Ran, Ran]]) -> None:
    failing = {name: pair[0].exit_code for name, pair in ran.items() if pair[0].exit_code}
    assert failing == {"check-dropped": 5, "merge-dropped": 5, "missing": 3, "option": 2}


def test_outputs__json_is_strict_and_names_its_format_first(ran: dict[str, tuple[Ran, Ran]]) -> None:
    documents = {name: json.loads(as_json.out, cls=Strict) for name, (_, as_json) in ran.items()}
    assert documents.pop("plan")["format"] == PLAN_FORMAT.title
    assert {next(iter(document.items())) for document in documents.values()} == {("format", REPORT_FORMAT)}


def test_commands__print_json_through_the_one_function_that_names_the_format() -> None:
    """So that what holds of the commands above holds of all: `plan` prints a file format, the page a script's text."""
    users = {
        str(path.relative_to(CLI))
        for path in CLI.rglob("*.py")
        if re.search(r"\b(json_line|json\.dumps)\b", path.read_text(encoding="utf-8"))
    }
    assert users == {"printing.py", "commands/budgets.py", "commands/snapshots.py"}


def test_model_card__names_break_neither_metadata_nor_text(ran: dict[str, tuple[Ran, Ran]], place: Path) -> None:
    assert ran["merge"][0].exit_code == 0
    card = (place / "out\u202e" / "README.md").read_text(encoding="utf-8")
    assert raw_characters(card) == []
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front).keys() == {"library_name", "tags", "merge"}  # nothing is an id of the Hub
    rows = [line for line in body.splitlines() if line.startswith("| expert")]
    assert len(rows) == 2
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 3 for row in rows)
    fenced = re.search(r"^(`{3,})yaml\n.*?^\1$", body, flags=re.MULTILINE | re.DOTALL)
    assert fenced is not None
    assert "<b>" not in re.sub(r"(`+).*?\1", "", body.replace(fenced[0], ""))


class Tags(HTMLParser):
    """The tags of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.add(tag)


def test_sweep_page__holds_no_tag_of_a_name(ran: dict[str, tuple[Ran, Ran]], place: Path) -> None:
    assert ran["sweep"][0].exit_code == 0
    assert raw_characters((place / "sweep.html").read_text(encoding="utf-8")) == []
    point = SweepPoint(
        budget=NASTY, policy=NASTY, budget_bytes=10, planned_bytes=10, expert_bytes=10, share=1.0, seconds=1.0,
        error=float("nan"), flattering_error=0.1,
    )  # fmt: skip
    report = SweepReport(
        recipe=Location.local(Path(NASTY)), operator=NASTY, policy=NASTY, seed=0, dtypes=(NASTY,), full_cost_bytes=10,
        full_expert_bytes=10, full_seconds=1.0, changed_norm=float("inf"), full_norm=1.0, points=(point,),
    )  # fmt: skip
    hostile = sweep_page(report)
    assert raw_characters(hostile) == []
    tags = Tags()
    tags.feed(hostile)
    assert "b" not in tags.found
