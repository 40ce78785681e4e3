"""Build the libraries of compiled kernels into a folder: `python -m tools.kernels.building FOLDER [LEVEL ...]`.

Each level is compiled in a process of its own, as numba compiles for one processor in a process. They are linked by the
compiler of the package `ziglang`, against an old C library; where that is not installed, by the system's.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mergepipe.kernels.library import LEVELS, library_path, machine, usable_levels

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = Path(__file__).with_name("runtime.c")
_OLDEST_GLIBC = (2, 17)
_LINKED_AS = ["-shared", "-O2", "-fPIC", "-fvisibility=hidden"]


class BuildError(Exception):
    """The libraries cannot be built here, and why."""


def build(folder: Path, levels: Sequence[str]) -> list[Path]:
    """Compile and link the libraries of some levels into a folder; return their files.

    Raises:
        BuildError: something that is needed is missing, or failed.
    """
    if not levels:
        raise BuildError(f"no kernels are built for {machine()} on {sys.platform}; use x86-64 or arm64")
    linker = _linker()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        objects = {level: Path(work, f"{level}.o") for level in levels}
        _compile(objects)
        for level, compiled in objects.items():
            target = folder / library_path(level).name
            built = Path(work, target.name)
            _run([*linker, *_LINKED_AS, "-o", str(built), str(compiled), str(RUNTIME), "-lm"])
            _replace(built, target)
    return [folder / library_path(level).name for level in levels]


def _compile(objects: dict[str, Path]) -> None:
    """Compile levels into object files, all at the same time."""
    search_path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search_path}
    processes = {}
    for level, target in objects.items():
        command = [sys.executable, "-m", "tools.kernels.compiling", level, str(target)]
        processes[level] = subprocess.Popen(command, env=environment)
    failed = [level for level, process in processes.items() if process.wait() != 0]
    if failed:
        raise BuildError(f"the kernels for {', '.join(failed)} could not be compiled; numba says above why")


def is_portable() -> bool:
    """Whether libraries are linked for every Linux with glibc, not for this one alone."""
    return importlib.util.find_spec("ziglang") is not None and platform.libc_ver()[0] == "glibc"


def portable_tag(platform_tag: str) -> str:
    """Return the tag of a wheel with such libraries for a platform, as `linux_x86_64`."""
    oldest = "_".join(map(str, _OLDEST_GLIBC))
    return platform_tag.replace("linux_", f"manylinux_{oldest}_", 1) if is_portable() else platform_tag


def _linker() -> list[str]:
    """Return the command that compiles C and links a shared library that leaves nothing open."""
    strict = ["-Wl,-z,defs"] if sys.platform == "linux" else []  # what is left open is an error elsewhere anyway
    if is_portable():
        oldest = ".".join(map(str, _OLDEST_GLIBC))
        return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine()}-linux-gnu.{oldest}", *strict]
    for name in ("cc", "gcc", "clang"):
        if (found := shutil.which(name)) is not None:
            return [found, *strict]
    raise BuildError("no linker for the kernels: neither the package ziglang nor cc is there; `pip install ziglang`")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"the kernels could not be linked by {command[0]}: {done.stderr.strip()}")


def _replace(built: Path, target: Path) -> None:
    """Put a file in its place in one step: a process that has loaded the one before keeps that."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.copyfile(built, beside)
    beside.replace(target)


def all_levels() -> list[str]:
    """Return the levels that a wheel for this kind of processor holds."""
    return list(LEVELS.get(machine(), {}))


def own_level() -> list[str]:
    """Return the best level that this processor can run."""
    return usable_levels()[:1]


def main(arguments: Sequence[str]) -> int:
    """Build some levels, or the best that this processor can run; 1 where that is not possible."""
    folder, *levels = arguments
    try:
        files = build(Path(folder), levels or own_level())
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(map(str, files)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
