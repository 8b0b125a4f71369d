"""The inside of a worker process: commands come as JSON lines on standard input, answers go out."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, Protocol

from fanout.cli.serving import spare_collector

from .workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

try:
    import uvloop
except ImportError:
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop


class Member(Protocol):
    """One worker process of a contender."""

    async def prepare(self, *, sizes: list[int], leads: bool) -> dict[str, Any]:
        """Make ready what is not to be measured. Who leads dispatches batches of these sizes."""
        ...

    async def go(self, parents: list[int]) -> dict[str, Any]:
        """Begin to work on what is there and what will come. Returns at once."""
        ...

    async def halt(self) -> dict[str, Any]:
        """What was done and measured since `go`, all of it written."""
        ...


def run(make: Callable[[str, Workload], AbstractAsyncContextManager[Member]]) -> None:
    """The life of a worker process: made of its arguments, at command until the input ends."""
    dsn, workload = sys.argv[1], Workload.from_json(json.loads(sys.argv[2]))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve(make(dsn, workload)))


async def _serve(made: AbstractAsyncContextManager[Member]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with made as member:
        spare_collector()  # as `fanout worker` does
        _answer({"ready": True})
        while line := await reader.readline():
            command = json.loads(line)
            verb = command.pop("do")
            match verb:
                case "prepare":
                    _answer(await member.prepare(**command))
                case "go":
                    _answer(await member.go(**command))
                case "halt":
                    _answer(await member.halt())
                case _:
                    raise ValueError(verb)


def _answer(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()
