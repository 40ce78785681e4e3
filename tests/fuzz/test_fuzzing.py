"""The short form of fuzzing, the inputs that it once found, and what shows that it would find more."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from mergepipe.deltastore.pieces import BANDED_DTYPES, Codec, Piece
from mergepipe.errors import CorruptError
from mergepipe.planning.plan import parse_plan
from mergepipe.snapshots.manifest import parse_manifest
from mergepipe.snapshots.work_log import merge_state, read_work_log
from support.fuzz_seals import seal_log
from support.fuzz_stores import block_cases
from support.fuzz_targets import all_targets
from support.fuzzing import Failure, Limits, Target, check_input, fuzz
from support.mutations import Mutator, Shape
from support.refusals import refuses

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NAMES = (
    "safetensors", "index", "pickle", "torch-pickle", "torch-zip", "plan", "manifest", "log", "block-table",
    "statistics-header", "statistics-file", "tokenizer.json", "tokenizer_config", "vocab.json",
    "tokenizer.model", "sentencepiece", "recipe", "recipe-tree", "adapter-config", "adapter", "partial-manifest",
    "save-log", "composition", "composition-tree", "trainer", "dcp", "zero", "store-header", "store-index",
    "store-block",
)  # fmt: skip
N_INPUTS = int(os.environ.get("MERGEPIPE_FUZZ_INPUTS", "3600")) // len(NAMES)  # `make test-fuzz` asks for more
SECONDS = 60 * float(os.environ.get("MERGEPIPE_FUZZ_MINUTES", "0.3")) / len(NAMES)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return {target.name: target for target in all_targets(tmp_path_factory.mktemp("fuzz"), GOLDEN)}


def test_targets__are_those_of_these_tests(targets: dict[str, Target]) -> None:
    assert tuple(targets) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_target__reads_what_its_inputs_begin_from(targets: dict[str, Target], name: str) -> None:
    shape = targets[name].shape
    assert [check_input(targets[name], shape.seal(seed)) for seed in shape.seeds] == [""] * len(shape.seeds)


@pytest.mark.parametrize("name", NAMES)
def test_target__answers_damage_with_typed_errors_only(targets: dict[str, Target], name: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("MERGEPIPE_FUZZ_SEED", "0"))
    tally = fuzz(targets[name], seed, N_INPUTS, time.monotonic() + SECONDS)
    for number, failure in enumerate(tally.failures):
        (tmp_path / str(number)).write_bytes(failure.content)
    told = [(failure.kind, failure.content[:300], failure.trace) for failure in tally.failures]
    assert told == [], f"whole inputs are in {tmp_path}"
    assert tally.inputs > 0


def test_blocks__of_every_codec_are_fuzzed_and_those_of_bands_in_each_dtype_and_level() -> None:
    kinds = Counter((case.codec, case.context.dtype.name) for case in block_cases())
    assert {codec for codec, _ in kinds} == set(Codec)
    assert min(kinds[Codec.BANDS, dtype.name] for dtype in BANDED_DTYPES) >= 2
    filled = {piece for case in block_cases() for piece, content in case.pieces.items() if len(content)}
    assert filled == set(Piece)


# --- what it found ---


@pytest.mark.parametrize(
    "payloads",
    [
        b"",
        b"[]",
        b'{"con\xc0ent"',
        b'{"content":[1,2],"format":"mergepipe-log/1","kind":"begin"}',
        b'{"content":[1e999,2],"format":"mergepipe-log/1","key":"k","kind":"begin"}',
        b'{"content":[1],"format":"mergepipe-log/1","key":"k","kind":"begin"}',
        b'{"content":["a",2],"format":"mergepipe-log/1","key":"k","kind":"begin"}',
    ],
)
def test_read_work_log__a_sealed_first_record_that_is_none_is_nothing(tmp_path: Path, payloads: bytes) -> None:
    (tmp_path / "log").write_bytes(seal_log(payloads))
    assert read_work_log(tmp_path) is None


@pytest.mark.parametrize(
    "record",
    [
        b'{"kind":"unit","tensors":[["a","A"]],"usage":[]}',
        b'{"kind":"unit","tensors":[["a"]],"usage":[]}',
        b'{"kind":"stop","usage":[["a","expert"]]}',
        b'{"kind":"stop","usage":[["a","nobody",1]]}',
        b'{"kind":"stop","usage":[["a","expert","x"]]}',
        b"[" * 100_000,
    ],
)
def test_read_work_log__a_sealed_record_that_is_none_makes_nothing_of_all(tmp_path: Path, record: bytes) -> None:
    begin = b'{"content":[1,2],"format":"mergepipe-log/1","key":"k","kind":"begin"}'
    (tmp_path / "log").write_bytes(seal_log(begin + b"\n" + record))
    logged = read_work_log(tmp_path)
    assert logged is None or merge_state(logged) is None


@pytest.mark.parametrize("value", ['"\\ud800"', "1e999", "-1e999"])
def test_parse_manifest__refuses_what_has_no_digest(value: str) -> None:
    raw = (GOLDEN / "manifest-5" / "mergepipe.json").read_text()
    lying = raw.replace('"seed": 0', f'"seed": {value}', 1)
    assert lying != raw
    with refuses(CorruptError, "format.damaged"):
        parse_manifest(lying.encode())


@pytest.mark.parametrize("value", ['"\\ud800"', "1e999"])
def test_parse_plan__refuses_what_has_no_digest(targets: dict[str, Target], value: str) -> None:
    raw = targets["plan"].shape.seeds[0].decode()
    lying = raw.replace('"seed": 0', f'"seed": {value}', 1)
    assert lying != raw
    with refuses(CorruptError, "format.damaged"):
        parse_plan(lying.encode())


# --- the machine ---


@pytest.mark.parametrize("name", ["plan", "manifest", "log", "statistics-header", "store-header"])
def test_seal__changed_content_is_read_behind_its_checksum(targets: dict[str, Target], name: str) -> None:
    """Were seals wrong, every input would end at the checksum."""
    mutator = Mutator(targets[name].shape, 3)
    codes = {check_input(targets[name], mutator.next()) for _ in range(300)}
    assert "" in codes or len(codes) > 2


def lying_target(read: object, seeds: Sequence[bytes] = (b"x" * 40,)) -> Target:
    assert callable(read)
    return Target("lying", read, Shape(tuple(seeds)))


def test_fuzz__finds_an_untyped_error_once_and_its_input() -> None:
    def read(raw: bytes) -> None:
        if b"\xff" in raw:
            raise KeyError("found")

    tally = fuzz(lying_target(read, [b"x" * 40 + b"\xff"]), 0, 200)
    assert [b"\xff" in failure.content for failure in tally.failures] == [True]
    assert tally.inputs == 200


def test_fuzz__stops_what_hangs_and_what_takes_all_memory() -> None:
    def hang(_raw: bytes) -> None:
        while True:
            pass

    def grow(_raw: bytes) -> int:
        return len(bytearray(1 << 30))

    slow = check_input(lying_target(hang), b"", Limits(cpu_seconds=0.1))
    assert isinstance(slow, Failure)
    assert slow.kind.startswith("TookTooLongError")
    tally = fuzz(lying_target(grow), 0, 3, limits=Limits(memory_bytes=64 << 20))
    assert [failure.kind.partition(" ")[0] for failure in tally.failures] == ["MemoryError"]
