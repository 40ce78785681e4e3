"""Render self-contained HTML pages from the templates of the package."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from importlib import resources

from jinja2 import Environment, FunctionLoader, StrictUndefined

import mergepipe
from mergepipe.cli.render.layout import number_text, share_text
from mergepipe.core.escaping import as_line
from mergepipe.core.units import format_bytes, format_seconds


def render_page(template: str, made: datetime | None, **values: object) -> str:
    """Render a template with the version and the time it was made; the page loads nothing from anywhere."""
    when = "" if made is None else f"{made:%Y-%m-%d %H:%M} UTC"
    return _environment().get_template(template).render(version=mergepipe.__version__, made=when, **values)


@cache
def _environment() -> Environment:
    """Return what compiles the templates and keeps them for the next pages of this process."""
    environment = Environment(
        loader=FunctionLoader(_template_text), undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, autoescape=True, finalize=as_line,
    )  # fmt: skip
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "number": number_text}
    environment.globals |= {"share": share_text}
    return environment


def _template_text(name: str) -> str:
    return resources.files("mergepipe.cli.render").joinpath("templates", name).read_text(encoding="utf-8")
