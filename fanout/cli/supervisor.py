"""The parent of worker processes: starts them, again if need be, and passes on orders to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from .channel import STOP_SIGNALS, Word
from .exits import Exit

__all__ = ["Supervisor"]

_log = logging.getLogger("fanout.supervisor")

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0
LIVED_SECONDS: Final = 10.0
"""A process that lived this long is not in a crash loop: the next pause is the first one again."""
KILL_SECONDS: Final = 4.0
"""How long a process has after a hard stop; a second more than it gives itself."""
BAD_INPUT: Final = frozenset({Exit.USAGE, Exit.DATABASE})


class Supervisor:
    """Keeps `count` processes running until `stop()`; `command(index, fd)` is what to execute.

    `on_ready()` is called once, when all of them work.
    """

    def __init__(
        self,
        count: int,
        command: Callable[[int, int], Sequence[str]],
        environment: Mapping[str, str],
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._count = count
        self._command = command
        self._environment = environment
        self._on_ready = on_ready
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._imported = asyncio.Event()
        self._ready: set[int] = set()
        self._said_ready = False
        self._channels: dict[int, socket.socket] = {}
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._code: int = Exit.FINE
        self._signal = 0
        self.restarts = 0
        """How often a process ended that nobody had told to."""

    # -- orders ------------------------------------------------------------------------------------

    def handle_signals(self) -> None:
        """The first SIGTERM, SIGINT or SIGHUP is `stop`, the second `kill`."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stopping.is_set():
            self._signal = number
            self.kill()
        else:
            self.stop()

    def stop(self) -> None:
        """Tell all to stop gracefully; `run` returns when they have. Again is fine."""
        self._stopping.set()
        self._imported.set()
        self._tell(Word.STOP)

    def kill(self) -> None:
        """Tell all to stop now; who does not within seconds is killed. Again is fine."""
        self._stopping.set()
        self._imported.set()
        self._killing.set()
        self._tell(Word.KILL)

    def _tell(self, word: Word) -> None:
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.sendall(word.value)

    # -- running -----------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run until all have stopped. Returns the exit code."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep(0))
            # The others wait: a wrong --app is then told once, not by each of them.
            await self._imported.wait()
            if not self._stopping.is_set():
                for index in range(1, self._count):
                    group.create_task(self._keep(index))
        return 128 + self._signal if self._signal else self._code

    async def _keep(self, index: int) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            started_at = time.monotonic()
            try:
                code = await self._once(index)
            except OSError as error:  # no memory or no process to be had: perhaps later
                _log.error("worker process %d cannot be started: %s", index, error)
                code = Exit.WRONG
            lived = time.monotonic() - started_at
            if self._stopping.is_set():
                return
            if code in BAD_INPUT and not self._said_ready:
                self._code = code  # it has said why; another one would say the same
                self.stop()
                return
            self.restarts += 1
            if lived >= LIVED_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            _log.warning(
                "worker process %d %s after %.1f s, it is started again in %.1f s",
                index, _said(code), lived, pause,
            )  # fmt: skip
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._stopping.wait()
            pause = min(LONGEST_PAUSE_SECONDS, pause * 2)

    async def _once(self, index: int) -> int:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(0)
            with theirs:
                # A session of its own: Ctrl-C reaches the supervisor alone, which passes it on.
                process = await asyncio.create_subprocess_exec(
                    *self._command(index, theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    env=dict(self._environment),
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            self._channels[index], self._processes[index] = ours, process
            if self._stopping.is_set():
                self._tell(Word.STOP)
            listening = asyncio.create_task(self._listen(index, ours))
            killing = asyncio.create_task(self._kill_late(process))
            try:
                return await process.wait()
            finally:
                killing.cancel()
                listening.cancel()
                await asyncio.wait([killing, listening])
                del self._channels[index], self._processes[index]
                self._ready.discard(index)

    async def _listen(self, index: int, channel: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # reset: it died with our word unread
            while heard := await loop.sock_recv(channel, 1):
                self._imported.set()
                if heard == Word.READY.value:
                    self._is_ready(index)

    def _is_ready(self, index: int) -> None:
        self._ready.add(index)
        if len(self._ready) == self._count and not self._said_ready:
            self._said_ready = True
            self._on_ready()

    async def _kill_late(self, process: asyncio.subprocess.Process) -> None:
        await self._killing.wait()
        await asyncio.sleep(KILL_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def _said(code: int) -> str:
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    if code == Exit.START_AGAIN:
        return "could not stop a handler, and ended"
    return f"ended with exit code {code}"


def environment(dsn: str | None) -> dict[str, str]:
    """What worker processes find in their environment: `ps` would show a password in arguments."""
    return {**os.environ, "DATABASE_URL": dsn} if dsn else dict(os.environ)


def python(*arguments: str) -> list[str]:
    """This program again, with other arguments."""
    return [sys.executable, "-m", "fanout", *arguments]
