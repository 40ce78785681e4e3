"""Every fault on every kind of store: the bytes of a merge without faults, or one clear error, within the budget."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest

import mergepipe
from mergepipe.checkpoints.directory import open_checkpoint
from mergepipe.checkpoints.safetensors import FIRST_READ_BYTES
from mergepipe.core.units import format_bytes
from mergepipe.errors import MergePipeError, NotFoundError
from mergepipe.options import MergeOptions
from mergepipe.planning.budget import retry_reserve_bytes
from mergepipe.storage.location import Location
from mergepipe.storage.remote import retry
from mergepipe.storage.remote.http_client import HttpClient
from mergepipe.storage.remote.retry import RetryPolicy
from mergepipe.storage.stores import Stores
from support.bucket_outputs import files_below
from support.families import TINY, FamilyPaths, write_family
from support.fault_server import Answer, BucketServer, FaultServer, Request, cut, no_fault, stall, status
from support.hub_server import HubServer, hub_server
from support.model_folders import recipe_of
from support.public_names import MANIFEST_NAME
from support.remote_stores import PATIENT_SECONDS, set_environment

KINDS = ("s3", "http", "hub")
SHARD_BYTES = 40_000
AFTER_READS = 12
OPTIONS = MergeOptions(catalog=False, threads=1)


def text_of(at: object, first: str = "expert-1") -> str:
    models = {f"{at}/{first}": {"weight": 0.7, "density": 0.5}, f"{at}/expert-2": {"weight": 0.5, "density": 0.5}}
    return json.dumps(recipe_of("ties", models, f"{at}/base", dtype="bfloat16"))


def other_bytes(request: Request, answer: Answer) -> Answer:
    """Bytes of another file of the same size, behind the header, whose server says the same of it."""
    if request.range is not None and request.range[0] >= FIRST_READ_BYTES:
        answer.body = bytes(len(answer.body))
    return answer


@pytest.fixture(autouse=True)
def _hub_settings(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", remote.hub_url)
    monkeypatch.delenv("HF_HUB_OFFLINE")


@dataclass(slots=True)
class Remote:
    """A family of models here, in a bucket and on the Hub, whose servers share a script of faults."""

    folder: Path
    family: FamilyPaths
    bucket: BucketServer
    hub: FaultServer
    hub_url: str
    clean: dict[tuple[str, str | None], dict[str, bytes]] = field(default_factory=dict)

    def server(self, kind: str) -> FaultServer:
        return self.hub if kind == "hub" else self.bucket

    def recipe(self, kind: str) -> Path:
        places = {"local": str(self.folder), "http": f"{self.bucket.url}/bucket", "hub": "hf://org"}
        path = self.folder / f"{kind}.yml"
        path.write_text(text_of(places.get(kind, f"{kind}://bucket")))
        return path

    def merge(self, kind: str, out: Path, budget: str | None) -> mergepipe.MergeReport:
        return mergepipe.merge(self.recipe(kind), out, budget=budget, options=OPTIONS)

    def clean_weights(self, kind: str, budget: str | None, out: Path) -> dict[str, bytes]:
        """What a merge without faults makes: in full that of local files, under a budget that of the same store."""
        key = ("local" if budget is None else kind, budget)
        if key not in self.clean:
            self.merge(key[0], out, budget)
            self.clean[key] = weights(out)
        return self.clean[key]

    def sent_of_experts(self, kind: str) -> int:
        """The bytes that the server sent of the experts' weights, their headers among them."""
        server = self.server(kind)
        server.all_sent_bytes()
        return sum(server.sent_by_path[path] for path in self.expert_paths(kind))

    def expert_paths(self, kind: str) -> set[str]:
        """The paths of the experts' weights on a server."""
        files = [file for expert in self.family.experts for file in expert.glob("*.safetensors")]
        if kind == "hub":
            return {sha256(file.read_bytes()).hexdigest() for file in files}
        return {f"bucket/{file.relative_to(self.folder)}" for file in files}

    def header_bytes(self) -> int:
        """What looking into the experts' files asks for, and looking again at a few of them."""
        n_files = sum(len(list(expert.glob("*.safetensors"))) for expert in self.family.experts)
        return (n_files + 3) * FIRST_READ_BYTES


def weights(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.glob("*.safetensors"))}


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    folder = tmp_path_factory.mktemp("remote")
    family = write_family(folder, TINY, 2, shard_bytes=SHARD_BYTES)
    files = {f"bucket/{path.relative_to(folder)}": path for model in family.models for path in model.rglob("*")}
    with ExitStack() as stack:
        bucket = stack.enter_context(BucketServer({name: path.read_bytes() for name, path in files.items()}))
        hub = stack.enter_context(hub_server())
        for model in family.models:
            hub.commit(f"org/{model.name}", {path.name: path.read_bytes() for path in model.iterdir()})
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        set_environment(monkeypatch, bucket.url)
        monkeypatch.setattr(HttpClient.__init__, "__defaults__", (PATIENT_SECONDS, PATIENT_SECONDS))
        quick = partial(RetryPolicy, first_wait_seconds=0.001, longest_wait_seconds=0.01)
        monkeypatch.setattr(retry, "RetryPolicy", quick)
        yield Remote(folder, family, bucket, hub.cdn, hub.url)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["s3", "gs", "az", "http", "hub"])
def test_merge__of_remote_models_is_the_local_merge_and_is_made_again(
    kind: str, remote: Remote, tmp_path: Path
) -> None:
    server = remote.server(kind)
    server.faults = []
    clean = remote.clean_weights(kind, None, tmp_path / "clean")
    server.faults = [cut(1000), status(503)]
    remote.merge(kind, tmp_path / "out", None)
    assert server.faults == []
    mergepipe.replay(tmp_path / "out", tmp_path / "again", catalog=False, threads=1)
    assert weights(tmp_path / "out") == weights(tmp_path / "again") == clean
    for recorded in json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())["inputs"]:
        place = Location.parse(recorded["path"])
        assert place.scheme == {"hub": "hf"}.get(kind, kind)
        for file in recorded["files"]:
            status_now = Stores().stat(place / file["name"])
            assert status_now is not None
            assert file["version"] == status_now.version


def test_merge__of_whole_files_of_the_hub_is_held_to_their_digests(remote: Remote, tmp_path: Path) -> None:
    remote.hub.faults = [other_bytes] * 1000
    with pytest.raises(MergePipeError) as caught:
        remote.merge("hub", tmp_path / "out", None)
    remote.hub.faults = []
    assert caught.value.code == "input.changed"
    assert not (tmp_path / "out").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_budget__that_the_plan_spends_covers_one_cut_body(kind: str, remote: Remote, tmp_path: Path) -> None:
    """Of the budget the plan leaves a reserve, and says so; a request that was cut is repeated within it."""
    server = remote.server(kind)
    server.faults = []
    plan = mergepipe.plan(remote.recipe(kind), "60%", home=tmp_path / "home")
    server.all_sent_bytes()
    server.sent_by_path.clear()
    reserve_bytes = retry_reserve_bytes(plan.budget_bytes, plan.full_cost_bytes)
    assert any(told.decision.startswith(f"{format_bytes(reserve_bytes)} are left") for told in plan.fallbacks)
    assert plan.planned_bytes <= plan.budget_bytes - reserve_bytes < plan.budget_bytes
    lost, victims = list[int](), remote.expert_paths(kind)

    def cut_most_of_one(request: Request, answer: Answer) -> Answer:
        """Cut the first body of an expert whose repetition the reserve covers."""
        nbytes = len(answer.body)
        is_tensor = request.path in victims and request.range is not None and request.range[0] > 0
        if lost or not is_tensor or not reserve_bytes // 2 < nbytes <= reserve_bytes:
            return answer
        lost.append(nbytes - nbytes // 10)
        return cut(nbytes // 10)(request, answer)

    server.faults = [cut_most_of_one] * 10_000
    report = mergepipe.run(plan, tmp_path / "out", home=tmp_path / "home", threads=1)
    server.faults = []
    assert report.traffic.counts.retries == 1 == len(lost)
    assert report.expert_bytes + report.analysis_bytes == plan.planned_bytes + lost[0] <= plan.budget_bytes
    assert remote.sent_of_experts(kind) <= plan.budget_bytes + remote.header_bytes()


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_budget__is_kept_by_what_the_server_counts(kind: str, remote: Remote, tmp_path: Path) -> None:
    server = remote.server(kind)
    server.faults = [no_fault] * AFTER_READS + [status(503)] * 3
    server.all_sent_bytes()
    server.sent_by_path.clear()
    report = remote.merge(kind, tmp_path / "out", "60%")
    assert report.budget_bytes is not None
    assert remote.sent_of_experts(kind) <= report.budget_bytes + remote.header_bytes()
    assert report.traffic.counts.retries == 3
    recipe_bytes = remote.recipe(kind).stat().st_size
    assert sum(report.traffic.bytes_by_host.values()) + recipe_bytes == report.read_bytes
    run = json.loads((tmp_path / "out" / MANIFEST_NAME).read_bytes())["run"]
    assert run["retries"] == 3
    assert 0 < run["requests"] <= report.traffic.counts.requests


@pytest.mark.parametrize("kind", ["s3", "hub"])
def test_merge__that_is_interrupted_waits_for_no_silent_server(
    kind: str, remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HttpClient.__init__, "__defaults__", (PATIENT_SECONDS, PATIENT_SECONDS))
    server, silent = remote.server(kind), threading.Event()

    def fall_silent(request: Request, answer: Answer) -> Answer:
        if silent.is_set() or request.range is None or request.range[0] == 0:
            return answer  # headers are read from the start, before there is progress to report
        silent.set()
        return stall(0, PATIENT_SECONDS)(request, answer)

    def interrupt(_progress: mergepipe.Progress) -> None:
        if silent.is_set():
            raise KeyboardInterrupt

    server.faults = [fall_silent] * 1000
    with pytest.raises(KeyboardInterrupt):
        mergepipe.merge(remote.recipe(kind), tmp_path / "out", options=OPTIONS, on_progress=interrupt)
    assert server.is_answering  # the merge has ended, its silence has not
    assert not (tmp_path / "out").exists()
    server.stop_silence()


BAD_INPUTS = {
    "no such bucket": ("s3://elsewhere/base", None, "model.not-found"),
    "no permission": ("s3://bucket/base", 403, "storage.permission"),
    "a page, not a folder": ("{http}/bucket/expert-1/config.json", None, "checkpoint"),
    "no such folder": ("{http}/bucket/nothing", None, "model.not-found"),
    "no such model": ("hf://org/nothing", None, "model.not-found"),
    "no such revision": ("hf://org/base@v9", None, "model.not-found"),
    "no network": ("http://127.0.0.1:9/base", None, "storage.unreachable"),
}


@pytest.mark.parametrize("name", BAD_INPUTS)
def test_check__says_what_is_wrong_with_a_remote_input(name: str, remote: Remote, tmp_path: Path) -> None:
    text, refusal, code = BAD_INPUTS[name]
    model = text.format(http=remote.bucket.url)
    path = tmp_path / "recipe.yml"
    path.write_text(text_of(remote.folder).replace(f"{remote.folder}/expert-2", model))
    remote.bucket.faults = []
    try:
        if refusal is not None:
            remote.bucket.listing_fault = status(refusal)
        with pytest.raises(MergePipeError) as caught:
            mergepipe.check(path)
    finally:
        remote.bucket.listing_fault = no_fault
    assert caught.value.code.startswith(code)
    assert model in str(caught.value) or "models[1].model" in str(caught.value)
    assert all(problem.hint or name == "a page, not a folder" for problem in caught.value.problems)


# --- names of the Hub, branches that move ---


@pytest.fixture
def hub(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub of its own, with the family."""
    with hub_server() as server:
        for model in remote.family.models:
            server.commit(f"org/{model.name}", {path.name: path.read_bytes() for path in model.iterdir()})
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def named_recipe(folder: Path) -> Path:
    """A recipe of names without a scheme, one of them of a branch."""
    path = folder / "recipe.yml"
    path.write_text(text_of("org", "expert-1@main"))
    return path


def test_merge__of_names_asks_once_for_each_revision_and_file(remote: Remote, hub: HubServer, tmp_path: Path) -> None:
    mergepipe.merge(named_recipe(tmp_path), tmp_path / "out", options=OPTIONS)
    names = [model.name for model in remote.family.models]
    asked = [request.path for request in hub.requests if "/revision/" in request.path]
    assert sorted(asked) == sorted(f"api/models/org/{name}/revision/main" for name in names)
    assert len(hub.resolves) <= sum(len(list(model.iterdir())) for model in remote.family.models) + 1
    assert weights(tmp_path / "out") == remote.clean_weights("hub", None, tmp_path / "clean")


def test_merge__goes_on_when_locations_expire_and_branches_move(remote: Remote, hub: HubServer, tmp_path: Path) -> None:
    def expire_and_move(_request: Request, _answer: Answer) -> Answer:
        hub.expire_locations()
        for model in remote.family.models:
            hub.commit(f"org/{model.name}", {"model.safetensors": b"other"})
        return Answer(403)

    clean = remote.clean_weights("hub", None, tmp_path / "clean")
    hub.cdn.faults = [*([no_fault] * 8), expire_and_move]
    mergepipe.merge(named_recipe(tmp_path), tmp_path / "out", options=OPTIONS)
    assert hub.cdn.signature == 1
    assert weights(tmp_path / "out") == clean


@pytest.mark.usefixtures("hub")
def test_pack__of_a_model_of_the_hub_is_that_of_files_named_as_its_repository(remote: Remote, tmp_path: Path) -> None:
    report = mergepipe.pack("hf://org/base", ["hf://org/expert-1"], tmp_path, home=tmp_path / "home")
    assert [str(packed.store) for packed in report.experts] == [str(tmp_path / "expert-1")]
    mergepipe.pack(remote.family.base, remote.family.experts[:1], tmp_path / "local", home=tmp_path / "home")
    made, wanted = (files_below(folder / "expert-1") for folder in (tmp_path, tmp_path / "local"))
    assert made.pop("mergepipe-store.json") != wanted.pop("mergepipe-store.json")  # which names base and expert
    assert made == wanted


def test_check__says_which_models_are_on_the_hub_and_what_one_without_weights_holds(
    hub: HubServer, tmp_path: Path
) -> None:
    commit = hub.commit("org/expert-2", hub.model_files("org/expert-2"))
    report = mergepipe.check(named_recipe(tmp_path))
    assert [model.model for model in report.models][-1] == f"org/expert-2 (hf://org/expert-2@{commit})"
    hub.commit("org/expert-2", {"README.md": b"", "notes.txt": b""})
    with pytest.raises(NotFoundError, match=r"no weights here, found: 'README\.md', 'notes\.txt'"):
        mergepipe.check(tmp_path / "recipe.yml")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_model_of_a_thousand_shards__takes_one_read_a_shard(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"model-{i:05}-of-01000.safetensors" for i in range(1, 1001)]
    header = b'{"%s":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    bodies = {name: header % name.encode() for name in names}
    files = {name: len(body).to_bytes(8, "little") + body + bytes(4) for name, body in bodies.items()}
    index = {"metadata": {}, "weight_map": {name: name for name in names}}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), "config.json": b"{}"}
    with BucketServer({f"bucket/m/{name}": content for name, content in files.items()}) as bucket, hub_server() as hub:
        set_environment(monkeypatch, bucket.url)
        hub.commit("org/m", files)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        place = {"s3": "s3://bucket/m", "http": f"{bucket.url}/bucket/m", "hub": "hf://org/m"}[kind]
        store = Stores()
        checkpoint = open_checkpoint(store, store.pin(Location.parse(place)))
        requests = [*bucket.requests, *hub.requests, *hub.cdn.requests]
        n_reads = sum(request.method == "GET" and "of-01000" in request.path for request in [*bucket.requests])
    assert len(checkpoint.tensors) == 1000
    assert len(requests) <= {"s3": 1010, "http": 2050, "hub": 2020}[kind]
    assert kind == "hub" or n_reads == 1000
