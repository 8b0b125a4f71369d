"""Benchmarks: `python -m benchmarks list | run SCENARIO … | compare A.json B.json`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from . import report
from .facts import NotDurable
from .harness import CONTENDERS
from .scenarios import dead_prefix, fan_out, levels, limits, notify, scales, sse_relay
from .workload import Workload

if TYPE_CHECKING:
    from types import ModuleType

SCENARIOS: dict[str, ModuleType] = {
    module.NAME: module
    for module in (fan_out, scales, levels, dead_prefix, limits, sse_relay, notify)
}


def main() -> int:
    """Do what the command line says. Exit code 2: it is nonsense, or the server is not durable."""
    parser = _parser()
    options = parser.parse_args()
    match options.verb:
        case "list":
            for name, module in SCENARIOS.items():
                print(f"{name:12} {(module.__doc__ or '').splitlines()[0]}")
        case "compare":
            first, second = (json.loads(file.read_text()) for file in options.files)
            names = options.files[0].stem, options.files[1].stem
            report.show_comparison(names, (first, second))
        case _:
            return _run(parser, options)
    return 0


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    workload = Workload(
        children=options.children,
        batches=options.batches,
        payload_bytes=options.payload_bytes,
        chunk_size=options.chunk_size,
        claim_limit=options.claim_limit,
        concurrency=options.concurrency,
        prefetch=options.prefetch,
    )
    if options.children < options.batches:
        parser.error(f"--children {options.children} is less than one for each of the batches")
    told = Console(stderr=True)
    arguments: dict[str, Any] = {
        "workers": options.workers,
        "rounds": options.rounds,
        "dsn": options.dsn,
        "tell": lambda line: told.print(line, style="dim", highlight=False),
    }
    match options.scenario:
        case fan_out.NAME:
            skip = {name for name in options.skip.split(",") if name}
            if unknown := skip - set(CONTENDERS):
                parser.error(f"--skip {min(unknown)}: there are {', '.join(CONTENDERS)}")
            arguments |= {"pickups": options.pickups, "skip": skip}
        case dead_prefix.NAME:
            arguments |= {"finished_rows": options.finished_rows}
        case notify.NAME:
            arguments |= {"clients": options.clients}
        case _:
            pass
    try:
        if options.scenario == sse_relay.NAME:
            made = asyncio.run(_relayed(parser, options, arguments))
        else:
            made = asyncio.run(SCENARIOS[options.scenario].run(workload, **arguments))
    except NotDurable as refused:
        parser.error(str(refused))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(made, indent=1) + "\n")
    report.show(made)
    return 0


async def _relayed(
    parser: argparse.ArgumentParser, options: argparse.Namespace, arguments: dict[str, Any]
) -> dict[str, Any]:
    skip = {name for name in options.skip.split(",") if name}
    if unknown := skip - set(sse_relay.CONTENDERS):
        parser.error(f"--skip {min(unknown)}: there are {', '.join(sse_relay.CONTENDERS)}")
    del arguments["workers"]
    size = sse_relay.Size(options.clients, options.many, options.seconds, options.burst)
    return await sse_relay.run(size, skip=skip, **arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("list", help="what can be run")
    compare = verbs.add_parser("compare", help="two reports side by side")
    compare.add_argument("files", nargs=2, type=Path, metavar="FILE.json")
    run = verbs.add_parser(
        "run", help="measure", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    run.add_argument("scenario", choices=list(SCENARIOS))
    default = Workload(children=10_000)
    run.add_argument(
        "--children", type=_positive, default=default.children, help="over all batches"
    )
    run.add_argument("--batches", type=_positive, default=default.batches, help="submitted at once")
    run.add_argument("--workers", type=_positive, default=2, help="worker processes")
    run.add_argument("--rounds", type=_positive, default=3, help="of each contender, interleaved")
    run.add_argument("--skip", default="", help="contenders left out, separated by commas")
    run.add_argument("--pickups", type=int, default=150, help="single jobs to idle workers")
    run.add_argument(
        "--finished-rows", type=_positive, default=200_000, help="dead_prefix: how many"
    )
    size = sse_relay.Size()
    run.add_argument("--clients", type=_several, default=size.clients, help="that watch")
    run.add_argument(
        "--many", type=int, default=size.many, help="sse_relay: clients of its last run"
    )
    run.add_argument("--burst", type=_positive, default=size.burst, help="sse_relay: lines at once")
    run.add_argument(
        "--seconds", type=float, default=size.seconds, help="sse_relay: of a look at one rate"
    )
    run.add_argument(
        "--payload-bytes", type=int, default=default.payload_bytes, help="at most 1024"
    )
    run.add_argument("--chunk-size", type=_positive, default=default.chunk_size, help="a dispatch")
    run.add_argument(
        "--claim-limit", type=_positive, default=default.claim_limit, help="and a flush"
    )
    run.add_argument(
        "--concurrency", type=_positive, default=default.concurrency, help="handlers in a process"
    )
    run.add_argument("--prefetch", type=int, default=default.prefetch, help="jobs claimed ahead")
    run.add_argument(
        "--dsn", help="a server whose role may create databases; default: a private one"
    )
    run.add_argument("--json", type=Path, metavar="FILE", help="where the report goes")
    return parser


def _several(text: str) -> int:
    number = _positive(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text} is not 2 or more")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
