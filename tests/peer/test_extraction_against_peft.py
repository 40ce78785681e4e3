"""An extracted adapter, merged by PEFT, gives the base and the best approximation of the difference of its rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file
from test_forms_against_mergekit import run_peer

import mergepipe
from mergepipe.reports import ExtractLoraReport

pytestmark = pytest.mark.peer

CASES = {"llama": 14, "gpt2": 8}  # and how many matrices an adapter has; gpt2 stores its own with inputs first
RANK = 4


@pytest.fixture(scope="module", params=[False, True], ids=["factors", "save-modules"])
def reports(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, ExtractLoraReport]:
    """Extract from every model, and let peft merge what comes out."""
    root = tmp_path_factory.mktemp("extracted")
    run_peer("run_extracted.py", "prepare", ".", folder=root)
    made = {
        case: mergepipe.extract_lora(
            root / case / "base", root / case / "model", root / case / "lora", rank=RANK, save_modules=request.param
        )
        for case in CASES
    }
    run_peer("run_extracted.py", "merge", ".", folder=root)
    return made


def truncated(delta: NDArray[np.float32], rank: int) -> NDArray[np.float64]:
    left, values, right = np.linalg.svd(delta.astype(np.float64), full_matrices=False)
    return np.asarray((left[:, :rank] * values[:rank]) @ right[:rank])


@pytest.mark.parametrize("case", CASES)
def test_extracted_adapter__merged_by_peft_is_the_base_and_the_truncated_difference(
    reports: dict[str, ExtractLoraReport], case: str
) -> None:
    report = reports[case]
    folder = Path(str(report.out)).parent
    base, model, merged = (load_file(folder / name / "model.safetensors") for name in ("base", "model", "merged"))
    extracted = {tensor.name: tensor for tensor in report.tensors}
    left = {tensor.name for tensor in report.left}
    assert len(extracted) == CASES[case]
    lost = whole = 0.0
    for name, start in base.items():
        delta = model[name] - start
        if name in extracted:
            expected = start + truncated(delta, RANK)
            error = np.linalg.norm(delta - truncated(delta, RANK)) / np.linalg.norm(delta)
            assert extracted[name].relative_error == pytest.approx(error, rel=1e-4)
        else:
            expected = (start if name in left else model[name]).astype(np.float64)
        np.testing.assert_allclose(merged[name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
        lost += float(np.sum((model[name].astype(np.float64) - expected) ** 2))
        whole += float(np.sum(delta.astype(np.float64) ** 2))
    assert report.relative_error == pytest.approx(np.sqrt(lost / whole), rel=1e-4)
