"""`mergepipe check`: say what a merge would do, or everything that is wrong with its recipe."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import AllowDropped, Lenient, PrintFlags, RecipePath, ShardSize, Strict
from mergepipe.cli.printing import print_text
from mergepipe.cli.registration import add_command
from mergepipe.cli.sizes import parse_size
from mergepipe.options import DEFAULT_SHARD_BYTES

EXAMPLES = (
    "mergepipe check recipe.yml",
    "mergepipe check --schema > recipe.schema.json",
)


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add_command(app, check, section="Merging", examples=EXAMPLES)


def _print_schema(wanted: bool) -> None:
    if wanted:
        from mergepipe.recipes.schema import schema_text

        print(schema_text(), end="")
        raise typer.Exit(0)


Schema = Annotated[
    bool,
    typer.Option("--schema", is_eager=True, callback=_print_schema, help="Print the JSON schema of recipes, and exit."),
]


def check(
    recipe: RecipePath,
    *,
    shard_size: ShardSize = None,
    allow_dropped: AllowDropped = None,
    strict: Strict = False,
    lenient: Lenient = False,
    schema: Schema = False,  # noqa: ARG001 - printed before there is a command
    printing: PrintFlags,
) -> None:
    """Say what a merge of RECIPE would do.

    Reads no tensor data, and lists everything that is wrong at once.
    """
    shard_bytes = None if shard_size is None else parse_size(shard_size, "--shard-size")
    import shutil
    from pathlib import Path

    from mergepipe import api

    report = api.check(
        recipe,
        shard_bytes=DEFAULT_SHARD_BYTES if shard_bytes is None else shard_bytes,
        allow_dropped=allow_dropped or (),
        strict=strict,
        lenient=lenient,
    )
    free_bytes = shutil.disk_usage(Path.cwd()).free
    if printing.as_json:
        from mergepipe.cli.render.json import check_json

        print(check_json(report, free_bytes))
    else:
        from mergepipe.cli.render.merges import check_table

        print_text(check_table(report, free_bytes))
