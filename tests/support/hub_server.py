"""A stand-in for the Hugging Face Hub on the loopback: pins, listings, and signed locations on another port.

It speaks what the Hub's own client sends: model information with blobs, trees, and the resolving of files. Small files
are answered by a relative redirect, large ones by one to a location that is signed and expires, as the Hub does.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

import pytest

from support.fault_server import Answer, Fault, FaultServer, Link, Request, no_fault
from support.hub_cache_files import git_blob_id

_API = re.compile(r"api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", re.DOTALL)
_RESOLVE = re.compile(r"([^/]+/[^/]+)/resolve/([^/]+)/(.+)", re.DOTALL)
_PREUPLOAD = re.compile(r"api/models/([^/]+/[^/]+)/preupload/(.+)")
_COMMIT = re.compile(r"api/models/([^/]+/[^/]+)/commit/(.+)")
_BATCH = re.compile(r"([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_UPLOAD = re.compile(r"lfs/([0-9a-f]{64})")
_SMALL = "api/resolve-cache/models"
_SMALL_FILE = re.compile(rf"{_SMALL}/([^/]+/[^/]+)/([^/]+)/(.+)", re.DOTALL)


@dataclass(slots=True)
class _Model:
    """Commits of one model with their files, and the branches that lead to them."""

    commits: dict[str, Mapping[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)


class HubServer(FaultServer):
    """Models and the rules of access to them; large files lie on the server `cdn`. Safe to change while it serves.

    Files that end in `.safetensors`, and those of `large_bytes` or more, are kept as large files. `fault` changes any
    answer of the Hub itself, `refuse` answers requests that have no effect then; the `faults` of `cdn` change those for
    ranges of large files.
    """

    def __init__(self, large_bytes: int = 1 << 20, link: Link | None = None) -> None:
        super().__init__({}, link=link)
        self.cdn = _ContentServer(link)
        self._large_bytes = large_bytes
        self._committing = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget all models, rules, faults and requests."""
        self.token = "hf_right"
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.expires = ""  # the time that signed locations name, in seconds since the epoch
        self.fault: Fault = no_fault
        self.refuse: Callable[[Request], Answer | None] = lambda _: None
        self._models: dict[str, _Model] = {}
        self._digests: dict[int, tuple[bytes, str]] = {}  # with the content, so that no other takes its place
        self.uploads: dict[str, bytes] = {}  # large files by SHA-256, committed or not
        self.keeps_content = True  # of uploads, which are compared with their SHA-256 in any case
        self.uploaded_bytes = 0
        for server in (self, self.cdn):
            server.all_sent_bytes()
            server.requests.clear()
            server.faults.clear()
            server.sent_bytes = 0

    def commit(self, model: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Commit files as the whole content of a branch; return the commit."""
        held = self._models.setdefault(model, _Model())
        state = json.dumps([len(held.commits), branch, sorted(files)])
        commit = hashlib.sha1(state.encode(), usedforsecurity=False).hexdigest()
        held.commits[commit] = dict(files)
        held.branches[branch] = commit
        return commit

    def head(self, model: str, branch: str = "main") -> str:
        """The commit that a branch leads to."""
        return self._models[model].branches[branch]

    @property
    def models(self) -> list[str]:
        """The names of all models."""
        return sorted(self._models)

    def n_commits(self, model: str) -> int:
        return len(self._models[model].commits)

    def model_files(self, model: str, revision: str = "main") -> Mapping[str, bytes]:
        """The files of a branch or commit."""
        held = self._models[model]
        return held.commits[held.branches.get(revision, revision)]

    def expire_locations(self) -> None:
        """Refuse all locations that were signed so far."""
        self.cdn.signature += 1

    @property
    def resolves(self) -> list[Request]:
        """The requests for the location of a file."""
        return [request for request in self.requests if "/resolve/" in request.path]

    @property
    def content_bytes(self) -> int:
        """The bytes sent of large files, once no answer is under way."""
        return self.cdn.all_sent_bytes()

    def is_large(self, path: str, content: bytes) -> bool:
        return path.endswith(".safetensors") or len(content) >= self._large_bytes

    def answer(self, request: Request) -> Answer:
        """The right answer, or what the fault makes of it."""
        return self.refuse(request) or self.fault(request, self._right_answer(request))

    def _right_answer(self, request: Request) -> Answer:
        if token_of(request) not in ("", self.token):
            return _refusal(401, "", "Invalid credentials in Authorization header")
        if request.method in ("POST", "PUT"):
            return self._written(request)
        if match := _API.fullmatch(request.path):
            model, question, revision = match.groups()
            return self._allowed(request, model, revision) or self._information(model, question, revision)
        if match := _RESOLVE.fullmatch(request.path):
            model, revision, file = match.groups()
            return self._allowed(request, model, revision) or self._resolved(request, model, revision, file)
        if match := _SMALL_FILE.fullmatch(request.path):
            model, commit, file = match.groups()
            return self._allowed(request, model, commit) or self._small_file(request, model, commit, file)
        return _refusal(404, "", "Not found")

    # --- writing ---

    def _written(self, request: Request) -> Answer:
        """Answer a request that writes, which needs the token and, but for creating it, a repository."""
        if token_of(request) != self.token and not request.path.startswith("lfs/"):
            return _refusal(401, "", "Invalid username or password.")
        if request.path == "api/repos/create":
            asked = json.loads(request.body)
            return self._create(
                f"{asked.get('organization') or 'user'}/{asked['name']}",
                is_private=bool(asked.get("private")) or asked.get("visibility") == "private",
            )
        if request.path == "api/validate-yaml":
            return _json({"errors": [], "warnings": []})
        if match := _UPLOAD.fullmatch(request.path):
            assert hashlib.sha256(request.body).hexdigest() == match[1]
            self.uploads[match[1]] = request.body if self.keeps_content else b""
            self.uploaded_bytes += len(request.body)
            if not self.keeps_content:
                self.requests.remove(request)
            return _json({})
        for form, write in ((_PREUPLOAD, self._modes), (_BATCH, self._batch), (_COMMIT, self._take_commit)):
            if match := form.fullmatch(request.path):
                refusal = self._allowed(request, match[1], unquote(match[2]) if match.lastindex == 2 else "main")
                return refusal or write(request, match)
        return _refusal(404, "", "Not found")

    def _create(self, model: str, *, is_private: bool) -> Answer:
        if model in self._models:
            return _refusal(409, "", "You already created this model repo")
        self.commit(model, {".gitattributes": b"*.safetensors filter=lfs"})
        if is_private:
            self.private.add(model)
        return _json({"url": f"{self.url}/{model}"})

    def _modes(self, request: Request, match: re.Match[str]) -> Answer:
        del match
        files = json.loads(request.body)["files"]
        large = [path["path"].endswith(".safetensors") or path["size"] >= self._large_bytes for path in files]
        modes = zip(files, large, strict=True)
        return _json({
            "files": [
                {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}
                for file, is_large in modes
            ]
        })  # fmt: skip

    def _batch(self, request: Request, match: re.Match[str]) -> Answer:
        del match
        objects = [
            wanted if wanted["oid"] in self.uploads
            else {**wanted, "actions": {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}}
            for wanted in json.loads(request.body)["objects"]
        ]  # fmt: skip
        return _json({"transfer": "basic", "objects": objects})

    def _take_commit(self, request: Request, match: re.Match[str]) -> Answer:
        """Make a commit of what a request says, if its parent is the head of the branch; one at a time."""
        with self._committing:
            return self._made_commit(request, match[1], unquote(match[2]))

    def _made_commit(self, request: Request, model: str, branch: str) -> Answer:
        held = self._models[model]
        files = dict(held.commits[held.branches[branch]])
        for line in map(json.loads, request.body.splitlines()):
            value = line["value"]
            match line["key"]:
                case "header":
                    if value.get("parentCommit", held.branches[branch]) != held.branches[branch]:
                        return _refusal(412, "", "A commit has happened since. Please refresh and try again.")
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.uploads[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        commit = self.commit(model, files, branch)
        return _json({"commitUrl": f"{self.url}/{model}/commit/{commit}", "commitOid": commit, "success": True})

    def _allowed(self, request: Request, model: str, revision: str) -> Answer | None:
        """The refusal of a request, if it is refused; what is private looks like what is missing."""
        is_known = token_of(request) == self.token
        if model not in self._models or (model in self.private and not is_known):
            return _refusal(404 if is_known else 401, "RepoNotFound", "Repository not found")
        held = self._models[model]
        if held.branches.get(revision, revision) not in held.commits:
            return _refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        if model in self.gated and "resolve" in request.path:
            message = f"Access to model {model} is restricted and you are not in the authorized list."
            return _refusal(403 if is_known else 401, "GatedRepo", message)
        return None

    def _information(self, model: str, question: str, revision: str) -> Answer:
        held = self._models[model]
        commit = held.branches.get(revision, revision)
        files = [self._described(path, content) for path, content in held.commits[commit].items()]
        if question == "revision":
            siblings = [{"rfilename": path, **facts} for path, facts in files]
            return _json({"id": model, "sha": commit, "gated": model in self.gated, "siblings": siblings})
        return _json([_tree_entry(path, facts) for path, facts in files])

    def _digest(self, content: bytes) -> str:
        """The SHA-256 of a file, computed once."""
        if id(content) not in self._digests:
            self._digests[id(content)] = content, hashlib.sha256(content).hexdigest()
        return self._digests[id(content)][1]

    def _described(self, path: str, content: bytes) -> tuple[str, dict[str, object]]:
        facts: dict[str, object] = {"size": len(content), "blobId": git_blob_id(content)}
        if self.is_large(path, content):
            facts["lfs"] = {"sha256": self._digest(content), "size": len(content), "pointerSize": 134}
        return path, facts

    def _resolved(self, request: Request, model: str, revision: str, file: str) -> Answer:
        held = self._models[model]
        commit = held.branches.get(revision, revision)
        content = held.commits[commit].get(file)
        if content is None:
            return _refusal(404, "EntryNotFound", "Entry not found")
        headers = {"X-Repo-Commit": commit}
        if not self.is_large(file, content):
            place = f"/{_SMALL}/{model}/{commit}/{quote(file)}"
            return Answer(307, headers={**headers, "Location": place})
        digest = self._digest(content)
        if digest not in self.cdn.files:
            self.cdn.put(digest, content)
        location = f"{self.cdn.url}/{digest}?signature={self.cdn.signature}&name={quote(file, safe='')}"
        if self.expires:
            location += f"&Expires={self.expires}"
        linked = {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(len(content)), "Location": location}
        return Answer(302, headers={**headers, **linked})

    def _small_file(self, request: Request, model: str, commit: str, file: str) -> Answer:
        content = self._models[model].commits[commit][file]
        blob_id = git_blob_id(content)
        if blob_id not in self.files:
            self.put(blob_id, content)
        answer = self.file_answer(request, blob_id)
        answer.headers.update({"X-Repo-Commit": commit, "ETag": f'"{blob_id}"'})
        return answer


class _ContentServer(FaultServer):
    """Serves files by their digests, to whoever has a location that is signed and has not expired."""

    def __init__(self, link: Link | None) -> None:
        super().__init__({}, link=link)
        self.signature = 0

    def answer(self, request: Request) -> Answer:
        if request.query.get("signature") != str(self.signature) or token_of(request):
            return Answer(403, b"<Error><Code>AccessDenied</Code></Error>")
        return self.file_answer(request, request.path)


def token_of(request: Request) -> str:
    """The token that came with a request, empty for none."""
    return request.headers.get("authorization", "").removeprefix("Bearer ")


def _tree_entry(path: str, facts: Mapping[str, object]) -> dict[str, object]:
    """A file as the listing of a tree has it, which names digests otherwise than the information about a model."""
    entry = {"type": "file", "path": path, "size": facts["size"], "oid": facts["blobId"]}
    lfs = facts.get("lfs")
    return {**entry, "lfs": {"oid": lfs["sha256"], **lfs}} if isinstance(lfs, dict) else entry


def _json(value: object) -> Answer:
    return Answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _refusal(status: int, code: str, message: str) -> Answer:
    headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
    return Answer(status, json.dumps({"error": message}).encode(), headers)


@contextmanager
def hub_server(large_bytes: int = 1 << 20, link: Link | None = None) -> Iterator[HubServer]:
    """Serve a `HubServer` and its large files on two ports of the loopback while the context lasts."""
    with HubServer(large_bytes, link) as server, server.cdn:
        yield server


@contextmanager
def written_hub(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[HubServer]:
    """A stand-in that the environment leads the Hub's own package to, with a token that may write."""
    with hub_server() as server:
        lead_to_hub(monkeypatch, server, home)
        yield server


def lead_to_hub(monkeypatch: pytest.MonkeyPatch, server: HubServer, home: Path) -> None:
    """Lead the Hub's own package to a stand-in, with a token that may write and the folder `home` for its cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    settings = {"HF_ENDPOINT": server.url, "HF_TOKEN": server.token, "HF_HOME": str(home)}
    for name, value in {**settings, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
