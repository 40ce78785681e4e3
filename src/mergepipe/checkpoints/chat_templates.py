"""Choose the output's chat template: a named one, Jinja text, or the one that most models have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.vocabulary import SETTINGS_NAME, TokenizerFiles
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import RecipeError, did_you_mean
from mergepipe.storage.contract import Store

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
