"""Small files of a GiB: refused by name, by their size alone, before anything of them is read."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from odd_models import CHANGES, FILES, ODD, RECIPES, odd_content, write_models

from mergepipe.cli import main
from mergepipe.storage.contract import SIDECARS_BYTES, TOKENIZER_BYTES
from support.public_names import MANIFEST_NAME

GIB = 1 << 30
MOST_BYTES = 1 << 20  # no other file of these models has a tenth of it

# The file that is a GiB, then what reads it.
CASES = (
    *(
        (f"base/{name}", "merge plain.yml again --memory 64MiB")
        for name in ("config.json", "generation_config.json", "chat_template.jinja", "chat_template.json",
                     "tokenizer_config.json", "tokenizer.json", "model.safetensors.index.json")
    ),
    ("expert/config.json", "merge tokenizers.yml again --memory 64MiB"),
    ("base/config.json", "check plain.yml"),
    ("base/generation_config.json", "run plan.json again"),
    ("plain.yml", "check plain.yml"),
    ("plan.json", "run plan.json again"),
    ("out/mergepipe.json", "verify out"),
    ("out/mergepipe.json", "diff out out"),
    ("out/config.json", "verify out"),
    ("out/mergepipe.blocks", "verify out"),
    ("out/mergepipe.json", "gc"),
    ("adapter/adapter_config.json", "merge adapter.yml again"),
)  # fmt: skip


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every read that is asked for at a position."""
    sizes: list[int] = []
    pread = os.pread

    def recorded(descriptor: int, nbytes: int, offset: int) -> bytes:
        sizes.append(nbytes)
        return pread(descriptor, nbytes, offset)

    monkeypatch.setattr(os, "pread", recorded)
    return sizes


def test_commands__refuse_a_small_file_of_a_gib_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], requested: list[int]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    write_models(tmp_path)
    assert main(["merge", "plain.yml", "out", "--quiet"]) == 0
    assert main(["plan", "plain.yml", "--out", "plan.json", "--budget", "50%"]) == 0
    for name, command in CASES:
        path = tmp_path / name
        content = path.read_bytes()
        os.truncate(path, GIB)
        capsys.readouterr()
        requested.clear()
        exit_code = main(command.split())
        printed = "".join(capsys.readouterr())
        path.write_bytes(content)
        assert not (tmp_path / "again").exists(), name
        assert max(requested, default=0) < MOST_BYTES, (name, command)
        if command == "gc":
            continue
        assert 2 <= exit_code <= 10, (name, command, printed)
        assert path.name in printed, (name, command, printed)
        if not command.startswith("verify"):
            assert f"has {GIB} bytes, at most " in printed, (name, command, printed)
            assert "[storage.too-large]" in printed, (name, command, printed)


def test_merge__refuses_small_files_that_are_too_large_together_or_pointers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mergepipe.runs.small_files.SIDECARS_BYTES", 1000)
    write_models(tmp_path)
    for name in ("vocab.txt", "merges.txt"):
        (tmp_path / "base" / name).write_bytes(b"a\n" * 300)
    assert main(["merge", "plain.yml", "out", "--no-catalog"]) == 4
    assert "base: its small files up to " in capsys.readouterr().err
    assert SIDECARS_BYTES >= TOKENIZER_BYTES
    (tmp_path / "base" / "vocab.txt").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert main(["merge", "plain.yml", "out", "--no-catalog"]) == 4
    assert "base/vocab.txt: is a git LFS pointer instead of the file" in capsys.readouterr().err


# --- odd in every way: refused by name, or the snapshot is whole and can be made again


KINDS = (*ODD, *CHANGES)
NAMES = (*FILES, "chat_template.jinja", "model.safetensors.index.json")
# Each kind once in the configuration, which every merge reads, and in one other file that a recipe rewrites.
FEW = [
    *((kind, "config.json", "base", "rewriting") for kind in KINDS),
    *(
        (kind, name, "expert", "tokenizers")
        for kind, name in zip(("deep", "deep text", "lone surrogate", "byte order mark"), NAMES[2:6], strict=True)
    ),
    ("lone surrogate", "tokenizer_config.json", "base", "rewriting"),
    ("odd values of known keys", "generation_config.json", "base", "plain"),
]
ALL = [
    (*case, *rest)
    for case in itertools.product(KINDS, NAMES)
    for rest in (*(("base", recipe) for recipe in RECIPES), ("expert", "tokenizers"))
]


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "name", "model", "recipe"), FEW)
def test_merge__of_odd_small_files_refuses_them_by_name_or_makes_a_whole_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, name: str, model: str, recipe: str
) -> None:
    write_models(tmp_path)
    check_merge(tmp_path, capsys, (kind, name, model, recipe))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_merge__of_every_odd_small_file_refuses_it_by_name_or_makes_a_whole_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for number, case in enumerate(case for case in ALL if case[1] == name):
        write_models(tmp_path / str(number))
        check_merge(tmp_path / str(number), capsys, case)


def check_merge(root: Path, capsys: pytest.CaptureFixture[str], case: tuple[str, str, str, str]) -> None:
    kind, name, model, recipe = case
    path = root / model / name
    path.write_bytes(odd_content(kind, path.read_bytes()))
    before = sorted(root.iterdir())
    exit_code = main(["merge", str(root / f"{recipe}.yml"), str(root / "out"), "--no-catalog", "--quiet"])
    if exit_code != 0:
        assert 2 <= exit_code <= 10, case
        assert name in capsys.readouterr().err, case
        assert sorted(root.iterdir()) == before, case
        return
    assert main(["verify", str(root / "out"), "--quiet"]) == 0, (case, capsys.readouterr())
    assert main(["replay", str(root / "out"), str(root / "again"), "--no-catalog", "--quiet"]) == 0, case
    made, again = ({p.name: p.read_bytes() for p in (root / out).iterdir()} for out in ("out", "again"))
    assert {**made, MANIFEST_NAME: b""} == {**again, MANIFEST_NAME: b""}, case
