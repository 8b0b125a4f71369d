"""How a supervisor and its worker process talk: one socket, one byte a message.

    supervisor ── s: stop ── k: stop now ──▶ process
    process    ── i: the app is imported ── r: ready, it claims ──▶ supervisor

The end of the socket says that the other one is gone, however it died. Signals would not do: a
service manager sends them to parent and children alike, and a child could not tell a second one
from a copy of the first.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from enum import Enum
from typing import Final

__all__ = ["Channel", "Word"]


class Word(bytes, Enum):
    """The messages."""

    STOP = b"s"
    KILL = b"k"
    IMPORTED = b"i"
    READY = b"r"


class Channel:
    """The process's end. `on_stop()` and `on_kill()` are called in a thread of its own."""

    def __init__(self, fd: int, on_stop: Callable[[], None], on_kill: Callable[[], None]) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.settimeout(None)
        self._on_stop = on_stop
        self._on_kill = on_kill
        threading.Thread(target=self._listen, name="fanout supervisor", daemon=True).start()

    def say(self, word: Word) -> None:
        """Tell the supervisor; one that is gone does not matter."""
        try:
            self._socket.sendall(word.value)
        except OSError:
            return

    def _listen(self) -> None:
        while True:
            try:
                heard = self._socket.recv(1)
            except OSError:
                heard = b""
            if heard == Word.KILL.value:
                self._on_kill()
                return
            self._on_stop()
            if not heard:
                return


def exit_in(seconds: float, code: int) -> None:
    """End this process in `seconds`, whatever it does: a thread that hangs cannot be joined."""
    clock = threading.Timer(seconds, os._exit, (code,))
    clock.daemon = True
    clock.start()


STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
