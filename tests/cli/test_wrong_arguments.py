"""What is told where arguments are swapped, are mergekit's, name a file, or belong to another place."""

from __future__ import annotations

import pytest

import mergepipe
from support.command_line import Runner, Workplace


def test_errors_about_models__name_the_line_of_the_recipe_and_a_tidy_path(work: Workplace, run: Runner) -> None:
    (work.root / "sub").mkdir()
    (work.root / "broken").mkdir()
    text = work.recipe.read_text()
    work.recipe.write_text(text.replace("family/expert-2", "sub/..//broken"))
    ran = run("check", work.recipe)
    assert ran.err.startswith(f"error: recipe.yml:6 models[1]: {work.root / 'broken'}: no weights here")
    work.recipe.write_text(text.replace("family/expert-2", "sub/..//nothing"))
    assert f"looked for {work.root / 'nothing'} " in run("check", work.recipe).err
    work.recipe.write_text(text.replace("base_model: family/base", "base_model: broken"))
    assert run("check", work.recipe).err.startswith(f"error: recipe.yml:2 base_model: {work.root / 'broken'}: ")


def test_paths__are_tidied_only_where_no_link_leads_elsewhere(work: Workplace, run: Runner) -> None:
    work.write_recipe()
    work.out.mkdir()
    (work.out / "mine").touch()
    (work.root / "sub").mkdir()
    assert run("merge", work.recipe, "sub//..//out").err.startswith("error: out: ")
    (work.root / "far").mkdir()
    (work.root / "far" / "deep").mkdir()
    (work.root / "link").symlink_to(work.root / "far" / "deep")
    assert run("merge", work.recipe, "link/../made", "--quiet").exit_code == 0
    assert (work.root / "far" / "made" / "config.json").exists()


def test_show__says_how_many_digits_a_sid_needs(work: Workplace, run: Runner) -> None:
    sid = mergepipe.merge(work.recipe, work.out).sid
    ran = run("show", sid[:2])
    assert (ran.exit_code, f"2 digits of a sid are too few; give 4: {sid[:4]}" in ran.err) == (3, True)
    assert run("show", sid[:4]).exit_code == 0


@pytest.mark.parametrize("group", ["lora", "tailor", "catalog"])
def test_group__without_a_command_is_refused_in_one_line(run: Runner, group: str) -> None:
    ran = run(group)
    assert (ran.exit_code, ran.err) == (2, f"error: Missing command; see 'mergepipe {group} --help' [option.invalid]\n")
