"""Recipes with a tokenizer: MergePipe's embeddings are mergekit's, token by token, to one unit of the bf16 output."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes  # noqa: F401 - registers bfloat16 for the safetensors library
import numpy as np
import pytest
import yaml
from numpy.typing import NDArray
from safetensors import safe_open

import mergepipe
from mergepipe.checkpoints.sentencepiece import read_pieces
from mergepipe.checkpoints.vocabulary import read_vocabulary
from mergepipe.core.blocks import F32
from mergepipe.storage.local import LocalStore
from support.families import TINY_LLAMA, write_family
from support.local_models import open_local

pytestmark = pytest.mark.peer

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
REQUIRED = "MERGEPIPE_REQUIRE_PEERS"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
VOCABULARY_TENSORS = ("model.embed_tokens.weight", "lm_head.weight")
# What each model knows besides the bytes: merges, then added tokens. Ids are in another order in every model.
MERGES = (("th", "he"), ("th", "in"), ("th", "in", "an"))
ADDED = (("<|end|>",), ("<|end|>", "<|user|>", "<|one|>"), ("<|end|>", "<|user|>", "<|two|>"))
NAMES = ("base", "one", "two")

Recipe = dict[str, object]


@dataclass(frozen=True, slots=True)
class Case:
    """One recipe over the three models."""

    name: str
    tokenizer: Recipe
    method: str = "task_arithmetic"
    rows_are_padded: bool = False

    def recipe(self, root: Path) -> Recipe:
        models = [
            {"model": str(root / name), "parameters": {"weight": weight}}
            for name, weight in zip(NAMES, (0.4, 0.7, -0.3), strict=True)
        ]
        content: Recipe = {"merge_method": self.method, "tokenizer": self.tokenizer}
        if self.method == "linear":
            content |= {"models": models, "parameters": {"normalize": False}}
        else:
            content |= {"models": models[1:], "base_model": str(root / "base")}
        return {**content, "dtype": "float32", "out_dtype": "bfloat16"}


def _tokens(root: Path) -> Recipe:
    return {
        "<|user|>": {"source": str(root / "two")},
        "<|one|>": {"source": {"kind": "zero"}},
        "<|end|>": {"source": str(root / "one"), "force": True},
        "<|new|>": {"source": {"kind": "model_token", "model": str(root / "one"), "token": "th"}},
        "<|id|>": {"source": {"kind": "model_token", "model": str(root / "two"), "token_id": 7}},
    }


def cases(root: Path) -> tuple[Case, ...]:
    return (
        Case("union", {"source": "union"}),
        Case("union-linear", {"source": "union"}, "linear"),
        Case("base", {"source": "base"}),
        Case("model", {"source": str(root / "two")}),
        Case("model-linear", {"source": str(root / "two")}, "linear"),
        Case("tokens", {"source": "union", "tokens": _tokens(root)}),
        Case("padded", {"source": "union", "pad_to_multiple_of": 64}, rows_are_padded=True),
        Case("padded-linear", {"source": str(root / "one"), "pad_to_multiple_of": 48}, "linear", rows_are_padded=True),
    )


CASE_NAMES = tuple(case.name for case in cases(Path()))


def write_tokenizer(directory: Path, order: random.Random, merges: tuple[str, ...], added: tuple[str, ...]) -> int:
    """A byte-level tokenizer with ids in a random order; returns how many there are."""
    path = directory / "tokenizer.json"
    document = json.loads(path.read_text())
    tokens = [*document["model"]["vocab"], *merges]
    order.shuffle(tokens)
    document["model"] |= {
        "vocab": {token: n for n, token in enumerate(tokens)},
        "merges": [[merge[0], merge[1]] for merge in merges],
    }
    described = document["added_tokens"][0]
    document["added_tokens"] = [{**described, "id": len(tokens) + n, "content": each} for n, each in enumerate(added)]
    path.write_text(json.dumps(document, ensure_ascii=False))
    settings: Recipe = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": added[0], "pad_token": added[0]}
    settings["model_max_length"] = int(1e30)
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return len(tokens) + len(added)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models with tokenizers of their own, every case's recipe, and what mergekit makes of it."""
    if not PEER_PYTHON.exists() and not os.environ.get(REQUIRED):
        pytest.skip("no .venv-peer: run `make test-peers`")
    root = tmp_path_factory.mktemp("tokenizers")
    for number, name in enumerate(NAMES):
        n_tokens = 256 + len(MERGES[number]) + len(ADDED[number])
        shape = replace(TINY_LLAMA, vocab=n_tokens)
        written = write_family(root / f"family-{name}", shape, 1, seed=number, dtype=F32).base
        written.rename(root / name)
        assert write_tokenizer(root / name, random.Random(number), MERGES[number], ADDED[number]) == n_tokens
    for case in cases(root):
        (root / f"{case.name}.yml").write_text(yaml.safe_dump(case.recipe(root), sort_keys=False))
    command = [str(PEER_PYTHON), str(Path(__file__).with_name("run_mergekit.py")), str(root)]
    ran = subprocess.run(command, env={**os.environ, **OFFLINE}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return root


@pytest.mark.parametrize("number", range(len(CASE_NAMES)), ids=CASE_NAMES)
def test_merge__embeddings_agree_with_mergekit_token_by_token(peer: Path, number: int, tmp_path: Path) -> None:
    case = cases(peer)[number]
    mergepipe.merge(peer / f"{case.name}.yml", tmp_path / "out")
    theirs_at = peer / f"{case.name}-mergekit"
    our_ids, their_ids = token_ids(tmp_path / "out"), token_ids(theirs_at)
    assert our_ids.keys() == their_ids.keys()
    ours, theirs = loaded(tmp_path / "out"), loaded(theirs_at)
    assert ours.keys() == theirs.keys()
    tokens = sorted(our_ids)
    for name, tensor in ours.items():
        other = theirs[name]
        assert tensor.shape == other.shape
        if name in VOCABULARY_TENSORS:
            assert tensor.shape[0] == config_vocab_size(tmp_path / "out") == config_vocab_size(theirs_at)
            assert (tensor.shape[0] > len(tokens)) == case.rows_are_padded
            padding = np.arange(len(tokens), tensor.shape[0])
            tensor = tensor[[*(our_ids[token] for token in tokens), *padding]]
            other = other[[*(their_ids[token] for token in tokens), *padding]]
        assert far_apart(tensor, other) == 0, name


TRAIN = """
import json, sentencepiece, sys
texts = [f"some text number {n} with words like {'abcdefghij'[n % 10] * (n % 7)}" for n in range(400)]
sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(texts), model_prefix=sys.argv[1], vocab_size=60, model_type="bpe", hard_vocab_limit=False,
    user_defined_symbols=["<|x|>"], minloglevel=2,
)
loaded = sentencepiece.SentencePieceProcessor(model_file=sys.argv[1] + ".model")
print(json.dumps([[loaded.id_to_piece(n), loaded.get_score(n)] for n in range(loaded.get_piece_size())]))
"""


def test_read_pieces__agrees_with_the_sentencepiece_library(tmp_path: Path) -> None:
    if not PEER_PYTHON.exists() and not os.environ.get(REQUIRED):
        pytest.skip("no .venv-peer: run `make test-peers`")
    command = [str(PEER_PYTHON), "-c", TRAIN, str(tmp_path / "trained")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    found = read_pieces((tmp_path / "trained.model").read_bytes(), where="x")
    assert [[text, score] for text, (score, _) in found.items()] == json.loads(ran.stdout)


def test_far_apart__counts_elements_that_are_two_units_apart() -> None:
    values = np.array([0x3F80, 0x3F80, 0x0000, 0xBF80], np.uint16).view("bfloat16")
    others = np.array([0x3F81, 0x3F82, 0x8000, 0x3F80], np.uint16).view("bfloat16")
    assert far_apart(values, others) == 2


def token_ids(model: Path) -> dict[str, int]:
    found = read_vocabulary(open_local(model), LocalStore())
    assert found is not None
    return dict(found.ids)


def loaded(model: Path) -> dict[str, NDArray[np.generic]]:
    tensors: dict[str, NDArray[np.generic]] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    return tensors


def config_vocab_size(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def far_apart(first: NDArray[np.generic], second: NDArray[np.generic]) -> int:
    """How many elements differ by more than one bf16 number; numbers that cancel out to about 0 count as equal."""
    one, two = first.astype(np.float32), second.astype(np.float32)
    unit = np.float32(2.0**-7) * np.maximum(np.abs(one), np.abs(two))
    return int(np.count_nonzero(np.abs(one - two) > np.maximum(unit, np.float32(1e-7))))
