"""Make the table of architectures: what classes of the installed transformers store, tie and rename, by running them.

Every causal, masked, encoder-decoder, speech and vision-language class that can be built is built without values.
`python -m tools.architectures` writes the table that is part of the package, and prints what could not be built.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from mergepipe.checkpoints.architecture_names import NameProblems, class_names, name_problems
from mergepipe.checkpoints.architectures import with_beginning
from mergepipe.recipes.layer_options import RULES, Entries, LayerRule
from tools.architecture_names import entry_of, kinds_of_names

TABLE = Path(__file__).parent.parent / "src" / "mergepipe" / "checkpoints" / "architectures.json"
NAMES = TABLE.with_name("architecture_names.json")
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
N_LAYERS = 4
MOST_ELEMENTS = 4_000_000
MOST_TIED = 8
# Options that decide how large a model is, with values that most classes accept.
SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size", "src_vocab_size"), 64),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "decoder_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 24),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_dim", "v_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), N_LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), N_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("num_experts_per_tok", "first_k_dense_replace", "moe_k", "topk_group", "n_group"), 1),
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "num_kv_shared_layers": 1,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
}  # fmt: skip
SKIPPED = ("id2label", "label2id")
_TIED = "tie_word_embeddings"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def pattern_of(name: str) -> str:
    """Replace the numbers of layers and experts in a name by `*`."""
    return _NUMBER.sub("*", name)


def architectures() -> Iterator[tuple[str, str]]:
    """Yield every model type with the class that its task has, a class's own type before others that load as it."""
    pairs: dict[tuple[str, str], bool] = {}
    for task in TASKS:
        for model_type, classes in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            for name in classes if isinstance(classes, tuple | list) else (classes,):
                own_class = getattr(getattr(transformers, name), "config_class", None)
                pairs[model_type, name] = getattr(own_class, "model_type", None) != model_type
    yield from sorted(pairs, key=lambda pair: (pair[1], pairs[pair], pair[0]))


def small_options(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a configuration that decide its size, with small values, section by section."""
    options: dict[str, Any] = {}
    for key, value in content.items():
        if key in SKIPPED:
            continue
        if isinstance(value, dict):
            inner = small_options(value)
            if inner and key.endswith("_config"):
                options[key] = inner
        elif key in SMALL and isinstance(value, int) and not isinstance(value, bool):
            options[key] = min(value, SMALL[key])
        elif key.endswith("_token_id") and isinstance(value, int):
            options[key] = min(value, 3)
    return options


def built(model_type: str, name: str, changes: Mapping[str, Any] | None = None) -> Any:
    """Return the model of a class without values: small, or as large as it is by default where that is refused."""
    return maker(model_type, name, changes)[0]


def maker(model_type: str, name: str, changes: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return a model as `built`, and a function that makes such a model with further options changed."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = getattr(transformers, name)
    own_class = getattr(model_class, "config_class", None) or config_class
    for fitting in dict.fromkeys((config_class, own_class)):
        content = fitting().to_dict()
        small = small_options(content)
        unstated = {key: value for key, value in SMALL.items() if key in content and content[key] is None}
        for options in (small, {**small, **unstated}, {}):
            try:
                config = fitting(**{**options, **(changes or {})})
                with torch.device("meta"):
                    model = model_class._from_config(config)
                accepted = {**options, **(changes or {})}
                return model, lambda more, fitting=fitting, accepted=accepted: model_class._from_config(
                    fitting(**with_sections(accepted, more))
                )
            except Exception as error:  # any refusal of a size
                last_error = error
    raise last_error


def with_sections(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change options, section by section."""
    changed = dict(options)
    for key, value in changes.items():
        is_section = isinstance(value, dict) and isinstance(changed.get(key), dict)
        changed[key] = with_sections(changed[key], value) if is_section else value
    return changed


def names_entry(model_type: str, name: str, facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the table of names says of a class of which the `facts` are known; None where it is left out."""
    model, make = maker(model_type, name)
    kinds = kinds_of_names(make, tied_weights, model.config.to_dict())
    entry = entry_of(kinds, model, get_model_conversion_mapping(model, add_legacy=False))
    if entry is None:
        return None
    head = facts.get("head")
    stated = {"head": head} if head in facts.get("untied", {}) else {}
    return {"types": facts["types"], **stated, **entry}


def is_quiet(model_type: str, name: str) -> bool:
    """Whether the table in the package finds nothing wrong with what a class saves, in both layouts."""
    model = built(model_type, name)
    state = {key: value for key, value in model.state_dict().items() if key not in tied_weights(model)}
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    config = {**model.config.to_dict(), "architectures": [name], "model_type": model_type}
    layouts = (state, revert_weight_conversion(model, state))
    return all(name_problems(config, [*names]) == NameProblems() for names in layouts)


def tied_weights(model: Any) -> dict[str, str]:
    """Return the weights that are not stored, each with the one that it is."""
    return dict(getattr(model, "all_tied_weights_keys", None) or {})


def untied_changes(config: Any) -> dict[str, Any]:
    """Return the options that untie the head of a model, in its text section too."""
    sections = {
        key: {_TIED: False} for key, value in config.to_dict().items() if isinstance(value, dict) and _TIED in value
    }
    return {_TIED: False, **sections}


def renamed(model: Any) -> dict[str, str]:
    """Return the parameters that are stored under another name, with nothing else changed, by their patterns."""
    model._weight_conversions = [
        conversion for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(conversion, PrefixChange)
    ]  # fmt: skip
    if not model._weight_conversions:
        return {}
    stored: dict[str, str] = {}
    tied = tied_weights(model)
    firsts: dict[str, str] = {}
    state = model.state_dict()
    for name in state:
        if name not in tied:
            firsts.setdefault(pattern_of(name), name)
    for pattern, name in firsts.items():
        value = state[name]
        if value.numel() > MOST_ELEMENTS:
            continue
        numbered = torch.arange(value.numel()).reshape(value.shape)
        try:
            saved = revert_weight_conversion(model, {name: numbered})
        except Exception:  # a conversion that needs several tensors
            continue
        for stored_name, stored_value in saved.items():
            if stored_value.shape == numbered.shape and torch.equal(stored_value, numbered):
                stored[pattern] = pattern_of(stored_name)
    once = Counter(stored.values())
    return {name: other for name, other in stored.items() if name != other and once[other] == 1}


def name_of(model: Any, module: Any) -> str | None:
    """Return the name of the weight of a module."""
    names = [name for name, other in model.named_modules(remove_duplicate=False) if other is module]
    return f"{names[0]}.weight" if names and hasattr(module, "weight") else None


def part(model: Any, getter: str) -> str | None:
    """Return the name of the weight of a model's embedding or head."""
    try:
        module = getattr(model, getter)()
    except (NotImplementedError, AttributeError):
        return None
    return None if module is None else name_of(model, module)


def facts_of(model_type: str, name: str) -> dict[str, Any]:
    """Return what a class calls its embedding and head, what it ties, and what it renames."""
    model = built(model_type, name)
    tied = tied_weights(model)
    facts: dict[str, Any] = {"type": model_type}
    facts["embedding"] = part(model, "get_input_embeddings")
    facts["head"] = part(model, "get_output_embeddings")
    try:
        untied = built(model_type, name, untied_changes(model.config))
        facts["untied"] = {key: tied[key] for key in tied if key not in tied_weights(untied)}
    except Exception:  # it has no head that is not tied
        facts["untied"] = {}
    if not tied:
        facts["untied"] = copies_if_tied(model_type, name, model)
    if len(facts["untied"]) > MOST_TIED:
        del facts["untied"]
    facts["renamed"] = beginnings(renamed(model))
    return {key: value for key, value in facts.items() if value}


def copies_if_tied(model_type: str, name: str, model: Any) -> dict[str, str]:
    """Return what a model that is not tied by default would tie."""
    try:
        changes = json.loads(json.dumps(untied_changes(model.config)).replace("false", "true"))
        return tied_weights(built(model_type, name, changes))
    except Exception:  # it cannot be tied
        return {}


def beginnings(renamed: Mapping[str, str]) -> dict[str, str]:
    """Return how the beginnings of names change, where the longest that fits a name decides."""
    changes: dict[str, str] = {}
    for name, other in renamed.items():
        before, after = name.split("."), other.split(".")
        while len(before) > 1 and len(after) > 1 and before[-1] == after[-1]:
            before.pop()
            after.pop()
        changes[".".join(before)] = ".".join(after)
    for name, other in sorted(renamed.items()):
        if with_beginning(name, changes) != other:
            changes[name] = other
    return changes


def config_with_layers(model_type: str, n_layers: int) -> dict[str, Any]:
    """Return the options of a model type's default configuration, with so many layers."""
    config: dict[str, Any] = CONFIG_MAPPING[model_type](num_hidden_layers=n_layers).to_dict()
    return config


def layer_facts(model_type: str) -> dict[str, Any]:
    """Return the lists with one entry a layer that a model type reads, and the options of its rules by default."""
    sizes = (24, 17)
    contents = [config_with_layers(model_type, n_layers) for n_layers in sizes]
    per_layer = [
        {key for key, value in content.items() if isinstance(value, list) and len(value) == n_layers}
        for content, n_layers in zip(contents, sizes, strict=True)
    ]
    lists = set.intersection(*per_layer)
    options: dict[str, int] = {}
    for rule in RULES:
        stated = [contents[0].get(name) for name in rule.options]
        values = [value for value in stated if type(value) is int]
        if len(values) == len(rule.options):
            options |= dict(zip(rule.options, values, strict=True))
        elif isinstance(rule.replacement, Entries) and rule.replacement.name in lists:
            options |= derived_options(rule, rule.replacement, contents, sizes)
    facts = {"lists": sorted(lists), "options": options}
    return {key: value for key, value in facts.items() if value}


def derived_options(
    rule: LayerRule, entries: Entries, contents: Sequence[dict[str, Any]], sizes: Sequence[int]
) -> dict[str, int]:
    """Return options of a rule from which a class makes its list of layers, though it does not name them."""
    wanted = [tuple(entry == entries.where_it_holds for entry in content[entries.name]) for content in contents]
    if any(len({*kinds}) < 2 for kinds in wanted) or {*contents[0][entries.name]} != {
        entries.where_it_holds, entries.elsewhere
    }:  # fmt: skip
        return {}
    for values in itertools.product(*rule.candidates(wanted[0])):
        if all(rule.kinds(values, n_layers) == kinds for n_layers, kinds in zip(sizes, wanted, strict=True)):
            return dict(zip(rule.options, values, strict=True))
    return {}


def table_of(classes: Iterable[tuple[str, str]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the table of these classes, and why others could not be built."""
    entries: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for model_type, name in classes:
        try:
            facts = facts_of(model_type, name)
        except Exception as error:  # one class that cannot be built
            failed[f"{name}@{model_type}"] = f"{type(error).__name__}: {str(error)[-160:]!r}"
            continue
        facts["types"] = [facts.pop("type")]
        own_facts = entries.get(name)
        if own_facts is None:
            entries[name] = facts
        elif {**own_facts, "types": 0} == {**facts, "types": 0}:
            own_facts["types"].append(model_type)
        else:
            entries[f"{name}@{model_type}"] = facts
    layers = {}
    for model_type in sorted({*CONFIG_MAPPING.keys()}):
        try:
            layers[model_type] = layer_facts(model_type)
        except Exception:  # a type without numbered layers
            continue
    table = {
        "transformers": transformers.__version__,
        "architectures": entries,
        "layers": {model_type: facts for model_type, facts in layers.items() if facts},
    }
    return table, failed


def table_text(table: Mapping[str, Any]) -> str:
    """Write the table with one line for each class."""
    lines = [f'"transformers": {json.dumps(table["transformers"])}']
    for key in ("architectures", "layers"):
        rows = table[key]
        texts = [f"{json.dumps(name)}: {json.dumps(rows[name], separators=(',', ':'))}" for name in sorted(rows)]
        lines.append(f'"{key}": {{\n' + ",\n".join(texts) + "\n}")
    return "{" + ",\n".join(lines) + "}\n"


def write_names(architectures: Mapping[str, Any], release: str) -> None:
    """Write the table of names, without classes that it would be wrong about."""
    entries: dict[str, Any] = {}
    for key, facts in architectures.items():
        try:
            entry = names_entry(facts["types"][0], key.partition("@")[0], facts)
        except Exception:  # one class that cannot be built with options changed
            continue
        if entry is not None:
            entries[key] = entry
    NAMES.write_text(names_text(entries, release), encoding="utf-8")
    class_names.cache_clear()
    quiet: dict[str, Any] = {}
    for key, entry in entries.items():
        try:
            is_right = is_quiet(entry["types"][0], key.partition("@")[0])
        except Exception:  # a conversion that needs values
            continue
        if is_right:
            quiet[key] = entry
    NAMES.write_text(names_text(quiet, release), encoding="utf-8")


def names_text(entries: Mapping[str, Any], release: str) -> str:
    """Write one class a line, so that a reader parses the one it needs."""
    lines = []
    for key, entry in entries.items():
        lines.append(f"{json.dumps(key)}: {json.dumps(entry, separators=(',', ':'))}")
    head = f'{{\n"transformers": {json.dumps(release)},\n"architectures": {{\n'
    return head + ",\n".join(lines) + "\n}\n}\n"


def main() -> None:
    """Write the table."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    table, failed = table_of(architectures())
    TABLE.write_text(table_text(table), encoding="utf-8")
    write_names(table["architectures"], table["transformers"])
    print(f"{len(table['architectures'])} classes of transformers {transformers.__version__}, {len(failed)} not built:")
    for name, reason in failed.items():
        print(f"  {name}: {reason}")


if __name__ == "__main__":
    main()
