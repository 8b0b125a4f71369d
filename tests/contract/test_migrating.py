"""docs/migrating: our side of each comparison runs as printed, and says what the page says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from fanout import Closed, Engine, Job, Status
from tests.engine.running import closed, running

FOLDER = Path(__file__).parents[2] / "docs" / "migrating"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
EVERY = pytest.mark.parametrize("page", sorted(PAGES))


def blocks(page: str, language: str) -> list[str]:
    """The page's code in one language; within a list it is indented."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, text in found]


@EVERY
def test_the_program_runs_as_printed(page: str, tmp_path: Path, database: str) -> None:
    """The small job, on any database, prints what the page prints under it."""
    [program] = [block for block in blocks(page, "python") if block.startswith("# papers.py")]
    [printed] = blocks(page, "text")
    (tmp_path / "papers.py").write_text(program, encoding="utf-8")

    ran = subprocess.run(
        [sys.executable, "papers.py"],
        cwd=tmp_path,
        env={"DATABASE_URL": database, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == printed


@EVERY
async def test_the_sql_submits(page: str, database: str) -> None:
    """What another language calls in its own transaction makes the job, once."""
    [sql] = blocks(page, "sql")
    connection = await asyncpg.connect(database)
    try:
        first, again = await connection.fetchval(sql), await connection.fetchval(sql)
        assert first == again
        row = await connection.fetchrow("SELECT kind, payload FROM fanout.job WHERE id = $1", first)
    finally:
        await connection.close()
    assert row is not None
    assert (row["kind"], json.loads(row["payload"])) == ("papers_batch", ["a.txt", "b.txt"])


async def test_a_follow_up_can_hand_over_to_pg_boss(database: str) -> None:
    """The insert of pgboss.md makes one job, also when the handler runs twice."""
    [bridge] = [block for block in blocks("pgboss.md", "python") if "pgboss.job" in block]
    connection = await asyncpg.connect(database)
    names: dict[str, Any] = {"json": json, "connection": connection}
    body = "async def hand_over(job):\n" + re.sub(r"^", "    ", bridge, flags=re.MULTILINE)
    exec(compile(body, "pgboss.md", "exec"), names)  # noqa: S102 - the page's own code
    # The columns that are used, and the key, of the table that pg-boss documents.
    await connection.execute(
        "CREATE SCHEMA pgboss; CREATE TABLE pgboss.job"
        " (id uuid, name text, data jsonb, PRIMARY KEY (name, id))"
    )
    engine = Engine(database)

    @engine.job
    async def papers_report(job: Job[Closed]) -> None:
        await names["hand_over"](job)
        await names["hand_over"](job)

    try:
        async with running(engine):
            payload = Closed(
                job_id=7, kind="papers_batch", generation=1, outcome=Status.COMPLETED,
                total=0, completed=0, failed=0, cancelled=0,
            )  # fmt: skip
            handle = await engine.submit(papers_report, payload)
            assert (await closed(handle)).outcome == "completed"
        rows = await connection.fetch("SELECT name, data FROM pgboss.job")
    finally:
        await connection.close()
    assert [(row["name"], json.loads(row["data"])) for row in rows] == [("report", {"batch": 7})]


@EVERY
def test_links_lead_somewhere(page: str) -> None:
    """Files and headings."""
    prose = re.sub(r"^( *)```.*?^\1```$", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        file, _, heading = target.partition("#")
        if file:
            assert (FOLDER / file).is_file(), target
        else:
            headings = re.findall(r"^#+ (.+)$", PAGES[page], re.MULTILINE)
            slugs = {re.sub(r"[^a-z0-9 -]", "", one.lower()).replace(" ", "-") for one in headings}
            assert heading in slugs, target
