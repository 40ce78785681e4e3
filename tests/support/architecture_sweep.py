"""Small models of every architecture of transformers, through every verb: what is right, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mergepipe import apply_lora, tailor
from mergepipe import merge as run_merge
from mergepipe.errors import MergePipeError
from support.architectures import adapted, tensors_of

Values = dict[str, Any]
RIGHT = "right"
RESULTS = Path(__file__).parent.parent / "architectures" / "sweep.json"
PAGE = Path(__file__).parent.parent.parent / "docs" / "guide" / "kinds-of-models.md"
BEGINNING = "<!-- written by `make architectures`: begin -->"
END = "<!-- written by `make architectures`: end -->"
MOST_PARAMETERS = 30_000_000  # of a small model
T5GEMMA_SIDE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "layer_types": None,
}  # fmt: skip
# What makes a model small where the options of most classes do not, by its type.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "bloom": {"n_layer": 4},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "attention_layers": ["global", "local"] * 2},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "t5gemma": {"encoder": T5GEMMA_SIDE, "decoder": T5GEMMA_SIDE},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4, "attention_head_dim": 16,
        "mamba_headdim": 8,
    },
}  # fmt: skip
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
_SENTENCE = 120  # letters of an error


class NotTriedError(Exception):
    """What transformers or PEFT cannot do itself, so that there is nothing to compare with."""


class WrongError(Exception):
    """An output that is not what it must be."""


class Subject:
    """A small model of one class, saved by transformers in the names of its files."""

    def __init__(self, name: str, model_type: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.config = small_config(name, model_type)
        try:
            self.base = self.saved("base", 0)
            model = self.model(self.base)
        except Exception as error:
            raise NotTriedError(f"transformers does not load what it saves: {type(error).__name__}") from error
        self.state = dict(model.state_dict())
        self._tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self._has_two_layouts: bool | None = None

    def saved(self, place: str, seed: int) -> Path:
        """Save a model with random values."""
        import torch
        import transformers

        torch.manual_seed(seed)
        model = getattr(transformers, self.name)._from_config(self.config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data = 0.1 * torch.randn_like(parameter)
        model.save_pretrained(self.folder / place)
        return self.folder / place

    def model(self, folder: Path) -> Any:
        """Load a model; all of its weights must be those of the files."""
        import transformers

        try:
            made, info = getattr(transformers, self.name).from_pretrained(folder, output_loading_info=True)
        except Exception as error:
            raise WrongError(f"it does not load: {type(error).__name__}: {str(error)[:_SENTENCE]}") from error
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(key):
                raise WrongError(f"{key.replace('_', ' ')}: {sorted(map(str, info[key]))[0]}")
        return made.eval()

    def loaded(self, folder: Path) -> Values:
        """Load the weights of a model, by the names of a loaded model."""
        return dict(self.model(folder).state_dict())

    def layouts(self, folder: Path, state: Values) -> Iterator[Path]:
        """Yield a folder, and one with the same weights by the names of a loaded model, where transformers loads it."""
        yield folder
        if self._has_two_layouts is False:
            return
        kept = {name: value.contiguous().clone() for name, value in state.items() if name not in self._tied}
        place = folder.with_name(f"{folder.name}-as-loaded")
        place.mkdir()
        save_weights(kept, place)
        shutil.copy(folder / "config.json", place)
        if self._has_two_layouts is None:
            self._has_two_layouts = kept.keys() != tensors_of(folder).keys() and self._holds(place, state)
        if self._has_two_layouts:
            yield place

    def _holds(self, folder: Path, state: Values) -> bool:
        """Whether transformers reads these weights from a folder."""
        try:
            again = self.loaded(folder)
        except WrongError:
            return False
        return all(again[name].equal(value) for name, value in state.items())


def save_weights(state: Values, folder: Path) -> None:
    """Write one file of weights."""
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors", {"format": "pt"})


def small_config(name: str, model_type: str) -> Any:
    """Return the configuration of a small model."""
    from tools.architectures import built

    try:
        model = built(model_type, name, OPTIONS.get(model_type))
    except Exception as error:
        raise NotTriedError(f"it is not built: {type(error).__name__}") from error
    n_parameters = sum(parameter.numel() for parameter in model.parameters())
    if n_parameters > MOST_PARAMETERS:
        raise NotTriedError(f"it is not built small: {n_parameters:,} parameters")
    return model.config


def check_values(made: Values, wanted: Values, tolerance: float = 0.0) -> None:
    """Raise `WrongError` for the first weight that differs."""
    if made.keys() != wanted.keys():
        raise WrongError(f"only one has {min(made.keys() ^ wanted.keys())}")
    for name, values in wanted.items():
        own = made[name]
        if own.shape != values.shape or not own.double().allclose(values.double(), rtol=0, atol=tolerance):
            raise WrongError(f"other values: {name}")


def applied(subject: Subject) -> None:
    """Apply a LoRA of all linear layers and fused experts to the model as it is saved, and as it is loaded."""
    model = subject.model(subject.base)
    try:
        made = adapted(model)
        made.save_pretrained(subject.folder / "adapter")
        wanted = dict(made.merge_and_unload().state_dict())
    except Exception as error:
        raise NotTriedError(f"PEFT: {type(error).__name__}") from error
    for place in subject.layouts(subject.base, subject.state):
        out = place.with_name(f"{place.name}-applied")
        apply_lora(place, [subject.folder / "adapter"], out, catalog=False)
        check_values(subject.loaded(out), wanted, 1e-5)


def merged(subject: Subject) -> None:
    """Average two models, the second of them in either layout."""
    other = subject.saved("other", 1)
    second = subject.loaded(other)
    wanted = {
        name: (value.double() + second[name].double()) / 2 if value.is_floating_point() else value
        for name, value in subject.state.items()
    }
    for place in subject.layouts(other, second):
        out = place.with_name(f"{place.name}-merged")
        models = [{"model": str(model), "parameters": {"weight": 0.5}} for model in (subject.base, place)]
        run_merge({"merge_method": "linear", "models": models, "dtype": "float32"}, out, catalog=False)
        check_values(subject.loaded(out), wanted, 1e-6)


def sliced(subject: Subject) -> None:
    """Repeat layers of the text part, or of encoder and decoder."""
    config = subject.config
    n_layers = getattr(config, "decoder_layers", None) or getattr(config, "num_decoder_layers", None)
    n_layers = n_layers or getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if n_layers is None:
        raise NotTriedError("its configuration does not say how many layers it has")
    ranges = [(0, n_layers - 1), (1, n_layers)]
    slices = [{"sources": [{"model": str(subject.base), "layer_range": [*layers]}]} for layers in ranges]
    recipe: dict[str, Any] = {"merge_method": "passthrough", "slices": slices}
    if subject.config.is_encoder_decoder:
        of_text = any(name.startswith("text_decoder.") for name in subject.state)
        module = "text_decoder" if of_text else "decoder"
        recipe = {"merge_method": "passthrough", "modules": {module: {"slices": slices}}}
    out = subject.folder / "sliced"
    run_merge({**recipe, "base_model": str(subject.base)}, out, catalog=False)
    subject.loaded(out)
    origins = [layer for low, high in ranges for layer in range(low, high)]
    check_slices(tensors_of(subject.base), tensors_of(out), origins)


def check_slices(before: Values, after: Values, origins: list[int]) -> None:
    """Raise `WrongError` where a weight is not that of the layer it comes from, or one outside layers has changed."""
    counts = [layer_counts(tensors) for tensors in (before, after)]
    moved = {place for place, count in counts[1].items() if count == len(origins) != counts[0].get(place)}
    if not moved:
        raise WrongError("no layers were repeated")
    expected = {}
    for name, values in after.items():
        origin = name
        for number in _NUMBERS.finditer(name):
            if name[: number.start()] in moved:
                origin = f"{name[: number.start()]}{origins[int(number[0])]}{name[number.end() :]}"
        if origin not in before or not values.equal(before[origin]):
            raise WrongError(f"{name} is not {origin}")
        expected[name] = origin
    lost = before.keys() - {*expected.values()}
    if lost:
        raise WrongError(f"lost: {min(lost)}")


def layer_counts(names: Iterable[str]) -> Mapping[str, int]:
    """Return how many numbers follow each beginning of names."""
    numbers: dict[str, set[str]] = {}
    for name in names:
        for number in _NUMBERS.finditer(name):
            numbers.setdefault(name[: number.start()], set()).add(number[0])
    return {place: len(found) for place, found in numbers.items()}


def exported(subject: Subject) -> None:
    """Export a checkpoint of the Trainer whose weights are the state dict of the model, saved by torch."""
    import torch

    checkpoint = subject.folder / "checkpoint-1"
    checkpoint.mkdir()
    torch.save(subject.state, checkpoint / "pytorch_model.bin")
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 1}))
    (checkpoint / "config.json").write_bytes((subject.base / "config.json").read_bytes())
    out = subject.folder / "exported"
    tailor.export(checkpoint, out)
    check_values(subject.loaded(out), subject.state)


VERBS: Mapping[str, Callable[[Subject], None]] = {
    "apply": applied, "merge": merged, "slices": sliced, "export": exported,
}  # fmt: skip


def swept(name: str, model_type: str, folder: Path) -> dict[str, str]:
    """Return what becomes of a small model of a class under every verb: `right`, or why not.

    Raises:
        NotTriedError: transformers does not build it small, or does not load what it saves.
    """
    subject = Subject(name, model_type, folder)
    outcomes = {}
    for verb, run in VERBS.items():
        try:
            run(subject)
        except NotTriedError as error:
            outcomes[verb] = f"not tried: {error}"
        except WrongError as error:
            outcomes[verb] = f"wrong: {error}"
        except MergePipeError as error:
            reason = re.sub(rf"[^' ]*/{folder.name}/", "", error.problems[0].message)
            outcomes[verb] = f"refused: {reason}"
        else:
            outcomes[verb] = RIGHT
    return outcomes


def architectures() -> Mapping[str, str]:
    """Return every class with the first of its model types, but for encoders."""
    from tools.architectures import architectures as of_all_types

    types: dict[str, str] = {}
    for model_type, name in of_all_types():
        if not name.endswith("ForMaskedLM"):
            types.setdefault(name, model_type)
    return types


def stored() -> dict[str, Any]:
    """Read the results of the last sweep."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return results


def results_text(results: Mapping[str, Any]) -> str:
    """Write results with one line for each class."""
    head = [f'"{key}": {json.dumps(results[key])}' for key in ("transformers", "peft")]
    for key in ("outcomes", "not_tried"):
        rows = results[key]
        lines = [f"{json.dumps(name)}: {json.dumps(rows[name])}" for name in sorted(rows)]
        head.append(f'"{key}": {{\n' + ",\n".join(lines) + "\n}")
    return "{" + ",\n".join(head) + "}\n"


def table(results: Mapping[str, Any]) -> str:
    """Return the part of the page that the results decide: figures, and a table."""
    outcomes: Mapping[str, Mapping[str, str]] = results["outcomes"]
    n_right = sum(all(row[verb] == RIGHT for verb in VERBS) for row in outcomes.values())
    by_outcome: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(outcomes):
        by_outcome.setdefault(tuple(outcomes[name][verb] for verb in VERBS), []).append(name)
    rows = sorted(by_outcome.items(), key=lambda row: (-row[0].count(RIGHT), row[1]))
    counts = []
    for verb in VERBS:
        count = sum(row[verb] == RIGHT for row in outcomes.values())
        counts.append(f"{verb} {count}")
    lines = [
        BEGINNING,
        f"With transformers {results['transformers']} and PEFT {results['peft']}, {n_right} of {len(outcomes)}"
        f" architectures are right in all four ({', '.join(counts)}).",
        "",
        f"| architectures | {' | '.join(VERBS)} |",
        f"|---{'|---' * len(VERBS)}|",
    ]
    for cells, names in rows:
        written = [cell.replace("|", "\\|").replace("*", "\\*") for cell in cells]
        lines.append(f"| {', '.join(names)} | {' | '.join(written)} |")
    return "\n".join([*lines, END])


def page_with(page: str, written_table: str) -> str:
    """Return a page with another table of results."""
    before, _, rest = page.partition(BEGINNING)
    return before + written_table + rest.partition(END)[2]


def main() -> None:
    """Sweep the architectures that have no stored results of these releases, store them, and write the page's table."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    results = {"transformers": transformers.__version__, "peft": peft.__version__, "outcomes": {}, "not_tried": {}}
    earlier = stored()
    if all(earlier[package] == results[package] for package in ("transformers", "peft")):
        results = earlier
    for name, model_type in architectures().items():
        if name in results["outcomes"] or name in results["not_tried"]:
            continue
        with TemporaryDirectory() as folder:
            try:
                outcome = {"type": model_type, **swept(name, model_type, Path(folder))}
                results["outcomes"][name] = outcome
            except NotTriedError as error:
                results["not_tried"][name] = str(error)
        RESULTS.write_text(results_text(results), encoding="utf-8")
        print(name, results["outcomes"].get(name) or results["not_tried"][name], flush=True)
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), table(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
