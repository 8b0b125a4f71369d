"""A process full of clients that read one stream of events each: raw sockets and one epoll.

Commands come as JSON lines on standard input, answers go out. Most clients read the same bytes, so
bytes are looked at once; each client's own part is one look-up, and a check that no line is
missing.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from typing import Any, Final

from benchmarks.lines import Read, read_of

AT_ONCE: Final = 100
"""Clients that connect at once."""
CONNECT_SECONDS: Final = 60.0
READ_BYTES: Final = 256 << 10
KNOWN_READS: Final = 20_000
STUCK_BUFFER_BYTES: Final = 4096


class Watchers:
    """The clients, and what they have read since the last `begin`."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._stuck: list[socket.socket] = []
        self._rests: dict[int, bytes] = {}
        self._next: dict[int, int] = {}
        self._buffer = b""
        self._begin(1, 0)

    def serve(self) -> None:
        """Do what standard input says, until it ends."""
        stdin = sys.stdin.fileno()
        self._poll.register(stdin, select.EPOLLIN)
        while True:
            for fd, _ in self._poll.poll(1.0):
                if fd != stdin:
                    self._read(fd)
                    continue
                data = sys.stdin.buffer.readline()
                if not data:
                    return
                command = json.loads(data)
                answer = getattr(self, command.pop("do"))(**command)
                sys.stdout.write(json.dumps(answer) + "\n")
                sys.stdout.flush()

    # -- commands --------------------------------------------------------------------------------

    def connect(self, port: int, path: str, clients: int, *, stuck: bool = False) -> dict[str, Any]:
        """Open so many streams; those that are `stuck` are never read."""
        request = (
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
        ).encode()
        for start in range(0, clients, AT_ONCE):
            opened = [self._open(port, stuck=stuck) for _ in range(min(AT_ONCE, clients - start))]
            for one in opened:
                one.sendall(request)
            for one in opened:
                one.settimeout(CONNECT_SECONDS)
                head = one.recv(1 if stuck else READ_BYTES)
                if not stuck and b" 200 " not in head[:16]:
                    raise RuntimeError(f"not a stream: {head[:200]!r}")
                one.settimeout(0)
                if stuck:
                    self._stuck.append(one)
                    continue
                fd = one.fileno()
                self._sockets[fd] = one
                self._rests[fd] = b""
                self._next[fd] = 1
                self._poll.register(fd, select.EPOLLIN)
        return {"clients": len(self._sockets), "stuck": len(self._stuck)}

    def begin(self, first: int, last: int) -> dict[str, Any]:
        """Lines from `first` to `last` will come."""
        self._begin(first, last)
        return {}

    def until(self, seconds: float) -> dict[str, Any]:
        """Read until all clients have the last line, or so long. Tells what was read."""
        give_up = time.monotonic() + seconds
        stdin = sys.stdin.fileno()
        self._poll.unregister(stdin)
        while self._waiting > 0 and time.monotonic() < give_up:
            for fd, _ in self._poll.poll(0.1):
                self._read(fd)
        self._poll.register(stdin, select.EPOLLIN)
        ages: dict[int, float] = {}
        for known in self._read_before:
            for at, weight in known.samples:
                for arrival in known.arrivals or ():
                    bucket = (arrival - at) // 100_000  # tenths of a millisecond
                    ages[bucket] = ages.get(bucket, 0) + weight
        return {
            "delivered": self._delivered,
            "reads": self._reads,
            "missing": self._waiting,
            "lost": self._lost,
            "gaps": self._gaps,
            "last_at": self._last_at,
            "ages": sorted(ages.items()),
        }

    def leave(self) -> dict[str, Any]:
        """Close all."""
        for one in (*self._sockets.values(), *self._stuck):
            one.close()  # epoll forgets it
        self._sockets.clear()
        self._stuck.clear()
        return {}

    # -- reading ---------------------------------------------------------------------------------

    def _open(self, port: int, *, stuck: bool) -> socket.socket:
        one = socket.socket()
        if stuck:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, STUCK_BUFFER_BYTES)
        one.settimeout(CONNECT_SECONDS)
        one.connect(("127.0.0.1", port))
        return one

    def _begin(self, first: int, last: int) -> None:
        self._last = last
        self._waiting = len(self._sockets)
        self._delivered = self._reads = self._gaps = self._lost = self._last_at = 0
        self._known: dict[bytes, Read] = {}
        self._read_before: list[Read] = []
        for fd in self._next:
            self._next[fd] = first

    def _read(self, fd: int) -> None:
        one = self._sockets.get(fd)
        if one is None:
            return
        try:
            data = one.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(fd)
            return
        arrival = time.monotonic_ns()
        self._reads += 1
        data = self._rests[fd] + data
        read = self._known.get(data) or self._look(data)
        self._rests[fd] = read.rest
        if read.arrivals is None:
            return
        read.arrivals.append(arrival)
        self._last_at = arrival
        wanted = self._next[fd]
        if read.first != wanted or not read.is_gapless:
            self._gaps += 1
        self._delivered += read.last - read.first + 1
        self._next[fd] = read.last + 1
        if wanted <= self._last <= read.last:
            self._waiting -= 1

    def _look(self, data: bytes) -> Read:
        read = read_of(data)
        if read.first:
            self._read_before.append(read)
            if len(self._known) < KNOWN_READS:
                self._known[data] = read
        return read

    def _lose(self, fd: int) -> None:
        """The server has closed it."""
        self._lost += 1
        self._waiting -= self._next[fd] <= self._last
        self._sockets.pop(fd).close()


if __name__ == "__main__":
    Watchers().serve()
