"""Server-sent events as a browser reads them: the parser of the HTML standard, 9.2.6."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

ENDS = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True)
class Message:
    """One event as it would be dispatched."""

    id: str
    name: str
    text: str

    @property
    def data(self) -> Any:
        return json.loads(self.text, parse_constant=_refuse)

    @property
    def number(self) -> int:
        """Of a cursor `generation.number`."""
        return int(self.id.split(".")[1])


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


class Browser:
    """Bytes in, messages out; keeps the last event id, as EventSource does."""

    def __init__(self) -> None:
        self.last_id = ""
        self.retry: int | None = None
        self._bytes = b""
        self._id = ""
        self._name = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[Message]:
        text = self._bytes + chunk
        # CRLF, LF and CR end a line, nothing else does; a CR at the end may be half a CRLF.
        if text.endswith(b"\r"):
            text, held = text[:-1], b"\r"
        else:
            held = b""
        *lines, rest = ENDS.split(text)
        self._bytes = rest + held
        messages = [self._line(line.decode("utf-8")) for line in lines]
        return [message for message in messages if message is not None]

    def _line(self, line: str) -> Message | None:
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            return None
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        elif field == "id" and "\0" not in value:
            self._id = value
        elif field == "retry" and re.fullmatch(r"[0-9]+", value):
            self.retry = int(value)
        return None

    def _dispatch(self) -> Message | None:
        self.last_id = self._id
        name, data = self._name or "message", self._data
        self._name, self._data = "", []
        return Message(self.last_id, name, "\n".join(data)) if data else None
