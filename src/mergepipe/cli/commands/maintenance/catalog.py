"""`mergepipe catalog`: what the catalog holds, and making it again."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.options import Home, PrintFlags
from mergepipe.cli.printing import print_report
from mergepipe.cli.registration import SectionedGroup, add_command

Roots = Annotated[
    list[str] | None, typer.Argument(metavar="[ROOT]...", help="Directories to look for snapshots in, at any depth.")
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    group = typer.Typer(cls=SectionedGroup, rich_markup_mode=None, no_args_is_help=True)
    add_command(group, rebuild, examples=("mergepipe catalog rebuild /models",))
    add_command(group, stats, examples=("mergepipe catalog stats",))
    app.add_typer(group, name="catalog", help="Look after the catalog.", rich_help_panel="Maintenance")


def rebuild(
    roots: Roots = None,
    *,
    home: Home = None,
    printing: PrintFlags,
) -> None:
    """Make the catalog again from the manifests under ROOT and where snapshots were.

    A damaged catalog is moved aside. Statistics are files of their own and stay.
    """
    from mergepipe import api

    report = api.rebuild_catalog(roots or (), home=home)
    from mergepipe.cli.render.catalog import rebuild_table

    print_report(report, rebuild_table, as_json=printing.as_json)


def stats(
    *,
    home: Home = None,
    printing: PrintFlags,
) -> None:
    """Say what the catalog holds and how large it is."""
    from mergepipe import api

    report = api.catalog_stats(home=home)
    from mergepipe.cli.render.catalog import catalog_table

    print_report(report, catalog_table, as_json=printing.as_json)
