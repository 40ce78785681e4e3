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
    roots: Annotated[
        list[str] | None, Argument("[DIR]...", "More directories to search for what dead runs left.")
    ] = None,
    *,
    dry_run: Annotated[bool, Flag("List what would be removed, and remove nothing.")] = False,
    home: Annotated[str | None, HOME] = None,
) -> Displayed:
    """Remove what dead runs left behind, and catalog rows of snapshots that no longer exist.

    Never removes a snapshot, or anything that a running process uses.
    """
    return mergepipe.gc(roots or (), dry_run=dry_run, home=home)


@command("mergepipe catalog rebuild /models", name="catalog rebuild")
def rebuild(
    roots: Annotated[
        list[str] | None,
        Argument("[ROOT]...", "Directories to search for snapshots, at any depth."),
    ] = None,
    *,
    home: Annotated[str | None, HOME] = None,
) -> Displayed:
    """Rebuild the catalog from the manifests under ROOT and at known paths of snapshots.

    Damaged records are removed and listed. Digests and statistics are kept.
    """
    return mergepipe.rebuild_catalog(roots or (), home=home)


@command("mergepipe catalog stats", name="catalog stats")
def stats(*, home: Annotated[str | None, HOME] = None) -> Displayed:
    """Print the contents and the size of the catalog."""
    return mergepipe.catalog_stats(home=home)
