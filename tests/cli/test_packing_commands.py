"""`pack` and `unpack`: what they print, and how they refuse."""

from __future__ import annotations

from support.command_line import Runner, Workplace, file_bytes


def test_pack__of_a_snapshot_on_its_base_brings_back_the_snapshot(work: Workplace, run: Runner) -> None:
    """Smaller, a model in recipes, and whole again byte for byte."""
    experts = ", ".join(f"{{model: {expert}}}" for expert in work.family.experts)
    base = f"base_model: {work.family.base}\nparameters: {{density: 0.5, weight: 0.5}}\n"
    (work.root / "ties.yml").write_text(f"merge_method: ties\nmodels: [{experts}]\n{base}")
    merged, packed, again = (work.root / name for name in ("merged", "small/merged", "again"))
    assert run("merge", work.root / "ties.yml", merged, "--budget", "25%").exit_code == 0
    assert run("pack", work.family.base, merged, "-o", packed.parent).exit_code == 0
    assert run("unpack", packed, "-o", again).exit_code == 0
    assert file_bytes(again) == file_bytes(merged)
    assert run("verify", again).exit_code == 0
    assert sum(map(len, file_bytes(packed).values())) < 0.9 * sum(map(len, file_bytes(merged).values()))
    (work.root / "next.yml").write_text(f"merge_method: linear\nmodels: [{{model: {packed}}}]\n{base}")
    assert run("merge", work.root / "next.yml", work.root / "next").exit_code == 0


def test_pack__on_a_base_that_is_packed_on_its_own_comes_back(work: Workplace, run: Runner) -> None:
    expert, stores = work.family.experts[0], work.root / "stores"
    assert run("pack", work.family.base, "-o", stores).exit_code == 0
    assert run("pack", stores / "base", expert, work.family.experts[1], "--chain", 4, "-o", stores).exit_code == 0
    for number in (0, 1):
        original, again = work.family.experts[number], work.root / f"again-{number}"
        assert run("unpack", stores / original.name, "-o", again).exit_code == 0
        assert (again / "model.safetensors").read_bytes() == (original / "model.safetensors").read_bytes()


def test_pack_and_unpack__name_no_option_that_they_lack(work: Workplace, run: Runner) -> None:
    (work.root / "stores" / "expert-1").mkdir(parents=True)
    (work.root / "stores" / "expert-1" / "notes.txt").write_text("mine")
    packed = run("pack", work.family.base, work.family.experts[0], "-o", work.root / "stores")
    store = work.root / "more" / "expert-1"
    assert run("pack", work.family.base, work.family.experts[0], "-o", work.root / "more", "--quiet").exit_code == 0
    unpacked = run("unpack", store, "-o", work.root / "stores")
    for ran in (packed, unpacked):
        assert ran.exit_code == 7
        assert "already exists; choose another name" in ran.err
        assert "--force" not in ran.err
