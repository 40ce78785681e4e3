"""Connections, redirects, proxies and versions, as HTTP has them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from email.utils import formatdate

import pytest

from mergepipe.storage.remote.http_client import Address, HttpClient, Pin
from mergepipe.storage.remote.retry import FailureKind, RequestFailed
from support.fault_server import Answer, FaultServer, Request, no_fault, status, with_headers
from support.remote_stores import PATIENT_SECONDS, set_environment

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    with FaultServer({"file": CONTENT, "folder/x": b""}) as running:
        set_environment(monkeypatch, running.url)
        yield running


@pytest.fixture
def client() -> Iterator[HttpClient]:
    http = HttpClient(PATIENT_SECONDS, PATIENT_SECONDS)
    yield http
    http.close()


def read(client: HttpClient, address: Address, pin: Pin, first: int = 10, nbytes: int = 500) -> bytes:
    buffer = bytearray(nbytes)
    client.read_range(address, first, memoryview(buffer), pin)
    return bytes(buffer)


def failure_kind(client: HttpClient, address: Address, pin: Pin) -> FailureKind:
    with pytest.raises(RequestFailed) as caught:
        read(client, address, pin)
    return caught.value.kind


def test_connections__are_kept_and_replaced_when_the_server_closed_them(
    server: FaultServer, client: HttpClient
) -> None:
    address = Address(f"{server.url}/file")
    pin = client.head(address).pin
    for fault in (no_fault, with_headers(Connection="close"), no_fault):
        server.faults = [fault]
        assert read(client, address, pin) == CONTENT[10:510]
    server.faults = [status(500)]
    assert failure_kind(client, address, pin) is FailureKind.STATUS
    assert read(client, address, pin) == CONTENT[10:510]
    assert len(server.clients) == 2
    assert len(server.requests) == 6


def test_connections__that_break_when_used_again_are_no_failure(server: FaultServer, client: HttpClient) -> None:
    address = Address(f"{server.url}/file")
    pin = client.head(address).pin
    server.hang_up_on_next_request = True
    assert read(client, address, pin) == CONTENT[10:510]
    server.hang_up_on_next_request = True
    client.close()
    assert failure_kind(client, address, pin) is FailureKind.CUT  # a new connection that breaks is


def test_redirects__lead_to_another_host_without_credentials(server: FaultServer, client: HttpClient) -> None:
    with FaultServer({"other": CONTENT}) as other:
        server.redirects["file"] = f"{other.url}/other?signature=1"
        answer = client.head(Address(f"{server.url}/file", {"Authorization": "Bearer secret", "X-Kept": "1"}))
        assert answer.address.url == f"{other.url}/other?signature=1"
        assert "authorization" in server.requests[0].headers
        assert "authorization" not in other.requests[0].headers
        assert other.requests[0].headers["x-kept"] == "1"
        assert not [word for word in ("secret", "signature") if word in repr(answer)]


@pytest.mark.parametrize("target", ["/file", "ftp://127.0.0.1/file", "file:///etc/passwd"])
def test_redirects__in_a_circle_or_to_other_schemes_are_refused(
    target: str, server: FaultServer, client: HttpClient
) -> None:
    server.redirects["file"] = target
    assert failure_kind(client, Address(f"{server.url}/file"), Pin(len(CONTENT))) is FailureKind.UNUSABLE


def test_head__tells_folders_by_the_slash_that_a_redirect_adds(server: FaultServer, client: HttpClient) -> None:
    server.put("folder/", b"<html>")
    assert client.head(Address(f"{server.url}/folder")).is_folder
    assert not client.head(Address(f"{server.url}/folder/x")).is_folder


def test_versions__without_tags_are_told_by_date_and_size(server: FaultServer, client: HttpClient) -> None:
    server.has_etags = False
    address = Address(f"{server.url}/file")
    pin = client.head(address).pin
    assert "if-match" not in server.requests[-1].headers
    assert read(client, address, pin) == CONTENT[10:510]
    server.put("file", CONTENT[::-1])
    assert failure_kind(client, address, pin) is FailureKind.CHANGED
    assert failure_kind(client, address, Pin(len(CONTENT) - 1)) is FailureKind.CHANGED


def test_versions__that_answers_do_not_name_are_no_version_of_a_file_whose_version_is_known(
    server: FaultServer, client: HttpClient
) -> None:
    address = Address(f"{server.url}/file")
    pin = client.head(address).pin
    server.faults = [with_headers(ETag=None), with_headers(ETag=None, Last_Modified=None)]
    assert read(client, address, pin) == CONTENT[10:510]  # by its date
    assert failure_kind(client, address, pin) is FailureKind.CHANGED


def test_versions__with_weak_tags_are_compared_in_answers(server: FaultServer, client: HttpClient) -> None:
    address, pin = Address(f"{server.url}/file"), Pin(len(CONTENT), 'W/"one"')
    server.faults = [with_headers(ETag='W/"one"'), with_headers(ETag='W/"two"')]
    assert read(client, address, pin) == CONTENT[10:510]
    assert "if-match" not in server.requests[-1].headers
    assert failure_kind(client, address, pin) is FailureKind.CHANGED


def test_read_range__takes_the_whole_file_where_that_was_asked_for(server: FaultServer, client: HttpClient) -> None:
    def whole(_request: Request, answer: Answer) -> Answer:
        return Answer(200, CONTENT, {"ETag": answer.headers["ETag"]})

    address = Address(f"{server.url}/file")
    pin = client.head(address).pin
    server.faults = [whole, whole]
    assert read(client, address, pin, 0, len(CONTENT)) == CONTENT
    assert failure_kind(client, address, pin) is FailureKind.NOT_PARTIAL


@pytest.mark.parametrize(("text", "low", "high"), [("7", 7, 7), ("soon", 0, 0), ("", 0, 0), ("DATE", 3000, 3601)])
def test_retry_after__is_seconds_or_a_date(
    text: str, low: float, high: float, server: FaultServer, client: HttpClient
) -> None:
    header = formatdate(time.time() + 3600, usegmt=True) if text == "DATE" else text
    server.faults = [status(503, Retry_After=header)]
    with pytest.raises(RequestFailed) as caught:
        read(client, Address(f"{server.url}/file"), Pin(len(CONTENT)))
    assert low <= caught.value.retry_after_seconds <= high


def test_proxies__of_the_environment_are_asked(
    server: FaultServer, client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", f"http://user:pass%20word@{server.host}")
    server.put("http://models.invalid/file", CONTENT)
    pin = Pin(len(CONTENT))
    assert read(client, Address("http://models.invalid/file"), pin) == CONTENT[10:510]
    assert server.requests[-1].headers["proxy-authorization"] == "Basic dXNlcjpwYXNzIHdvcmQ="
    monkeypatch.setenv("no_proxy", "models.invalid, 127.0.0.0/8")
    assert failure_kind(client, Address("http://models.invalid/file"), pin) is FailureKind.UNREACHABLE
    assert read(client, Address(f"{server.url}/file"), pin) == CONTENT[10:510]
    for proxy, words in (
        (f"http://user:secret@{server.host}", "the proxy: "),
        ("socks5h://user:secret@h", "socks5h://,"),
    ):
        monkeypatch.setenv("https_proxy", proxy)
        with pytest.raises(RequestFailed, match=words) as caught:  # the server is no proxy for TLS
            read(client, Address("https://other.invalid/file"), pin)
        assert (caught.value.kind, "secret" in str(caught.value)) == (FailureKind.UNREACHABLE, False)


def test_answers__that_are_not_http_are_refused(server: FaultServer, client: HttpClient) -> None:
    server.raw_answer = b"SSH-2.0-x\r\n"
    assert failure_kind(client, Address(f"{server.url}/file"), Pin(len(CONTENT))) is FailureKind.UNUSABLE
