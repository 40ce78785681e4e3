"""Compares a source archive with the checkout that it was built from: `python tests/wheel/source_archive.py ARCHIVE`.

Every file that git tracks is in it, but for what only the repository itself needs; and nothing else but what the build
writes.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

ONLY_IN_THE_REPOSITORY = (".ci/", ".github/", ".gitignore", ".pre-commit-config.yaml", ".readthedocs.yaml")
WRITTEN_BY_THE_BUILD = ("PKG-INFO", "setup.cfg", "src/mergepipe.egg-info/")


def archived_files(archive: Path) -> set[str]:
    """Return the files of a source archive, without its top folder."""
    with tarfile.open(archive) as members:
        return {member.name.partition("/")[2] for member in members if member.isfile()}


def tracked_files() -> set[str]:
    """Return the files of the checkout that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return {name for name in listed.split("\0") if name and Path(name).exists()}


def differences(archived: set[str], tracked: set[str]) -> list[str]:
    """Name every file that is missing in the archive, or that should not be in it."""
    missing = [name for name in tracked - archived if not name.startswith(ONLY_IN_THE_REPOSITORY)]
    surplus = [name for name in archived - tracked if not name.startswith(WRITTEN_BY_THE_BUILD)]
    return [f"not in the archive: {name}" for name in sorted(missing)] + [
        f"in the archive, and not tracked: {name}" for name in sorted(surplus)
    ]


def main(archive: str) -> int:
    """Compare; 1 if there is a difference."""
    archived = archived_files(Path(archive))
    problems = differences(archived, tracked_files())
    print("\n".join(problems) or f"source archive: {len(archived)} files")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
