"""Staging and publishing: all or nothing, never over somebody else's files, and no litter."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import mergepipe
from mergepipe.errors import ConflictError, OutputError, StorageError, UnsupportedError
from mergepipe.snapshots.staging import Staging, check_target, find_staging, remove_dead, temporary_folder
from mergepipe.storage import owned
from mergepipe.storage.location import Location
from mergepipe.storage.owners import this_process
from support.crashes import run_forked
from support.faults import Fault, replaced, system_error
from support.public_names import CONTENT_NAME, MANIFEST_NAME

WITHOUT_RENAMEAT2 = [False, True]


def unknown_to_the_kernel(_: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *_: False


def make_snapshot(path: Path, text: str) -> None:
    path.mkdir(parents=True)
    (path / MANIFEST_NAME).write_text(text)


def stage(out: Path, text: str, *, force: bool = False, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Publish a snapshot with `text` in it, and do something else just before it appears."""
    with Staging(out, force=force) as staging:
        (staging.path / MANIFEST_NAME).write_text(text)
        (staging.path / "chat_templates").mkdir()
        meanwhile()
        staging.publish()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=WITHOUT_RENAMEAT2, ids=["renameat2", "rename"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(owned, "renameat2", unknown_to_the_kernel(owned.renameat2))


@pytest.mark.usefixtures("system")
def test_staging__appears_at_once_when_published(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folders" / "out"
    seen: list[list[str]] = []
    stage(out, "x", meanwhile=lambda: seen.append(names(out.parent)))
    ((staged,),) = seen
    assert staged.startswith(".out.mergepipe-")
    assert (out / MANIFEST_NAME).read_text() == "x"
    assert names(out.parent) == ["out"]


def test_staging__keeps_parents_that_others_use_by_now(tmp_path: Path) -> None:
    with Staging(tmp_path / "new" / "out", force=False):
        (tmp_path / "new" / "theirs").write_text("x")
    assert names(tmp_path / "new") == ["theirs"]


@pytest.mark.usefixtures("system")
def test_staging__takes_the_place_of_an_empty_folder_and_of_no_other(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    check_target(out, [], force=False)
    with pytest.raises(ConflictError) as caught:
        stage(out, "x", meanwhile=(out / "theirs").touch)
    assert (caught.value.code, names(out), names(tmp_path)) == ("output.changed", ["theirs"], ["out"])
    (out / "theirs").unlink()
    stage(out, "x")
    assert ((out / MANIFEST_NAME).read_text(), names(tmp_path)) == ("x", ["out"])


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("force", [False, True])
def test_staging__does_not_touch_what_appeared_meanwhile(tmp_path: Path, force: bool) -> None:
    out = tmp_path / "out"

    def appear() -> None:
        out.mkdir()
        (out / "theirs").write_text("precious")

    with pytest.raises((ConflictError, OutputError)) as caught:
        stage(out, "x", force=force, meanwhile=appear)
    assert caught.value.code == ("output.not-ours" if force else "output.changed")
    assert names(out) == ["theirs"]
    assert names(tmp_path) == ["out"]


@pytest.mark.usefixtures("system")
def test_staging__replaces_a_snapshot_by_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_snapshot(out, '{"files": [{"name": "model.safetensors"}]}')
    (out / "model.safetensors").write_bytes(b"old")
    stage(out, "new", force=True)
    assert (out / MANIFEST_NAME).read_text() == "new"
    assert names(out) == ["chat_templates", MANIFEST_NAME]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("at", [1, 2])  # the first renaming is of the record of the owner
def test_exchange__without_kernel_support_brings_the_old_one_back_when_it_fails(tmp_path: Path, at: int) -> None:
    out = tmp_path / "out"
    make_snapshot(out, "old")
    fault = Fault(at, system_error(errno.EIO))
    with (
        replaced(owned, "renameat2", unknown_to_the_kernel),
        replaced(os, "rename", fault.wrap),
        pytest.raises(StorageError),
    ):
        stage(out, "new", force=True)
    assert fault.fired
    assert (out / MANIFEST_NAME).read_text() == "old"
    assert names(tmp_path) == ["out"]


def test_exchange__killed_half_way_without_kernel_support_loses_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_snapshot(out, "old")
    program = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from mergepipe.snapshots import staging as publish\n"
        "from mergepipe.storage import owned\n"
        "owned.renameat2 = lambda *_: False\n"
        "rename, calls = os.rename, []\n"
        "def half_way(*args, **options):\n"
        "    calls.append(args)\n"
        "    rename(*args, **options) if len(calls) <= 2 else os._exit(9)\n"
        "os.rename = half_way\n"
        "with publish.Staging(Path(sys.argv[1]), force=True) as staging:\n"
        "    (staging.path / 'mergepipe.json').write_text('new')\n"
        "    staging.publish()\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(out)], check=False).returncode == 9
    assert not out.exists()
    stage(tmp_path / "other", "x")
    with Staging(out, force=False):
        pass
    kept = [path.read_text() for path in tmp_path.rglob(MANIFEST_NAME) if "other" not in str(path)]
    assert "old" in kept


def _leave_staging_behind(out: Path) -> Path:
    """A process that is killed while it stages."""
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from mergepipe.snapshots.staging import Staging\n"
        "staging = Staging(Path(sys.argv[1]), force=False)\n"
        "staging.__enter__()\n"
        "(staging.path / 'half').write_text('x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = [path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.mergepipe-")]
    return left


def test_staging__sweeps_what_a_killed_process_left(tmp_path: Path) -> None:
    left = _leave_staging_behind(tmp_path / "out[1]*")
    assert (left / CONTENT_NAME / "half").exists()
    stage(tmp_path / "out[1]*", "x")
    assert names(tmp_path) == ["out[1]*"]


def test_staging__sweeps_only_its_own_output(tmp_path: Path) -> None:
    left = _leave_staging_behind(tmp_path / "out")
    stage(tmp_path / "out2", "x")
    assert left.exists()


def test_staging__what_is_left_stays_when_continuing_is_refused(tmp_path: Path) -> None:
    left = _leave_staging_behind(tmp_path / "out")

    def refuse(_: Path) -> bool:
        raise StorageError.of("test", "", "no")

    with pytest.raises(StorageError), Staging(tmp_path / "out", force=False, can_continue=refuse):
        pass
    assert (left / CONTENT_NAME / "half").exists()
    with pytest.raises(StorageError), Staging(tmp_path / "other", force=False, can_continue=refuse):
        pass
    assert names(tmp_path) == [left.name]


def test_find_staging__tells_the_living_from_the_dead(tmp_path: Path) -> None:
    dead = _leave_staging_behind(tmp_path / "dead")
    with Staging(tmp_path / "alive", force=False) as staging:
        assert dict(find_staging(tmp_path)) == {dead: None, staging.directory: this_process()}
        assert remove_dead(dead)
    assert names(tmp_path) == []


def test_check_target__accepts_a_new_place_and_by_force_a_snapshot_or_an_empty_folder(tmp_path: Path) -> None:
    check_target(tmp_path / "out", [Location.local(tmp_path / "base")], force=False)
    make_snapshot(tmp_path / "old", "x")
    (tmp_path / "empty").mkdir()
    for name in ("out", "old", "empty"):
        check_target(tmp_path / name, [Location.local(tmp_path / "base")], force=True)


def _refusal(out: Path, inputs: list[Path], *, force: bool) -> str:
    with pytest.raises((OutputError, UnsupportedError)) as caught:
        check_target(out, map(Location.local, inputs), force=force)
    return caught.value.code


@pytest.mark.parametrize("force", [False, True])
def test_check_target__refuses_what_is_not_a_snapshot(tmp_path: Path, force: bool) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "theirs").write_text("x")
    make_snapshot(tmp_path / "snapshot", "x")
    (tmp_path / "link").symlink_to(tmp_path / "snapshot")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    codes = {name: _refusal(tmp_path / name, [], force=force) for name in ("file", "folder", "link", "dangling")}
    if force:
        assert codes.pop("folder") == "output.not-ours"
        assert set(codes.values()) == {"output.place"}
    else:
        assert set(codes.values()) == {"output.exists"}


@pytest.mark.parametrize("force", [False, True])
def test_check_target__refuses_an_input_the_working_folder_and_a_name_that_is_no_text(
    tmp_path: Path, force: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "models" / "base"
    make_snapshot(base, "x")
    (tmp_path / "alias").symlink_to(base)
    for out in (base, base / "inside", tmp_path / "models", tmp_path / "alias", tmp_path / "alias" / "inside"):
        assert _refusal(out, [base], force=force) == "output.place"
    assert _refusal(tmp_path / "of-no-text-\udcff", [base], force=force) == "path.encoding"
    (tmp_path / "empty" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "here")
    for out in (Path(), tmp_path / "empty" / "here", tmp_path / "empty"):
        assert _refusal(out, [base], force=force) == "output.place"


def test_staging__of_a_file_leaves_no_record_where_another_file_has_appeared(tmp_path: Path) -> None:
    out = tmp_path / "merged.safetensors"
    with Staging(out, force=False) as staging:
        (staging.path / out.name).write_text("new")
        staging.record_path.mkdir()
        out.write_text("theirs")
        with pytest.raises(ConflictError, match="was created"):
            staging.publish()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(out.name, "theirs")]


def test_temporary_folder__of_a_killed_process_is_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o1777)

    def die() -> None:
        with temporary_folder("search"):
            os.kill(os.getpid(), signal.SIGKILL)

    with temporary_folder("search"):
        assert run_forked(die) == -signal.SIGKILL
        removed = [garbage.is_removed for garbage in mergepipe.gc().garbage]
        assert (removed, len(list(tmp_path.iterdir()))) == ([True], 1)
    assert not list(tmp_path.iterdir())
    if os.geteuid() == 0 and run_forked(die):
        os.chown(next(tmp_path.iterdir()), 1, 1)
        assert mergepipe.gc().garbage == ()
