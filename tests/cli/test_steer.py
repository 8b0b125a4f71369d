"""Verbs from a shell: what they say, what they change, and how they refuse."""

from __future__ import annotations

import io
import json
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fanout import Engine
from tests.cli.harness import Said, command


class Cli:
    """The commands, on the test's database."""

    def __init__(self, dsn: str, capsys: Any) -> None:
        self.dsn = dsn
        self._capsys = capsys

    async def __call__(self, *arguments: str) -> Said:
        return await command(self._capsys, *arguments, "--dsn", self.dsn)


@pytest.fixture
def cli(database: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Without a database that the environment would name."""
    monkeypatch.delenv("DATABASE_URL", raising=False)
    return Cli(database, capsys)


@pytest.fixture
async def job(cli: Cli) -> str:
    """An open batch that nobody works on, with one child."""
    async with Engine(cli.dsn) as engine:
        handle = await engine.submit("book")
        await handle.add("page", [("p1", {"n": 1})])
        return str(handle.id)


async def test_pause_and_resume_say_what_changed(cli: Cli, job: str) -> None:
    """Twice is fine, and a script learns which of the two it was."""
    first, again = await cli("pause", job), await cli("pause", job, "--json")
    assert (first.code, first.out) == (0, f"job {job} is paused\n")
    assert again.lines() == [{"id": int(job), "changed": False, "paused": True}]
    assert "it is paused" in (await cli("show", job)).out

    first, again = await cli("resume", job, "--json"), await cli("resume", job)
    assert first.lines() == [{"id": int(job), "changed": True, "paused": False}]
    assert (again.code, again.out) == (0, f"job {job} was not paused\n")


async def test_priority_and_concurrency_are_changed(cli: Cli, job: str) -> None:
    """Of the batch; `none` takes the limit away."""
    assert (await cli("priority", job, "2")).out == f"job {job} has priority 2\n"
    said = await cli("concurrency", job, "3")
    assert said.out == f"children of job {job} run at most 3 at once\n"
    [row] = (await cli("show", job, "--json")).lines()
    assert (row["priority"], row["concurrency"]) == (2, 3)

    assert (await cli("concurrency", job, "none")).code == 0
    [row] = (await cli("show", job, "--json")).lines()
    assert row["concurrency"] is None


async def test_add_reads_documents_from_a_file_and_from_stdin(
    cli: Cli, job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One a line; a key that is there is passed over, one that is gone has failed."""
    lines = [{"key": "p1"}, {"key": "p2", "payload": {"n": 2}}, {"key": "p3", "gone": "deleted"}]
    file = tmp_path / "documents.jsonl"
    file.write_text("\n\n".join(json.dumps(line) for line in lines))

    said = await cli("add", job, "page", str(file))
    assert (said.code, said.out) == (0, f"added to batch {job}: 2; 1 it had already\n")

    stdin = SimpleNamespace(buffer=io.BytesIO(b'{"key": "p4"}\n'), isatty=lambda: False)
    monkeypatch.setattr("sys.stdin", stdin)
    said = await cli("add", job, "page", "-", "--json")
    assert said.lines() == [{"id": int(job), "created": 1, "known": 0}]

    [row] = (await cli("show", job, "--json")).lines()
    assert (row["total"], row["failed"]) == (4, 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('{"key": "a"}\n{oops', "line 2: is not JSON"),
        ('["a", 1]', "line 1: is no object with a key"),
        ('{"payload": 1}', "line 1: is no object with a key"),
        ('{"key": "a", "pages": 1}', "line 1: has 'pages'"),
        ('{"key": ""}', "document key"),
        ('{"key": "a", "payload": "' + "x" * 2000 + '"}', "document 'a'"),
        ('{"key": "a", "payload": "' + "x" * 70_000 + '"}', "line 1: has 65,536 bytes or more"),
    ],
)
async def test_a_document_that_cannot_be_added_is_named(
    cli: Cli, job: str, tmp_path: Path, text: str, named: str
) -> None:
    """Exit code 2, the line or the key, and nothing of its chunk was added."""
    file = tmp_path / "documents.jsonl"
    file.write_text(text)

    said = await cli("add", job, "page", str(file))

    assert said.code == 2
    assert named in said.err
    assert said.is_readable_error
    [row] = (await cli("show", job, "--json")).lines()
    assert row["total"] == 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["priority", "JOB", "10"], "PRIORITY"),
        (["concurrency", "JOB", "0"], "concurrency: 0 is not a count"),
        (["concurrency", "JOB", "few"], "concurrency: 'few' is not a count"),
        (["add", "JOB", "page", "/no/such/file"], "file: '/no/such/file' cannot be read"),
        (["add", "JOB", "no.kind", "/dev/null"], "kind: 'no.kind' is not a valid name"),
    ],
)
async def test_bad_input_names_the_field(
    cli: Cli, job: str, arguments: list[str], named: str
) -> None:
    """Exit code 2, one line."""
    said = await cli(*[job if one == "JOB" else one for one in arguments])
    assert said.code == 2
    assert named in said.err
    assert said.is_readable_error


VERBS = {
    "pause": [],
    "resume": [],
    "priority": ["2"],
    "concurrency": ["2"],
    "add": ["page", "FILE"],
}


@pytest.mark.parametrize("verb", VERBS)
async def test_what_has_closed_or_is_not_there_is_not_steered(
    cli: Cli, job: str, verb: str, tmp_path: Path
) -> None:
    """1 for a state that does not allow it, 2 for a job that is not there; one line each."""
    file = tmp_path / "documents.jsonl"
    file.write_text('{"key": "new"}\n')
    rest = [str(file) if one == "FILE" else one for one in VERBS[verb]]
    assert (await cli("cancel", job, "--yes")).code == 0

    closed = await cli(verb, job, *rest)
    assert closed.code == 1
    assert "has closed" in closed.err
    missing = await cli(verb, "987654", *rest)
    assert (missing.code, missing.err) == (2, "fanout: there is no job 987654\n")


async def test_submit_tells_a_batch_what_it_may_do(cli: Cli) -> None:
    """Each option arrives in the row."""
    said = await cli(
        "submit", "book", "--json", "--fail-after", "5 %", "--deadline", "3600",
        "--budget", "cost=50", "--budget", "tokens=1e6", "--closing", "aggregate",
        "--partition", "acme", "--concurrency", "4", "--webhook", "ops",
    )  # fmt: skip
    assert said.code == 0, said.err
    [submitted] = said.lines()
    async with Engine(cli.dsn) as engine:
        [row] = await engine.store._pool.fetch(
            """SELECT fail_after_percent, budget::text, closing, partition, concurrency, webhook,
                      extract(epoch FROM deadline - created_at)::int AS seconds
                 FROM fanout.job WHERE id = $1""",
            submitted["id"],
        )
    assert json.loads(row["budget"]) == {"cost": 50, "tokens": 1e6}
    assert abs(row["seconds"] - 3600) < 5
    told = (row["fail_after_percent"], row["closing"], row["partition"], row["concurrency"])
    assert (*told, row["webhook"]) == (5, "aggregate", "acme", 4, "ops")

    [timed] = (await cli("submit", "book", "--json", "--deadline", "2099-01-01T00:00:00Z")).lines()
    [row] = (await cli("show", str(timed["id"]), "--json")).lines()
    assert datetime.fromisoformat(row["deadline"]).year == 2099


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--fail-after", "some"], "fail_after: 'some' is not a share"),
        (["--fail-after", "0"], "fail_after: 0 is not a count"),
        (["--deadline", "soon"], "deadline: 'soon' is not a time"),
        (["--deadline", "2099-01-01T00:00:00"], "has no time zone"),
        (["--deadline", "0"], "deadline: 0.0 is not a time to come"),
        (["--budget", "cost"], "budget: 'cost' is not NAME=NUMBER"),
        (["--budget", "cost=0"], "budget: 0.0 cost allow nothing"),
        (["--closing", "never"], "--closing"),
        (["--concurrency", "0"], "--concurrency"),
    ],
)
async def test_an_option_that_cannot_be_is_named(
    cli: Cli, arguments: list[str], named: str
) -> None:
    """Exit code 2, and nothing was submitted."""
    said = await cli("submit", "book", *arguments)
    assert said.code == 2
    assert named in said.err
    assert said.is_readable_error
    assert (await cli("jobs")).out == "no jobs\n"
