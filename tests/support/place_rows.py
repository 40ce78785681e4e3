"""Run one row of verbs, kinds, places and options: its commands, what they wrote, and the plain local run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mergepipe.snapshots import work_log
from mergepipe.snapshots.staging import Staging
from mergepipe.snapshots.whole_output import WholeOutput
from support.all_pairs import Row
from support.bucket_outputs import objects_below
from support.place_cells import MODEL_VERBS, OWN_SUBJECTS, Work, expect, recipe, run_in, steady, weights_below
from support.placed_models import files_of
from support.public_names import MANIFEST_NAME


def name_of(row: Row) -> str:
    """Name a row by what is not the default in it."""
    return "-".join(value for value in row.values() if value not in ("none", "default"))


def write_variants(root: Path) -> None:
    """Write the expert in another dtype, and in two files with an index."""
    tensors = load_file(root / "expert" / "model.safetensors")
    for name in ("float32", "sharded"):
        (root / name).mkdir()
        for path in (root / "expert").iterdir():
            if path.suffix != ".safetensors":
                (root / name / path.name).write_bytes(path.read_bytes())
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    save_file(wide, root / "float32" / "model.safetensors", {"format": "pt"})
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in ((1, names[::2]), (2, names[1::2])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, root / "sharded" / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (root / "sharded" / "model.safetensors.index.json").write_text(json.dumps(index))


def subject_of(row: Row, work: Work) -> str:
    """Return the name of what the verb of a row reads."""
    root = work.models.root
    if row["kind"] == "adapted":
        return "+".join(work.models.put(root / name, row["place"]) for name in ("expert", "adapter"))
    name = row["kind"]
    if name == "plain":
        name = OWN_SUBJECTS.get(row["verb"], "expert")
    elif name == "packed":
        name = "packs/expert"
    elif name == "checkpoint":
        name = "run/checkpoint-9"
    return work.models.put(root / name, row["place"])


def output_of(row: Row, work: Work) -> str:
    """Return a new place for the output of a row; empty if it is printed."""
    name = work.folder.name
    match row["output"]:
        case "printed":
            return ""
        case "file":
            return str(work.folder / "out.safetensors")
        case "bucket":
            return f"s3://bucket/pairs-{name}"
        case "hub":
            work.models.hub.commit(f"user/pairs-{name}", {"README.md": b"mine"})
            return f"hf://user/pairs-{name}"
    return str(work.folder / "out")


def written_by(row: Row, out: str, work: Work) -> dict[str, bytes]:
    """Return the files at the output of a row."""
    match row["output"]:
        case "printed":
            return dict(files_of(work.folder / "home"))
        case "bucket":
            return objects_below(out)
        case "hub":
            return dict(work.models.hub.model_files(out.removeprefix("hf://")))
    return dict(files_of(Path(out)))


def commands_of(row: Row, work: Work, out: str) -> list[list[str]]:
    """Return the commands of a row in their order."""
    verb = row["verb"]
    subject = subject_of(row, work)
    budget: list[str] = []
    if row["budget"] in ("60%", "norm"):
        # The factors of an adapter are read whole, or not at all.
        nbytes = "4kB" if row["kind"] == "adapter" else "60%"
        budget = ["--budgets" if verb == "sweep" else "--budget", nbytes]
    elif verb == "sweep":
        budget = ["--budgets", "100%"]
    elif row["budget"] == "all":
        budget = ["--all"]
    if row["budget"] == "norm":
        budget += ["--select", "norm"]
    more: list[str] = []
    if row["memory"] != "default":
        more += ["--memory", row["memory"]]
    if row["option"] == "json" or row["output"] == "printed":
        more.append("--json")
    is_split = verb == "run" and row["parts"] != "none" and row["output"] != "file"
    if row["option"] == "shard-size" or is_split:  # one shard would all be made by the first part
        more += ["--shard-size", "100KB"]
    planning: list[list[str]] = []
    if verb == "run":
        plan = work.folder / "plan.json"
        (work.folder / "recipe.yml").write_text(recipe(work.models.root / "base", subject))
        planning = [["plan", str(work.folder / "recipe.yml"), *budget, "--out", str(plan)]]
        command = ["run", str(plan), out]
    elif verb == "sweep":
        command = [*work.command(verb, subject, out)[:2], *budget]
    else:
        command = [*work.command(verb, subject, out), *budget]
        if verb in ("pack", "analyze"):
            command.insert(3, str(work.models.root / "other"))
        if verb == "verify":
            command += ["--deep", "100%"] if row["kind"] == "snapshot" else ["--base", str(work.models.root / "base")]
        if row["kind"] == "snapshot" and verb in ("verify", "replay"):
            command += ["--home", str(work.models.root / "home")]  # whose catalog knows where the inputs are
    if row["option"] == "dtype":
        if verb in (*MODEL_VERBS, "run"):
            written = work.folder / "recipe.yml"
            written.write_text(json.dumps({**json.loads(written.read_text()), "dtype": "float32"}))
        else:
            more += ["--dtype", "float32"]
    command += more
    if row["parts"] == "none":
        return [*planning, command]
    return [*planning, [*command, "--part", "1/2"], [*command, "--part", "2/2"]]


@contextmanager
def stopping() -> Iterator[None]:
    """Interrupt the run after its first durable unit, or before its output is published if it has none."""
    append = work_log.WorkLog.append

    def append_and_stop(log: work_log.WorkLog, record: work_log.Record, *, is_durable: bool) -> None:
        append(log, record, is_durable=is_durable)
        if record["kind"] == "unit":
            raise KeyboardInterrupt

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(work_log, "UNIT_SECONDS", 0.0)
        patched.setattr(work_log, "UNIT_BYTES", 1)
        patched.setattr(work_log.WorkLog, "append", append_and_stop)
        patched.setattr(Staging, "publish", stop)
        patched.setattr(WholeOutput, "publish", stop)
        yield


Result = tuple[dict[str, bytes], object]


def result_of(row: Row, work: Work) -> Result:
    """Run the commands of a row; return the weights that were written, and what a verb without output printed."""
    out = output_of(row, work)
    commands = commands_of(row, work, out)
    if row["interruption"] == "stopped":
        n_planning = 1 if row["verb"] == "run" else 0
        for command in commands[:n_planning]:
            expect(run_in(work.folder, command))
        commands = commands[n_planning:]
        with stopping():
            stopped = run_in(work.folder, commands[0])
        assert stopped.exit_code == 130, stopped.err
        if row["verb"] != "pack":  # whose first expert may be complete
            check_nothing_visible(row, work, out)
    for command in commands:
        ran = expect(run_in(work.folder, command))
    weights = weights_below(written_by(row, out, work))
    if row["output"] != "printed":
        if row["option"] == "json":
            ran.json()
        return weights, None
    report = ran.json()
    if row["verb"] == "check":
        del report["shards"]  # which follow from their size
    return weights, steady(report)


def check_nothing_visible(row: Row, work: Work, out: str) -> None:
    """Check that an output that was interrupted cannot be taken for a complete one."""
    if row["output"] in ("folder", "file"):
        assert not Path(out).exists()
    else:
        assert MANIFEST_NAME not in written_by(row, out, work)


def plain(row: Row) -> Row:
    """Return the row of the plain local run: with what decides the bytes, and nothing else.

    What a budget reads follows from the store, too: files of this machine are read in whole pages.
    """
    output = "printed" if row["output"] == "printed" else "folder"
    budget = "none" if row["budget"] == "all" else row["budget"]
    verb = "merge" if row["verb"] == "run" else row["verb"]
    option = row["option"] if row["option"] == "dtype" else "none"
    decided = {"verb": verb, "kind": row["kind"], "budget": budget, "output": output, "option": option}
    if budget != "none":
        decided["place"] = row["place"]
    return {"place": "folder", "memory": "default", "parts": "none", "interruption": "none", **decided}


def tensors_of(files: Mapping[str, bytes]) -> dict[str, tuple[str, list[int], bytes]]:
    """Return all tensors of safetensors files by name: dtype, shape and content."""
    tensors = {}
    for name, content in files.items():
        if name.endswith(".safetensors"):
            start = 8 + int.from_bytes(content[:8], "little")
            header = json.loads(content[8:start])
            header.pop("__metadata__", None)
            for tensor, facts in header.items():
                begin, end = facts["data_offsets"]
                tensors[tensor] = facts["dtype"], facts["shape"], content[start + begin : start + end]
    return tensors
