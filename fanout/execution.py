"""Deciding: one claim is run to an outcome. Nothing here knows the database."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from .backoff import retry_delay
from .errors import LostClaim, UsageError
from .failures import Blame, Classified, classify
from .held import Stop
from .job import Job, added_by
from .joblogs import current_job
from .values import Completed, Failed, Interrupted, Retry
from .wire import clipped, decode

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor
    from random import Random

    from .handlers import Handler
    from .held import Held
    from .runtime import Runtime
    from .values import Claim, Outcome

__all__ = ["execute"]

_log = logging.getLogger("fanout.execution")


async def execute(
    held: Held, handler: Handler[Any, Any], runtime: Runtime, threads: Executor, random: Random
) -> Outcome | None:
    """Run a claim's handler. None: the claim was lost meanwhile, there is nothing to write.

    A cancellation from outside ends as what `held.timed_out` or `held.stop` says; any other
    exception, SystemExit too, is the handler's, and is judged.
    """
    settings = runtime.settings
    job: Job[Any] | None = None
    try:
        claim = held.claim
        job = Job(claim, _payload(claim, handler), runtime)
        current_job.set(job)
        value = (
            await handler.function(job)
            if handler.is_async
            else await _in_thread(handler, job, threads)
        )
        if held.stop is Stop.LOST:
            return None
        if not held.timed_out:
            return Completed(handler.encode_result(value, settings.max_result_bytes), added_by(job))
        # It caught its cancellation, and came back late.
        error: BaseException = TimeoutError()
    except asyncio.CancelledError:
        if held.stop is Stop.LOST or (held.stop is not None and not held.timed_out):
            return _stopped(held, job)
        error = RuntimeError("the handler was cancelled from within")
    except LostClaim:
        return None
    except BaseException as raised:  # noqa: BLE001 - SystemExit from user code must not end the worker
        if held.stop is Stop.LOST:
            return None
        error = raised
    if held.timed_out:
        error = TimeoutError(f"timed out after {handler.timeout:g} s")
    return _judged(error, held, handler, runtime, random, added_by(job))


def _payload(claim: Claim, handler: Handler[Any, Any]) -> Any:
    """The checked payload.

    It may come from SQL, or have been submitted to an older version of the handler.
    """
    if handler.payload_type is None:
        return decode(claim.payload)
    try:
        return handler.payload_type.validate_json(claim.payload)
    except ValidationError as invalid:
        first = invalid.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(("payload", *(str(part) for part in first["loc"])))
        raise UsageError(where, first["msg"], f"See what {handler.name} takes") from None


def _stopped(held: Held, job: Job[Any] | None) -> Interrupted | None:
    return None if held.stop is Stop.LOST else Interrupted(added_by(job))


def _judged(
    error: BaseException,
    held: Held,
    handler: Handler[Any, Any],
    runtime: Runtime,
    random: Random,
    added: str | None,
) -> Outcome:
    try:
        verdict = classify(error, permanent=handler.permanent, transient=handler.transient)
    except Exception:  # noqa: BLE001 - what cannot even be looked at is still counted, and ends
        verdict = Classified(Blame.TRANSIENT)
    claim, settings = held.claim, runtime.settings
    name = type(error).__name__
    _log.log(
        logging.INFO if verdict.blame is Blame.PERMANENT else logging.WARNING,
        "%s ended in %s (%s)",
        claim.kind,
        name,
        verdict.blame.value,
        extra={
            "job_id": claim.id,
            "attempt": claim.attempt,
            "kind": claim.kind,
            "worker": runtime.worker_name,
        },
        exc_info=error if _log.isEnabledFor(logging.DEBUG) else None,
    )
    if verdict.blame is Blame.INFRASTRUCTURE:
        return Interrupted(added)
    text = clipped(_message(error), settings.max_error_bytes)
    if verdict.blame is Blame.PERMANENT:
        return Failed(text, name, added)
    delay = retry_delay(claim.failures, verdict.retry_after, settings, random)
    return Retry(text, name, delay, added)


def _message(error: BaseException) -> str:
    """One readable sentence; never empty, and never an exception of its own."""
    try:
        if isinstance(error, SystemExit):
            return f"the handler called exit({error.code!r})"
        text = str(error)
    except Exception:  # noqa: BLE001 - a broken __str__ must not turn a failure into a crash
        text = ""
    return text or type(error).__name__


def _called(function: Callable[[Job[Any]], Any], job: Job[Any]) -> Any:
    """What the function returns. A future cannot hold a StopIteration: it would never be done."""
    try:
        return function(job)
    except StopIteration as stop:
        raise RuntimeError("the handler raised StopIteration") from stop


async def _in_thread(handler: Handler[Any, Any], job: Job[Any], threads: Executor) -> Any:
    """Run a plain function in a thread.

    A thread cannot be stopped, so this returns only when it has ended: a slot and a lease stay
    taken for as long as the function runs, and the heartbeat lets go of one that never ends.
    """
    context = contextvars.copy_context()
    call = functools.partial(context.run, _called, handler.function, job)
    future = asyncio.get_running_loop().run_in_executor(threads, call)
    cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            cancelled = job.cancel_requested = True
    if cancelled:
        future.exception()  # consumed: what it raised after it was told to stop does not count
        raise asyncio.CancelledError
    return future.result()
