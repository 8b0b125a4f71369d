"""Every error the engine raises on purpose.

FanoutError
 ├─ UsageError              bad input; names the field and the remedy (HTTP 422, exit code 2)
 │   └─ ConfigurationError    a setting, found at start
 ├─ IdempotencyConflict     the key belongs to a job with other content (HTTP 409)
 ├─ JobNotFound             (HTTP 404)
 ├─ Refused                 the job's state does not allow it (HTTP 409)
 ├─ JobFailed               raised by `JobHandle.result` for a job that did not complete
 ├─ LostClaim               this worker's claim was given away; nothing it writes counts
 ├─ SchemaMismatch          the database's schema is not this version's
 └─ DatabaseUnavailable     the engine's own database; uses up no retry (HTTP 503)

PermanentError, TransientError   raised BY handlers, to say which of the two it is
"""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "DatabaseUnavailable",
    "FanoutError",
    "IdempotencyConflict",
    "JobFailed",
    "JobNotFound",
    "LostClaim",
    "PermanentError",
    "Refused",
    "SchemaMismatch",
    "TransientError",
    "UsageError",
]


class FanoutError(Exception):
    """Base of all errors that the engine raises."""


class UsageError(FanoutError, ValueError):
    """Bad input. `field` is what was wrong, `problem` why, `remedy` what is right."""

    def __init__(self, field: str, problem: str, remedy: str) -> None:
        super().__init__(f"{field}: {problem}. {remedy}")
        self.field = field
        self.problem = problem
        self.remedy = remedy


class ConfigurationError(UsageError):
    """A setting that cannot be, or one that is missing."""


class IdempotencyConflict(FanoutError):
    """Job `job_id` was submitted with the same idempotency `key` and other content."""

    def __init__(self, key: str, job_id: int) -> None:
        super().__init__(
            f"idempotency key {key!r} belongs to job {job_id}, which has other content. "
            "Use a new key for a new request, or submit exactly what was submitted with this one."
        )
        self.key = key
        self.job_id = job_id


class JobNotFound(FanoutError):
    """There is no job `job_id`."""

    def __init__(self, job_id: int) -> None:
        super().__init__(f"there is no job {job_id}")
        self.job_id = job_id


class Refused(FanoutError):
    """Job `job_id` is in a state that does not allow this; nothing was changed."""

    def __init__(self, job_id: int, why: str) -> None:
        super().__init__(f"job {job_id}: {why}")
        self.job_id = job_id
        self.why = why


class JobFailed(FanoutError):
    """Job `job_id` ended as `status` (failed or cancelled) for `why`."""

    def __init__(self, job_id: int, status: str, why: str | None) -> None:
        super().__init__(f"job {job_id} {status}: {why or 'no reason was kept'}")
        self.job_id = job_id
        self.status = status
        self.why = why


class LostClaim(FanoutError):
    """The claim (`job_id`, `attempt`) was given away or its batch was ended: stop, nothing you
    write counts.
    """

    def __init__(self, job_id: int, attempt: int) -> None:
        super().__init__(f"the claim on job {job_id}, attempt {attempt}, is lost")
        self.job_id = job_id
        self.attempt = attempt


class SchemaMismatch(FanoutError):
    """The database's schema version is `found`, this program's is `expected`."""

    def __init__(self, schema: str, found: int, expected: int, problem: str | None = None) -> None:
        if problem is not None:
            super().__init__(f"schema {schema!r}: {problem}")
            self.found, self.expected = found, expected
            return
        remedy = (
            "run `fanout migrate`"
            if found < expected
            else "a newer version of fanout migrated it; upgrade this program"
        )
        super().__init__(
            f"schema {schema!r} is at version {found}, this program needs {expected}: {remedy}"
        )
        self.found = found
        self.expected = expected


class DatabaseUnavailable(FanoutError):
    """The engine's own database did not answer. What was sent may have been committed, or not."""


class PermanentError(Exception):
    """Raised by a handler: no retry can help. The child fails at once, and its message is kept."""


class TransientError(Exception):
    """Raised by a handler: try again, `retry_after` seconds from now at the earliest (None: the
    usual backoff).
    """

    def __init__(self, message: str = "", *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after
