"""The settings of the Hugging Face tools: endpoint, token, cache folder and offline mode."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

from mergepipe.errors import RecipeError, UnsupportedError

DEFAULT_ENDPOINT = "https://huggingface.co"
TRUE_TEXTS = ("1", "ON", "YES", "TRUE")
TOKEN_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class HubSettings:
    """The Hub's settings in the environment. The token shows in no text of this value."""

    endpoint: str
    cache_folder: Path
    token: str = field(default="", repr=False)
    is_offline: bool = False


def hub_settings(environment: Mapping[str, str] | None = None) -> HubSettings:
    """Read the settings as the Hugging Face tools do, from their variables and the token of `hf auth login`.

    Raises:
        RecipeError: `hub.endpoint`, HF_ENDPOINT is no address of a web server.
    """
    variables = os.environ if environment is None else environment
    home = _home(variables)
    cache = variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE")
    return HubSettings(
        _endpoint(variables.get("HF_ENDPOINT") or DEFAULT_ENDPOINT),
        _expanded(cache, variables) if cache else home / "hub",
        _token(variables, home),
        any(_is_true(variables.get(name)) for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")),
    )


def _home(variables: Mapping[str, str]) -> Path:
    if home := variables.get("HF_HOME"):
        return _expanded(home, variables)
    caches = variables.get("XDG_CACHE_HOME")
    return (_expanded(caches, variables) if caches else _expanded("~/.cache", variables)) / "huggingface"


def _expanded(text: str, variables: Mapping[str, str]) -> Path:
    """Replace `~` by the user's home."""
    if (text == "~" or text.startswith("~/")) and variables.get("HOME"):
        return Path(variables["HOME"]) / text[2:]
    return Path(os.path.expandvars(text)).expanduser()


def _endpoint(text: str) -> str:
    """Check an endpoint. The error does not show it: it may hold a password."""
    try:
        parts = urlsplit(text)
        is_address = bool(parts.hostname) and not parts.query and not parts.fragment and "@" not in parts.netloc
    except ValueError:
        is_address = False
    if not is_address or parts.scheme not in ("http", "https"):
        hint = f"write it like {DEFAULT_ENDPOINT}, or unset it"
        raise RecipeError.of("hub.endpoint", "HF_ENDPOINT", "is no address of a web server", hint)
    return text.rstrip("/")


def _token(variables: Mapping[str, str], home: Path) -> str:
    """The token of the environment, else that of `hf auth login`; empty where there is none or it is switched off."""
    if _is_true(variables.get("HF_HUB_DISABLE_IMPLICIT_TOKEN")):
        return ""
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        if token := _cleaned(variables.get(name, "")):
            return token
    path = variables.get("HF_TOKEN_PATH")
    file = _expanded(path, variables) if path else home / "token"
    return _refreshed_token(file) or _token_of(file)


def _token_of(file: Path) -> str:
    try:
        if file.stat().st_size > TOKEN_LIMIT_BYTES:
            return ""
        return _cleaned(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return ""


def _refreshed_token(file: Path) -> str:
    """The token of a file as the Hub's own package gives it, which renews those of a login by browser."""
    if not file.is_file():
        return ""
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        return ""
    if Path(constants.HF_TOKEN_PATH) != file:  # it was imported under other settings
        return ""
    return _cleaned(get_token() or "")


def hub_package() -> Any:
    """Import the Hub's own package, by which repositories are written.

    Raises:
        UnsupportedError: `storage.extra`, it is not installed.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        message = "writing to hf:// needs huggingface_hub, which is not installed"
        raise UnsupportedError.of("storage.extra", "", message, "install mergepipe[remote]") from error
    module: ModuleType = huggingface_hub
    return module


def _cleaned(token: str) -> str:
    """A token without the line ends that editors leave; empty where it could not be sent in a header."""
    stripped = token.replace("\r", "").replace("\n", "").strip()
    return stripped if stripped.isascii() and stripped.isprintable() else ""


def _is_true(text: str | None) -> bool:
    return text is not None and text.upper() in TRUE_TEXTS
