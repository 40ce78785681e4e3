"""How recipes name models, in files that are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe.recipes.references import text_with_relative_paths


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("# like {root}/a/b, {root}/a and {root}/a-b", "# like ./a/b, ./a and {root}/a-b"),
        ("# {root}/a/c is below {root}/a/b.", "# ./a/c is below ./a/b."),
        ("# x{root}/a and .{root}/a", "# x{root}/a and .{root}/a"),
        ("# file://{root}/a: {root}/a", "# file://{root}/a: ./a"),
        ("# {root}/a{root}/a", "# ./a{root}/a"),
    ],
)
def test_text_with_relative_paths__replaces_whole_paths_in_comments_too(
    tmp_path: Path, line: str, expected: str
) -> None:
    models = "models: [{root}/a, {root}/a/b]\n"
    text = (models + line).format(root=tmp_path)
    written = text_with_relative_paths(text, tmp_path)
    assert written == "models: [./a, ./a/b]\n" + expected.format(root=tmp_path)


@pytest.mark.thorough
def test_text_with_relative_paths__does_not_search_the_text_for_each_model(tmp_path: Path) -> None:
    n = 4_000  # a search of the text for each one would take minutes
    names = [f"{tmp_path}/model-{number}" for number in range(n)]
    text = "".join(f"- {name}\n# {name} {'x' * 1000}\n" for name in names)
    assert str(tmp_path) not in text_with_relative_paths(text, tmp_path)
