"""Webhooks: signed, sent again, never to where they must not go."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import trustme
from pydantic import ValidationError

from fanout import (
    ConfigurationError,
    Engine,
    Job,
    JobHandle,
    PermanentError,
    Status,
    TransientError,
    UsageError,
)
from fanout.outgoing import Policy, Sender, target_of
from fanout.settings import networks_of
from fanout.webhooks import KIND, Delivery
from tests.cli.harness import command
from tests.engine.receiver import Received, Receiver, receiver, status
from tests.engine.running import closed, quick, running, until
from tests.factories import insert_job

LOOPBACK = "127.0.0.0/8"
HOME = Policy(allow_http=True, networks=networks_of(LOOPBACK))


def sends(**values: Any) -> Any:
    """Settings of a worker that may send to this machine."""
    return quick(**{"webhooks": True, "webhook_http": True, "webhook_networks": LOOPBACK, **values})


@pytest.fixture
def engine(database: str) -> Engine:
    return Engine(database, settings=sends())


@pytest.fixture
async def hook() -> AsyncIterator[Receiver]:
    async with receiver() as it:
        yield it


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture
def trusted(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system's way to name an authority of one's own."""
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(file)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))


def served(authority: trustme.CA, *names: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names, key_type=trustme.KeyType.ECDSA).configure_cert(context)
    return context


async def a_close(conn: asyncpg.Connection, endpoint: str, **told: Any) -> int:
    """A batch that has closed, and the job that tells `endpoint` of it, as a close makes it."""
    batch = await insert_job(
        conn, "completed", kind="papers_batch", total=3, completed=2, failed=1,
        idempotency_key="import-7",
    )  # fmt: skip
    payload = Delivery(
        endpoint=endpoint, job_id=batch, kind="papers_batch", total=3, completed=2, failed=1, **told
    ).model_dump_json(exclude={"type", "incident"})
    return await insert_job(
        conn, kind=KIND, payload=payload, follows_id=batch, follows_generation=1, max_retries=10
    )


async def ended(engine: Engine, job_id: int) -> tuple[Status, str | None]:
    """How a job ended."""
    await closed(engine.handle(job_id))
    row = await engine.handle(job_id).job()
    return row.status, row.error


async def test_a_close_is_told_and_signed(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """Headers and body by the standard; the id is the job's key; the event's time, and the time
    of the attempt."""
    async with running(engine):
        secret = await engine.webhooks.add("billing", hook.url(path="/hook?from=fanout"))
        job_id = await a_close(conn, "billing")
        assert await ended(engine, job_id) == (Status.COMPLETED, None)
        job = await engine.handle(job_id).job()
        assert job.result == {"endpoint": "billing", "status": 204}
    [request] = hook.received
    assert request.line == "POST /hook?from=fanout HTTP/1.1"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["host"] == f"localhost:{hook.port}"
    assert request.is_signed_with(secret)
    assert not request.is_signed_with("whsec_" + "A" * 44)
    sent_at = datetime.fromtimestamp(int(request.headers["webhook-timestamp"]), UTC)
    assert abs(sent_at - datetime.now(UTC)) < timedelta(minutes=5)
    told = request.json
    assert datetime.fromisoformat(told.pop("timestamp")) == job.created_at
    assert told == {
        "type": "batch.closed",
        "data": {
            "id": job.follows_id,
            "kind": "papers_batch",
            "key": "import-7",
            "generation": 1,
            "status": "completed",
            "outcome": "completed with failures",
            "total": 3,
            "completed": 2,
            "failed": 1,
            "cancelled": 0,
        },
    }
    assert len(request.body) < 20_000


async def test_it_is_sent_again_with_the_same_id_and_a_new_signature(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """After 503, 429 and an answer that is none; the body is the same to the byte."""
    hook.answers += [status(503), status(429, "retry-after: 0"), b"what?\r\n\r\n", status(408)]
    async with running(engine):
        secret = await engine.webhooks.add("billing", hook.url())
        job_id = await a_close(conn, "billing")
        assert await ended(engine, job_id) == (Status.COMPLETED, None)
        assert (await engine.handle(job_id).job()).failures == 4
    assert len(hook.received) == 5
    assert len({one.headers["webhook-id"] for one in hook.received}) == 1
    assert len({one.body for one in hook.received}) == 1
    assert all(one.is_signed_with(secret) for one in hook.received)


async def test_what_the_receiver_asks_for_is_waited(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """Retry-After; it stands in the row that waits."""
    hook.answers.append(status(503, "Retry-After: 3000"))
    async with running(engine):
        await engine.webhooks.add("billing", hook.url())
        handle = engine.handle(await a_close(conn, "billing"))

        async def waits() -> bool:
            return (await handle.job()).failures == 1

        await until(waits)
        job = await handle.job()
        assert job.status is Status.PENDING
        assert timedelta(seconds=2900) < job.run_at - datetime.now(UTC) < timedelta(seconds=3700)


async def test_the_document_says_how_to_verify(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """Its lines take what we send, and nothing that was changed, delayed or signed otherwise."""
    text = (Path(__file__).parents[2] / "docs/webhooks.md").read_text(encoding="utf-8")
    _, _, program = text.partition("```python\n# verify.py\n")
    names: dict[str, Any] = {}
    exec(program.partition("```")[0], names)  # noqa: S102 - the document's own lines
    async with running(engine):
        secret = await engine.webhooks.add("billing", hook.url())
        await ended(engine, await a_close(conn, "billing"))
    [request] = hook.received
    is_ours = names["is_ours"]
    old = request.headers | {"webhook-timestamp": "1700000000"}
    assert is_ours(secret, request.headers, request.body)
    assert not is_ours(secret, request.headers, request.body + b" ")
    assert not is_ours("whsec_" + "A" * 44, request.headers, request.body)
    assert not is_ours(secret, old, request.body)
    assert not is_ours(secret, {}, request.body)


def test_pauses_grow_to_half_a_day() -> None:
    """Ten retries are some two days."""
    from fanout.settings import Settings  # noqa: PLC0415
    from fanout.webhooks import MAX_RETRIES, _pause  # noqa: PLC0415

    pauses = [_pause(n, Settings()) for n in range(MAX_RETRIES)]
    assert pauses[:3] == [5, 20, 80]
    assert pauses[-1] == 12 * 3600
    assert 36 * 3600 < sum(pauses) < 60 * 3600


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (status(400), "answered 400"),
        (status(401), "answered 401"),
        (status(404), "answered 404"),
        (status(302, "Location: http://127.0.0.1:1/"), "answered 302: redirects are not followed"),
        (status(307, "Location: /else"), "answered 307: redirects are not followed"),
    ],
)
async def test_what_no_retry_can_help_fails_at_once(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver, answer: bytes, why: str
) -> None:
    """4xx but three, and redirects, which are not followed."""
    hook.answers.append(answer)
    async with running(engine):
        await engine.webhooks.add("billing", hook.url())
        state, error = await ended(engine, await a_close(conn, "billing"))
        assert state is Status.FAILED
        assert error is not None
        assert why in error
        assert [one.enabled for one in await engine.webhooks.list()] == [True]
    assert hook.connections == 1


async def test_gone_disables_the_endpoint(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """410: nothing more is sent there until somebody says so; what failed can be retried then."""
    hook.answers.append(status(410))
    async with running(engine):
        await engine.webhooks.add("billing", hook.url())
        first = await a_close(conn, "billing")
        state, error = await ended(engine, first)
        assert (state, error and "answered 410" in error) == (Status.FAILED, True)
        second = await a_close_again(conn, "billing")
        assert await ended(engine, second) == (
            Status.FAILED,
            "endpoint 'billing' is disabled: it answered 410 Gone",
        )
        assert hook.connections == 1
        await engine.webhooks.enable("billing")
        assert await engine.handle(first).retry() == 1
        assert await ended(engine, first) == (Status.COMPLETED, None)


async def a_close_again(conn: asyncpg.Connection, endpoint: str) -> int:
    await conn.execute("UPDATE fanout.job SET idempotency_key = NULL")
    return await a_close(conn, endpoint)


async def test_gone_from_an_address_that_was_replaced_meanwhile_disables_nothing(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """The endpoint was made anew while the old one's answer was on its way."""

    async def replaced(_: Received, writer: asyncio.StreamWriter) -> None:
        await engine.webhooks.remove("billing")
        await engine.webhooks.add("billing", hook.url(path="/new"))
        writer.write(status(410))

    hook.answers.append(replaced)
    async with running(engine):
        await engine.webhooks.add("billing", hook.url())
        await ended(engine, await a_close(conn, "billing"))
        assert [one.enabled for one in await engine.webhooks.list()] == [True]


async def test_a_secret_is_changed_without_a_gap(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """Both sign for as long as was said; none of the old with 0 seconds."""
    async with running(engine):
        old = await engine.webhooks.add("billing", hook.url())
        new = await engine.webhooks.rotate("billing")
        await ended(engine, await a_close(conn, "billing"))
        burnt = await engine.webhooks.rotate("billing", keep_seconds=0)
        await ended(engine, await a_close_again(conn, "billing"))
        [endpoint] = await engine.webhooks.list()
        assert endpoint.old_secret_until is None
        with pytest.raises(UsageError, match="keep_seconds"):
            await engine.webhooks.rotate("billing", keep_seconds=-1)
    first, second = hook.received
    assert first.is_signed_with(new)
    assert first.is_signed_with(old)
    assert second.is_signed_with(burnt)
    assert not second.is_signed_with(new)


async def test_nobody_lies_in_our_name(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """A job of this kind that was submitted, not enqueued by a close, is not believed; nor one
    that follows another close."""
    told = {"endpoint": "billing", "job_id": 1, "kind": "payroll", "total": 9}
    async with running(engine):
        await engine.webhooks.add("billing", hook.url(), events=["batch.closed", "alert.opened"])
        handle = await engine.submit(KIND, told)
        assert (await ended(engine, handle.id))[1] == "this job was not enqueued by a close"
        true = await a_close(conn, "billing")
        await ended(engine, true)
        other = await insert_job(
            conn, kind=KIND, payload=json.dumps(told), follows_id=true, follows_generation=1,
        )  # fmt: skip
        assert (await ended(engine, other))[1] == "this job was not enqueued by a close"
        await conn.execute(
            "INSERT INTO fanout.incident (kind, subject, message) VALUES ('no_worker', 'x', 'm')"
        )
        incident = await engine.submit(
            KIND, {"endpoint": "billing", "type": "alert.opened", "incident": 1}
        )
        assert (await ended(engine, incident.id))[1] == "this job was not enqueued by an incident"
        with pytest.raises(UsageError, match=r"payload\.type"):
            await engine.submit(KIND, {"endpoint": "billing", "type": "user.paid"})
    assert len(hook.received) == 1


async def test_an_endpoint_takes_what_it_is_for(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """Its events, and its tenant's batches; one that is not there is told so."""
    async with running(engine):
        await engine.webhooks.add("ops", hook.url(), events=["alert.opened"])
        await engine.webhooks.add("acme", hook.url(), tenant="acme")
        for endpoint, why in (
            ("ops", "endpoint 'ops' does not take batch.closed"),
            ("acme", "endpoint 'acme' is another tenant's"),
            ("nobody", "there is no endpoint 'nobody': add it, then retry this job"),
        ):
            assert await ended(engine, await a_close_again(conn, endpoint)) == (Status.FAILED, why)
    assert not hook.received


async def test_a_worker_that_was_not_told_to_sends_nothing(
    database: str, conn: asyncpg.Connection
) -> None:
    """It makes no connections out of the cluster unless the setting says so."""
    quiet = Engine(database, settings=quick())
    assert KIND not in quiet.handlers

    @quiet.job
    async def other(job: Job[None]) -> None: ...

    async with running(quiet):
        job_id = await a_close(conn, "billing")
        await closed(await quiet.submit(other))
        assert (await quiet.handle(job_id).job()).attempt == 0


async def test_without_the_extra_it_says_what_to_install(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At start of a worker that is to send, and where an endpoint is added; all else works."""
    monkeypatch.setitem(sys.modules, "standardwebhooks", None)
    with pytest.raises(ConfigurationError, match=r"pgfanout\[webhooks\]"):
        Engine(database, settings=sends())
    async with Engine(database, settings=quick()) as engine:
        with pytest.raises(ConfigurationError, match=r"pgfanout\[webhooks\]"):
            await engine.webhooks.add("billing", "https://hooks.example.com/")
        assert await engine.webhooks.list() == []


async def test_no_secret_is_where_it_does_not_belong(
    engine: Engine,
    conn: asyncpg.Connection,
    hook: Receiver,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not in logs, errors, rows of jobs, or what lists endpoints; nor what a URL may hold."""
    caplog.set_level(logging.DEBUG)
    hook.answers += [status(503), b"", status(400)]
    async with running(engine):
        url = hook.url(path="/hook?token=hush")
        secret = await engine.webhooks.add("billing", url)
        job_id = await a_close(conn, "billing")
        await ended(engine, job_id)
        rows = str(await conn.fetch("SELECT j::text FROM fanout.job j"))
        listed = repr(await engine.webhooks.list())
    key = secret.removeprefix("whsec_")
    for text in (caplog.text, rows, listed):
        assert key not in text
    for text in (caplog.text, rows):
        assert "hush" not in text


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.com/",
        "ftp://hooks.example.com/",
        "https://user:pass@hooks.example.com/",
        "https://@hooks.example.com/",
        "https://hooks.example.com:22/",
        "https://hooks.example.com/#there",
        "https://hooks.example.com\\@127.0.0.1/",
        "https://127.0.0.1/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://10.0.0.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://[::1]/",
        "https://[::]/",
        "https://[fe80::1%25eth0]/",
        "https://[fd00:ec2::254]/",
        "https://[::ffff:169.254.169.254]/",
        "https://[64:ff9b::a9fe:a9fe]/",
        "https://[2002:a9fe:a9fe::1]/",
        "https://exa mple.com/",
        "https://ex\nample.com/",
        "https://b\u00fccher.example/",
        "https://",
        "",
        "https://hooks.example.com/" + "x" * 2048,
    ],
)
async def test_a_url_that_is_refused_is_never_stored(database: str, url: str) -> None:
    """Each with the field that is wrong."""
    async with Engine(database, settings=quick()) as engine:
        with pytest.raises(UsageError, match="url"):
            await engine.webhooks.add("billing", url)
        assert await engine.webhooks.list() == []


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "0.0.0.7", "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254",
        "100.100.100.200", "168.63.129.16", "192.0.0.192", "198.18.0.1", "224.0.0.1", "240.0.0.1",
        "255.255.255.255", "::", "::1", "::ffff:127.0.0.1", "::127.0.0.1", "::ffff:0:7f00:1",
        "64:ff9b::7f00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2001:0:4136:e378::1", "fc00::1",
        "fd00:ec2::254", "fe80::1", "fe80::1%1", "fec0::1", "ff02::1", "2001:db8::1", "localhost",
    ],
)  # fmt: skip
async def test_a_name_that_leads_inside_is_not_followed(address: str) -> None:
    """Whatever form the address has; also if it is one of several."""
    asked: list[str] = []

    async def resolve(host: str, port: int) -> Sequence[str]:
        asked.append(host)
        return ["8.8.8.8", address]

    sender = Sender(Policy(), 5, resolve)
    with pytest.raises(PermanentError, match=r"hooks\.example\.com leads to"):
        await sender.post(target_of("https://hooks.example.com/", Policy()), [], b"")
    assert asked == ["hooks.example.com"]


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_a_public_address_is_fine(address: str) -> None:
    assert Policy().refusal(address) is None


def test_a_network_that_is_named_is_fine_and_no_other() -> None:
    """By the setting, which is checked when it is read."""
    policy = Policy(networks=networks_of("10.1.0.0/16, fd00:1::/32"))
    assert policy.refusal("10.1.255.255") is None
    assert policy.refusal("fd00:1::9") is None
    assert policy.refusal("10.2.0.1") is not None
    with pytest.raises(UsageError, match="webhook_networks"):
        quick(webhook_networks="10.1.0.1/16")
    with pytest.raises((UsageError, ValidationError)):
        quick(webhook_networks="everything")


async def test_the_address_that_was_looked_at_is_the_one_that_is_called(
    hook: Receiver, authority: trustme.CA
) -> None:
    """A name server that answers otherwise the second time is not asked a second time."""
    answers = [["127.0.0.1"], ["169.254.169.254"], ["10.0.0.1"]]

    async def resolve(host: str, port: int) -> Sequence[str]:
        return answers.pop(0)

    sender = Sender(HOME, 10, resolve)
    target = target_of(f"http://rebound.example:{hook.port}/hook", HOME)
    assert (await sender.post(target, [], b"{}")).status == 204
    assert len(answers) == 2
    assert hook.received[0].headers["host"] == f"rebound.example:{hook.port}"
    with pytest.raises(PermanentError, match="link-local"):
        await sender.post(target, [], b"{}")
    assert hook.connections == 1


@pytest.mark.usefixtures("trusted")
async def test_over_tls_the_name_is_what_the_certificate_must_be_for(authority: trustme.CA) -> None:
    """In SNI and in the check, though the connection goes to an address."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return ["127.0.0.1"]

    async with receiver(served(authority, "hooks.example.com")) as hook:
        sender = Sender(HOME, 10, resolve)
        good = target_of(f"https://hooks.example.com:{hook.port}/", HOME)
        assert (await sender.post(good, [], b"{}")).status == 204
        assert hook.server_names == ["hooks.example.com"]
        other = target_of(f"https://other.example.com:{hook.port}/", HOME)
        with pytest.raises(TransientError, match="certificate"):
            await sender.post(other, [], b"{}")
    assert len(hook.received) == 1


async def test_a_certificate_of_nobody_is_refused(authority: trustme.CA) -> None:
    """An authority that nobody named."""
    async with receiver(served(authority, "localhost")) as hook:
        with pytest.raises(TransientError, match="certificate"):
            await Sender(HOME, 10).post(target_of(hook.url(), HOME), [], b"{}")
    assert not hook.received


async def test_an_answer_that_never_ends_takes_the_timeout_and_no_more(hook: Receiver) -> None:
    """Neither a slow head nor a head without end; of a body nothing is read."""

    async def slow(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x: y\r\n")
            await writer.drain()
            await asyncio.sleep(0.05)

    async def endless(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            writer.write(b"x: " + b"y" * 65_536)
            await writer.drain()

    async def huge(_: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"z" * 65_536)
            await writer.drain()

    sender = Sender(HOME, 0.5)
    target = target_of(hook.url(), HOME)
    hook.answers += [slow, endless, huge]
    with pytest.raises(TransientError, match=r"within 0\.5 s"):
        await sender.post(target, [], b"{}")
    with pytest.raises(TransientError):
        await asyncio.wait_for(sender.post(target, [], b"{}"), 20)
    assert (await asyncio.wait_for(Sender(HOME, 20).post(target, [], b"{}"), 20)).status == 200


async def test_nobody_there_is_tried_again(hook: Receiver) -> None:
    """A name without an address, a port that nobody listens on, a connection that breaks."""
    hook.answers.append(b"")
    with pytest.raises(TransientError, match="localhost"):
        await Sender(HOME, 10).post(target_of(hook.url(), HOME), [], b"{}")
    with pytest.raises(TransientError, match="ConnectError"):
        await Sender(HOME, 10).post(target_of("http://127.0.0.1:1024/", HOME), [], b"{}")
    with pytest.raises(TransientError, match=r"cannot be resolved|leads to"):
        await Sender(HOME, 20).post(target_of("http://nowhere.invalid/", HOME), [], b"{}")


async def test_endpoints_are_listed_without_their_secrets(engine: Engine) -> None:
    """And what is wrong with a name or an event is said."""
    async with engine:
        hooks = engine.webhooks
        secret = await hooks.add("b", "https://hooks.example.com/b", events=["alert.opened"])
        assert secret.startswith("whsec_")
        await hooks.add("a", "https://hooks.example.com/a", tenant="acme")
        assert [(one.name, one.events, one.tenant) for one in await hooks.list()] == [
            ("a", ("batch.closed",), "acme"),
            ("b", ("alert.opened",), None),
        ]
        await hooks.disable("a")
        assert [one.disabled_reason for one in await hooks.list()] == ["on request", None]
        for wrong in (
            hooks.add("a", "https://hooks.example.com/"),
            hooks.add("", "https://hooks.example.com/"),
            hooks.add("c", "https://hooks.example.com/", events=[]),
            hooks.add("c", "https://hooks.example.com/", events=["batch.opened"]),
            hooks.remove("c"),
            hooks.rotate("c"),
            hooks.enable("c"),
            hooks.test("c"),
        ):
            with pytest.raises(UsageError):
                await wrong
        await hooks.remove("a")
        assert [one.name for one in await hooks.list()] == ["b"]


async def test_the_commands(
    engine: Engine,
    database: str,
    hook: Receiver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Add, list, test, rotate, disable, enable, remove; a secret alone on stdout."""
    monkeypatch.setenv("FANOUT_WEBHOOK_HTTP", "true")
    monkeypatch.setenv("FANOUT_WEBHOOK_NETWORKS", LOOPBACK)

    async def cli(*arguments: str) -> tuple[int, str, str]:
        said = await command(capsys, "webhooks", *arguments, "--dsn", database)
        return said.code, said.out, said.err

    async with running(engine):
        code, secret, told = await cli("add", "billing", hook.url())
        assert (code, secret.startswith("whsec_"), secret.count("\n")) == (0, True, 1)
        assert secret.strip() not in told
        assert (await cli("add", "billing", hook.url()))[0] == 2
        assert (await cli("add", "b", "https://10.0.0.1/"))[0] == 2
        code, out, _ = await cli("test", "billing")
        assert (code, out) == (0, "billing answered 204\n")
        assert hook.received[0].json["type"] == "webhook.test"
        assert hook.received[0].is_signed_with(secret.strip())
        hook.answers.append(status(404))
        code, _, told = await cli("test", "billing")
        assert (code, "answered 404" in told) == (1, True)
        assert (await cli("rotate", "billing", "--keep", "0"))[1] != secret
        assert (await cli("disable", "billing"))[0] == 0
        assert "disabled: on request" in (await cli("list"))[1]
        assert (await cli("enable", "billing"))[0] == 0
        assert '"enabled": true' in (await cli("list", "--json"))[1]
        assert (await cli("remove", "billing"))[0] == 0
        assert (await cli("remove", "billing"))[0] == 2
        assert "no endpoints" in (await cli("list"))[1]


async def test_a_test_that_no_worker_sends_says_what_to_do(
    engine: Engine, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job waits; the setting is named."""
    async with engine:
        await engine.webhooks.add("billing", "https://hooks.example.com/")
    said = await command(
        capsys, "webhooks", "test", "billing", "--patience", "0", "--dsn", database
    )
    assert (said.code, "FANOUT_WEBHOOKS=true" in said.err) == (1, True)


async def test_a_batch_names_its_endpoint(
    engine: Engine, conn: asyncpg.Connection, hook: Receiver
) -> None:
    """Once a close: a retry that closes it again tells of it again, as the next generation."""
    broken = {"b"}

    @engine.job
    async def leaf(job: Job[str]) -> None:
        if job.payload in broken:
            raise PermanentError("torn")

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(leaf, [("a", "a"), ("b", "b")])

    async with running(engine):
        secret = await engine.webhooks.add("billing", hook.url())
        handle: JobHandle = await engine.submit(batch, webhook="billing", key="k")
        await closed(handle)
        await until(lambda: len(hook.received) == 1)
        broken.clear()
        await handle.retry()
        await until(lambda: len(hook.received) == 2)
    told = [one.json["data"] for one in hook.received]
    assert [(one["id"], one["generation"], one["outcome"]) for one in told] == [
        (handle.id, 1, "completed with failures"),
        (handle.id, 2, "completed"),
    ]
    assert all(one.is_signed_with(secret) for one in hook.received)
    assert hook.received[0].headers["webhook-id"] != hook.received[1].headers["webhook-id"]
