"""Write docs/benchmarks from stored results: an index, a page a part, and its figures."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks.process import BenchmarkError
from benchmarks.reproduce.drawing import to_json
from benchmarks.reproduce.pages import Page, Table
from benchmarks.reproduce.papers import comparison
from benchmarks.reproduce.parts import Part
from benchmarks.reproduce.results import DEFAULT_ANEW, Results
from benchmarks.reproduce.sizes import SIZES

_BEGIN, _END = "<!-- figures: written by make reproduce -->", "<!-- end of figures -->"


def stored_pages(parts: Mapping[str, Part], folder: Path) -> dict[str, tuple[Results, Page]]:
    """Make the page of each part whose results, measured to the end or telling without it, are in `folder`."""
    stored = {name: Results.read(folder / f"{name}.json") for name in parts if (folder / f"{name}.json").exists()}
    told = {name: results for name, results in stored.items() if results.is_complete or parts[name].tells_beginnings}
    return {name: (results, parts[name].page(results)) for name, results in told.items()}


def markdown_files(parts: Mapping[str, Part], folder: Path) -> dict[str, str]:
    """Write the text of every page and of the index, by file name; nothing is drawn."""
    pages = stored_pages(parts, folder)
    texts = {f"{name}.md": page.markdown(results, command(name, results)) for name, (results, page) in pages.items()}
    return {"index.md": _index(parts, pages), **texts}


def papers_text(page: str, parts: Mapping[str, Part], folder: Path) -> str:
    """Return docs/papers.md, of which `page` is the present text, with the figures of the stored results."""
    before, _, rest = page.partition(_BEGIN)
    results = {name: stored for name, (stored, _) in stored_pages(parts, folder).items()}
    return f"{before}{_BEGIN}\n\n{comparison(results)}\n\n{_END}{rest.partition(_END)[2]}"


def command(name: str, results: Results) -> str:
    """Return what measures a part again at the size of its results."""
    most = max(results.size["ks"])
    fewer = f' ARGUMENTS="--max-experts {most}"' if most < SIZES[results.size["name"]].n_experts else ""
    return f"make reproduce PARTS={name} SIZE={results.size['name']}{fewer}"


def write_pages(parts: Mapping[str, Part], folder: Path, docs: Path, plots_python: Path) -> None:
    """Write every page and figure that there are results of; `plots_python` has matplotlib.

    Raises:
        BenchmarkError: there is no such Python; nothing is written.
    """
    if not plots_python.exists():
        raise BenchmarkError(f"{plots_python}: no Python with matplotlib is there; `make pages` installs it")
    for name, text in markdown_files(parts, folder).items():
        (docs / name).write_text(text)
    papers = docs.parent / "papers.md"
    if papers.exists():
        papers.write_text(papers_text(papers.read_text(), parts, folder))
    figures = [figure for _, page in stored_pages(parts, folder).values() for figure in page.figures]
    command = [str(plots_python), "-m", "benchmarks.reproduce.drawing", str(docs)]
    subprocess.run(command, input=json.dumps([to_json(figure) for figure in figures]), text=True, check=True)
    drawn = {f"{figure.name}.svg" for figure in figures}
    for drawing in docs.glob("*.svg"):
        if drawing.name not in drawn:
            drawing.unlink()


def _index(parts: Mapping[str, Part], pages: Mapping[str, tuple[Results, Page]]) -> str:
    rows = [(f"[{page.title}]({name}.md)", parts[name].summary) for name, (_, page) in pages.items()]
    machines: dict[str, dict[str, None]] = {}
    for results, _ in pages.values():
        machines.setdefault(_machine_line(results), {})[str(results.machine["cpu"])] = None
    told = (f"{line}: {', '.join(processors)}" for line, processors in machines.items())
    lines = [
        "# Benchmarks",
        "What to expect of MergePipe, measured. Each page begins with what it means for you. [Papers](../papers.md)"
        " compares the papers' figures with ours; [more benchmarks](../internals/benchmarks.md) measure single"
        " mechanisms.",
        Table(("page", "what"), tuple(rows)).markdown(),
        f"Machines of {'; '.join(told)}. A page names its own.",
        "`make reproduce PARTS=\"scaling sweep\" SIZE=0.6b` measures parts; `python -m"
        " benchmarks.reproduce list --size 0.6b` prints the disk space and time that each needs. Where complete results"
        f" are stored, a part is measured anew into `{DEFAULT_ANEW}`, and every figure that differs from the stored one"
        " by more than 1 % is printed; with `ARGUMENTS=--replace` the new results replace the stored ones, and the page"
        " is written again. The same command resumes a stopped run (without `--replace`). A page says how many"
        " processors other programs used meanwhile (the kernel's busy time less ours), and seconds over those of the"
        " floor where it was at most a quarter.",
    ]  # fmt: skip
    return "\n\n".join(lines) + "\n"


def _machine_line(results: Results) -> str:
    machine = results.machine
    return (
        f"{machine['cores']} cores, {machine['memory_gib']} GiB, Linux {machine['kernel']}, Python {machine['python']}"
    )
