"""Links, foreign files and odd names where an output is made: what others own is never touched, or the run refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from odd_models import write_models

import mergepipe
from mergepipe.cli.commands.budgets import checked_page
from mergepipe.errors import OutputError
from mergepipe.snapshots.parts import Claimant, PartsJob
from mergepipe.snapshots.parts_places import FolderParts, parts_directory
from mergepipe.snapshots.staging import staging_directory
from mergepipe.storage import output, owned
from mergepipe.storage.ledger import Usage
from mergepipe.storage.owners import write_owner
from support.disk_families import tree_digest, weights_digest
from support.families import TINY, write_family
from support.faults import replaced, system_error
from support.model_folders import recipe_of
from support.public_names import OWNER_NAME
from support.refusals import refusal

MODELS = {"family/expert-1": {"weight": 0.6}, "family/expert-2": {"weight": 0.4}}
WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class Work:
    """Inputs, a snapshot made of them, a store of one of them, and a folder that is the user's."""

    root: Path

    @property
    def family(self) -> Path:
        return self.root / "family"

    @property
    def snapshot(self) -> Path:
        return self.root / "snapshot"

    @property
    def out(self) -> Path:
        return self.root / "results" / "out"

    @property
    def theirs(self) -> Path:
        return self.root / "theirs"

    def merge(self, out: Path, **options: Any) -> None:
        mergepipe.merge(self.root / "recipe.yml", out, catalog=False, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = Work(tmp_path_factory.mktemp("made"))
    write_family(work.family, TINY, 2)
    (work.root / "recipe.yml").write_text(json.dumps(recipe_of("linear", MODELS, "family/base", dtype="bfloat16")))
    work.merge(work.snapshot)
    mergepipe.pack(work.family / "base", [work.family / "expert-1"], work.root / "stores")
    work.theirs.mkdir()
    (work.theirs / "notes").write_text("precious")
    return work.root


@pytest.fixture
def work(made: Path, tmp_path: Path) -> Work:
    shutil.copytree(made, tmp_path / "work")
    for path in (tmp_path / "work").rglob("*"):
        os.utime(path, ns=(1, 1))
    (tmp_path / "work" / "results").mkdir()
    return Work(tmp_path / "work")


def state(*places: Path) -> list[tuple[str, int, int]]:
    """Digest, time and links of every file in some folders."""
    files = sorted(path for place in places for path in place.rglob("*") if path.is_file())
    return [(tree_digest(path), path.stat().st_mtime_ns, path.stat().st_nlink) for path in files]


def damage(snapshot: Path) -> None:
    with (snapshot / WEIGHTS).open("r+b") as stream:
        stream.seek(-2, os.SEEK_END)
        stream.write(b"\xff\xff")


def _repair_damaged(work: Work) -> None:
    damage(work.snapshot)
    mergepipe.repair(work.snapshot)


COMMANDS: dict[str, Callable[[Work], object]] = {
    "merge": lambda w: w.merge(w.out),
    "merge --budget": lambda w: w.merge(w.out, budget="60%"),
    "pack": lambda w: mergepipe.pack(w.family / "base", [w.family / "expert-2"], w.out.parent),
    "unpack": lambda w: mergepipe.unpack(w.root / "stores" / "expert-1", w.out, base=w.family / "base"),
    "repair": _repair_damaged,
}


def staging_of(command: str, work: Work) -> Path:
    if command == "repair":
        return staging_directory(work.root / "snapshot.repair")
    return staging_directory(work.out.with_name("expert-2") if command == "pack" else work.out)


refused = partial(refusal, kind=OutputError)


@pytest.mark.parametrize("command", COMMANDS)
def test_staging__that_is_not_ours_is_refused_by_every_command(work: Work, command: str) -> None:
    staging = staging_of(command, work)
    before = state(work.theirs, work.family)
    staging.symlink_to(work.theirs)
    error = refused(lambda: COMMANDS[command](work))
    assert error.code == "output.link"
    assert str(staging) in str(error)
    staging.unlink()
    shutil.copytree(work.theirs, staging)
    error = refused(lambda: COMMANDS[command](work))
    assert error.code == "output.not-ours"
    assert (staging / "notes").read_text() == "precious"
    assert state(work.theirs, work.family) == before
    shutil.rmtree(staging)
    staging.mkdir()  # of a run that was killed at once: it holds nothing that could be lost
    COMMANDS[command](work)
    assert not staging.exists()


@pytest.mark.thorough
@pytest.mark.parametrize("name", [WEIGHTS, "config.json", "mergepipe.blocks", "generation_config.json"])
@pytest.mark.parametrize("kind", ["to an input", "hard", "to nowhere"])
def test_repair__of_a_link_puts_a_file_in_its_place(work: Work, name: str, kind: str) -> None:
    place, target = work.snapshot / name, work.family / "expert-1" / WEIGHTS
    if kind == "to nowhere":
        target = work.root / "nowhere"
    wanted = place.read_bytes()
    place.unlink()
    (place.hardlink_to if kind == "hard" else place.symlink_to)(target)
    before = [(digest, time) for digest, time, _ in state(work.family)]
    mergepipe.repair(work.snapshot)
    assert place.read_bytes() == wanted
    assert not place.is_symlink()
    assert place.stat().st_nlink == 1
    assert [(digest, time) for digest, time, _ in state(work.family)] == before
    assert mergepipe.verify(work.snapshot).damages == ()
    assert target.exists() == (kind != "to nowhere")


def test_repair__does_not_follow_a_link_to_the_snapshot(work: Work) -> None:
    (work.root / "latest").symlink_to(work.snapshot)
    assert refused(lambda: mergepipe.repair(work.root / "latest")).code == "output.link"


def test_plan_and_page__are_not_written_through_links(work: Work) -> None:
    target, link = work.theirs / "notes", work.root / "plan.json"
    link.symlink_to(target)
    plan = mergepipe.plan(work.root / "recipe.yml", budget="60%", home=work.root / "home")
    assert refused(lambda: mergepipe.store_plan(plan, link)).code == "output.link"
    link.unlink()
    beside = owned.marked_name("plan.json", f".{os.getpid()}-0.mergepipe-new")
    (work.root / beside).symlink_to(target)
    assert refused(lambda: mergepipe.store_plan(plan, link)).code == "output.link"
    (work.root / "page.html").symlink_to(target)
    assert refused(lambda: checked_page(str(work.root / "page.html"))).code == "output.link"
    assert target.read_text() == "precious"
    assert (work.root / beside).is_symlink()


def test_staging__is_private_while_it_grows_and_the_output_is_not(work: Work) -> None:
    modes = []

    def note(_: object) -> None:
        modes.append(staging_directory(work.out).stat().st_mode & 0o777)

    staging_directory(work.out).mkdir(mode=0o777)
    work.merge(work.out, on_progress=note)
    assert modes[-1] == 0o700
    assert work.out.stat().st_mode & 0o777 == work.family.stat().st_mode & 0o777


# --- clean-up by name ---


def test_merge__leaves_everything_that_only_looks_like_its_staging(work: Work) -> None:
    other = staging_directory(work.out.with_name("out.mergepipe-b"))
    other.mkdir()
    write_owner(other, "out.mergepipe-b")
    (other / "log").write_text("resumable")
    shutil.copytree(work.theirs, work.out.with_name(".out.mergepipe-mine"))
    shutil.copytree(work.snapshot, work.out.with_name(".x.mergepipe-y"))
    shutil.copytree(work.snapshot, work.out.with_name(".z.mergepipe-staging"))
    moved = work.out.with_name(".moved.mergepipe-staging")
    shutil.copytree(other, moved)
    kept = [other, *work.out.parent.glob(".*")]
    before = {path: tree_digest(path) for path in kept}
    work.merge(work.out)
    assert {path: tree_digest(path) for path in kept} == before
    record = json.loads((other / OWNER_NAME).read_text())
    (other / OWNER_NAME).write_text(
        json.dumps({**record, "owner": {**record["owner"], "started": "0"}})
    )  # its process is dead
    collected = mergepipe.gc([work.out.parent], home=work.root / "home").garbage
    assert [each.what for each in collected] == [str(other)]
    assert {path: tree_digest(path) for path in kept if path != other} == {
        p: d for p, d in before.items() if p != other
    }


def test_force__refuses_where_files_lie_that_the_manifest_does_not_list(work: Work) -> None:
    out = work.snapshot
    notes = [out / each for each in ("a.txt", "b/c.txt", "d.txt", "e.txt")]
    for path in notes:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
    before = state(out)
    error = refused(lambda: work.merge(out, force=True))
    assert error.code == "output.not-ours"
    assert "a.txt, b/c.txt, d.txt and 1 more" in str(error)
    assert state(out) == before
    for path in notes:
        path.unlink()
    work.merge(out, force=True)


def test_force__looks_again_when_it_publishes(work: Work) -> None:
    def note(_: object) -> None:
        (work.snapshot / "notes").write_text("precious")

    error = refused(lambda: work.merge(work.snapshot, force=True, on_progress=note))
    assert error.code == "output.not-ours"
    assert (work.snapshot / "notes").read_text() == "precious"


# --- odd names and file systems ---


def test_merge__takes_every_name_that_the_file_system_takes(work: Work) -> None:
    for n_bytes in (236, 237, 255):
        out = work.out.with_name("ü" * (n_bytes // 2) + "x" * (n_bytes % 2))
        work.merge(out)
        assert weights_digest(out) == weights_digest(work.snapshot)
        work.merge(out, force=True)
    assert refused(lambda: work.merge(work.out.with_name("x" * 256))).code == "output.place"
    assert refused(lambda: work.merge(work.out.with_name("x" * 256), force=True)).code == "output.place"


def check_all_storage(work: Work, out: Path) -> None:
    """Merge in full and under a budget, verify, replace, damage and repair."""
    work.merge(out)
    assert weights_digest(out) == weights_digest(work.snapshot)
    work.merge(out.with_name("budgeted"), budget="60%")
    assert mergepipe.verify(out).damages == ()
    damage(out)
    mergepipe.repair(out)
    assert weights_digest(out) == weights_digest(work.snapshot)
    work.merge(out, force=True)
    mergepipe.pack(work.family / "base", [work.family / "expert-1"], out.parent / "stores")
    mergepipe.unpack(out.parent / "stores" / "expert-1", out.parent / "again")
    names = [path.name for path in (work.family / "expert-1").iterdir()]
    for name in names:
        assert (out.parent / "again" / name).read_bytes() == (work.family / "expert-1" / name).read_bytes()
    assert [path.name for path in out.parent.glob(".*")] == []


@pytest.mark.thorough
@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_storage__works_without_what_some_file_systems_lack(work: Work, number: int) -> None:
    """Without reserving space, locks, direct writes, renaming with flags, and synchronising directories."""

    def refuse(_: Callable[..., object]) -> Callable[..., object]:
        def refused(*_args: object, **_options: object) -> object:
            raise system_error(number)

        return refused

    def refuse_folders(fsync: Callable[[int], None]) -> Callable[[int], None]:
        def synced(descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112 - an open folder
                raise system_error(number)
            fsync(descriptor)

        return synced

    with (
        replaced(os, "posix_fallocate", refuse),
        replaced(fcntl, "flock", refuse),
        replaced(os, "fsync", refuse_folders),
        replaced(owned, "renameat2", lambda _: lambda *_: False),
        replaced(output, "switch_direct", lambda _: lambda *_, **__: False),
    ):
        check_all_storage(work, work.out)


MAKE_FILE_SYSTEM = {"ext2": ["mkfs.ext2", "-q", "-F"], "vfat": ["mkfs.vfat"], "tmpfs": []}


@pytest.fixture(params=MAKE_FILE_SYSTEM)
def mounted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small file system of some kind, mounted for the test; skipped where that cannot be had."""
    kind, place, image = str(request.param), tmp_path / "mounted", tmp_path / "image"
    make = MAKE_FILE_SYSTEM[kind]
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    if make and shutil.which(make[0]) is None:
        pytest.skip(f"{make[0]} is not installed")
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)]
    if make:
        with image.open("xb") as stream:
            stream.truncate(64 << 20)
        subprocess.run([*make, str(image)], check=True, capture_output=True)
        mount = ["mount", "-t", kind, "-o", "loop", str(image), str(place)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mounting {kind} is refused: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_storage__works_on_other_file_systems(work: Work, mounted: Path) -> None:
    check_all_storage(work, mounted / "results" / "out")


# --- the clock jumps by years: what a living process works on is not taken for garbage


TEN_YEARS = 10 * 365 * 24 * 3600.0
JUMPS = (TEN_YEARS, -TEN_YEARS)
HOLD = """
import fcntl, os, sys
from pathlib import Path
from mergepipe.storage.owners import try_lock, write_owner
staging = Path(sys.argv[1])
staging.mkdir()
folder = os.open(staging, os.O_RDONLY)
assert try_lock(folder)
write_owner(staging, sys.argv[2])
print("working", flush=True)
sys.stdin.read()
"""


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set the clock of this process."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + seconds)


@pytest.fixture
def working(tmp_path: Path) -> Iterator[Path]:
    """The staging directory of a process that works in it."""
    staging = staging_directory(tmp_path / "out")
    command = [sys.executable, "-c", HOLD, str(staging), "out"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    yield staging
    process.communicate()


@pytest.mark.parametrize("seconds", JUMPS)
def test_gc__after_a_jump_of_the_clock_leaves_the_staging_of_a_living_run(
    working: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    jump(monkeypatch, seconds)
    report = mergepipe.gc([tmp_path], home=tmp_path / "home")
    assert report.garbage == ()
    assert len(report.living) == 1
    assert working.is_dir()


@pytest.mark.parametrize("seconds", JUMPS)
def test_gc__after_a_jump_of_the_clock_leaves_the_parts_of_a_living_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    job = PartsJob("out", mergepipe.__version__, "0" * 32, (("a.safetensors", 9),))
    place = FolderParts(tmp_path / "out", job)
    place.open()
    claim = Claimant(place, "1/1").claim(0, 10)
    assert claim is not None
    assert [claim.is_open for claim in place.account().claims] == [True]
    directory = parts_directory(tmp_path / "out", "0" * 32)
    jump(monkeypatch, seconds)
    assert mergepipe.gc([tmp_path], home=tmp_path / "home").garbage == ()
    assert directory.is_dir()
    place.spend(claim, Usage())  # nobody works there any more: only the clock can tell
    assert len(mergepipe.gc([tmp_path], home=tmp_path / "home").garbage) == (seconds > 0)


@pytest.mark.parametrize("seconds", JUMPS)
def test_merge__during_which_the_clock_jumps_gives_the_same_bytes_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """Each look at the clock is another jump."""
    write_models(tmp_path)
    recipe = recipe_of("linear", {tmp_path / "expert": {"weight": 0.5}}, tmp_path / "base")
    options = mergepipe.MergeOptions(home=tmp_path / "home")
    mergepipe.merge(recipe, tmp_path / "quiet", options=options)
    now, n_looks = time.time, iter(range(1 << 30))
    monkeypatch.setattr(time, "time", lambda: now() + seconds * (next(n_looks) % 3))
    mergepipe.merge(recipe, tmp_path / "jumping", options=options)
    assert mergepipe.verify(tmp_path / "jumping").is_sound
    weights = [sorted((tmp_path / name).glob("*.safetensors")) for name in ("quiet", "jumping")]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]]
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []
