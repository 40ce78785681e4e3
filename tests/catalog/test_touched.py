"""Which snapshots hold something of a model: in a tensor, by touch maps, and at all, by lineage from the model down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mergepipe
from support.command_line import run_command
from support.model_folders import recipe_of, write_model

BLOCK = 16384
SHAPES = {"layers.0.weight": (4, BLOCK), "layers.1.weight": (2, BLOCK), "norm.weight": (8,)}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A base, `a` that changed the last blocks of layer 0 alone, `b` that changed layer 1, both analyzed."""
    monkeypatch.setenv("MERGEPIPE_HOME", str(tmp_path / "home"))
    rng = np.random.default_rng(3)
    base = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    of_a, of_b = dict(base), dict(base)
    of_a["layers.0.weight"] = base["layers.0.weight"].copy()
    of_a["layers.0.weight"][2:] += 1
    of_b["layers.1.weight"] = base["layers.1.weight"] + 1
    for name, tensors in {"base": base, "a": of_a, "b": of_b}.items():
        write_model(tmp_path / name, tensors)
    mergepipe.analyze(tmp_path / "base", [tmp_path / "a", tmp_path / "b"], block_elements=BLOCK)
    return tmp_path


def merge(home: Path, out: str, base: str, experts: str, **budget: Any) -> None:
    models = {home / name: {"weight": 0.5} for name in experts}
    options: dict[str, Any] = {"select": "norm", "block_elements": BLOCK, **budget} if budget else {}
    mergepipe.merge(recipe_of("task_arithmetic", models, home / base), home / out, **options)


def held(tensor: str, model: Path | None = None) -> dict[str, list[tuple[str, str, str]]]:
    """By snapshot, newest first, the tensor, model and blocks of each use."""
    return {
        snapshot.path.name: [
            (use.name, Path(one.model).name, one.blocks) for use in snapshot.touched for one in use.uses
        ]
        for snapshot in mergepipe.list_snapshots(contained=model, touched=tensor)
    }


def test_touched__lists_the_blocks_of_the_experts_that_are_there(home: Path) -> None:
    merge(home, "full", "base", "ab")
    merge(home, "planned", "base", "ab", budget="100%")
    assert held("layers.0.weight", home / "a") == {
        "planned": [("layers.0.weight", "a", "2-3")],  # what equals the base is not read
        "full": [("layers.0.weight", "a", "0")],  # blocks of 256 Ki elements, all of them
    }
    assert held("layers.0.weight", home / "b") == {"full": [("layers.0.weight", "b", "0")]}
    assert list(held("layers.*")) == ["planned", "full"]
    assert held("layers.7.weight") == {}


def test_touched__a_block_that_a_budget_left_out_is_not_held(home: Path) -> None:
    merge(home, "less", "base", "ab", budget="33%", select="norm")
    reads = held("layers.*")["less"]
    of_a = held("layers.0.weight", home / "a").get("less", [])
    of_b = held("layers.1.weight", home / "b").get("less", [])
    assert sorted(reads) == sorted([*of_a, *of_b])
    explained = mergepipe.explain(home / "less", tensor="layers.*")
    uses = [(tensor.name, use) for tensor in explained.tensors for use in tensor.uses]
    assert set(reads) == {(name, Path(use.model).name, use.blocks) for name, use in uses if use.use == "read"}
    assert any(use.use == "omitted" for _, use in uses)


def test_touched__follows_experts_and_bases_through_earlier_snapshots(home: Path) -> None:
    merge(home, "first", "base", "a", budget="100%")
    merge(home, "on-it", "first", "b", budget="100%")  # its base holds a
    models = {home / "first": {"weight": 0.5}}
    mergepipe.merge(recipe_of("task_arithmetic", models, home / "base"), home / "of-it")  # its expert holds a
    assert held("layers.0.weight", home / "a") == {
        "of-it": [("layers.0.weight", "first", "0")],
        "on-it": [("layers.0.weight", "first", "2-3")],
        "first": [("layers.0.weight", "a", "2-3")],
    }
    assert held("layers.1.weight", home / "a") == {}
    (home / "first" / "mergepipe.json").unlink()
    assert held("layers.0.weight", home / "a") == {}


def test_touched__is_printed_by_ls(home: Path) -> None:
    merge(home, "planned", "base", "ab", budget="100%")
    printed = run_command(["ls", "--with", str(home / "a"), "--touched", "layers.0.weight"]).out
    assert printed.splitlines()[0].split() == ["sid", "path", "tensor", "from", "blocks", "of"]
    assert printed.splitlines()[1].split()[-2:] == ["2-3", "4"]
    content = json.loads(run_command(["ls", "--touched", "layers.1.*", "--json"]).out)
    (snapshot,) = content["snapshots"]
    assert [(use["name"], use["touched"]) for use in snapshot["touched"]] == [("layers.1.weight", "0-1")]
    assert run_command(["ls", "--touched", "nothing"]).out.strip() == "no snapshots"


def test_lineage__goes_down_from_a_model_that_is_no_snapshot(home: Path) -> None:
    merge(home, "first", "base", "a")
    merge(home, "second", "base", "ab")
    models = {home / "first": {"weight": 0.5}}
    mergepipe.merge(recipe_of("task_arithmetic", models, home / "base"), home / "third")
    nodes = mergepipe.lineage(home / "a", down=True)
    assert [(node.depth, node.role, Path(node.path).name) for node in nodes] == [
        (0, "model", "a"), (1, "expert", "first"), (2, "expert", "third"), (1, "expert", "second"),
    ]  # fmt: skip
    assert (nodes[0].sid, nodes[0].operator) == (None, None)
    printed = run_command(["lineage", "--down", str(home / "a")]).out.splitlines()
    assert printed[0] == f"model {home / 'a'}"
    assert printed[1].startswith(f"├─ expert of {home / 'first'} = task_arithmetic ")
    assert [node.depth for node in mergepipe.lineage(home / "base", down=True)] == [0, 1, 2, 1, 1]
    assert run_command(["lineage", str(home / "a")]).exit_code != 0  # upwards there is nothing to know
    write_model(home / "unused", {"norm.weight": np.zeros(8, np.float32)})
    assert "not a snapshot" in run_command(["lineage", "--down", str(home / "unused")]).err


def test_lineage__down_from_a_content_digest_finds_copies(home: Path) -> None:
    for folder, out in (("a", "first"), ("moved", "second")):
        models = {home / folder: {"weight": 0.5, "density": 0.5}}  # what is dropped follows from the content
        mergepipe.merge(recipe_of("dare_linear", models, home / "base"), home / out)
        if folder == "a":
            (home / "a").rename(home / "moved")
    (_, expert) = mergepipe.show(home / "first").inputs
    assert expert.content_id is not None
    made = mergepipe.lineage(expert.content_id[:10], down=True)
    assert [Path(node.path).name for node in made[1:]] == ["first", "second"]
