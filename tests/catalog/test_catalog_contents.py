"""Statistics belong to contents: models that move, are copied or exchanged keep theirs, and never get another's."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from catalog_cases import WEIGHTS_NAME, make_checkpoint, make_statistics, reopened, same_bits
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mergepipe.catalog.catalog import Catalog
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, FileFingerprint
from mergepipe.checkpoints.file_digests import content_digest, with_digests
from mergepipe.storage.location import Location


def digested(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the digests of its files as they are now."""
    files = [checkpoint.root / file.name for file in checkpoint.files]
    return with_digests(
        checkpoint, {file.name: hashlib.sha256(file.local_path.read_bytes()).hexdigest() for file in files}
    )


def test_statistics__are_those_of_a_copy_once_both_digests_are_known(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        base = catalog.register_model(make_checkpoint(tmp_path / "base"))
        expert = catalog.register_model(digested(make_checkpoint(tmp_path / "expert", b"one")), "c" * 32)
        catalog.put_many(expert, base, {"a.weight": make_statistics(1)})
        checkpoint = make_checkpoint(tmp_path / "copy", b"one")
        assert catalog.model_for(checkpoint) is None
        copy = catalog.register_model(checkpoint)
        assert (copy.content_id, catalog.statistics(copy, base)) == (None, {})
        copy = catalog.register_model(digested(checkpoint))
        assert copy.content_id == "c" * 32
        assert same_bits(catalog.statistics(copy, base)["a.weight"], make_statistics(1))
        assert catalog.with_known_digests(checkpoint).files[0].sha256 == hashlib.sha256(b"one").hexdigest()
        assert catalog.model_for(checkpoint) == copy
        assert len(catalog.models()) == 3


def test_statistics__of_both_copies_are_put_together(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        base = catalog.register_model(make_checkpoint(tmp_path / "base"))
        rows = []
        for number, name in enumerate(("one", "two")):
            checkpoint = make_checkpoint(tmp_path / name, b"same")
            row = catalog.register_model(checkpoint)
            catalog.put_many(row, base, {f"own{number}": make_statistics(number)})
            catalog.put_many(base, row, {"back": make_statistics(3)})
            catalog.put_many(row, row, {"itself": make_statistics(4)})
            rows.append(catalog.register_model(digested(checkpoint)))
        for row in rows:
            assert catalog.statistics(row, base).keys() == {"own0", "own1"}
            assert same_bits(catalog.statistics(base, row)["back"], make_statistics(3))
            assert same_bits(catalog.statistics(rows[0], row)["itself"], make_statistics(4))
        assert catalog.drop_corrupt_statistics() == 0
        catalog.check_integrity()


def test_model_for__knows_a_version_that_is_a_digest_at_any_place(tmp_path: Path) -> None:
    version = f"sha256:{hashlib.sha256(b'weights').hexdigest()}"
    remote = (FileFingerprint(WEIGHTS_NAME, 7, version, f"{7:032x}"),)
    with Catalog.open(tmp_path / "home") as catalog:
        base = catalog.register_model(make_checkpoint(tmp_path / "base", b"other"))
        row = catalog.register_model(digested(make_checkpoint(tmp_path / "expert")))
        catalog.put_many(row, base, {"a.weight": make_statistics(1)})
        elsewhere = replace(make_checkpoint(tmp_path / "elsewhere"), files=remote)
        found = catalog.model_for(elsewhere)
        assert found is not None
        assert found.path == Location.local(tmp_path / "elsewhere")
        assert "a.weight" in catalog.statistics(found, base)
        unknown = replace(remote[0], version=f"sha256:{'0' * 64}")
        assert catalog.model_for(replace(elsewhere, files=(unknown,))) is None


def test_forget__statistics_stay_as_long_as_a_model_has_them(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        base = catalog.register_model(make_checkpoint(tmp_path / "base", b"base"))
        first, second = (make_checkpoint(tmp_path / name) for name in ("one", "two"))
        one, two = (catalog.register_model(digested(each)) for each in (first, second))
        catalog.put_many(one, base, {"a.weight": make_statistics(1)})
        catalog.forget_models([one])
        assert catalog.statistics(two, base).keys() == {"a.weight"}
        assert catalog.register_model(first).content_digest == one.content_digest
        catalog.forget_models(row for row in catalog.models() if row != base)
        assert (catalog.stats().analysed_tensors, catalog.models()) == (0, (base,))


def test_register_model__a_content_id_that_contradicts_a_digest_wins(tmp_path: Path) -> None:
    with Catalog.open(tmp_path / "home") as catalog:
        base = catalog.register_model(make_checkpoint(tmp_path / "base", b"base"))
        one, two = (digested(make_checkpoint(tmp_path / name)) for name in ("one", "two"))
        row = catalog.register_model(one, "c" * 32)
        catalog.put_many(row, base, {"a.weight": make_statistics(1)})
        catalog.register_model(two)
        other = catalog.register_model(two, "d" * 32)
        assert (other.content_digest, catalog.statistics(other, base)) == (None, {})
        assert catalog.statistics(row, base).keys() == {"a.weight"}


def test_content_digest__is_of_the_weights_and_how_they_are_read(tmp_path: Path) -> None:
    checkpoint = digested(make_checkpoint(tmp_path / "one"))
    (file,) = checkpoint.files
    renamed = replace(checkpoint, path=Location.local(tmp_path), files=(replace(file, name="other", version="9"),))
    assert content_digest(renamed) == content_digest(checkpoint) is not None
    two = replace(file, name="z", sha256="1" * 64)
    assert content_digest(replace(checkpoint, files=(file, two))) == content_digest(
        replace(checkpoint, files=(replace(two, name="a"), file))
    )
    different = [
        replace(checkpoint, kind=CheckpointKind.DELTA),
        replace(checkpoint, files=(replace(file, header_digest="0" * 32),)),
        replace(checkpoint, files=(replace(file, sha256="0" * 64),)),
        replace(checkpoint, files=(file, file)),
        replace(checkpoint, files=(file, two)),
        replace(checkpoint, files=(file, replace(two, name="/adapter/z"))),
    ]
    digests = [content_digest(each) for each in (checkpoint, *different)]
    assert len(set(digests)) == len(digests)
    assert None not in digests
    assert content_digest(replace(checkpoint, files=(file, replace(two, sha256=None)))) is None


PLACES = st.sampled_from(("a", "b", "c"))
CONTENTS = st.sampled_from((b"first", b"other", b"third"))


class MovingModels(RuleBasedStateMachine):
    """Files are written, copied, moved and exchanged; what the catalog says is always of the bytes that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.catalog = Catalog.open(self.folder / "home")
        self.base = self.catalog.register_model(make_checkpoint(self.folder / "base", b"base"))
        self.learnt: set[bytes] = set()

    def opened(self, place: str) -> Checkpoint | None:
        file = self.folder / place / WEIGHTS_NAME
        return reopened(make_checkpoint_of(file)) if file.exists() else None

    @rule(place=PLACES, content=CONTENTS)
    def write(self, place: str, content: bytes) -> None:
        make_checkpoint(self.folder / place, content)

    @rule(source=PLACES, goal=PLACES, is_move=st.booleans())
    def put(self, source: str, goal: str, is_move: bool) -> None:
        if source == goal or self.opened(source) is None:
            return
        shutil.rmtree(self.folder / goal, ignore_errors=True)
        (shutil.move if is_move else shutil.copytree)(self.folder / source, self.folder / goal)

    @rule(place=PLACES)
    def digest(self, place: str) -> None:
        checkpoint = self.opened(place)
        if checkpoint is not None:
            self.catalog.register_model(digested(checkpoint))

    @rule(place=PLACES)
    def analyse(self, place: str) -> None:
        checkpoint = self.opened(place)
        if checkpoint is not None:
            content = (self.folder / place / WEIGHTS_NAME).read_bytes()
            row = self.catalog.register_model(checkpoint)
            self.catalog.put_many(row, self.base, {"t": make_statistics(seed_of(content))})
            self.learnt.add(content)

    @precondition(lambda self: self.catalog.stale_models())
    @rule()
    def collect(self) -> None:
        self.catalog.forget_models(stale.model for stale in self.catalog.stale_models())

    @invariant()
    def statistics_are_of_the_bytes(self) -> None:
        for place in ("a", "b", "c"):
            checkpoint = self.opened(place)
            row = None if checkpoint is None else self.catalog.model_for(checkpoint)
            if row is not None:
                content = (self.folder / place / WEIGHTS_NAME).read_bytes()
                for statistics in self.catalog.statistics(row, self.base).values():
                    assert same_bits(statistics, make_statistics(seed_of(content)))

    def teardown(self) -> None:
        self.catalog.close()
        shutil.rmtree(self.folder)


def make_checkpoint_of(file: Path) -> Checkpoint:
    """A checkpoint over a file that is there, left as it is."""
    content, status = file.read_bytes(), file.stat()
    made = make_checkpoint(file.parent.parent / "model", content)
    assert file.stat() == status
    return replace(made, path=Location.local(file.parent), root=Location.local(file.parent))


def seed_of(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:4], "little")


TestMovingModels = MovingModels.TestCase
TestMovingModels.settings = settings(max_examples=12, stateful_step_count=14, deadline=None)
