"""List the files of the base's directory that a snapshot does not get, each with the reason."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatchcase

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.checkpoints.directory import SAFETENSORS, TORCH
from mergepipe.core.units import plural
from mergepipe.snapshots.manifest import CARD_NAME, MANIFEST_NAME, LeftOutFile
from mergepipe.storage.contract import FileKind, Store
from mergepipe.storage.location import Location

_MOST_FILES = 200
_MOST_DEPTH = 3
_OTHER_FORMAT = "weights in another form, which this merge does not make"
_TRAINING = "belongs to a training run"
_REASONS = (
    ((CARD_NAME,), "the snapshot has a card of its own"),
    ((".gitattributes", ".gitignore", ".git/*", ".cache/*", ".huggingface/*"), "belongs to the Hub's or git's tools"),
    (("*.py", "*.so", "*.sh", "*.ipynb"), "code is never copied; take it from the base where loading needs it"),
    (("*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "onnx/*", "openvino/*", "*.h5", "*.msgpack", "*.tflite", "*.ot",
      "*.mlmodel", "*.mlpackage/*", "coreml/*", "*.pth", "consolidated.*", "original/*", "flax_model*"), _OTHER_FORMAT),
    (("optimizer*", "scheduler*", "training_args.bin", "trainer_state.json", "rng_state*", "global_step*/*", "latest",
      "zero_to_fp32.py", "runs/*", "events.out.*", "checkpoint-*/*"), _TRAINING),
    (("mergepipe.*", MANIFEST_NAME, "mergekit_config.yml"), "describes the base, not this merge"),
    (("*.safetensors", "*.bin", "*.index.json", "*.pt"), "weights that are not among the base's tensors"),
    (("*.png", "*.jpg", "*.jpeg", "*.gif", "*.svg", "*.webp", "*.pdf", "*.mp4"), "illustrates the base's card"),
)  # fmt: skip
_TOKENIZER = "the output has another tokenizer, or is made without one"
_UNKNOWN = "not known to belong to the model; copy it yourself if loading needs it"


def left_out_files(store: Store, model: Checkpoint, copied: Collection[str]) -> tuple[LeftOutFile, ...]:
    """List every file of a model's directory that is neither a source of tensors nor in `copied`.

    At most `_MOST_FILES` are named, and folders no deeper than `_MOST_DEPTH` are looked into; a bare file has none.
    """
    if model.path != model.root or not model.files:  # or the result of another document of the recipe
        return ()
    tensor_files = {file.name for file in model.files}
    used = {*tensor_files, *copied, SAFETENSORS.index, TORCH.index}
    names = [name for name in _names_below(store, model.root, _MOST_DEPTH) if name not in used]
    reasons = dict.fromkeys(model.sidecars, _TOKENIZER)
    listed = [LeftOutFile(name, reasons.get(name) or reason_of(name)) for name in names[:_MOST_FILES]]
    if len(names) > _MOST_FILES:
        listed.append(LeftOutFile("...", f"and {plural(len(names) - _MOST_FILES, 'more file')}"))
    return tuple(listed)


def reason_of(name: str) -> str:
    """Say why the file of this name is not copied."""
    leaf = name.rpartition("/")[2]
    for patterns, reason in _REASONS:
        if any(fnmatchcase(name, pattern) or fnmatchcase(leaf, pattern) for pattern in patterns):
            return reason
    return _UNKNOWN


def _names_below(store: Store, folder: Location, depth: int) -> list[str]:
    """Name the files below a folder, in order; folders that are not looked into end in a slash."""
    names = []
    for entry in sorted(store.list(folder), key=lambda entry: entry.name):
        if entry.kind is not FileKind.FOLDER:
            names.append(entry.name)
        elif depth > 1 and not entry.name.startswith("."):
            names += [f"{entry.name}/{name}" for name in _names_below(store, folder / entry.name, depth - 1)]
        else:
            names.append(f"{entry.name}/")
    return names
