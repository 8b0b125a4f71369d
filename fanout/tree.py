"""The chain that a job belongs to, as a list in reading order. Pure.

#1 papers_batch            the oldest
├─ #7 papers_part          a batch inside it
│  └─ #9 papers_part_report   what followed its close
└─ #12 papers_report
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from .states import Status
from .values import outcome_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime

__all__ = ["Relation", "Tree", "TreeNode", "tree_from"]

MOST_NODES: Final = 500
MOST_STEPS_UP: Final = 100


class Relation(StrEnum):
    """How a job hangs on the one that it stands under."""

    TOP = "top"
    """It stands under none: nobody dispatched it, and it follows no close."""
    CHILD = "child"
    """A batch that another one dispatched."""
    FOLLOW_UP = "follow_up"
    """Enqueued by the other one's close."""


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One job of a tree, with its own children counted."""

    id: int
    kind: str
    relation: Relation
    level: int
    """0: the top. A job stands below the last one before it whose level is one less."""
    under_id: int | None
    """The job it stands under."""
    of_generation: int | None
    """Of a follow-up: which close it followed, 1 for the first."""
    key: str | None
    """Of a child its document key, of the others their idempotency key."""
    status: Status
    verdict: str | None
    generation: int
    total: int
    completed: int
    failed: int
    cancelled: int
    why: str | None
    """The reason or error it ended with."""
    created_at: datetime
    finished_at: datetime | None

    @property
    def outcome(self) -> str:
        """The status, and "completed with failures" for a batch in which children failed."""
        return outcome_of(self.status, self.failed)


@dataclass(frozen=True, slots=True)
class Tree:
    """Everything around job `id`: what it came from, what is inside it, what followed."""

    id: int
    """The job that was asked for; it is one of the nodes."""
    nodes: tuple[TreeNode, ...]
    """Each before those under it, which are in the order they were made."""
    cut_above: bool
    """The chain is longer: it begins before the first node."""
    cut_below: bool
    """There are more jobs than these."""

    @property
    def is_closed(self) -> bool:
        """Has everything in it ended? A retry, or the follow-up of a retry, may open it again."""
        return all(node.status.is_terminal for node in self.nodes)


def tree_from(job_id: int, rows: Sequence[Any]) -> Tree:
    """The rows of `reads/tree.sql`, at least one, in reading order."""
    known = {row["id"] for row in rows}
    under: dict[int | None, list[Any]] = defaultdict(list)
    for row in rows:
        above = row["parent_id"] or row["follows_id"]
        # An id that is not below its own cannot be what it came from.
        under[above if above in known and above < row["id"] else None].append(row)
    return Tree(
        job_id,
        tuple(_walk(under)),
        cut_above=rows[0]["cut_above"],
        cut_below=rows[0]["cut_below"],
    )


def _walk(under: dict[int | None, list[Any]]) -> Iterator[TreeNode]:
    """Without recursion: a follow-up that follows itself makes a chain of any length."""
    todo = [(row, 0) for row in reversed(under[None])]
    while todo:
        row, level = todo.pop()
        yield _node(row, level)
        todo.extend((inner, level + 1) for inner in reversed(under.get(row["id"], [])))


def _node(row: Any, level: int) -> TreeNode:
    is_child = row["parent_id"] is not None
    follows = row["follows_id"] is not None
    return TreeNode(
        id=row["id"],
        kind=row["kind"],
        relation=Relation.CHILD if is_child else Relation.FOLLOW_UP if follows else Relation.TOP,
        level=level,
        under_id=row["parent_id"] if is_child else row["follows_id"],
        of_generation=row["follows_generation"],
        key=row["document_key"] if is_child else row["key"],
        status=Status(row["status"]),
        verdict=row["verdict"],
        generation=row["generation"],
        total=row["total"],
        completed=row["completed"],
        failed=row["failed"],
        cancelled=row["cancelled"],
        why=row["why"],
        created_at=row["created_at"],
        finished_at=row["finished_at"],
    )
