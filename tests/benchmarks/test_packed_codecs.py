"""Tests of benchmarks.packed_codecs on tensors that take milliseconds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.codec_pairs import STEPS, Pair, Shipped, public_pairs, synthetic_pairs
from benchmarks.packed_codecs import OURS, OURS_FOR_TIES, main, measure

from mergepipe.core.blocks import BF16, F32

pytestmark = [pytest.mark.transformers, pytest.mark.slow]  # `make test-benchmarks`, which CI runs too

N = 20_000


def test_rows__say_how_far_each_pair_is_and_grow_with_it() -> None:
    rows = [measure(pair, 1) for pair in synthetic_pairs(N, BF16)]
    norms = [row.pair.relative_norm for row in rows]
    assert norms[-1] is None
    assert [norm for norm in norms[:6] if norm is not None] == pytest.approx(STEPS, rel=0.2)
    shares = [row.packed_bytes[OURS] / row.n_bytes for row in rows]
    assert shares[:5] == sorted(shares[:5])
    assert 0.05 < shares[0] < shares[4] < shares[-1] < 0.7
    for_ties = [row.packed_bytes[OURS_FOR_TIES] / row.n_bytes for row in rows]
    assert 0.05 < for_ties[0] < shares[0]
    assert for_ties[-1] == shares[-1]  # without a base there are no levels
    assert [len(row.nanoseconds) for row in (rows[0], rows[-1])] == [3, 2]


def test_public_weights__are_found_under_their_keys_and_rounded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    weight, other = torch.linspace(-1, 1, 9000), torch.arange(5)
    torch.save({"model": {"state": {"w": weight, "n": other, "new": weight}}}, tmp_path / "expert.pt")
    torch.save({"model": {"state": {"w": weight * 2}}, "note": np.float64(3)}, tmp_path / "base.pt")
    shipped = Shipped("pair", "expert.pt", "base.pt", ("model", "state"))
    as_it_is, rounded = public_pairs(tmp_path, [shipped])
    assert (as_it_is.dtype, rounded.dtype) == (F32, BF16)
    assert as_it_is.relative_norm == rounded.relative_norm == 0.5
    bases = [base for base, _ in as_it_is.tensors]
    assert bases[0] is not None
    assert bases[0].tobytes() == (weight * 2).numpy().tobytes()
    assert bases[1] is None
    assert [len(expert) for _, expert in rounded.tensors] == [18_000, 18_000]


def test_command__prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--elements", str(N), "--repeats", "1", "--dtypes", "F16"]) == 0
    assert capsys.readouterr().out.count("| F16 |") == 8


def test_pair__without_any_base_has_no_norm() -> None:
    content = np.arange(64, dtype=np.uint8)
    pair = Pair("alone", F32, ((None, content),))
    assert not pair.has_base
    assert pair.relative_norm is None
    assert pair.base.tolist() == [0] * 64
