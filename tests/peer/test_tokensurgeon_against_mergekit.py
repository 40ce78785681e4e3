"""A model with another's vocabulary is that of mergekit-tokensurgeon."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_forms_against_mergekit import run_peer

import mergepipe

pytestmark = pytest.mark.peer


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tokensurgeon")
    run_peer("run_tokensurgeon.py", ".", folder=root)
    return root


@pytest.mark.parametrize(("model", "donor"), product(("model", "model-tied"), ("donor", "donor-tied")))
@pytest.mark.parametrize("method", ["subword", "omp"])
def test_new_tokens__have_the_rows_of_mergekit(root: Path, model: str, donor: str, method: str, tmp_path: Path) -> None:
    tokenizer = {"source": str(root / donor), "new_tokens": method, **({"k": 4} if method == "omp" else {})}
    recipe = {"merge_method": "passthrough", "models": [{"model": str(root / model)}], "tokenizer": tokenizer}
    mergepipe.merge(recipe, tmp_path / "out", catalog=False)
    theirs = root / f"{model}-{donor}-{method}"
    made, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", theirs))
    assert made.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(made[name], values, rtol=1e-4, atol=1e-5, err_msg=name)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", theirs)]
    assert configs[0] == configs[1]
