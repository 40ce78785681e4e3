"""The store whose files are pinned when first looked at: reads of another version are refused, never mixed.

A folder of a web server is one: `https://host/folder`.

HTTP has no listings. `list` names the files that a checkpoint may have (`KNOWN_NAMES`) and that the server confirms by
HEAD, and the weight files that an index among them names, unasked: there may be a thousand. Other files are read where
they are named. A location that the server does not know as a file, or redirects to itself with a slash, is a folder if
`list` names anything in it.

Redirects are followed when a file is looked up, and its ranges then come from where they led; an address that has
expired is looked up again. A server without `ETag` is held to size and `Last-Modified` in every answer; one that states
neither is refused.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from abc import abstractmethod
from functools import partial
from typing import Final
from urllib.parse import quote

from mergepipe.errors import CorruptError, NotFoundError, StorageError
from mergepipe.storage.contract import WEIGHT_INDEX_BYTES, Entry, FileKind, FileStatus, RequestCounts, Store, StoreTerms
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.location import Location
from mergepipe.storage.range_file import RangeFile
from mergepipe.storage.remote.http_client import Address, HeadAnswer, HttpClient, Pin
from mergepipe.storage.remote.retry import REQUEST_COST_BYTES, FailureKind, RequestFailed, Source, Transfers

FOLDER: Final = FileStatus(FileKind.FOLDER, 0, "")


class PinnedFile:
    """One version of a remote file, open for positional reads from many threads."""

    alignment: Final = 1

    def __init__(self, source: Source, status: FileStatus, transfers: Transfers) -> None:
        self._source = source
        self._transfers = transfers
        self.location: Final = source.location
        self.size_bytes: Final = status.size_bytes
        self.version: Final = status.version

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; see `RangeFile.read_into`. Bytes past the end are not asked for or charged."""
        nbytes = max(0, min(len(buffer), self.size_bytes - offset))
        if nbytes:
            self._fill(offset, buffer[:nbytes], purpose)
        return nbytes

    def _fill(self, offset: int, buffer: memoryview, purpose: Purpose) -> None:
        self._transfers.read(self._source, offset, buffer, purpose)

    def close(self) -> None:
        """Nothing to release: connections belong to the store."""


class PinnedStore(Store):
    """The common part of stores of remote files. A file keeps its first size and version for the store's life."""

    def __init__(self, transfers: Transfers, http: HttpClient | None = None) -> None:
        self.ledger = transfers.ledger
        self._transfers = transfers
        self._http = http or HttpClient()
        transfers.on_abort(self._http.abort)

    @property
    def counts(self) -> RequestCounts:
        """The requests made so far, retries among them."""
        return self._transfers.counts

    def abort(self) -> None:
        """Fail the requests in flight soon; see `Store.abort`."""
        self._transfers.abort()

    def terms(self, location: Location) -> StoreTerms:
        """Any range; many requests at once, each of which costs as much as some megabytes."""
        del location
        return StoreTerms(1, self._transfers.connections, REQUEST_COST_BYTES)

    @abstractmethod
    def _source(self, location: Location) -> Source:
        """Return the source of a file's bytes, which was looked up before."""

    def open(self, location: Location, *, direct: bool = False) -> RangeFile:
        """Open a file for positional reads; see `Store.open`. `direct` means nothing here."""
        del direct
        status = self._file_status(location)
        return PinnedFile(self._source(location), status, self._transfers)

    def close(self) -> None:
        """Let workers and connections go."""
        self._transfers.close()
        self._http.close()


def status_of(entry: Pin | FileKind | None) -> FileStatus | None:
    """Describe a pinned file, a folder or nothing."""
    if isinstance(entry, Pin):
        return FileStatus(FileKind.FILE, entry.size_bytes, entry.version)
    return None if entry is None else FOLDER


# --- checkpoints in a folder of a web server: `https://host/folder`, read by pinned ranges ---

INDEX_NAMES: Final = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
KNOWN_NAMES: Final = (
    *INDEX_NAMES, "config.json", "model.safetensors", "pytorch_model.bin", "generation_config.json",
    "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "consolidated.safetensors",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json", "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
    "modules.json", "model_index.json", "mergepipe.json", "mergepipe.blocks", "mergepipe.stats", "README.md", "LICENSE",
)  # fmt: skip
"""The names that `list` asks for: weights, their index, settings, tokenizers, adapters, and the files of ours."""

_INDEXED: Final = re.compile(rb':\s*("(?:[^"\\]|\\.)+?\.(?:safetensors|bin)")')
_MISSING: Final = frozenset({404, 410})
_NO_VERSION: Final = "its server names no version of the file (ETag or Last-Modified): two could be mixed unseen"
_UNCLEAR: Final = frozenset({403, 405, 501})  # also said of folders, and of missing files where listing is forbidden


def open_store(ledger: Ledger, connections: int) -> WebStore:
    """Return the store of all hosts of a scheme."""
    return WebStore(Transfers(ledger, connections=connections))


class WebStore(PinnedStore):
    """Files of web servers by their addresses."""

    def __init__(self, transfers: Transfers, http: HttpClient | None = None) -> None:
        super().__init__(transfers, http)
        self._lock = threading.Lock()
        self._answers: dict[Location, HeadAnswer | RequestFailed | None] = {}
        self._folders: dict[Location, tuple[Entry, ...]] = {}

    def list(self, location: Location) -> tuple[Entry, ...]:
        """The files of a checkpoint's names that are directly below a folder, by name; see the module."""
        entries = () if "\0" in location.key else self._entries(location)
        if not entries:
            if location.key and "\0" not in location.key:
                self._refuse_unclear(location)
            hint = "give the address of a folder that holds config.json or model.safetensors"
            raise NotFoundError.of("storage.not-found", location, "no files of a checkpoint are there", hint)
        return entries

    def stat(self, location: Location) -> FileStatus | None:
        """Look a location up; see `Store.stat`."""
        return None if "\0" in location.key else status_of(self._look_up(location))

    def _look_up(self, location: Location) -> Pin | FileKind | None:
        entries = self._folders.get(location.parent, ()) if location.key else ()
        if entries and location.name in KNOWN_NAMES and all(entry.name != location.name for entry in entries):
            return None
        answer = self._answer(location)
        if isinstance(answer, HeadAnswer) and not answer.is_folder:
            return answer.pin
        if self._entries(location):
            return FileKind.FOLDER
        self._refuse_unclear(location)
        return None

    def _refuse_unclear(self, location: Location) -> None:
        """Raise where nothing can be told of a location, because its server refuses to be asked."""
        answer = self._answer(location)
        if isinstance(answer, RequestFailed):
            message = f"its server answered {answer.detail}"
            raise StorageError.of("storage.permission", location, message, "check that it may be read")

    def _source(self, location: Location) -> Source:
        answer = self._answer(location)
        assert isinstance(answer, HeadAnswer)
        return _WebSource(location, answer, self._http)

    def _entries(self, folder: Location) -> tuple[Entry, ...]:
        if folder not in self._folders:
            answers = self._transfers.run_all([partial(self._answer, folder / name) for name in KNOWN_NAMES])
            for name in KNOWN_NAMES if None in answers else ():  # where it tells what is missing, the others are there
                self._refuse_unclear(folder / name)
            names = {
                name
                for name, answer in zip(KNOWN_NAMES, answers, strict=True)
                if isinstance(answer, HeadAnswer) and not answer.is_folder
            }
            for name in names.intersection(INDEX_NAMES):
                names |= self._indexed_names(folder / name)
            with self._lock:
                self._folders[folder] = tuple(Entry(name, FileKind.FILE) for name in sorted(names))
        return self._folders[folder]

    def _indexed_names(self, index: Location) -> set[str]:
        """The weight files that an index names, found without parsing the whole: its reader tells whether it is sound.

        Memory: the index, and its different names.
        """
        try:
            quoted = {match[1] for match in _INDEXED.finditer(self.read_small(index, WEIGHT_INDEX_BYTES))}
        except CorruptError:  # it is too large
            return set()
        names = set()
        for text in quoted:
            with contextlib.suppress(ValueError):
                names.add(json.loads(text))
        return {name for name in names if _is_name(name)}

    def _answer(self, location: Location) -> HeadAnswer | RequestFailed | None:
        """The first answer to HEAD of a location, kept; None where there is no file, a failure where it is unclear."""
        with self._lock:
            if location in self._answers:
                return self._answers[location]
        answer = self._transfers.ask(location, lambda: self._head(location))
        with self._lock:  # another thread may have asked meanwhile: the first answer stays
            return self._answers.setdefault(location, answer)

    def _head(self, location: Location) -> HeadAnswer | RequestFailed | None:
        try:
            answer = self._http.head(_address(location))
        except RequestFailed as error:
            if error.status in _MISSING:
                return None
            if error.status in _UNCLEAR:
                return error.with_traceback(None)
            raise
        if not (answer.is_folder or answer.pin.names_version):
            raise RequestFailed(FailureKind.UNUSABLE, _NO_VERSION)
        return answer


class _WebSource:
    """One pinned file, read from where its address led when it was looked up."""

    def __init__(self, location: Location, answer: HeadAnswer, http: HttpClient) -> None:
        self.location = location
        self._answer = answer
        self._http = http

    def fetch(self, offset: int, buffer: memoryview) -> None:
        """Make one request. Raises RequestFailed."""
        self._http.read_range(self._answer.address, offset, buffer, self._answer.pin)

    def renew(self) -> bool:
        """Follow the redirects again; False where there were none."""
        original = _address(self.location)
        if self._answer.address.url == original.url:
            return False
        answer = self._http.head(original)
        difference = self._answer.pin.difference(answer.pin)
        if difference:
            raise RequestFailed(FailureKind.CHANGED, difference)
        self._answer = HeadAnswer(self._answer.pin, answer.address, is_folder=False)
        return True


def _is_name(name: str) -> bool:
    """Whether a text can be the name of a file: half of a surrogate pair has no address."""
    return not any(character in "/\0" or "\ud800" <= character <= "\udfff" for character in name)


def _address(location: Location) -> Address:
    return Address(f"{location.scheme}://{location.root}/{quote(location.key)}")
