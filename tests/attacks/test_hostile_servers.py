"""Servers that answer in every wrong way: each ends a command in one line with an exit code of the table, soon."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from mergepipe.cli import main
from mergepipe.storage.remote import retry
from mergepipe.storage.remote.http_client import HttpClient
from mergepipe.storage.remote.retry import RetryPolicy
from support.families import TINY, FamilyPaths, write_family
from support.fault_server import FaultServer, Request
from support.hub_server import HubServer, hub_server
from support.model_folders import recipe_of
from support.slow_cases import slow_unless

COMMIT = "c" * 40
MOST_HELD_BYTES = 400 << 20
DIGITS = "9" * 5000
CASES_OF_PACE = ("a byte a second", "100 Continue a second")


def answer(body: bytes = b"", *lines: str, status: str = "200 OK") -> list[bytes]:
    """An answer, of which every header line is as given."""
    head = "\r\n".join([f"HTTP/1.1 {status}", *lines]) + "\r\n\r\n"
    return [head.encode("latin-1"), body]


def sized(body: bytes, *lines: str) -> list[bytes]:
    return answer(body, f"Content-Length: {len(body)}", *lines)


def redirect(target: str) -> list[bytes]:
    return answer(b"", f"Location: {target}", "Content-Length: 0", status="302 Found")


def chunked(*parts: bytes) -> list[bytes]:
    return [*answer(b"", "Transfer-Encoding: chunked"), *parts]


LOCATIONS = {
    "no address": "http://[::1", "no port": "http://127.0.0.1:port/x", "a huge port": "http://127.0.0.1:99999/x",
    "no host": "http:///x", "a long host": f"http://{'a' * 300}.invalid/x", "an empty label": "http://a..invalid/x",
    "no scheme of ours": "gopher://127.0.0.1/x", "a script": "javascript:alert(1)", "bytes": "/\xff\xfe\x80",
    "a space": "http://a b/x", "empty": "", "a line end in it": "/a\r\n b", "digits": f"http://127.0.0.1:{DIGITS}/",
    "controls": "/\x01\x02\x7f", "of 60 kB": "/" + "a" * 60_000, "a bad escape": "/%zz%", "a zone": "http://[fe80::1%1]/",
}  # fmt: skip
"""Redirects, as their `Location` has them."""

RAW: dict[str, Callable[[], Iterable[bytes]]] = {
    **{f"Location: {name}": partial(redirect, target) for name, target in LOCATIONS.items()},
    "a length of 5000 digits": lambda: answer(b"x", f"Content-Length: {DIGITS}"),
    "a negative length": lambda: answer(b"x", "Content-Length: -5"),
    "two lengths": lambda: answer(b"xy", "Content-Length: 1", "Content-Length: 2"),
    "a length of digits that are no ASCII": lambda: answer(b"x", "Content-Length: \xb2\xb3"),
    "an enormous length": lambda: answer(b"x", f"Content-Length: {10**17}"),
    "a status of 5000 digits": lambda: answer(status=f"{DIGITS} OK"),
    "a negative status": lambda: answer(status="-200 OK"),
    "a reason of controls": lambda: sized_error("418 \x1b[31mred\x07" + "r" * 5000),
    "a line without end": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\nX: "], itertools.repeat(b"x" * 4096)),
    "headers without end": lambda: itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"X: y\r\n" * 1000)),
    "100 Continue without end": lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\nX: y\r\n\r\n" * 100),
    "100 Continue a second": lambda: itertools.repeat(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a byte a second": lambda: itertools.chain(
        [b'HTTP/1.1 200 OK\r\nContent-Length: 100000\r\nETag: "1"\r\nX: '], itertools.repeat(b"x")
    ),
    "an ETag over two lines": lambda: sized(b"x", 'ETag: "a\r\n b"'),
    "an ETag of 60 kB": lambda: sized(b"x", f'ETag: "{"e" * 60_000}"'),
    "a date of 60 kB": lambda: sized(b"x", f"Last-Modified: {'e' * 60_000}"),
    "Retry-After of 5000 digits": lambda: answer(
        b"", f"Retry-After: {DIGITS}", "Content-Length: 0", status="503 Unavailable"
    ),
    "Retry-After in the year 99999": lambda: answer(
        b"", "Retry-After: Fri, 31 Dec 99999 23:59:59 GMT", "Content-Length: 0", status="503 Unavailable"
    ),
    "an error of 5000 digits": lambda: answer(b"", f"Content-Length: {DIGITS}", status="404 Not Found"),
    "chunks of no number": lambda: chunked(b"xyz\r\nabc\r\n"),
    "a negative chunk": lambda: chunked(b"-5\r\nabcdefgh\r\n0\r\n\r\n"),
    "a chunk of 5000 digits": lambda: chunked(f"{'f' * 5000}\r\nabc".encode()),
    "a chunk beyond all memory": lambda: chunked(b"ffffffffffffffff\r\nabc"),
    "chunks with long extensions": lambda: itertools.chain(
        chunked(), itertools.repeat(b"1;" + b"e" * 60_000 + b"\r\n{\r\n")
    ),
    "trailers without end": lambda: itertools.chain(chunked(b"2\r\n{}\r\n0\r\n"), itertools.repeat(b"X: y\r\n" * 1000)),
    "nothing": lambda: [b""],
    "no HTTP": lambda: [b"SSH-2.0-OpenSSH_9\r\n"],
    "HTTP/9": lambda: [b"HTTP/9.9 200 OK\r\n\r\n"],
    "cut in the header": lambda: [b"HTTP/1.1 200 OK\r\nContent-Le"],
    "cut in the body": lambda: answer(b'{"sha"', "Content-Length: 1000"),
    "a body without end": lambda: itertools.chain(answer(), itertools.repeat(b"x" * 65536)),
    "a gzip body": lambda: sized(b"\x1f\x8b\x08" + bytes(100), "Content-Encoding: gzip", 'ETag: "1"'),
}
"""Whole answers, whatever was asked."""


def sized_error(status: str) -> list[bytes]:
    return answer(b"", "Content-Length: 0", status=status)


def listing(*siblings: object, **changes: object) -> bytes:
    return json.dumps({"id": "org/base", "sha": COMMIT, "siblings": list(siblings), **changes}).encode()


def sibling(path: object = "config.json", size: object = 2, digest: object = "a" * 40, **lfs: object) -> object:
    return {"rfilename": path, "size": size, "blobId": digest, **({"lfs": lfs} if lfs else {})}


LISTINGS: dict[str, Callable[[], bytes]] = {
    "nested 200,000 deep": lambda: b'{"siblings":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "objects nested 200,000 deep": lambda: b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
    "one path of 100,000 slashes": lambda: listing(sibling("/".join(["a"] * 100_000))),
    "20,000 paths of 100 folders": lambda: listing(*(sibling(f"{i}/" + "/".join("a" * 100)) for i in range(20_000))),
    "a path of 2 MB": lambda: listing(sibling("a" * 2_000_000)),
    "60 MB of empty lists": lambda: b'{"siblings":[' + b"[]," * 20_000_000 + b"[]]}",
    "a size of 5000 digits": lambda: listing().replace(b"[]", f'[{{"rfilename":"a","size":{DIGITS}}}]'.encode()),
    "a size of 4000 digits": lambda: listing(sibling(size=10**4000)),
    "a size beyond 64 bits": lambda: listing(sibling("model.safetensors", sha256="a" * 64, size=1 << 63)),
    "a negative size": lambda: listing(sibling(size=-1)),
    "a size that is true": lambda: listing(sibling(size=True)),
    "a size that is NaN": lambda: listing(sibling(size=float("nan"))),
    "a size that is text": lambda: listing(sibling(size="2")),
    "a size of 1e999": lambda: listing(sibling(size=7)).replace(b"7", b"1e999"),
    "a path that is a number": lambda: listing(sibling(path=3)),
    "a path that leads out": lambda: listing(sibling("../config.json")),
    "an absolute path": lambda: listing(sibling("/etc/passwd")),
    "a path with an empty part": lambda: listing(sibling("a//b")),
    "an empty path": lambda: listing(sibling("")),
    "a path with a NUL": lambda: listing(sibling("a\0b")),
    "a path of half a character": lambda: listing(sibling("\ud800.json")),
    "the same path twice": lambda: listing(sibling(), sibling(size=3)),
    "a file that is a folder": lambda: listing(sibling("a"), sibling("a/b")),
    "a digest of other length": lambda: listing(sibling(digest="a" * 39)),
    "a digest that is a list": lambda: listing(sibling(digest=["a"])),
    "no digest": lambda: listing(sibling(digest=None)),
    "lfs that is a list": lambda: listing({"rfilename": "a", "size": 1, "lfs": [1]}),
    "lfs without a digest": lambda: listing(sibling("model.safetensors", size=3, pointerSize=1)),
    "lfs without a size": lambda: listing(sibling("model.safetensors", sha256="a" * 64)),
    "lfs with a digest of git": lambda: listing(sibling("model.safetensors", sha256="1" * 40, size=3)),
    "a sibling that is null": lambda: listing(None),
    "siblings that are an object": lambda: listing(siblings={"a": 1}),
    "a commit that is a path": lambda: listing(sibling(), sha="../../etc"),
    "a commit that is a number": lambda: listing(sibling(), sha=7),
    "a commit that is a branch": lambda: listing(sibling(), sha="main"),
    "a list": lambda: b"[]",
    "nothing that it needs": lambda: b"{}",
    "siblings that are null": lambda: listing(siblings=None),
    "the commit twice": lambda: listing(sibling())[:-1] + f', "sha": "{"d" * 40}"}}'.encode(),
    "no UTF-8": lambda: b'{"sha": "\xff\xfe"}',
    "UTF-16": lambda: listing(sibling()).decode().encode("utf-16"),
    "a byte order mark": lambda: b"\xef\xbb\xbf" + listing(sibling()),
    "an empty body": lambda: b"",
    "a number": DIGITS.encode,
    "half of it": lambda: listing(sibling())[:40],
}
"""Bodies of the Hub's answer about a model."""

INDEXES = {
    "nested": b'{"weight_map":' + b"[" * 200_000,
    "half a character": b'{"weight_map": {"t": "\\ud800.safetensors"}}',
    "a NUL": b'{"weight_map": {"t": "a\\u0000.safetensors"}}',
    "a number": f'{{"weight_map": {{"t": {DIGITS}}}}}'.encode(),
}
"""Indexes of weights on a web server, that name files to ask for."""


@dataclass(slots=True)
class Ticks:
    """A clock that goes by a second at each look, so that no test waits."""

    seconds: Iterator[int] = field(default_factory=itertools.count)

    def __call__(self) -> float:
        return float(next(self.seconds))


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> FamilyPaths:
    return write_family(tmp_path_factory.mktemp("family"), TINY, 1)


@pytest.fixture
def servers(family: FamilyPaths, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FaultServer, HubServer]]:
    """A web server and a Hub that hold the family; requests are not made again for long."""
    monkeypatch.setattr(HttpClient.__init__, "__defaults__", (5.0, 2.0))
    quick = partial(RetryPolicy, most_attempts=2, first_wait_seconds=0.001, longest_wait_seconds=0.01)
    monkeypatch.setattr(retry, "RetryPolicy", quick)
    contents = {model.name: {path.name: path.read_bytes() for path in model.iterdir()} for model in family.models}
    files = {f"{model}/{name}": content for model, held in contents.items() for name, content in held.items()}
    with FaultServer(files) as web, hub_server() as hub:
        for model, held in contents.items():
            hub.commit(f"org/{model}", held)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_TOKEN", "hf_right")
        yield web, hub


def run(folder: Path, place: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Merge the models of a place; return the exit code and what was printed as an error."""
    recipe = folder / "recipe.yml"
    recipe.write_text(json.dumps(recipe_of("task_arithmetic", {f"{place}/expert-1": {"weight": 1}}, f"{place}/base")))
    held_bytes = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    code = main(["merge", str(recipe), str(folder / "out"), "--no-catalog", "--quiet"])
    assert resident_bytes("VmHWM") - held_bytes < MOST_HELD_BYTES
    return code, capsys.readouterr().err


def resident_bytes(field: str) -> int:
    """Return the resident memory of this process: VmRSS now, VmHWM at its peak.

    Not by tracemalloc, which corrupts its tables when it is stopped while threads of the servers allocate.
    """
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) << 10


def check(code: int, printed: str, folder: Path) -> None:
    lines = [line for line in printed.splitlines() if line]
    assert 2 <= code <= 10, printed[:2000]
    assert all(line.isprintable() and len(line) < 1000 for line in lines), printed[:2000]
    assert "Traceback" not in printed
    assert not (folder / "out").exists()


def as_raw(pieces: Callable[[], Iterable[bytes]], path: str) -> Callable[[Request], Iterable[bytes] | None]:
    """Answer so whatever is asked of paths that contain a text."""
    return lambda request: pieces() if path in request.path else None


KINDS = ("http", "http ranges", "hub", "hub files", "hub ranges")
HALF = {case for number, case in enumerate(itertools.product(RAW, KINDS)) if number % 2 == 0}  # of each kind and answer


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), slow_unless(HALF.__contains__, itertools.product(RAW, KINDS)))
def test_answer__that_is_wrong_ends_in_one_error(
    name: str,
    kind: str,
    servers: tuple[FaultServer, HubServer],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    web, hub = servers
    if name in CASES_OF_PACE:
        monkeypatch.setitem(HttpClient.__init__.__kwdefaults__ or {}, "clock", Ticks())
    if kind == "http":
        web.raw = as_raw(RAW[name], "expert-1")
    elif kind == "http ranges":
        web.raw = lambda request: None if request.range is None else RAW[name]()
    elif kind == "hub":
        hub.raw = as_raw(RAW[name], "api/models")
    elif kind == "hub files":
        hub.raw = as_raw(RAW[name], "/resolve/")
    else:
        hub.cdn.raw = as_raw(RAW[name], "")
    code, printed = run(tmp_path, web.url if kind.startswith("http") else "hf://org", capsys)
    check(code, printed, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LISTINGS)
def test_listing__of_a_model_that_is_wrong_ends_in_one_error(
    name: str, servers: tuple[FaultServer, HubServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = LISTINGS[name]()
    servers[1].raw = as_raw(lambda: sized(body), "api/models")
    code, printed = run(tmp_path, "hf://org", capsys)
    check(code, printed, tmp_path)
    assert "hf://org/" in printed


@pytest.mark.parametrize("name", INDEXES)
def test_index__of_a_web_server_that_is_wrong_ends_in_one_error(
    name: str, servers: tuple[FaultServer, HubServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    web = servers[0]
    del web.files["expert-1/model.safetensors"]
    web.put("expert-1/model.safetensors.index.json", INDEXES[name])
    code, printed = run(tmp_path, web.url, capsys)
    check(code, printed, tmp_path)


def test_family__is_merged_by_servers_that_are_right(
    servers: tuple[FaultServer, HubServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, place in enumerate((servers[0].url, "hf://org")):
        (folder := tmp_path / str(number)).mkdir()
        assert run(folder, place, capsys)[0] == 0
