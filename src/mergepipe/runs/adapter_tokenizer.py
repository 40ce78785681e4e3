"""Choose between the tokenizer of a base and the one next to an adapter, with which the adapter was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mergepipe.checkpoints.config_files import config_bytes
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import find_sidecars, list_names
from mergepipe.checkpoints.embedding_rows import embedding_ending
from mergepipe.checkpoints.vocabulary import SETTINGS_NAME, TOKENIZER_NAMES, TokenizerFiles, read_vocabulary
from mergepipe.core.outcome import Notice, notice_at
from mergepipe.core.units import plural
from mergepipe.errors import MergePipeError, MismatchError, UnsupportedError
from mergepipe.recipes.output_config import parsed_config, text_sections
from mergepipe.recipes.recipe import ModelInput, Recipe
from mergepipe.recipes.tasks import MergeTask
from mergepipe.runs.adapters import folds_adapters
from mergepipe.storage.contract import Store, is_folder

_EOS_TOKEN, _EOS_ID = "eos_token", "eos_token_id"
_SPECIAL_NAME = "special_tokens_map.json"
_KEEPS_BASE = "`--tokenizer base` (in a recipe `adapter_tokenizer: base`) keeps the base's"


@dataclass(frozen=True, slots=True)
class AdapterTokenizer:
    """The tokenizer next to an adapter, as the small files of a checkpoint.

    `eos_id` ends a text in it where the base's tokenizer has another token for that. `has_vocabulary` is False where
    the files only change what the base's tokenizer does: its chat template, its settings.
    """

    files: Checkpoint
    has_vocabulary: bool
    eos_id: int | None = None


def is_tokenizer_file(name: str) -> bool:
    """Whether a file belongs to the tokenizer, chat templates included."""
    return name in TOKENIZER_NAMES or "chat_template" in name or name.endswith(".tiktoken")


def choose_tokenizer(
    recipe: Recipe, base: Checkpoint, tasks: Sequence[MergeTask], store: Store
) -> tuple[AdapterTokenizer | None, tuple[Notice, ...]]:
    """Return the tokenizer next to the adapter of the first model, if the output gets it, and notices that say so.

    The output gets it where its embedding has a row for each of its tokens, unless `adapter_tokenizer` is `base`.
    Several adapters that are added to one base need to have the same one.

    Raises:
        MismatchError: `adapter_tokenizer` is `adapter`, and there is none that fits.
    """
    if recipe.adapter_tokenizer == "base" or recipe.tokenizer is not None:
        return None, ()
    candidates = []
    for model in recipe.models if folds_adapters(recipe) else recipe.inputs()[:1]:
        files = _files_next_to_adapter(store, model, base)
        if files is not None:
            candidates.append((model, files))
    is_required = recipe.adapter_tokenizer == "adapter"
    if not candidates:
        if is_required:
            message = "there is no tokenizer next to an adapter"
            raise MismatchError.of("model.mismatch", "adapter_tokenizer", message, "leave it out")
        return None, ()
    model, files = candidates[0]
    try:
        _check_same(store, candidates)
        if _is_part_of(store, files, base):
            return None, ()
        chosen = _fitting(store, model, files, base, tasks)
    except MergePipeError as error:
        if is_required:
            raise
        text = f"the tokenizer next to the adapter is not used: {error.problems[0].message}"
        return None, (notice_at("recipe.unclear", f"'{model.text}'", text, changes_result=True),)
    if is_required:
        return chosen, ()
    what = "tokenizer and chat template" if chosen.has_vocabulary else "chat template and settings of the tokenizer"
    text = f"the output gets the {what} next to the adapter"
    return chosen, (notice_at("recipe.unclear", f"'{model.text}'", text, _KEEPS_BASE),)


def _files_next_to_adapter(store: Store, model: ModelInput, base: Checkpoint) -> Checkpoint | None:
    if model.adapter is None or not is_folder(store, model.adapter):
        return None
    names = filter(is_tokenizer_file, find_sidecars(store, model.adapter, list_names(store, model.adapter)))
    sidecars = tuple(names)
    return replace(base, path=model.adapter, root=model.adapter, sidecars=sidecars) if sidecars else None


def _check_same(store: Store, candidates: Sequence[tuple[ModelInput, Checkpoint]]) -> None:
    first_model, first = candidates[0]
    for model, other in candidates[1:]:
        if not (_is_part_of(store, first, other) and _is_part_of(store, other, first)):
            message = f"'{first_model.text}' and '{model.text}' have different tokenizers"
            raise MismatchError.of("model.mismatch", first.root, message)


def _is_part_of(store: Store, files: Checkpoint, others: Checkpoint) -> bool:
    """Whether small files have the bytes that those of the same names have elsewhere."""
    if not {*files.sidecars} <= {*others.sidecars}:
        return False
    own = TokenizerFiles(files, store)
    theirs = TokenizerFiles(others, store)
    return all(own.raw(name) == theirs.raw(name) for name in files.sidecars)


def _fitting(
    store: Store, model: ModelInput, files: Checkpoint, base: Checkpoint, tasks: Sequence[MergeTask]
) -> AdapterTokenizer:
    """Return the tokenizer of the output; refuse one with tokens that the embedding has no row for."""
    try:
        own_vocabulary = read_vocabulary(files, store)
    except UnsupportedError:
        if base.resized_by is None:
            raise
        return AdapterTokenizer(files, has_vocabulary=True)  # nothing else can have the tokens of the added rows
    n_rows = min((task.shape[0] for task in tasks if task.shape and embedding_ending(task.name)), default=0)
    if own_vocabulary is not None and own_vocabulary.n_ids > n_rows:
        message = f"it has {plural(own_vocabulary.n_ids, 'token')}, the embedding {plural(n_rows, 'row')}"
        raise MismatchError.of("model.mismatch", model.text, message, "use the one of the base")
    eos = _eos_token(store, files)
    if eos is None or eos == _eos_token(store, base):
        return AdapterTokenizer(files, own_vocabulary is not None)
    vocabulary = own_vocabulary or read_vocabulary(base, store)
    eos_id = None if vocabulary is None else vocabulary.ids.get(eos)
    return AdapterTokenizer(files, own_vocabulary is not None, eos_id)


def _eos_token(store: Store, files: Checkpoint) -> str | None:
    """Return the token that ends a text, as the settings of a tokenizer name it."""
    for name in (SETTINGS_NAME, _SPECIAL_NAME):
        stated = TokenizerFiles(files, store).document(name).get(_EOS_TOKEN)
        token = stated.get("content") if isinstance(stated, dict) else stated
        if isinstance(token, str):
            return token
    return None


def with_eos_id(config: bytes, eos_id: int, *, keeps_others: bool) -> bytes:
    """State the id of the token that ends a text, first of those that the configuration has where these are kept."""
    content = parsed_config(config)
    if content is None:
        return config
    stating = [section for section in text_sections(content) if _EOS_ID in section] or [content]
    for section in stating:
        stated = section.get(_EOS_ID)
        ids = stated if isinstance(stated, list) else [stated]
        if eos_id not in ids:
            others = [other for other in ids if other is not None]
            section[_EOS_ID] = [eos_id, *others] if keeps_others and others else eos_id
    return config_bytes(content)
