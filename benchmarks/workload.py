"""What every contender moves: so many batches of so many children, with these payloads."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from pydantic_core import to_json

CHILD: Final = "bench_child"
BATCH: Final = "bench_batch"
FOLLOW_UP: Final = "bench_follow_up"
PING: Final = "bench_ping"


@dataclass(frozen=True, slots=True)
class Workload:
    """One measured run."""

    children: int
    """Over all batches."""
    batches: int = 1
    payload_bytes: int = 32
    """JSON bytes of a child's payload, and about those of its result."""
    chunk_size: int = 1000
    """Children that one statement dispatches."""
    claim_limit: int = 500
    """Most rows that one statement claims, and that one flush ends."""
    concurrency: int = 100
    """Handlers at once in a worker process of the engine."""
    prefetch: int = 500
    """Most jobs that a worker process of the engine claims ahead."""

    @property
    def sizes(self) -> list[int]:
        """Children of each batch."""
        share, rest = divmod(self.children, self.batches)
        return [share + (n < rest) for n in range(self.batches)]

    def payload(self, number: int) -> dict[str, Any]:
        """A child's payload, of `payload_bytes` where that many are enough for its number."""
        bare = {"n": number, "pad": ""}
        return bare | {"pad": "x" * max(0, self.payload_bytes - len(to_json(bare)))}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(**values)


def document_key(number: int) -> str:
    return f"doc-{number:08d}"
