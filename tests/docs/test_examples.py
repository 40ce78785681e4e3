"""Every example runs from an empty folder, and the notebook shows its values as tables."""

from __future__ import annotations

import ast
import importlib.util
import json
import runpy
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from mergepipe.operators.registry import has_operator, remove_operator
from support.demo_files import remove_demo_files, write_demo_files

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUNNABLE = {"first_merge.py": "merged", "budgeted_merge.py": "half", "own_operator.py": "largest"}
"""The scripts, and the output of each."""
NOTEBOOKS = {"first_merge.ipynb": 4, "search.ipynb": 2}
"""The notebooks, and the tables of reports that each shows."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr("sys.argv", ["example"])
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))


def test_examples__are_all_run_here() -> None:
    others = {"demo.py", "example_models.py"}  # `make demo`; what the others import
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == others | RUNNABLE.keys() | NOTEBOOKS.keys()


@pytest.mark.parametrize("name", RUNNABLE)
def test_example__runs_and_makes_a_sound_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    finally:
        if has_operator("largest_change"):
            remove_operator("largest_change")
    assert len(capsys.readouterr().out.splitlines()) in (1, 2, 3)
    assert mergepipe.verify(Path("example") / RUNNABLE[name]).is_sound


@pytest.mark.thorough
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook__has_no_outputs_and_its_cells_run_in_order(name: str) -> None:
    notebook = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    codes = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell for cell in codes if cell["outputs"] or cell["execution_count"] is not None] == []
    names: dict[str, Any] = {}
    shown = [run_cell("".join(cell["source"]), names) for cell in codes]
    tables = [value._repr_html_() for value in shown if hasattr(value, "_repr_html_")]
    assert len(tables) == NOTEBOOKS[name]
    assert all("<table" in table for table in tables)
    report = names["report"]
    if isinstance(report, mergepipe.MergeReport):
        assert report.merged_tensors == 8
    else:
        assert report.best_trial.losses[0] < 0.2 * max(trial.losses[0] for trial in report.trials)


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbclient", "ipykernel")),
    reason="needs nbclient and ipykernel",
)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook__runs_in_a_kernel_and_shows_progress_and_tables(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{Path(mergepipe.__file__).parents[1]}:{EXAMPLES}")
    notebook = import_module("nbformat").read(EXAMPLES / name, as_version=4)
    resources = {"metadata": {"path": "."}}
    import_module("nbclient").NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources=resources
    ).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    results = [output.data.get("text/html", "") for output in shown if output.output_type == "execute_result"]
    assert len([html for html in results if "<table" in html]) == NOTEBOOKS[name]
    progress = "".join(output.text for output in shown if output.output_type == "stream" and output.name == "stderr")
    assert (name == "first_merge.ipynb") == ("100%" in progress)


@pytest.mark.thorough
def test_demo_files__are_written_over_nothing_and_removed_alone(demo_files: Path, tmp_path: Path) -> None:
    shutil.copytree(demo_files, tmp_path, dirs_exist_ok=True)
    (tmp_path / "models" / "mine").mkdir()
    shutil.rmtree(tmp_path / "models" / "code")
    shutil.rmtree(tmp_path / "models" / "adapter")
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "models").rglob("*.safetensors")}
    write_demo_files(tmp_path)
    assert (tmp_path / "models" / "code" / "model.safetensors").exists()
    assert (tmp_path / "models" / "adapter" / "adapter_config.json").exists()
    assert {path: path.stat().st_mtime_ns for path in times} == times
    remove_demo_files(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["models", "models/mine"]


@pytest.mark.parametrize("name", ["models", "run", "experts.yml"])
def test_demo__leaves_what_it_did_not_make(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / name
    if place.suffix:
        place.write_text("merge_method: linear\n")
    else:
        place.mkdir()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["demo.py"])
        with pytest.raises(SystemExit, match="1"):
            runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {name} is not")
    remove_demo_files(tmp_path)
    assert list(tmp_path.rglob("*")) == [place]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Run a cell as a notebook does; the value of its last line, if that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<cell>", "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], []), "<cell>", "exec"), names)
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
