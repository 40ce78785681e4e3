"""Build the small files of a snapshot: configuration, tokenizer, chat template; list those that it does not get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from mergepipe.checkpoints.config_files import TIED_KEY, config_bytes, parse_config
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import ADAPTER_CONFIG_NAME, ADAPTER_NAMES, refuse_pointer
from mergepipe.checkpoints.embedding_rows import VOCAB_SIZE_KEY, embedding_ending
from mergepipe.checkpoints.quantised import MODELOPT_NAME, QUANTIZATION_KEY
from mergepipe.checkpoints.vocabulary import CONFIG_NAME, SETTINGS_NAME, TokenizerFiles
from mergepipe.core.strict_json import JsonValue
from mergepipe.core.units import plural
from mergepipe.errors import CorruptError, RecipeError, did_you_mean
from mergepipe.options import MergeOptions
from mergepipe.recipes.output_config import check_layer_kinds, parsed_config, text_sections, with_dtype, with_layers
from mergepipe.runs.adapter_tokenizer import AdapterTokenizer, is_tokenizer_file, with_eos_id
from mergepipe.runs.model_card import InputCard, card_and_recipe, read_input_card
from mergepipe.snapshots.manifest import CARD_NAME, MANIFEST_NAME, LeftOutFile, Manifest, file_without_paths
from mergepipe.storage.contract import SIDECARS_BYTES, FileKind, Store, map_at_once, sidecar_limit
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from mergepipe.planning.plan import Plan
    from mergepipe.recipes.vocabulary_alignment import Alignment
    from mergepipe.runs.inputs import Inputs


MERGEKIT_CONFIG_NAME = "mergekit_config.yml"
"""Where the Hub looks for the recipe of a merged model."""
GENERATION_NAME = "generation_config.json"
_TOKEN_ID_SUFFIX = "_token_id"
_TOKEN_IDS = frozenset(f"{kind}{_TOKEN_ID_SUFFIX}" for kind in ("bos", "eos", "pad", "unk", "sep", "cls", "mask"))


def planned_sidecars(inputs: Inputs, store: Store) -> dict[str, bytes]:
    """Return the small files known before the merge, by name: all but the manifest, the index and the card.

    None names a path of the machine that it comes from. Configuration comes from the first model, the tokenizer from
    the one that the recipe wants.
    """
    recipe, models, alignment = inputs.recipe, inputs.checkpoints, inputs.alignment
    lender = models[alignment.lender if alignment else 0]
    first_files = read_sidecars(models[0], store)
    lent = first_files if lender is models[0] else read_sidecars(lender, store)
    contents = {name: content for name, content in first_files.items() if not is_tokenizer_file(name)}
    contents |= {name: content for name, content in lent.items() if is_tokenizer_file(name)}
    if CONFIG_NAME in contents:
        parse_config(contents[CONFIG_NAME], models[0].root / CONFIG_NAME)
    if alignment is not None:
        contents |= alignment.files
        _align_configuration(contents, alignment, lent)
    if recipe.chat_template is not None:
        template = chosen_template(recipe.chat_template, models, store, where=recipe.path)
        contents = contents if template is None else with_chat_template(contents, template)
    if inputs.tokenizer is not None:
        contents = _with_adapter_tokenizer(contents, inputs.tokenizer, store)
    if inputs.base.resized_by is not None and CONFIG_NAME in contents:
        rows = (tensor.shape[0] for name, tensor in inputs.base.tensors.items() if embedding_ending(name))
        contents[CONFIG_NAME] = with_vocab_size(contents[CONFIG_NAME], next(rows))
    if CONFIG_NAME in contents:
        contents[CONFIG_NAME] = _configuration(inputs, contents[CONFIG_NAME])
    if inputs.base.quantisation and not recipe.is_like_base:
        configs = (name for name in contents if name.rpartition("/")[2] == CONFIG_NAME)
        contents |= {name: _unquantised(contents[name]) for name in configs}
        contents.pop(MODELOPT_NAME, None)
    return {name: file_without_paths(name, content) for name, content in contents.items()}


def chosen_files(contents: Mapping[str, bytes], inputs: Inputs, options: MergeOptions) -> dict[str, bytes]:
    """Return the small files that options ask for; a tokenizer that the recipe asks for is one of them."""
    keeps_tokenizer = options.tokenizer or inputs.alignment is not None
    return {
        name: content
        for name, content in contents.items()
        if (options.card or name != CARD_NAME)
        and (keeps_tokenizer or not is_tokenizer_file(name))
        and (options.mergekit_config or name != MERGEKIT_CONFIG_NAME)
    }


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """The small files known before the merge by name, the inputs' own cards, and files of the base that are left out.

    All that is read of the inputs for small files is in it: what is written after the merge needs no store.
    """

    contents: Mapping[str, bytes]
    cards: tuple[InputCard, ...]
    left_out: tuple[LeftOutFile, ...]


def plan_small_files(inputs: Inputs, store: Store, options: MergeOptions) -> PlannedFiles:
    """Read what the chosen small files are made from; raises as `planned_sidecars`."""
    contents = chosen_files(planned_sidecars(inputs, store), inputs, options)
    cards = tuple(
        read_input_card(store, checkpoint) if options.card else InputCard() for _, _, checkpoint in inputs.sources()
    )
    return PlannedFiles(contents, cards, left_out_files(store, inputs.base, contents))


def sidecar_contents(
    planned: PlannedFiles, inputs: Inputs, store: Store, manifest: Manifest, plan: Plan | None
) -> dict[str, bytes]:
    """Add the files made from the manifest and its plan to the planned small files; not the manifest and the index."""
    card, recipe = card_and_recipe(inputs, store, manifest, plan, planned.cards, planned.contents)
    return {**planned.contents, CARD_NAME: card, MERGEKIT_CONFIG_NAME: recipe.encode()}


def _configuration(inputs: Inputs, config: bytes) -> bytes:
    """Adapt the configuration to the output's dtype and layers."""
    dtype = inputs.recipe.out_dtype or inputs.recipe.dtype or inputs.resolution.widened_dtype
    config = config if dtype is None else with_dtype(config, dtype)
    if inputs.recipe.mixture is not None:
        from mergepipe.recipes.mixture import mixture_config

        content = parse_config(config, inputs.base.root / CONFIG_NAME)
        config = mixture_config(content, inputs.recipe.mixture, inputs.recipe.path.name)
    before = {name: tensor.shape for name, tensor in inputs.base.tensors.items()}
    after = {task.name: task.shape for task in inputs.resolution.tasks}
    for layers in inputs.resolution.layer_counts:
        where = inputs.base.root / CONFIG_NAME
        changed = with_layers(config, layers, where=where)
        check_layer_kinds(config, layers, before, after, where=where)
        config = changed
    if inputs.base.is_untied:  # the output head is a tensor of its own
        content = parsed_config(config) or {}
        for section in (content, *(section for section in text_sections(content) if TIED_KEY in section)):
            section[TIED_KEY] = False
        config = config_bytes(content)
    return config


def _unquantised(config: bytes) -> bytes:
    """Say nothing of a quantisation: the output has numbers."""
    content = parsed_config(config) or {}
    stated = [section.pop(QUANTIZATION_KEY, None) for section in (content, *text_sections(content))]
    if not any(stated):
        return config
    content.pop("expert_dtype", None)  # of DeepSeek-V4: what codes its experts are
    return config_bytes(content)


def _with_adapter_tokenizer(
    contents: Mapping[str, bytes], tokenizer: AdapterTokenizer, store: Store
) -> dict[str, bytes]:
    """Replace the tokenizer's files by those next to an adapter, or add these where they hold no vocabulary."""
    own = read_sidecars(tokenizer.files, store)
    replaces_template = template_of(tokenizer.files, store) is not None
    changed = {}
    for name, content in contents.items():
        is_replaced = tokenizer.has_vocabulary or (replaces_template and "chat_template" in name)
        if not (is_replaced and is_tokenizer_file(name)):
            changed[name] = content
    changed |= own
    if tokenizer.eos_id is not None:
        for name in (CONFIG_NAME, GENERATION_NAME):
            if name in changed:
                changed[name] = with_eos_id(changed[name], tokenizer.eos_id, keeps_others=name == GENERATION_NAME)
    return changed


def read_sidecars(model: Checkpoint, store: Store) -> dict[str, bytes]:
    """Read every small file of a model, by name. Memory: at most `SIDECARS_BYTES`."""
    remaining_bytes = SIDECARS_BYTES
    for name in model.sidecars:
        # reading refuses one beyond its limit
        remaining_bytes -= min(store.size_bytes(model.root / name), sidecar_limit(name))
        if remaining_bytes < 0:
            nbytes = SIDECARS_BYTES - remaining_bytes
            message = f"its small files up to {name} have {nbytes} bytes, at most {SIDECARS_BYTES} are read"
            raise CorruptError.of("storage.too-large", model.root, message, "remove those that loaders do not need")

    def read(name: str) -> bytes:
        content = store.read_small(model.root / name, sidecar_limit(name))
        refuse_pointer(model.root / name, content)
        return content

    return dict(zip(model.sidecars, map_at_once(store, [model.root], read, model.sidecars), strict=True))


def _align_configuration(contents: dict[str, bytes], alignment: Alignment, lent: Mapping[str, bytes]) -> None:
    """Set the vocabulary size to the number of rows, and token ids to those of the model whose tokenizer is used."""
    if CONFIG_NAME in contents:
        contents[CONFIG_NAME] = with_vocab_size(contents[CONFIG_NAME], alignment.n_rows)
    if alignment.lender != 0:
        for name in (CONFIG_NAME, GENERATION_NAME):
            stated = lent.get(name, lent.get(CONFIG_NAME))
            if name in contents and stated is not None:
                contents[name] = with_token_ids(contents[name], stated)


def with_vocab_size(config: bytes, n_rows: int) -> bytes:
    """Set every text vocabulary size in the configuration; unchanged if it states none."""
    content = parsed_config(config) or {}
    stating = [section for section in text_sections(content) if VOCAB_SIZE_KEY in section]
    if all(section[VOCAB_SIZE_KEY] == n_rows for section in stating):
        return config
    for section in stating:
        section[VOCAB_SIZE_KEY] = n_rows
    return config_bytes(content)


def with_token_ids(config: bytes, lent: bytes) -> bytes:
    """Make the ids of special tokens those of `lent`, also where it states none: they belong to another vocabulary."""
    content, other = parsed_config(config), parsed_config(lent)
    if content is None or other is None:
        return config
    theirs = {key: value for section in text_sections(other)[::-1] for key, value in section.items()}
    stating = [section for section in text_sections(content) if _TOKEN_IDS & section.keys()] or [content]
    for section in stating:
        ids = [key for key in theirs if key in _TOKEN_IDS or (key.endswith(_TOKEN_ID_SUFFIX) and key in section)]
        section.update({key: theirs[key] for key in ids})
        for key in section.keys() & _TOKEN_IDS - theirs.keys():
            del section[key]
    return config if content == parsed_config(config) else config_bytes(content)


def with_chat_template(contents: Mapping[str, bytes], template: str) -> dict[str, bytes]:
    """Add this chat template in the files where newer and older loaders look for it."""
    changed = {name: content for name, content in contents.items() if name != TEMPLATE_JSON_NAME}
    changed[TEMPLATE_NAME] = template.encode()
    settings = parsed_config(contents[SETTINGS_NAME]) if SETTINGS_NAME in contents else None
    if settings is not None:
        changed[SETTINGS_NAME] = config_bytes({**settings, TEMPLATE_KEY: template})
    return changed


_MOST_FILES = 200
_MOST_DEPTH = 3
_REASONS = (
    ((CARD_NAME,), "the snapshot has a card of its own"),
    ((".gitattributes", ".gitignore", ".git/*", ".cache/*", ".huggingface/*"), "belongs to the Hub's or git's tools"),
    (("*.py", "*.so", "*.sh", "*.ipynb"), "code is never copied; copy it from the base if loading needs it"),
    (("*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "onnx/*", "openvino/*", "*.h5", "*.msgpack", "*.tflite", "*.ot",
      "*.mlmodel", "*.mlpackage/*", "coreml/*", "*.pth", "consolidated.*", "original/*", "flax_model*"),
     "weights in another format, which this merge does not write"),
    (("optimizer*", "scheduler*", "training_args.bin", "trainer_state.json", "rng_state*", "global_step*/*", "latest",
      "zero_to_fp32.py", "runs/*", "events.out.*", "checkpoint-*/*"), "belongs to a training run"),
    (("mergepipe.*", MANIFEST_NAME, "mergekit_config.yml"), "describes the base, not this merge"),
    ((*ADAPTER_NAMES, ADAPTER_CONFIG_NAME), "an adapter, which is merged separately"),
    (("*.safetensors", "*.bin", "*.index*.json", "*.pt"),
     "weights that are not among the base's tensors; copy them yourself if loading needs them"),
    ((MODELOPT_NAME, "quantize_config.json", "quant_config.json"), "describes codes of the base; the output has none"),
    (("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", "*.mp4"), "illustrates the base's card"),
)  # fmt: skip
_TOKENIZER = "the output has another tokenizer, or none"
_UNKNOWN = "not known to belong to the model; copy it yourself if loading needs it"


def left_out_files(store: Store, model: Checkpoint, copied: Collection[str]) -> tuple[LeftOutFile, ...]:
    """List every file of a model's directory that is neither a source of tensors nor in `copied`.

    At most `_MOST_FILES` are named, and folders no deeper than `_MOST_DEPTH` are looked into; a bare file has none.
    """
    if model.path != model.root or not model.files:  # or the result of another document of the recipe
        return ()
    used = {*(file.name for file in model.file_ids), *copied}
    folders = ("", *model.components)  # the output has indices of its own
    names = [
        name for name in _names_below(store, model.root, _MOST_DEPTH)
        if name not in used and not (name.endswith(".index.json") and name.rpartition("/")[0] in folders)
    ]  # fmt: skip
    reasons = dict.fromkeys(filter(is_tokenizer_file, model.sidecars), _TOKENIZER)
    listed = [LeftOutFile(name, reasons.get(name) or reason_of(name)) for name in names[:_MOST_FILES]]
    if len(names) > _MOST_FILES:
        listed.append(LeftOutFile("...", f"and {plural(len(names) - _MOST_FILES, 'more file')}"))
    return tuple(listed)


def reason_of(name: str) -> str:
    """Say why the file of this name is not copied."""
    leaf = name.rpartition("/")[2]
    for patterns, reason in _REASONS:
        if any(fnmatchcase(name, pattern) or fnmatchcase(leaf, pattern) for pattern in patterns):
            return reason
    return _UNKNOWN


def _names_below(store: Store, folder: Location, depth: int) -> list[str]:
    """Name the files below a folder, in order; folders that are not looked into end in a slash."""
    names = []
    for entry in sorted(store.list(folder), key=lambda entry: entry.name):
        if entry.kind is not FileKind.FOLDER:
            names.append(entry.name)
        elif depth > 1 and not entry.name.startswith("."):
            names += [f"{entry.name}/{name}" for name in _names_below(store, folder / entry.name, depth - 1)]
        else:
            names.append(f"{entry.name}/")
    return names


# --- choose the chat template: a named one, Jinja text, or the one that most models have ---


AUTO = "auto"
TEMPLATE_NAME = "chat_template.jinja"
TEMPLATE_JSON_NAME = "chat_template.json"
TEMPLATE_KEY = "chat_template"
_DEFAULT_NAME = "default"
_SYNTAX_HINT = "correct it, or give one of the known names"

# The names that mergekit knows render here as they do there, to the space. `trim_blocks` and `lstrip_blocks` are on in
# all loaders, so that a line with nothing but tags renders nothing.
_CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_LLAMA3 = """\
{%- for message in messages %}
{{- (bos_token if loop.first else '') + '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
{{- message['content'] | trim + '<|eot_id|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_ALPACA = """\
{%- set systems = messages | selectattr('role', 'equalto', 'system') | list %}
{{- (systems[-1]['content'] | trim if systems else '') + '\\n\\n' }}
{%- for message in messages %}
{%- set title = {'user': '### Instruction:\\n', 'assistant': '### Response:\\n'}.get(message['role']) %}
{{- title + message['content'] | trim + ('' if loop.last else '\\n\\n') if title else '' }}
{%- endfor %}
{%- if add_generation_prompt and not (messages and messages[-1]['role'] == 'assistant') %}
{{- '### Response:\\n' }}
{%- endif %}
"""
_EXAONE = """\
{%- for message in messages %}
{{- '        [|system|][|endofturn|]\\n\\n' if loop.first and message['role'] != 'system' else '' }}
{{- '    [|' + message['role'] + '|]' + message['content'] + '\\n        ' }}
{{- ('' if message['role'] == 'user' else '[|endofturn|]') + '\\n\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '    [|assistant|]\\n' }}
{%- endif %}
"""
_MISTRAL = """\
{{- bos_token }}
{%- set intro = messages[0]['content'] + '\\n\\n' if messages and messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if intro else messages) %}
{%- if message['role'] != ('assistant' if loop.index0 % 2 else 'user') %}
{{- raise_exception('one system message may come first, then user and assistant take turns') }}
{%- elif message['role'] == 'user' %}
{{- ' [INST] ' + (intro if loop.first else '') + message['content'] + ' [/INST]' }}
{%- else %}
{{- ' ' + message['content'] + eos_token }}
{%- endif %}
{%- endfor %}
"""
# mergekit has no template of this name. Gemma has no place for a system message: it goes before the first user message.
_GEMMA = """\
{{ bos_token }}
{%- set intro = namespace(text='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}
{%- set intro.text = message['content'] | trim + '\\n\\n' %}
{%- elif message['role'] == 'user' %}
{{- '<start_of_turn>user\\n' + intro.text + message['content'] | trim + '<end_of_turn>\\n' }}
{%- set intro.text = '' %}
{%- else %}
{{- '<start_of_turn>model\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
NAMED = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "exaone": _EXAONE,
    "gemma": _GEMMA,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
}


def chosen_template(wanted: str, models: Sequence[Checkpoint], store: Store, *, where: object) -> str | None:
    """Resolve a recipe's `chat_template`: a name, Jinja text, or `auto`.

    `auto` is the most common one of `models`, the first such in their order; None if no model has any.
    """
    if wanted == AUTO:
        templates = [template for model in models if (template := template_of(model, store)) is not None]
        return Counter(templates).most_common(1)[0][0] if templates else None
    if wanted in NAMED:
        return NAMED[wanted]
    if "{" not in wanted:
        names = [AUTO, *sorted(NAMED)]
        raise RecipeError.of(
            "recipe.value", where, f"chat_template is a name or Jinja text, found '{wanted}'",
            did_you_mean(wanted, names),
        )  # fmt: skip
    _check_syntax(wanted, where)
    return wanted


def _check_syntax(template: str, where: object) -> None:
    """Refuse templates that loaders cannot parse; tags that only loaders know are not checked."""
    from jinja2 import Environment, TemplateSyntaxError

    try:
        Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(template)
    except TemplateSyntaxError as error:
        if (error.message or "").startswith("Encountered unknown tag 'generation'"):
            return
        raise RecipeError.of(
            "recipe.value", where, f"the chat_template is no Jinja text, line {error.lineno}: {error.message}",
            _SYNTAX_HINT,
        ) from None  # fmt: skip
    except (RecursionError, ValueError, OverflowError) as error:  # nested hundreds deep, numbers of thousands of digits
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        message = f"the chat_template cannot be parsed: {why}"
        raise RecipeError.of("recipe.value", where, message, _SYNTAX_HINT) from None


def template_of(model: Checkpoint, store: Store) -> str | None:
    """Read the chat template of a model as loaders do: from its own file, else from the tokenizer's settings."""
    files = TokenizerFiles(model, store)
    if TEMPLATE_NAME in files:
        return files.raw(TEMPLATE_NAME).decode("utf-8", errors="replace").strip() or None
    for name in (TEMPLATE_JSON_NAME, SETTINGS_NAME):
        template = _default(files.document(name).get(TEMPLATE_KEY))
        if template is not None:
            return template.strip() or None
    return None


def _default(value: JsonValue) -> str | None:
    """Return the template named `default`, where there are several."""
    if isinstance(value, list):
        records = (record for record in value if isinstance(record, dict) and record.get("name") == _DEFAULT_NAME)
        value = next((record.get("template") for record in records), None)
    return value if isinstance(value, str) else None
