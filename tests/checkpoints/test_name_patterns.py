"""Expressions of the ends of names find what `re` finds, in bounded time whatever the expressions are."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergepipe.checkpoints import name_patterns
from mergepipe.checkpoints.name_patterns import EndPatterns, PatternError

NAMES = [
    f"model.layers.{layer}.{block}.{name}"
    for layer in (0, 1, 10, 11)
    for block, name in (("self_attn", "q_proj"), ("self_attn", "v_proj"), ("mlp", "up_proj"), ("mlp", "down_proj"))
]
WRITTEN = [
    r".*\.layers\.1\..*(q_proj|k_proj|v_proj|o_proj)$",
    r"layers\.1\.(self_attn|mlp)\..*",
    r"layers\.(0|1)\.self_attn\.(q|v)_proj",
    r"(?:q_proj|k_proj)",
    "^q_proj",
    "^model.layers.1.self_attn.q_proj",
    r".*layers\.\d+\.self_attn\.[qk]_proj",
    r"model\.layers\.([0-9]|1[0-9])\.mlp\.(up|down)_proj",
    r"layers\.\d{2}\.mlp\.up_proj",
    r"[^.]+\.up_proj",
    "q_proj",
    "layers.1.self_attn.q_proj",
    "self_attn",
    r"(self_attn\.)?q_proj",
    r"layers\.1+\.mlp.*?",
    "",
]


def by_re(expressions: list[str], name: str) -> int | None:
    """What PEFT does."""
    for index, expression in enumerate(expressions):
        if re.match(rf"(.*\.)?({expression})$", name):
            return index
    return None


@pytest.mark.parametrize("expression", WRITTEN)
def test_end_patterns__match_as_re_does(expression: str) -> None:
    patterns = EndPatterns([expression])
    assert [patterns.first(name) for name in NAMES] == [by_re([expression], name) for name in NAMES]


def test_end_patterns__find_the_first_of_many() -> None:
    for turn in range(len(WRITTEN)):
        expressions = WRITTEN[turn:-1] + WRITTEN[:turn]
        patterns = EndPatterns(expressions)
        assert [patterns.first(name) for name in NAMES] == [by_re(expressions, name) for name in NAMES]


@given(
    st.lists(st.text(alphabet="ab.^$|()[]*+?{}\\d-,1", max_size=10), min_size=1, max_size=3),
    st.lists(st.text(alphabet="ab.1", max_size=8), min_size=1, max_size=5),
)
def test_end_patterns__of_any_text_match_as_re_does_or_are_refused(expressions: list[str], names: list[str]) -> None:
    try:
        patterns = EndPatterns(expressions)
    except (PatternError, re.error):
        return
    assert [patterns.first(name) for name in names] == [by_re(expressions, name) for name in names]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("(a*)*b", "repeats what repeats already"),
        ("(?:a+)+", "repeats what repeats already"),
        (r"(a)\1*", "groupref"),
        ("(?=a)b", "assert, which"),
        ("(?i)a", "sets flags"),
        (r"\bq_proj", "border of a word"),
        ("a" * 2000 + "*", "2001 characters"),
        ("(a{99}){1}x", "repeats what"),
        ("a{30000}", "is too long"),
    ],
)
def test_end_patterns__refuse_by_name_what_names_do_not_need(expression: str, message: str) -> None:
    with pytest.raises(PatternError, match=message):
        EndPatterns([expression])


@pytest.mark.parametrize("expression", ["(.*)(.*)(.*)(.*)(.*)x", "(a|a)(a|a)(a|a)(a|aa)+$", ".*a.*a.*a.*a.*b"])
def test_end_patterns__take_linear_time_for_what_explodes_in_re(expression: str) -> None:
    patterns = EndPatterns([expression])
    started = time.process_time()
    assert patterns.first("a" * 500 + "!") is None
    assert time.process_time() - started < 5  # `re` needs minutes to years


def test_end_patterns__bound_the_work_of_many_expressions_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_patterns, "_MOST_WORK", 100_000)
    patterns = EndPatterns([rf".*{'.*'.join(map(str, range(n)))}x" for n in range(1, 60)])

    def match_all() -> None:
        for number in range(1000):
            patterns.first(f"{number:0300d}{number * 7919:0200d}")

    with pytest.raises(PatternError, match="takes too long, with so many patterns and names"):
        match_all()


def test_end_patterns__look_up_ten_thousand_plain_names() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(100) for expert in range(100)]
    patterns = EndPatterns(names)
    assert [patterns.first(name) for name in names] == list(range(len(names)))
    assert patterns.first("prefix.model.layers.99.mlp.experts.99.up_proj") == len(names) - 1
    assert patterns.first("model/layers/99.mlp.experts.99.up_proj") == len(names) - 1
