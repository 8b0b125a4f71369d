"""Who may what: keys, scopes, sessions, tenants; nothing secret where it does not belong."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
from fanout_api import Caller
from fanout_api.callers import anonymous
from fanout_api.problems import Forbidden
from fanout_api.routes import TABLE
from fanout_api.table import Endpoint
from starlette.requests import Request

from fanout.access import Access, Scope
from tests.api.harness import House, a_client, a_database, frames, house

SCOPES = {"none": [], "read": [Scope.READ], "submit": [Scope.SUBMIT], "operate": [Scope.OPERATE]}
BODIES = {
    "/v1/jobs": {"kind": "single"},
    "/v1/jobs/{job_id}/cancel": {},
    "/v1/jobs/{job_id}/retry": {"keys": ["nobody"]},
    "/v1/jobs/{job_id}/priority": {"priority": 1},
    "/v1/jobs/{job_id}/concurrency": {"concurrency": 1},
    "/v1/jobs/{job_id}/children": {"kind": "paper", "documents": [{"key": "new", "payload": {}}]},
    "/v1/limits/{name}": {"concurrency": 1},
    "/v1/webhooks": {"name": "ops", "url": "https://example.com/hook"},
    "/v1/session": {"key": "fo_nobody"},
}


@dataclass
class Guarded:
    """A server that asks for keys, a key of each scope, and a closed job."""

    house: House
    keys: dict[str, str]
    job_id: int

    def headers(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.keys[who]}"} if who in self.keys else {}


@pytest.fixture(scope="module")
async def guarded(server_dsn: str, template: str) -> AsyncIterator[Guarded]:
    async with a_database(server_dsn, template) as dsn, house(dsn, auth_kind="key") as it:
        access = Access(it.engine.store)
        keys = {n: (await access.add_key(n, s))[1] for n, s in SCOPES.items() if s}
        for tenant in ("a", "b"):
            keys[f"tenant {tenant}"] = (await access.add_key(tenant, list(Scope), tenant))[1]
        batch = await it.closed_batch(n=1, bad=1)
        yield Guarded(it, keys, batch.id)


def path_of(path: str, job_id: int) -> str:
    path = path.replace("{job_id}", str(job_id)).replace("{number}", "1")
    path = path.replace("{name}", "nobody").replace("{endpoint}", "nobody")
    return f"{path}?s={job_id}" if path == "/v1/streams" else path


@pytest.mark.parametrize("who", ["none", "wrong", "read", "submit", "operate"])
@pytest.mark.parametrize(
    "endpoint", TABLE.endpoints, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}"
)
async def test_a_route_answers_whose_scope_it_takes(
    guarded: Guarded, endpoint: Endpoint, who: str
) -> None:
    """401 without a key or with a wrong one, 403 with the wrong scope, else neither."""
    headers = guarded.headers(who)
    if who == "wrong":
        headers = {"Authorization": "Bearer fo_this-is-not-one"}
    body = BODIES.get(endpoint.path, {})
    answer = await guarded.house.client.request(
        endpoint.method,
        path_of(endpoint.path, guarded.job_id),
        headers=headers,
        json=body if endpoint.method in {"POST", "PUT"} else None,
    )
    if endpoint.is_open:
        assert answer.status_code in (
            {401}
            if endpoint.path == "/v1/session" and body and endpoint.method == "POST"
            else {200, 204}
        )
    elif who in ("none", "wrong"):
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
    elif endpoint.scope is not None and str(endpoint.scope) != who:
        assert answer.status_code == 403
        assert str(endpoint.scope) in answer.json()["remedy"]
    else:
        assert answer.status_code in (200, 201, 204, 404, 409), answer.text


@pytest.mark.parametrize(
    "header",
    ["Basic YTpi", "Bearer", "bearer x y", "Bearer " + "x" * 1000, "fo_x", "Bearer \x7f"],
)
async def test_a_header_that_is_no_key_is_nobody(guarded: Guarded, header: str) -> None:
    """401, never an error."""
    answer = await guarded.house.client.get("/v1/jobs", headers={"Authorization": header})
    assert answer.status_code in (400, 401)


async def test_a_foreign_job_is_told_as_one_that_never_was(guarded: Guarded) -> None:
    """On every route, with an equal body but for the ids: 404, and no byte of it."""
    client = guarded.house.client
    a, b = guarded.headers("tenant a"), guarded.headers("tenant b")
    mine = (await client.post("/v1/jobs", json={"kind": "single"}, headers=a)).json()["id"]
    never = 987654321
    for endpoint in TABLE.endpoints:
        if "{job_id}" not in endpoint.path and endpoint.path != "/v1/streams":
            continue
        body = BODIES.get(endpoint.path, {}) if endpoint.method == "POST" else None
        told = [
            await client.request(endpoint.method, path_of(endpoint.path, n), headers=b, json=body)
            for n in (mine, never)
        ]
        assert [t.status_code for t in told] == [404, 404], endpoint.path
        bodies = [t.json() | {"request_id": ""} for t in told]
        assert bodies[0].pop("detail") == f"there is no job {mine}"
        assert bodies[1].pop("detail") == f"there is no job {never}"
        assert bodies[0] == bodies[1]
    listed = (await client.get("/v1/jobs", headers=b)).json()["jobs"]
    assert mine not in [job["id"] for job in listed]
    seen = (await client.get("/v1/jobs", headers=a)).json()["jobs"]
    assert mine in [job["id"] for job in seen]
    assert (await client.get(f"/v1/jobs/{mine}", headers=a)).json()["tenant"] == "a"
    view = await client.get(f"/v1/jobs/{mine}", headers=guarded.headers("read"))
    assert view.status_code == 200, "a key without a tenant sees all"


async def test_keys_of_two_tenants_do_not_meet(guarded: Guarded) -> None:
    """The same Idempotency-Key makes a job for each."""
    made = [
        await guarded.house.client.post(
            "/v1/jobs",
            json={"kind": "single"},
            headers={**guarded.headers(f"tenant {t}"), "Idempotency-Key": "same"},
        )
        for t in ("a", "b")
    ]
    assert [m.status_code for m in made] == [201, 201]
    assert made[0].json()["id"] != made[1].json()["id"]


@pytest.mark.parametrize("path", ["/v1/workers", "/v1/stuck", "/metrics"])
async def test_a_tenant_does_not_see_the_whole(guarded: Guarded, path: str) -> None:
    """Hosts, counts and ids of all tenants."""
    answer = await guarded.house.client.get(path, headers=guarded.headers("tenant a"))
    assert answer.status_code == 403


async def test_a_browser_logs_in_with_a_cookie_that_scripts_cannot_read(guarded: Guarded) -> None:
    """A key for a cookie; the cookie opens what the key opens; log out ends it."""
    async with a_client(guarded.house.url) as browser:
        assert (await browser.get("/v1/jobs")).status_code == 401
        made = await browser.post("/v1/session", json={"key": guarded.keys["read"]})
        assert made.status_code == 204
        cookie = made.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert guarded.keys["read"] not in made.headers["set-cookie"]
        assert (await browser.get("/v1/jobs")).status_code == 200
        refused = await browser.post("/v1/jobs", json={"kind": "single"})
        assert refused.status_code == 403, "the scopes are the key's"
        stolen = dict(browser.cookies)
        assert (await browser.delete("/v1/session")).status_code == 204
    async with a_client(guarded.house.url, cookies=stolen) as thief:
        assert (await thief.get("/v1/jobs")).status_code == 401


async def test_a_revoked_key_ends_its_sessions(guarded: Guarded) -> None:
    """At once, on every process: the database is asked each time."""
    access = Access(guarded.house.engine.store)
    _, text = await access.add_key("short", [Scope.READ])
    async with a_client(guarded.house.url) as browser:
        await browser.post("/v1/session", json={"key": text})
        assert (await browser.get("/v1/jobs")).status_code == 200
        await access.revoke_key("short")
        assert (await browser.get("/v1/jobs")).status_code == 401
        headers = {"Authorization": f"Bearer {text}"}
        assert (await browser.get("/v1/jobs", headers=headers)).status_code == 401
        assert (await browser.post("/v1/session", json={"key": text})).status_code == 401
    again, _ = await access.add_key("short", [Scope.READ])
    assert again.revoked_at is None, "the name is free again"


async def test_only_hashes_are_stored_and_nothing_secret_is_logged(
    guarded: Guarded, caplog: pytest.LogCaptureFixture
) -> None:
    """A canary key through header, query, cookie and body: no log, no row, no answer has it."""
    caplog.set_level(logging.DEBUG)
    access = Access(guarded.house.engine.store)
    _, canary = await access.add_key("canary", [Scope.READ])
    client = guarded.house.client
    answers = [
        await client.get("/v1/jobs", headers={"Authorization": f"Bearer {canary}"}),
        await client.get("/v1/jobs", params={"token": canary, "key": canary}),
        await client.get("/nowhere", params={"key": canary}, headers={"Authorization": canary}),
        await client.post("/v1/session", json={"key": canary + "x"}),
        await client.post("/v1/session", json={"key": canary, "more": 1}),
        await client.get("/v1/jobs", headers={"Cookie": f"fanout_session={canary}"}),
    ]
    session = await client.post("/v1/session", json={"key": canary})
    cookie = session.cookies["fanout_session"]
    client.cookies.clear()
    # httpx, the client, logs addresses with their query; the server must not.
    said = "".join(r.getMessage() for r in caplog.records if not r.name.startswith("http"))
    assert "/v1/jobs" in said
    for secret in (canary, cookie):
        assert secret not in said
        assert secret not in "".join(a.text for a in answers)
        async with guarded.house.engine.store._pool.acquire() as conn:
            for table in ("api_key", "api_session"):
                rows = await conn.fetch(f"SELECT t::text AS row FROM fanout.{table} t")
                assert secret not in "".join(row["row"] for row in rows)


async def test_the_use_of_a_key_is_noted(guarded: Guarded) -> None:
    """To the minute."""
    access = Access(guarded.house.engine.store)
    before = {key.name: key.last_used_at for key in await access.keys()}
    await guarded.house.client.get("/v1/kinds", headers=guarded.headers("read"))
    after = {key.name: key.last_used_at for key in await access.keys()}
    assert after["read"] is not None
    assert before["read"] is None or after["read"] >= before["read"]


async def test_a_stream_takes_the_scope_and_the_tenant_too(guarded: Guarded) -> None:
    """A cookie opens it; a foreign one is 404."""
    async with a_client(guarded.house.url) as browser:
        await browser.post("/v1/session", json={"key": guarded.keys["read"]})
        async with browser.stream("GET", f"/v1/jobs/{guarded.job_id}/events") as stream:
            assert stream.status_code == 200
            assert (await anext(frames(stream))).name == "hello"


async def test_a_stream_ends_with_its_key(database: str) -> None:
    """An open stream of a key that is revoked is cut at the next look, and cannot come back."""
    async with house(database, auth_kind="key", recheck_seconds=0.1) as it:
        access = Access(it.engine.store)
        _, text = await access.add_key("short", [Scope.READ])
        handle = await it.engine.submit("single", 1)
        headers = {"Authorization": f"Bearer {text}"}
        path = f"/v1/jobs/{handle.id}/events"
        async with it.client.stream("GET", path, headers=headers) as stream:
            reading = frames(stream)
            assert (await anext(reading)).name == "hello"
            await asyncio.sleep(0.5)
            assert it.service.streams.total() == 1, "looked at several times, and good"
            await access.revoke_key("short")
            with contextlib.suppress(httpx.RemoteProtocolError):
                async with asyncio.timeout(10):
                    _ = [frame async for frame in reading]
        assert (await it.client.get(path, headers=headers)).status_code == 401


async def test_an_own_way_to_tell_who_asks(database: str) -> None:
    """An embedder's callable, sync or async, replaces keys; None is nobody."""

    async def who(request: Request) -> Caller | None:
        await asyncio.sleep(0)
        name = request.headers.get("x-user")
        return Caller(name, frozenset({Scope.READ}), tenant=name) if name else None

    async with house(database, auth=who) as it:
        assert (await it.client.get("/v1/jobs")).status_code == 401
        ann = {"x-user": "ann"}
        about = (await it.client.get("/v1/about", headers=ann)).json()
        assert (about["auth"], about["scopes"]) == ("own", ["read"])
        refused = await it.client.post("/v1/jobs", json={"kind": "single"}, headers=ann)
        assert refused.status_code == 403
        session = await it.client.post("/v1/session", json={"key": "x"}, headers=ann)
        assert session.status_code == 409


@pytest.mark.parametrize(
    ("host", "may"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("10.0.0.5", False),
     ("2001:db8::1", False), ("fe80::1%eth0", False), ("example.com", False)],
)  # fmt: skip
def test_without_keys_only_this_machine_is_answered(host: str, may: bool) -> None:
    """Also where the app is mounted in one that listens everywhere."""
    request = Request({"type": "http", "client": (host, 1), "headers": []})
    if may:
        assert anonymous(request).name == "local"
    else:
        with pytest.raises(Forbidden):
            anonymous(request)
