"""`demo`: fan out over real documents, live; database and workers live as long as the command."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from fanout.errors import UsageError

from .api import DEFAULT_PORT
from .database import checked
from .demo_run import Ask, DemoRun, Parser
from .demo_summary import tell
from .exits import Exit

__all__ = ["demo"]

LIBRARIES: Final = (
    "charset_normalizer",
    "docutils",
    "docx",
    "lxml",
    "markdown_it",
    "py3langid",
    "pypdf",
    "regex",
    "stop_words",
)

PARSER_LIBRARIES: Final = ("httpx",)
PARSER_DOCUMENTS: Final = 60


def demo(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...",
            help="Files and folders: PDF, HTML, Markdown, reStructuredText, text, DOCX. "
            "Default: readmes, metadata and licences of the installed packages.",
            show_default=False,
        ),
    ] = None,
    dsn: Annotated[
        str | None,
        typer.Option(
            help="A database of your own, instead of the embedded PostgreSQL.", show_default=False
        ),
    ] = None,
    *,
    workers: Annotated[
        int, typer.Option("--workers", "-n", min=1, max=64, help="Worker processes.")
    ] = 2,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results and report. Default: fanout-demo; of --parser, "
            "fanout-demo-parser.",
            show_default=False,
        ),
    ] = None,
    most: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help=f"The first N documents only. Default: all; of --parser, {PARSER_DOCUMENTS}.",
            show_default=False,
        ),
    ] = None,
    parser: Annotated[
        bool,
        typer.Option(
            "--parser",
            help="Send them through a stand-in for a paid parser and an LLM: slow, two at a time, "
            "failing now and then, away for a while. Takes about a minute.",
        ),
    ] = False,
    parse_seconds: Annotated[
        float,
        typer.Option(min=0.02, max=600, help="Of --parser: how long it takes for one document."),
    ] = 1.0,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0.01, help="Of --parser: dollars that end the batch.", show_default="none"
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew, and read also what was read before.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help=f"Of the page, on 127.0.0.1. Default: {DEFAULT_PORT}, or any that is free.",
            show_default=False,
        ),
    ] = None,
    keep_open: Annotated[
        bool,
        typer.Option(
            "--keep-open", help="Leave database, page and workers running at the end, until Ctrl-C."
        ),
    ] = False,
) -> int:
    """Fan out over real documents: one child each, live progress, a page, results, a report.

    Run it again: what is unchanged is not read twice. Ctrl-C, and run it again: it goes on where it
    was. Documents that cannot be read do not make it fail: the exit code is 0 when the batch
    completes. Nothing is left running, unless --keep-open asks for it.
    """
    libraries = LIBRARIES + (PARSER_LIBRARIES if parser else ())
    if missing := [name for name in libraries if find_spec(name) is None]:
        raise UsageError(
            "demo", f"not installed: {', '.join(missing)}", 'pip install "pgfanout[demo,embedded]"'
        )
    folder = (results or Path("fanout-demo-parser" if parser else "fanout-demo")).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            "results", f"{folder} cannot be made: {error.strerror}", "Name a folder of your own"
        ) from None
    ask = Ask(
        tuple(paths or ()),
        checked(dsn, "--dsn"),
        workers,
        folder,
        fresh,
        port,
        keep_open,
        most if most is not None or not parser else PARSER_DOCUMENTS,
        Parser(parse_seconds, budget) if parser else None,
    )
    code = asyncio.run(_run(ask))
    return Exit.INTERRUPTED if code is None else code


async def _run(ask: Ask) -> int | None:
    return await DemoRun(ask, tell).run()
