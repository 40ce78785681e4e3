"""A pack that is interrupted goes on to the same store. Failing calls and killed ones are in the other files here."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import mergepipe
from mergepipe.deltastore import builder as store_building
from mergepipe.deltastore.builder import StoreBuilder
from mergepipe.errors import StorageError
from mergepipe.reports import PackReport, Progress
from support.bucket_outputs import files_below
from support.public_names import BLOCK_ELEMENTS, LOG_NAME
from support.safetensors_bytes import file_bytes

SIZES = (5000, BLOCK_ELEMENTS + 100, 300, 2 * BLOCK_ELEMENTS)


@dataclass(frozen=True, slots=True)
class PackCase:
    """A base, two experts, and what packing them gives when nothing interferes."""

    root: Path
    wanted: dict[str, bytes]

    @property
    def out(self) -> Path:
        return self.root / "stores"

    def run(self) -> PackReport:
        """Pack, or go on with what is there."""
        experts = [self.root / "expert-1", self.root / "expert-2"]
        return mergepipe.pack(self.root / "base", experts, self.out, threads=2)

    def clear(self) -> None:
        """Remove what was made."""
        shutil.rmtree(self.out, ignore_errors=True)


def write_model(folder: Path, values: list[np.ndarray[tuple[int], np.dtype[np.uint16]]]) -> None:
    header, at = {}, 0
    for i, each in enumerate(values):
        header[f"t{i}"] = {"dtype": "BF16", "shape": [len(each)], "data_offsets": [at, at + each.nbytes]}
        at += each.nbytes
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(file_bytes(header, b"".join(each.tobytes() for each in values)))
    (folder / "config.json").write_text("{}")


@pytest.fixture(name="case")
def make_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackCase:
    """Records after every block, all files small."""
    monkeypatch.setattr(store_building, "NOTE_BLOCKS", 1)
    rng = np.random.default_rng(0)
    base = [(rng.integers(0, 1 << 8, n) + 0x3F00).astype(np.uint16) for n in SIZES]
    write_model(tmp_path / "base", base)
    for e in (1, 2):
        write_model(tmp_path / f"expert-{e}", [each + rng.integers(0, 3, len(each)).astype(np.uint16) for each in base])
    return finished(PackCase(tmp_path, {}))


def finished(case: PackCase) -> PackCase:
    """The case with what it gives when nothing interferes; that is removed again."""
    case.run()
    wanted = files_below(case.out)
    case.clear()
    return replace(case, wanted=wanted)


def interrupt(case: PackCase, after_bytes: int) -> None:
    """Pack until so many bytes are done, as Ctrl-C would."""

    def stop(progress: Progress) -> None:
        if progress.done_bytes >= after_bytes:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mergepipe.pack(case.root / "base", [case.root / "expert-1", case.root / "expert-2"], case.out, on_progress=stop)


def test_pack__interrupted_goes_on_where_it_was(case: PackCase) -> None:
    interrupt(case, 2_000_000)
    report = case.run()
    assert all(expert.resumed_bytes >= 500_000 for expert in report.experts)
    assert report.base_bytes < 2 * sum(SIZES) - 500_000
    assert files_below(case.out) == case.wanted


def test_pack__on_a_disk_that_is_full_at_the_end_goes_on_where_it_was(
    case: PackCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(builder: StoreBuilder) -> None:
        raise StorageError.of("storage.no-space", builder.job.out, "is full", "free some space and run again")

    with monkeypatch.context() as patched:
        patched.setattr(StoreBuilder, "finish", finish)
        with pytest.raises(StorageError, match="is full"):
            case.run()
    assert len(list(case.out.glob(".*"))) == 2
    report = case.run()
    assert all(expert.resumed_bytes == 2 * sum(SIZES) for expert in report.experts)
    assert files_below(case.out) == case.wanted


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["expert", "base", "version", "progress", "index", "cut"])
def test_pack__begins_anew_where_what_was_left_is_of_no_use(
    case: PackCase, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(case, 2_000_000)
    for staging in case.out.glob(".*"):
        progress, index = staging / LOG_NAME, staging / "snapshot" / "mergepipe-store.index"
        if what == "progress":
            progress.write_bytes(progress.read_bytes().replace(b'"n_rows":', b'"n_rows":1'))
        elif what == "index":
            index.write_bytes(bytes([index.read_bytes()[0] ^ 1]) + index.read_bytes()[1:])
        elif what == "cut":
            index.write_bytes(index.read_bytes()[:140])
    if what in ("expert", "base"):
        for model in case.root.glob(f"{what}*"):
            (model / "model.safetensors").touch()
    if what == "version":
        monkeypatch.setattr(mergepipe, "__version__", "0.0.0")
    report = case.run()
    assert all(expert.resumed_bytes == 0 for expert in report.experts)
    stored = {name: raw for name, raw in files_below(case.out).items() if not name.endswith("store.json")}
    assert stored == {name: raw for name, raw in case.wanted.items() if not name.endswith("store.json")}
