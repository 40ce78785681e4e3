"""The short form of fuzzing, the inputs that it once found, and what shows that it would find more."""

from __future__ import annotations

import base64
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from mergepipe import load_file
from mergepipe.catalog.statistics_file import (
    MAGIC,
    SEAL_BYTES,
    PortableContent,
    PortableFile,
    StatisticsFile,
    parse_statistics,
)
from mergepipe.checkpoints.adapters import open_adapter
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind
from mergepipe.checkpoints.inert_pickle import load_inert
from mergepipe.checkpoints.safetensors import read_header
from mergepipe.checkpoints.sentencepiece import read_pieces
from mergepipe.checkpoints.stored_adapters import read_adapter_config
from mergepipe.checkpoints.torch_file import read_torch_weights
from mergepipe.checkpoints.vocabulary import read_vocabulary
from mergepipe.core.blocks import BlockGrid
from mergepipe.deltastore.pieces import BANDED_DTYPES, Codec, Piece
from mergepipe.errors import CorruptError
from mergepipe.operators.statistics import BLOCK_RECORD, TensorStatistics
from mergepipe.planning.plan import parse_plan
from mergepipe.snapshots.manifest import parse_manifest
from mergepipe.snapshots.shards import BlockTable, block_table_of
from mergepipe.snapshots.work_log import LOG_FORMAT, WorkLog, merge_state, read_work_log
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location
from mergepipe.tailor.formats.partial import PARTIAL_FORMAT
from mergepipe.tailor.recipes import load_composition
from mergepipe.tailor.saving.save_log import read_log
from support import fuzz_seals as seals
from support import fuzz_seeds as seeds
from support.coded_weights import model
from support.fuzz_seals import seal_log
from support.fuzz_stores import block_cases
from support.fuzzing import Failure, Limits, Target, check_input, fuzz
from support.local_models import open_local, open_recipe, open_training
from support.mutations import Mutator, Shape
from support.public_names import CONTENT_NAME, LOG_NAME
from support.refusals import refuses
from support.stores import InMemoryStore
from support.torch_bytes import PickleWriter, torch_bytes
from support.training_trees import decoder_shapes, known_states, write_dcp, write_hf, write_zero12

Read = Callable[[bytes], object]
FILE = Location.parse("/fuzzed")
FORMAT = LOG_FORMAT.encode()


def all_targets(folder: Path, golden: Path) -> tuple[Target, ...]:
    """Every target. `folder` is theirs to write in, `golden` holds the golden files of all formats."""
    from support.fuzz_stores import store_targets

    return (
        *weight_targets(folder),
        *record_targets(folder, golden),
        *tokenizer_targets(),
        *recipe_targets(folder),
        *training_targets(folder),
        *store_targets(folder, golden / "delta-store-7"),
        *code_targets(folder / "codes"),
    )


def in_memory(read: Callable[[InMemoryStore, Location], object], name: str) -> Read:
    """Read content as a file of some name that is nowhere else."""
    path = FILE / name
    return lambda raw: read(InMemoryStore({path: raw}), path)


def on_disk(path: Path, read: Callable[[], object]) -> Read:
    """Read content from the real file `path`."""

    def write_and_read(raw: bytes) -> object:
        path.write_bytes(raw)
        return read()

    return write_and_read


def weight_targets(folder: Path) -> tuple[Target, ...]:
    """Headers, indices, torch files and pickles."""
    dtypes = tuple(f'"{name}"'.encode() for name in ("F32", "BF16", "F4", "I64", "BOOL", "F8_E4M3"))
    words = (*dtypes, b'"__metadata__"', b'"data_offsets"', b'"shape"', b"[0,0]", b"18446744073709551616", b"{", b"}")
    header = Shape(seeds.SAFETENSORS_HEADERS, seals.safetensors_file, words=words, is_json=True)
    pickles = tuple(PickleWriter().write(value) for value in seeds.state_dicts())
    globals_ = (b"ctorch\nFloatStorage\n", b"cposix\nsystem\n", b"ccollections\nOrderedDict\n", b"cbuiltins\neval\n")
    opcodes = (*(bytes([opcode]) for opcode in b"(tRQb}]ue02"), b"q\x00", b"h\x00", b"\x95", b"\x8a\xff")
    pickle = Shape(pickles, split=seals.instructions_of, words=(*globals_, *opcodes))
    zipped = Shape(pickles, seals.torch_file, seals.instructions_of, (b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"))
    archives = Shape(tuple(torch_bytes(value) for value in seeds.state_dicts()), split=seals.fixed(64))
    sharded = seeds.write_sharded_model(folder / "sharded")
    index = sharded / "model.safetensors.index.json"
    index_words = (b'"weight_map"', b'"../x"', *(f'"{p.name}"'.encode() for p in sharded.glob("*.safetensors")))
    return (
        Target("safetensors", in_memory(read_header, "x.safetensors"), header),
        Target("index", on_disk(index, lambda: open_local(sharded)),
               Shape((index.read_bytes(),), words=index_words, is_json=True)),
        Target("pickle", lambda raw: load_inert(raw, "fuzzed"), pickle),
        Target("torch-pickle", in_memory(read_torch_weights, "x.bin"), zipped),
        Target("torch-zip", in_memory(read_torch_weights, "x.bin"), archives),
    )  # fmt: skip


def code_targets(folder: Path) -> tuple[Target, ...]:
    """Weights stored as codes, of every scheme: their headers, and how the configuration says that they are read."""
    targets = []
    for scheme, (tensors, stated) in seeds.coded_weights().items():
        place = model(folder / scheme, dict(tensors), **stated)
        configured = model(folder / f"{scheme}, configured", dict(tensors), **stated)
        weights = place / "model.safetensors"
        config = configured / "config.json"
        raw = weights.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        rejoined = partial(with_body, body=raw[start:])
        words = (b'"F32"', b'"F16"', b'"I32"', b'"I64"', b'"U8"', b'"shape"', b"[1,8]", b"[8]", b"[]")
        headers = Shape((raw[8:start],), rejoined, words=words, is_json=True)
        configs = Shape((config.read_bytes(),), words=(b'"bits"', b'"group_size"', b"3", b"null", b"[]"), is_json=True)
        targets += [
            Target(f"codes of {scheme}", on_disk(weights, partial(read_all, place)), headers),
            Target(f"configuration of {scheme}", on_disk(config, partial(read_all, configured)), configs),
        ]
    return tuple(targets)


def with_body(header: bytes, body: bytes) -> bytes:
    """A safetensors file of a header and the bytes of its tensors."""
    return len(header).to_bytes(8, "little") + header + body


def read_all(place: Path) -> object:
    """Read every tensor of a model, numbers of codes among them."""
    tensors = load_file(place, threads=1)
    return [tensors[name].shape for name in tensors]


def record_targets(folder: Path, golden: Path) -> tuple[Target, ...]:
    """Plans, manifests, work logs, tables of digests, statistics: what MergePipe wrote itself."""
    plans = Shape(seeds.plans(folder / "planned"), seals.seal_plan, words=seeds.PLAN_WORDS, is_json=True)
    manifests = Shape(((golden / "manifest-5" / "mergepipe.json").read_bytes(),), seals.seal_manifest, is_json=True)
    return (
        Target("plan", parse_plan, plans),
        Target("manifest", parse_manifest, manifests),
        _log_target(folder),
        _table_target(),
        *_statistics_file_targets(),
    )


def _log_target(folder: Path) -> Target:
    (folder / CONTENT_NAME).mkdir()
    made = [{"name": name, "blocks": base64.b64encode(bytes(32)).decode()} for name in "ab"]
    usage = [["x.safetensors", Purpose.EXPERT.value, 4096]]
    with closing(WorkLog(folder, "k" * 32)) as log:
        log.append({"kind": "read", "expert_bytes": 5000}, is_durable=False)
        log.append({"kind": "unit", "tensors": made, "usage": usage}, is_durable=True)
        log.append({"kind": "sent", "shard": "model.safetensors", "digest": "0" * 32}, is_durable=True)
        log.append({"kind": "stop", "usage": usage}, is_durable=True)
    assert (sound := read_work_log(folder)) is not None
    assert (state := merge_state(sound)) is not None
    assert len(state.digests) == len(made)
    payloads = seals.log_payloads((folder / LOG_NAME).read_bytes())
    shape = Shape((payloads,), seals.seal_log, seals.lines_of, (b'"begin"', b'"unit"', b'"expert"', b"null"))

    def read() -> object:
        logged = read_work_log(folder)
        return None if logged is None else merge_state(logged)

    return Target("log", on_disk(folder / LOG_NAME, read), shape)


def _table_target() -> Target:
    counts = (1000, 0, 700)
    table = BlockTable(512, (bytes(16), b"\1" * 16), tuple((b"\2" * 16,) * -(-n // 512) for n in counts))
    shape = Shape((table.to_bytes(),), split=seals.fixed(16, 32), words=(b"MPBLOCKS",))
    return Target("block-table", lambda raw: block_table_of(raw, FILE, 2, counts), shape)


def _statistics_file_targets() -> tuple[Target, Target]:
    """A file of statistics by its header, and by all its bytes before the checksum."""
    file = PortableFile("0" * 64, 1000, "1" * 32, is_outside=False)
    base = PortableContent.of(CheckpointKind.FULL, (file,), "3" * 32)
    expert = PortableContent.of(CheckpointKind.ADAPTER, (replace(file, is_outside=True), file), "2" * 32)
    statistics = TensorStatistics(
        BlockGrid(500, 256), np.zeros(2, BLOCK_RECORD), np.array([0.1, 0.2]), np.zeros((2, 3), np.uint32), np.ones(3)
    )
    raw = StatisticsFile(expert, base, 256, (0.1,), {"a": statistics, "b": statistics}).to_bytes()
    bare = TensorStatistics(
        BlockGrid(500, 256), statistics.blocks_B, np.empty(0), np.zeros((0, 3), np.uint32), np.zeros(3)
    )
    simple = StatisticsFile(expert, base, 256, (), {"a": bare, "b": bare}).to_bytes()
    start = len(MAGIC) + 8
    header = simple[start : start + int.from_bytes(simple[len(MAGIC) : start], "little")]
    return (
        Target("statistics-header", lambda raw: parse_statistics(raw, "fuzzed"),
               Shape((header,), seals.statistics_file, is_json=True)),
        Target("statistics-file", lambda raw: parse_statistics(raw, "fuzzed"),
               Shape((raw[:-SEAL_BYTES],), seals.seal_statistics_file, seals.fixed(16, 16))),
    )  # fmt: skip


def tokenizer_targets() -> tuple[Target, ...]:
    """Tokenizer files of all kinds."""
    fast, pieces = seeds.fast_tokenizers(), seeds.sentencepieces()
    slow = {"config.json": b'{"vocab_size": 9}', "added_tokens.json": b'{"<x>": 3}'}
    added = Shape((seeds.TOKENIZER_SETTINGS,), is_json=True)
    return (
        Target("tokenizer.json", _tokenizer("tokenizer.json", slow), Shape(fast, is_json=True)),
        Target("tokenizer_config", _tokenizer("tokenizer_config.json", {"tokenizer.json": fast[0]}), added),
        Target("vocab.json", _tokenizer("vocab.json", slow), Shape((b'{"a": 0, "b": 1, "c": 2}',), is_json=True)),
        Target("tokenizer.model", _tokenizer("tokenizer.model", slow), Shape(pieces, split=seals.messages_of)),
        Target("sentencepiece", lambda raw: read_pieces(raw, where=FILE), Shape(pieces, split=seals.messages_of)),
    )


def _tokenizer(name: str, others: Mapping[str, bytes]) -> Read:
    names = tuple(sorted({name, *others}))

    def read(raw: bytes) -> object:
        files = {FILE / other: content for other, content in others.items()} | {FILE / name: raw}
        return read_vocabulary(Checkpoint(FILE, FILE, {}, (), names), InMemoryStore(files))

    return read


def recipe_targets(folder: Path) -> tuple[Target, ...]:
    """Recipes of merges, as far as their resolution against real models, and adapters."""

    home = seeds.write_recipe_models(folder / "recipes")
    recipe, adapter = home / "recipe.yml", home / "lora"
    base = open_local(home / "base")
    written = Shape(seeds.RECIPES, split=seals.lines_of, words=seeds.RECIPE_WORDS)
    config = Shape(seeds.ADAPTER_CONFIGS, words=seeds.ADAPTER_WORDS, is_json=True)
    opened = on_disk(adapter / "adapter_config.json", lambda: open_adapter(LocalStore(), Location.local(adapter), base))
    trees = Shape(seeds.as_trees(seeds.RECIPES), words=seeds.RECIPE_WORDS, is_json=True)
    read = on_disk(recipe, lambda: open_recipe(recipe))
    return (
        Target("recipe", read, written),
        Target("recipe-tree", read, trees),
        Target("adapter-config", in_memory(read_adapter_config, "adapter_config.json"), config),
        Target("adapter", opened, config),
    )


def training_targets(folder: Path) -> tuple[Target, ...]:
    """Training checkpoints: manifests, recipes and logs of `tailor`, and the metadata of each framework."""
    known = known_states(decoder_shapes(1, 3, 5))
    write_hf(folder / "hf", known)
    write_dcp(folder / "dcp", known, 2)
    write_zero12(folder / "zero", known, [list(known.shapes)], 2)
    composition = folder / "composition.yml"
    for name in ("old", "new"):
        (folder / name).mkdir()
    read = on_disk(composition, lambda: load_composition(Location.local(composition), LocalStore()))
    log = Shape(seeds.save_logs(), split=seals.lines_of)
    partial = Shape((seeds.partial_manifest(known.shapes),), seals.seal_store_header, is_json=True)
    trees = Shape(seeds.as_trees(seeds.COMPOSITIONS), words=seeds.COMPOSITION_WORDS, is_json=True)
    recipe = Shape(seeds.COMPOSITIONS, split=seals.lines_of, words=seeds.COMPOSITION_WORDS)
    return (
        Target("partial-manifest", lambda raw: PARTIAL_FORMAT.parse(raw, FILE), partial),
        Target("save-log", lambda raw: read_log(raw.decode("utf-8", errors="replace")), log),
        Target("composition", read, recipe),
        Target("composition-tree", read, trees),
        _training("trainer", folder / "hf", "optimizer.pt"),
        _training("dcp", folder / "dcp", ".metadata"),
        _training("zero", folder / "zero", "mp_rank_00_model_states.pt"),
    )


def _training(name: str, folder: Path, file: str) -> Target:
    path = folder / file
    raw = path.read_bytes()
    shape = Shape((raw,), split=seals.instructions_of)
    if raw[:2] == b"PK":
        pickled, wrap = seeds.pickle_in(raw)
        shape = Shape((pickled,), wrap, seals.instructions_of)
    return Target(name, on_disk(path, lambda: open_training(folder)), shape)


GOLDEN = Path(__file__).resolve().parent.parent / "golden"
NAMES = (
    "safetensors", "index", "pickle", "torch-pickle", "torch-zip", "plan", "manifest", "log", "block-table",
    "statistics-header", "statistics-file", "tokenizer.json", "tokenizer_config", "vocab.json",
    "tokenizer.model", "sentencepiece", "recipe", "recipe-tree", "adapter-config", "adapter", "partial-manifest",
    "save-log", "composition", "composition-tree", "trainer", "dcp", "zero", "store-header", "store-index",
    "store-block",
    *(f"{kind} of {scheme}" for scheme in seeds.coded_weights() for kind in ("codes", "configuration")),
)  # fmt: skip
N_INPUTS = int(os.environ.get("MERGEPIPE_FUZZ_INPUTS", "1800")) // len(NAMES)  # `make test-fuzz` asks for more
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


@pytest.mark.thorough
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
        b'{"content":[1,2],"format":"%b","kind":"begin"}' % FORMAT,
        b'{"content":[1e999,2],"format":"%b","key":"k","kind":"begin"}' % FORMAT,
        b'{"content":[1],"format":"%b","key":"k","kind":"begin"}' % FORMAT,
        b'{"content":["a",2],"format":"%b","key":"k","kind":"begin"}' % FORMAT,
    ],
)
def test_read_work_log__a_sealed_first_record_that_is_none_is_nothing(tmp_path: Path, payloads: bytes) -> None:
    (tmp_path / "log").write_bytes(seal_log(payloads))
    assert read_work_log(tmp_path) is None


@pytest.mark.parametrize(
    "record",
    [
        b'{"kind":"unit","tensors":[{"name":"a","blocks":"A"}],"usage":[]}',
        b'{"kind":"unit","tensors":[{"name":"a"}],"usage":[]}',
        b'{"kind":"stop","usage":[["a","expert"]]}',
        b'{"kind":"stop","usage":[["a","nobody",1]]}',
        b'{"kind":"stop","usage":[["a","expert","x"]]}',
        b"[" * 100_000,
    ],
)
def test_read_work_log__a_sealed_record_that_is_none_makes_nothing_of_all(tmp_path: Path, record: bytes) -> None:
    begin = b'{"content":[1,2],"format":"%b","key":"k","kind":"begin"}' % FORMAT
    (tmp_path / "log").write_bytes(seal_log(begin))
    assert (sound := read_work_log(tmp_path)) is not None
    assert merge_state(sound) is not None
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


@pytest.mark.thorough
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
