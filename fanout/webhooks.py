"""Webhooks: endpoints by name, each with a secret, and the job that sends, signed by Standard
Webhooks (standardwebhooks.com).

A close, and an incident, enqueue a job of kind `fanout_webhook` in their own transaction. It is a
job like any other: claimed, retried with backoff, listed, retried by hand. A worker serves the kind
only where `Settings(webhooks=True)` says so: it makes connections out of the cluster.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, assert_never

from pydantic import BaseModel, ConfigDict

from .errors import ConfigurationError, PermanentError, TransientError, UsageError
from .failures import seconds_of
from .job import Job
from .settings import networks_of
from .states import Status
from .values import outcome_of
from .wire import checked_text, clipped

if TYPE_CHECKING:
    from .handle import JobHandle
    from .outgoing import Answer, Sender
    from .settings import Settings
    from .store import Store

__all__ = ["KIND", "Delivery", "Endpoint", "Sent", "Webhooks", "sending"]

KIND: Final = "fanout_webhook"
EVENTS: Final = ("batch.closed", "alert.opened", "alert.closed")
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - what the standard says a secret begins with
SECRET_BYTES: Final = 32
MAX_NAME_BYTES: Final = 128
KEEP_OLD_SECONDS: Final = 86_400.0
LONGEST_KEPT_SECONDS: Final = 90 * 86_400.0
MAX_RETRIES: Final = 10
"""With the pauses of `_pause`, some two days."""
LONGEST_PAUSE_SECONDS: Final = 12 * 3600.0

SUCCESS, REDIRECT, CLIENT_ERROR, GONE = 2, 3, 4, 410
AGAIN: Final = frozenset({408, 425, 429})

Event = Literal["batch.closed", "alert.opened", "alert.closed", "webhook.test"]


class Delivery(BaseModel):
    """The payload of a job that sends: what to tell whom."""

    model_config = ConfigDict(frozen=True)

    endpoint: str
    type: Event = "batch.closed"
    incident: int | None = None
    """Of an alert."""
    job_id: int | None = None
    """Of a close, as all that follows."""
    kind: str | None = None
    generation: int = 1
    outcome: Status = Status.COMPLETED
    total: int = 0
    completed: int = 0
    failed: int = 0
    cancelled: int = 0


class Sent(BaseModel):
    """The result of a job that sends."""

    endpoint: str
    status: int
    """The status of the answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where webhooks are sent, without its secret: that is shown once, when it is made."""

    name: str
    url: str
    events: tuple[str, ...]
    tenant: str | None
    """The one tenant whose batches it is told of; None: all."""
    enabled: bool
    disabled_reason: str | None
    created_at: datetime
    old_secret_until: datetime | None
    """Until when the secret before the last rotation signs as well."""


class Webhooks:
    """The endpoints of one schema. Raises DatabaseUnavailable from every method."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        submit: Callable[[str, Any], Awaitable[JobHandle]],
    ) -> None:
        self._store = store
        self._settings = settings
        self._submit = submit

    async def add(
        self,
        name: str,
        url: str,
        *,
        events: Sequence[str] = ("batch.closed",),
        tenant: str | None = None,
    ) -> str:
        """Make an endpoint. Returns its secret, `whsec_…`, which is shown this once.

        Raises:
            UsageError: there is one of this name, or nothing may be sent to this URL.
        """
        checked_text(name, "name", MAX_NAME_BYTES)
        if tenant is not None:
            checked_text(tenant, "tenant", MAX_NAME_BYTES)
        _target(url, self._settings)
        secret = secrets.token_bytes(SECRET_BYTES)
        if not await self._store.rows("add_webhook", name, url, _events(events), tenant, secret):
            raise UsageError(
                "name",
                f"there is an endpoint {name!r} already",
                "Remove it first, or give another name",
            )
        return _shown(secret)

    async def list(self) -> list[Endpoint]:
        """All endpoints, by name."""
        return [
            Endpoint(**{**row, "events": tuple(row["events"])})
            for row in await self._store.rows("webhooks")
        ]

    async def rotate(self, name: str, *, keep_seconds: float = KEEP_OLD_SECONDS) -> str:
        """Give an endpoint a new secret, and return it. For `keep_seconds` the old one signs as
        well, so that the receiver can change over; 0: it is burnt.

        Raises:
            UsageError: there is no such endpoint.
        """
        if not 0 <= keep_seconds <= LONGEST_KEPT_SECONDS:
            raise UsageError(
                "keep_seconds", f"{keep_seconds!r} s is out of range", "Give 0 s to 90 days"
            )
        secret = secrets.token_bytes(SECRET_BYTES)
        await self._one("rotate_webhook", name, secret, timedelta(seconds=keep_seconds))
        return _shown(secret)

    async def remove(self, name: str) -> None:
        """Forget an endpoint; what is still to be sent there fails. Raises UsageError."""
        await self._one("remove_webhook", name)

    async def enable(self, name: str) -> None:
        """Send to an endpoint again. Raises UsageError."""
        await self._one("enable_webhook", name)

    async def disable(self, name: str, reason: str = "on request") -> None:
        """Send nothing more to an endpoint. Raises UsageError."""
        await self._one("disable_webhook", name, clipped(reason, 512), None)

    async def test(self, name: str) -> JobHandle:
        """Send `webhook.test` to an endpoint, as a job: its result holds the answer's status.

        Raises:
            UsageError: there is no such endpoint.
        """
        if name not in {endpoint.name for endpoint in await self.list()}:
            raise _unknown(name)
        return await self._submit(KIND, {"endpoint": name, "type": "webhook.test"})

    async def _one(self, statement: str, name: str, *arguments: object) -> None:
        if not await self._store.rows(statement, name, *arguments):
            raise _unknown(name)


def _unknown(name: str) -> UsageError:
    return UsageError(
        "name", f"there is no endpoint {name!r}", "See those there are: fanout webhooks list"
    )


def _shown(secret: bytes) -> str:
    return SECRET_PREFIX + base64.b64encode(secret).decode()


def _events(events: Sequence[str]) -> Sequence[str]:
    wrong = sorted({*events} - {*EVENTS})
    if wrong or not events:
        raise UsageError(
            "events",
            f"there is no event {wrong[0]!r}" if wrong else "are none",
            f"Give one or more of {', '.join(EVENTS)}",
        )
    return sorted({*events})


# -- sending --------------------------------------------------------------------------------------


def _target(url: str, settings: Settings) -> Any:
    outgoing, _ = _libraries()
    return outgoing.target_of(url, _policy(settings))


def _policy(settings: Settings) -> Any:
    outgoing, _ = _libraries()
    return outgoing.Policy(
        allow_http=settings.webhook_http, networks=networks_of(settings.webhook_networks)
    )


def _libraries() -> tuple[Any, Any]:
    try:
        from standardwebhooks import Webhook  # noqa: PLC0415 - an extra

        from . import outgoing  # noqa: PLC0415 - needs httpcore, of the same extra
    except ImportError as missing:
        raise ConfigurationError(
            "webhooks", f"{missing.name} is not installed", 'pip install "pgfanout[webhooks]"'
        ) from None
    return outgoing, Webhook


def sending(
    settings: Settings, store: Callable[[], Store], sender: Sender | None = None
) -> Callable[[Job[Delivery]], Awaitable[Sent]]:
    """The handler of `fanout_webhook`. `sender`: None for one that the settings describe.

    Raises:
        ConfigurationError: the extra is not installed.
    """
    outgoing, signer = _libraries()
    post = sender or outgoing.Sender(_policy(settings), settings.webhook_timeout)

    async def fanout_webhook(job: Job[Delivery]) -> Sent:
        """Send what happened to an endpoint."""
        try:
            return await send(job)
        except TransientError as failed:
            least = _pause(job.failures, settings)
            raise TransientError(
                str(failed), retry_after=max(least, failed.retry_after or 0.0)
            ) from None

    async def send(job: Job[Delivery]) -> Sent:
        told = job.payload
        rows = await store().rows("webhook_to_send", job.id, told.endpoint, told.incident)
        _check(told, rows[0] if rows else None)
        row = rows[0]
        try:
            target = outgoing.target_of(row["url"], post.policy)
        except UsageError as refused:  # it was added where more is allowed
            raise PermanentError(f"endpoint {told.endpoint!r}: {refused.problem}") from None
        body = _body(told, row)
        answer = await post.post(
            target,
            [
                ("content-type", "application/json"),
                ("user-agent", "fanout-webhooks"),
                ("webhook-id", job.key),
                ("webhook-timestamp", str(row["now"])),
                ("webhook-signature", _signatures(signer, job.key, row, body)),
            ],
            body,
        )
        if answer.status == GONE:
            await store().rows("disable_webhook", told.endpoint, "it answered 410 Gone", row["url"])
        _judge(answer, told.endpoint)
        return Sent(endpoint=told.endpoint, status=answer.status)

    return fanout_webhook


def _check(told: Delivery, row: Any) -> None:
    """Raises PermanentError unless this is to be sent."""
    name = told.endpoint
    if row is None or row["name"] is None:
        raise PermanentError(f"there is no endpoint {name!r}: add it, then retry this job")
    if not row["enabled"]:
        raise PermanentError(f"endpoint {name!r} is disabled: {row['disabled_reason']}")
    if told.type != "webhook.test" and told.type not in row["events"]:
        raise PermanentError(f"endpoint {name!r} does not take {told.type}")
    if row["tenant"] is not None and row["tenant"] != row["own_tenant"]:
        raise PermanentError(f"endpoint {name!r} is another tenant's")
    # Whoever may submit jobs may submit one of this kind: it must not be able to lie in our name.
    if told.type == "batch.closed" and (
        row["follows_id"] is None
        or (row["follows_id"], row["follows_generation"]) != (told.job_id, told.generation)
    ):
        raise PermanentError("this job was not enqueued by a close")
    if told.type.startswith("alert."):
        if row["follows_id"] is not None or row["follows_generation"] != 0:
            raise PermanentError("this job was not enqueued by an incident")
        if row["incident_id"] is None:
            raise PermanentError("there is no such incident any more")
    if told.type == "alert.closed" and row["closed_at"] is None:
        raise PermanentError("the incident is open")


def _body(told: Delivery, row: Any) -> bytes:
    """The same on every attempt; a payload has 1 KB at most, a message 1,000 characters."""
    match told.type:
        case "batch.closed":
            at: datetime = row["created_at"]
            data: dict[str, Any] = {
                "id": told.job_id,
                "kind": told.kind,
                "key": row["key"],
                "generation": told.generation,
                "status": told.outcome,
                "outcome": outcome_of(told.outcome, told.failed),
                "total": told.total,
                "completed": told.completed,
                "failed": told.failed,
                "cancelled": told.cancelled,
            }
            if row["own_tenant"]:
                data["tenant"] = row["own_tenant"]
        case "alert.opened" | "alert.closed":
            at = row["opened_at"] if told.type == "alert.opened" else row["closed_at"]
            data = {
                "id": row["incident_id"],
                "kind": row["incident_kind"],
                "subject": row["subject"],
                "job_id": row["job_id"],
                "message": row["message"],
                "opened_at": _written(row["opened_at"]),
            }
        case "webhook.test":
            at, data = row["created_at"], {}
        case _:
            assert_never(told.type)
    whole = {"type": told.type, "timestamp": _written(at), "data": data}
    return json.dumps(whole, ensure_ascii=False, separators=(",", ":")).encode()


def _written(at: datetime) -> str:
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _signatures(signer: Any, message_id: str, row: Any, body: bytes) -> str:
    """One for each secret that is valid now, the newest first."""
    at = datetime.fromtimestamp(row["now"], UTC)
    return " ".join(
        signer(secret).sign(message_id, at, body.decode())
        for secret in (row["secret"], row["old_secret"])
        if secret is not None
    )


def _judge(answer: Answer, name: str) -> None:
    """Raises PermanentError or TransientError unless it was taken.

    Of the answer's body nothing is told: it could be an internal page that somebody wants to see.
    """
    status = answer.status
    if status // 100 == SUCCESS:
        return
    said = f"endpoint {name!r} answered {status}"
    if status == GONE:
        raise PermanentError(f"{said}: it is disabled; `fanout webhooks enable {name}` undoes that")
    if status // 100 == REDIRECT:
        raise PermanentError(f"{said}: redirects are not followed, give the URL it leads to")
    if status // 100 == CLIENT_ERROR and status not in AGAIN:
        raise PermanentError(said)
    raise TransientError(said, retry_after=seconds_of(answer.retry_after))


def _pause(failures: int, settings: Settings) -> float:
    """Seconds until the next try: four times as many after each failure."""
    return min(LONGEST_PAUSE_SECONDS, settings.backoff_base / 2 * 4.0 ** min(failures, 30))
