"""Command that measures parts of `make reproduce`, and writes docs/benchmarks from what is stored."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import BenchmarkError
from benchmarks.reproduce.parts import Part
from benchmarks.reproduce.registry import PARTS
from benchmarks.reproduce.results import DEFAULT_ANEW, DEFAULT_FOLDER, Results, ResultsError, differences
from benchmarks.reproduce.sizes import SIZES, Size
from benchmarks.reproduce.workplace import NoRoomError, Workplace
from benchmarks.reproduce.writing import write_pages
from mergepipe.errors import MergePipeError

DEFAULT_PLOTS_PYTHON = Path(".venv-plots/bin/python")
DEFAULT_WORK = Path(".bench/reproduce")


@dataclass(frozen=True, slots=True)
class Folders:
    """Where results are: the stored ones, and those that are measured anew beside them. `replace` the stored ones."""

    stored: Path
    anew: Path
    replace: bool

    def open(self, part: str, size: Size) -> tuple[Results, Results | None]:
        """Open the results to add to, and the stored ones to compare them with at the end, if there are any.

        Stored results that are not complete are gone on with; next to complete ones, or such of another size, the part
        is measured anew, going on where an earlier such run was stopped.
        """
        stored = Results.stored(self.stored, part)
        if stored is None or self.replace or (not stored.is_complete and stored.size == size.to_json()):
            return Results.open(self.stored, part, size.to_json(), replace=self.replace), None
        earlier = Results.stored(self.anew, part)
        is_stale = earlier is not None and (earlier.is_complete or earlier.size != size.to_json())
        return Results.open(self.anew, part, size.to_json(), replace=is_stale), stored


def measure_parts(parts: Sequence[Part], size: Size, place: Workplace, folders: Folders, *, keep: bool) -> None:
    """Measure parts, and print how they differ from stored results; delete the families, unless to `keep` them.

    Raises:
        NoRoomError: the disk has not the room for all parts, and nothing was begun.
    """
    place.check_room(max(part.needs(size).disk_bytes for part in parts))
    for part in parts:
        print(f"{part.name} at size {size.name}: {part.needs(size)}", flush=True)
        results, stored = folders.open(part.name, size)
        part.measure(place, size, results)
        results.finish()
        if stored is not None:
            print("\n".join(differences(stored, results)), flush=True)
    if not keep:
        place.remove()


def _list(parts: Mapping[str, Part], size: Size) -> None:
    for part in parts.values():
        print(f"{part.name:<12} {part.summary}; at size {size.name}: {part.needs(size)}")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.reproduce", description=__doc__)
    parser.add_argument("action", choices=("list", "measure", "pages"))
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; all without one")
    parser.add_argument("--size", choices=list(SIZES), default="0.6b")
    parser.add_argument("--max-experts", type=int, metavar="K", help="leave larger numbers of experts out: less disk")
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, help="families and outputs, deleted at the end")
    parser.add_argument("--results", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--plots-python", type=Path, default=DEFAULT_PLOTS_PYTHON, help="a Python with matplotlib")
    parser.add_argument(
        "--anew", type=Path, default=DEFAULT_ANEW, help="results of parts that are stored as complete already"
    )
    parser.add_argument("--replace", action="store_true", help="measure stored results again, and overwrite them")
    parser.add_argument("--keep", action="store_true", help="do not delete the families at the end")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.parts if name not in PARTS]
    if unknown:
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    parts = {name: PARTS[name] for name in options.parts or PARTS}
    size = SIZES[options.size].up_to(options.max_experts)
    try:
        match options.action:
            case "list":
                _list(parts, size)
            case "pages":
                write_pages(PARTS, options.results, options.results.parent, options.plots_python)
            case _:
                place = Workplace(options.work.absolute())
                folders = Folders(options.results, options.anew, options.replace)
                measure_parts(list(parts.values()), size, place, folders, keep=options.keep)
    except (BenchmarkError, NoRoomError, ResultsError, MergePipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
