"""A stand-in for what a customer pays for: a parser and an LLM, over HTTP, on this machine alone.

`POST /parse` is slow, takes two at a time (429 with Retry-After above), and gives up for a while
(503). `POST /summarize` takes five, and so many requests and tokens a minute. Both fail now and
then, never answer now and then, and lose an answer now and then when the work is done. Both ask for
the bearer key and an Idempotency-Key, and charge a key once. `GET /stats` tells what they saw.

`python -m fanout.demo.service` reads its `Orders` as one line of JSON, prints its address, and ends
when its standard input does: it outlives nobody.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import random
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from .documents import MediaKind, Snapshot, UnreadableDocument, path_of
from .extract import extract
from .meter import LLM, PARSER, Fault, Meter, Refusal, Rules, Told, Visit
from .terms import Parsed, Prompt, Summary

__all__ = ["Orders", "Service", "main"]

HOST: Final = "127.0.0.1"
MOST_BODY_BYTES: Final = 64 * 1024
MOST_WAIT_SECONDS: Final = 120.0
WORDS_PER_PAGE: Final = 400
CHARACTERS_PER_TOKEN: Final = 4
MOST_PROMPT_TOKENS: Final = 2_000
SUMMARY_TOKENS: Final = 60
COST_PER_PAGE: Final = 0.01
COST_PER_1000_TOKENS: Final = 0.02


class Orders(BaseModel):
    """What the process reads before it serves."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: str
    """Who asks has to know it."""
    rules: Rules = Rules()
    memory: Path | None = None
    """File of what was paid, for the next process."""


class Service(ThreadingHTTPServer):
    """The server; `serve_forever()` in a thread of its own, `shutdown()` from another one."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, orders: Orders) -> None:
        super().__init__((HOST, 0), _Handler)
        self.orders = orders
        self.meter = Meter(orders.rules, orders.memory)
        self._cut: set[int] = set()

    @property
    def address(self) -> str:
        """Without a slash at its end."""
        return f"http://{HOST}:{self.server_address[1]}"

    def cut(self, connection: socket.socket) -> None:
        """Reset this connection instead of closing it."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._cut.add(connection.fileno())

    def shutdown_request(self, request: Any) -> None:
        """After a request; a goodbye before the close would not be a reset."""
        if request.fileno() in self._cut:
            self._cut.discard(request.fileno())
            self.close_request(request)
        else:
            super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: who hangs up in the middle is no defect."""


class _Handler(BaseHTTPRequestHandler):
    """One request, one connection (HTTP/1.0)."""

    @property
    def service(self) -> Service:
        """The server, by its own type."""
        assert isinstance(self.server, Service)  # noqa: S101 - nobody else makes one
        return self.server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Nothing: the meter counts."""

    def do_GET(self) -> None:
        if self._is_known() and self.path == "/stats":
            self._send(HTTPStatus.OK, self.service.meter.stats().model_dump())
        else:
            self._send(HTTPStatus.NOT_FOUND, {"detail": "there is /stats"})

    def do_POST(self) -> None:
        if not self._is_known():
            self._send(HTTPStatus.UNAUTHORIZED, {"detail": "who are you?"})
            return
        key = self.headers.get("Idempotency-Key", "")
        length = int(self.headers.get("Content-Length", "0"))
        if not key or not 0 < length <= MOST_BODY_BYTES:
            self._send(HTTPStatus.BAD_REQUEST, {"detail": "no Idempotency-Key, or no fit body"})
            return
        body = self.rfile.read(length)
        try:
            if self.path == "/parse":
                self._parse(key, Snapshot.model_validate_json(body))
            elif self.path == "/summarize":
                self._summarize(key, Prompt.model_validate_json(body))
            else:
                self._send(HTTPStatus.NOT_FOUND, {"detail": "there are /parse and /summarize"})
        except ValidationError as error:
            self._send(HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": str(error)})

    def _is_known(self) -> bool:
        given = self.headers.get("Authorization", "").encode()
        return hmac.compare_digest(given, f"Bearer {self.service.orders.key}".encode())

    # -- the two services --------------------------------------------------------------------------

    def _parse(self, key: str, document: Snapshot) -> None:
        visit = self._let_in(PARSER, key)
        if visit is None:
            return
        try:
            takes = self.service.orders.rules.parse_seconds * random.uniform(0.5, 1.5)
            if not self._worked(visit, takes):
                return
            try:
                found = extract(path_of(document.key), document.kind, name=document.name)
            except (UnreadableDocument, OSError) as error:
                self._end(visit, HTTPStatus.UNPROCESSABLE_ENTITY, {"detail": str(error)})
                return
            pages = max(1, math.ceil(found.words / WORDS_PER_PAGE))
            tokens = min(MOST_PROMPT_TOKENS, math.ceil(found.characters / CHARACTERS_PER_TOKEN))
            cost = pages * COST_PER_PAGE
            answer = Parsed(document=found, pages=pages, tokens=tokens, cost=cost)
            self._deliver(visit, key, document.key, answer.model_dump(mode="json"), cost)
        finally:
            self.service.meter.leave(visit)

    def _summarize(self, key: str, prompt: Prompt) -> None:
        tokens = prompt.tokens + SUMMARY_TOKENS
        visit = self._let_in(LLM, key, tokens)
        if visit is None:
            return
        try:
            takes = self.service.orders.rules.parse_seconds * random.uniform(1.5, 3)
            if not self._worked(visit, takes):
                return
            cost = tokens * COST_PER_1000_TOKENS / 1000
            about = ", ".join(prompt.key_terms) or "nothing in particular"
            answer = Summary(summary=f"{prompt.title}: {about}", tokens=tokens, cost=cost)
            self._deliver(visit, key, prompt.document, answer.model_dump(mode="json"), cost)
        finally:
            self.service.meter.leave(visit)

    # -- what both do ------------------------------------------------------------------------------

    def _let_in(self, service: str, key: str, tokens: int = 0) -> Visit | None:
        def is_there() -> bool:
            try:
                return bool(self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:
                return True
            except OSError:
                return False

        match self.service.meter.enter(service, key, time.monotonic(), is_there, tokens=tokens):
            case Visit() as visit:
                return visit
            case Told(answer):
                self.service.meter.answered(service, HTTPStatus.OK)
                self._send(HTTPStatus.OK, answer, {"Idempotent-Replayed": "true"})
                self.service.meter.arrived(service, key)
            case Refusal(status, retry_after, reason):
                self._send(status, {"detail": reason}, {"Retry-After": f"{math.ceil(retry_after)}"})
        return None

    def _worked(self, visit: Visit, seconds: float) -> bool:
        """Take the time it takes. False: nothing is to be delivered, or nobody waits for it."""
        if visit.fault is Fault.HANG:
            self._wait(visit, MOST_WAIT_SECONDS)
            return False
        if visit.fault is Fault.ERROR:
            if self._wait(visit, seconds / 2):
                self._end(visit, HTTPStatus.INTERNAL_SERVER_ERROR, {"detail": "it went wrong"})
            return False
        return self._wait(visit, seconds)

    def _wait(self, visit: Visit, seconds: float) -> bool:
        """Wait, and see whether the client does, too."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if not visit.is_there():
                return False
            time.sleep(min(0.05, left))
        return True

    def _deliver(
        self, visit: Visit, key: str, document: str, answer: dict[str, Any], cost: float
    ) -> None:
        meter = self.service.meter
        meter.pay(visit.service, key, document, answer, cost, time.monotonic())
        if visit.fault is Fault.LOST:
            self.service.cut(self.connection)
            return
        self._end(visit, HTTPStatus.OK, answer)
        meter.arrived(visit.service, key)

    def _end(self, visit: Visit, status: int, body: object) -> None:
        # Who has the answer lets the next one in: the place must be free by then.
        self.service.meter.leave(visit)
        self.service.meter.answered(visit.service, status)
        self._send(status, body)

    def _send(self, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def main() -> None:
    """Serve until standard input ends."""
    orders = Orders.model_validate_json(sys.stdin.readline())
    # The first document would wait for tables to be loaded, and its client for no good reason.
    extract(Path(__file__), MediaKind.TEXT)
    with Service(orders) as service:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        print(service.address, flush=True)  # noqa: T201 - for whoever started this
        with suppress(KeyboardInterrupt):
            sys.stdin.read()
    # Threads that wait for clients who are gone need not be waited for.
    os._exit(0)


if __name__ == "__main__":
    main()
