"""What becomes of a small model of every architecture of transformers is what is stored, and what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.architecture_sweep import (
    PAGE,
    RIGHT,
    VERBS,
    NotTriedError,
    architectures,
    stored,
    swept,
    table,
)
from support.slow_cases import slow_unless

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT
RESULTS = stored()
FAST = (
    "CohereForCausalLM", "GPT2LMHeadModel", "Gemma4ForCausalLM", "JambaForCausalLM", "LEDForConditionalGeneration",
    "MambaForCausalLM", "MllamaForCausalLM", "OlmoHybridForCausalLM", "Qwen2VLForConditionalGeneration",
    "Qwen3MoeForCausalLM", "T5ForConditionalGeneration",
)  # fmt: skip


def test_the_results__are_of_the_installed_releases_and_none_is_wrong() -> None:
    import peft
    import transformers

    assert (RESULTS["transformers"], RESULTS["peft"]) == (transformers.__version__, peft.__version__)
    kinds = {outcome.partition(":")[0] for row in RESULTS["outcomes"].values() for outcome in map(row.get, VERBS)}
    assert kinds <= {RIGHT, "refused", "not tried"}
    for verb in VERBS:
        assert sum(row[verb] == RIGHT for row in RESULTS["outcomes"].values()) > 200


def test_the_page__has_the_table_of_the_results() -> None:
    assert table(RESULTS) in PAGE.read_text(encoding="utf-8")


@pytest.mark.thorough
@pytest.mark.parametrize("name", slow_unless(lambda name: name in FAST, sorted(RESULTS["outcomes"])))
def test_an_architecture__becomes_what_is_stored(name: str, tmp_path: Path) -> None:
    row = dict(RESULTS["outcomes"][name])
    assert swept(name, row.pop("type"), tmp_path) == row


@pytest.mark.slow
def test_the_results__are_of_every_architecture(tmp_path: Path) -> None:
    types = architectures()
    assert types.keys() == RESULTS["outcomes"].keys() | RESULTS["not_tried"].keys()
    for name, reason in RESULTS["not_tried"].items():
        with pytest.raises(NotTriedError) as error_info:
            swept(name, types[name], tmp_path / name)
        assert str(error_info.value) == reason
