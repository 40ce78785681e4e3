"""Every cell of the table of verbs and places: what works has the local bytes, what is refused leaves nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from test_pairs import ROWS
from tools.reference.places import INPUT_KINDS, INPUT_PLACES, OUTPUTS, VERBS, Refusal, Verb

from mergepipe.storage import location
from mergepipe.storage.location import HUB_SCHEME, OBJECT_SCHEMES, WEB_SCHEMES
from mergepipe.storage.output_places import ANYWHERE
from mergepipe.storage.stores import OPENERS
from support.bucket_outputs import objects_below
from support.command_line import command_names
from support.hub_cache_files import write_hub_cache
from support.model_folders import recipe_of
from support.place_cells import Work, expect, run_in, steady, weights_below, write_subjects
from support.placed_models import PLACES, PlacedModels, files_of, placed_models

BY_NAME = {verb.name: verb for verb in VERBS}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlacedModels]:
    """What the cells read, in folders of this machine, and the stand-ins of all servers."""
    root = tmp_path_factory.mktemp("cells")
    with pytest.MonkeyPatch.context() as patched, placed_models(root) as placed:
        patched.setenv("MERGEPIPE_HOME", str(root / "home"))
        placed.lead(patched)
        write_subjects(root)
        yield placed


@pytest.fixture
def work(models: PlacedModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Work:
    monkeypatch.setenv("MERGEPIPE_HOME", str(models.root / "home"))
    models.lead(monkeypatch)
    return Work(models, tmp_path)


def local_out(verb: Verb, folder: Path) -> str:
    """Return a place of this machine for the output of a verb, in the form that it takes; empty if it takes none."""
    if verb.outputs is None or verb.name in ("sweep", "explain"):
        return ""
    if verb.name == "push":
        return f"s3://bucket/{folder.parent.name}-{folder.name}"
    return str(folder / "out")


ANSWERS = {"lora check": (0, 4, 5)}
"""Exit codes of verbs that answer by them."""


def result_of(verb: Verb, work: Work, subject: str) -> tuple[dict[str, bytes], object]:
    """Run a verb; the weights that it wrote, and what it printed that does not depend on places."""
    out = local_out(verb, work.folder)
    printing = [] if verb.outputs is not None or verb.name == "tailor recipe" else ["--json"]
    ran = run_in(work.folder, [*work.command(verb.name, subject, out), *printing])
    assert ran.exit_code in ANSWERS.get(verb.name, (0,)), ran.err
    assert ran.codes == [], ran.err
    if verb.name == "push":
        return weights_below(objects_below(out)), None
    written = weights_below(files_of(Path(out))) if out else {}
    return written, steady(ran.json()) if printing else None


_local: dict[str, tuple[dict[str, bytes], object]] = {}


INPUTS_IN_ROWS = {(row["verb"], row[factor]) for row in ROWS for factor in ("kind", "place")}
OUTPUTS_IN_ROWS = {(row["verb"], row["output"]) for row in ROWS}
"""What a row of `test_pairs` compares with the plain local run."""


def inputs_where(*, refused: bool) -> list[tuple[str, str]]:
    """The cells of inputs that are refused, or work."""
    return [
        (verb.name, kind)
        for verb in VERBS
        for kind in (*INPUT_PLACES, *INPUT_KINDS)
        if (kind in verb.inputs) == refused
    ]


def outputs_where(*, refused: bool) -> list[tuple[str, str]]:
    """The cells of outputs that are refused, or work."""
    return [
        (verb.name, kind)
        for verb in VERBS
        for kind in OUTPUTS
        if verb.outputs is not None and kind not in verb.absent_outputs and (kind in verb.outputs) == refused
    ]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), [cell for cell in inputs_where(refused=False) if cell not in INPUTS_IN_ROWS])
def test_input__gives_what_the_local_one_gives(work: Work, name: str, kind: str) -> None:
    verb = BY_NAME[name]
    made = result_of(verb, work, work.subject(name, kind))
    if kind == "folder":
        _local[name] = made
    elif kind in INPUT_PLACES:
        if name not in _local:
            folder = work.folder / "local"
            folder.mkdir()
            _local[name] = result_of(verb, Work(work.models, folder), work.subject(name, "folder"))
        assert made == _local[name]


LOOKED_UP = ("tailor check", "tailor compose")
"""Verbs of recipes that look up every name when they read the recipe; elsewhere the name alone decides."""


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), inputs_where(refused=True))
def test_input__that_is_refused_leaves_nothing(
    work: Work, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    verb = BY_NAME[name]
    subject = work.subject(name, kind)
    before = state_of(work.models)
    n_requests = request_counts(work.models)
    is_decided_by_name = kind in INPUT_PLACES and name not in LOOKED_UP
    if is_decided_by_name:
        monkeypatch.setenv("AWS_ENDPOINT_URL", work.models.web.url)  # which counts every request, as the Hub does
    check_refused(work, verb.inputs[kind], verb, subject, local_out(verb, work.folder))
    if is_decided_by_name:
        assert request_counts(work.models) == n_requests
        work.models.lead(monkeypatch)
    assert state_of(work.models) == before


def place_of(kind: str, work: Work) -> str:
    """Name a new place for an output of a kind."""
    name = work.folder.name
    match kind:
        case "bucket":
            return f"s3://bucket/{name}"
        case "hub":
            return f"hf://user/{name}"
        case "web":
            return f"{work.models.web.url}/{name}"
        case "safetensors" | "gguf":
            return str(work.folder / f"out.{kind}")
    return str(work.folder / "out")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"), [cell for cell in outputs_where(refused=False) if cell not in OUTPUTS_IN_ROWS]
)
def test_output__has_the_weights_of_a_folder(work: Work, name: str, kind: str) -> None:
    verb = BY_NAME[name]
    subject, out = work.subject(name, "folder"), place_of(kind, work)
    if kind == "hub" and name != "push":
        work.models.hub.commit(f"user/{work.folder.name}", {"README.md": b"mine"})
    command = work.command(name, subject, out)
    ran = run_in(work.folder, command)
    assert ran.exit_code == 0, ran.err
    assert not (work.folder / "hf:").exists()
    assert not (work.folder / "s3:").exists()
    if kind == "force":
        again = run_in(work.folder, [*command, "--force"])
        assert again.exit_code == 0, again.err
    if kind == "gguf":
        assert Path(out).read_bytes().startswith(b"GGUF")
        return
    if kind == "safetensors":
        assert load_file(out)
        return
    if name in PAGES:
        assert Path(out).is_file()
        return
    if kind == "bucket":
        files: Mapping[str, bytes] = objects_below(out)
    elif kind == "hub":
        files = work.models.hub.model_files(f"user/{work.folder.name}")
    else:
        files = files_of(Path(out))
    written = weights_below(files)
    local = work.folder / "local"
    local.mkdir()
    expected = result_of(verb, Work(work.models, local), subject)[0]
    assert written == expected
    assert written or name == "analyze"


PAGES = ("plan", "sweep", "explain")
"""Verbs whose output is one small file."""


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), outputs_where(refused=True))
def test_output__that_is_refused_asks_no_server(
    work: Work, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    verb = BY_NAME[name]
    assert verb.outputs is not None
    subject, models = work.subject(name, "folder"), work.models
    monkeypatch.setenv("AWS_ENDPOINT_URL", models.web.url)  # which counts every request, as the Hub does
    before = request_counts(models)
    out = place_of("folder" if kind == "force" else kind, work)
    check_refused(work, verb.outputs[kind], verb, subject, out, *(["--force"] if kind == "force" else []))
    assert request_counts(models) == before


def check_refused(work: Work, refusal: Refusal, verb: Verb, subject: str, out: str, *more: str) -> None:
    """Run a command that must be refused in one line, and must leave nothing on this machine."""
    command = [*work.command(verb.name, subject, out), *more]
    before = files_of(work.folder)
    ran = run_in(work.folder, command)
    assert (ran.exit_code != 0, ran.codes) == (True, [refusal.code]), ran.err
    assert len(ran.error_lines) == 1
    assert files_of(work.folder) == before
    assert not (work.folder / "out").exists()


def request_counts(models: PlacedModels) -> tuple[int, int]:
    """The requests that the servers have had so far."""
    return len(models.web.requests), len(models.hub.requests)


def state_of(models: PlacedModels) -> object:
    """What lies on all servers."""
    hub = models.hub
    commits = {model: hub.n_commits(model) for model in hub.models}
    return models.bucket.keys("bucket"), commits


def test_table__has_a_row_for_every_verb() -> None:
    """Commands on the catalog and on this machine alone name no models and no outputs."""
    without_places = {"ls", "gc", "status", "catalog rebuild", "catalog stats", "tailor diff"}
    assert {verb.name for verb in VERBS} == set(command_names()) - without_places
    for verb in VERBS:
        assert verb.inputs.keys() <= {*INPUT_PLACES, *INPUT_KINDS}
        assert (verb.outputs or {}).keys() | verb.absent_outputs <= OUTPUTS.keys()


def test_table__has_a_column_for_every_place() -> None:
    assert [*INPUT_PLACES] == [*PLACES]


SCHEMES = {
    "folder": ("",), "hub": (HUB_SCHEME,), "revision": (HUB_SCHEME,), "bucket": OBJECT_SCHEMES, "web": WEB_SCHEMES,
}  # fmt: skip
"""The schemes of locations by the column of the table that stands for them."""


def test_table__has_a_column_for_every_scheme() -> None:
    """A scheme that a store opens, or that a location names, has cells."""
    named = {
        scheme
        for constant, value in vars(location).items()
        if constant.endswith(("_SCHEME", "_SCHEMES")) and not isinstance(value, re.Pattern)
        for scheme in ((value,) if isinstance(value, str) else value)
    }
    of_columns = set().union(*SCHEMES.values())
    assert SCHEMES.keys() == INPUT_PLACES.keys()
    assert {"", *named} == of_columns == {*OPENERS}
    assert {*ANYWHERE, *WEB_SCHEMES} == of_columns


@pytest.mark.thorough
@pytest.mark.parametrize("name", BY_NAME)
def test_snapshot_in_the_cache_of_the_hub__gives_what_a_folder_gives(work: Work, name: str) -> None:
    verb = BY_NAME[name]
    subject = Path(work.subject(name, "folder"))
    commit = "0123456789abcdef0123456789abcdef01234567"
    write_hub_cache(work.folder / "cache", f"org/{subject.name}", commit, files_of(subject))
    revision = work.folder / "cache" / f"models--org--{subject.name}" / "snapshots" / commit
    weights, report = result_of(verb, work, str(revision))
    made = {name.replace(commit, subject.name): content for name, content in weights.items()}, report
    local = work.folder / "local"
    local.mkdir()
    assert made == result_of(verb, Work(work.models, local), str(subject))


MIXED = {
    "an expert on the Hub beside one in a bucket": ("folder", ("expert", "hub"), ("other", "bucket")),
    "a base on the Hub and experts here and on the web": ("hub", ("expert", "folder"), ("other", "web")),
    "a base in a bucket and a revision beside a folder": ("bucket", ("expert", "revision"), ("other", "folder")),
    "packed beside raw": ("folder", ("packs/expert", "bucket"), ("other", "hub")),
    "quantised beside raw": ("hub", ("quantised", "hub"), ("other", "folder")),
    "a snapshot beside a model": ("folder", ("snapshot", "bucket"), ("other", "hub")),
}
"""The place of the base, and two experts: a folder of the subjects, and the place that it is put at."""


@pytest.mark.thorough
@pytest.mark.parametrize("case", MIXED)
def test_merge__has_the_same_bytes_whatever_places_are_mixed(work: Work, case: str) -> None:
    base, *experts = MIXED[case]

    def merged(name: str, places: list[str]) -> dict[str, bytes]:
        named = [
            work.models.put(work.models.root / folder, place)
            for (folder, _), place in zip(experts, places[1:], strict=True)
        ]
        models = {named[0]: {"weight": 0.6}, named[1]: {"weight": 0.4}}
        text = json.dumps(recipe_of("task_arithmetic", models, work.models.put(work.models.root / "base", places[0])))
        (work.folder / f"{name}.yml").write_text(text)
        expect(run_in(work.folder, ["merge", f"{name}.yml", name]))
        return weights_below(files_of(work.folder / name))

    assert merged("mixed", [base, *(place for _, place in experts)]) == merged("local", ["folder"] * 3)


@pytest.mark.thorough
@pytest.mark.parametrize("verb", ["pack", "lora extract", "analyze", "diff"])
def test_two_inputs__of_two_places_give_what_local_ones_give(work: Work, verb: str) -> None:
    root = work.models.root
    names = ("snapshot", "other-snapshot") if verb == "diff" else ("base", "expert")
    more = {"pack": ["--out"], "lora extract": ["--rank", "2", "-o"], "analyze": ["--home"], "diff": ["--json"]}[verb]

    def made(places: tuple[str, str], out: str) -> object:
        first, second = (work.models.put(root / name, place) for name, place in zip(names, places, strict=True))
        ran = expect(run_in(work.folder, [*verb.split(), first, second, *more, *([] if verb == "diff" else [out])]))
        return steady(ran.json()) if verb == "diff" else weights_below(files_of(work.folder / out))

    local = made(("folder", "folder"), "local")
    assert made(("hub", "bucket"), "first") == local
    assert made(("bucket", "folder"), "second") == local


@pytest.mark.parametrize("place", ["hub", "revision", "bucket", "web"])
def test_lineage__of_an_address_is_that_of_the_snapshot_in_the_catalog(work: Work, place: str) -> None:
    root = work.models.root
    address = work.models.put(root / "snapshot", place)
    sid = expect(run_in(work.folder, ["show", str(root / "snapshot"), "--json"])).json()[
        "sid"
    ]  # other tests may have recorded the same snapshot elsewhere
    local = expect(run_in(work.folder, ["lineage", sid, "--json"])).json()
    assert expect(run_in(work.folder, ["lineage", address, "--json"])).json() == local
    unknown = run_in(work.folder, ["lineage", address, "--home", "empty"])
    assert (unknown.exit_code, unknown.codes) == (3, ["snapshot.not-found"])
    assert "a snapshot that is not in the catalog; `mergepipe show` lists its inputs" in unknown.err
    assert files_of(work.folder) == {}


def test_pack__makes_one_commit_of_each_expert_in_a_repository_and_none_of_what_is_there(work: Work) -> None:
    root, hub = work.models.root, work.models.hub
    hub.commit("user/packs", {"README.md": b"mine"})
    command = ["pack", str(root / "base"), str(root / "expert"), str(root / "other"), "--out", "hf://user/packs"]
    expect(run_in(work.folder, command))
    assert hub.n_commits("user/packs") == 3
    files = hub.model_files("user/packs")
    assert files["README.md"] == b"mine"
    assert [name for name, content in files.items() if str(root).encode() in content] == []
    expect(run_in(work.folder, command))
    assert hub.n_commits("user/packs") == 3
    for name in ("expert", "other"):
        pack = f"hf://user/packs/{name}"
        expect(run_in(work.folder, ["unpack", pack, "--base", str(root / "base"), "--out", name]))
        assert files_of(work.folder / name) == files_of(root / name)


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "hub", "web"])
@pytest.mark.parametrize("name", ["merge", "run"])
def test_executor_ray__takes_no_output_that_nodes_cannot_make_in_parts(work: Work, name: str, kind: str) -> None:
    command = work.command(name, work.subject(name, "folder"), place_of(kind, work))
    before, n_requests = files_of(work.folder), request_counts(work.models)
    ran = run_in(work.folder, [*command, "--executor", "ray"])
    assert (ran.codes, len(ran.error_lines)) == (["output.place"], 1), ran.err
    assert (files_of(work.folder), request_counts(work.models)) == (before, n_requests)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@pytest.mark.parametrize("name", ["merge", "run", "lora apply"])
def test_shard_size__of_an_output_that_is_one_file_is_refused(work: Work, name: str, kind: str) -> None:
    out = place_of(kind, work)
    command = work.command(name, work.subject(name, "folder"), out)
    before = files_of(work.folder)
    ran = run_in(work.folder, [*command, "--shard-size", "40KB"])
    message = "is one file, and a size of shards is given; leave the size out, or name a folder [option.conflict]"
    assert (ran.exit_code, ran.err) == (2, f"error: {out}: {message}\n")
    assert files_of(work.folder) == before


@pytest.mark.parametrize("place", ["s3://bucket/other", "hf://user/other", "https://host/other"])
@pytest.mark.parametrize(
    "command",
    [
        "sweep {root}/recipe.yml --work",
        "explain {root}/snapshot --masks",
        "analyze {root}/base {root}/expert --text {root}/recipe.yml --importance-out",
        "ls --home",
        "merge {root}/recipe.yml out --home",
    ],
)
def test_option__that_names_a_place_of_this_machine_takes_no_other(work: Work, command: str, place: str) -> None:
    ran = run_in(work.folder, [*command.format(root=work.models.root).split(), place])
    assert (ran.codes, len(ran.error_lines)) == (["output.place"], 1), ran.err
    assert files_of(work.folder) == {}
