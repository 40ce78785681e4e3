"""Find a checkpoint's tensors with one row per token, by name and number of rows, for any architecture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from mergepipe.checkpoints.computed.embedding_names import embedding_ending
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, Readable
from mergepipe.checkpoints.tokenizers.vocabulary import Vocabulary
from mergepipe.checkpoints.tokenizers.vocabulary_files import CONFIG_NAME, TokenizerFiles
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import MismatchError
from mergepipe.storage.contract import Store

VOCAB_SIZE_KEY = "vocab_size"


def embeddings_of(model: Checkpoint, vocabulary: Vocabulary, store: Store) -> dict[str, Readable]:
    """Find the tensors of `model` with a row for every token, by name, in storage order; padding rows are allowed.

    Raises:
        MismatchError: a tensor has such a name, and fewer rows than there are tokens.
    """
    vocab_size = _vocab_size(TokenizerFiles(model, store).document(CONFIG_NAME))
    named = {name: tensor for name, tensor in model.tensors.items() if tensor.shape and embedding_ending(name)}
    embeddings = {
        name: tensor
        for name, tensor in named.items()
        if tensor.shape[0] == vocab_size or tensor.shape[0] >= vocabulary.n_ids
    }
    if named and not embeddings and model.kind is CheckpointKind.FULL:
        name, tensor = next(iter(named.items()))
        raise MismatchError.of(
            "tokenizer.rows", name,
            f"{tensor.shape[0]} rows in '{model.path}', its {vocabulary.file} needs {vocabulary.n_ids}",
            f"is it the model's own tokenizer? If so, state '{VOCAB_SIZE_KEY}' in its {CONFIG_NAME}",
        )  # fmt: skip
    return embeddings


def paired_embeddings(embeddings: Sequence[Mapping[str, Readable]]) -> list[dict[int, Readable]]:
    """Group the corresponding embeddings of the models, each group keyed by model; name prefixes may differ."""
    is_short = all(max(Counter(map(_ending, embedding)).values(), default=0) <= 1 for embedding in embeddings)
    groups: dict[str, dict[int, Readable]] = {}
    for model, named_embeddings in enumerate(embeddings):
        for name, tensor in named_embeddings.items():
            groups.setdefault(_ending(name) if is_short else name, {})[model] = tensor
    return list(groups.values())


def _ending(name: str) -> str:
    return embedding_ending(name) or name


def _vocab_size(config: Mapping[str, JsonValue]) -> int | None:
    """Return the configuration's vocabulary size, from its top level or its text section."""
    for section in (config, *(value for value in config.values() if isinstance(value, dict))):
        value = section.get(VOCAB_SIZE_KEY)
        if type(value) is int:
            return value
    return None
