"""Parse YAML into plain values with their lines; refuse ambiguous and oversized documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import yaml

from mergepipe.core.display import shortened
from mergepipe.errors import NotFoundError, Problem, RecipeError, StorageError
from mergepipe.storage.contract import RECIPE_BYTES, Store, is_folder
from mergepipe.storage.location import Location

MAX_NODES = 100_000
CHARACTERS_OF_A_NODE = 100  # of a longer text each as many count as a value, at every place where it is repeated
MAX_DEPTH = 64
MAX_DOCUMENTS = 100
MAX_NUMBER_CHARACTERS = 64

Value: TypeAlias = bool | int | float | str | list["Value"] | dict[str, "Value"] | None
KeyPath: TypeAlias = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
_PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
# YAML 1.1 wants a dot and a signed exponent in a float, so `1e-3` is a string to PyYAML. Whoever writes it means the
# number, as YAML 1.2 reads it.
_EXPONENT_NUMBER = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
_MARKER_TEXT = "---"
_MARKER = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_MARKER_LINE = re.compile(r"\A---(?:[ \t]*\n|(?=[ \t]))")
_FORBIDDEN_CHARACTERS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class RecipeText:
    """The text of a recipe, from `file` if it has one. Paths in it are relative to `folder`."""

    text: str
    folder: Location
    file: Location | None = None

    @property
    def path(self) -> Location:
        """Return its path, whose name messages use."""
        return self.file or self.folder / "recipe"


def recipe_text(content: Mapping[str, object], folder: Location) -> RecipeText:
    """Write a recipe that is given as a mapping as the YAML that is recorded with the merge."""
    try:
        return RecipeText(yaml.safe_dump(_plain(content), sort_keys=False, allow_unicode=True), folder)
    except (yaml.YAMLError, RecursionError) as error:
        message = f"a value that no recipe can hold: {shortened(' '.join(map(str, error.args)))}"
        raise _refusal("recipe.syntax", "recipe", message, "give texts, numbers, flags, lists and mappings") from None


def _plain(value: object) -> object:
    """Return a value with mappings, sequences, paths, and arrays and numbers of numpy as YAML knows them."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        return value.tolist()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, str | Path | Location) else value


@dataclass(frozen=True, slots=True)
class YamlSource:
    """One document of a YAML file: `text` is its own. `lines` maps the path of every value to its line in the file,
    counted from 1. `repeated_keys` are those that stand twice with equal values, with a message each. Paths in it are
    relative to `folder`.
    """

    path: Location
    text: str
    root: Value
    lines: Mapping[KeyPath, int]
    repeated_keys: tuple[tuple[KeyPath, str], ...]
    folder: Location

    @property
    def other_folder(self) -> Location | None:
        """The folder that users may expect paths to be relative to: the recipe's, or the working folder."""
        if not self.path.is_local:
            return None
        folders = (self.path.parent, Location.local(Path.cwd()))
        return next((folder for folder in folders if folder != self.folder), None)

    def where(self, *key_path: str | int) -> str:
        """Format a position for an error message: `recipe.yml:7 models[1].parameters.density`.

        A value that is not there gets the line of the nearest value around it.
        """
        line = next(self.lines[key_path[:n]] for n in range(len(key_path), -1, -1) if key_path[:n] in self.lines)
        return f"{self.path.name}:{line} {key_path_text(key_path)}".rstrip()


def key_path_text(key_path: KeyPath) -> str:
    """Format a key path as `models[1].parameters.density`; names that are not plain are quoted and shortened."""
    text = ""
    for key in key_path:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (shortened(key) if _PLAIN_NAME.fullmatch(key) else f"'{shortened(key)}'")
    return text


def read_yaml(path: Location, store: Store) -> YamlSource:
    """Read the one YAML document in `path`."""
    return parse_yaml(path, _read_text(path, store))


def read_documents(path: Location | RecipeText, store: Store) -> tuple[YamlSource, ...]:
    """Read every non-empty YAML document in a file or a text. Raises as `read_yaml` does."""
    if isinstance(path, RecipeText):
        return parse_documents(path.path, path.text, path.folder)
    return parse_documents(path.absolute(), _read_text(path.absolute(), store))


def with_rounding(path: Location | RecipeText, store: Store, rounding: str) -> RecipeText:
    """Return a recipe of which each document says how results are rounded. Raises as `read_yaml` does.

    Raises:
        RecipeError: a document says something else, or copies weights without merging them.
    """
    documents = read_documents(path, store)
    texts = []
    for document in documents:
        root = document.root if isinstance(document.root, dict) else {}
        stated = root.get("rounding")
        if stated not in (None, "", rounding):
            message = f"is {rounding}, and the recipe says {shortened(str(stated))}"
            raise _refusal("option.conflict", "--rounding", message, "leave out one of the two")
        if "merge_method" not in root:
            message = f"{document.where()} has no merge_method, so nothing is merged and rounded"
            raise _refusal("option.conflict", "--rounding", message, "leave it out")
        texts.append(recipe_text({**root, "rounding": rounding}, document.folder).text)
    file = path.file if isinstance(path, RecipeText) else path.absolute()
    return RecipeText(f"{_MARKER_TEXT}\n".join(texts), documents[0].folder, file)


def read_recipe(path: Location, store: Store, folder: Location) -> RecipeText:
    """Read a recipe's file, with paths in it relative to `folder`. Raises as `read_yaml` does."""
    return RecipeText(_read_text(path.absolute(), store), folder, path.absolute())


def parse_yaml(path: Location, text: str) -> YamlSource:
    """Read the one YAML document in `text`; errors name it `path`. Raises as `read_yaml` does."""
    first, *further = parse_documents(path, text)
    if further:
        message = "several YAML documents where one is expected"
        raise _refusal("recipe.syntax", further[0].where(), message, "keep one recipe per file")
    return first


def parse_documents(path: Location, text: str, folder: Location | None = None) -> tuple[YamlSource, ...]:
    """Read every non-empty YAML document in `text`; `folder` is the one that paths are relative to, if not its own.

    Raises as `read_yaml` does.
    """
    loader, nodes = _compose(path.name, text)
    nodes = [node for node in nodes if not (isinstance(node, yaml.ScalarNode) and node.tag == _TAG + "null")]
    if not nodes:
        raise _refusal("recipe.syntax", path.name, "the recipe is empty", "it needs at least merge_method and models")
    texts = _own_texts(text, nodes)
    builders = [_Builder(path.name, loader) for _ in nodes]
    roots = [builder.build(node, (), _line(node)) for builder, node in zip(builders, nodes, strict=True)]
    return tuple(
        YamlSource(path, document_text, root, builder.lines, tuple(builder.repeated_keys), folder or path.parent)
        for document_text, root, builder in zip(texts, roots, builders, strict=True)
    )


def _own_texts(text: str, nodes: list[yaml.Node]) -> list[str]:
    """Cut the text into documents: all of it for a single one, else from each `---` to the next."""
    if len(nodes) == 1:
        return [text]
    starts = [0, *(_last_marker(text, int(node.start_mark.index)) for node in nodes[1:]), len(text)]
    return [_MARKER_LINE.sub("", text[start:stop], count=1) for start, stop in pairwise(starts)]


def _last_marker(text: str, before: int) -> int:
    """Find the start of the last line with a document marker before an index."""
    return next((match.start() for match in reversed(list(_MARKER.finditer(text, 0, before)))), 0)


def _refusal(code: str, where: str, message: str, hint: str = "") -> RecipeError:
    return RecipeError(Problem(code, where, message, hint))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _read_text(path: Location, store: Store) -> str:
    raw = _read_bytes(path, store)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise _refusal("recipe.syntax", f"{path.name}:{line}", message, "save the file as UTF-8") from None


def _read_bytes(path: Location, store: Store) -> bytes:
    try:
        return store.read_small(path, RECIPE_BYTES)
    except NotFoundError as error:
        where = error.problems[0].where
        raise NotFoundError.of("recipe.not-found", where, "there is no such recipe") from None
    except StorageError as error:
        if error.code == "storage.not-a-file" and is_folder(store, path):
            message, hint = "is a folder, not a recipe", "give the YAML file in it"
            raise _refusal("recipe.syntax", str(path), message, hint) from None
        raise


class _BoundedLoader(yaml.SafeLoader):
    """SafeLoader that refuses deep or wide documents while composing, before they cost stack, memory or time."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self._file = name
        self._depth = 0
        self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH or self._nodes > MAX_NODES:
            raise _too_big(self._file, self.next_line(), deep=self._depth > MAX_DEPTH)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def next_line(self) -> int:
        """Return the 1-based line of the next token."""
        return int(self.peek_event().start_mark.line) + 1  # type: ignore[no-untyped-call]


def _too_big(name: str, line: int, *, deep: bool) -> RecipeError:
    if deep:
        return _refusal("recipe.syntax", f"{name}:{line}", f"nested deeper than {MAX_DEPTH} levels")
    most_characters = MAX_NODES * CHARACTERS_OF_A_NODE
    message = f"more than {MAX_NODES} values, or {most_characters} characters of long texts, aliases expanded"
    return _refusal("recipe.syntax", f"{name}:{line}", message)


def _compose(name: str, text: str) -> tuple[_BoundedLoader, list[yaml.Node]]:
    nodes: list[yaml.Node] = []
    try:
        loader = _BoundedLoader(name, text)
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                nodes.append(node)
            if len(nodes) > MAX_DOCUMENTS:
                raise _refusal("recipe.syntax", f"{name}:{_line(nodes[-1])}", f"more than {MAX_DOCUMENTS} documents")
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(name, text, error) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"the character #x{ord(text[error.position]):04x} is not allowed"
        raise _refusal("recipe.syntax", f"{name}:{line}", message) from None
    except (ValueError, OverflowError) as error:  # PyYAML lets "\UFFFFFFFF" and absurd %YAML versions escape as these
        raise _refusal("recipe.syntax", name, f"not YAML: {shortened(str(error))}") from None
    return loader, nodes


def _syntax_error(name: str, text: str, error: yaml.MarkedYAMLError) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return _refusal("recipe.syntax", name, f"not YAML: {error.problem}")
    where = f"{name}:{mark.line + 1}"
    lines = re.split("\r\n|[\r\n\x85\u2028\u2029]", text)
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "\t" in line[: len(line) - len(line.lstrip(" \t"))]:
        return _refusal("recipe.syntax", where, "a tab in the indentation", "YAML indents with spaces")
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    return _refusal("recipe.syntax", where, f"not YAML: {shortened(reason, 200)} (column {mark.column + 1})")


def _text_nodes(node: yaml.Node) -> int:
    """Return how many values the text of a node counts as, beyond one."""
    return len(node.value) // CHARACTERS_OF_A_NODE if isinstance(node, yaml.ScalarNode) else 0


class _Builder:
    """Builds values from a node graph. Aliases are expanded, so the count below includes every repetition."""

    def __init__(self, name: str, loader: _BoundedLoader) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.repeated_keys: list[tuple[KeyPath, str]] = []
        self._name = name
        self._loader = loader
        self._nodes = 0
        self._merge_depth = 0

    def build(self, node: yaml.Node, key_path: KeyPath, line: int) -> Value:
        self._nodes += 1 + _text_nodes(node)
        if len(key_path) >= MAX_DEPTH or self._nodes > MAX_NODES:
            raise _too_big(self._name, line, deep=len(key_path) >= MAX_DEPTH)
        self.lines[key_path] = line
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, (*key_path, i), _line(item)) for i, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, key_path)
        raise self._unknown_tag(node)

    def _mapping(self, node: yaml.MappingNode, key_path: KeyPath) -> dict[str, Value]:
        merged = [value_node for key_node, value_node in node.value if key_node.tag == _TAG + "merge"]
        values = self._merged(merged, key_path)
        keys: set[str] = set()
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                continue
            key = self._key(key_node)
            at, line = (*key_path, key), _line(key_node)
            first_line, first_value = self.lines.get(at), values.get(key)
            values[key] = self.build(value_node, at, line)
            if key in keys:
                self._note_repeated(at, f"occurs twice, first in line {first_line}", [first_value, values[key]])
            keys.add(key)
        return values

    def _note_repeated(self, at: KeyPath, message: str, values: list[Value]) -> None:
        """Report a key that stands twice."""
        if repr(values[0]) != repr(values[1]):
            place = f"{self._name}:{self.lines[at]} {key_path_text(at)}"
            hint = "remove one of the two (mergekit takes the last)"
            raise _refusal("recipe.syntax", place, f"the key {message}, with another value", hint)
        self.repeated_keys.append((at, f"the key {message}, with the same value"))

    def _merged(self, nodes: list[yaml.Node], key_path: KeyPath) -> dict[str, Value]:
        """Resolve merge keys (`<<`): each is a mapping or a list of mappings, the first that has a key wins.

        Built last to first, so that values and lines of the one that wins are written last.
        """
        mappings = [item for node in nodes for item in (node.value if isinstance(node, yaml.SequenceNode) else [node])]
        values: dict[str, Value] = {}
        for mapping in reversed(mappings):
            self._nodes += 1
            if not isinstance(mapping, yaml.MappingNode):
                message = "a merge key (<<) needs a mapping, or a list of mappings"
                raise _refusal("recipe.syntax", f"{self._name}:{_line(mapping)}", message)
            self._merge_depth += 1
            if self._merge_depth > MAX_DEPTH or self._nodes > MAX_NODES:
                raise _too_big(self._name, _line(mapping), deep=self._merge_depth > MAX_DEPTH)
            values |= self._mapping(mapping, key_path)
            self._merge_depth -= 1
        return values

    def _key(self, node: yaml.Node) -> str:
        where = f"{self._name}:{_line(node)}"
        if not isinstance(node, yaml.ScalarNode):
            raise _refusal("recipe.syntax", where, "a key must be a name, not a list or a mapping")
        self._nodes += _text_nodes(node)
        if self._nodes > MAX_NODES:
            raise _too_big(self._name, _line(node), deep=False)
        return self._clean(node)

    def _scalar(self, node: yaml.ScalarNode) -> Value:
        kind = node.tag.removeprefix(_TAG)
        if kind == "null":
            return None
        if kind in ("str", "timestamp"):  # what looks like a date is text here
            text = self._clean(node)
            is_number = node.style is None and len(text) <= MAX_NUMBER_CHARACTERS and _EXPONENT_NUMBER.fullmatch(text)
            return float(text) if is_number else text
        if kind in ("bool", "int", "float"):
            return self._bool_or_number(node, kind)
        raise self._unknown_tag(node)

    def _bool_or_number(self, node: yaml.ScalarNode, kind: str) -> bool | int | float:
        construct = {
            "bool": self._loader.construct_yaml_bool,
            "int": self._loader.construct_yaml_int,
            "float": self._loader.construct_yaml_float,
        }[kind]
        try:
            if len(node.value) > MAX_NUMBER_CHARACTERS:  # `1:1:1:...` costs quadratic time
                raise ValueError("too long")
            value: bool | int | float = construct(node)
        except (ValueError, KeyError, IndexError, OverflowError):
            message = f"'{shortened(self._clean(node))}' is not a valid {kind}"
            raise _refusal("recipe.syntax", f"{self._name}:{_line(node)}", message) from None
        return value

    def _clean(self, node: yaml.ScalarNode) -> str:
        text = str(node.value)
        match = _FORBIDDEN_CHARACTERS.search(text)
        if match:
            message = f"the character #x{ord(match.group()):04x} is not allowed"
            raise _refusal("recipe.syntax", f"{self._name}:{_line(node)}", message)
        return text

    def _unknown_tag(self, node: yaml.Node) -> RecipeError:
        tag = node.tag.replace(_TAG, "!!")
        message = f"the YAML tag {shortened(ascii(tag))} is refused"
        return _refusal("recipe.syntax", f"{self._name}:{_line(node)}", message, "write plain values")
