"""The table of routes: what the router runs and what OpenAPI says come from it alone."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fanout.access import Scope

from .bodies import (
    body_of,
    check_media_type,
    endpoint_of,
    job_id_of,
    name_of,
    number_of,
    query_of,
)
from .callers import Caller, authenticated
from .models import Asked, Filter
from .problems import Forbidden
from .tenancy import Reach

if TYPE_CHECKING:
    from fanout import JobHandle, JobRow
    from fanout.store import Store

    from .service import Service

__all__ = ["Call", "Endpoint", "NoQuery", "Nothing", "Table", "rendered", "routes_of"]

Q = TypeVar("Q", bound=Filter)
B = TypeVar("B", bound=BaseModel)
A = TypeVar("A", bound=BaseModel)


class NoQuery(Filter):
    """No parameters."""


class Nothing(BaseModel):
    """No body."""


@dataclass(frozen=True, slots=True)
class Call(Generic[Q, B]):
    """One request, checked: who asks, of what, and with which values."""

    request: Request
    service: Service
    caller: Caller
    query: Q
    body: B

    @property
    def reach(self) -> Reach:
        """What this caller can reach: jobs of their tenant, if they have one."""
        return Reach(self.service.engine, self.caller.tenant)

    @property
    def store(self) -> Store:
        """Statements about a job that was reached, and about the installation."""
        return self.service.engine.store

    async def job(self) -> JobRow:
        """The job that the path names. Raises NotHere, JobNotFound."""
        return await self.reach.job(job_id_of(self.request))

    async def handle(self) -> JobHandle:
        """A handle on the job that the path names. Raises NotHere, JobNotFound."""
        return await self.reach.handle(job_id_of(self.request))

    def number(self, name: str) -> int:
        """Another number of the path."""
        return number_of(self.request, name)

    @property
    def name(self) -> str:
        """The name in the path. Raises NotHere for what cannot be one."""
        return name_of(self.request)

    @property
    def endpoint(self) -> str:
        """The webhooks' endpoint in the path. Raises NotHere for what cannot be one."""
        return endpoint_of(self.request)


Handle = Callable[[Call[Any, Any]], Awaitable[BaseModel | Response]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table."""

    method: str
    path: str
    handle: Handle
    scope: Scope | None
    """What the caller's key must be good for; None: any."""
    is_open: bool
    """Answered without asking who it is."""
    is_whole: bool
    """About the whole installation: not for a key that sees one tenant."""
    needs_database: bool
    query: type[Filter]
    body: type[BaseModel]
    answers: dict[int, type[BaseModel] | str | None]
    """Status → the model, or the media type of what is no model, or None: no body."""
    problems: frozenset[int] = frozenset()
    """Statuses of problems beside those that follow from the rest."""
    tag: str = "jobs"
    headers: tuple[dict[str, Any], ...] = field(default=())
    """Headers that are read."""

    @property
    def summary(self) -> str:
        """The first line of the handler's docstring."""
        return (inspect.getdoc(self.handle) or "").partition("\n")[0].rstrip(".")

    @property
    def has_body(self) -> bool:
        """Is a JSON body read?"""
        return self.body is not Nothing

    async def answer(self, service: Service, request: Request) -> Response:
        """Who is it, may they, what do they ask for; then the handler."""
        if self.method != "GET":
            check_media_type(request)
        caller = await self._let_in(service, request)
        if self.needs_database:
            await service.ready()
        query = query_of(request, self.query)
        body = await body_of(request, self.body) if self.has_body else Nothing()
        return rendered(await self.handle(Call(request, service, caller, query, body)))

    async def _let_in(self, service: Service, request: Request) -> Caller:
        """Raises Unauthenticated, Forbidden."""
        if self.is_open:
            return Caller("anybody", frozenset())
        if service.asks_database:
            await service.ready()
        caller = await authenticated(service.authenticate, request)
        if self.scope is not None and self.scope not in caller.scopes:
            raise Forbidden(
                f"the key is not good for this: it lacks the scope {self.scope}",
                f"Use a key with it: fanout keys create NAME --scope {self.scope}",
            )
        if self.is_whole and caller.tenant is not None:
            raise Forbidden(
                "this is about every tenant, and the key sees one",
                "Use a key without a tenant",
            )
        return caller


class Table:
    """Endpoints, added by decorators. An `APIRouter` of twenty lines, that knows scopes."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []

    def get(
        self,
        path: str,
        *,
        answers: type[BaseModel] | str | dict[int, type[BaseModel] | str | None],
        query: type[Filter] = NoQuery,
        scope: Scope | None = Scope.READ,
        is_open: bool = False,
        is_whole: bool = False,
        needs_database: bool = True,
        problems: frozenset[int] = frozenset(),
        tag: str = "jobs",
        headers: tuple[dict[str, Any], ...] = (),
    ) -> Callable[[Handle], Handle]:
        """A read."""
        return self._add(
            "GET", path, answers, query, Nothing, scope, is_open=is_open, is_whole=is_whole,
            needs_database=needs_database, problems=problems, tag=tag, headers=headers,
        )  # fmt: skip

    def post(
        self,
        path: str,
        *,
        body: type[Asked],
        answers: type[BaseModel] | dict[int, type[BaseModel] | str | None],
        scope: Scope | None,
        is_open: bool = False,
        is_whole: bool = False,
        problems: frozenset[int] = frozenset(),
        tag: str = "jobs",
        headers: tuple[dict[str, Any], ...] = (),
    ) -> Callable[[Handle], Handle]:
        """A write."""
        return self._add(
            "POST", path, answers, NoQuery, body, scope, is_open=is_open, is_whole=is_whole,
            problems=problems, tag=tag, headers=headers,
        )  # fmt: skip

    def put(
        self, path: str, *, body: type[Asked], answers: type[BaseModel], tag: str
    ) -> Callable[[Handle], Handle]:
        """A setting of the installation."""
        return self._add("PUT", path, answers, NoQuery, body, Scope.OPERATE, is_whole=True, tag=tag)

    def delete(
        self,
        path: str,
        *,
        answers: dict[int, type[BaseModel] | str | None],
        tag: str,
        scope: Scope | None = Scope.OPERATE,
    ) -> Callable[[Handle], Handle]:
        """An end. `scope` None: open to everybody who holds what is to be ended; else of something
        of the whole installation.
        """
        return self._add(
            "DELETE", path, answers, NoQuery, Nothing, scope, is_open=scope is None,
            is_whole=scope is not None, tag=tag,
        )  # fmt: skip

    def _add(
        self,
        method: str,
        path: str,
        answers: type[BaseModel] | str | dict[int, type[BaseModel] | str | None],
        query: type[Filter],
        body: type[BaseModel],
        scope: Scope | None,
        *,
        is_open: bool = False,
        is_whole: bool = False,
        needs_database: bool = True,
        problems: frozenset[int] = frozenset(),
        tag: str = "jobs",
        headers: tuple[dict[str, Any], ...] = (),
    ) -> Callable[[Handle], Handle]:
        def add(handle: Handle) -> Handle:
            self.endpoints.append(
                Endpoint(
                    method,
                    path,
                    handle,
                    scope,
                    is_open,
                    is_whole,
                    needs_database,
                    query,
                    body,
                    answers if isinstance(answers, dict) else {200: answers},
                    problems,
                    tag,
                    headers,
                )
            )
            return handle

        return add


def routes_of(endpoints: Iterable[Endpoint], service: Service) -> list[Route]:
    """For the router: one route a path, so that a wrong method is told all that are right."""
    by_path: dict[str, dict[str, Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, {})[endpoint.method] = endpoint

    def route(path: str, methods: dict[str, Endpoint]) -> Route:
        async def run(request: Request) -> Response:
            method = "GET" if request.method == "HEAD" else request.method
            return await methods[method].answer(service, request)

        return Route(path, run, methods=list(methods))

    return [route(path, methods) for path, methods in by_path.items()]


def rendered(answer: BaseModel | Response, status: int = 200) -> Response:
    """A model as JSON; a response as it is."""
    if isinstance(answer, Response):
        return answer
    return Response(as_json(answer), status, media_type="application/json")


def as_json(answer: BaseModel) -> bytes:
    """The JSON of a model.

    What came in by SQL may hold what the API itself refuses: a lone surrogate, nesting beyond what
    the quick way writes. It is shown, cleaned, and never an error.
    """
    try:
        return answer.model_dump_json(by_alias=True).encode()
    except (ValueError, UnicodeError, RecursionError):
        plain = answer.model_dump(by_alias=True)
        text = json.dumps(plain, default=_plain, ensure_ascii=True)
        return text.encode("utf-8", "replace")


def _plain(value: Any) -> Any:
    isoformat = getattr(value, "isoformat", None)
    return isoformat() if isoformat is not None else str(value)
