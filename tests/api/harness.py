"""A real server over a database of its own, in the test's loop; and what one says to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import asyncpg
import httpx
from fanout_api import ApiSettings, create_app
from fanout_api.service import Service
from fanout_api.serving import Server, bound_sockets
from pydantic import BaseModel
from starlette.applications import Starlette

from fanout import Document, Engine, Job, JobHandle, PermanentError
from tests.conftest import with_database
from tests.engine.running import quick

__all__ = [
    "Batch",
    "Frame",
    "House",
    "a_client",
    "a_database",
    "an_engine",
    "frames",
    "house",
    "parse",
    "served",
]

PATIENCE: Final = 20.0


class Paper(BaseModel):
    pages: int = 1


class Batch(BaseModel):
    """How many documents, how many of them bad; `hold`: each waits until it is cancelled."""

    n: int = 3
    bad: int = 0
    hold: bool = False
    lines: int = 0


def an_engine(dsn: str, **settings: Any) -> Engine:
    """An engine with a batch, its children and a single job."""
    engine = Engine(dsn, settings=quick(**settings))

    @engine.job(max_retries=0)
    async def paper(job: Job[Paper]) -> dict[str, int]:
        key = job.document_key or ""
        if key.startswith("hold"):
            await asyncio.sleep(3600)
        if key.startswith("bad"):
            raise PermanentError("=cmd|' /C calc'!A0")
        return {"pages": job.payload.pages}

    @engine.job
    async def batch(job: Job[Batch]) -> None:
        wanted = job.payload
        for number in range(wanted.lines):
            job.log(f"line {number}")
        name = "hold" if wanted.hold else "doc"
        await job.fan_out(
            paper,
            [Document(f"{name}-{n:04}", Paper(pages=n)) for n in range(wanted.n)]
            + [Document(f"bad-{n:04}", Paper()) for n in range(wanted.bad)],
        )

    @engine.job
    async def single(job: Job[Any]) -> Any:
        return job.payload

    return engine


@contextlib.asynccontextmanager
async def a_database(server_dsn: str, template: str) -> AsyncIterator[str]:
    """The DSN of a copy of the template."""
    name = f"fanout_api_{uuid.uuid4().hex[:12]}"
    admin = await asyncpg.connect(server_dsn)
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield with_database(server_dsn, name)
        await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await admin.close()


@contextlib.asynccontextmanager
async def served(app: Starlette) -> AsyncIterator[str]:
    """The address of an app that is being served, by the server of the product."""
    sockets = bound_sockets("127.0.0.1", 0)
    server = Server(app, handle_signals=False)
    running = asyncio.create_task(server.serve(sockets))
    try:
        async with asyncio.timeout(PATIENCE):
            while not server.started:
                if running.done():
                    await running
                await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    finally:
        server.stop()
        await running


@dataclass
class House:
    """A server, its engine and a client."""

    engine: Engine
    app: Starlette
    url: str
    client: httpx.AsyncClient

    @property
    def service(self) -> Service:
        found: Service = self.app.state.fanout
        return found

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return await self.client.post(
            path,
            json={} if body is None else body,
            headers={k.replace("_", "-"): v for k, v in headers.items()},
        )

    async def closed_batch(self, **wanted: Any) -> JobHandle:
        """A batch that a worker has run to its end."""
        handle = await self.engine.submit("batch", Batch(**wanted))
        async with self.engine.worker() as worker:
            await handle.wait(PATIENCE)
            await worker.stop()
        return handle


def a_client(url: str, **options: Any) -> httpx.AsyncClient:
    """A client. Reading the certificates of the world would cost each one 50 ms."""
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(
        base_url=url,
        timeout=PATIENCE,
        verify=False,  # noqa: S501 - plain HTTP to loopback
        limits=limits,
        **options,
    )


@contextlib.asynccontextmanager
async def house(
    dsn: str, *, auth: Any = None, auth_kind: Any = "none", **settings: Any
) -> AsyncIterator[House]:
    """An app over an engine of its own, served."""
    engine = an_engine(dsn)
    app = create_app(engine, settings=ApiSettings(auth=auth_kind, **settings), auth=auth)
    async with served(app) as url, a_client(url) as client:
        yield House(engine, app, url, client)


@dataclass
class Frame:
    """One server-sent event."""

    name: str
    id: str | None
    data: Any


def parse(text: str) -> list[Frame]:
    """Events as the standard says they are to be read."""
    found = []
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields: dict[str, list[str]] = {}
        for line in block.split("\n"):
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        if "data" in fields:
            found.append(
                Frame(
                    fields.get("event", ["message"])[0],
                    fields.get("id", [None])[0],
                    json.loads("\n".join(fields["data"])),
                )
            )
    return found


async def frames(response: httpx.Response) -> AsyncIterator[Frame]:
    """Events as they come."""
    rest = ""
    async for text in response.aiter_text():
        rest += text
        *blocks, rest = rest.split("\n\n")
        for block in blocks:
            for frame in parse(block):
                yield frame
