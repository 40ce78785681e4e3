"""Write HTML pages where the user asks for them, and refuse places that could not be written before the work begins."""

from __future__ import annotations

from pathlib import Path


def check_page(path: Path) -> None:
    """Refuse a page that could not be written, before anything is done."""
    from mergepipe.errors import NotFoundError, OutputError

    if not path.absolute().parent.is_dir():
        raise NotFoundError.of("storage.not-found", path.parent, "no such directory", "make it, or choose another")
    if path.is_symlink():
        message = "is a link, and nothing is written through links"
        raise OutputError.of("output.link", path, message, "name the file itself")
    if path.exists() and (not path.is_file() or path.suffix not in (".html", ".htm")):
        raise OutputError.of("output.not-ours", path, "exists, and is not an HTML file", "choose another name")


def write_page(path: Path, page: str) -> None:
    """Write a page in one step: what is there is replaced, or stays as it is."""
    from mergepipe.storage.ledger import Ledger
    from mergepipe.storage.output import replace_durably

    replace_durably(path, page.encode(), Ledger())
