"""`tree`: what a job came from, the batches inside it, what followed."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer
from rich.text import Text
from rich.tree import Tree as Drawing

from fanout.tree import MOST_NODES, Relation, Tree, TreeNode

from .database import Dsn, Schema, opened
from .exits import clean
from .jobs import JobId
from .output import STYLES, AsJson, console, jsonable, print_json

__all__ = ["tree"]


def tree(
    job: JobId,
    dsn: Dsn = None,
    schema: Schema = None,
    *,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="The most jobs.")] = MOST_NODES,
    as_json: AsJson = False,
) -> None:
    """Show the whole that a job is part of: batches, batches inside them, follow-ups."""

    async def read() -> Tree:
        async with opened(dsn, schema) as engine:
            return await engine.handle(job).tree(limit)

    found = asyncio.run(read())
    if as_json:
        for node in found.nodes:
            print_json(jsonable(node) | {"outcome": node.outcome})
        return
    if found.cut_above:
        console.print("… it begins earlier", style="dim", markup=False)
    for drawing in _drawn(found):
        console.print(drawing)
    if found.cut_below:
        console.print(f"… more than {limit} jobs; see --limit", style="dim", markup=False)


def _drawn(found: Tree) -> list[Drawing]:
    tops: list[Drawing] = []
    open_levels: list[Drawing] = []
    for node in found.nodes:
        line = _line(node, is_asked=node.id == found.id)
        del open_levels[node.level :]
        if open_levels:
            open_levels.append(open_levels[-1].add(line))
        else:
            open_levels.append(Drawing(line))
            tops.append(open_levels[0])
    return tops


def _line(node: TreeNode, *, is_asked: bool) -> Text:
    line = Text(f"{node.id} ", style="bold" if is_asked else "")
    line.append(clean(node.kind))
    if node.key is not None:
        line.append(f" {clean(node.key)}")
    line.append("  ")
    line.append(node.outcome, STYLES.get(node.outcome))
    if node.total:
        line.append(f"  {_counts(node)}")
    if node.relation is Relation.FOLLOW_UP:
        again = node.of_generation is not None and node.of_generation > 1
        line.append(f"  after close {node.of_generation}" if again else "  after the close", "dim")
    if node.why and node.status != "completed":
        line.append(f"  {clean(node.why)}", "dim")
    return line


def _counts(node: TreeNode) -> str:
    ended = node.completed + node.failed + node.cancelled
    parts = [
        f"{ended} of {node.total}" if ended < node.total else f"{node.total} children",
        node.failed and f"{node.failed} failed",
        node.cancelled and f"{node.cancelled} cancelled",
    ]
    return ", ".join(str(part) for part in parts if part)
