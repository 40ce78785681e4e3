"""`mergepipe check`: say what a merge would do, or everything that is wrong with its recipe."""

from __future__ import annotations

import typer

from mergepipe.cli.options import AsJson, Debug, RecipePath, ShardSize
from mergepipe.cli.sizes import parse_size


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("check")(check)


def check(
    recipe: RecipePath,
    *,
    shard_size: ShardSize = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Say what a merge of RECIPE would do.

    Reads no tensor data, and lists everything that is wrong at once.
    """
    shard_bytes = None if shard_size is None else parse_size(shard_size, "--shard-size")
    import shutil
    from pathlib import Path

    from mergepipe import session as api

    report = api.check(recipe, shard_bytes=api.DEFAULT_SHARD_BYTES if shard_bytes is None else shard_bytes)
    free_bytes = shutil.disk_usage(Path.cwd()).free
    if as_json:
        from mergepipe.report.as_json import check_json

        print(check_json(report, free_bytes))
    else:
        from mergepipe.report.tables import check_table

        print(check_table(report, free_bytes))
