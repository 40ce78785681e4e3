"""Every operator's reductions and block function against the float64 oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.core.blocks import BF16, F16, F32, F64, DType
from mergepipe.testing import Family, StoredTensor, make_family
from support.merge_in_memory import merge_in_memory
from support.oracle import MergeCase, expected
from support.random_oracle import kept_by_dare
from support.rounding import canonical_bits, encode
from support.strategies import DELTA_OPERATORS, FLOATS, families, merge_cases

KEYS = (3, 2**64 - 1, 17, 1 << 40, 12345)


def check_against_oracle(
    case: MergeCase, family: Family, out_dtype: DType, gap: int, cuts: list[int]
) -> tuple[float, float]:
    """Merge, compare; the shares of elements about which the oracle says nothing, and of those with two answers."""
    keys = KEYS[: len(case.weights)]
    found_N = merge_in_memory(case, StoredTensor(family, out_dtype, gap), keys, cuts)
    n = len(family.base)
    kept_EN = np.stack([kept_by_dare(k, n, d) for k, d in zip(keys, case.densities, strict=True)])
    answer = expected(case, family.base_N, family.experts_EN, kept_EN if case.is_random else None)
    accepted_N = answer.accepts(found_N, out_dtype)
    if not accepted_N.all():
        i = int(np.flatnonzero(~accepted_N)[0])
        raise AssertionError(
            f"element {i}: {found_N[i]} from base {family.base_N[i]} and experts {family.experts_EN[:, i]}, "
            f"expected {answer.low_AN[:, i]} to {answer.high_AN[:, i]}; {case}"
        )
    possible_AN = ~(answer.low_AN > answer.high_AN)
    return float(answer.undetermined_N.mean()), float((possible_AN.sum(axis=0) > 1).mean())


@given(st.data())
def test_merge_block__agrees_with_the_oracle(data: st.DataObject) -> None:
    case = data.draw(merge_cases())
    family = data.draw(families(len(case.weights)))
    cuts = data.draw(st.lists(st.integers(1, 5000), max_size=4))
    check_against_oracle(case, family, data.draw(st.sampled_from(FLOATS)), data.draw(st.integers(0, 9)), cuts)


@pytest.mark.parametrize("operator", DELTA_OPERATORS)
@pytest.mark.parametrize("out_dtype", FLOATS, ids=[d.name for d in FLOATS])
def test_merge_block__is_pinned_down_by_the_oracle_on_ordinary_values(operator: str, out_dtype: DType) -> None:
    n_experts = 1 if operator == "slerp" else 4
    case = MergeCase(operator, (0.7, 0.9, 1.1, 0.4)[:n_experts], (0.2, 0.37, 0.5, 1.0)[:n_experts], normalize=True)
    family = make_family(np.random.default_rng(5), 50_001, BF16, (BF16, F32, F16, F64)[:n_experts], 0.0)
    undetermined, with_two_answers = check_against_oracle(case, family, out_dtype, 0, [16384, 32768])
    assert undetermined == 0.0
    assert with_two_answers < 0.25  # elements that no expert changed have two equal answers


@pytest.mark.parametrize("operator", [name for name in DELTA_OPERATORS if name not in ("linear", "slerp")])
@pytest.mark.parametrize("dtype", FLOATS, ids=[d.name for d in FLOATS])
def test_merge_block__gives_the_base_where_no_expert_differs(operator: str, dtype: DType) -> None:
    base = make_family(np.random.default_rng(1), 5000, dtype, (), 0.3)
    family = Family(dtype, (dtype, dtype), base.base, (base.base, base.base))
    case = MergeCase(operator, (0.7, -0.3), (0.5, 0.2), normalize=True, lambda_=1.1)
    found_N = merge_in_memory(case, StoredTensor(family, dtype), KEYS[:2], [])
    wanted_N = encode(family.base_N, dtype)
    same_N = (found_N == wanted_N) | (np.isnan(found_N.astype(np.float32)) & np.isnan(wanted_N.astype(np.float32)))
    assert same_N.all()


def _merge_numbers(case: MergeCase, base: list[float], experts: list[list[float]]) -> list[float]:
    stored = [encode(np.array(row, np.float32), F32) for row in (base, *experts)]
    family = Family(F32, (F32,) * len(experts), stored[0], tuple(stored[1:]))
    found = merge_in_memory(case, StoredTensor(family, F32), KEYS[: len(experts)], [])
    return [float(x) for x in found]


def test_ties__counts_a_zero_vote_as_positive() -> None:
    case = MergeCase("ties", (1.0, 1.0), (1.0, 1.0), normalize=True)
    assert _merge_numbers(case, [0.0, 1.0], [[2.0, 4.0], [-2.0, -2.0]]) == [2.0, 4.0]


def test_ties__averages_only_what_agrees() -> None:
    case = MergeCase("ties", (1.0, 1.0, 1.0), (1.0, 1.0, 1.0), normalize=True)
    assert _merge_numbers(case, [0.0] * 3, [[1.0, -4.0, 0.0], [3.0, 1.0, 0.0], [-1.0, -2.0, 5.0]]) == [2.0, -3.0, 5.0]


def test_ties__keeps_exactly_as_many_elements_as_the_density_says_though_they_are_equal() -> None:
    case = MergeCase("ties", (1.0,), (0.4,), normalize=True)
    found = _merge_numbers(case, [0.0] * 5, [[1.0, -2.0, 3.0, 2.0, 0.5]])
    assert found in ([0.0, -2.0, 3.0, 0.0, 0.0], [0.0, 0.0, 3.0, 2.0, 0.0])


def test_ties__keeps_nothing_where_the_density_asks_for_less_than_one_element() -> None:
    case = MergeCase("ties", (1.0,), (0.1,), normalize=True)
    assert _merge_numbers(case, [1.0] * 9, [[2.0] * 9]) == [1.0] * 9


def test_ties__scales_by_lambda_and_divides_only_when_normalized() -> None:
    plain = MergeCase("ties", (0.5, 0.5), (1.0, 1.0), normalize=False, lambda_=2.0)
    assert _merge_numbers(plain, [1.0], [[3.0], [5.0]]) == [7.0]
    normalized = MergeCase("ties", (0.5, 0.5), (1.0, 1.0), normalize=True, lambda_=2.0)
    assert _merge_numbers(normalized, [1.0], [[3.0], [5.0]]) == [7.0]
    assert _merge_numbers(normalized, [1.0], [[3.0], [1.0]]) == [5.0]


def test_dare__rescales_the_survivors_only_when_asked() -> None:
    base, expert = [0.0] * 64, [1.0] * 64
    kept = kept_by_dare(KEYS[0], 64, 0.25)
    for rescale, survivor in ((True, 4.0), (False, 1.0)):
        case = MergeCase("dare_linear", (1.0,), (0.25,), rescale=rescale)
        assert _merge_numbers(case, base, [expert]) == [survivor if k else 0.0 for k in kept]


def test_slerp__reaches_both_ends_and_keeps_the_angle() -> None:
    base, other = [1.0, 0.0], [0.0, 1.0]
    for t, wanted in ((0.0, base), (1.0, other), (0.5, [0.5**0.5] * 2)):
        case = MergeCase("slerp", (1.0,), (1.0,), t=t)
        assert _merge_numbers(case, base, [other]) == pytest.approx(wanted, abs=1e-7)


def test_merge_block__writes_the_one_nan() -> None:
    case = MergeCase("task_arithmetic", (1.0,), (1.0,))
    nan_bits = np.array([0xFFC12345, 0x7F800001], np.uint32).view(np.float32)
    family = Family(F32, (F32,), nan_bits, (np.array([1.0, 2.0], np.float32),))
    found = merge_in_memory(case, StoredTensor(family, BF16), (), [])
    assert np.isnan(found.astype(np.float32)).all()
    np.testing.assert_array_equal(found.view(np.uint16), canonical_bits(found))
