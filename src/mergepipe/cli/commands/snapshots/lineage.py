"""`mergepipe lineage`: show all that went into a snapshot, or all that was made from it."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import Home, PrintFlags, SnapshotName
from mergepipe.cli.registration import add_command
from mergepipe.core.escaping import printable_lines

AsDot = Annotated[bool, typer.Option("--dot", help="Print a graph in the DOT language.")]
Down = Annotated[bool, typer.Option("--down", help="Show what was made from the snapshot instead.")]

EXAMPLES = (
    "mergepipe lineage merged/",
    "mergepipe lineage merged/ --down",
    "mergepipe lineage merged/ --dot | dot -Tsvg > lineage.svg",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, lineage, section="Snapshots", examples=EXAMPLES)


def lineage(
    snapshot: SnapshotName,
    *,
    down: Down = False,
    dot: AsDot = False,
    home: Home = None,
    printing: PrintFlags,
) -> None:
    """Show all that went into a snapshot, or all that was made from it, through all generations."""
    from mergepipe import api

    nodes = api.lineage(snapshot, down=down, home=home)
    if printing.as_json:
        from mergepipe.cli.render.json import report_json

        print(report_json({"nodes": nodes}))
    elif dot:
        from mergepipe.cli.render.snapshots import lineage_dot

        print(printable_lines(lineage_dot(nodes, down=down)))
    else:
        from mergepipe.cli.render.catalog import lineage_tree

        print(printable_lines(lineage_tree(nodes, down=down)))
