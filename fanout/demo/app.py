"""The demo's app: three handlers, as anyone would write them.

    demo_batch ── fans out ──▶ demo_extract, a document each ── the last one closes ──▶ demo_report

`fanout worker --app fanout.demo.app:engine` serves it like any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel

from fanout import Closed, Document, Engine, Job, PermanentError

from . import cache
from .corpus import Entry, read_manifest
from .documents import Snapshot, UnreadableDocument, path_of
from .extract import Extracted, extract
from .outputs import Written, write_outputs

__all__ = ["Reading", "Selection", "demo_batch", "demo_extract", "demo_report", "engine"]

engine = Engine()


class Selection(BaseModel):
    """What a batch is about: ids, not bodies. The list of documents lies in a file."""

    manifest: str
    """File with a line for each document."""
    results: str
    """Folder for what comes out."""
    fresh: bool = False
    """Read every document, also those that were read before."""


class Task(Snapshot):
    """The snapshot that one child reads."""

    fresh: bool = False
    """Read it even if its content was read before."""


class Reading(Extracted):
    """What was read in a document."""

    read_at: datetime | None = None
    """When its content was read before, in another batch or another document; None: now."""


@engine.job(timeout=300, permanent=(UnreadableDocument,))
def demo_extract(job: Job[Task]) -> Reading:
    """Read one document. A plain function, for it uses a core: it runs in a thread."""
    task = job.payload
    if not task.fresh and (earlier := job.from_thread(cache.look_up(engine, task))) is not None:
        result, read_at = earlier
        job.log(f"unchanged since it was read: {_said(result)}")
        return Reading(**result.model_dump() | {"name": task.name}, read_at=read_at)
    job.log(f"reads {task.size_bytes:,} bytes as {task.kind}", level="debug")
    found = extract(path_of(task.key), task.kind, name=task.name)
    job.from_thread(cache.keep(engine, task.kind, found))
    job.log(_said(found))
    return Reading(**found.model_dump())


def _said(found: Extracted) -> str:
    """For the log that the page shows."""
    return f"{found.words:,} words, {found.language}: {found.title}"


@engine.job(timeout=600)
async def demo_report(job: Job[Closed]) -> Written:
    """Write the results and the report of a batch that has closed."""
    handle = engine.handle(job.payload.job_id)
    selection = Selection.model_validate((await handle.job()).payload)
    written = await write_outputs(handle, await handle.progress(), Path(selection.results))
    # Not by the manager: should it die before its seal, its next run would miss the list.
    Path(selection.manifest).unlink(missing_ok=True)  # noqa: ASYNC240 - one small file
    return written


@engine.job(on_closed=demo_report)
async def demo_batch(job: Job[Selection]) -> None:
    """Fan out: a child for each document of the manifest, read a line at a time."""
    try:
        await job.fan_out(demo_extract, _documents(job.payload))
    except FileNotFoundError as error:
        raise PermanentError("the list of documents is gone; run the demo again") from error


def _documents(selection: Selection) -> Iterator[Document]:
    for entry in read_manifest(Path(selection.manifest)):
        yield _document(entry, fresh=selection.fresh)


def _document(entry: Entry, *, fresh: bool) -> Document:
    if entry.snapshot is None:
        return Document(entry.key, gone=entry.gone)
    return Document(entry.key, Task(**entry.snapshot.model_dump(), fresh=fresh))
