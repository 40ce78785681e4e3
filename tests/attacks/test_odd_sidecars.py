"""Small files of models that are odd in every way: refused by name, or the snapshot is whole and can be made again."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from odd_models import CHANGES, FILES, ODD, RECIPES, odd_content, write_models

from mergepipe.cli import main
from mergepipe.snapshots.manifest import MANIFEST_NAME

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
