"""`mergepipe ls`, `show` and `lineage`: the snapshots there are, and what they were made from."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import AsJson, Debug, Home
from mergepipe.cli.running import print_report
from mergepipe.core.escaping import printable_lines

SnapshotName = Annotated[
    str, typer.Argument(metavar="SID|PATH", help="A snapshot's directory, its sid, or four or more first digits of it.")
]

AsDot = Annotated[bool, typer.Option("--dot", help="Print a graph in the DOT language.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("ls")(list_snapshots)
    app.command("show")(show)
    app.command("lineage")(lineage)


def list_snapshots(
    *,
    home: Home = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """List the snapshots that the catalog knows, newest first."""
    from mergepipe import api

    found = api.list_snapshots(home=home)
    if as_json:
        from mergepipe.cli.render.json import to_json

        print(to_json({"snapshots": found}))
    else:
        from mergepipe.cli.render.catalog import snapshots_table

        print(printable_lines(snapshots_table(found)))


def show(
    snapshot: SnapshotName,
    *,
    home: Home = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Show one snapshot: how it was made, from what, what was read."""
    from mergepipe import api

    found = api.show(snapshot, home=home)
    from mergepipe.cli.render.catalog import snapshot_table

    print_report(found, snapshot_table, as_json=as_json)


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
