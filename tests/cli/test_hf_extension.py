"""`hf mergepipe`: the file `hf-mergepipe`, installed and run by the CLI of huggingface_hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import mergepipe

ROOT = Path(__file__).resolve().parents[2]
EXTENSION = ROOT / "hf-mergepipe"
INSTALL = """
import sys
from pathlib import Path
from huggingface_hub.cli import extensions, hf

content = Path(sys.argv[1]).read_bytes()

class Response:
    def __init__(self, content):
        self.content, self.text = content, content.decode(errors="replace")
    def json(self):
        raise ValueError("no JSON")

def request(method, url, **options):
    if url == "https://raw.githubusercontent.com/mergepipe/hf-mergepipe/HEAD/hf-mergepipe":
        return Response(content)
    if url.endswith("info/refs"):
        return Response(b"0" * 40 + b" HEAD\\0")
    if method == "HEAD" and url == "https://github.com/mergepipe/hf-mergepipe":
        return Response(b"")
    raise OSError(url)

extensions._github_request = request
sys.argv = ["hf", "extensions", "install", "mergepipe/hf-mergepipe"]
hf.main()
"""
"""Runs `hf extensions install` with GitHub's answers for a repository of that name, which holds the one file."""

needs_hf = pytest.mark.skipif(
    find_spec("huggingface_hub") is None or find_spec("huggingface_hub.cli.extensions") is None,
    reason="needs a huggingface_hub whose CLI has extensions",
)


def run(arguments: list[str], home: Path, path: str) -> subprocess.CompletedProcess[str]:
    """Run a program with a home and a PATH of its own, and no network."""
    environment = {
        **os.environ, "HOME": str(home), "PATH": path, "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "HF_HOME": str(home / "hf"), "MERGEPIPE_HOME": str(home / "mergepipe"), "NO_COLOR": "1",
    }  # fmt: skip
    return subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300, check=False)


@needs_hf
def test_hf_mergepipe__is_installed_and_runs_the_installed_program_with_its_exit_code(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "mergepipe"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mergepipe "$@"\n')
    program.chmod(0o755)
    path = f"{programs}:/usr/bin:/bin"
    hf = [sys.executable, "-m", "huggingface_hub.cli.hf"]
    installed = run([sys.executable, "-c", INSTALL, str(EXTENSION)], tmp_path, path)
    assert installed.returncode == 0, installed.stderr
    manifest = json.loads((tmp_path / ".local/share/hf/extensions/hf-mergepipe/manifest.json").read_text())
    assert (manifest["type"], manifest["short_name"]) == ("binary", "mergepipe")
    version = run([*hf, "mergepipe", "--version"], tmp_path, path)
    assert (version.returncode, version.stdout) == (0, f"mergepipe {mergepipe.__version__}\n")
    refused = run([*hf, "mergepipe", "merge", "no such recipe.yml", "out"], tmp_path, path)
    assert refused.returncode == 3
    assert refused.stderr.endswith("no such recipe.yml: there is no such recipe [recipe.not-found]\n")


def test_hf_mergepipe__without_a_program_says_how_to_install_it(tmp_path: Path) -> None:
    done = run(["/bin/sh", str(EXTENSION), "--version"], tmp_path, str(tmp_path))
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith("error: hf mergepipe: found neither mergepipe nor uvx on PATH; install one of them")
    assert done.stderr.count("\n") == 1
    (tmp_path / "uvx").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "uvx").chmod(0o755)
    done = run(["/bin/sh", str(EXTENSION), "lora", "check", "a b"], tmp_path, str(tmp_path))
    expected = "--from mergepipe @ git+https://github.com/mergepipe/mergepipe mergepipe lora check a b\n"
    assert (done.returncode, done.stdout) == (0, expected)
