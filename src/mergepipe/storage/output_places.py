"""The places that outputs go to: the one function by which a verb takes the place of an output from its caller."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final

from mergepipe.errors import OutputError
from mergepipe.storage.location import HUB_SCHEME, OBJECT_SCHEMES, WEB_SCHEMES, Location, meant_address

HERE: Final = ("",)
"""The schemes of an output that is a folder or file of this machine, and nothing else."""
ANYWHERE: Final = (*HERE, *OBJECT_SCHEMES, HUB_SCHEME)
ELSEWHERE: Final = (*OBJECT_SCHEMES, HUB_SCHEME)

_FILE_SUFFIXES: Final = (".safetensors", ".safetensor", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx")
_KINDS: Final = {
    **dict.fromkeys(HERE, "a place of this machine"),
    **dict.fromkeys(OBJECT_SCHEMES, "a bucket (s3://, gs://, az://)"),
    HUB_SCHEME: "the Hub (hf://org/name)",
}


def output_place(place: str | os.PathLike[str] | Location, schemes: Collection[str] = HERE, hint: str = "") -> Location:
    """Return the location of an output that a caller names, refused unless its scheme is among `schemes`.

    Makes no request and computes nothing, so that a place that takes no such output is refused first.

    Raises:
        OutputError: `output.place`.
        RecipeError: `location.invalid`, it names no place.
    """
    address = meant_address(place) if isinstance(place, str) else ""
    if address:
        raise OutputError.of("output.place", place, "is not an address", f"write {address}, or ./{place} for a path")
    location = Location.of(place)
    if location.scheme in schemes:
        return location
    if location.scheme in WEB_SCHEMES:
        kind = "a web server, to which outputs cannot be written"
    elif location.scheme in _KINDS:
        kind = f"{_KINDS[location.scheme]}, where this output cannot be written"
    else:
        kind = f"not a known place: outputs cannot be written to {location.scheme}://"
    allowed = list(dict.fromkeys(_KINDS[scheme] for scheme in schemes))
    raise OutputError.of("output.place", location, f"is {kind}", hint or f"name {' or '.join(allowed)}")


def folder_place(place: str | os.PathLike[str] | Location, schemes: Collection[str] = HERE, hint: str = "") -> Location:
    """Return the location of an output that is a folder, or a prefix of a bucket; raises as `output_place`."""
    location = output_place(place, schemes, hint)
    refuse_file_name(location)
    return location


def refuse_file_name(location: Location) -> None:
    """Refuse the name of a file of weights for an output that is a folder."""
    if location.suffix in _FILE_SUFFIXES:
        message = "is the name of a file, and the output is a folder"
        raise OutputError.of("output.place", location, message, f"write {location.parent / location.stem}")
