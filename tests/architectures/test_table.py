"""The table of architectures says what the installed transformers does."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import pytest

from mergepipe.checkpoints.architectures import TABLE_NAME, architecture_of, layer_defaults

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers
TABLE: dict[str, Any] = json.loads(files("mergepipe.checkpoints").joinpath(TABLE_NAME).read_text(encoding="utf-8"))
FEW_NAMES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "BambaForCausalLM", "BertForMaskedLM")
FEW = ("BertForMaskedLM", "GraniteMoeForCausalLM", "MambaForCausalLM", "LlamaForCausalLM@exaone")


def test_the_table__is_of_the_installed_release() -> None:
    import transformers

    assert TABLE["transformers"] == transformers.__version__


@pytest.mark.parametrize("name", FEW)
def test_the_table__says_what_a_class_does(name: str) -> None:
    from tools.architectures import facts_of

    entry = TABLE["architectures"][name]
    for model_type in entry["types"][:1]:
        facts = facts_of(model_type, name.partition("@")[0])
        assert {**facts, "types": entry["types"]} == {**entry, "type": model_type}


@pytest.mark.parametrize("key", FEW_NAMES)
def test_the_table_of_names__says_what_a_class_has(key: str) -> None:
    from tools.architectures import is_quiet, names_entry

    content = files("mergepipe.checkpoints").joinpath("architecture_names.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(content)
    assert table["transformers"] == TABLE["transformers"]
    facts = TABLE["architectures"][key]
    entry = json.loads(json.dumps(names_entry(facts["types"][0], key, facts)))
    assert entry == table["architectures"][key]
    assert is_quiet(facts["types"][0], key)


def test_the_table__says_what_types_read_of_single_layers() -> None:
    from tools.architectures import layer_facts

    for model_type in ("gemma2", "gemma3_text", "jamba", "llama4_text", "modernbert", "qwen3_moe"):
        assert layer_facts(model_type) == TABLE["layers"][model_type]
    assert layer_defaults("gemma2").options == {"sliding_window_pattern": 2}
    assert not layer_defaults("unheard_of").lists


def test_an_architecture__is_found_by_its_type_and_task_before_its_name() -> None:
    exaone = architecture_of({"architectures": ["ExaoneForCausalLM"], "model_type": "exaone"})
    assert exaone is not None
    assert exaone.name_in_files("model.layers.11.mlp.up_proj.weight") == "transformer.h.11.mlp.c_fc_1.weight"
    biogpt = architecture_of({"architectures": ["BioGptForCausalLM"], "model_type": "biogpt"})
    assert biogpt is not None
    assert biogpt.head == "output_projection.weight"
    assert architecture_of({"architectures": ["SomeForCausalLM"], "model_type": "unheard_of"}) is None
    assert architecture_of({}) is None
