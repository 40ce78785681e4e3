"""Use a catalog where there is one: the first failure becomes a notice, and the run goes on without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import is_catalog_error
from mergepipe.errors import MergePipeError

T = TypeVar("T")


class CatalogLink:
    """An optional catalog: its first failure becomes a notice, and from then on it is not used.

    Where it is `required`, trouble is an error.
    """

    def __init__(self, home: Path | None, *, required: bool = False) -> None:
        self.notices: list[str] = []
        self._home = home
        self._required = required
        self._catalog: Catalog | None = None

    @property
    def home(self) -> Path | None:
        """The catalog's directory; None where it is not used."""
        return self._home

    def use(self, action: Callable[[Catalog], T]) -> T | None:
        """Call `action` with the catalog, opening it on first use; return None where no catalog is usable."""
        if self._home is None:
            return None
        try:
            if self._catalog is None:
                self._catalog = Catalog.open(self._home)
            return action(self._catalog)
        except MergePipeError as error:
            if self._required or not is_catalog_error(error):
                raise
            self.notices.append(f"the catalog is not used: {error}")
            self.close()
            return None

    def close(self) -> None:
        """Close the catalog; nothing is recorded afterwards."""
        self._home = None
        if self._catalog is not None:
            catalog, self._catalog = self._catalog, None
            catalog.close()
