"""`mergepipe lineage`: show all that went into a snapshot."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import AsJson, Debug, Home, SnapshotName
from mergepipe.core.escaping import printable_lines

AsDot = Annotated[bool, typer.Option("--dot", help="Print a graph in the DOT language.")]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("lineage")(lineage)


def lineage(
    snapshot: SnapshotName,
    *,
    dot: AsDot = False,
    home: Home = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Show all that went into a snapshot, through all generations."""
    from mergepipe import api

    nodes = api.lineage(snapshot, home=home)
    if as_json:
        from mergepipe.cli.render.json import to_json

        print(to_json({"nodes": nodes}))
    elif dot:
        from mergepipe.cli.render.snapshots import lineage_dot

        print(printable_lines(lineage_dot(nodes)))
    else:
        from mergepipe.cli.render.catalog import lineage_tree

        print(printable_lines(lineage_tree(nodes)))
