"""Credentials come from the usual places, are used, and are never shown."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from mergepipe.errors import MergePipeError, StorageError, UnsupportedError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.remote import objects
from mergepipe.storage.remote.retry import FailureKind
from support.fault_server import BucketServer
from support.refusals import refuses
from support.remote_stores import remote_store, root_of, set_environment

PRIVATE_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[BucketServer]:
    with BucketServer({"bucket/m/file": b"12345"}) as running:
        set_environment(monkeypatch, running.url)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setattr(objects, "_METADATA_SERVICE", ("127.0.0.1", 1))
        yield running


def read(kind: str, server: BucketServer) -> None:
    store = remote_store(kind)
    buffer = bytearray(5)
    store.list(root_of(kind, server) / "m")
    store.open(root_of(kind, server) / "m/file").read_into(0, memoryview(buffer), Purpose.BASE)
    assert buffer == b"12345"


def test_s3__signs_with_the_keys_of_the_environment(server: BucketServer) -> None:
    read("s3", server)
    listing, content = server.requests
    assert "Credential=test-access-key" in listing.headers["authorization"]
    assert content.query["X-Amz-Credential"].startswith("test-access-key/")


@pytest.mark.parametrize("profile", ["default", "work"])
def test_s3__signs_with_the_keys_of_a_profile(
    profile: str, server: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in (*PRIVATE_KEYS, "AWS_REGION"):
        monkeypatch.delenv(name)
    if profile != "default":
        monkeypatch.setenv("AWS_PROFILE", profile)
    credentials = "[{}]\naws_access_key_id = key-of-{}\naws_secret_access_key = s%cret\naws_session_token = t\n"
    (tmp_path / "credentials").write_text("".join(credentials.format(name, name) for name in ("default", "work")))
    (tmp_path / "config").write_text("[default]\nregion = of-default\n[profile work]\nregion = of-work\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    read("s3", server)
    assert server.requests[1].query["X-Amz-Credential"].startswith(f"key-of-{profile}/")
    assert f"/of-{profile}/" in server.requests[1].query["X-Amz-Credential"]
    assert server.requests[1].query["X-Amz-Security-Token"] == "t"


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_s3__is_anonymous_without_keys(
    is_asked_for: bool, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_asked_for:
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    else:
        for name in PRIVATE_KEYS:
            monkeypatch.delenv(name)
    read("s3", server)
    assert all("authorization" not in request.headers for request in server.requests)
    assert server.requests[1].query == {}


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_others__are_anonymous_without_credentials(
    kind: str, server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_SKIP_SIGNATURE")
    monkeypatch.delenv("AZURE_SKIP_SIGNATURE")
    read(kind, server)
    assert all("authorization" not in request.headers for request in server.requests)


def test_azure__signs_with_the_key_of_the_account(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_SKIP_SIGNATURE")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
    read("az", server)
    assert all(request.headers["authorization"].startswith("SharedKey account:") for request in server.requests)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("az", {"AZURE_STORAGE_ACCOUNT_NAME": ""}),
        ("gs", {"GOOGLE_SKIP_SIGNATURE": "", "GOOGLE_SERVICE_ACCOUNT_KEY": "{secret-key"}),
        ("az", {"AZURE_SKIP_SIGNATURE": "", "AZURE_STORAGE_ACCOUNT_KEY": "secret-key"}),
        ("az", {"AZURE_STORAGE_ENDPOINT": "host:9000"}),
        ("gs", {"GOOGLE_BASE_URL": "http://host:9000 "}),
        ("s3", {"AWS_ENDPOINT_URL": "user:secret-key@host:9000"}),
        ("s3", {"AWS_SESSION_TOKEN": "secret-key\n"}),
    ],
)
def test_settings__that_cannot_be_used_are_refused_without_showing_them(
    kind: str, changes: dict[str, str], server: BucketServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    with refuses(MergePipeError, "storage.settings") as caught:
        remote_store(kind).list(root_of(kind, server) / "m")
    assert "secret-key" not in "".join(traceback.format_exception(caught.value))


def test_obstore__that_is_missing_is_named(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with refuses(UnsupportedError, "extra.missing", r'^s3://bucket.*pip install "\.\[remote\]"'):
        remote_store("s3").list(root_of("s3", server))


def test_keys__that_obstore_cannot_name_fail_their_folder(server: BucketServer) -> None:
    server.put("bucket/n/empty/", b"")  # by the pages of clouds
    store, folder = remote_store("s3"), root_of("s3", server) / "n"
    assert (store.list(folder)[0].name, store.list(folder / "empty")) == ("empty", ())
    server.put("bucket/m/line\nbreak", b"")
    with pytest.raises(StorageError, match="control characters"):
        remote_store("s3").list(root_of("s3", server) / "m")
    with pytest.raises(StorageError, match="PanicException"):
        remote_store("s3").list(Location.parse("s3://no bucket/m"))


@pytest.mark.parametrize(
    ("text", "kind", "detail"),
    [
        ("status code: 503 Service Unavailable: <Code>SlowDown</Code>", "STATUS", "503 Service Unavailable (SlowDown)"),
        ("status: 400 Bad Request: <Code>ExpiredToken</Code>", "STATUS", "400 Bad Request (ExpiredToken)"),
        ("Received redirect without LOCATION\n inner: BareRedirect,", "UNUSABLE", "another region"),
        ("a text of later versions with https://host/?X-Amz-Signature=secret", "UNUSABLE", "RuntimeError"),
    ],
)
def test_failure_of__keeps_nothing_but_status_and_code(text: str, kind: str, detail: str) -> None:
    failure = objects.failure_of(RuntimeError(text))
    assert failure.kind is FailureKind[kind]
    assert detail in failure.detail
    assert failure.refuses_credentials == ("Token" in detail)
    assert "secret" not in failure.detail
