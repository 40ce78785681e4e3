"""The organisations of models that the Hub also knows by a name alone, from before names had organisations."""

from __future__ import annotations

_BERT = ("base-uncased", "base-cased", "large-uncased", "large-cased", "base-multilingual-cased", "base-chinese")
_DISTILLED = ("distilgpt2", "distilroberta-base", "distilbert-base-uncased", "distilbert-base-cased")
_NAMES = {
    "openai-community": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-gpt"),
    "distilbert": (*_DISTILLED, "distilbert-base-multilingual-cased"),
    "google-bert": (*(f"bert-{kind}" for kind in _BERT), "bert-base-multilingual-uncased"),
    "FacebookAI": ("roberta-base", "roberta-large", "roberta-large-mnli", "xlm-roberta-base", "xlm-roberta-large"),
    "google-t5": ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"),
    "albert": ("albert-base-v1", "albert-base-v2", "albert-large-v2", "albert-xlarge-v2", "albert-xxlarge-v2"),
    "xlnet": ("xlnet-base-cased", "xlnet-large-cased"),
}
MODELS_BY_BARE_NAME = {name: f"{organisation}/{name}" for organisation, names in _NAMES.items() for name in names}
"""`org/name` by the name alone: `gpt2` is `openai-community/gpt2`."""


def bare_name(model: str) -> str | None:
    """Return the name alone by which the Hub knows `org/name`, too; None if it has no such name."""
    name = model.rpartition("/")[2]
    return name if MODELS_BY_BARE_NAME.get(name) == model else None
