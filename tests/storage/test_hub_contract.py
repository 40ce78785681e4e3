"""The Hub keeps the contract of stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from store_contract import StoreContract

from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.remote.hub import HubStore
from mergepipe.storage.remote.hub_api import HubSettings
from mergepipe.storage.remote.retry import Transfers
from support.hub_server import HubServer, hub_server


class TestHubStore(StoreContract):
    """Models of the Hub, large files and small ones."""

    @pytest.fixture(scope="class", params=[1, 1 << 20], ids=["large", "small"])
    def server(self, request: pytest.FixtureRequest) -> Iterator[HubServer]:
        with hub_server(large_bytes=request.param) as server:
            yield server

    @pytest.fixture(autouse=True)
    def hub(self, server: HubServer, tmp_path: Path) -> None:
        server.reset()
        self._hub, self._cache = server, tmp_path

    @pytest.fixture
    def root(self) -> Location:
        return Location.parse("hf://org/name@branch/folder of tests")

    def make(self, root: Location, files: Mapping[str, bytes]) -> Store:
        self._hub.commit(root.root, {f"{root.key}/{name}": content for name, content in files.items()}, root.revision)
        return HubStore(HubSettings(self._hub.url, self._cache), Transfers(Ledger()))

    def overwrite(self, store: Store, location: Location, content: bytes) -> None:
        assert isinstance(store, HubStore)
        self._hub.commit(location.root, {location.key: content}, location.revision)
        store.forget(location)
