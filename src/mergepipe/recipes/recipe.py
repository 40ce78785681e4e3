"""The recipe as frozen values: validated, and not yet resolved to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from mergepipe.checkpoints.embedding_rows import TokenRule
from mergepipe.core.blocks import DType
from mergepipe.core.outcome import Notice
from mergepipe.core.rounding import RoundingMode
from mergepipe.operators.spec import OperatorSpec
from mergepipe.storage.location import Location

# --- parameter values of a recipe: one scalar, or values by tensor name and depth ---


Scalar: TypeAlias = float | bool

EVERY_TENSOR = ("", "*")  # filters that hold for any name


@dataclass(frozen=True, slots=True)
class Case:
    """A parameter's value for tensors whose name contains `filter`: one value, or several spread over the layers."""

    filter: str
    values: tuple[Scalar, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a case needs a value")

    def holds_for(self, tensor: str) -> bool:
        """Whether the case applies to `tensor`."""
        return self.filter in EVERY_TENSOR or self.filter in tensor

    def at(self, depth: float) -> Scalar:
        """Return the value at `depth` in [0, 1]: numbers are interpolated, flags switch."""
        last = len(self.values) - 1
        position = depth * last
        below = int(position)
        lower, upper = self.values[below], self.values[min(last, below + 1)]
        if isinstance(lower, bool) or isinstance(upper, bool):
            return lower
        share = position - below
        return (1 - share) * lower + share * upper


@dataclass(frozen=True, slots=True)
class Cases:
    """A parameter that depends on the tensor: the first applicable case decides. `where` is its place in the recipe.

    With `named` the value is multiplied by the tensor's number there; tensors without one have no value.
    """

    cases: tuple[Case, ...]
    where: str
    named: Mapping[str, float] | None = None


Setting: TypeAlias = Scalar | Cases


def value_at(setting: Setting, tensor: str, depth: float) -> Scalar | None:
    """Return the value of `setting` for a tensor at `depth` in [0, 1]; None if no case applies."""
    if not isinstance(setting, Cases):
        return setting
    value = next((case.at(depth) for case in setting.cases if case.holds_for(tensor)), None)
    if setting.named is None or value is None:
        return value
    return value * setting.named[tensor] if tensor in setting.named else None


# --- the recipe as frozen values: validated, and not yet resolved to tensors ---


__all__ = ["ModelInput", "ModelKey", "Recipe", "Scalar", "Setting", "TokenizerRequest"]

ModelKey: TypeAlias = tuple[Location, Location | None, int]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One model a recipe names: `text` as written, `path` absolute, `parameters` as written (no defaults).

    `adapter` is the folder of an adapter that is applied to it. `intermediate` names the document of the recipe that
    makes the model; `path` is then a placeholder. `is_delta`: the recipe says that
    its tensors are differences from the base. `repeat` counts earlier entries of the same list that name the same.
    `numbers` is the file that holds its weights, element by element, read as differences are.
    """

    text: str
    path: Location
    parameters: Mapping[str, Setting]
    where: str
    adapter: Location | None = None
    intermediate: str | None = None
    is_delta: bool = False
    repeat: int = 0
    numbers: ModelInput | None = None

    def __post_init__(self) -> None:
        if not self.path.is_absolute:
            raise ValueError(f"not an absolute path: {self.path}")

    @property
    def key(self) -> ModelKey:
        """Identity of the model: equal for all references to it, but for those that are listed again to count again."""
        return self.path, self.adapter, self.repeat


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Layers `[start, stop)` of one model, with the parameters of this use. `where` is the range's position."""

    model: ModelInput
    start: int
    stop: int
    where: str = ""

    @property
    def n_layers(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """Some layers of the output, merged from as many layers of every source. `base` is the slice's own base_model."""

    sources: tuple[LayerSource, ...]
    base: ModelInput | None
    parameters: Mapping[str, Setting]
    where: str

    @property
    def n_layers(self) -> int:
        return self.sources[0].n_layers


@dataclass(frozen=True, slots=True)
class OutputModule:
    """One module of a multimodal model, e.g. its text decoder: merged from whole models or from slices, never both."""

    name: str
    models: tuple[ModelInput, ...]
    slices: tuple[OutputSlice, ...]
    parameters: Mapping[str, Setting]
    where: str


MOST_ATOMS = 64


@dataclass(frozen=True, slots=True)
class TokenizerRequest:
    """The requested tokenizer of the output: that of `model`, an index into `Recipe.inputs()`.

    With `is_union` it has the tokens of all models, added to the first one's. `tokens` are the rules of single ones,
    whose models are such indices, too. `donor` is the lender where it is not merged. `new_tokens` says how rows are
    made for tokens that no merged model has, if not as zeros: of each model's rows, as the mean of those of the token's
    text (`subword`) or by orthogonal matching pursuit of the donor's row over at most `n_atoms` tokens that both have
    (`omp`).
    """

    is_union: bool = False
    model: int = 0
    tokens: Mapping[str, TokenRule] = field(default_factory=dict)
    pad_to_multiple_of: int | None = None
    where: str = ""
    donor: ModelInput | None = None
    new_tokens: str = ""
    n_atoms: int = MOST_ATOMS


@dataclass(frozen=True, slots=True)
class MixtureExpert:
    """The prompts that a router sends to an expert, and those that it does not; what its matrices are changed by.

    `noise` is the deviation of normal noise that is added to them, `residual` the factor of what it gives back.
    """

    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    noise: float = 0.0
    residual: float = 1.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts built from dense models: `Recipe.models` are its experts, then its shared experts.

    With `chosen` it has these experts of the base, a mixture itself; with `is_dense` the only one of them as its MLP.
    """

    gate_mode: str
    experts: tuple[MixtureExpert, ...]
    shared: tuple[MixtureExpert, ...] = ()
    experts_per_token: int = 2
    architecture: str | None = None
    seed: int = 0
    chosen: tuple[int, ...] = ()
    is_dense: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """A validated recipe. References to the same files have equal keys, but for models that are listed again.

    `base` is what `base_model` names. It may be listed among `models` too. Exactly one of `models`, `slices` and
    `modules` is not empty. `name` is what other documents of the same file call the result. `keeps_dtypes`: the dtype
    is `auto`, so that every tensor keeps the base's; `is_like_base`: weights are stored as FP8 like the base's.
    `notices` are those of all documents of the file. `adapter_tokenizer`: whether the output gets the tokenizer of the
    `base` or the one next to the `adapter`; the latter where it fits, if nothing is stated. `adapter_names`: parts of
    the names in adapters, with what the base calls them.
    """

    path: Location
    source_text: str
    operator: OperatorSpec
    base: ModelInput | None
    models: tuple[ModelInput, ...]
    parameters: Mapping[str, Setting]
    dtype: DType | None
    out_dtype: DType | None
    slices: tuple[OutputSlice, ...] = ()
    modules: tuple[OutputModule, ...] = ()
    tokenizer: TokenizerRequest | None = None
    chat_template: str | None = None
    adapter_tokenizer: str | None = None
    adapter_names: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    keeps_dtypes: bool = False
    is_like_base: bool = False
    notices: tuple[Notice, ...] = ()
    mixture: Mixture | None = None
    rounding: RoundingMode = RoundingMode.NEAREST

    def __post_init__(self) -> None:
        if sum(map(bool, (self.models, self.slices, self.modules))) != 1:
            raise ValueError("a recipe has models, slices or modules")

    def inputs(self) -> tuple[ModelInput, ...]:
        """List every distinct model: first the one that provides configuration and tokenizer, then by first use.

        The first is `base_model`, else the first model named. Entries of `models` come with their parameters. Files of
        weights, and a model that only lends its tokenizer, come last.
        """
        first = (self.base,) if self.base is not None else ()
        distinct: dict[ModelKey, ModelInput] = {}
        mentioned = (*first, *self.listed())
        for model in (*mentioned, *(model.numbers for model in mentioned if model.numbers is not None)):
            distinct.setdefault(model.key, model)
        if self.tokenizer is not None and self.tokenizer.donor is not None:
            distinct.setdefault(self.tokenizer.donor.key, self.tokenizer.donor)
        return tuple(distinct.values())

    def intermediates(self) -> tuple[str, ...]:
        """List the names of the documents whose results this one merges, in order."""
        names = (model.intermediate for model in self.inputs())
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def parts(self) -> Iterator[tuple[tuple[ModelInput, ...], tuple[OutputSlice, ...]]]:
        """Yield the models and the slices of the recipe itself, then those of each module."""
        yield self.models, self.slices
        yield from ((module.models, module.slices) for module in self.modules)

    def listed(self) -> Iterator[ModelInput]:
        """Yield every model as it is listed, with its parameters, in order."""
        for models, slices in self.parts():
            yield from models
            yield from (source.model for piece in slices for source in piece.sources)


def with_named_weights(recipe: Recipe, named: Mapping[ModelKey, Mapping[str, float]]) -> Recipe:
    """Return the recipe with weights multiplied by the numbers of their files, by tensor, where `named` has these."""

    def weighed(model: ModelInput) -> ModelInput:
        numbers = None if model.numbers is None else named.get(model.numbers.key)
        if numbers is None:
            return model
        weight = model.parameters["weight"]
        cases = weight if isinstance(weight, Cases) else Cases((Case("", (weight,)),), model.where)
        return replace(model, parameters={**model.parameters, "weight": replace(cases, named=numbers)})

    return with_changed_models(recipe, weighed)


def with_changed_models(recipe: Recipe, change: Callable[[ModelInput], ModelInput]) -> Recipe:
    """Return the recipe with every reference to a model, and to a file of its weights, changed by `change`."""

    def model(entry: ModelInput) -> ModelInput:
        changed = change(entry)
        return changed if changed.numbers is None else replace(changed, numbers=change(changed.numbers))

    def piece(slice_: OutputSlice) -> OutputSlice:
        sources = tuple(replace(source, model=model(source.model)) for source in slice_.sources)
        return replace(slice_, sources=sources, base=None if slice_.base is None else model(slice_.base))

    def module(output: OutputModule) -> OutputModule:
        return replace(output, models=tuple(map(model, output.models)), slices=tuple(map(piece, output.slices)))

    tokenizer = recipe.tokenizer
    if tokenizer is not None and tokenizer.donor is not None:
        tokenizer = replace(tokenizer, donor=model(tokenizer.donor))
    return replace(
        recipe,
        tokenizer=tokenizer,
        base=None if recipe.base is None else model(recipe.base),
        models=tuple(map(model, recipe.models)),
        slices=tuple(map(piece, recipe.slices)),
        modules=tuple(map(module, recipe.modules)),
    )
