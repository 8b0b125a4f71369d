"""From paths to a corpus: every document's snapshot in one file, and a digest of all contents.

The same documents with the same contents give the same digest, and so the same batch.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from pydantic import BaseModel

from .documents import (
    DocumentFile,
    Snapshot,
    UnreadableDocument,
    discover,
    installed_documents,
    snapshot,
    storage_key,
)

__all__ = ["Corpus", "Entry", "read_manifest", "take_stock"]

MOST_KEY_BYTES: Final = 512
"""Of a child's key in its batch."""


class Entry(BaseModel):
    """One document of a corpus: a line of the manifest."""

    key: str
    """The child's key: the path, where it is not too long."""
    snapshot: Snapshot | None = None
    gone: str | None = None
    """Why there is no snapshot."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """What was found."""

    manifest: Path
    documents: int
    size_bytes: int
    """Of all documents that could be read."""
    digest: str
    """Of all paths and contents, 64 hexadecimal digits."""


def take_stock(
    paths: Sequence[Path],
    folder: Path,
    seen: Callable[[int], None] = lambda _: None,
    most: int | None = None,
) -> Corpus:
    """Hash every document at `paths` (none: the installed packages') into a manifest in `folder`.

    `seen(n)` is called after each. At most the first `most`; one document is held at a time.

    Raises:
        BadPath: a path does not exist.
        OSError: the folder cannot be written to.
    """
    found = discover(paths) if paths else installed_documents()
    folder.mkdir(parents=True, exist_ok=True)
    digest, count, size_bytes = hashlib.sha256(), 0, 0
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".manifest-", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            for count, document in enumerate(islice(found, most), start=1):
                entry = _entry(document)
                digest.update(_identity(entry))
                file.write(entry.model_dump_json() + "\n")
                size_bytes += entry.snapshot.size_bytes if entry.snapshot else 0
                seen(count)
        manifest = folder / f".manifest-{digest.hexdigest()[:16]}.jsonl"
        Path(temporary).replace(manifest)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return Corpus(manifest, count, size_bytes, digest.hexdigest())


def _entry(document: DocumentFile) -> Entry:
    key = storage_key(document.path)
    if len(key.encode()) > MOST_KEY_BYTES:
        key = f"{document.name} #{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    try:
        return Entry(key=key, snapshot=snapshot(document))
    except UnreadableDocument as error:
        return Entry(key=key, gone=str(error))
    except OSError as error:
        return Entry(key=key, gone=f"cannot be read: {(error.strerror or 'disk error').lower()}")


def _identity(entry: Entry) -> bytes:
    content = entry.snapshot.sha256 if entry.snapshot else f"gone: {entry.gone}"
    return json.dumps([entry.key, content]).encode()


def read_manifest(path: Path) -> Iterator[Entry]:
    """The documents of a manifest, a line at a time. Raises FileNotFoundError."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield Entry.model_validate_json(line)
