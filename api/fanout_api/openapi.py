"""The OpenAPI 3.1 document, made of the table of routes and of the models that it names."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from openapi_pydantic import OpenAPI
from openapi_pydantic.util import construct_open_api_with_schema_class
from pydantic import BaseModel

from .bodies import NAME
from .callers import COOKIE
from .models import ENDPOINT, MAX_ID
from .problems import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .service import Service
    from .table import Endpoint

__all__ = ["document_of"]

Json = dict[str, Any]

PROBLEM: Final = "application/problem+json"
JSON: Final = "application/json"
REFERENCE: Final = "#/components/schemas/{model}"
MEDIA_TYPES: Final = {
    "text/csv": ("text/csv", "application/x-ndjson"),
    "text/event-stream": ("text/event-stream", "application/x-ndjson"),
}
"""Answers that come in one of two forms."""
SECURITY: Final = {
    "key": {"type": "http", "scheme": "bearer"},
    "session": {"type": "apiKey", "name": COOKIE, "in": "cookie"},
}
MISDIRECTED: Final = "421"


def document_of(service: Service, root_path: str) -> Json:
    """The document of an app that is mounted at `root_path`."""
    return {**_document(service.endpoints), "servers": [{"url": root_path or "/"}]}


def _document(endpoints: Sequence[Endpoint]) -> Json:
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    api = OpenAPI.model_validate(
        {
            "openapi": "3.1.1",
            "info": {
                "title": "fanout",
                "version": "1",
                "description": "Fan-out jobs on PostgreSQL alone: counted exactly, closed once.",
            },
            "paths": paths,
            "components": {"securitySchemes": SECURITY},
        }
    )
    whole = construct_open_api_with_schema_class(api, list(_models(endpoints)))
    document: Json = whole.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return document


def _models(endpoints: Sequence[Endpoint]) -> set[type[BaseModel]]:
    answers = {a for e in endpoints for a in e.answers.values() if isinstance(a, type)}
    return answers | {e.body for e in endpoints if e.has_body} | {Problem}


def _operation(endpoint: Endpoint) -> Json:
    operation: Json = {
        "operationId": endpoint.handle.__name__,
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": [*_of_path(endpoint), *_of_query(endpoint), *endpoint.headers],
        "responses": dict(sorted(_responses(endpoint))),
        "security": [] if endpoint.is_open else [{"key": []}, {"session": []}, {}],
    }
    if endpoint.has_body:
        operation["requestBody"] = {"required": True, "content": {JSON: _model(endpoint.body)}}
    return operation


def _of_path(endpoint: Endpoint) -> Iterator[Json]:
    for name in ("job_id", "number"):
        if f"{{{name}}}" in endpoint.path:
            schema: Json = {"type": "integer", "minimum": 1, "maximum": MAX_ID}
            yield {"name": name, "in": "path", "required": True, "schema": schema}
    if "{name}" in endpoint.path:
        schema = {"type": "string", "pattern": f"^{NAME.pattern}$"}
        yield {"name": "name", "in": "path", "required": True, "schema": schema}
    if "{endpoint}" in endpoint.path:
        schema = {"type": "string", "pattern": ENDPOINT}
        yield {"name": "endpoint", "in": "path", "required": True, "schema": schema}


def _of_query(endpoint: Endpoint) -> Iterator[Json]:
    schema = endpoint.query.model_json_schema(ref_template=REFERENCE)
    definitions = schema.get("$defs", {})
    for name, field in schema.get("properties", {}).items():
        yield {
            "name": name,
            "in": "query",
            "required": name in schema.get("required", ()),
            "description": field.get("description", ""),
            "schema": _inlined(field, definitions),
        }


def _inlined(field: Json, definitions: Json) -> Json:
    """A parameter's schema without references, and without the null that stands for "not given"."""
    options = [_one(option, definitions) for option in field.get("anyOf", [field])]
    options = [option for option in options if option.get("type") != "null"]
    return options[0] if len(options) == 1 else {"anyOf": options}


def _one(option: Json, definitions: Json) -> Json:
    reference = option.get("$ref")
    found = definitions[reference.rpartition("/")[2]] if reference else option
    return {k: v for k, v in found.items() if k not in ("title", "default", "description")}


def _model(model: type[BaseModel]) -> Json:
    return {"schema": {"$ref": REFERENCE.format(model=model.__name__)}}


def _responses(endpoint: Endpoint) -> Iterator[tuple[str, Json]]:
    for status, answer in endpoint.answers.items():
        yield str(status), _response(status, answer)
    for status in _problems(endpoint) - set(endpoint.answers):
        yield (
            str(status),
            {"description": HTTPStatus(status).phrase, "content": {PROBLEM: _model(Problem)}},
        )
    yield MISDIRECTED, {"description": "Another host's name; the body is empty"}


def _response(status: int, answer: type[BaseModel] | str | None) -> Json:
    response: Json = {"description": HTTPStatus(status).phrase}
    if isinstance(answer, str):
        kind = "object" if answer == JSON else "string"
        schema = {"schema": {"type": kind}}
        response["content"] = dict.fromkeys(MEDIA_TYPES.get(answer, (answer,)), schema)
    elif answer is not None:
        response["content"] = {JSON: _model(answer)}
    return response


def _problems(endpoint: Endpoint) -> set[int]:
    """The statuses that follow from what an endpoint does."""
    statuses = {403, 422, 500} | set(endpoint.problems)
    if not endpoint.is_open:
        statuses |= {401}
    if endpoint.needs_database or not endpoint.is_open:
        statuses |= {503}
    if "{" in endpoint.path:
        statuses |= {404}
    if endpoint.has_body:
        statuses |= {400, 408, 413, 415}
    if endpoint.method == "DELETE":
        statuses |= {413, 415}
    return statuses
