"""Report what merging embeddings by row number means where the models' tokenizers differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from mergepipe.checkpoints.computed.embedding_names import embedding_ending
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind
from mergepipe.checkpoints.tokenizers.vocabulary import Vocabulary, counted
from mergepipe.checkpoints.tokenizers.vocabulary_files import (
    FAST_NAME,
    SETTINGS_NAME,
    VOCABULARY_NAMES,
    TokenizerFiles,
    read_vocabulary,
)
from mergepipe.core.strict_json import shown
from mergepipe.errors import MergePipeError
from mergepipe.storage.contract import Store
from mergepipe.storage.traffic import concurrent_map

_MAX_EXAMPLES = 5
_ADVICE = "`tokenizer: {source: union}` in the recipe"


def unaligned_notices(
    models: Sequence[Checkpoint], names: Sequence[str], used: Collection[int], store: Store
) -> tuple[str, ...]:
    """List one notice per difference of a model's tokens or rows from the first model's, whose tokenizer is kept.

    `names` are the models', `used` those whose embeddings are merged. Tokenizer files with the same bytes are not
    parsed. One that cannot be read is a notice, no error: nothing that is merged depends on it.
    """
    first = models[0]
    experts = [index for index in sorted(used) if index > 0 and models[index].kind is CheckpointKind.FULL]
    compared = [first, *(models[index] for index in experts)]
    with concurrent_map(store, [model.root for model in compared]) as map_all:
        own_files, *files = map_all(lambda model: _contents(model, store), compared)
    lines: list[str] = []
    for index, theirs in zip(experts, files, strict=True):
        model, name = models[index], names[index]
        differ = own_files and theirs and own_files != theirs
        tokens = list(_model_notices(first, names[0], model, name, store)) if differ else []
        lines += tokens or _row_notices(first, names[0], model, name)
    return tuple(lines)


def _contents(model: Checkpoint, store: Store) -> tuple[tuple[str, bytes], ...]:
    """Read the files that map tokens to ids."""
    files = TokenizerFiles(model, store)
    names = VOCABULARY_NAMES if FAST_NAME in files else (*VOCABULARY_NAMES, SETTINGS_NAME)
    return tuple((name, files.raw(name)) for name in names if name in files)


def _model_notices(first: Checkpoint, first_name: str, model: Checkpoint, name: str, store: Store) -> Iterator[str]:
    try:
        base, other = read_vocabulary(first, store), read_vocabulary(model, store)
    except MergePipeError as error:
        yield f"the tokens of '{name}' and '{first_name}' cannot be compared: {error}"
        return
    if base is not None and other is not None:
        yield from _token_notices(base, first_name, other, name)


def _token_notices(base: Vocabulary, base_name: str, other: Vocabulary, name: str) -> Iterator[str]:
    by_id = {index: token for token, index in base.ids.items()}
    moved = sum(by_id.get(index, token) != token for token, index in other.ids.items())
    if moved:
        yield (
            f"{counted(moved, 'row')} of embeddings: '{name}' has other tokens there than '{base_name}', and they are "
            f"merged by number; {_ADVICE} merges them by token"
        )
    lost = [token for token in other.ids if token not in base.ids]
    if lost:
        examples = ", ".join(map(shown, lost[:_MAX_EXAMPLES])) + (", ..." if len(lost) > _MAX_EXAMPLES else "")
        tokens = counted(len(lost), "token")
        yield f"{tokens} of '{name}' not in the output's tokenizer: {examples}; {_ADVICE} adds them"


def _row_notices(first: Checkpoint, first_name: str, model: Checkpoint, name: str) -> list[str]:
    """Report rows beyond the output's whose tokens are unknown."""
    rows = {
        (tensor.shape[0], other.shape[0])
        for key, tensor in first.tensors.items()
        if tensor.shape and embedding_ending(key) and (other := model.tensors.get(key)) is not None and other.shape
    }
    return [
        f"embeddings have {more} rows in '{name}', {fewer} in '{first_name}': the rest is left out"
        for fewer, more in sorted(rows)
        if more > fewer
    ]
