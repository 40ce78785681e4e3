"""Builds the libraries of compiled kernels with the package; everything else is in pyproject.toml."""

from __future__ import annotations

import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import ExecError

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
KERNELS = "src/mergepipe/kernels/built"


class BuildWithKernels(build_py):
    """Copies the package's files and compiles its kernels: for a wheel of every level of the instruction set.

    An editable installation gets its library in the source folder, for this processor alone.
    """

    def run(self) -> None:
        super().run()
        from tools.kernels.building import BuildError, all_levels, build, own_level

        folder = ROOT / KERNELS if self.editable_mode else Path(self.build_lib, "mergepipe/kernels/built")
        try:
            build(folder, own_level() if self.editable_mode else all_levels())
        except BuildError as error:
            raise ExecError(str(error)) from error


class PlatformWheel(bdist_wheel):
    """A wheel for one platform and every Python: the libraries do not use Python."""

    def get_tag(self) -> tuple[str, str, str]:
        from tools.kernels.building import portable_tag

        return "py3", "none", portable_tag(super().get_tag()[2])


class DistributionWithLibraries(Distribution):
    """A distribution with files for one platform."""

    def has_ext_modules(self) -> bool:
        return True


setup(
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
    distclass=DistributionWithLibraries,
)
