"""Reports as tables and as JSON."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from mergepipe.cli.printing import report_json
from mergepipe.cli.render.merges import check_table, merge_table, pack_table, shorten_names
from mergepipe.cli.render.snapshots import verify_table
from mergepipe.core.notices import DroppedTensor
from mergepipe.reports import (
    BaseMatch,
    BudgetVerdict,
    CheckReport,
    ExpertCoverage,
    KeptShare,
    MergeReport,
    ModelUse,
    PackedExpert,
    PackReport,
    VerifyReport,
)
from mergepipe.storage.location import Location

MERGED = MergeReport(
    out=Path("/models/merged"),
    sid="ab" * 16,
    operator="ties",
    merged_tensors=310,
    copied_tensors=2,
    dropped_tensors=1,
    base_bytes=1_191_000_000,
    expert_bytes=7_150_000_000,
    analysis_bytes=0,
    metadata_bytes=100_000,
    output_bytes=1_191_000_000,
    seconds=8.0,
    peak_rss_bytes=700_000_000,
)
CHECKED = CheckReport(
    recipe="/r.yml",
    operator="linear",
    models=(ModelUse("base", "base", 4, 4000), ModelUse("expert", "tuned", 1, 2000)),
    merged_tensors=2,
    copied=(("layers.0.steps", "integer or boolean buffer"), ("layers.1.steps", "integer or boolean buffer")),
    dropped=(DroppedTensor("tuned", "extra.weight", "not in the base"),),
    base_bytes=4000,
    expert_bytes=2000,
    output_bytes=4000,
    disk_bytes=5000,
    shards=1,
)


def facts(table: str) -> list[list[str]]:
    """Label and value of every line."""
    return [line.split("  ", 1) for line in table.splitlines()]


def values(table: str, label: str) -> list[str]:
    return [value.strip() for name, value in facts(table) if name.strip() == label]


def test_merge_table__states_the_share_kept_of_each_expert() -> None:
    kept = (KeptShare("models/math", 200, 1000), KeptShare("models/code", 999, 2500))
    assert values(merge_table(replace(MERGED, kept=kept)), "kept") == [
        "20 % of models/math, by size of difference",
        "40 % of models/code, by size of difference",
    ]
    assert values(merge_table(MERGED), "kept") == []


def test_merge_table__says_what_was_read_written_and_taken() -> None:
    table = merge_table(MERGED)
    assert values(table, "base read") == ["1.19 GB"]
    assert values(table, "experts read") == ["7.15 GB"]
    assert values(table, "written") == ["1.19 GB"]
    assert values(table, "time") == ["8.0 s"]
    assert values(table, "speed") == ["1.19 GB/s"]
    assert values(table, "peak memory") == ["700 MB"]
    assert values(table, "tensors") == ["310 merged, 2 copied, 1 dropped"]
    assert values(table, "snapshot") == ["ab" * 16]
    assert values(table, "output") == ["/models/merged"]


def test_merge_table__mentions_a_second_read_only_if_there_was_one() -> None:
    assert values(merge_table(MERGED), "read again") == []
    assert values(merge_table(replace(MERGED, analysis_bytes=2_500_000)), "read again") == ["2.50 MB"]


def test_verify_table__counts_blocks_or_the_files_of_a_composite() -> None:
    report = VerifyReport(Path("/s"), "ab" * 16, 1, 3, 4, 100, 1.0, (), ())
    assert values(verify_table(report), "checked") == ["4 blocks of 3 tensors in 1 file"]
    assert values(verify_table(replace(report, files=4, tensors=0)), "checked") == ["4 files, every byte"]


def test_check_table__accounts_for_models_bytes_and_tensors() -> None:
    table = check_table(CHECKED, 10**9)
    assert values(table, "base") == ["base (4 tensors, 4.00 kB)"]
    assert values(table, "expert") == ["tuned (1 tensor, 2.00 kB)"]
    assert values(table, "reads") == ["base 4.00 kB, experts 2.00 kB"]
    assert values(table, "writes") == ["4.00 kB in 1 file"]
    assert values(table, "disk") == ["5.00 kB needed, 1.00 GB free here"]
    assert values(table, "tensors") == ["2 merged, 2 copied, 1 dropped"]
    assert values(table, "copied") == ["integer or boolean buffer: layers.*.steps (2)"]
    assert values(table, "dropped") == ["tuned, not in the base: extra.weight"]


def test_check_table__says_when_the_disk_is_too_small() -> None:
    assert values(check_table(CHECKED, 4999), "disk") == ["5.00 kB needed, 5.00 kB free here: not enough"]


def test_check_table__escapes_what_names_from_files_could_do_to_a_terminal() -> None:
    hostile = replace(CHECKED, dropped=(DroppedTensor("tuned", "\x1b]0;x\x07\nrow", "not in the base"),))
    assert "\x1b" not in check_table(hostile, 10**9)
    assert len(check_table(hostile, 10**9).splitlines()) == len(check_table(CHECKED, 10**9).splitlines())


def test_shorten_names__groups_by_layer_and_lists_a_few() -> None:
    names = [f"model.layers.{i}.self_attn.inv_freq" for i in range(28)] + ["lm_head.weight"]
    assert shorten_names(names) == "model.layers.*.self_attn.inv_freq (28), lm_head.weight"
    assert shorten_names([f"tensor_{c}" for c in "abcdefg"]) == "tensor_a, tensor_b, tensor_c, tensor_d, and 3 more"
    assert shorten_names(["x" * 1000]) == "x" * 57 + "..."


def test_merge_json__holds_every_field_and_what_follows_from_them() -> None:
    content = json.loads(report_json(MERGED))
    assert content.keys() == {field.name for field in fields(MergeReport)} | {
        "format",
        "read_bytes",
        "bytes_per_second",
    }
    assert content["out"] == "/models/merged"
    assert content["read_bytes"] == 1_191_000_000 + 7_150_000_000 + 100_000
    assert content["bytes_per_second"] == (content["read_bytes"] + 1_191_000_000) / 8


def test_merge_table__of_a_budget_says_the_verdict_and_what_is_missing_of_each_expert() -> None:
    coverage = (ExpertCoverage("code", 0.0), ExpertCoverage("math", 0.376), ExpertCoverage("chat", 1.0, 0.5))
    verdict = BudgetVerdict("sample", False, 375, 1000, coverage, ("expert 'code'",), "docs/benchmarks/sampling.md")
    table = merge_table(replace(MERGED, verdict=verdict))
    assert "37.5 % of the experts' bytes are read, by policy 'sample'." in " ".join(table.split())
    assert values(table, "expert") == [
        "code: nothing of it is in the merge",
        "math: 62.4 % of the blocks that it changes are missing",
        "chat: all blocks that it changes are in the merge, 50 % are rough",
    ]
    unspent = replace(verdict, unspent_bytes=750, unspent_reason="what else could be read comes in larger pieces")
    table = merge_table(replace(MERGED, verdict=unspent))
    assert values(table, "unspent") == ["750 B: what else could be read comes in larger pieces."]


def test_pack_table__has_a_row_for_each_expert_and_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, outside = {"same": 44, "bands": 80, "bytes": 1}, {"fewer than 4096 elements": 1}
    math = PackedExpert(
        Location.local(Path("/m/math")), Path("/p/math"), 33_800_000, 6_770_000, blocks, outside, 1.7, is_new=True
    )
    code = replace(math, store=Path("/p/code"), is_new=False)
    report = PackReport(Location.local(Path("/m/base")), (math, code), 0, 0, 1.0)
    monkeypatch.setenv("COLUMNS", "240")
    lines = pack_table(report).splitlines()
    assert [line.split()[0] for line in lines] == ["store", "/p/math", "/p/code"]
    assert lines[1].split()[-7:] == ["6.77", "MB", "20.0%", "1.7", "s", "19.9", "MB/s"]
    assert "was packed before" in lines[2]
    match = BaseMatch(Location.local(Path("/m/base")), 0.015, 40, 0.95, Location.local(Path("/m/other")), 1.41)
    chosen = pack_table(replace(report, experts=(replace(math, match=match), replace(code, match=match))))
    assert "/p/math: /m/base, deltas of 1.5 % of the weights, nearest at 95 % of 40 samples; next is" in chosen
    assert "/m/other with 141 %" in chosen
    assert "not sure" not in chosen
    assert "not sure" in pack_table(replace(report, experts=(replace(math, match=replace(match, next_delta=0.016)),)))
    monkeypatch.setenv("COLUMNS", "80")
    table = pack_table(report)
    assert max(map(len, table.splitlines())) <= 80
    assert "4096" in table
