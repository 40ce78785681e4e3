"""Text that any machine with Python has, sorted into domains and split into training and held-out parts."""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GENERAL = "general"
_PIECE_CHARACTERS = 8_000
_HELDOUT_ONE_IN = 8
_REPEAT_CHARACTERS = 40  # shorter paragraphs ("else:") may repeat
_MIN_TRAINING_CHARACTERS = 60_000
_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "lib2to3", "bad_coding"}


class TextError(Exception):
    """The machine has not enough text for what was asked."""


@dataclass(frozen=True, slots=True)
class Document:
    """A named text; the name decides whether it is held out."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of text. No paragraph of `_REPEAT_CHARACTERS` or more is in it twice, nor in two domains."""

    name: str
    training: str
    heldout: str


def gather(n_domains: int, max_characters: int = 1_500_000, general_characters: int = 12_000_000) -> tuple[Domain, ...]:
    """Return `GENERAL` text, then the first `n_domains` domains of which this machine has enough.

    General text is the standard library without the files of the chosen domains. The same files give the same text.

    Raises:
        TextError: there are fewer domains.
    """
    seen: set[bytes] = set()
    chosen: list[Domain] = []
    taken: set[str] = set()
    for name, source in _SOURCES.items():
        documents = _limited(source(), max_characters)
        if len(chosen) == n_domains or sum(len(document.text) for document in documents) < _MIN_TRAINING_CHARACTERS:
            continue
        seen_after = set(seen)
        domain = _split(name, documents, seen_after)
        if len(domain.training) >= _MIN_TRAINING_CHARACTERS:
            seen = seen_after
            chosen.append(domain)
            taken |= {document.name for document in source()}
    if len(chosen) < n_domains:
        raise TextError(f"{n_domains} domains needed, this machine has text for {len(chosen)}")
    rest = (document for document in _python_files("**/*.py") if document.name not in taken)
    return (_split(GENERAL, _limited(rest, general_characters), seen), *chosen)


def _limited(documents: Iterable[Document], max_characters: int) -> list[Document]:
    """Take documents in the order of their names' hashes, so that a limit leaves out no corner of the alphabet."""
    kept: list[Document] = []
    total = 0
    for document in sorted(documents, key=lambda d: _hash(d.name)):
        if total < max_characters:
            kept.append(document)
            total += len(document.text)
    return kept


def _split(name: str, documents: Sequence[Document], seen: set[bytes]) -> Domain:
    training: list[str] = []
    heldout: list[str] = []
    for document in documents:
        paragraphs = _unseen(document.text, seen)
        for number, piece in enumerate(_pieces(paragraphs)):
            is_heldout = int.from_bytes(_hash(f"{document.name}#{number}")) % _HELDOUT_ONE_IN == 0
            (heldout if is_heldout else training).append(piece)
    return Domain(name, "\n\n".join(training), "\n\n".join(heldout))


def _unseen(text: str, seen: set[bytes]) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        key = _hash(" ".join(paragraph.split()))
        if len(paragraph) < _REPEAT_CHARACTERS or key not in seen:
            seen.add(key)
            yield paragraph


def _pieces(paragraphs: Iterable[str]) -> Iterator[str]:
    gathered: list[str] = []
    for paragraph in paragraphs:
        gathered.append(paragraph)
        if sum(map(len, gathered)) >= _PIECE_CHARACTERS:
            yield "\n\n".join(gathered)
            gathered = []
    if gathered:
        yield "\n\n".join(gathered)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


# --- where text is found ---


def _python_files(*patterns: str) -> Iterator[Document]:
    return _files(_LIBRARY, patterns)


def _files(root: Path, patterns: Iterable[str]) -> Iterator[Document]:
    """Every readable UTF-8 file once, links left out, named relative to `root`."""
    paths = {path for pattern in patterns for path in root.glob(pattern)}
    for path in sorted(paths):
        name = path.relative_to(root)
        if _NOT_LIBRARY.isdisjoint(name.parts) and path.is_file() and not path.is_symlink():
            text = _readable(path)
            if text is not None:
                yield Document(name.as_posix(), text)


def _readable(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return None


def _prose() -> Iterator[Document]:
    """The chapters of the language reference that `help()` prints."""
    from pydoc_data.topics import topics

    return (Document(f"topics/{name}", str(topics[name])) for name in sorted(topics))


def _headers() -> Iterator[Document]:
    return _files(Path(sysconfig.get_paths()["include"]), ("**/*.h",))


def _legal() -> Iterator[Document]:
    yield from _python_files("LICENSE*")
    yield from _files(Path("/usr/share/common-licenses"), ("*",))
    yield from _files(Path("/usr/share/doc"), ("*/copyright",))


def _library(*patterns: str) -> Callable[[], Iterable[Document]]:
    return lambda: _python_files(*patterns)


_SOURCES: Mapping[str, Callable[[], Iterable[Document]]] = {
    "prose": _prose,
    "headers": _headers,
    "legal": _legal,
    "tables": _library("encodings/cp*.py", "encodings/iso*.py", "encodings/mac*.py", "encodings/koi*.py"),
    "tests": _library("test/test_*.py"),
    "windows": _library("idlelib/**/*.py", "tkinter/**/*.py", "turtledemo/*.py", "turtle.py"),
    "concurrency": _library("asyncio/*.py", "concurrent/**/*.py", "multiprocessing/**/*.py", "threading.py"),
    "internet": _library("email/**/*.py", "http/*.py", "urllib/*.py", "html/*.py", "*lib.py", "xmlrpc/*.py"),
    # the rest is for machines that lack some of the above
    "checking": _library("unittest/**/*.py", "doctest.py", "pdb.py", "bdb.py", "trace*.py", "pydoc.py"),
    "numbers": _library("_pydecimal.py", "fractions.py", "statistics.py", "random.py", "*datetime.py"),
    "language": _library("importlib/**/*.py", "ast.py", "dis.py", "inspect.py", "token*.py", "typing.py"),
    "formats": _library("xml/**/*.py", "json/*.py", "csv.py", "pickle*.py", "tarfile.py", "zipfile*/**/*.py"),
}
