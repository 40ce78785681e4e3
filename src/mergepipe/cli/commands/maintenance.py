"""Commands that clean up and look after the catalog: `gc`, `catalog rebuild`, `catalog stats`."""

from __future__ import annotations

from typing import Annotated

import mergepipe
from mergepipe.cli.app import command
from mergepipe.core.display import Displayed
from mergepipe.core.flags import Argument, Flag
from mergepipe.options import HOME


@command("mergepipe gc --dry-run", "mergepipe gc /models")
def gc(
    roots: Annotated[list[str] | None, Argument("[DIR]...", "Where else dead runs may have left something.")] = None,
    *,
    dry_run: Annotated[bool, Flag("Say what would be removed, and remove nothing.")] = False,
    home: Annotated[str | None, HOME] = None,
) -> Displayed:
    """Remove what dead runs left, and rows about what is gone.

    Nothing that a living process works on, and no snapshot, is ever removed.
    """
    return mergepipe.gc(roots or (), dry_run=dry_run, home=home)


@command("mergepipe catalog rebuild /models", name="catalog rebuild")
def rebuild(
    roots: Annotated[
        list[str] | None,
        Argument("[ROOT]...", "Directories to look for snapshots in, at any depth."),
    ] = None,
    *,
    home: Annotated[str | None, HOME] = None,
) -> Displayed:
    """Make the catalog again from the manifests under ROOT and where snapshots were.

    Damaged records are removed, and listed. Digests and statistics stay.
    """
    return mergepipe.rebuild_catalog(roots or (), home=home)


@command("mergepipe catalog stats", name="catalog stats")
def stats(*, home: Annotated[str | None, HOME] = None) -> Displayed:
    """Print the contents and the size of the catalog."""
    return mergepipe.catalog_stats(home=home)
