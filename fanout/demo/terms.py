"""What the paid service and its customers say to each other, and where it is."""

from __future__ import annotations

import os
from typing import Final, Self

from pydantic import BaseModel, ConfigDict

from .extract import Extracted
from .meter import Rules

__all__ = ["Access", "Parsed", "Prompt", "Summary"]

VARIABLE: Final = "DEMO_SERVICE"


class Access(BaseModel):
    """Where the service is, and how to use it: for workers, in their environment."""

    model_config = ConfigDict(frozen=True)

    address: str
    key: str
    rules: Rules
    timeout_seconds: float
    """Around each call."""

    def environment(self) -> dict[str, str]:
        """What a worker process has to find in its environment: `ps` would show arguments."""
        return {VARIABLE: self.model_dump_json()}

    @classmethod
    def from_environment(cls) -> Self:
        """Of this process. Raises KeyError: it was not started by `fanout demo --parser`."""
        return cls.model_validate_json(os.environ[VARIABLE])


class Parsed(BaseModel):
    """What the parser answers, and what is kept of it: it was paid for."""

    document: Extracted
    pages: int
    tokens: int
    """Of the text, as the LLM counts."""
    cost: float


class Prompt(BaseModel):
    """What the LLM is asked. The text stays where it is: the stand-in is told how long it is."""

    document: str
    title: str
    key_terms: tuple[str, ...] = ()
    tokens: int


class Summary(BaseModel):
    """What the LLM answers."""

    summary: str
    tokens: int
    """Used, of the prompt and of the answer."""
    cost: float
