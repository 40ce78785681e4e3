"""An optional catalog of a run: its first failure becomes a notice, and the run goes on without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mergepipe.catalog.catalog import Catalog, is_catalog_error
from mergepipe.errors import MergePipeError

T = TypeVar("T")


class CatalogLink:
    """An optional catalog: its first failure becomes a notice, and from then on it is not used.

    Where it is `required`, trouble is an error. `home` is its directory, None where it is not used.
    """

    def __init__(self, home: Path | None, *, required: bool = False) -> None:
        self.notices: list[str] = []
        self.home = home
        self._required = required

    def use(self, action: Callable[[Catalog], T]) -> T | None:
        """Call `action` with the catalog; return None where no catalog is usable."""
        if self.home is None:
            return None
        try:
            return action(Catalog(self.home))
        except MergePipeError as error:
            if self._required or not is_catalog_error(error):
                raise
            self.notices.append(f"the catalog is not used: {error}")
            self.home = None
            return None
