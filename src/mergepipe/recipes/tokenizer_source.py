"""Parse a recipe's tokenizer settings: its source, and the sources of single tokens' embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mergepipe.checkpoints.embedding_rows import TokenRule
from mergepipe.core.display import shortened
from mergepipe.errors import NotFoundError, RecipeError, did_you_mean
from mergepipe.recipes.fields import DocumentReader, Findings
from mergepipe.recipes.parameters import read_flag
from mergepipe.recipes.recipe import MOST_ATOMS, ModelInput, TokenizerRequest
from mergepipe.recipes.references import read_model, read_reference
from mergepipe.recipes.yaml_source import KeyPath, Value

TOKENIZER_KEYS = ("source", "tokens", "pad_to_multiple_of", "new_tokens", "k")
SUBWORD, OMP = "subword", "omp"
TOKEN_KEYS = ("source", "force")
MODEL_TOKEN_KEYS = ("kind", "model", "token", "token_id")


def read_tokenizer(
    reader: DocumentReader, root: dict[str, Value], inputs: Sequence[ModelInput], *, has_base: bool
) -> TokenizerRequest | None:
    """Parse the requested tokenizer, given the recipe's models `inputs`; None if none is requested."""
    whole, short = root.get("tokenizer"), root.get("tokenizer_source")
    if whole is not None and short is not None:
        message, hint = "cannot be combined with 'tokenizer'", "write it as 'source:' under 'tokenizer:'"
        reader.refuse("recipe.conflict", ("tokenizer_source",), message, hint)
    if whole is None and short is None:
        return None
    tokenizer = _Tokenizer(reader, inputs, has_base)
    return tokenizer.read(whole, ("tokenizer",)) if whole is not None else tokenizer.short(short)


class _Tokenizer:
    """Parses tokenizer settings, resolving references to the recipe's models."""

    def __init__(self, reader: DocumentReader, inputs: Sequence[ModelInput], has_base: bool) -> None:
        self._reading = reader
        self._inputs = inputs
        self._has_base = has_base
        self._donor: ModelInput | None = None  # of the tokenizer, where it is not merged

    def short(self, value: Value) -> TokenizerRequest:
        at: KeyPath = ("tokenizer_source",)
        return TokenizerRequest(*self._source(value, at), where=self._reading.source.where(*at))

    def read(self, value: Value, at: KeyPath) -> TokenizerRequest | None:
        entry = self._reading.mapping(value, at, "write 'source: union', 'source: base' or 'source: PATH' under it")
        if entry is None:
            return None
        self._reading.unknown_keys(entry, TOKENIZER_KEYS, at)
        new_tokens = self._new_tokens(entry, at)
        source = self._source("union" if entry.get("source") is None else entry["source"], (*at, "source"), new_tokens)
        tokens = self._reading.mapping(entry.get("tokens"), (*at, "tokens")) or {}
        embeddings = {token: self._embedding(embedding, (*at, "tokens", token)) for token, embedding in tokens.items()}
        read = {token: embedding for token, embedding in embeddings.items() if embedding is not None}
        padding = self._reading.whole(entry.get("pad_to_multiple_of"), (*at, "pad_to_multiple_of"), 0)
        n_atoms = self._reading.whole(entry.get("k"), (*at, "k"), 1) or MOST_ATOMS
        return TokenizerRequest(
            *source, read, padding or None, self._reading.source.where(*at), self._donor, new_tokens, n_atoms
        )

    def _new_tokens(self, entry: dict[str, Value], at: KeyPath) -> str:
        """Return how rows of new tokens are made; empty for zeros."""
        value = entry.get("new_tokens")
        if value in (None, SUBWORD, OMP):
            if entry.get("k") is not None and value != OMP:
                self._reading.refuse("recipe.conflict", (*at, "k"), "only works together with 'new_tokens: omp'")
            return str(value or "")
        hint = did_you_mean(shortened(str(value)), [SUBWORD, OMP])
        self._reading.refuse("recipe.unknown-name", (*at, "new_tokens"), f"'{shortened(str(value))}' is unknown", hint)
        return ""

    def _source(self, value: Value, at: KeyPath, new_tokens: str = "") -> tuple[bool, int]:
        """Return whether the tokenizer is a union of all, and the model that lends it."""
        if value == "union":
            return True, 0
        if value == "base":
            if not self._has_base:
                message, hint = "there is no base_model", "name base_model, or give the model's path here"
                self._reading.refuse("recipe.incomplete", at, message, hint)
            return False, 0
        return False, self._model(value, at, may_donate=bool(new_tokens)) or 0

    def _model(self, value: Value, at: KeyPath, *, may_donate: bool = False) -> int | None:
        """Return the index of a model among the recipe's inputs, behind which the donor stands."""
        unreported = replace(self._reading, findings=Findings(RecipeError, NotFoundError))
        reference = read_reference(unreported, value, at)
        key = None if reference is None else (reference.path, reference.adapter, 0)
        index = next((index for index, model in enumerate(self._inputs) if model.key == key), None)
        if reference is None or index is not None or not self._inputs:
            read_reference(self._reading, value, at)  # reports what is wrong with the reference itself
            return index
        if may_donate:
            self._donor = read_model(self._reading, value, at, {}, at)
            return len(self._inputs)
        message = f"'{shortened(reference.text)}' is not one of the models that are merged"
        names = ", ".join(shortened(model.text) for model in self._inputs[:8])
        hint = f"name one of: {names}" + ("" if at[-1] == "model" else "; or write union or base")
        self._reading.refuse("recipe.incomplete", at, message, hint)
        return None

    def _embedding(self, value: Value, at: KeyPath) -> TokenRule | None:
        entry = self._reading.mapping(value, at, "write 'source: ...' under the token")
        if entry is None:
            return None
        self._reading.unknown_keys(entry, TOKEN_KEYS, at)
        force = read_flag(self._reading, entry.get("force", False), (*at, "force"))
        return self._token_source(entry.get("source"), (*at, "source"), force=force is True)

    def _token_source(self, value: Value, at: KeyPath, *, force: bool) -> TokenRule | None:
        if value is None:
            return TokenRule(is_usual=True, force=force)
        if not isinstance(value, dict) or "kind" not in value:
            return TokenRule(self._model(value, at), force=force)
        self._reading.unknown_keys(value, MODEL_TOKEN_KEYS, at)
        if value["kind"] == "zero":
            return TokenRule(force=force)
        if value["kind"] != "model_token":
            self._reading.wrong_kind(value["kind"], (*at, "kind"), "zero or model_token")
            return None
        return self._model_token(value, at, force=force)

    def _model_token(self, value: dict[str, Value], at: KeyPath, *, force: bool) -> TokenRule | None:
        token, token_id = value.get("token"), value.get("token_id")
        if (token is None) == (token_id is None):
            present_keys = "neither" if token is None else "both"
            message = f"needs either 'token' or 'token_id', found {present_keys}"
            self._reading.refuse("recipe.incomplete", at, message)
            return None
        if token is not None and not isinstance(token, str):
            self._reading.wrong_kind(token, (*at, "token"), "text")
            return None
        number = self._reading.whole(token_id, (*at, "token_id"), 0)
        if number is None and token_id is not None:
            return None
        model = self._model(value.get("model"), (*at, "model"))
        return TokenRule(model, token, number, force=force)
