"""The customer's side of the paid service: two calls, each with the idempotency key of its job."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

import httpx
from pydantic import BaseModel

from fanout import PermanentError

from .documents import Snapshot
from .meter import Stats
from .terms import Access, Parsed, Prompt, Summary

__all__ = ["books", "parse", "summarize"]

A = TypeVar("A", bound=BaseModel)


async def parse(access: Access, document: Snapshot, key: str) -> Parsed:
    """Have a document parsed.

    Raises:
        PermanentError: it cannot be read; says why.
        httpx.HTTPError: anything else, with the Retry-After that the service gave.
    """
    return await _asked(access, "/parse", document, key, Parsed)


async def summarize(access: Access, prompt: Prompt, key: str) -> Summary:
    """Ask the LLM. Raises as `parse` does."""
    return await _asked(access, "/summarize", prompt, key, Summary)


async def books(access: Access) -> Stats:
    """What the service counted. Raises httpx.HTTPError."""
    async with _client(access) as client:
        response = await client.get("/stats", timeout=10)
        response.raise_for_status()
        return Stats.model_validate_json(response.content)


async def _asked(access: Access, path: str, body: BaseModel, key: str, answer: type[A]) -> A:
    async with _client(access) as client:
        response = await client.post(
            path,
            content=body.model_dump_json(),
            headers={"Content-Type": "application/json", "Idempotency-Key": key},
        )
    if response.is_error:
        detail = response.json()["detail"]
        if response.status_code == HTTPStatus.UNPROCESSABLE_ENTITY:
            raise PermanentError(detail)
        # As raise_for_status() would; the engine reads status and Retry-After from any client's
        # errors. Only the text is for the people who watch.
        raise httpx.HTTPStatusError(
            f"{path[1:]}: {response.status_code}, {detail}",
            request=response.request,
            response=response,
        )
    return answer.model_validate_json(response.content)


def _client(access: Access) -> httpx.AsyncClient:
    # How long a call may take is said around it, by job.timeout; no proxy leads to this machine.
    return httpx.AsyncClient(
        base_url=access.address,
        headers={"Authorization": f"Bearer {access.key}"},
        timeout=None,  # noqa: S113 - see above
        trust_env=False,
    )
