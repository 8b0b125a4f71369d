"""Mounted in somebody's app: a prefix, their lifespan, their transaction, two engines."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator

import asyncpg
import httpx
import pytest
import uvicorn
from fanout_api import create_app, lifespan
from fanout_api.serving import bound_sockets
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from fanout import Engine
from fanout.limits import Limits
from fanout.measures import Histogram
from tests.api.harness import PATIENCE, Batch, House, a_client, a_database, an_engine, frames


@contextlib.asynccontextmanager
async def served_by_uvicorn(app: object) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody's app, on a uvicorn that is none of ours."""
    sockets = bound_sockets("127.0.0.1", 0)
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, lifespan="on", timeout_graceful_shutdown=5)  # type: ignore[arg-type]
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment]
    running = asyncio.create_task(server.serve(sockets))
    while not server.started:
        assert not running.done()
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    try:
        async with a_client(url) as client:
            yield client
    finally:
        server.should_exit = True
        await running


async def test_a_service_submits_in_its_own_transaction_and_streams(database: str) -> None:
    """FastAPI, its own lifespan, a mount under a prefix: the whole way of an embedder."""
    engine = an_engine(database)
    inner = create_app(engine)

    @contextlib.asynccontextmanager
    async def their_lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with engine, engine.worker(), lifespan(inner):
            yield

    app = FastAPI(lifespan=their_lifespan)
    app.mount("/ops/fanout", inner)

    made: list[int] = []

    @app.post("/imports/{fails}")
    async def imports(fails: bool) -> dict[str, int]:
        connection = await asyncpg.connect(database)
        with contextlib.suppress(asyncpg.DivisionByZeroError):
            async with connection.transaction():
                handle = await engine.submit("batch", Batch(n=2, lines=3), connection=connection)
                made.append(handle.id)
                if fails:
                    await connection.execute("SELECT 1 / 0")
        await connection.close()
        engine.wake("batch")
        return {"job": made[-1]}

    async with served_by_uvicorn(app) as client:
        lost = (await client.post("/imports/true")).json()["job"]
        assert (await client.get(f"/ops/fanout/v1/jobs/{lost}")).status_code == 404
        kept = (await client.post("/imports/false")).json()["job"]
        async with client.stream("GET", f"/ops/fanout/v1/jobs/{kept}/events") as stream:
            found = [frame async for frame in frames(stream)]
        assert [f.data["message"] for f in found if f.name == "log"] == [
            "line 0", "line 1", "line 2",
        ]  # fmt: skip
        assert found[-1].name == "end"
        job = await client.post("/ops/fanout/v1/jobs", json={"kind": "single"})
        assert job.headers["location"] == f"/ops/fanout/v1/jobs/{job.json()['id']}"
        document = (await client.get("/ops/fanout/openapi.json")).json()
        assert document["servers"] == [{"url": "/ops/fanout"}]
        assert (await client.get("/ops/fanout/", follow_redirects=True)).status_code in (200, 404)
        assert (await client.get("/ops/fanout/nowhere")).json()["type"] == "urn:fanout:not-found"
    with pytest.raises(Exception, match="not started"):
        _ = engine.store


async def test_without_a_lifespan_the_first_request_starts_it(database: str) -> None:
    """Many first requests at once start one engine; streams work."""
    engine = an_engine(database)
    app = Starlette(routes=[Mount("/fanout", create_app(engine))])
    try:
        async with served_by_uvicorn_without_lifespan(app) as client:
            answers = await asyncio.gather(*(client.get("/fanout/v1/jobs") for _ in range(20)))
            assert [a.status_code for a in answers] == [200] * 20
            made = await client.post("/fanout/v1/jobs", json={"kind": "single"})
            async with client.stream(
                "GET", f"/fanout/v1/jobs/{made.json()['id']}/events"
            ) as stream:
                assert (await anext(frames(stream))).name == "hello"
    finally:
        await engine.stop()


@contextlib.asynccontextmanager
async def served_by_uvicorn_without_lifespan(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    """The relay is never told to stop, as nobody has a lifespan to do it in."""
    inner = app.routes[0].app  # type: ignore[attr-defined]
    async with served_by_uvicorn(app) as client:
        try:
            yield client
        finally:
            await inner.state.fanout.relay.stop()


async def test_a_database_that_comes_later_is_found(folder: object) -> None:
    """503 while it is not there, each told at once; no crash, no queue."""
    engine = Engine("postgresql://nobody@127.0.0.1:1/nothing")
    app = Starlette(routes=[Mount("/fanout", create_app(engine))])
    async with served_by_uvicorn(app) as client:
        answers = await asyncio.gather(*(client.get("/fanout/v1/jobs") for _ in range(10)))
        assert [a.status_code for a in answers] == [503] * 10
        assert (await client.get("/fanout/healthz")).status_code == 200
        ready = await client.get("/fanout/readyz")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)


async def test_two_engines_in_one_process(server_dsn: str, template: str) -> None:
    """Each with its own jobs, cookies' paths and streams."""
    async with (
        a_database(server_dsn, template) as one,
        a_database(server_dsn, template) as two,
    ):
        apps = [create_app(an_engine(dsn)) for dsn in (one, two)]

        @contextlib.asynccontextmanager
        async def both(_: Starlette) -> AsyncIterator[None]:
            async with lifespan(apps[0]), lifespan(apps[1]):
                yield

        outer = Starlette(routes=[Mount("/one", apps[0]), Mount("/two", apps[1])], lifespan=both)
        async with served_by_uvicorn(outer) as client:
            await client.post(
                "/one/v1/jobs", json={"kind": "single"}, headers={"Idempotency-Key": "a"}
            )
            assert len((await client.get("/one/v1/jobs")).json()["jobs"]) == 1
            assert (await client.get("/two/v1/jobs")).json()["jobs"] == []


async def test_their_engine_is_not_stopped_by_us(database: str) -> None:
    """Who started it stops it."""
    async with an_engine(database) as engine:
        app = create_app(engine)
        async with lifespan(app):
            pass
        assert await engine.jobs() == []


async def test_metrics_and_health_speak_of_the_workers_here(own: House) -> None:
    """What is queued, what a worker in this process did, how the database is."""
    await own.engine.submit("single", 1)
    before = (await own.client.get("/metrics")).text
    assert 'fanout_jobs{kind="single",status="pending"} 1.0' in before
    assert 'fanout_oldest_pending_seconds{kind="single"}' in before
    assert "fanout_notification_queue_usage" in before
    async with own.engine.worker(name="here") as worker:
        handle = await own.engine.submit("single", 2)
        await handle.wait(PATIENCE)
        ready = (await own.client.get("/readyz")).json()
        names = {check["name"]: check["ok"] for check in ready["checks"]}
        assert names == {"database": True, "migrations": True, "listen": True, "worker here": True}
        text = (await own.client.get("/metrics")).text
        assert "fanout_finish_outcomes_total 2.0" in text
        assert 'fanout_jobs_ended_total{kind="single",status="completed"} 2.0' in text
        assert 'fanout_handler_seconds_count{kind="single"} 2.0' in text
        assert "fanout_finish_size_sum 2.0" in text
        for name in ("finish_seconds", "finish_size", "claim_seconds"):
            buckets = [float(n) for n in re.findall(rf"fanout_{name}_bucket.* (.*)", text)]
            (number,) = re.findall(rf"fanout_{name}_count (.*)", text)
            assert buckets == sorted(buckets)
            assert buckets[-1] == float(number) > 0
        worker.failed.set()
        assert (await own.client.get("/readyz")).status_code == 503
        worker.failed.clear()


async def test_another_schema_version_is_told_by_readyz(own: House) -> None:
    """A process that is behind its database takes no traffic."""
    async with own.engine.store._pool.acquire() as conn:
        await conn.execute(
            "INSERT INTO fanout.migration (version, name) VALUES (9999, 'from the future')"
        )
    answer = await own.client.get("/readyz")
    assert answer.status_code == 503
    (wrong,) = [check for check in answer.json()["checks"] if not check["ok"]]
    assert wrong["name"] == "migrations"


async def test_metrics_tell_who_uses_a_limit(own: House) -> None:
    """And how many wait for it, by its name."""
    await Limits(own.engine.store).set("parser", concurrency=2)
    text = (await own.client.get("/metrics")).text
    assert 'fanout_limit_concurrency{limit="parser"} 2.0' in text
    assert 'fanout_limit_in_use{limit="parser"} 0.0' in text
    assert 'fanout_limit_waiting{limit="parser"} 0.0' in text


async def test_a_histogram_counts_values_up_to_each_bound() -> None:
    """A value that is a bound is below it, as Prometheus has it."""
    histogram = Histogram((1.0, 5.0))
    for value in (0.5, 1, 1.1, 5, 6):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.total == 13.6
