"""Load the library of compiled kernels that suits this processor.

One library is built for each level of the instruction set (`tools/kernels`). All give the same bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
from functools import cache
from pathlib import Path

from mergepipe.errors import MergePipeError, UnsupportedError

PACKAGE = Path(__file__).parent.parent
LIBRARIES = Path(__file__).parent / "built"
MODULES = (
    "core.blocks",
    "kernels.codec",
    "kernels.numerics",
    "kernels.rounding",
    "kernels.merge",
    "kernels.products",
    "kernels.reduce",
    "kernels.select",
    "kernels.ranked",
    "deltastore.symbols",
    "deltastore.bands",
    "deltastore.planes",
)
"""The modules of this package that compiled code depends on: those that define kernels, and what these import."""

_AVX2 = ("avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {"x86-64-v4": _AVX512, "x86-64-v3": _AVX2, "x86-64": ()},
    "aarch64": {"generic": ()},
}
"""The levels that are built for each kind of processor, the best first, with the features that each needs."""
_DIGEST_SYMBOL = "mergepipe_sources"


def machine() -> str:
    """Return the kind of this processor as `LEVELS` names it."""
    name = os.uname().machine
    return {"arm64": "aarch64"}.get(name, name)


def usable_levels() -> list[str]:
    """Return the levels that this processor can run, the best first."""
    features = _features()
    return [level for level, needed in LEVELS.get(machine(), {}).items() if features.issuperset(needed)]


def _features() -> set[str]:
    """Return the processor's features as Linux names them; none where it does not."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def library_path(level: str) -> Path:
    """Return the place of the library of a level."""
    return LIBRARIES / f"kernels-{level}.{'dylib' if sys.platform == 'darwin' else 'so'}"


@cache
def loaded_library() -> ctypes.CDLL:
    """Return the best library that this processor can run.

    Raises:
        UnsupportedError: `platform.unsupported`: no library was built for it, or it was built of other sources.
    """
    levels = usable_levels()
    path = next((path for path in map(library_path, levels) if path.is_file()), None)
    if path is None:
        message = f"no library for {machine()} on {sys.platform} is in this installation ({LIBRARIES})"
        raise _unsupported(message, "install a wheel for this platform, or build it from the source: `pip install .`")
    try:
        library = ctypes.CDLL(str(path))
        digest = built_of(library)
    except (OSError, ValueError, AttributeError) as error:  # it cannot be loaded, or is another library
        raise _unsupported(f"{path} is not the library of this package: {error}", "install the package again") from None
    if digest != sources_digest():
        message = f"the sources of kernels have changed since {path} was built"
        raise _unsupported(message, "build it again: `make kernels` in the clone, or `pip install -e .`")
    return library


def _unsupported(message: str, hint: str) -> MergePipeError:
    return UnsupportedError.of("platform.unsupported", "compiled kernels", message, hint)


def built_of(library: ctypes.CDLL) -> str:
    """Return the digest of the sources that a library was built of."""
    digest = ctypes.c_char.in_dll(library, _DIGEST_SYMBOL)
    return ctypes.string_at(ctypes.addressof(digest)).decode()


def sources_digest() -> str:
    """Hash the modules that compiled code depends on."""
    contents = [PACKAGE.joinpath(*module.split(".")).with_suffix(".py").read_bytes() for module in MODULES]
    return hashlib.sha256(b"\0".join(contents)).hexdigest()
