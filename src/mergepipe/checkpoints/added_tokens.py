"""Add tokens to a vocabulary, and to the tokenizer files that hold it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from mergepipe.checkpoints.vocabulary import (
    ADDED_NAME,
    DECODER_KEY,
    FAST_NAME,
    SETTINGS_NAME,
    AddedToken,
    TokenizerFiles,
    Vocabulary,
)


def extended(vocabulary: Vocabulary, tokens: Sequence[AddedToken]) -> Vocabulary:
    """Append `tokens`, which the vocabulary lacks, after all others."""
    first = vocabulary.n_ids
    ids = {**vocabulary.ids, **{token.content: first + n for n, token in enumerate(tokens)}}
    added = {**vocabulary.added, **{token.content: token for token in tokens}}
    return Vocabulary(ids, added, vocabulary.file)


def extended_files(files: TokenizerFiles, output: Vocabulary, tokens: Sequence[AddedToken]) -> dict[str, bytes]:
    """Return the files that change when `tokens` are added, with new content; `output` has the tokens' ids."""
    if not tokens:
        return {}
    changed = {}
    is_fast = FAST_NAME in files
    if is_fast:
        document = files.document(FAST_NAME)
        listed = document.get("added_tokens")
        records = [{"id": output.ids[token.content], **asdict(token)} for token in tokens]
        changed[FAST_NAME] = _written(
            {**document, "added_tokens": [*(listed if isinstance(listed, list) else []), *records]}
        )
    settings = files.document(SETTINGS_NAME)
    if not is_fast or DECODER_KEY in settings:
        decoder = settings.get(DECODER_KEY)
        described: dict[str, object] = dict(decoder) if isinstance(decoder, dict) else {}
        described |= {str(output.ids[token.content]): asdict(token) for token in tokens}
        changed[SETTINGS_NAME] = _written({**settings, DECODER_KEY: described})
    if not is_fast or ADDED_NAME in files:
        ids = {token.content: output.ids[token.content] for token in tokens}
        changed[ADDED_NAME] = _written({**files.document(ADDED_NAME), **ids})
    return changed


def _written(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
