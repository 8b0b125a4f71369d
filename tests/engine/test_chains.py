"""Follow-ups read what closed; one may be a batch itself; the tree shows the whole."""

from __future__ import annotations

import asyncio
from typing import Any, assert_type

import asyncpg
import pytest
from pydantic import BaseModel, ValidationError

from fanout import (
    Child,
    Closed,
    Engine,
    Job,
    JobHandle,
    JobNotFound,
    PermanentError,
    Relation,
    Status,
    Tree,
    UsageError,
)
from fanout.tree import MOST_STEPS_UP
from tests.cli.harness import command
from tests.engine.running import assert_true_to_its_children, closed, running, until
from tests.factories import insert_batch, insert_job


async def whole(handle: JobHandle) -> Tree:
    """The tree, once everything in it has closed: a close and its follow-up are one commit."""

    async def is_closed() -> bool:
        return (await handle.tree()).is_closed

    await until(is_closed)
    return await handle.tree()


def drawn(tree: Tree) -> list[str]:
    """A line a job: how it stands, what it is, how it ended, its children."""
    return [
        f"{'  ' * node.level}{node.relation} {node.of_generation or ''} {node.kind}: "
        f"{node.outcome}, {node.total} {node.completed} {node.failed} {node.cancelled}"
        for node in tree.nodes
    ]


class Chain:
    """Three batches, each the follow-up of the one before; documents in `broken` fail."""

    def __init__(self, engine: Engine) -> None:
        self.broken = {"b"}
        self.closes: list[Closed] = []
        self.hold: asyncio.Event | None = None
        self.begun = asyncio.Event()

        @engine.job
        async def leaf(job: Job[str]) -> str:
            if job.payload in self.broken:
                raise PermanentError("torn")
            if job.payload == "held" and self.hold is not None:
                self.begun.set()
                await self.hold.wait()
            return job.payload.upper()

        @engine.job(on_closed="collect")
        async def gather(job: Job[None]) -> None:
            await job.fan_out(leaf, [(key, key) for key in "abc"])

        @engine.job(on_closed="publish")
        async def collect(job: Job[Closed]) -> None:
            self.closes.append(job.payload)
            await job.fan_out(leaf, [("held", "held"), ("d", "d")])

        @engine.job
        async def publish(job: Job[Closed]) -> None:
            self.closes.append(job.payload)
            await job.fan_out(leaf, [("e", "e")])

        self.first = gather


async def test_three_batches_follow_each_other(engine: Engine, conn: asyncpg.Connection) -> None:
    """Failures in the first stop nothing; any of them shows the whole."""
    chain = Chain(engine)
    async with running(engine):
        handle = await engine.submit(chain.first)
        tree = await whole(handle)
        assert drawn(tree) == [
            "top  gather: completed with failures, 3 2 1 0",
            "  follow_up 1 collect: completed, 2 2 0 0",
            "    follow_up 1 publish: completed, 1 1 0 0",
        ]
        assert (tree.id, tree.cut_above, tree.cut_below) == (handle.id, False, False)
        last = tree.nodes[-1]
        same = await engine.handle(last.id).tree()
        assert (same.id, same.nodes) == (last.id, tree.nodes)
    assert [(one.kind, one.failed) for one in chain.closes] == [("gather", 1), ("collect", 0)]
    await assert_true_to_its_children(conn)


async def test_a_retry_closes_again_and_is_followed_again(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A new generation has a chain of its own beside the first one, whose batches stand."""
    chain = Chain(engine)
    async with running(engine):
        handle = await engine.submit(chain.first)
        await whole(handle)
        chain.broken.clear()
        assert await handle.retry() == 1
        tree = await whole(handle)
        assert drawn(tree) == [
            "top  gather: completed, 3 3 0 0",
            "  follow_up 1 collect: completed, 2 2 0 0",
            "    follow_up 1 publish: completed, 1 1 0 0",
            "  follow_up 2 collect: completed, 2 2 0 0",
            "    follow_up 1 publish: completed, 1 1 0 0",
        ]
        assert tree.nodes[0].generation == 2
    await assert_true_to_its_children(conn)


async def test_a_follow_up_has_the_options_of_its_kind(engine: Engine) -> None:
    """As one that was submitted: here the failures that end it."""

    @engine.job
    async def torn(job: Job[None]) -> None:
        raise PermanentError("torn")

    @engine.job(fail_after=1, deadline=3600)
    async def strict(job: Job[Closed]) -> None:
        await job.fan_out(torn, [("a", None)])

    @engine.job(on_closed=strict)
    async def batch(job: Job[None]) -> None: ...

    async with running(engine):
        tree = await whole(await engine.submit(batch))
    assert [node.outcome for node in tree.nodes] == ["completed", "failed"]


async def test_a_cancel_in_the_middle_ends_that_batch_and_no_other(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """What came before stands; what follows is told that it was cancelled."""
    chain = Chain(engine)
    chain.hold = asyncio.Event()
    async with running(engine):
        handle = await engine.submit(chain.first)
        await asyncio.wait_for(chain.begun.wait(), 30)
        middle = (await handle.tree()).nodes[1]
        assert (middle.kind, middle.relation) == ("collect", Relation.FOLLOW_UP)
        assert await engine.handle(middle.id).cancel("not today")
        tree = await whole(handle)
        assert [node.outcome for node in tree.nodes] == [
            "completed with failures",
            "cancelled",
            "completed",
        ]
        assert tree.nodes[1].why == "not today"
        assert chain.closes[-1].outcome is Status.CANCELLED
        chain.hold.set()
    await assert_true_to_its_children(conn)


async def test_batches_inside_a_batch_are_shown_and_leaves_are_counted(engine: Engine) -> None:
    """Also the follow-up of a batch inside, below it."""

    @engine.job
    async def leaf(job: Job[int]) -> None: ...

    @engine.job
    async def tell(job: Job[Closed]) -> None: ...

    @engine.job(on_closed=tell)
    async def part(job: Job[int]) -> None:
        await job.fan_out(leaf, ((f"{n}", n) for n in range(job.payload)))

    @engine.job
    async def batch(job: Job[None]) -> None:
        await job.fan_out(part, [("two", 2), ("three", 3)])
        await job.fan_out(leaf, [("alone", 0)])

    async with running(engine):
        handle = await engine.submit(batch)
        await closed(handle)
        tree = await whole(handle)
    nodes = {node.id: node for node in tree.nodes}
    assert [(node.kind, node.key, node.total) for node in tree.nodes if node.kind != "tell"] == [
        ("batch", None, 3),
        ("part", "two", 2) if tree.nodes[1].key == "two" else ("part", "three", 3),
        ("part", "three", 3) if tree.nodes[1].key == "two" else ("part", "two", 2),
    ]
    for node in tree.nodes:
        if node.kind == "tell":
            assert node.under_id is not None
            assert (nodes[node.under_id].kind, node.level) == ("part", 2)
    assert len(tree.nodes) == 5


async def test_a_chain_without_end_is_cut_and_says_so(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """A follow-up that follows itself: from any of them, so many up and so many down."""
    ids = [await insert_job(conn, "completed", kind="again", on_closed="again")]
    for _ in range(MOST_STEPS_UP + 20):
        ids.append(
            await insert_job(
                conn,
                "completed",
                kind="again",
                on_closed="again",
                follows_id=ids[-1],
                follows_generation=1,
            )
        )
    async with engine:
        first = await engine.handle(ids[0]).tree(limit=5)
        assert [node.id for node in first.nodes] == ids[:6]
        assert (first.cut_above, first.cut_below) == (False, True)
        last = await engine.handle(ids[-1]).tree()
        assert [node.id for node in last.nodes] == ids[-MOST_STEPS_UP - 1 :]
        assert (last.cut_above, last.cut_below) == (True, False)
        assert [node.level for node in last.nodes] == list(range(MOST_STEPS_UP + 1))
        # Cut below its own place, the way down to the job that was asked for stays.
        short = await engine.handle(ids[50]).tree(limit=3)
        assert [node.id for node in short.nodes] == ids[:51]


async def test_a_wide_batch_is_cut_at_the_limit(engine: Engine, conn: asyncpg.Connection) -> None:
    """The top and the first of its batches; a leaf that is asked for stands in its tree."""
    top, children = await insert_batch(
        conn, "completed", [{"status": "completed", "on_closed": "tell"}] * 8
    )
    leaf = await insert_job(conn, "completed", parent=top)
    async with engine:
        tree = await engine.handle(top).tree(limit=4)
        assert [node.id for node in tree.nodes] == [top, *children[:4]]
        assert tree.cut_below
        assert [node.id for node in (await engine.handle(leaf).tree()).nodes] == [
            top,
            *children,
            leaf,
        ]


async def test_ids_that_run_in_a_circle_end(engine: Engine, conn: asyncpg.Connection) -> None:
    """Rows that nobody but a hand in SQL can make: shown once each, not for ever."""
    one = await insert_job(conn, "completed")
    two = await insert_job(conn, "completed", follows_id=one, follows_generation=1)
    await conn.execute("UPDATE fanout.job SET follows_id = $2 WHERE id = $1", one, two)
    async with engine:
        for job_id in (one, two):
            tree = await asyncio.wait_for(engine.handle(job_id).tree(), 20)
            assert sorted(node.id for node in tree.nodes) == [one, two]


async def test_what_came_before_and_is_gone_is_not_missed(
    engine: Engine, conn: asyncpg.Connection
) -> None:
    """Pruned, or never there: the tree begins with what is left."""
    job_id = await insert_job(conn, "completed", follows_id=1 << 40, follows_generation=1)
    async with engine:
        tree = await engine.handle(job_id).tree()
        assert [node.relation for node in tree.nodes] == [Relation.FOLLOW_UP]
        with pytest.raises(JobNotFound):
            await engine.handle(job_id + 1).tree()
        assert (await engine.store.tree(job_id, 10, 10, "")).nodes == tree.nodes
        with pytest.raises(JobNotFound):
            await engine.store.tree(job_id, 10, 10, "somebody else")


async def test_the_command_draws_the_tree(
    engine: Engine, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Branches, outcomes, counts; with --json a line a job; texts steer no terminal."""
    chain = Chain(engine)
    async with running(engine):
        handle = await engine.submit(chain.first, key="[red]x[/]\x1b[31m")
        nodes = (await whole(handle)).nodes
    said = await command(capsys, "tree", str(nodes[1].id), "--dsn", database)
    assert said.code == 0
    assert [line.rstrip() for line in said.out.splitlines()] == [
        f"{nodes[0].id} gather [red]x[/]\ufffd[31m  completed with failures  3 children, 1 failed",
        f"└── {nodes[1].id} collect  completed  2 children  after the close",
        f"    └── {nodes[2].id} publish  completed  1 children  after the close",
    ]
    as_json = await command(capsys, "tree", str(nodes[0].id), "--json", "--dsn", database)
    assert [(row["id"], row["level"], row["relation"]) for row in as_json.lines()] == [
        (nodes[0].id, 0, "top"),
        (nodes[1].id, 1, "follow_up"),
        (nodes[2].id, 2, "follow_up"),
    ]
    short = await command(capsys, "tree", str(nodes[0].id), "--limit", "1", "--dsn", database)
    assert "more than 1 jobs" in short.out
    assert (await command(capsys, "tree", "99999", "--dsn", database)).code == 2


class Extracted(BaseModel):
    pages: int


async def test_a_follow_up_reads_results_and_failures(engine: Engine) -> None:
    """Typed where it says of what type, without a list of all."""
    told: list[Any] = []

    @engine.job
    async def extract(job: Job[int]) -> Extracted:
        if job.payload < 0:
            raise PermanentError("no pages")
        return Extracted(pages=job.payload)

    @engine.job
    async def report(job: Job[Closed]) -> int:
        assert (job.payload.completed, job.payload.failed) == (3, 1)
        pages = 0
        async for key, extracted in job.batch.results(Extracted):
            assert_type(extracted, Extracted)
            told.append((key, extracted.pages))
            pages += extracted.pages
        async for child in job.batch.failures():
            assert_type(child, Child)
            told.append((child.document_key, child.error))
        told.extend([item async for item in job.batch.results()][:1])
        with pytest.raises(ValidationError):
            _ = [item async for item in job.batch.results(int)]
        return pages

    @engine.job(on_closed=report)
    async def batch(job: Job[None]) -> None:
        with pytest.raises(UsageError, match="follows no close"):
            _ = job.batch
        await job.fan_out(extract, [("a", 1), ("b", 2), ("c", -1), ("d", 4)])

    async with running(engine):
        handle = await engine.submit(batch)
        tree = await whole(handle)
        assert await engine.handle(tree.nodes[1].id).result() == 7
    assert told == [("a", 1), ("b", 2), ("d", 4), ("c", "no pages"), ("a", {"pages": 1})]
