"""Training checkpoints in buckets and on the Hub: read by ranges as those of this machine, and outputs in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from composing import FORMATS, hidden, tree
from test_export import WRITERS

import mergepipe
from mergepipe import tailor
from mergepipe.errors import MergePipeError
from support.bucket_outputs import Killed, files_below, objects_below, watch_buckets
from support.fault_server import BucketServer
from support.hub_server import hub_server
from support.remote_stores import set_environment
from support.s3_server import S3Server
from support.slow_cases import slow_unless
from support.torch_bytes import torch_bytes
from support.training_trees import decoder_shapes, known_states


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    """A bucket that is read alone, of a server whose answers take little time."""
    with BucketServer({}) as server:
        set_environment(monkeypatch, server.url)
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    set_environment(monkeypatch, server.url)
    return server


def put(server: BucketServer, prefix: str, folder: Path) -> None:
    for name, content in files_below(folder).items():
        server.put(f"bucket/{prefix}/{name}", content)


def weights_of(folder: Path) -> dict[str, bytes]:
    return {name: file for name, (file, *_) in tree(folder).items() if name.endswith(".safetensors")}


LIKE_OTHERS = {"zero1", "zero2-regrouped", "zero3", "zero3-regrouped", "titan-weights", "universal-3"}
"""Kinds whose files another kind has too, with other values."""


@pytest.mark.thorough
@pytest.mark.parametrize("kind", slow_unless(lambda kind: kind not in LIKE_OTHERS, WRITERS))
def test_export__of_a_bucket_is_that_of_a_folder(tmp_path: Path, sources: BucketServer, kind: str) -> None:
    WRITERS[kind](tmp_path / "at-9", known_states(decoder_shapes(), step=9))
    put(sources, f"{kind}/at-9", tmp_path / "at-9")
    tailor.export(f"s3://bucket/{kind}/at-9", tmp_path / "out", dtype="bfloat16", self_check="full")
    tailor.export(tmp_path / "at-9", tmp_path / "local", dtype="bfloat16")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "local") != {}


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "optimizer"), [("zero2", "none"), ("dcp", "average"), ("verl", "average")])
def test_average__of_a_bucket_is_that_of_folders(
    tmp_path: Path, sources: BucketServer, kind: str, optimizer: str
) -> None:
    for step in (7, 9):
        FORMATS[kind](tmp_path / f"at-{step}", known_states(decoder_shapes(), seed=step, step=step))
        put(sources, f"average-{kind}/at-{step}", tmp_path / f"at-{step}")
    remote = [f"s3://bucket/average-{kind}/at-{step}" for step in (7, 9)]
    tailor.average(remote, tmp_path / "out", weights="wma", optimizer=optimizer)
    tailor.average([tmp_path / "at-7", tmp_path / "at-9"], tmp_path / "local", weights="wma", optimizer=optimizer)
    made, wanted = (
        {
            name: file
            for name, file in files_below(tmp_path / out).items()
            if name not in ("mergepipe.json", "README.md")
        }
        for out in ("out", "local")
    )
    assert made == wanted != {}


def test_compose__takes_units_from_a_bucket(tmp_path: Path, sources: BucketServer) -> None:
    for step in (7, 9):
        FORMATS["zero3"](tmp_path / f"at-{step}", known_states(decoder_shapes(), seed=step, step=step))
    put(sources, "compose/at-7", tmp_path / "at-7")
    (opened,) = tailor.inspect("s3://bucket/compose/at-7").checkpoints
    assert str(opened.path) == "s3://bucket/compose/at-7"
    assert tailor.recipe("s3://bucket/compose", strategy="latest") == "default: s3://bucket/compose/at-7\n"
    for name, place in (("remote", "s3://bucket/compose/at-7"), ("local", "at-7")):
        (tmp_path / f"{name}.yml").write_text(f"default: at-9\ntake: [{{from: '{place}', units: [layers even]}}]\n")
        tailor.compose(tmp_path / f"{name}.yml", tmp_path / name)
    made, wanted = (files_below(tmp_path / name) for name in ("remote", "local"))
    made.pop("mergepipe.json"), wanted.pop("mergepipe.json")
    assert made == wanted


@pytest.mark.parametrize("kind", ["hf", "zero2", "zero3", "dcp"])
def test_compose__stacks_layers_of_a_bucket_as_those_of_folders(
    tmp_path: Path, sources: BucketServer, kind: str
) -> None:
    text = (
        "merge_method: passthrough\nbase_model: {0}/at-9\nslices:\n"
        "- sources: [{{model: {0}/at-9, layer_range: [0, 2]}}]\n- sources: [{{model: {0}/at-7, layer_range: [0, 3]}}]\n"
    )
    made = {}
    for step in (7, 9):
        folder = tmp_path / f"at-{step}"
        FORMATS[kind](folder, known_states(decoder_shapes(), seed=step, step=step))
        if (folder / "config.json").exists():
            config = '{"model_type": "llama", "num_hidden_layers": 3, "tie_word_embeddings": false}'
            (folder / "config.json").write_text(config)
        put(sources, f"stacked-{kind}/at-{step}", folder)
    for name, place in (("remote", f"s3://bucket/stacked-{kind}"), ("local", str(tmp_path))):
        (tmp_path / f"{name}.yml").write_text(text.format(place))
        tailor.compose(tmp_path / f"{name}.yml", tmp_path / name, self_check="full")
        made[name] = {key: file for key, file in files_below(tmp_path / name).items() if key != "mergepipe.json"}
    assert made["remote"] == made["local"] != {}


def test_export__of_the_hub_records_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FORMATS["hf-zero2"](tmp_path / "at-9", known_states(decoder_shapes(), step=9))
    with hub_server() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        commit = server.commit("org/run", {f"checkpoint-9/{n}": f for n, f in files_below(tmp_path / "at-9").items()})
        report = tailor.export("hf://org/run/checkpoint-9", tmp_path / "out", config="hf://org/run/checkpoint-9")
    tailor.export(tmp_path / "at-9", tmp_path / "local")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "local") != {}
    assert report.manifest is not None
    assert [source.path for source in report.manifest.inputs] == [f"hf://org/run@{commit}/checkpoint-9"]


def test_export__of_a_bucket_refuses_what_lacks_a_file(tmp_path: Path, bucket: S3Server) -> None:
    FORMATS["verl"](tmp_path / "at-9", known_states(decoder_shapes(), step=9))
    files = files_below(tmp_path / "at-9")
    del files["model_world_size_2_rank_1.pt"]
    bucket.put("bucket", {f"lacking/{name}": file for name, file in files.items()})
    with pytest.raises(MergePipeError, match=r"s3://bucket/lacking: there is no model_world_size_2_rank_1\.pt"):
        tailor.export("s3://bucket/lacking", tmp_path / "out")
    with pytest.raises(MergePipeError, match="s3://bucket/nowhere: there is no such directory or file"):
        tailor.export("s3://bucket/nowhere", tmp_path / "out")
    assert ((tmp_path / "out").exists(), hidden(tmp_path)) == (False, [])


def test_export__reads_a_file_of_a_bucket(tmp_path: Path, sources: BucketServer) -> None:
    known = known_states(decoder_shapes())
    content = torch_bytes({"model": {name: known.arrays[name, "fp32"] for name in known.shapes}})
    (tmp_path / "step-3.pt").write_bytes(content)
    sources.put("bucket/files/step-3.pt", content)
    tailor.export("s3://bucket/files/step-3.pt", tmp_path / "out")
    tailor.export(tmp_path / "step-3.pt", tmp_path / "local")
    assert weights_of(tmp_path / "out") == weights_of(tmp_path / "local") != {}


@pytest.mark.thorough
@pytest.mark.usefixtures("bucket")
@pytest.mark.parametrize("optimizer", ["none", "last"])
def test_average__to_a_bucket_is_a_pushed_one(tmp_path: Path, optimizer: str) -> None:
    for step in (7, 9):
        FORMATS["hf-zero2"](tmp_path / f"at-{step}", known_states(decoder_shapes(), seed=step, step=step))
    sources = [tmp_path / "at-7", tmp_path / "at-9"]
    out = f"s3://bucket/made-{optimizer}"
    report = tailor.average(sources, out, optimizer=optimizer)
    tailor.average(sources, tmp_path / "local", optimizer=optimizer)
    pushed = mergepipe.push(tmp_path / "local", f"s3://bucket/pushed-{optimizer}")
    made, wanted = (objects_below(place) for place in (out, str(pushed.destination)))
    assert (str(report.out), report.manifest and report.manifest.sid) == (out, pushed.sid)
    assert made.pop("mergepipe.json") != wanted.pop("mergepipe.json")  # times differ
    assert made == wanted != {}
    assert mergepipe.verify(out).damages == ()
    assert hidden(tmp_path) == []
    with pytest.raises(MergePipeError, match="in a bucket is never replaced"):
        tailor.average(sources, out, optimizer=optimizer, force=True)
    with pytest.raises(MergePipeError, match="holds a snapshot already"):
        tailor.average(sources, out, optimizer=optimizer)


@pytest.mark.usefixtures("bucket")
def test_export__to_a_bucket_is_continued_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FORMATS["hf-zero2"](tmp_path / "at-9", known_states(decoder_shapes(), step=9))
    out = "s3://bucket/killed"
    with monkeypatch.context() as patch:
        requests = watch_buckets(patch)
        requests.fails_at = 4  # the marker, the probe and one file are there
        with pytest.raises(Killed):
            tailor.export(tmp_path / "at-9", out)
    assert ".mergepipe-upload.json" in objects_below(out)
    tailor.export(tmp_path / "at-9", out)
    assert mergepipe.verify(out).damages == ()
    assert ".mergepipe-upload.json" not in objects_below(out)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("s3://bucket/at-9/model", "overlaps the input"),
        ("https://host/model", "outputs cannot be written"),
        ("s3://nowhere/model", "nowhere"),
    ],
)
def test_export__refuses_places_of_buckets(tmp_path: Path, bucket: S3Server, out: str, message: str) -> None:
    FORMATS["hf-zero2"](tmp_path / "at-9", known_states(decoder_shapes(), step=9))
    bucket.put("bucket", {f"at-9/{name}": file for name, file in files_below(tmp_path / "at-9").items()})
    with pytest.raises(MergePipeError, match=message):
        tailor.export("s3://bucket/at-9", out)
