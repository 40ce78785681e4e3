"""Locations: where inputs and outputs are, whichever store keeps them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from functools import total_ordering
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from mergepipe.core.display import WrittenAsText
from mergepipe.errors import MergePipeError, RecipeError

OBJECT_SCHEMES = ("s3", "gs", "az")
WEB_SCHEMES = ("http", "https")
HUB_SCHEME = "hf"
FORMS = (
    "hf://org/name[@revision][/folder], s3://bucket/prefix, gs://bucket/prefix, az://container/prefix, "
    "https://host/folder"
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SECRETS = re.compile(r"(?<=://)[^/]*@|[?#].*")  # passwords and signatures, which no message repeats
_HUB_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_HUB_PAGE = re.compile(
    r"(?:www\.)?(?:huggingface\.co|hf\.co)/([^/]+/[^/]+)(?:/(?:tree|blob)/([^/]+)(/.*)?)?", re.IGNORECASE
)
_OTHER_REPOSITORIES = {
    "buckets": ("a bucket", "copy it into a folder, or into a model on the Hub: hf://org/name"),
    "datasets": ("a dataset", "a model on the Hub is hf://org/name"),
    "spaces": ("a space", "a model on the Hub is hf://org/name"),
}
"""First parts of addresses of the Hub that name no model: the kind of repository, and what to do."""
_HUB_REFERENCE = re.compile(r"refs/(?:pr|convert)/[^/]+")


@total_ordering
@dataclass(frozen=True, slots=True)
class Location(WrittenAsText):
    """A file or folder of a store: a value that joins, compares, sorts and pickles like a path.

    `scheme` names the kind of store, empty for files of this machine. `root` is what requests are sent to: a bucket, a
    host with its port, or `org/name` of the Hub. `revision` is a branch, tag or commit of the Hub, elsewhere empty.
    `path` leads below the root: absolute or relative for local files, always relative elsewhere ("." is the root). It
    holds names as they are; only the texts of http(s) addresses escape them by percent signs, as browsers do.

    Unknown schemes are not refused here but by the store that should open them.

    Laws: `Location.parse(str(location)) == location`, `(location / "x").parent == location`.
    """

    scheme: str
    root: str
    path: PurePosixPath
    revision: str = ""

    @classmethod
    def local(cls, path: Path) -> Location:
        """The location of a file of this machine."""
        return cls("", "", PurePosixPath(path))

    @classmethod
    def parse(cls, text: str) -> Location:
        """Read a location as users write it: a path, or one of `FORMS`."""
        match = _SCHEME.match(text)
        if match is None:
            return cls.local(Path(text))
        scheme, rest = match[1].lower(), text[match.end() :]
        if scheme == "file":
            return cls.local(Path(unquote(re.sub("^localhost/", "/", rest))))
        if scheme == HUB_SCHEME:
            return _parse_hub(text, rest)
        root, _, path = rest.partition("/")
        if not root:
            raise _malformed(text, "it names no bucket or host")
        if "@" in root or (scheme in WEB_SCHEMES and ("?" in rest or "#" in rest)):
            raise _malformed(text, "an address must hold no user name, query or fragment")
        page = _HUB_PAGE.fullmatch(rest.rstrip("/")) if scheme in WEB_SCHEMES else None
        if page is not None:
            hint = f"write hf://{page[1]}{f'@{page[2]}' if page[2] else ''}{page[3] or ''}"
            raise RecipeError.of(
                "location.invalid", text, "is a page of the Hub, which does not contain model files", hint
            )
        return cls(scheme, root, _below_root(text, unquote(path) if scheme in WEB_SCHEMES else path))

    @classmethod
    def of(cls, place: str | os.PathLike[str] | Location) -> Location:
        """The location that a caller names: a text is parsed, a path is of this machine."""
        if isinstance(place, Location):
            return place
        if not isinstance(place, str | os.PathLike):
            raise _malformed(repr(place), f"it is of type {type(place).__name__}, and a text or a path is needed")
        if not place:
            raise _malformed(repr(place), "it is empty")
        return cls.parse(place) if isinstance(place, str) else cls.local(Path(place))

    @property
    def is_local(self) -> bool:
        return not self.scheme

    @property
    def is_absolute(self) -> bool:
        """Whether it is the same place whatever the working directory is."""
        return bool(self.scheme) or self.path.is_absolute()

    @property
    def local_path(self) -> Path:
        """The path of a file of this machine."""
        if self.scheme:
            message = "is not on this machine"
            raise RecipeError.of("location.invalid", self, message, "download it, and give its local path")
        return Path(self.path)

    @property
    def as_reported(self) -> Path | Location:
        """The place as reports name it: a path where it is of this machine."""
        return self if self.scheme else Path(self.path)

    @property
    def key(self) -> str:
        """The path below the root as stores want it, empty for the root itself."""
        return "" if self.path == PurePosixPath(".") else str(self.path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def model_name(self) -> str:
        """The name of the model that lies there: of a root, that of the model of the Hub, or of the bucket."""
        return self.name or self.root.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return self.path.suffix

    @property
    def stem(self) -> str:
        return self.path.stem

    @property
    def parent(self) -> Location:
        return replace(self, path=self.path.parent)

    @property
    def parents(self) -> tuple[Location, ...]:
        """All folders that contain it, the nearest first."""
        return tuple(replace(self, path=path) for path in self.path.parents)

    def __truediv__(self, name: str | PurePosixPath) -> Location:
        """A name or relative path below this one; an absolute local path replaces a local one, as `pathlib` does."""
        if self.scheme and PurePosixPath(name).is_absolute():
            raise ValueError(f"{name} is not below {self}")
        return replace(self, path=self.path / name)

    def with_name(self, name: str) -> Location:
        return replace(self, path=self.path.with_name(name))

    def with_revision(self, revision: str) -> Location:
        return replace(self, revision=revision)

    def absolute(self) -> Location:
        """The same place whatever the working directory is; links and `..` are kept."""
        return self if self.scheme else Location.local(Path(self.path).absolute())

    def normal(self) -> Location:
        """The absolute location without `.` and `..`, links not followed; elsewhere `..` stops at the root."""
        if not self.scheme:
            return Location.local(Path(os.path.abspath(self.path)))  # noqa: PTH100 - keeps links
        return replace(self, path=PurePosixPath(os.path.normpath(f"/{self.path}")).relative_to("/"))

    def without_detours(self) -> Location:
        """The same place without `..` in its path, as far as no link makes that another place."""
        if self.scheme or ".." not in self.path.parts:
            return self
        path = os.path.normpath(self.path)
        return Location.local(Path(path)) if os.path.realpath(path) == os.path.realpath(self.path) else self

    def is_relative_to(self, folder: Location) -> bool:
        """Whether it is `folder` or lies below it, by its text alone."""
        same_store = (self.scheme, self.root, self.revision) == (folder.scheme, folder.root, folder.revision)
        return same_store and self.path.is_relative_to(folder.path)

    def relative_text(self, folder: Location) -> str:
        """Return the location as a text of `folder` names it: relative, with `..`, where both are of one store."""
        if (self.scheme, self.root, self.revision) != (folder.scheme, folder.root, folder.revision):
            return str(self)
        return os.path.relpath(self.absolute().path, folder.absolute().path)

    def relative_to(self, folder: Location) -> PurePosixPath:
        """The path from a folder of the same store. Raises ValueError where it does not lie below it."""
        if (self.scheme, self.root, self.revision) != (folder.scheme, folder.root, folder.revision):
            raise ValueError(f"{self} is not below {folder}")
        return self.path.relative_to(folder.path)

    def __str__(self) -> str:
        if not self.scheme:
            return str(self.path)
        at = f"@{quote(self.revision, safe='')}" if self.revision else ""
        key = quote(self.key) if self.scheme in WEB_SCHEMES else self.key
        return f"{self.scheme}://{self.root}{at}" + (f"/{key}" if key else "")

    def __lt__(self, other: Location) -> bool:
        return self._order() < other._order()

    def _order(self) -> tuple[str, str, str, tuple[str, ...]]:
        return self.scheme, self.root, self.revision, self.path.parts


def is_remote(text: str) -> bool:
    """Whether a text names a store of another machine by its scheme."""
    match = _SCHEME.match(text)
    return match is not None and match[1].lower() != "file"


def meant_address(text: str) -> str:
    """Return the address that a path like `hf:org/name` or `s3:/bucket/prefix` was meant to be; empty for any other."""
    schemes = "|".join((HUB_SCHEME, *OBJECT_SCHEMES, *WEB_SCHEMES))
    match = re.fullmatch(rf"({schemes}):/?([^/].*)", text, re.DOTALL | re.IGNORECASE)
    return "" if match is None else f"{match[1].lower()}://{match[2]}"


def _parse_hub(text: str, rest: str) -> Location:
    """`org/name[@revision][/folder]`; a revision with slashes is `refs/pr/N`, `refs/convert/NAME` or quoted."""
    parts = rest.split("/", 2)
    if len(parts) < 2:
        raise _malformed(text, "a model on the Hub is hf://org/name")
    if parts[0] in _OTHER_REPOSITORIES:
        kind, hint = _OTHER_REPOSITORIES[parts[0]]
        raise RecipeError.of("location.invalid", text, f"is {kind} of the Hub, which is not read here", hint)
    organisation, (name, at, revision) = parts[0], parts[1].partition("@")
    if not _HUB_NAME.fullmatch(organisation) or not _HUB_NAME.fullmatch(name) or (at and not revision):
        raise _malformed(text, "a model on the Hub is hf://org/name[@revision][/folder]")
    folder = parts[2] if len(parts) == 3 else ""
    reference = _HUB_REFERENCE.match(f"{revision}/{folder}") if revision == "refs" else None
    if reference is not None:
        revision, folder = reference[0], f"{revision}/{folder}"[reference.end() + 1 :]
    return Location(HUB_SCHEME, f"{organisation}/{name}", _below_root(text, folder), unquote(revision))


def _below_root(text: str, path: str) -> PurePosixPath:
    below = PurePosixPath(path.strip("/") or ".")
    if ".." in below.parts:
        raise _malformed(text, "'..' leads out of it")
    return below


def _malformed(text: str, why: str) -> MergePipeError:
    return RecipeError.of("location.invalid", _SECRETS.sub("", text), why, f"write {FORMS}, or a path")


# --- models that the Hub also knows by a name alone, from before names had organisations ---

_BERT = ("base-uncased", "base-cased", "large-uncased", "large-cased", "base-multilingual-cased", "base-chinese")
_DISTILLED = ("distilgpt2", "distilroberta-base", "distilbert-base-uncased", "distilbert-base-cased")
_NAMES = {
    "openai-community": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "openai-gpt"),
    "distilbert": (*_DISTILLED, "distilbert-base-multilingual-cased"),
    "google-bert": (*(f"bert-{kind}" for kind in _BERT), "bert-base-multilingual-uncased"),
    "FacebookAI": ("roberta-base", "roberta-large", "roberta-large-mnli", "xlm-roberta-base", "xlm-roberta-large"),
    "google-t5": ("t5-small", "t5-base", "t5-large", "t5-3b", "t5-11b"),
    "albert": ("albert-base-v1", "albert-base-v2", "albert-large-v2", "albert-xlarge-v2", "albert-xxlarge-v2"),
    "xlnet": ("xlnet-base-cased", "xlnet-large-cased"),
}
MODELS_BY_BARE_NAME = {name: f"{organisation}/{name}" for organisation, names in _NAMES.items() for name in names}
"""`org/name` by the name alone: `gpt2` is `openai-community/gpt2`."""


def bare_name(model: str) -> str | None:
    """Return the name alone by which the Hub knows `org/name`, too; None if it has no such name."""
    name = model.rpartition("/")[2]
    return name if MODELS_BY_BARE_NAME.get(name) == model else None
