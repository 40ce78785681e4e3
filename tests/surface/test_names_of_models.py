"""One rule for the names of models, whichever command gets them: paths, models of the Hub, and what refuses them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path

import pytest

from mergepipe.cli import main, mergekit_main
from support.command_line import Ran, run_command
from support.families import TINY, write_family
from support.fault_server import Answer
from support.hub_cache_files import write_hub_cache
from support.hub_server import HubServer, hub_server, lead_to_hub
from support.model_folders import write_adapter
from support.training_trees import decoder_shapes, known_states, write_hf

COMMANDS: Mapping[str, tuple[str, ...]] = {
    "merge": ("merge", "merge.yml", "out"),
    "mergepipe-yaml": ("merge.yml", "out"),
    "check": ("check", "merge.yml"),
    "plan": ("plan", "merge.yml", "--all"),
    "sweep": ("sweep", "merge.yml", "--budgets", "50%"),
    "search": ("search", "search.yml", "-o", "out", "--evaluate", "echo 1"),
    "moe": ("moe", "moe.yml", "out"),
    "lora apply, the base": ("lora", "apply", "MODEL", "models/adapter", "-o", "out"),
    "lora apply, the adapter": ("lora", "apply", "models/base", "MODEL", "-o", "out"),
    "lora check, the base": ("lora", "check", "MODEL", "models/adapter", "models/base"),
    "lora check, the adapter": ("lora", "check", "models/base", "MODEL"),
    "lora check, the model": ("lora", "check", "models/base", "models/adapter", "MODEL"),
    "lora merge": ("lora", "merge", "models/adapter", "MODEL", "-o", "out"),
    "lora extract, the base": ("lora", "extract", "MODEL", "models/base", "-o", "out", "--rank", "2"),
    "lora extract, the model": ("lora", "extract", "models/base", "MODEL", "-o", "out", "--rank", "2"),
    "analyze, the base": ("analyze", "MODEL", "models/math"),
    "analyze, an expert": ("analyze", "models/base", "MODEL"),
    "pack, the base": ("pack", "MODEL", "models/math", "-o", "out"),
    "pack, an expert": ("pack", "models/base", "MODEL", "-o", "out"),
    "unpack": ("unpack", "MODEL", "-o", "out"),
    "verify": ("verify", "MODEL"),
    "replay": ("replay", "MODEL", "out"),
    "tailor inspect": ("tailor", "inspect", "MODEL"),
    "tailor export": ("tailor", "export", "MODEL", "-o", "out"),
    "tailor average": ("tailor", "average", "run/checkpoint-7", "MODEL", "-o", "out"),
    "tailor check": ("tailor", "check", "compose.yml"),
    "tailor compose": ("tailor", "compose", "compose.yml", "out"),
    "tailor recipe": ("tailor", "recipe", "--run", "MODEL", "--strategy", "latest"),
    "tailor diff": ("tailor", "diff", "run/checkpoint-7", "MODEL"),
}
"""Every command that reads a model by its name, which is `MODEL`, or in the recipe."""
LOCAL_COMMANDS: Mapping[str, tuple[str, ...]] = {
    "explain": ("explain", "MODEL"),
    "show": ("show", "MODEL"),
    "lineage": ("lineage", "MODEL"),
    "diff": ("diff", "MODEL", "MODEL"),
    "repair": ("repair", "MODEL"),
    "push": ("push", "MODEL", "s3://bucket/there"),
}
"""Commands on snapshots of this machine."""
RECIPES = {
    "merge.yml": "merge_method: task_arithmetic\nbase_model: models/base\n"
    "models: [{model: MODEL, parameters: {weight: 1}}]\n",
    "search.yml": "merge_method: task_arithmetic\nbase_model: models/base\n"
    "models: [{model: MODEL, parameters: {weight: {search: [1, 2]}}}]\n",
    "moe.yml": "base_model: models/base\ngate_mode: random\n"
    "experts: [{source_model: MODEL}, {source_model: models/math}]\n",
    "compose.yml": "default: run/checkpoint-7\ntake: [{from: MODEL, units: [embed]}]\n",
}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
Setting = Callable[[HubServer, pytest.MonkeyPatch], str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family as `models/base` and `models/math`, an adapter, and a run."""
    folder = tmp_path_factory.mktemp("models")
    family = write_family(folder / "family", TINY, 1)
    family.base.rename(folder / "base")
    family.experts[0].rename(folder / "math")
    shutil.rmtree(folder / "family")
    write_adapter(folder / "adapter", {})
    return folder


@pytest.fixture
def work(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder with `models/` and `run/`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(models)
    write_hf(tmp_path / "run" / "checkpoint-7", known_states(decoder_shapes(), step=7))
    return tmp_path


@pytest.fixture(scope="module")
def running() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def hub(running: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HubServer:
    """The stand-in, with a model that is none of what commands need, and without a token."""
    running.reset()
    running.commit("org/model", {"notes.txt": b"of nothing"})
    monkeypatch.setenv("HF_ENDPOINT", running.url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return running


def run_with(work: Path, model: str, command: tuple[str, ...], *, leaves: bool = False) -> Ran:
    """Run a command with `MODEL` as the name of its model; nothing may be left of it, unless it `leaves` an output."""
    for name, text in RECIPES.items():
        (work / name).write_text(text.replace("MODEL", model))
    before = set(work.iterdir())
    program = mergekit_main if command[0].endswith(".yml") else main
    ran = run_command([argument.replace("MODEL", model) for argument in command], program)
    assert leaves or set(work.iterdir()) - before <= {work / "hf"}
    return ran


def one_error(ran: Ran) -> str:
    """The one error of a command, without the line of a recipe that named the model."""
    errors = [line for line in ran.error_lines if line.startswith("error: ")]
    assert len(errors) == 1, ran.err
    return errors[0].partition(": ")[2]


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*COMMANDS, *LOCAL_COMMANDS])
def test_missing_folder__is_not_asked_of_the_hub_and_its_neighbours_are_listed(
    work: Path, hub: HubServer, name: str
) -> None:
    ran = run_with(work, "models/maths", {**COMMANDS, **LOCAL_COMMANDS}[name])
    assert ran.exit_code == 3
    assert "there is no folder 'models/maths'; models/ holds adapter, base, math [" in one_error(ran)
    assert hub.requests == []


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMMANDS)
def test_org_and_name__is_a_model_of_the_hub_for_every_command(work: Path, hub: HubServer, name: str) -> None:
    ran = run_with(work, "org/none", COMMANDS[name])
    assert ran.exit_code == 3
    expected = "there is no folder 'org/none', and on the Hub: the Hub has no public model 'org/none' (401)"
    assert expected in one_error(ran)
    assert {request.path for request in hub.requests} == {"api/models/org/none/revision/main"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMMANDS)
def test_bucket_of_the_hub__is_refused_by_that_name(work: Path, hub: HubServer, name: str) -> None:
    ran = run_with(work, "hf://buckets/org/name/folder", COMMANDS[name])
    assert (ran.exit_code, hub.requests) == (2, [])
    assert "hf://buckets/org/name/folder: is a bucket of the Hub, which is not read here; copy it" in one_error(ran)


def unknown_revision(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A revision with a slash, which the model does not have."""
    del hub, monkeypatch
    return "org/model@feature/x"


def offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """No network, by the setting of the Hub's tools."""
    del hub
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return "org/model"


def gated(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that has to be asked for, without a token."""
    del monkeypatch
    hub.gated.add("org/model")
    return "org/model"


def not_granted(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model that has to be asked for, with the token of an account that was not granted access."""
    monkeypatch.setenv("HF_TOKEN", hub.token)
    return gated(hub, monkeypatch)


def wrong_token(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """A token that the Hub does not know."""
    del hub
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    return "org/model"


REFUSALS: Mapping[str, tuple[Setting, int, str]] = {
    "an unknown revision": (
        unknown_revision, 3, "the model has no branch, tag or commit 'feature/x'; see hf.co/org/model/tree/main",
    ),
    "offline": (
        offline, 3,
        "there is no folder 'org/model', and on the Hub: HF_HUB_OFFLINE is set, and it is not in the local "
        "cache of the Hub; where there is a network, run `hf download org/model --local-dir model`, and name that "
        "folder [hub.offline]",
    ),
    "gated": (gated, 8, "is a gated model, and no token was sent; accept its terms at hf.co/org/model, then `hf auth"),
    "not granted": (not_granted, 8, "is a gated model, and your account has not been granted access; accept its terms"),
    "a wrong token": (wrong_token, 8, "the Hub does not accept the token (401); renew it by `hf auth login`, or"),
}  # fmt: skip


_OF_TRAINER = ("config.json", "model.safetensors", "optimizer.pt", "trainer_state.json")
NAMES_OF_KINDS = {
    "lora apply, the adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "lora check, the adapter": ("adapter_config.json", "adapter_model.safetensors"),
    "lora merge": ("adapter_config.json", "adapter_model.safetensors"),
    "unpack": ("mergepipe-store.json",),
    "verify": ("mergepipe.json",),
    "replay": ("mergepipe.json",),
    "tailor recipe": tuple(f"checkpoint-9/{name}" for name in _OF_TRAINER),
}
"""Files that a command looks for in the place of a model's."""


def files_for(command: str, models: Path) -> dict[str, bytes]:
    """The files of a repository that a command takes for what it needs."""
    if command in NAMES_OF_KINDS:
        return dict.fromkeys(NAMES_OF_KINDS[command], b"{}")
    files = {path.name: path.read_bytes() for path in (models / "base").iterdir()}
    return {**files, "trainer_state.json": b"{}", "optimizer.pt": b"{}"} if command.startswith("tailor") else files


@pytest.mark.thorough
@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("name", COMMANDS)
def test_refusal_of_the_hub__is_one_precise_line_of_every_command(
    models: Path, work: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str, refusal: str
) -> None:
    hub.commit("org/model", files_for(name, models))
    setting, exit_code, expected = REFUSALS[refusal]
    ran = run_with(work, setting(hub, monkeypatch), COMMANDS[name])
    assert expected in one_error(ran)
    assert ran.exit_code == exit_code


def cached(folder: Path, files: Mapping[str, bytes]) -> tuple[Path, Path]:
    """Write files as the cache of the Hub holds a model; return its folder, and that of its revision."""
    write_hub_cache(folder, "org/model", COMMIT, files)
    model = folder / "models--org--model"
    return model, model / "snapshots" / COMMIT


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*COMMANDS, *LOCAL_COMMANDS])
def test_cache_folder_of_a_model__is_refused_and_its_revision_named(
    models: Path, work: Path, hub: HubServer, name: str
) -> None:
    folder, revision = cached(work / "cache", files_for(name, models))
    ran = run_with(work, f"cache/{folder.name}", {**COMMANDS, **LOCAL_COMMANDS}[name])
    expected = f"is a model in the cache of the Hub, not one of its revisions; name cache/{folder.name}/snapshots/"
    expected += revision.name
    if name in (*LOCAL_COMMANDS, "verify", "replay"):
        expected = "holds no mergepipe.json: not a snapshot; give a snapshot, or its sid"
    assert expected in one_error(ran)
    assert (ran.exit_code, hub.requests) == (3, [])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "model"), zip(COMMANDS, cycle(["hf://org/model@try%2Fsecond", "org/model@try/second"]), strict=False)
)
def test_revision_with_a_slash__is_asked_for_by_every_command(
    models: Path, work: Path, hub: HubServer, name: str, model: str
) -> None:
    hub.commit("org/model", files_for(name, models), "try/second")
    run_with(work, model, COMMANDS[name], leaves=True)
    paths = {request.path for request in hub.requests if request.path.startswith("api/models/")}
    assert "api/models/org/model/revision/try/second" in paths
    assert "api/models/org/model/revision/main" not in paths


WRITING: Mapping[str, tuple[str, ...]] = {
    "push": ("push", "out", "OUT"),
    "merge": ("merge", "merge.yml", "OUT"),
    "run": ("run", "plan.json", "OUT"),
    "replay": ("replay", "out", "OUT"),
    "moe": ("moe", "moe.yml", "OUT"),
    "pack": ("pack", "models/base", "models/math", "-o", "OUT"),
    "lora apply": ("lora", "apply", "models/base", "models/adapter", "-o", "OUT"),
    "lora merge": ("lora", "merge", "models/adapter", "models/adapter", "-o", "OUT"),
    "lora extract": ("lora", "extract", "models/base", "models/math", "--rank", "2", "-o", "OUT"),
    "tailor export": ("tailor", "export", "run/checkpoint-7", "-o", "OUT"),
    "tailor average": ("tailor", "average", "run/checkpoint-7", "run/checkpoint-9", "-o", "OUT"),
    "tailor compose": ("tailor", "compose", "compose.yml", "OUT"),
}
"""Every command that writes to the Hub, which is `OUT`."""


@pytest.fixture
def written(work: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder with all that `WRITING` reads, and a token."""
    write_hf(work / "run" / "checkpoint-9", known_states(decoder_shapes(), seed=1, step=9))
    for file, text in RECIPES.items():
        model = "run/checkpoint-7" if file == "compose.yml" else "models/math"
        (work / file).write_text(text.replace("MODEL", model))
    assert run_command(["merge", "merge.yml", "out"]).exit_code == 0
    assert run_command(["plan", "merge.yml", "--all", "--out", "plan.json"]).exit_code == 0
    lead_to_hub(monkeypatch, hub, work / "hf")
    return work


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRITING)
def test_writing_offline__is_one_precise_line_before_anything_is_asked_or_computed(
    written: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = set(written.iterdir())
    ran = run_command([argument.replace("OUT", "hf://org/model") for argument in WRITING[name]])
    message = "HF_HUB_OFFLINE is set, and an output is sent to the Hub over the network"
    hint = "write a folder, and `mergepipe push` it where there is a network"
    assert ran.err == f"error: hf://org/model: {message}; {hint} [hub.offline]\n"
    assert (ran.exit_code, hub.requests) == (3, [])
    assert set(written.iterdir()) - before <= {written / "hf"}


@pytest.mark.thorough
@pytest.mark.parametrize("name", WRITING)
def test_token_without_the_right_to_write__is_one_precise_line(written: Path, hub: HubServer, name: str) -> None:
    """The Hub lets such a token read, and refuses all else."""
    hub.refuse = lambda request: _READ_ONLY if request.method == "POST" else None
    before = set(written.iterdir())
    ran = run_command([argument.replace("OUT", "hf://org/model") for argument in WRITING[name]])
    place = "hf://org/model/math" if name == "pack" else "hf://org/model"  # each expert in a folder of its name
    expected = f"{place}: the Hub does not let this token write (403); use a token that may write: set HF_TOKEN"
    lines = [line for line in ran.error_lines if line.startswith("error: ")]
    assert [expected in line for line in lines] == [True], ran.err
    assert ran.exit_code == 8
    assert set(written.iterdir()) - before <= {written / "hf"}
    assert (hub.n_commits("org/model"), hub.uploads) == (1, {})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "written_place", "address"),
    [
        (name, *forms)
        for name, forms in zip(
            WRITING, cycle([("hf:org/model", "hf://org/model"), ("s3:/bucket/x", "s3://bucket/x")]), strict=False
        )
    ],
)
def test_output_that_lacks_a_slash_of_an_address__is_no_folder_of_that_name(
    written: Path, hub: HubServer, name: str, written_place: str, address: str
) -> None:
    before = set(written.iterdir())
    ran = run_command([argument.replace("OUT", written_place) for argument in WRITING[name]])
    assert f"is not an address; write {address}" in one_error(ran)
    assert (hub.requests, set(written.iterdir())) == ([], before)


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMMANDS)
def test_model_that_lacks_a_slash_of_an_address__is_named_as_it_is_written(
    work: Path, hub: HubServer, name: str
) -> None:
    ran = run_with(work, "hf:org/model", COMMANDS[name])
    assert "there is no folder 'hf:org/model'; an address is written hf://org/model [" in one_error(ran)
    assert (ran.exit_code, hub.requests) == (3, [])


_ALONE = ("pack, an expert", "lora extract, the model", "lora merge", "unpack", "tailor export")


@pytest.mark.thorough
@pytest.mark.parametrize("name", _ALONE)
@pytest.mark.parametrize(
    "model", ["models/math+models/adapter", "org/model+org/adapter", "hf://org/model+hf://org/adapter"]
)
def test_model_with_an_adapter__where_a_model_alone_is_taken_says_what_makes_one(
    work: Path, hub: HubServer, name: str, model: str
) -> None:
    ran = run_with(work, model, COMMANDS[name])
    hint = "to name a model with an adapter, run `mergepipe lora apply MODEL ADAPTER -o OUT`, and name OUT"
    assert f"'{model}'; {hint} [model.not-found]" in one_error(ran)
    assert (ran.exit_code, hub.requests) == (3, [])


_READ_ONLY = Answer(403, b'{"error": "Forbidden: you must use a write token to upload to a repository."}')
