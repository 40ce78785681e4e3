"""Runs in the peer environment: render conversations by our chat templates, and by mergekit's of the same names.

Prints pairs of texts by name as JSON; a conversation that a template refuses gives "refused".
"""

from __future__ import annotations

import importlib.resources
import json
import sys
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from mergekit._data import chat_templates  # type: ignore[import-not-found]


class RefusedError(Exception):
    """The template takes no such conversation."""


def refuse(message: str) -> None:
    raise RefusedError(message)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
ENVIRONMENT.globals["raise_exception"] = refuse


def rendered(text: str, conversations: list[Any]) -> list[str]:
    template, texts = ENVIRONMENT.from_string(text), []
    for messages in conversations:
        for is_prompt in (False, True):
            try:
                texts.append(
                    template.render(
                        messages=messages, add_generation_prompt=is_prompt, bos_token="<s>", eos_token="</s>"
                    )
                )
            except RefusedError:
                texts.append("refused")
    return texts


if __name__ == "__main__":
    ours, conversations = (json.loads(Path(name).read_text()) for name in sys.argv[1:3])
    folder = importlib.resources.files(chat_templates)
    pairs = {
        name: list(
            zip(
                rendered(text, conversations),
                rendered((folder / f"{name}.jinja").read_text(), conversations),
                strict=True,
            )
        )
        for name, text in ours.items()
    }
    print(json.dumps(pairs))
