"""For all tests: signals as in a terminal, an own home and temporary folder, no clock, cached bytecode, and profiles.

With `--no-fsync`, as in `make test`, nothing in a process of the suite waits for the disk: `os.fsync` refuses what is
not an open descriptor, and returns. What a crash may lose is tested on a model of a disk (`support/power.py`).

With `--sample`, as in `make test`, a tenth of the cases of tests marked `thorough` is run (`support/samples.py`).

Profiles of Hypothesis: `fast`, few examples and the same ones every time; `full`, for
`make test-slow`; others by HYPOTHESIS_PROFILE.
"""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from support.command_line import Runner, Workplace, make_workplace
from support.goldens import Goldens
from support.places import GOLDEN
from support.samples import left_out

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from support.s3_server import S3Server

_RELAXED = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]

settings.register_profile(
    "fast", max_examples=20, deadline=None, suppress_health_check=_RELAXED, database=None, derandomize=True
)
settings.register_profile("full", max_examples=60, deadline=None, suppress_health_check=_RELAXED, database=None)
settings.register_profile("nightly", max_examples=2000, deadline=None, suppress_health_check=_RELAXED, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))

# Workers and the many children of tests would each compile all of the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# Threads of torch spin while they wait for one another, and take the processor from the other worker.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A width that pytest-xdist sets, and settings of the machine that would decide what a test finds.
for _name in tuple(os.environ):
    if _name == "COLUMNS" or _name.startswith(("AWS_", "GOOGLE_", "AZURE_", "HF_", "HUGGINGFACE_", "XDG_")):
        os.environ.pop(_name)
# Children import the test machinery too.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that spare the waits for the disk, choose the fast suite, and write records anew."""
    parser.addoption("--sample", action="store_true", help="run one case in ten of each test marked thorough")
    parser.addoption("--no-fsync", action="store_true", help="check descriptors in os.fsync and do not wait")
    parser.addoption("--update-goldens", action="store_true", help="write what tests/surface compares with anew")


def _check_descriptor(fd: FileDescriptorLike) -> None:
    """Stand in for `os.fsync`."""
    os.fstat(fd if isinstance(fd, int) else fd.fileno())


def pytest_configure(config: pytest.Config) -> None:
    """Take signals as in a terminal: jobs in the background, or under nohup, inherit that they are ignored."""
    if config.getoption("--no-fsync"):
        os.fsync = _check_descriptor
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `--sample` does; tests that import torch come first, so that one worker gets them all."""
    if config.getoption("--sample"):
        left = left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left])
        items[:] = [item for item in items if item not in left]
    items.sort(key=lambda item: item.get_closest_marker("transformers") is None)
    if not all(find_spec(name) for name in ("torch", "transformers")):
        for item in items:
            if item.get_closest_marker("transformers"):
                item.add_marker(pytest.mark.skip(reason="needs the torch extra"))


def pytest_collection_finish() -> None:
    """Leave what was imported and collected out of later garbage collections, which are few: it stays to the end."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


_numbers = count()


def _new_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """Make a folder that no other test has; unlike `mktemp`, without listing those of all tests before."""
    folder = tmp_path_factory.getbasetemp() / f"{name}{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Replace pytest's fixture of this name, which takes longer with every test."""
    return _new_folder(tmp_path_factory, re.sub(r"\W", "_", request.node.name)[:30])


def _use_temporary_folder(patched: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a folder, and let this process and those that it starts put their temporary files there."""
    folder.mkdir(mode=0o700)
    patched.setenv("TMPDIR", str(folder))
    patched.setattr(tempfile, "tempdir", str(folder))


def _use_home(patched: pytest.MonkeyPatch, home: Path) -> None:
    """Let this process and those that it starts keep what is a user's in a folder, which is not made yet."""
    patched.setenv("HOME", str(home))
    patched.setenv("MERGEPIPE_HOME", str(home / "mergepipe"))
    patched.setenv("HF_HOME", str(home / "huggingface"))
    patched.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def _folders_of_fixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give fixtures that several tests share a home and a temporary folder that no other run has."""
    with pytest.MonkeyPatch.context() as patched:
        _use_temporary_folder(patched, tmp_path_factory.getbasetemp() / "shared")
        _use_home(patched, tmp_path_factory.getbasetemp() / "shared-home")
        yield


@pytest.fixture(autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or leaves anything in the user's home, catalog or temporary folder, or asks the Hub.

    The home and the catalog are not made yet.
    """
    number = next(_numbers)
    home = tmp_path_factory.getbasetemp() / f"home-{number}"
    _use_home(monkeypatch, home)
    # The name is short: paths of sockets, which Python's processes make there, have at most 107 bytes.
    _use_temporary_folder(monkeypatch, tmp_path_factory.getbasetemp() / f"t{number}")
    return home


@pytest.fixture(autouse=True)
def _nothing_durable_by_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journal by bytes alone: on a busy machine a tiny merge may take a second, and what is durable is kept."""
    monkeypatch.setattr("mergepipe.snapshots.work_log.UNIT_SECONDS", math.inf)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    """Runs a command in this process."""
    return Runner(capsys)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A family and a recipe in a folder of the test, in which commands run; `home` in it is theirs, not made yet."""
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return make_workplace(tmp_path)


@pytest.fixture
def goldens(request: pytest.FixtureRequest) -> Goldens:
    """The records of the surface; with `--update-goldens` they are written anew."""
    return Goldens(GOLDEN / "surface", request.config.getoption("--update-goldens"))


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    """An S3 with a bucket that outputs go to; tests of other servers have their own fixture of this name."""
    from support.bucket_outputs import bucket_server

    with bucket_server() as running:
        yield running


@pytest.fixture(scope="module")
def exact_reads() -> Iterator[None]:
    """Local inputs are read to the byte, not by whole pages as soon as the system has dropped them from its cache."""
    from mergepipe.storage import local

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(local, "resident_fraction", lambda *_: 1.0)
        yield


@pytest.fixture(scope="session")
def demo_files() -> Iterator[Path]:
    """A folder with what `make demo` writes, which no test changes; its path is short, so that no table is wrapped."""
    from support.demo_files import write_demo_files  # which few tests need

    with TemporaryDirectory(dir="/tmp") as parent:
        folder = Path(parent) / "demo"
        folder.mkdir()
        write_demo_files(folder)
        yield folder
