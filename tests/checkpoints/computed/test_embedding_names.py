"""Which names may be those of embeddings."""

from __future__ import annotations

import pytest

from mergepipe.checkpoints.embedding_rows import embedding_ending


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("model.embed_tokens.weight", "embed_tokens.weight"),
        ("model.language_model.embed_tokens.weight", "embed_tokens.weight"),
        ("lm_head.bias", "lm_head.bias"),
        ("transformer.wte.weight", "wte.weight"),
        ("bert.embeddings.word_embeddings.weight", "word_embeddings.weight"),
        ("cls.predictions.bias", "predictions.bias"),
        ("cls.predictions.decoder.weight", "predictions.decoder.weight"),
        ("transformer.wpe.weight", None),
        ("bert.embeddings.position_embeddings.weight", None),
        ("model.layers.0.mlp.down_proj.weight", None),
        ("bert.encoder.layer.0.output.dense.weight", None),
        ("my_lm_head.weight", None),
    ],
)
def test_embedding_ending__knows_names_of_architectures(name: str, ending: str | None) -> None:
    assert embedding_ending(name) == ending
