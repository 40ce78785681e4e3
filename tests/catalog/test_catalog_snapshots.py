"""Snapshots, lineage and digests in the catalog, and where it is looked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from catalog_cases import NOON, WEIGHTS_NAME, make_checkpoint, make_manifest, publish, reopened, rewrite

from mergepipe import Catalog
from mergepipe.catalog.snapshots import LineageNode, SnapshotRow, containing
from mergepipe.checkpoints.content_id import with_digests
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.errors import NotFoundError, RecipeError, UnsupportedError
from mergepipe.options import home_of
from mergepipe.snapshots.manifest import Input, Manifest, RealizedBytes
from mergepipe.storage.location import Location
from support.refusals import refuses


def shape_of(nodes: tuple[LineageNode, ...]) -> list[str]:
    """A lineage as an indented list of directory names."""
    return [f"{' ' * node.depth}{Path(node.path).name}{'*' if node.is_repeated else ''}" for node in nodes]


def test_record_snapshot__gives_back_what_the_manifest_says(tmp_path: Path) -> None:
    for name in ("base", "expert"):
        (tmp_path / name).mkdir()
        (tmp_path / name / WEIGHTS_NAME).write_bytes(b"x")
    manifest = publish(tmp_path / "out", (tmp_path / "base", tmp_path / "expert"))
    catalog = Catalog(tmp_path / "home")
    row = catalog.record_snapshot(manifest, tmp_path / "out", created=NOON)
    assert (row.sid, row.path, row.operator, row.created) == (manifest.sid, tmp_path / "out", "linear", NOON)
    assert row.realized == manifest.realized
    assert row.plan_digest is None
    assert [(each.role, each.path, each.read_bytes, each.sid) for each in row.inputs] == [
        ("base", str(tmp_path / "base"), 100, None),
        ("expert", str(tmp_path / "expert"), 101, None),
    ]
    assert catalog.snapshots() == (row,)


def test_record_snapshot__a_time_needs_a_zone(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    with pytest.raises(ValueError, match="time zone"):
        catalog.record_snapshot(make_manifest("a"), tmp_path, created=datetime(2026, 1, 1))
    assert catalog.snapshots() == ()


def test_snapshots__are_listed_newest_first(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    for hours, name in ((1, "b"), (3, "c"), (2, "a")):
        catalog.record_snapshot(make_manifest(name), tmp_path / name, created=NOON + timedelta(hours=hours))
    assert [row.path.name for row in catalog.snapshots()] == ["c", "a", "b"]


def test_snapshot__is_found_by_path_sid_or_prefix(tmp_path: Path) -> None:
    manifest = make_manifest("a")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    catalog = Catalog(tmp_path / "home")
    row = catalog.record_snapshot(manifest, tmp_path / "out", created=NOON)
    for asked in (tmp_path / "out", tmp_path / "link", str(tmp_path / "out"), row.sid, row.sid.upper()):
        assert catalog.snapshot(asked) == row
    assert catalog.snapshot(row.sid[:4]) == row
    for wrong in (row.sid[:3], "", row.sid + "0", "%", "____", tmp_path / "elsewhere"):
        with refuses(NotFoundError, "snapshot.not-found"):
            catalog.snapshot(wrong)
    with pytest.raises(NotFoundError, match=f"3 digits of a sid are too few; give 4: {row.sid[:4]}"):
        catalog.snapshot(row.sid[:3])


def manifests_with_a_common_prefix() -> tuple[Manifest, Manifest]:
    seen: dict[str, Manifest] = {}
    for number in range(10_000):
        manifest = make_manifest(str(number))
        if manifest.sid[:4] in seen:
            return seen[manifest.sid[:4]], manifest
        seen[manifest.sid[:4]] = manifest
    raise AssertionError("no two sids begin alike")


def test_snapshot__an_ambiguous_prefix_is_refused_with_the_candidates(tmp_path: Path) -> None:
    one, two = manifests_with_a_common_prefix()
    catalog = Catalog(tmp_path / "home")
    for name, manifest in (("one", one), ("two", two)):
        catalog.record_snapshot(manifest, tmp_path / name, created=NOON)
    with refuses(RecipeError, "snapshot.ambiguous") as caught:
        catalog.snapshot(one.sid[:4])
    assert one.sid in str(caught.value)
    assert two.sid in str(caught.value)
    n_digits = int(caught.value.problems[0].hint.split()[1])
    assert one.sid[: n_digits - 1] == two.sid[: n_digits - 1]
    assert catalog.snapshot(one.sid[:n_digits]).sid == one.sid


def test_snapshot__the_same_sid_at_two_places_is_two_rows_and_the_newest_answers(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    for hours, name in ((2, "new"), (1, "old")):
        catalog.record_snapshot(make_manifest("a"), tmp_path / name, created=NOON + timedelta(hours=hours))
    assert len(catalog.snapshots()) == 2
    assert catalog.snapshot(make_manifest("a").sid).path == tmp_path / "new"
    catalog.forget(tmp_path / "new")
    assert catalog.snapshot(make_manifest("a").sid).path == tmp_path / "old"


def test_forget__takes_the_row_and_leaves_the_files(tmp_path: Path) -> None:
    manifest = publish(tmp_path / "out")
    catalog = Catalog(tmp_path / "home")
    row = catalog.record_snapshot(manifest, tmp_path / "out", created=NOON)
    assert catalog.forget(manifest.sid) == row
    assert catalog.snapshots() == ()
    assert (tmp_path / "out" / WEIGHTS_NAME).exists()
    with pytest.raises(NotFoundError):
        catalog.forget(manifest.sid)


def generations(catalog: Catalog, root: Path, edges: Mapping[str, tuple[str, ...]]) -> None:
    """Publish and record snapshots in the order of `edges`; an input that is no key is a plain model."""
    for number, (name, inputs) in enumerate(edges.items()):
        for source in inputs:
            if source not in edges:
                (root / source).mkdir(exist_ok=True)
                (root / source / WEIGHTS_NAME).write_bytes(b"x")
        manifest = publish(root / name, tuple(root / source for source in inputs))
        catalog.record_snapshot(manifest, root / name, created=NOON + timedelta(minutes=number))


def test_lineage__goes_through_snapshots_to_the_models(tmp_path: Path) -> None:
    edges = {"one": ("base", "x"), "two": ("base", "one", "y"), "three": ("two", "one")}
    catalog = Catalog(tmp_path / "home")
    generations(catalog, tmp_path, edges)
    nodes = catalog.lineage(tmp_path / "three")
    assert shape_of(nodes) == ["three", " two", "  base", "  one", "   base", "   x", "  y", " one*"]
    assert [node.operator for node in nodes] == ["linear", "linear", None, "linear", None, None, None, "linear"]
    assert [node.role for node in nodes[:4]] == ["snapshot", "base", "base", "expert"]
    assert nodes[1].sid == catalog.snapshot(tmp_path / "two").sid


def test_lineage__a_forgotten_generation_still_shows_its_sid(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    generations(catalog, tmp_path, {"one": ("base",), "two": ("one",)})
    sid = catalog.forget(tmp_path / "one").sid
    nodes = catalog.lineage(tmp_path / "two")
    assert [(Path(node.path).name, node.sid, node.operator) for node in nodes[1:]] == [("one", sid, None)]


def test_lineage__an_input_replaced_since_keeps_the_sid_it_had(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    generations(catalog, tmp_path, {"one": ("base",), "two": ("one",)})
    before = catalog.snapshot(tmp_path / "one").sid
    rewrite(tmp_path / "one" / WEIGHTS_NAME, b"other")
    catalog.record_snapshot(make_manifest("other"), tmp_path / "one", created=NOON)
    assert catalog.lineage(tmp_path / "two")[1].sid == before


def test_lineage__an_input_changed_by_hand_is_not_taken_for_the_snapshot(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    generations(catalog, tmp_path, {"one": ("base",)})
    manifest = publish(tmp_path / "two", (tmp_path / "one",))
    rewrite(tmp_path / "one" / WEIGHTS_NAME, b"by hand")
    catalog.record_snapshot(manifest, tmp_path / "two", created=NOON)
    assert catalog.lineage(tmp_path / "two")[1].sid is None


def test_lineage__a_cycle_ends_where_it_closes(tmp_path: Path) -> None:
    catalog = Catalog(tmp_path / "home")
    for name in ("a", "b"):
        publish(tmp_path / name)
    for name, source in (("a", "b"), ("b", "a")):  # each from the other, as replacing in place can make it seem
        catalog.record_snapshot(make_manifest(name, (tmp_path / source,)), tmp_path / name, created=NOON)
    assert shape_of(catalog.lineage(tmp_path / "a")) == ["a", " b", "  a*"]


def test_lineage__many_generations_with_two_ways_each_stay_small(tmp_path: Path) -> None:
    edges: dict[str, tuple[str, ...]] = {"g0": ("base",), "g1": ("g0",)}
    edges |= {f"g{n}": (f"g{n - 1}", f"g{n - 2}") for n in range(2, 60)}
    catalog = Catalog(tmp_path / "home")
    generations(catalog, tmp_path, edges)
    nodes = catalog.lineage(tmp_path / "g59")
    assert len(nodes) == 1 + sum(len(inputs) for inputs in edges.values())
    assert max(node.depth for node in nodes) == 60


def test_lineage__down_shows_what_was_made_from_a_snapshot(tmp_path: Path) -> None:
    edges = {"one": ("base", "x"), "two": ("base", "one", "y"), "three": ("two", "one"), "other": ("base",)}
    catalog = Catalog(tmp_path / "home")
    generations(catalog, tmp_path, edges)
    nodes = catalog.lineage(tmp_path / "one", down=True)
    assert shape_of(nodes) == ["one", " two", "  three", " three*"]
    assert [node.role for node in nodes] == ["snapshot", "expert", "base", "expert"]
    assert shape_of(catalog.lineage(tmp_path / "three", down=True)) == ["three"]


def row_with(name: str, **fields: str) -> SnapshotRow:
    """A row of one input that has these fields."""
    source = Input(role="expert", model="m", path="/m", content_id=None, read_bytes=1)
    inputs = (replace(source, **fields),)  # type: ignore[arg-type]
    return SnapshotRow(name, Path("/out") / name, "ties", NOON, None, "d", RealizedBytes(0, 0, 0, 0, 0), inputs)


COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB_PATH = f"hf://org/math@{COMMIT}"


@pytest.mark.parametrize(
    ("reference", "fields"),
    [
        ("/models/math", {"path": "/models/math"}),
        ("/models/math/model.safetensors", {"path": "/models/math"}),
        ("math", {"path": "/models/math"}),
        ("../models/math", {"model": "../models/math"}),
        ("/models/lora", {"path": "/models/math+/models/lora"}),
        ("math", {"path": HUB_PATH}),
        ("hf://org/math", {"path": HUB_PATH}),
        (HUB_PATH, {"path": HUB_PATH}),
        (COMMIT[:7], {"path": HUB_PATH}),
        (COMMIT, {"path": f"/hub/models--org--math/snapshots/{COMMIT}"}),
        ("abcdef0", {"content_id": "abcdef0123"}),
        ("abcdef0", {"sid": "abcdef0123"}),
    ],
)
def test_containing__a_model_is_known_by_path_file_name_address_commit_and_digest(
    reference: str, fields: dict[str, str]
) -> None:
    wanted = row_with("wanted", **fields)
    assert containing((wanted, row_with("other", path="/models/mathematics")), reference) == (wanted,)


@pytest.mark.parametrize("reference", ["mat", "/models", "hf://org/mat", "/models/math2", "nothing", COMMIT[:6]])
def test_containing__parts_of_names_are_no_names(reference: str) -> None:
    rows = (row_with("one", path="/models/math"), row_with("two", path=HUB_PATH))
    assert containing(rows, reference) == ()


def test_containing__goes_through_generations(tmp_path: Path) -> None:
    edges = {"one": ("base", "x"), "two": ("base", "one"), "three": ("two",), "other": ("base",)}
    catalog = Catalog(tmp_path / "home")
    generations(catalog, tmp_path, edges)
    rows = containing(catalog.snapshots(), "x")
    assert sorted(row.path.name for row in rows) == ["one", "three", "two"]


def test_record_snapshot__any_path_and_text_is_stored_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a'b\"; DROP TABLE models; --\nü"
    manifest = replace(make_manifest("a"), operator="x'; --")
    catalog = Catalog(tmp_path / "home")
    row = catalog.record_snapshot(manifest, path, created=NOON)
    assert (row.path, row.operator) == (path, "x'; --")
    assert catalog.snapshot(path) == row


SHA256 = "ab" * 32


def digest_known(catalog: Catalog, checkpoint: Checkpoint) -> str | None:
    return catalog.with_known_digests(checkpoint).file_ids[0].sha256


@pytest.fixture(name="model")
def with_digest(tmp_path: Path) -> Checkpoint:
    model = make_checkpoint(tmp_path / "model")
    catalog = Catalog(tmp_path / "home")
    catalog.record_digests(with_digests(model, {model.files[0].location: SHA256}))
    return model


def test_digests__are_known_of_the_same_version_and_of_no_other(tmp_path: Path, model: Checkpoint) -> None:
    catalog = Catalog(tmp_path / "home")
    assert digest_known(catalog, model) == SHA256
    (file,) = model.files
    longer = replace(file, id=replace(file.id, size_bytes=file.id.size_bytes + 1))
    assert digest_known(catalog, replace(model, files=(longer,))) is None
    assert digest_known(catalog, make_checkpoint(tmp_path / "other")) is None
    rewrite(tmp_path / "model" / WEIGHTS_NAME, b"wEights")
    assert digest_known(catalog, reopened(model)) is None


def test_digests__are_found_through_links(tmp_path: Path, model: Checkpoint) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "model")
    linked = replace(model.files[0], location=Location.local(tmp_path / "link" / WEIGHTS_NAME))
    catalog = Catalog(tmp_path / "home")
    assert digest_known(catalog, replace(model, files=(linked,))) == SHA256


def test_digests__a_later_version_takes_the_place_of_an_earlier_one(tmp_path: Path, model: Checkpoint) -> None:
    rewrite(tmp_path / "model" / WEIGHTS_NAME, b"wEights")
    later = reopened(model)
    catalog = Catalog(tmp_path / "home")
    catalog.record_digests(with_digests(later, {later.files[0].location: "cd" * 32}))
    assert (digest_known(catalog, model), digest_known(catalog, later)) == (None, "cd" * 32)
    assert catalog.stats().digests == 1


def test_digests__that_fingerprints_hold_are_kept(tmp_path: Path, model: Checkpoint) -> None:
    catalog = Catalog(tmp_path / "home")
    assert digest_known(catalog, with_digests(model, {model.files[0].location: "ef" * 32})) == "ef" * 32


def test_digests__of_a_path_that_is_not_text_are_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "caf\udce9")
    model = with_digests(model, {model.files[0].location: SHA256})
    catalog = Catalog(tmp_path / "home")
    with refuses(UnsupportedError, "catalog.path-encoding"):
        catalog.record_digests(model)


def test_home_of__an_explicit_path_wins() -> None:
    assert home_of(Path("/asked"), {"MERGEPIPE_HOME": "/env"}, "linux") == Path("/asked")


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({"MERGEPIPE_HOME": "/env", "XDG_DATA_HOME": "/xdg"}, "linux", "/env"),
        ({"MERGEPIPE_HOME": "/env/../other"}, "darwin", "/other"),
        ({"MERGEPIPE_HOME": "", "XDG_DATA_HOME": "/xdg"}, "linux", "/xdg/mergepipe"),
        ({"XDG_DATA_HOME": "relative"}, "linux", "~/.local/share/mergepipe"),
        ({"XDG_DATA_HOME": ""}, "linux", "~/.local/share/mergepipe"),
        ({}, "linux", "~/.local/share/mergepipe"),
        ({"XDG_DATA_HOME": "/xdg"}, "darwin", "~/Library/Application Support/mergepipe"),
        ({"MERGEPIPE_HOME": "~/mine"}, "linux", "~/mine"),
    ],
)
def test_home_of__follows_the_environment(environment: dict[str, str], platform: str, expected: str) -> None:
    assert home_of(None, environment, platform) == home_of("", environment, platform) == Path(expected).expanduser()


def test_home_of__is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MERGEPIPE_HOME", "here")
    assert home_of(None) == tmp_path / "here"
    assert home_of(Path("there")) == tmp_path / "there"
