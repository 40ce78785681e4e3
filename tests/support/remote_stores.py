"""Remote stores of every kind before one scripted server, none of which ever really waits."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from threading import Event
from typing import Final

import pytest

from mergepipe.storage.contract import CONNECTIONS
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.location import Location
from mergepipe.storage.remote.http_client import HttpClient
from mergepipe.storage.remote.objects import ObjectStore
from mergepipe.storage.remote.pinned_store import PinnedStore, WebStore
from mergepipe.storage.remote.retry import RetryPolicy, Transfers
from support.fault_server import BucketServer

KINDS: Final = ("s3", "gs", "az", "http")
PATIENT_SECONDS: Final = 60.0  # no test waits as long, and no machine is as busy
STALL_SECONDS: Final = 1.0
_OTHER_VARIABLES: Final = (
    "AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_SKIP_SIGNATURE", "http_proxy",
    "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY",
)  # fmt: skip


@dataclass(slots=True)
class Waits:
    """Records what retries would have waited; the clock moves by that alone."""

    seconds: list[float] = field(default_factory=list)

    def clock(self) -> float:
        return sum(self.seconds)

    def sleep(self, seconds: float, stop: Event) -> None:
        del stop
        self.seconds.append(seconds)


def set_environment(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Lead the tools of all object stores to one server, as their users do."""
    for name in _OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    settings = {
        "AWS_ENDPOINT_URL": url,
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test-access-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret-key",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "GOOGLE_BASE_URL": url,
        "GOOGLE_SKIP_SIGNATURE": "true",
        "AZURE_STORAGE_ENDPOINT": url,
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_SKIP_SIGNATURE": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def root_of(kind: str, server: BucketServer) -> Location:
    """Where the files of a server below `bucket/` are for a kind of store."""
    return Location.parse(f"{server.url}/bucket" if kind == "http" else f"{kind}://bucket")


def transfers(
    waits: Waits | None = None,
    ledger: Ledger | None = None,
    policy: RetryPolicy | None = None,
    connections: int = CONNECTIONS,
) -> Transfers:
    """Transfers that record their waits instead of waiting."""
    waits = waits or Waits()
    return Transfers(
        ledger or Ledger(),
        policy,
        connections,
        clock=waits.clock,
        sleep=waits.sleep,
        random_fraction=random.Random(0).random,
    )


def remote_store(kind: str, requests: Transfers | None = None, stall_seconds: float = PATIENT_SECONDS) -> PinnedStore:
    """A store of a kind; a server that is silent for `stall_seconds` has stalled."""
    store = WebStore if kind == "http" else ObjectStore
    return store(requests or transfers(), HttpClient(stall_seconds=stall_seconds, connect_seconds=PATIENT_SECONDS))
