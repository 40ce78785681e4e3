"""Recipes in the forms that published ones have, and what becomes of each: taken, taken with notices, or refused.

Models are `base`, `expert-1` to `expert-3` of one family, `half`, the third in another dtype, and `lora` for `base`.
"""

# ruff: noqa: E501 - a table of recipes, one a line
from __future__ import annotations

from dataclasses import dataclass

DTYPES = "dtype: float32\nout_dtype: bfloat16\n"
MODELS = ("base", "expert-1", "expert-2", "expert-3", "half", "lora")

TWO = "models:\n- model: expert-1\n  parameters: {weight: 0.6}\n- model: expert-2\n  parameters: {weight: 0.3}\n"
BARE = "models:\n- model: expert-1\n- model: expert-2\n"
PAIR = "models:\n- model: base\n- model: expert-1\n"
DELTAS = TWO + "base_model: base\n"
TIES = DELTAS + "merge_method: ties\n"
LINEAR = TWO + "merge_method: linear\n"
STOCK = BARE + "base_model: base\nmerge_method: model_stock\n"
SLERP = PAIR + "base_model: base\nmerge_method: slerp\n"
SLICES = "- sources:\n  - {model: base, layer_range: [0, 2]}\n  - {model: expert-1, layer_range: [0, 2]}\n"
STACKED = "slices:\n- sources:\n  - model: expert-1\n    layer_range: [0, 2]\n- sources:\n  - model: expert-2\n    layer_range: [1, 2]\n"
PASS = "merge_method: passthrough\n"

PARAMETER, SCOPE, KEY = "recipe.no-effect", "recipe.unclear", "recipe.no-effect"
BASE_PARAMETERS, CLAMPED = "recipe.no-effect", "recipe.unclear"


@dataclass(frozen=True, slots=True)
class Form:
    """One recipe: the codes of its notices, or the code with which it is refused.

    `is_compared`: mergekit takes it, too, and the results are compared. `states_dtype`: `DTYPES` are not added.
    """

    name: str
    text: str
    notices: tuple[str, ...] = ()
    refused: str = ""
    is_compared: bool = True
    states_dtype: bool = False

    @property
    def recipe(self) -> str:
        """The recipe's text."""
        return self.text if self.states_dtype else self.text + DTYPES


def _refused(name: str, text: str, code: str) -> Form:
    return Form(name, text, refused=code, is_compared=False)


FORMS = (
    # parameters that the method does not have
    Form("stock-int8", STOCK + "parameters: {int8_mask: true}\n", (PARAMETER,)),
    Form("stock-number-as-flag", STOCK + "parameters: {int8_mask: 1.0}\n", (PARAMETER,)),
    Form("stock-weights", STOCK.replace("model: expert-2\n", "model: expert-2\n  parameters: {weight: 1}\n"), (PARAMETER,)),
    Form("stock-normalize", STOCK + "parameters: {normalize: true, rescale: true, lambda: 1.2}\n", (PARAMETER,) * 3),
    Form("ties-int8", TIES + "parameters: {density: 0.5, int8_mask: true}\n", (PARAMETER,)),
    Form("ties-int8-off", TIES + "parameters: {density: 0.5, int8_mask: false}\n"),
    Form("task-density", DELTAS + "merge_method: task_arithmetic\nparameters: {density: 0.3}\n", (PARAMETER,)),
    Form("task-rescale", DELTAS + "merge_method: task_arithmetic\nparameters: {rescale: true}\n", (PARAMETER,)),
    Form("slerp-weight", SLERP + "parameters: {t: 0.4, weight: 0.5, int8_mask: true}\n", (PARAMETER,) * 2),
    Form("sce-weight", DELTAS + "merge_method: sce\nparameters: {select_topk: 1.0}\n", (PARAMETER,)),
    Form("ram-lambda", BARE + "base_model: base\nmerge_method: ram\nparameters: {lambda: 1.0}\n", (PARAMETER,)),
    Form("fusion-normalize", PAIR + "base_model: base\nmerge_method: arcee_fusion\nparameters: {normalize: 1}\n", (PARAMETER,), is_compared=False),
    Form("multislerp-normalize", LINEAR.replace("linear", "multislerp") + "parameters: {normalize: true}\n", (PARAMETER,)),
    Form("karcher-weight", LINEAR.replace("linear", "karcher"), (PARAMETER,)),
    Form("passthrough-weight", "models: [{model: expert-1, parameters: {weight: 1.0, scale: 0.5}}]\n" + PASS, (PARAMETER,)),
    Form("slerp-embed-slerp", SLERP + "parameters: {t: 0.5, embed_slerp: true}\n", (PARAMETER,)),
    Form("fork-parameter", TIES + "parameters: {density: 1, smoothing_strength: 0.1}\n", (PARAMETER,)),
    # keys that have no effect
    Form("revision-in-entry", LINEAR.replace("  parameters: {weight: 0.3}", "  revision: main\n  parameters: {weight: 0.3}"), (KEY,)),
    Form("method-in-slice", "slices:\n" + SLICES.replace("- sources", "- merge_method: linear\n  sources") + "base_model: base\nmerge_method: slerp\nparameters: {t: 0.5}\n", (KEY,)),
    Form("residual-weight", STACKED.replace("- sources", "- residual_weight: 0.2\n  sources", 1) + PASS, (KEY,)),
    Form("negative-weights", LINEAR + "allow_negative_weights: true\n", (KEY,)),
    Form("description", LINEAR + "description: my first merge\n", (KEY,)),
    Form("name-of-one", LINEAR + "name: my-merge\n"),
    Form("top-level-normalize", LINEAR + "normalize: false\n", (KEY,)),
    Form("dtype-in-entry", LINEAR.replace("  parameters: {weight: 0.3}", "  dtype: float16\n  parameters: {weight: 0.3}"), (KEY,)),
    Form("dtype-in-parameters", TIES + "parameters: {density: 1, dtype: float16}\n", (PARAMETER,)),
    Form("empty-slices", LINEAR + "slices: []\n"),
    # parameters where they have no effect
    Form("lambda-in-entry", TIES.replace("weight: 0.3", "weight: 0.3, lambda: 2, density: 1"), (SCOPE,)),
    Form("topk-in-entry", BARE.replace("model: expert-1\n", "model: expert-1\n  parameters: {select_topk: 0.1}\n") + "base_model: base\nmerge_method: sce\n", (SCOPE,)),
    Form("t-in-source", "slices:\n" + SLICES.replace("expert-1, layer", "expert-1, parameters: {t: 0.9}, layer") + "base_model: base\nmerge_method: slerp\nparameters: {t: 0.2}\n", (SCOPE,)),
    Form("base-with-parameters", "models:\n- model: base\n  parameters: {weight: 1, density: 1}\n" + TIES.removeprefix("models:\n"), (BASE_PARAMETERS,)),
    Form("density-beside-model", TIES.replace("  parameters: {weight: 0.3}", "  density: 0.1\n  parameters: {weight: 0.3}"), (KEY,)),
    # filters
    Form("filter-unreachable", LINEAR.replace("weight: 0.3", "weight: [{value: 0.3}, {filter: mlp, value: 9}]"), ("recipe.no-effect",)),
    Form("filter-extra-key", LINEAR.replace("weight: 0.3", "weight: [{filter: mlp, value: 0.1, note: low}, {value: 0.3}]"), (KEY,)),
    Form("filter-star", LINEAR.replace("weight: 0.3", "weight: [{filter: self_attn, value: [0, 1]}, {filter: '*', value: 0.3}]")),
    # values
    Form("one-value-list", LINEAR.replace("weight: 0.3", "weight: [0.3]")),
    Form("one-value-filtered", LINEAR.replace("weight: 0.3", "weight: [{filter: mlp, value: [0.9]}, {value: 0.3}]")),
    Form("quoted-number", LINEAR.replace("weight: 0.3", "weight: '0.3'")),
    Form("quoted-gradient", LINEAR.replace("weight: 0.3", "weight: ['0.1', \"0.5\"]")),
    Form("exponents", LINEAR.replace("weight: 0.3", "weight: 3e-1").replace("0.6", "6E-1")),
    Form("quoted-flag", LINEAR + "parameters: {normalize: 'false'}\n"),
    Form("yes-no", LINEAR + "parameters: {normalize: no}\n"),
    Form("flag-as-number", LINEAR + "parameters: {normalize: 0.0}\n"),
    Form("one-flag-list", LINEAR + "parameters: {normalize: [false]}\n"),
    Form("density-0", TIES.replace("weight: 0.3", "weight: 0.3, density: 0")),
    Form("density-0-normalised-sum", DELTAS.replace("weight: 0.3", "weight: 0.3, density: 0.0") + "merge_method: dare_linear\nparameters: {normalize: true}\n"),
    Form("density-0-dare-ties", DELTAS.replace("weight: 0.3", "weight: 0.3, density: 0.0") + "merge_method: dare_ties\n"),
    Form("density-0-della", DELTAS.replace("weight: 0.3", "weight: 0.3, density: 0") + "merge_method: della\n"),
    Form("density-0-breadcrumbs", DELTAS.replace("weight: 0.3", "weight: 0.3, density: 0") + "merge_method: breadcrumbs\n"),
    Form("density-above-1", TIES + "parameters: {density: 1.3}\n", (CLAMPED,)),
    Form("density-above-1-dare", DELTAS + "merge_method: dare_ties\nparameters: {density: 2}\n", (CLAMPED,)),
    Form("density-below-0", TIES.replace("weight: 0.3", "weight: 0.3, density: -0.5"), (CLAMPED,)),
    Form("density-gradient", TIES.replace("weight: 0.3", "weight: 0.3, density: [-1, 3]"), (CLAMPED,) * 2),
    Form("topk-above-1", BARE + "base_model: base\nmerge_method: sce\nparameters: {select_topk: 1.5}\n", (CLAMPED,)),
    Form("t-above-1", SLERP + "parameters: {t: 1.25}\n"),
    Form("t-below-0", SLERP + "parameters: {t: [-0.2, 0.4]}\n"),
    Form("range-quoted", STACKED.replace("[0, 2]", "['0', 2.0]") + PASS),
    # models
    Form("base-alone", "models: [{model: base}]\nbase_model: base\nmerge_method: ties\n", ("recipe.unclear",)),
    Form("base-with-lora-alone", "models: [{model: base+lora}]\nbase_model: base+lora\nmerge_method: task_arithmetic\n"),
    Form("base-with-lora-dare", "models: [{model: base+lora}]\nbase_model: base+lora\nmerge_method: dare_linear\n"),
    Form("lora-linear", "models: [{model: base+lora, parameters: {weight: 1}}]\nmerge_method: linear\n"),
    Form("lora-passthrough", "models: [{model: base+lora}]\nbase_model: base+lora\n" + PASS),
    Form("lora-on-base", "models: [{model: base+lora, parameters: {weight: 0.5}}]\nbase_model: base\nmerge_method: ties\n"),
    Form("revision", LINEAR.replace("model: expert-2", "model: expert-2@main"), ("recipe.unclear",)),
    Form("long-reference", LINEAR.replace("model: expert-2", "model: {model: {path: expert-2, revision: v1}}"), ("recipe.unclear",)),
    Form("linear-base-unlisted", BARE + "base_model: base\nmerge_method: linear\nparameters: {weight: 0.5}\n"),
    Form("parameters-null", "models:\n- model: expert-1\n  parameters:\n- model: expert-2\nmerge_method: karcher\nparameters:\n"),
    Form("architecture", LINEAR.replace("model: expert-2", "model: {model: expert-2, override_architecture: LlamaForCausalLM}"), (KEY,)),
    # dtypes and YAML
    Form("torch-dtype", LINEAR + "dtype: torch.float32\nout_dtype: torch.bfloat16\n", states_dtype=True),
    Form("mixed-dtypes", LINEAR.replace("expert-2", "half"), states_dtype=True),
    Form("same-key-twice", TIES + "parameters: {density: 1, normalize: true, normalize: true}\n", ("recipe.no-effect",)),
    Form("byte-order-mark", "\ufeff" + LINEAR),
    Form("windows-lines", LINEAR.replace("\n", "\r\n")),
    Form("anchors", "models:\n- model: expert-1\n  parameters: &w {weight: 0.5}\n- model: expert-2\n  parameters: *w\nmerge_method: linear\n"),
    Form("comments", LINEAR.replace("merge_method: linear", "# how\nmerge_method: linear  # the usual")),
    # slices and modules
    Form("slice-gradients-by-filter", "slices:\n" + SLICES + "base_model: base\nmerge_method: slerp\nparameters:\n  t:\n  - {filter: self_attn, value: [0, 0.5, 0.3, 0.7, 1]}\n  - {filter: mlp, value: [1, 0.5, 0.7, 0.3, 0]}\n  - value: 0.5\n"),
    Form("slices-with-t-of-their-own", "slices:\n" + SLICES.replace("[0, 2]", "[0, 1]") + "  parameters: {t: 0.2}\n" + SLICES.replace("[0, 2]", "[1, 2]") + "base_model: base\nmerge_method: slerp\nparameters: {t: 0.9}\n"),
    Form("slice-with-base-of-its-own", "slices:\n" + SLICES + "  base_model: base\nmerge_method: slerp\nparameters: {t: 0.5}\n"),
    Form("slices-of-crossed-layers", "slices:\n" + SLICES.replace("base, layer_range: [0, 2]", "expert-2, layer_range: [0, 1]").replace("[0, 2]", "[1, 2]") + "merge_method: linear\nparameters: {weight: 0.5}\n"),
    Form("stack-repeats-scaled", STACKED.replace("    layer_range: [1, 2]", "    layer_range: [1, 2]\n    parameters: {scale: [{filter: o_proj, value: 0}, {filter: down_proj, value: 0.0}, {value: 1}]}") + PASS),
    Form("stack-with-base", STACKED.replace("expert-2", "expert-1") + "base_model: expert-1\n" + PASS),
    Form("module-default", "modules:\n  default:\n    slices:\n    - sources: [{model: expert-1, layer_range: [0, 2]}]\n" + PASS),
    Form("ties-of-the-readme", "models:\n- {model: expert-1, parameters: {density: [1, 0.7, 0.1], weight: 1.0}}\n- {model: expert-2, parameters: {density: 0.5, weight: [0, 0.3, 0.7, 1]}}\n- {model: expert-3, parameters: {density: 0.33, weight: [{filter: mlp, value: 0.5}, {value: 0}]}}\nmerge_method: ties\nbase_model: base\nparameters: {normalize: true, int8_mask: true}\n", (PARAMETER,)),
    # YAML
    Form("documents-directive", "%YAML 1.1\n---\n" + LINEAR),
    Form("merge-keys", "x: &c {weight: 0.5}\nmodels:\n- {model: expert-1, parameters: {<<: *c}}\n- {model: expert-2, parameters: {<<: *c, weight: 0.2}}\nmerge_method: linear\n", (KEY,)),
    Form("numbers-of-yaml", LINEAR.replace("0.6", "0x1").replace("0.3", "1:30")),
    Form("tagged-values", LINEAR.replace("0.3", "!!float 0.3").replace("expert-2", "!!str expert-2")),
    Form("filter-of-nothing", LINEAR.replace("0.3", "[{filter: null, value: 0.2}]").replace("0.6", "[{filter: '', value: 0.6}]")),
    Form("empty-texts", LINEAR + "dtype: ''\nout_dtype: bfloat16\nchat_template: ''\n", states_dtype=True),
    # misspelt, contradictory, or not done
    _refused("misspelt-density", TIES.replace("weight: 0.3", "weight: 0.3, densty: 0.5"), "recipe.unknown-name"),
    _refused("misspelt-lambda", TIES + "parameters: {lamda: 0.5}\n", "recipe.unknown-name"),
    _refused("misspelt-in-capitals", TIES + "parameters: {DENSITY: 0.5}\n", "recipe.unknown-name"),
    _refused("misspelt-in-turn", TIES.replace("ties", "della") + "parameters: {density: 0.5, espilon: 0.1}\n", "recipe.unknown-name"),
    _refused("misspelt-of-others", STOCK + "parameters: {wieght: 0.5}\n", "recipe.unknown-name"),
    _refused("misspelt-key", LINEAR + "dytpe: float32\n", "recipe.unknown-name"),
    _refused("misspelt-beside-model", LINEAR.replace("  parameters: {weight: 0.3}", "  wieght: 1\n  parameters: {weight: 0.3}"), "recipe.unknown-name"),
    _refused("epsilon-beyond", DELTAS + "merge_method: della\nparameters: {density: 0.66, epsilon: 1.35}\n", "recipe.value"),
    Form("layers-none-last", STACKED.replace("[1, 2]", "[1, 1]") + PASS, ("recipe.no-effect",)),
    Form("layers-none-first", STACKED.replace("[0, 2]", "[0, 0]") + PASS, ("recipe.no-effect",)),
    Form("weight-as-flag", LINEAR.replace("weight: 0.3", "weight: true"), ("recipe.unclear",)),
    _refused("layers-none-at-all", STACKED.replace("[1, 2]", "[1, 1]").replace("[0, 2]", "[0, 0]") + PASS, "recipe.value"),
    _refused("tokenizer-of-another", DELTAS + "merge_method: ties\ntokenizer_source: model:expert-1\n", "recipe.incomplete"),
    _refused("mixture", "base_model: base\ngate_mode: hidden\nexperts: [{source_model: expert-1}]\nexperts_per_token: 1\n", "recipe.incomplete"),
)  # fmt: skip
