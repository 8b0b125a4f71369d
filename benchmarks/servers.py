"""Processes that serve streams, on a core of their own where there are two: start, look at, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import psutil

from .facts import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

READY_SECONDS: Final = 30.0
END_SECONDS: Final = 10.0
NCHAN_MODULE: Final = "ngx_nchan_module.so"
MODULE_FOLDERS: Final = ("/usr/lib/nginx/modules", "/usr/lib64/nginx/modules")

NGINX: Final = """
{load}
daemon off;
worker_processes 1;
{user}
pid {folder}/pid;
error_log {folder}/error.log crit;
worker_rlimit_nofile 20000;
events {{ worker_connections 12000; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 100000000;
  tcp_nodelay on;
  nchan_shared_memory_size 256M;
  server {{
    listen 127.0.0.1:{port} backlog=4096 sndbuf=64k;
    location = /pub {{
      nchan_publisher http;
      nchan_channel_id hot;
      nchan_message_buffer_length 20000;
      nchan_message_timeout 60s;
    }}
    location = /sub {{
      nchan_subscriber eventsource;
      nchan_channel_id hot;
      nchan_subscriber_first_message newest;
    }}
  }}
}}
"""


def cores() -> tuple[set[int], set[int]]:
    """Cores for the server, and for the clients and who publishes; the same where there is one."""
    if not hasattr(os, "sched_getaffinity"):
        return set(), set()
    here = sorted(os.sched_getaffinity(0))
    return {here[0]}, set(here[1:]) or {here[0]}


def pin(pids: Iterable[int], where: set[int]) -> None:
    """Keep processes on these cores, if the system can."""
    for pid in pids:
        with contextlib.suppress(OSError, AttributeError):
            if where:
                os.sched_setaffinity(pid, where)


@dataclass(frozen=True, slots=True)
class Server:
    """A server of streams that is up."""

    port: int
    path: str
    pids: tuple[int, ...]
    """Of the processes that serve."""

    def cpu_seconds(self) -> float:
        """Processor time of them all."""
        times = [psutil.Process(pid).cpu_times() for pid in self.pids]
        return sum(one.user + one.system for one in times)

    def rss_kib(self) -> float:
        """Memory of them all."""
        return sum(psutil.Process(pid).memory_info().rss for pid in self.pids) / 1024


class Asked:
    """A process that answers commands, JSON lines both."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ask(self, **command: Any) -> dict[str, Any]:
        """Give a command, and wait for its answer."""
        self.tell(**command)
        return await self.answer()

    def tell(self, **command: Any) -> None:
        """Give a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    async def answer(self) -> dict[str, Any]:
        """The next answer."""
        answer: dict[str, Any] = json.loads(await said_by(self._process))
        return answer


@asynccontextmanager
async def asked(*arguments: str) -> AsyncIterator[Asked]:
    """`python -m ...`, which answers commands and ends with its input."""
    async with _process(sys.executable, "-m", *arguments) as process:
        yield Asked(process)


@asynccontextmanager
async def python_server(path: str, *arguments: str, **environment: str) -> AsyncIterator[Server]:
    """`python -m ...`, which prints "ready" and its address."""
    async with _process(sys.executable, "-m", *arguments, **environment) as process:
        async with asyncio.timeout(READY_SECONDS):
            words = (await said_by(process)).decode().split()
        port = urlsplit(words[1]).port
        assert port is not None
        yield Server(port, path, (process.pid,))


def nchan_module() -> str | None:
    """Where nginx's module is; None: this machine has none, or no nginx."""
    if nginx() is None:
        return None
    files = [Path(folder) / NCHAN_MODULE for folder in MODULE_FOLDERS]
    return next((str(file) for file in files if file.exists()), None)


def nginx() -> str | None:
    """Where nginx is."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


@asynccontextmanager
async def nchan_server() -> AsyncIterator[Server]:
    """One worker process of nginx, with nchan."""
    program, module = nginx(), nchan_module()
    assert program is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="fanout-nchan-"))
    config = folder / "nginx.conf"
    user = "user root;" if os.geteuid() == 0 else ""
    config.write_text(
        NGINX.format(load=f"load_module {module};", user=user, folder=folder, port=port)
    )
    try:
        async with _process(program, "-c", str(config), "-p", str(folder)) as process:
            async with asyncio.timeout(READY_SECONDS):
                while not await _answers(port):
                    if process.returncode is not None:
                        raise RuntimeError(f"nginx ended with {process.returncode}")
                    await asyncio.sleep(0.05)
            children = psutil.Process(process.pid).children()
            yield Server(port, "/sub", tuple(child.pid for child in children))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def said_by(process: asyncio.subprocess.Process) -> bytes:
    """The next line of a process that is ours. Raises RuntimeError: it has ended."""
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended with code {await process.wait()}")
    return line


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


@asynccontextmanager
async def _process(
    *arguments: str, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 26,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(END_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
