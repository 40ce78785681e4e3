"""FIFOs, devices, sockets and directories where files are expected: every command ends at once and names them."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from odd_models import RECIPES, write_models

from mergepipe.cli import main
from mergepipe.snapshots import work_log
from support.training_trees import decay_groups, decoder_shapes, known_states, write_dcp, write_hf, write_zero3

pytestmark = pytest.mark.timeout(600)  # no command here takes a second: what reads for ever fails


def make_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(here)


KINDS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": make_socket,
    "directory": Path.mkdir,
}

# What a command reads, or * for each file of that folder; then the command.
MODELS = (
    ("base/model-00001-of-00002.safetensors", "merge plain.yml again"),
    ("base/model.safetensors.index.json", "merge plain.yml again"),
    ("base/config.json", "merge plain.yml again"),
    ("base/config.json", "check plain.yml"),
    ("base/chat_template.jinja", "plan plain.yml --out again --budget 50%"),
    ("expert/tokenizer.json", "merge tokenizers.yml again"),
    ("expert/model-00002-of-00002.safetensors", "analyze base expert"),
    ("expert/generation_config.json", "pack base expert --out again"),
    ("expert/tokenizer_config.json", "run plan.json again"),
    ("adapter/adapter_config.json", "merge adapter.yml again"),
    ("plain.yml", "merge plain.yml again"),
    ("plain.yml", "check plain.yml"),
    ("plan.json", "run plan.json again"),
    ("home/snapshots/of-catalog.json", "ls"),
    ("home/snapshots/of-catalog.json", "catalog rebuild ."),
    ("home/snapshots/of-catalog.json", "gc"),
)
SNAPSHOT = (
    ("out/*", "verify out"), ("out/model.safetensors", "diff out same"), ("out/model.safetensors", "repair out"),
    ("out/mergepipe.json", "verify out"), ("out/mergepipe.json", "show out"),
    ("out/mergepipe.json", "replay out again"), ("out/mergepipe.json", "explain out"),
)  # fmt: skip
STORES = (
    ("packs/expert/*", "unpack packs/expert --out again"),
    ("packs/expert/mergepipe-store.*", "merge packed.yml again"),
)
TRAINING = (
    ("hf/*", "tailor inspect hf"),
    ("dcp/*", "tailor diff dcp dcp"),
    ("zero/*", "tailor inspect zero"),
    ("zero/step/*optim_states.pt", "tailor diff zero zero"),
    ("hf/*", "tailor compose hf.yml again"),
    ("composite/*", "verify composite"),
    ("hf.yml", "tailor check hf.yml"),
    ("flags.jsonl", "tailor recipe --from-log flags.jsonl --run . --at 9"),
)
# What says what a folder is: without it the folder is named, not the file.
MARKS = ("mergepipe.json", "mergepipe-store.json", ".metadata", "trainer_state.json", "optimizer.pt", "latest")


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str]:
    """Exit code and all that was printed."""
    exit_code = main(command.split())
    captured = capsys.readouterr()
    return exit_code, captured.out + captured.err


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    return tmp_path


def check_all(
    root: Path, capsys: pytest.CaptureFixture[str], cases: tuple[tuple[str, str], ...], kinds: tuple[str, ...]
) -> int:
    """Replace each file in turn and run its command; return how many were refused, or mended by a repair."""
    n_refused = 0
    for pattern, command in cases:
        paths = [path for path in sorted(root.glob(pattern)) if path.is_file()]
        assert paths or "catalog" in pattern, pattern
        for path in paths or [root / pattern]:
            for kind in kinds:
                aside = root / "aside"
                if path.exists():
                    path.rename(aside)
                KINDS[kind](path)
                exit_code, printed = run(capsys, command)
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)  # `catalog rebuild` has removed it
                if aside.exists():
                    aside.rename(path)
                shutil.rmtree(root / "again", ignore_errors=True)
                case = (path.name, kind, command, exit_code, printed)
                if command == "repair out" and exit_code == 0:  # another file takes its place
                    assert "sound" in printed, case
                elif path.parent.name == "snapshots":  # other records stand: this one is named and passed over
                    assert exit_code == 0, case
                else:
                    assert 2 <= exit_code <= 10, case
                    assert (path.parent.name if path.name in MARKS else path.name) in printed, case
                n_refused += 1
    return n_refused


def write_training(root: Path) -> None:
    for step in (7, 9):
        known = known_states(decoder_shapes(), seed=step, step=step)
        write_hf(root / f"checkpoint-{step}", known)
    (root / "checkpoint-7").rename(root / "hf")
    write_dcp(root / "dcp", known, 2)
    write_zero3(root / "zero" / "step", known, decay_groups(known.shapes), 2)
    (root / "zero" / "latest").write_text("step")
    (root / "hf.yml").write_text("default: hf\ntake: [{from: checkpoint-9, units: [layers even]}]\n")
    (root / "flags.jsonl").write_text('{"step": 7, "flag": [0]}\n')


def write_packed_recipe(root: Path) -> None:
    write_models(root)
    (root / "packed.yml").write_text(RECIPES["plain"].replace("model: expert", "model: packs/expert"))


# What is written, the commands that prepare it, the cases, and how many are refused of each kind at least.
PLACES: dict[str, tuple[Callable[[Path], None], tuple[str, ...], tuple[tuple[str, str], ...], int]] = {
    "models, plans, recipes and the catalog": (
        write_models, ("analyze base expert", "plan plain.yml --out plan.json --budget 50%"), MODELS, len(MODELS),
    ),
    "snapshots": (
        write_models, ("merge rewriting.yml out --no-catalog", "merge rewriting.yml same --no-catalog"), SNAPSHOT, 12,
    ),
    "packed stores": (write_packed_recipe, ("pack base expert --out packs",), STORES, 10),
    "training checkpoints": (write_training, ("tailor compose hf.yml composite --quiet",), TRAINING, 20),
}  # fmt: skip
CASES = [pytest.param(where, ("FIFO",), marks=pytest.mark.slow if "packed" in where else ()) for where in PLACES]
CASES += [pytest.param(where, tuple(KINDS)[1:], marks=pytest.mark.slow) for where in PLACES]


@pytest.mark.parametrize(("where", "kinds"), CASES)
def test_commands__refuse_special_files(
    place: Path, capsys: pytest.CaptureFixture[str], where: str, kinds: tuple[str, ...]
) -> None:
    write, commands, cases, n_least = PLACES[where]
    write(place)
    assert [command for command in commands if run(capsys, command)[0]] == []
    (place / "home" / "snapshots").mkdir(parents=True, exist_ok=True)
    assert check_all(place, capsys, cases, kinds) >= n_least * len(kinds)


# --- folders with names that are not UTF-8: refused by name before the first write


ODD_FOLDER_COMMANDS = (
    "merge plain.yml out --no-catalog", "check plain.yml", "plan plain.yml --out plan.json --budget 50%",
    "pack base expert --out packs", "tailor compose hf.yml out", "tailor check hf.yml", "analyze base expert",
)  # fmt: skip


@pytest.fixture
def odd_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / os.fsdecode(b"odd\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system takes only names in UTF-8")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    write_models(folder)
    write_training(folder)
    return folder


def test_commands__refuse_inputs_in_folders_that_are_not_utf_8(
    odd_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(odd_folder.rglob("*"))
    for command in ODD_FOLDER_COMMANDS:
        exit_code = main(command.split())
        printed = capsys.readouterr().err
        assert (exit_code, "odd\\udcff" in printed, "UTF-8" in printed) == (6, True, True), (command, printed)
    assert sorted(odd_folder.rglob("*")) == before


def test_merge__writes_into_folders_that_are_not_utf_8(
    odd_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(work_log, "UNIT_SECONDS", 0)
    write_models(tmp_path / "plain")
    assert main(["merge", str(tmp_path / "plain" / "plain.yml"), "out", "--no-catalog"]) == 0, capsys.readouterr()
    assert main(["verify", str(odd_folder / "out")]) == 0


# --- inputs that are mounted for reading only: everything works, and nothing is tried beside them


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with models, a snapshot, a store, a checkpoint, that cannot be written."""
    if os.geteuid() != 0:
        pytest.skip("mounting a folder for reading only needs root")
    root = tmp_path_factory.mktemp("read-only")
    inputs = root / "inputs"
    inputs.mkdir()
    write_models(inputs)
    (inputs / "plain.yml").write_text(RECIPES["plain"])
    (inputs / "compose.yml").write_text("default: checkpoint-7\n")
    write_hf(inputs / "checkpoint-7", known_states(decoder_shapes()))
    with contextlib.chdir(inputs):
        for command in (
            "merge plain.yml snapshot", "pack base expert --out packed", "plan plain.yml --budget 50% --out plan.json",
        ):  # fmt: skip
            assert main([*command.split(), "--home", str(root / "first")]) == 0
    mounted = subprocess.run(["mount", "--bind", inputs, inputs], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip(f"mounting is refused: {mounted.stderr!r}")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", inputs], check=True)
        with pytest.raises(OSError, match="Read-only file system"):
            (inputs / "base" / "new").touch()
        yield inputs
    finally:
        subprocess.run(["umount", inputs], check=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [
        "check IN/plain.yml",
        "plan IN/plain.yml --budget 50% --out plan.json --home home",
        "analyze IN/base IN/expert --home home",
        "merge IN/plain.yml merged --home home",
        "merge IN/plain.yml merged --budget 50% --home home",
        "run IN/plan.json merged --home home",
        "pack IN/base IN/expert --out packed --home home",
        "unpack IN/packed/expert --out restored",
        "verify IN/snapshot --home home",
        "verify IN/snapshot --deep 5% --home home",
        "verify IN/packed/expert --home home",
        "diff IN/snapshot IN/snapshot --home home",
        "show IN/snapshot --home home",
        "replay IN/snapshot again --home home",
        "tailor inspect IN/checkpoint-7",
        "tailor check IN/compose.yml",
        "merge IN/plain.yml IN/merged --home home",
        "pack IN/base IN/expert --out IN/new --home home",
        "plan IN/plain.yml --budget 50% --out IN/new.json --home home",
        "analyze IN/base IN/expert --home IN/home",
    ],
)
def test_command__reads_what_cannot_be_written_or_says_in_one_line_where_it_cannot_write(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    place = os.path.relpath(inputs)
    writes_there = any(word in command for word in ("IN/merged", "IN/new", "IN/home"))
    exit_code = main([word.replace("IN", place) for word in command.split()])
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert (exit_code, len(errors)) == ((8, 1) if writes_there else (0, 0)), errors
    assert all("inputs" in error and "Read-only file system" in error for error in errors)
