"""The first customer's job: a slow, expensive parser, then an LLM, both with limits of their own.

    demo_parser_batch ── fans out ──▶ demo_parser_document ── the last one closes ──▶ …_report

The services are stand-ins on this machine (`service`); everything here is as it would be for real.
`fanout demo --parser` starts both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fanout import Closed, Document, Engine, Job, PermanentError

from . import paid
from .app import Reading, Selection
from .corpus import read_manifest
from .documents import Snapshot
from .outputs import Written, write_outputs
from .terms import Access, Parsed, Prompt

__all__ = [
    "Summarized",
    "demo_parser_batch",
    "demo_parser_document",
    "demo_parser_report",
    "engine",
]

engine = Engine()


class Summarized(Reading):
    """What is known of a document in the end."""

    summary: str
    pages: int
    tokens: int
    cost: float
    """Of both services."""


@engine.job(limit=10, max_retries=8)
async def demo_parser_document(job: Job[Snapshot]) -> Summarized:
    """Parse one document, then have it summarized. What was paid for is kept, and added up."""
    access = Access.from_environment()
    rules = access.rules
    if job.checkpoint is None:
        async with job.limit("parser", rules.parse_at_once), job.timeout(access.timeout_seconds):
            parsed = await paid.parse(access, job.payload, job.key)
        await job.save_checkpoint(parsed.model_dump(mode="json"))
        job.add(pages=parsed.pages, cost=parsed.cost)
        job.log(f"parsed: {parsed.pages} pages, {parsed.document.title}")
    else:
        parsed = Parsed.model_validate(job.checkpoint)
        job.log("parsed by an earlier attempt: not paid again")
    prompt = Prompt(
        document=job.payload.key,
        title=parsed.document.title,
        key_terms=parsed.document.key_terms,
        tokens=parsed.tokens,
    )
    llm = job.limit(
        "llm",
        rules.llm_at_once,
        requests_per_minute=rules.llm_requests_per_minute,
        weight_per_minute=rules.llm_tokens_per_minute,
        weight=parsed.tokens,  # a guess: the answer is not in it
    )
    async with llm as slot, job.timeout(access.timeout_seconds):
        answer = await paid.summarize(access, prompt, job.key)
        slot.correct(answer.tokens)
    job.add(tokens=answer.tokens, cost=answer.cost)
    return Summarized(
        **parsed.document.model_dump(),
        summary=answer.summary,
        pages=parsed.pages,
        tokens=answer.tokens,
        cost=parsed.cost + answer.cost,
    )


@engine.job(timeout=600)
async def demo_parser_report(job: Job[Closed]) -> Written:
    """Write the results and the report of a batch that has closed."""
    selection = Selection.model_validate((await job.batch.job()).payload)
    written = await write_outputs(job.batch, await job.batch.progress(), Path(selection.results))
    Path(selection.manifest).unlink(missing_ok=True)  # noqa: ASYNC240 - one small file
    return written


@engine.job(on_closed=demo_parser_report)
async def demo_parser_batch(job: Job[Selection]) -> None:
    """Fan out: a child for each document of the manifest, read a line at a time."""
    try:
        await job.fan_out(demo_parser_document, _documents(Path(job.payload.manifest)))
    except FileNotFoundError as error:
        raise PermanentError("the list of documents is gone; run the demo again") from error


def _documents(manifest: Path) -> Iterator[Document]:
    for entry in read_manifest(manifest):
        yield Document(entry.key, entry.snapshot, gone=entry.gone)
