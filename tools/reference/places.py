"""The table of verbs and places: what each verb reads and writes where, which a test runs and a page prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tools.reference import row, table

INPUT_PLACES: Final = {
    "folder": "a folder",
    "hub": "`org/name` of the Hub",
    "revision": "`hf://org/name@revision`",
    "bucket": "`s3://`, `gs://`, `az://`",
    "web": "`https://`",
}
"""Where what a verb reads can lie."""
INPUT_KINDS: Final = {
    "file": "one file",
    "snapshot": "a snapshot",
    "packed": "a packed expert",
    "quantised": "a quantised model",
    "adapted": "`model+adapter`",
    "training": "a training checkpoint",
}
"""What can take the place of an ordinary model, in a folder of this machine."""
OUTPUTS: Final = {
    "folder": "a folder",
    "safetensors": "`OUT.safetensors`",
    "gguf": "`OUT.gguf`",
    "bucket": "a bucket",
    "hub": "`hf://org/name`",
    "web": "`https://`",
    "force": "`--force`",
}
"""Where a verb can write; `--force` replaces what it wrote into a folder before."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A cell that is refused, with the code of the error and the reason that the page gives."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb: the thing that it reads, and its cells that are refused; all others work.

    A verb whose `outputs` are None prints, and writes no output. `absent_outputs` cannot be written as a command: the
    verb has no such form of output.
    """

    name: str
    reads: str
    inputs: Mapping[str, Refusal] = field(default_factory=dict)
    outputs: Mapping[str, Refusal] | None = None
    absent_outputs: frozenset[str] = frozenset()


_NO_SNAPSHOT = Refusal("snapshot.not-found", "it is no snapshot: it has no manifest")
_NOT_SENT = Refusal("location.invalid", "it sends files of this machine: download the snapshot, or `replay` it there")
_NOT_REPAIRED = Refusal(
    "location.invalid",
    "what is published is never changed in place: download it, `repair` the copy, and push that elsewhere",
)
_NO_FILES = Refusal(
    "model.not-found", "a store restores the files of one model: make a model of the two by `lora apply`"
)
_APPLIED = Refusal(
    "model.not-found", "make a model of the two by `lora apply`: the record of an adapter names one model"
)
_NO_RUN_OF_TWO = Refusal("model.not-found", "a run is a folder of checkpoints, without an adapter")
_NO_LIST = Refusal("checkpoint.unsupported", "a web server lists no files, so that a part could be missing in silence")
_NO_STATE = Refusal("checkpoint.unsupported", "weights alone do not say of which step they are")
_ELSEWHERE = Refusal("output.place", "it is a file or folder of this machine")
_NOT_WRITTEN = Refusal("output.place", "a web server takes no outputs")

_SNAPSHOTS = {
    "file": _NO_SNAPSHOT, "packed": _NO_SNAPSHOT, "quantised": _NO_SNAPSHOT, "adapted": _NO_SNAPSHOT,
    "training": _NO_SNAPSHOT,
}  # fmt: skip
_SOUND = {kind: refusal for kind, refusal in _SNAPSHOTS.items() if kind != "packed"}
_NO_PACK = Refusal("snapshot.not-found", "it is no packed expert")
_NO_ADAPTER = Refusal("checkpoint.incomplete", "it is no adapter")
_ADAPTERS = {
    **dict.fromkeys(("snapshot", "packed", "quantised", "training"), _NO_ADAPTER),
    "file": Refusal("adapter.unsupported", "a file is read if it holds a LoRA and nothing else"),
    "adapted": Refusal("model.not-found", "name the adapter alone"),
}
_NO_RUN = Refusal("save.not-found", "a run is a folder of checkpoints")
_ELSEWHERE_PLACES = ("hub", "revision", "bucket", "web")
_TRAINING = {
    "web": _NO_LIST,
    "file": Refusal("checkpoint.damaged", "one file is read if `torch.save` wrote it"),
    "snapshot": _NO_STATE,
    "packed": Refusal("checkpoint.unsupported", "unpack it first"),
    "quantised": Refusal("model.unsupported", "moments are of weights that were trained"),
    "adapted": Refusal("model.not-found", "a training checkpoint is taken without an adapter"),
}
_COMPOSED = {**_TRAINING, "adapted": Refusal("recipe.value", "a training checkpoint is taken without an adapter")}
_MERGED_TO = {"web": _NOT_WRITTEN}
_NO_FILE = Refusal("output.place", "the output is a folder")
_CHECKPOINT_TO = {"safetensors": _NO_FILE, "gguf": _NO_FILE, "web": _NOT_WRITTEN}
_NO_FORCE = frozenset({"force"})
_PAGE = {"bucket": _ELSEWHERE, "hub": _ELSEWHERE, "web": _NOT_WRITTEN}
_NO_PAGE = frozenset({"safetensors", "gguf", "force"})

VERBS: Final = (
    Verb("check", "an expert of a recipe"),
    Verb("merge", "an expert of a recipe", outputs=_MERGED_TO),
    Verb("plan", "an expert of a recipe", outputs=_PAGE, absent_outputs=_NO_PAGE),
    Verb("run", "an expert of a plan", outputs=_MERGED_TO),
    Verb(
        "replay",
        "a snapshot",
        _SNAPSHOTS,
        {**_MERGED_TO, "gguf": Refusal("output.place", "it gives the bytes that were recorded")},
    ),
    Verb(
        "without",
        "an expert of a snapshot that this machine made",
        outputs={**_PAGE, "safetensors": _NO_FILE, "gguf": _NO_FILE},
        absent_outputs=_NO_FORCE,
    ),
    Verb("analyze", "an expert", outputs=_PAGE, absent_outputs=_NO_PAGE),
    Verb(
        "pack",
        "an expert",
        {"adapted": _NO_FILES, "packed": Refusal("model.unsupported", "it is packed already; unpack it")},
        {
            "web": _NOT_WRITTEN,
            "safetensors": _NO_FILE,
            "gguf": _NO_FILE,
        },
        absent_outputs=_NO_FORCE,
    ),
    Verb(
        "unpack",
        "a packed expert",
        {**dict.fromkeys(("file", "snapshot", "quantised", "training"), _NO_PACK), "adapted": _NO_FILES},
        {**_PAGE, "safetensors": _NO_FILE, "gguf": _NO_FILE},
        absent_outputs=_NO_FORCE,
    ),
    Verb("verify", "a snapshot", _SOUND),
    Verb(
        "repair",
        "a snapshot",
        {
            **_SOUND,
            **dict.fromkeys(_ELSEWHERE_PLACES, _NOT_REPAIRED),
            "packed": Refusal("pack.unsupported", "pack the expert again"),
        },
    ),
    Verb("diff", "a snapshot", _SNAPSHOTS),
    Verb("explain", "a snapshot", _SNAPSHOTS, _PAGE, absent_outputs=_NO_PAGE),
    Verb("show", "a snapshot", _SNAPSHOTS),
    Verb("lineage", "a snapshot that this machine made", _SNAPSHOTS),
    Verb(
        "push",
        "a snapshot",
        {**_SOUND, **dict.fromkeys(_ELSEWHERE_PLACES, _NOT_SENT)},
        {"web": _NOT_WRITTEN, "folder": Refusal("output.place", "it is on this machine already")},
        absent_outputs=_NO_PAGE,
    ),
    Verb("search", "an expert of a recipe", outputs=_PAGE, absent_outputs=_NO_PAGE),
    Verb("sweep", "an expert of a recipe", outputs=_PAGE, absent_outputs=_NO_PAGE),
    Verb(
        "moe",
        "an expert of a mixture",
        {
            "file": Refusal("recipe.unsupported", "the architecture is read from the configuration beside the weights"),
            "packed": Refusal("model.unsupported", "unpack it first"),
        },
        {**_MERGED_TO, "gguf": Refusal("model.unsupported", "GGUF is written of llama, mistral, qwen2 and qwen3")},
    ),
    Verb(
        "lora apply",
        "the base",
        {
            "packed": Refusal(
                "base.mismatch",
                "it is decoded with its base, which no option names: unpack it first",
            ),
            "adapted": Refusal("recipe.value", "name the adapters one after the other"),
        },
        _MERGED_TO,
    ),
    Verb("lora check", "the model that is said to have the adapter"),
    Verb("lora merge", "an adapter", _ADAPTERS, _CHECKPOINT_TO),
    Verb("lora convert", "an adapter", _ADAPTERS, _CHECKPOINT_TO),
    Verb("lora extract", "the fine-tuned model", {"adapted": _APPLIED}, _CHECKPOINT_TO),
    Verb("tailor inspect", "a training checkpoint", _TRAINING),
    Verb("tailor check", "a training checkpoint", _COMPOSED),
    Verb("tailor export", "a training checkpoint", _TRAINING, _CHECKPOINT_TO),
    Verb("tailor average", "a training checkpoint", _TRAINING, _CHECKPOINT_TO),
    Verb("tailor compose", "a training checkpoint", _COMPOSED, _CHECKPOINT_TO),
    Verb(
        "tailor recipe",
        "a run of checkpoints",
        {"web": _NO_LIST, **dict.fromkeys(INPUT_KINDS, _NO_RUN), "adapted": _NO_RUN_OF_TWO},
    ),
)
"""All verbs that read models or write outputs."""

_HEAD = """# Verbs and places

What each verb reads and writes where. A test runs every cell of these tables: what works gives the bytes that it gives
in folders of one machine; what is refused is refused in one line, and leaves nothing behind.

Inputs mix freely: a base in a folder, an expert on the Hub, another in a bucket, an adapter anywhere.

A number leads to the reason below the table; `-` is a form of output that a verb does not have.
"""
_INPUTS = """
## What a verb reads

The first five columns are places of what the verb reads, the others are things in its place, in a folder of this
machine.
"""
_OUTPUTS = """
## What a verb writes

`plan`, `explain` and `sweep` write one small file (`--out`, `--html`), `analyze` the folder of its `--home`.
"""


def place_page() -> str:
    """Return the page."""
    writing = [verb for verb in VERBS if verb.outputs is not None]
    lines = [_HEAD, _INPUTS]
    lines += _cells({**INPUT_PLACES, **INPUT_KINDS}, [(verb, verb.inputs, frozenset()) for verb in VERBS])
    lines.append(_OUTPUTS)
    lines += _cells(OUTPUTS, [(verb, verb.outputs or {}, verb.absent_outputs) for verb in writing])
    return "\n".join(lines)


def _cells(
    columns: Mapping[str, str], rows: Sequence[tuple[Verb, Mapping[str, Refusal], frozenset[str]]]
) -> Iterator[str]:
    """Write a table of cells, and below it the reasons of those that are refused, each once."""
    reasons: dict[Refusal, int] = {}
    yield from table("verb", "reads", *columns.values())
    for verb, refused, absent in rows:
        cells = []
        for column in columns:
            if column in absent:
                cells.append("-")
            elif column in refused:
                number = reasons.setdefault(refused[column], len(reasons) + 1)
                cells.append(f"no ({number})")
            else:
                cells.append("yes")
        yield row(f"`{verb.name}`", verb.reads, *cells)
    yield ""
    yield from table("", "code", "reason")
    for refusal, number in reasons.items():
        yield row(str(number), f"`{refusal.code}`", refusal.reason)
