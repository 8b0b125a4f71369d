"""What a slow and expensive service counts: who is in, what was paid, how often it said no.

`service` puts it behind HTTP. Nothing here waits or reads a clock: time is a parameter.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

__all__ = ["LLM", "PARSER", "Fault", "Meter", "Refusal", "Rules", "Stats", "Told", "Visit"]

PARSER: Final = "parser"
LLM: Final = "llm"
BURST_SECONDS: Final = 10.0
"""So much of a rate may be used up at once."""
RETRY_SECONDS: Final = 1.0
MINUTE: Final = 60.0


class Fault(StrEnum):
    """How a call can go wrong though it was let in."""

    ERROR = "500"
    """Nothing was done, nothing is paid."""
    LOST = "answer lost"
    """Done and paid, but the connection is reset before the answer."""
    HANG = "no answer"
    """Nothing ever comes."""


class Rules(BaseModel):
    """How the service behaves. A fault `every` n-th call of all that were let in; 0 is never."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parse_seconds: float = Field(default=1.0, gt=0)
    """One parse takes this on average, from half to half as much again; the LLM twice as long."""
    parse_at_once: int = Field(default=2, ge=1)
    llm_at_once: int = Field(default=5, ge=1)
    llm_requests_per_minute: int = Field(default=120, ge=1)
    llm_tokens_per_minute: int = Field(default=60_000, ge=1)
    error_every: int = Field(default=9, ge=0)
    lost_every: int = Field(default=13, ge=0)
    hang_every: int = Field(default=29, ge=0)
    away_after: int = Field(default=30, ge=0)
    """The parser gives up after so many parses, once; 0 is never."""
    away_seconds: float = Field(default=10.0, ge=0)


class Stats(BaseModel):
    """What the service has to tell in the end."""

    model_config = ConfigDict(frozen=True)

    calls: dict[str, int]
    """Service → calls."""
    answers: dict[str, int]
    """"parser 503" → how often."""
    faults: dict[str, int]
    """"parser answer lost" → how often."""
    most_at_once: dict[str, int]
    """Service → the most calls that were in at one moment, counted here."""
    paid: dict[str, int]
    """Service → works that were charged."""
    cost: float
    """What all of them cost."""
    paid_twice: int
    """Documents that one service charged more than once."""
    replayed: int
    """Answers given again at no cost, for a key whose work was paid."""
    asked_again: int
    """Calls for a key whose answer had arrived before."""


@dataclass(slots=True, eq=False)
class Visit:
    """A call that was let in, until `Meter.leave`."""

    service: str
    fault: Fault | None
    is_there: Callable[[], bool]
    """Is the other side still connected?"""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A call that was not let in."""

    status: int
    retry_after: float
    """Seconds."""
    reason: str


@dataclass(frozen=True, slots=True)
class Told:
    """The answer that was given, or lost, for this key before."""

    answer: dict[str, Any]


@dataclass(slots=True)
class _Bucket:
    """Smooth: what was used up comes back as time passes, at `per_minute`."""

    per_minute: float
    used: float = 0.0
    at: float = 0.0

    def wait_for(self, amount: float, now: float) -> float:
        """Seconds until `amount` may be used; 0: now."""
        self.used = max(0.0, self.used - (now - self.at) * self.per_minute / MINUTE)
        self.at = now
        most = max(amount, self.per_minute * BURST_SECONDS / MINUTE)
        return max(0.0, (self.used + amount - most) * MINUTE / self.per_minute)


@dataclass(slots=True)
class _Counts:
    calls: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    works: Counter[str] = field(default_factory=Counter)
    """Let in."""
    most: Counter[str] = field(default_factory=Counter)
    paid: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(service, document) → how often it was charged."""
    cost: float = 0.0
    replayed: int = 0
    asked_again: int = 0


class Meter:
    """The service's books. Every method is safe from any thread.

    `memory` is a file that outlives the process: what was paid is remembered by its key.
    """

    def __init__(self, rules: Rules, memory: Path | None = None) -> None:
        self._rules = rules
        self._memory = memory
        self._lock = threading.Lock()
        self._in: list[Visit] = []
        self._answers: dict[tuple[str, str], dict[str, Any]] = {}
        self._arrived: set[tuple[str, str]] = set()
        self._counts = _Counts()
        self._requests = _Bucket(rules.llm_requests_per_minute)
        self._tokens = _Bucket(rules.llm_tokens_per_minute)
        self._parsed = 0
        self._away_until = 0.0
        if memory is not None:
            self._remember(memory)

    def enter(
        self,
        service: str,
        key: str,
        now: float,
        is_there: Callable[[], bool],
        *,
        tokens: int = 0,
    ) -> Visit | Refusal | Told:
        """Ask to be let in, at `now` (seconds of any clock that does not go back)."""
        with self._lock:
            counts = self._counts
            counts.calls[service] += 1
            if service == PARSER and now < self._away_until:
                return self._refused(service, 503, self._away_until - now, "back in a while")
            if (service, key) in self._arrived:
                counts.asked_again += 1
            if (answer := self._answers.get((service, key))) is not None:
                counts.replayed += 1
                return Told(answer)
            # A client that went away has let its place go, even if its thread has yet to see that.
            inside = sum(one.service == service and one.is_there() for one in self._in)
            if inside >= self._at_once(service):
                return self._refused(service, 429, RETRY_SECONDS, "too many at once")
            if service == LLM:
                wait = max(self._requests.wait_for(1, now), self._tokens.wait_for(tokens, now))
                if wait > 0:
                    return self._refused(service, 429, wait, "above the rate")
                self._requests.used += 1
                self._tokens.used += tokens
            counts.most[service] = max(counts.most[service], inside + 1)
            counts.works[service] += 1
            visit = Visit(service, self._fault(service), is_there)
            self._in.append(visit)
            return visit

    def _at_once(self, service: str) -> int:
        return self._rules.parse_at_once if service == PARSER else self._rules.llm_at_once

    def _refused(self, service: str, status: int, wait: float, reason: str) -> Refusal:
        self._counts.answers[f"{service} {status}"] += 1
        return Refusal(status, wait, reason)

    def _fault(self, service: str) -> Fault | None:
        number, rules = self._counts.works[service], self._rules
        for fault, every in (
            (Fault.HANG, rules.hang_every),
            (Fault.LOST, rules.lost_every),
            (Fault.ERROR, rules.error_every),
        ):
            if every and number % every == 0:
                self._counts.faults[f"{service} {fault}"] += 1
                return fault
        return None

    def leave(self, visit: Visit) -> None:
        """The call is over, however it ended. Again is fine."""
        with self._lock:
            if visit in self._in:
                self._in.remove(visit)

    def pay(
        self, service: str, key: str, document: str, answer: dict[str, Any], cost: float, now: float
    ) -> None:
        """The work is done: charge it, and keep its answer for whoever asks with this key again.

        A key is charged once, also when its client went away in the middle and came back for it
        while the first work was still going on.
        """
        with self._lock:
            if (service, key) in self._answers:
                return
            self._paid(service, key, document, answer, cost)
            if service == PARSER:
                self._parsed += 1
                if self._parsed == self._rules.away_after:
                    self._away_until = now + self._rules.away_seconds
            if self._memory is not None:
                with self._memory.open("a", encoding="utf-8") as file:
                    file.write(_Line(at=(service, key, document), answer=answer, cost=cost).text())

    def _paid(
        self, service: str, key: str, document: str, answer: dict[str, Any], cost: float
    ) -> None:
        self._counts.paid[service, document] += 1
        self._counts.cost += cost
        self._answers[service, key] = answer

    def arrived(self, service: str, key: str) -> None:
        """The answer went out whole."""
        with self._lock:
            self._arrived.add((service, key))

    def answered(self, service: str, status: int) -> None:
        """Count an answer that is not a refusal."""
        with self._lock:
            self._counts.answers[f"{service} {status}"] += 1

    def stats(self) -> Stats:
        """The books as they stand."""
        with self._lock:
            counts = self._counts
            paid = Counter[str]()
            for (service, _), times in counts.paid.items():
                paid[service] += times
            return Stats(
                calls=dict(counts.calls),
                answers=dict(counts.answers),
                faults=dict(counts.faults),
                most_at_once=dict(counts.most),
                paid=dict(paid),
                cost=round(counts.cost, 6),
                paid_twice=sum(times > 1 for times in counts.paid.values()),
                replayed=counts.replayed,
                asked_again=counts.asked_again,
            )

    def _remember(self, memory: Path) -> None:
        if not memory.exists():
            return
        for text in memory.read_text(encoding="utf-8").splitlines():
            with suppress(ValidationError, json.JSONDecodeError):  # half a line: it was killed
                line = _Line.model_validate_json(text)
                self._paid(*line.at, line.answer, line.cost)


class _Line(BaseModel):
    """One paid work in the memory's file."""

    at: tuple[str, str, str]
    """Service, key, document."""
    answer: dict[str, Any]
    cost: float

    def text(self) -> str:
        return self.model_dump_json() + "\n"
