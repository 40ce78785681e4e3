"""A pytest plugin for the peer environment: mergekit's own tests merge with `mergepipe-yaml`.

`mergekit.merge.run_merge` is replaced by a function of the same arguments that writes the configuration to a file and
runs the command. At the end the outcome of every test that merged is written to `MERGEPIPE_OUTCOMES`, as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import mergekit.merge  # type: ignore[import-not-found]
import pytest

PROGRAM = "import sys; from mergepipe.cli import mergekit_main; sys.exit(mergekit_main())"
FLAGS = {
    "allow_crimes": "--allow-crimes",
    "unsafe_truncate_embeddings": "--unsafe-truncate-embeddings",
    "quiet": "--quiet",
}
LOG = logging.getLogger("mergepipe-yaml")

merging_tests: set[str] = set()
outcomes: dict[str, str] = {}


def merge_with_mergepipe(config: Any, out_path: str, options: Any, config_source: str | None = None) -> None:
    """Merge as `run_merge` is asked to; a refusal is a ValueError with the messages of the command."""
    merging_tests.add(os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0])
    flags = [flag for name, flag in FLAGS.items() if getattr(options, name)]
    if not options.copy_tokenizer:
        flags.append("--no-copy-tokenizer")
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yml"
        recipe.write_text(config_source or config.to_yaml())
        command = [os.environ["MERGEPIPE_PYTHON"], "-c", PROGRAM, str(recipe), str(out_path), *flags]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
    LOG.warning(ran.stderr)
    if ran.returncode:
        raise ValueError(ran.stderr)


mergekit.merge.run_merge = merge_with_mergepipe


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what became of a test."""
    if report.nodeid in merging_tests:
        text = "" if report.passed else str(report.longrepr)
        outcomes[report.nodeid] = outcomes.get(report.nodeid, "") or text


def pytest_sessionfinish() -> None:
    """Write the outcomes: empty text for a test that passed, its report for one that did not."""
    Path(os.environ["MERGEPIPE_OUTCOMES"]).write_text(json.dumps(outcomes, indent=1, sort_keys=True))
