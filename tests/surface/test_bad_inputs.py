"""What commands say of wrong arguments and of files that lie: exit code, error codes and lines, as they were recorded.

The records are tests/golden/surface/bad-inputs/COMMAND.txt: the command, its exit code, and its lines on standard
error. Where a change of them is meant, write them anew and read the diff:

    pytest tests/surface --update-goldens && git diff tests/golden/surface
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from bad_inputs import (
    INDICES,
    RECIPES,
    TAILOR_RECIPES,
    WEIGHTS,
    write_odd_models,
    write_outputs,
    write_recipes,
    write_tailor_inputs,
)
from workplace import command_names, run_command, workplace

from mergepipe import errors
from mergepipe.errors import MergePipeError
from support.goldens import Goldens, steady_text

CASES: Mapping[str, tuple[str, ...]] = {
    "": ("", "mrege linear.yml out", "--verison", "--completion cmd"),
    "check": (
        "nowhere.yml",
        "family",
        "latin1.yml",
        *(f"bad-{name}.yml --strict" for name in RECIPES),
        *(f"weights-{name}.yml" for name in WEIGHTS),
        *(f"index-{name}.yml" for name in INDICES),
        "bad-unknown-parameter.yml --lenient --strict",
        "linear.yml --shard-size 0",
        "linear.yml --shard-size big",
        "linear.yml --shard-size 5",
        "linear.yml --allow-dropped",
        "linear.yml ties.yml",
    ),
    "merge": (
        "",
        "linear.yml",
        "nowhere.yml out",
        "linear.yml out",
        "out linear.yml",
        "linear.yml family/base",
        "linear.yml family/base --force",
        "linear.yml family/base/merged",
        "linear.yml linear.yml",
        "linear.yml linear.yml/out",
        "linear.yml out-extra --force",
        "linear.yml out-no-manifest --force",
        "linear.yml merged.bin",
        "linear.yml s3://",
        "linear.yml http://host/out",
        "linear.yml new --budget",
        "linear.yml new --budget 120%",
        "linear.yml new --budget 1.5",
        "linear.yml new --budget -5%",
        "linear.yml new --budget 5parsec",
        "linear.yml new --budget 12 --strict",
        "linear.yml new --budget 10B --strict",
        "linear.yml new --threads 0",
        "linear.yml new --threads 1000000",
        "linear.yml new --threads two",
        "linear.yml new --memory plenty",
        "linear.yml new --memory 1KiB",
        "linear.yml new --memory 0",
        "linear.yml new --shard-size -1",
        "linear.yml new --seed 99999999999999999999999",
        "linear.yml new --select best --budget 50%",
        "linear.yml new --select random",
        "linear.yml new --where-omitted drop --budget 50%",
        "ties.yml new --where-omitted renormalize --budget 50%",
        "linear.yml new --min-density 2 --budget 50%",
        "linear.yml new --block-elements 1000 --budget 50%",
        "linear.yml new --block-elements 0 --budget 50%",
        "linear.yml new --executor spark",
        "linear.yml new --executor ray",
        "linear.yml new --address localhost:1",
        "linear.yml new --paths short",
        "linear.yml new --connections 0",
        "linear.yml new --resume",
        "linear.yml new --bugdet 5%",
        "linear.yml new --cuda",
        "linear.yml new --force --resume",
        "linear.yml new extra",
        "--plan good.plan.json",
        "--plan good.plan.json linear.yml new",
        "--plan good.plan.json new --budget 50%",
        "--plan nowhere.json new",
        "bad-other-names.yml new",
        "weights-truncated.yml new",
    ),
    "moe": ("", "linear.yml new", "new linear.yml", "mixture.yml out"),
    "run": (
        "good.plan.json",
        "new good.plan.json",
        "nowhere.plan.json new",
        "text.plan.json new",
        "list.plan.json new",
        "newer.plan.json new",
        "digest.plan.json new",
        "stale.plan.json new",
        "field.plan.json new",
        "linear.yml new",
        "out/mergepipe.json new",
        "good.plan.json out",
        "good.plan.json new --part 3/2",
        "good.plan.json new --part half",
        "all.plan.json new --finish",
        "good.plan.json new --resume",
    ),
    "status": (
        "good.plan.json",
        "nowhere.plan.json new",
        "out good.plan.json",
        "good.plan.json new",
        "all.plan.json new --parts 0",
    ),
    "plan": (
        "",
        "linear.yml",
        "nowhere.yml --budget 50%",
        "linear.yml --budget 50% --all",
        "linear.yml --budget 50% -o linear.yml",
        "linear.yml --budget 50% --select nrom",
        "linear.yml --budget 50% --seed x",
        "linear.yml --budget lots",
        "linear.yml --budget 50% --home linear.yml",
        "ties.yml --budget 50% --where-omitted renormalize",
        "linear.yml --budget 50% --block-elements 7",
        "bad-model-gone.yml --budget 50%",
    ),
    "explain": (
        "",
        "nowhere",
        "abcd",
        "out-no-manifest",
        "out-newer",
        "out-no-json",
        "composed",
        "text.plan.json",
        "newer.plan.json",
        "out --tensor nothing.*",
        "out --html linear.yml",
    ),
    "analyze": (
        "",
        "family/base",
        "family/basis family/expert-1",
        "family/base family/expert-9",
        "family/base odd/weights-truncated",
        "family/base family/expert-1 --block-elements 5",
        "family/base family/expert-1 --density 0",
        "family/base family/expert-1 --density 2",
        "family/base family/expert-1 --part 3/2",
        "family/base odd/moving --memory 1KiB",
    ),
    "sweep": (
        "",
        "nowhere.yml",
        "linear.yml --budgets none",
        "linear.yml --budgets 5%,,7%",
        "linear.yml --html linear.yml",
    ),
    "search": (
        "",
        "linear.yml -o out",
        "search.yml -o out --evaluate nosuchprogram",
        "search.yml -o out --evaluate loss:nowhere.txt",
        "search.yml -o out --evaluate true --sampler best",
        "search.yml -o out --evaluate true --objective :max",
    ),
    "ls": ("out", "--limit 5"),
    "show": ("", "ab", "abcd", "nowhere", "linear.yml", "out-no-manifest", "out-newer", "out-lie", "out-no-json"),
    "lineage": ("abcd", "out-no-manifest", "out-newer", "composed"),
    "diff": ("out", "out nowhere", "out out-newer", "out abcd", "out composed"),
    "verify": (
        "",
        "nowhere",
        "abcd",
        "out-no-manifest",
        "out-newer",
        "out-lie",
        "out-damaged",
        "out --deep 2",
        "out --deep some",
        "packed-cut",
        "packed-newer",
        "packed-no-header",
        "packed/expert-1 --base family/expert-2",
        "packed/expert-1 --base nowhere",
    ),
    "repair": ("nowhere", "out-no-manifest", "out-newer", "packed/expert-1", "composed"),
    "replay": ("out", "of-moving new", "nowhere new", "out out", "out-newer new", "out family/base", "composed new"),
    "push": (
        "out",
        "nowhere org/name",
        "out-no-manifest org/name",
        "out nowhere",
        "out ./folder",
        "out s3://",
        "out org/name --private",
    ),
    "pack": (
        "family/base family/expert-1",
        "family/base -o family/base",
        "family/base family/expert-9 -o new",
        "family/basis family/expert-1 -o new",
        "family/base family/expert-1 -o linear.yml",
        "family/base family/expert-1 -o family/expert-1",
        "family/base family/expert-1 family/expert-1 -o new",
        "family/base odd/other-names -o new --strict",
        "family/base odd/weights-truncated -o new",
        "family/base family/expert-1 -o new --part 3/2",
        "family/base family/expert-1 -o new --threads 0",
        "-o new",
    ),
    "unpack": (
        "packed/expert-1",
        "nowhere -o new",
        "family/base -o new",
        "packed-cut -o new",
        "packed-newer -o new",
        "packed-no-header -o new",
        "packed/expert-1 -o family/base",
        "packed/expert-1 -o new --base family/expert-2",
        "packed/expert-1 -o new --base nowhere",
    ),
    "lora apply": (
        "family/base -o new",
        "family/base nowhere -o new",
        "nowhere lora -o new",
        "family/base family/expert-1 -o new",
        "family/base lora -o new --weight x",
        "family/base lora -o new --weight 1 --weight 2",
        "family/base lora -o new --dtype int9",
        "family/base lora-nan -o new",
        "family/base lora-cut -o new",
        "family/base lora-renamed -o new",
        "family/base lora-saved lora-saved -o new",
        "family/base lora -o family/base",
    ),
    "lora merge": (
        "",
        "lora nowhere -o new",
        "lora lora -o new --weight 1",
        "lora lora -o new --method tise",
        "lora lora -o new --method svd",
        "lora lora -o new --rank 2",
        "lora lora -o new --method svd --rank 0",
        "lora lora-cut -o new",
        "lora lora-nan -o new",
        "lora-saved lora-saved -o new",
        "lora family/base -o new",
        "lora lora -o family",
    ),
    "lora extract": (
        "family/base family/expert-1",
        "family/base family/expert-9 -o new",
        "family/base family/expert-1 -o new",
        "family/base family/expert-1 -o new --rank 0",
        "family/base family/expert-1 -o new --energy 2",
        "family/base family/expert-1 -o new --energy 95percent",
        "family/base family/expert-1 -o new --energy 150%",
        "family/base family/base -o new --rank 4",
        "family/base odd/other-names -o new --rank 4",
        "family/base family/expert-1 -o family/base --rank 4",
    ),
    "gc": ("nowhere",),
    "tailor inspect": ("", "nowhere", "empty-folder", "family/base", "step-cut", "hf-no-weights"),
    "tailor check": (*(f"tailor-{name}.yml" for name in TAILOR_RECIPES), "nowhere.yml", "compose.yml --export zero"),
    "tailor compose": (
        "compose.yml",
        "compose.yml global_step7",
        "compose.yml global_step9/out",
        "compose.yml new --memory 1KiB",
        "compose.yml new --self-check half",
        "compose.yml new --state-from nowhere",
        "new compose.yml",
        "tailor-formats.yml new",
    ),
    "tailor average": (
        "checkpoint-7 -o new --optimizer last",
        "checkpoint-7 checkpoint-7 -o new",
        "checkpoint-7 checkpoint-9",
        "checkpoint-7 checkpoint-9 -o new --weights 1,2,3",
        "checkpoint-7 checkpoint-9 -o new --weights best",
        "checkpoint-7 checkpoint-9 -o new --alpha 2 --weights ema",
        "checkpoint-7 checkpoint-9 -o new --dtype int8",
        "checkpoint-7 global_step9 -o new",
        "checkpoint-7 checkpoint-9 -o new --config nowhere",
    ),
    "tailor export": (
        "global_step9",
        "nowhere -o new",
        "empty-folder -o new",
        "global_step9 -o new --dtype int8",
        "global_step9 -o new --config nowhere",
        "global_step9 -o new --config empty-folder",
        "step-lacks-a-rank -o new",
        "step-cut -o new",
        "global_step9 -o compose.yml",
    ),
    "tailor recipe": (
        "",
        "--run nowhere",
        "--run . --strategy best",
        "--run empty-folder --strategy parity --at 9",
        "--run . --from-log nowhere.jsonl --at 9",
        "--run . --strategy parity --at 1",
    ),
    "tailor diff": ("checkpoint-7", "checkpoint-7 nowhere", "checkpoint-7 family/base"),
    "catalog rebuild": ("nowhere", ". --home linear.yml"),
    "catalog stats": ("--home linear.yml", "--home nowhere"),
}
"""Command lines by command: each fails, or says what is wrong."""
N_CASES = 250
PROGRESS = re.compile(r"\w+: +\d+%, ")
FAULTS: Mapping[str, Callable[[int], BaseException | None]] = {
    "no-space": lambda _: OSError(errno.ENOSPC, "No space left on device"),
    "published": lambda fd: OSError(errno.EIO, "I/O error") if _is_beside("published", fd) else None,
    "interrupted": lambda _: KeyboardInterrupt(),
    "defect": lambda _: KeyError("x"),
}
"""What `os.fsync` raises while an output of this name is made."""


def _is_beside(name: str, fd: int) -> bool:
    return Path(name).exists() and os.path.samestat(os.fstat(fd), Path().stat())


def failure_text(arguments: list[str], places: Mapping[str, str]) -> str:
    """Run a command that is to fail; its exit code and its lines."""
    ran = run_command(arguments)
    assert ran.exit_code != 0, arguments
    lines = [line for line in steady_text(ran.err, places).splitlines() if not PROGRESS.match(line)]
    return "".join([f"{' '.join(arguments)}: {ran.exit_code}\n", *(f"    {line}\n" for line in lines)])


def fault_text(arguments: list[str], error_of: Callable[[int], BaseException | None], places: Mapping[str, str]) -> str:
    """The same where `os.fsync` fails."""

    def fail(fd: int) -> None:
        error = error_of(fd)
        if error is not None:
            raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        return failure_text(arguments, places)


def test_bad_inputs__fail_as_was_recorded(tmp_path: Path, goldens: Goldens) -> None:
    texts: dict[str, str] = {}
    with workplace(tmp_path):
        write_recipes(tmp_path)
        write_odd_models(tmp_path)
        write_tailor_inputs(tmp_path)
        write_outputs(tmp_path)
        before = {path.name for path in tmp_path.iterdir()}
        places = {str(tmp_path): "<root>"}
        for command, cases in CASES.items():
            lines = [[*command.split(), *case.split()] for case in cases]
            texts[command or "mergepipe"] = "\n".join(failure_text(line, places) for line in lines)
        assert {path.name for path in tmp_path.iterdir()} - before == set()
        texts["faults"] = "\n".join(
            fault_text(["merge", "linear.yml", name, "-q"], error_of, places) for name, error_of in FAULTS.items()
        )
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MergePipeError)]
    exit_codes = re.findall(r"^\S.*: (\d+)$", "\n".join(texts.values()), re.MULTILINE)
    assert len(exit_codes) >= N_CASES
    assert {str(kind.exit_code) for kind in kinds} - {str(MergePipeError.exit_code)} <= set(exit_codes)
    assert {*command_names(), ""} == set(CASES)
    goldens.check("bad-inputs", texts)
