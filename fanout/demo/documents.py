"""Find documents, name them safely, and take the snapshot that a child job carries.

What a person expects of `discover`:

- A file named outright is always yielded, also when its kind cannot be read: it then fails with
  the reason, where a silent skip would look like success.
- In a folder, documents are taken and the rest is passed over: code, images, archives, data.
  Documents of a kind this demo cannot read (.doc, .odt, .epub ...) are taken too, and fail.
- Hidden files and folders, `node_modules`, `__pycache__` and virtual environments are passed over,
  unless named outright. A link is followed; no folder is walked twice, no file is yielded twice.
- A path that does not exist is the caller's mistake: `BadPath`, before anything is yielded.
"""

import contextlib
import hashlib
import importlib.metadata
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import quote_from_bytes, unquote_to_bytes

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

__all__ = [
    "BadPath",
    "DocumentFile",
    "MediaKind",
    "Snapshot",
    "UnreadableDocument",
    "discover",
    "display_name",
    "installed_documents",
    "kind_of",
    "path_of",
    "readable",
    "sha256_of",
    "snapshot",
    "storage_key",
]


class MediaKind(StrEnum):
    """How a document is read, told from its name alone."""

    PDF = "pdf"
    HTML = "html"
    MARKDOWN = "markdown"
    RST = "rst"
    TEXT = "text"
    DOCX = "docx"
    METADATA = "metadata"
    """A Python package's METADATA or PKG-INFO: headers, then a readme in their own markup."""
    UNSUPPORTED = "unsupported"

    @property
    def media_type(self) -> str:
        """The media type, as `text/html`."""
        return _MEDIA_TYPES[self]

    @property
    def limit_bytes(self) -> int:
        """Size in bytes above which a file of this kind is refused unread."""
        return _LIMIT_BYTES[self]


_MEDIA_TYPES: Final = {
    MediaKind.PDF: "application/pdf",
    MediaKind.HTML: "text/html",
    MediaKind.MARKDOWN: "text/markdown",
    MediaKind.RST: "text/x-rst",
    MediaKind.TEXT: "text/plain",
    MediaKind.DOCX: "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    MediaKind.METADATA: "text/x-python-metadata",
    MediaKind.UNSUPPORTED: "application/octet-stream",
}

_MEBIBYTE: Final = 1024 * 1024
# A document at its limit takes a few seconds of one core; docutils reads 0.2 MB a second,
# markdown-it 0.7, and both hold a tree of Python objects some fifty times the text's size.
_LIMIT_BYTES: Final = {
    MediaKind.PDF: 128 * _MEBIBYTE,
    MediaKind.HTML: 16 * _MEBIBYTE,
    MediaKind.MARKDOWN: 2 * _MEBIBYTE,
    MediaKind.RST: 1 * _MEBIBYTE,
    MediaKind.TEXT: 8 * _MEBIBYTE,
    MediaKind.DOCX: 64 * _MEBIBYTE,
    MediaKind.METADATA: 1 * _MEBIBYTE,
    MediaKind.UNSUPPORTED: 128 * _MEBIBYTE,
}

_KIND_BY_SUFFIX: Final = {
    ".pdf": MediaKind.PDF,
    ".html": MediaKind.HTML,
    ".htm": MediaKind.HTML,
    ".xhtml": MediaKind.HTML,
    ".md": MediaKind.MARKDOWN,
    ".markdown": MediaKind.MARKDOWN,
    ".rst": MediaKind.RST,
    ".rest": MediaKind.RST,
    ".txt": MediaKind.TEXT,
    ".text": MediaKind.TEXT,
    ".docx": MediaKind.DOCX,
}
SUPPORTED_SUFFIXES: Final = tuple(sorted(_KIND_BY_SUFFIX))
"""The suffixes that can be read, for messages."""

_FOREIGN_DOCUMENTS: Final = frozenset(
    f".{suffix}"
    for suffix in re.findall(
        r"\w+",
        "adoc asciidoc djvu doc docm dot dotx epub key mobi numbers odp ods odt org pages ppt pptx"
        " ps rtf tex wpd xls xlsx",
    )
)
_PLAIN_TEXT_NAMES: Final = re.compile(
    r"(authors|changelog|changes|code_of_conduct|contributing|contributors|copying|copyright"
    r"|faq|history|install|licen[cs]es?|news|notice|readme|thanks|todo|unlicense)"
    r"([-_.][\w.+-]*)?",
    re.IGNORECASE,
)
_INSTALLED_NAMES: Final = re.compile(
    r"(authors|changelog|changes|copying|copyright|history|licen[cs]es?|notice|readme|unlicense)"
    r"([-_.].*)?",
    re.IGNORECASE,
)
_METADATA_NAMES: Final = frozenset({"METADATA", "PKG-INFO"})
_CODE_SUFFIXES: Final = frozenset(
    f".{suffix}"
    for suffix in re.findall(
        r"\w+",
        "bat c cfg cpp css csv gz h ini ipynb js json lock o png py pyc pyi sh so svg tar toml ts"
        " xml yaml yml zip",
    )
)
_PASSED_OVER_FOLDERS: Final = frozenset({"__pycache__", "node_modules"})

SNAPSHOT_LIMIT_BYTES: Final = 1000
"""Most bytes of a snapshot as JSON in UTF-8, below the 1,024 that a payload may have."""
_NAME_LIMIT_BYTES: Final = 240
_BYTES_PREFIX: Final = "bytes:"
# These reorder what follows them: in a terminal or a report, `gpj.exe` can read as `exe.jpg`.
_REORDERING: Final = frozenset(
    "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
)


class BadPath(ValueError):
    """A path handed to `discover` that cannot be one: the caller's mistake, not a document's."""

    def __init__(self, path: Path, reason: str) -> None:
        """Name `path` as it may be shown, and say what is wrong with it."""
        self.path = path
        self.reason = reason
        super().__init__(f"{display_name(path)}: {reason}")


class UnreadableDocument(Exception):
    """This document cannot be read, now or on a second try; `str()` is a reason for a person."""


@dataclass(frozen=True, slots=True)
class DocumentFile:
    """One document found, unopened."""

    path: Path
    """Where it is, absolute."""
    name: str
    """What to show: valid Unicode, no control characters, at most some 240 bytes."""
    size_bytes: int
    """Size when found; 0 where `problem` says why it could not be asked for."""
    modified_ns: int
    """Time of the last change, nanoseconds since 1970; 0 where it could not be asked for."""
    kind: MediaKind
    """How it would be read."""
    problem: str | None = None
    """Why it cannot be read, when that is known already: a link to nowhere, a closed folder."""


class Snapshot(BaseModel):
    """What a child job carries: enough to find the document and to see that it changed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    """The path, losslessly; `path_of` turns it back."""
    name: str
    """The path, fit to be shown."""
    kind: MediaKind
    """How to read it."""
    size_bytes: int
    """Size when the snapshot was taken."""
    sha256: str
    """Hash of its content then, 64 hexadecimal digits."""


def kind_of(path: Path) -> MediaKind:
    """Tell from its name how the document would be read; the file is not opened."""
    if path.name in _METADATA_NAMES:
        return MediaKind.METADATA
    suffix = path.suffix.lower()
    if suffix in _KIND_BY_SUFFIX:
        return _KIND_BY_SUFFIX[suffix]
    plain = _PLAIN_TEXT_NAMES.fullmatch(path.name) and suffix not in (
        _CODE_SUFFIXES | _FOREIGN_DOCUMENTS
    )
    return MediaKind.TEXT if plain else MediaKind.UNSUPPORTED


def display_name(path: Path | str) -> str:
    """Render a path for people: what is not text, or would disturb a terminal, becomes U+FFFD.

    A name too long for a snapshot loses its beginning, as `…/folder/file.pdf`.
    """
    text = os.fsencode(path).decode("utf-8", "replace")
    shown = "".join("\ufffd" if _disturbs(character) else character for character in text)
    if _json_bytes(shown) <= _NAME_LIMIT_BYTES:
        return shown
    tail = shown[-_NAME_LIMIT_BYTES:]
    while _json_bytes("…" + tail) > _NAME_LIMIT_BYTES:
        tail = tail[1:]
    return "…" + tail


def _disturbs(character: str) -> bool:
    return character in _REORDERING or unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}


def _json_bytes(value: object) -> int:
    return len(to_json(value))


def storage_key(path: Path) -> str:
    """Render an absolute path as text without loss, fit for JSON and PostgreSQL.

    A path that is text stays as it is; one with bytes that are not UTF-8 becomes `bytes:` and the
    path with those bytes escaped as in a URL.
    """
    raw = os.fsencode(path)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return _BYTES_PREFIX + quote_from_bytes(raw, safe="/ ")


def path_of(key: str) -> Path:
    """Turn a `storage_key` back into the path it was made from."""
    if key.startswith(_BYTES_PREFIX):
        return Path(os.fsdecode(unquote_to_bytes(key.removeprefix(_BYTES_PREFIX))))
    return Path(key)


@contextlib.contextmanager
def readable() -> Iterator[None]:
    """Turn the errors of a path that stay so into `UnreadableDocument`; let others through.

    A disk error or too many open files pass: they may be gone on the next try.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnreadableDocument("the file is gone") from error
    except PermissionError as error:
        raise UnreadableDocument("permission denied") from error
    except IsADirectoryError as error:
        raise UnreadableDocument("a folder, not a file") from error


def sha256_of(path: Path) -> str:
    """Hash a file's content in chunks: 64 hexadecimal digits.

    Raises:
        UnreadableDocument: it is gone, closed to this user, or not a regular file.
        OSError: the disk failed; a later try may work.

    """
    with readable():
        if not stat.S_ISREG(path.stat().st_mode):
            raise UnreadableDocument("not a regular file")
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def snapshot(document: DocumentFile) -> Snapshot:
    """Read the document's size and hash now, for a job payload under 1 KB.

    Raises:
        UnreadableDocument: it is gone, closed, too large to be read, or its path is too long.
        OSError: the disk failed; a later try may work.

    """
    if document.problem is not None:
        raise UnreadableDocument(document.problem)
    with readable():
        size_bytes = document.path.stat().st_size
    check_size(size_bytes, document.kind)
    taken = Snapshot(
        key=storage_key(document.path),
        name=document.name,
        kind=document.kind,
        size_bytes=size_bytes,
        sha256=sha256_of(document.path),
    )
    length = _json_bytes(taken)
    if length > SNAPSHOT_LIMIT_BYTES:
        raise UnreadableDocument(
            f"the path is too long: the job would carry {length:,} bytes, the limit is "
            f"{SNAPSHOT_LIMIT_BYTES:,}; move the file nearer to the root"
        )
    return taken


def check_size(size_bytes: int, kind: MediaKind) -> None:
    """Refuse a file above its kind's limit.

    Raises:
        UnreadableDocument: it is larger.

    """
    if size_bytes > kind.limit_bytes:
        raise UnreadableDocument(
            f"too large: {_megabytes(size_bytes)}, the limit for {kind} is "
            f"{_megabytes(kind.limit_bytes)}"
        )


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / _MEBIBYTE:,.1f} MiB"


def discover(paths: Sequence[Path]) -> Iterator[DocumentFile]:
    """Find the documents at `paths`, files or folders, in an order that depends on names alone.

    Nothing is opened. A folder's listing is held at a time, and the paths already yielded.
    `name` is the path as given, with what was found below it, as grep prints it.

    Raises:
        BadPath: a path does not exist, or is neither file nor folder; raised at once, before the
            first document.

    """
    for path in paths:
        _check_exists(path)
    return _unique(document for path in paths for document in _found_at(path))


def _check_exists(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise BadPath(path, reason[0].lower() + reason[1:]) from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise BadPath(path, "neither a file nor a folder")


def _found_at(given: Path) -> Iterator[DocumentFile]:
    if given.is_dir():
        yield from _walk(given)
    else:
        yield _describe(given)


def _walk(root: Path) -> Iterator[DocumentFile]:
    pending, seen = [root], set[tuple[int, int]]()
    while pending:
        folder = pending.pop()
        try:
            facts = folder.stat()
            if (facts.st_dev, facts.st_ino) in seen:
                continue
            seen.add((facts.st_dev, facts.st_ino))
            with os.scandir(folder) as listing:
                entries = sorted(listing, key=lambda entry: os.fsencode(entry.name))
        except OSError as error:
            yield _unlistable(folder, error)
            continue
        visible = [entry for entry in entries if not entry.name.startswith(".")]
        yield from (_describe(Path(entry)) for entry in visible if _is_wanted(entry))
        pending.extend(Path(entry) for entry in reversed(visible) if _is_walked(entry))


def _is_wanted(entry: os.DirEntry[str]) -> bool:
    # os.path and not the entry's own tests: those raise on a link to itself or a closed folder.
    if not os.path.isfile(entry) and not _leads_nowhere(entry):  # noqa: PTH113
        return False
    path = Path(entry)
    return kind_of(path) is not MediaKind.UNSUPPORTED or path.suffix.lower() in _FOREIGN_DOCUMENTS


def _leads_nowhere(entry: os.DirEntry[str]) -> bool:
    return entry.is_symlink() and not os.path.exists(entry)  # noqa: PTH110


def _is_walked(entry: os.DirEntry[str]) -> bool:
    return (
        os.path.isdir(entry)  # noqa: PTH112
        and entry.name not in _PASSED_OVER_FOLDERS
        and not os.path.exists(Path(entry) / "pyvenv.cfg")  # noqa: PTH110
    )


def _describe(path: Path, name: str | None = None) -> DocumentFile:
    problem, size_bytes, modified_ns = None, 0, 0
    try:
        facts = path.stat()
        size_bytes, modified_ns = facts.st_size, facts.st_mtime_ns
    except FileNotFoundError:
        problem = "the link leads nowhere" if path.is_symlink() else "the file is gone"
    except OSError as error:
        problem = (error.strerror or "cannot be read").lower()
    return DocumentFile(
        path=Path(os.path.abspath(path)),  # noqa: PTH100 - resolve() would lose the link's name
        name=name if name is not None else display_name(path),
        size_bytes=size_bytes,
        modified_ns=modified_ns,
        kind=kind_of(path),
        problem=problem,
    )


def _unlistable(folder: Path, error: OSError) -> DocumentFile:
    return DocumentFile(
        path=Path(os.path.abspath(folder)),  # noqa: PTH100
        name=display_name(folder),
        size_bytes=0,
        modified_ns=0,
        kind=MediaKind.UNSUPPORTED,
        problem=f"the folder cannot be listed: {(error.strerror or 'error').lower()}",
    )


def _unique(documents: Iterable[DocumentFile]) -> Iterator[DocumentFile]:
    seen = set[str]()
    for document in documents:
        real = os.path.realpath(document.path)
        if real not in seen:
            seen.add(real)
            yield document


def installed_documents() -> Iterator[DocumentFile]:
    """Find the readmes, metadata and licences of the packages installed here, ordered by package.

    Reads what each package says it installed; the documents themselves are not opened. Packages
    inside an archive, and files that are no longer there, are passed over.
    """
    distributions = sorted(
        importlib.metadata.distributions(),
        key=lambda found: (str(found.metadata["Name"] or "").lower(), found.version or ""),
    )
    return _unique(
        _describe(path, display_name(str(file)))
        for distribution in distributions
        for file in sorted(distribution.files or (), key=str)
        if _is_about_the_package(file)
        and (path := Path(str(distribution.locate_file(file)))).is_file()
    )


def _is_about_the_package(file: importlib.metadata.PackagePath) -> bool:
    name, suffix = file.name, file.suffix.lower()
    if name in _METADATA_NAMES:
        return True
    if kind_of(Path(name)) is MediaKind.UNSUPPORTED:
        return False
    return _INSTALLED_NAMES.fullmatch(name) is not None or suffix in {".md", ".rst"}
