"""Where the catalog is looked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergepipe.options import home_of


def test_home_of__an_explicit_path_wins() -> None:
    assert home_of(Path("/asked"), {"MERGEPIPE_HOME": "/env"}, "linux") == Path("/asked")


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({"MERGEPIPE_HOME": "/env", "XDG_DATA_HOME": "/xdg"}, "linux", "/env"),
        ({"MERGEPIPE_HOME": "/env/../other"}, "darwin", "/other"),
        ({"MERGEPIPE_HOME": "", "XDG_DATA_HOME": "/xdg"}, "linux", "/xdg/mergepipe"),
        ({"XDG_DATA_HOME": "relative"}, "linux", "~/.local/share/mergepipe"),
        ({"XDG_DATA_HOME": ""}, "linux", "~/.local/share/mergepipe"),
        ({}, "linux", "~/.local/share/mergepipe"),
        ({"XDG_DATA_HOME": "/xdg"}, "darwin", "~/Library/Application Support/mergepipe"),
        ({"MERGEPIPE_HOME": "~/mine"}, "linux", "~/mine"),
    ],
)
def test_home_of__follows_the_environment(environment: dict[str, str], platform: str, expected: str) -> None:
    assert home_of(None, environment, platform) == Path(expected).expanduser()


def test_home_of__is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEPIPE_HOME", "here")
    assert home_of(None) == tmp_path / "here"
    assert home_of(Path("there")) == tmp_path / "there"
