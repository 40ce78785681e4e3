"""Commands that clean up and look after the catalog: `gc`, `catalog rebuild`, `catalog stats`."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.printing import PrintOptions, print_report
from mergepipe.cli.registration import SectionedGroup, add_command
from mergepipe.core.flags import Flag
from mergepipe.options import HOME

SECTION = "Maintenance"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    examples = ("mergepipe gc --dry-run", "mergepipe gc /models")
    add_command(app, gc, *examples, section=SECTION)
    group = typer.Typer(cls=SectionedGroup, rich_markup_mode=None, no_args_is_help=True)
    add_command(group, rebuild, "mergepipe catalog rebuild /models")
    add_command(group, stats, "mergepipe catalog stats")
    app.add_typer(group, name="catalog", help="Look after the catalog.", rich_help_panel=SECTION)


def gc(
    roots: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DIR]...", help="Where else dead runs may have left something."),
    ] = None,
    *,
    dry_run: Annotated[bool, Flag("Say what would be removed, and remove nothing.")] = False,
    home: Annotated[str | None, HOME] = None,
    printing: PrintOptions,
) -> None:
    """Remove what dead runs left, and rows about what is gone.

    Nothing that a living process works on, and no snapshot, is ever removed.
    """
    from mergepipe import api

    report = api.gc(roots or (), dry_run=dry_run, home=home)
    print_report(report, printing)


def rebuild(
    roots: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ROOT]...", help="Directories to look for snapshots in, at any depth."),
    ] = None,
    *,
    home: Annotated[str | None, HOME] = None,
    printing: PrintOptions,
) -> None:
    """Make the catalog again from the manifests under ROOT and where snapshots were.

    A damaged catalog is moved aside. Statistics are files of their own and stay.
    """
    from mergepipe import api

    report = api.rebuild_catalog(roots or (), home=home)
    print_report(report, printing)


def stats(*, home: Annotated[str | None, HOME] = None, printing: PrintOptions) -> None:
    """Print the contents and the size of the catalog."""
    from mergepipe import api

    report = api.catalog_stats(home=home)
    print_report(report, printing)
