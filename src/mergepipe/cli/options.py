"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import typer

RecipePath: TypeAlias = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file. Paths in it are relative to it.")
]
ShardSize: TypeAlias = Annotated[
    str | None,
    typer.Option("--shard-size", metavar="SIZE", help="Largest output file, e.g. 5GB.  [default: 5GB]"),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print one JSON object, and no progress.")]
Debug: TypeAlias = Annotated[bool, typer.Option("--debug", help="On failure, print the traceback too.")]
