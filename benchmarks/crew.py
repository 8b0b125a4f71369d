"""Worker processes seen from outside: start them, tell all of them something, end them."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from .facts import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from .workload import Workload

END_SECONDS = 30.0


class Crew:
    """Processes of one contender. The first leads: it dispatches where there is no manager."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    async def prepare(self, sizes: list[int]) -> None:
        """Have ready what is not to be measured."""
        await asyncio.gather(
            *(
                self._ask(process, {"do": "prepare", "sizes": sizes, "leads": n == 0})
                for n, process in enumerate(self._processes)
            )
        )

    async def go(self, parents: list[int]) -> None:
        """Let all begin."""
        await self._ask_all({"do": "go", "parents": parents})

    async def halt(self) -> list[dict[str, Any]]:
        """Let all finish, and tell what they did."""
        return await self._ask_all({"do": "halt"})

    async def _ask_all(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        return await asyncio.gather(*(self._ask(process, command) for process in self._processes))

    async def _ask(
        self, process: asyncio.subprocess.Process, command: dict[str, Any]
    ) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(json.dumps(command).encode() + b"\n")
        return await _answer(process)


@asynccontextmanager
async def crew(module: str, dsn: str, workload: Workload, size: int) -> AsyncIterator[Crew]:
    """`size` processes of `module`, all ready; ended, by force if need be, after the block."""
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, dsn, json.dumps(workload.as_json())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            limit=1 << 26,
        )
        for _ in range(size)
    ]
    try:
        await asyncio.gather(*(_answer(process) for process in processes))
        yield Crew(processes)
    finally:
        await asyncio.gather(*(_end(process) for process in processes))


async def _answer(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a worker process ended with code {await process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


async def _end(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
