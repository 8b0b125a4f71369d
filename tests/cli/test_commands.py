"""Each command that reads or steers, once for good and once for bad input."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fanout import Engine, JobNotFound, Settings
from fanout.cli.checks import Level, findings
from fanout.cli.children import safe_cell
from fanout.cli.examination import Facts
from fanout.cli.exits import without_password
from fanout.cli.statements import plan_of
from fanout.migrate import expected_version
from fanout.pool import connect
from fanout.statements import load_statements
from tests.cli.cli_app import engine as app
from tests.cli.harness import Said, command, until


class Cli:
    """The commands, on the test's database."""

    def __init__(self, dsn: str, capsys: Any) -> None:
        self.dsn = dsn
        self._capsys = capsys

    async def __call__(self, *arguments: str) -> Said:
        return await command(self._capsys, *arguments, "--dsn", self.dsn)

    async def bare(self, *arguments: str) -> Said:
        return await command(self._capsys, *arguments)


@pytest.fixture
def cli(
    database: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Cli:
    """Without a database or an embedded server that the environment would name."""
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.setenv("FANOUT_EMBEDDED_HOME", str(tmp_path / "none"))
    return Cli(database, capsys)


@asynccontextmanager
async def serving(dsn: str) -> AsyncIterator[Engine]:
    """A worker for the test app's handlers, in this process."""
    engine = Engine(dsn, settings=Settings(backoff_base=0.01))
    engine.handlers.update(app.handlers)
    async with engine, engine.worker():
        yield engine


async def a_book(dsn: str, **payload: int) -> int:
    """A closed batch."""
    async with serving(dsn) as engine:
        handle = await engine.submit("book", payload)
        await handle.wait(20)
        return handle.id


async def test_submit_gives_a_job_and_the_same_key_the_same_job(cli: Cli) -> None:
    """Idempotent, and a script learns which of the two it was."""
    first = await cli("submit", "echo", '{"a": 1}', "--key", "k", "--priority", "2", "--json")
    again = await cli("submit", "echo", '{"a": 1}', "--key", "k")
    other = await cli("submit", "echo", '{"a": 2}', "--key", "k")

    [row] = first.lines()
    assert (first.code, row["created"], row["kind"]) == (0, True, "echo")
    assert again.code == 0
    assert f"job {row['id']} holds this key already" in again.out
    assert other.code == 2
    assert "which has other content" in other.err
    [shown] = (await cli("show", str(row["id"]), "--json")).lines()
    assert (shown["payload"], shown["priority"], shown["status"]) == ({"a": 1}, 2, "pending")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["echo", "{oops"], "payload: is not JSON"),
        (["echo", "[1e999]"], "payload[0]: is inf"),
        (["echo", '"\\u0000"'], "payload: holds a NUL"),
        (["echo", "[" * 2000], "payload: is not JSON"),
        (["echo", '"' + "x" * 2000 + '"'], "the limit is 1024"),
        (["no.such"], "kind: 'no.such' is not a valid name"),
        (["echo", "1", "--priority", "12"], "--priority"),
        (["echo", "1", "--delay", "-1"], "delay: "),
        (["echo", "1", "--run-at", "soon"], "run_at: 'soon' is not a time"),
        (["echo", "1", "--run-at", "2030-01-01T00:00:00"], "run_at: has no time zone"),
        (["echo", "1", "--key", ""], "key: "),
    ],
)
async def test_bad_input_to_submit_names_the_field_and_submits_nothing(
    cli: Cli, arguments: list[str], named: str
) -> None:
    """Exit code 2, one line."""
    said = await cli("submit", *arguments)
    assert said.code == 2
    assert named in said.err
    assert said.is_readable_error
    assert (await cli("jobs")).out == "no jobs\n"


async def test_a_delay_and_a_time_make_it_due_later(cli: Cli) -> None:
    """Both forms; the time zone is kept."""
    [delayed] = (await cli("submit", "echo", "--delay", "3600", "--json")).lines()
    [timed] = (await cli("submit", "echo", "--run-at", "2099-01-01T00:00:00Z", "--json")).lines()
    [row] = (await cli("show", str(delayed["id"]), "--json")).lines()
    due, created = (datetime.fromisoformat(row[name]) for name in ("run_at", "created_at"))
    assert 3595 < (due - created).total_seconds() < 3605
    [row] = (await cli("show", str(timed["id"]), "--json")).lines()
    assert row["run_at"] == "2099-01-01T00:00:00Z"


async def test_what_a_closed_batch_shows(cli: Cli) -> None:
    """jobs, show, children and watch tell the same story; watch's exit code says it."""
    job = str(await a_book(cli.dsn, pages=12, problems=2))

    [listed] = [row for row in (await cli("jobs", "--json")).lines() if str(row["id"]) == job]
    shown = await cli("show", job)
    watched = await cli("watch", job)
    failed = await cli("children", job, "--status", "failed", "--json")

    assert (listed["outcome"], listed["total"], listed["failed"]) == (
        "completed with failures",
        12,
        2,
    )
    assert "12: 100 %, 10 completed, 2 failed" in shown.out
    assert watched.code == 4
    assert "completed with failures" in watched.out
    assert "=1+1 is torn" in watched.out
    assert [child["document_key"] for child in failed.lines()] == ["p000", "p001"]
    table = await cli("jobs", "--kind", "book", "--status", "completed", "--limit", "1")
    assert "completed with failures" in table.out


async def test_watch_ends_with_the_outcome_of_the_job(cli: Cli) -> None:
    """0 completed, 1 cancelled; --json ends with a closed progress."""
    done = str(await a_book(cli.dsn, pages=3))
    [waiting] = (await cli("submit", "echo", "--json")).lines()
    assert (await cli("cancel", str(waiting["id"]), "--yes")).code == 0

    assert (await cli("watch", done)).code == 0
    cancelled = await cli("watch", str(waiting["id"]))
    assert cancelled.code == 1
    assert "cancelled on request" in cancelled.out
    *_, last = (await cli("watch", done, "--json")).lines()
    assert (last["percent"], last["outcome"]) == (100, "completed")


async def test_submit_and_wait(cli: Cli) -> None:
    """A shell's way to run a job: its exit code is the job's."""
    async with serving(cli.dsn):
        good = await cli("submit", "echo", "[1]", "--wait")
        bad = await cli("submit", "page", '{"problem": "torn"}', "--wait", "--json")
    assert good.code == 0
    assert "completed" in good.out
    assert bad.code == 1
    assert bad.lines()[-1]["reason"] == "torn"


async def test_children_as_csv_hold_no_formula(cli: Cli) -> None:
    """A file name or an error text must not become code in a spreadsheet."""
    job = str(await a_book(cli.dsn, pages=3, problems=1))
    said = await cli("children", job, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(said.out)))
    assert [row["document_key"] for row in rows] == ["p000", "p001", "p002"]
    assert rows[0]["error"] == "'=1+1 is torn"
    assert rows[1]["result"] == "1"


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+1+1", "'+1+1"),
        ("-1+1", "'-1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("  =1", "'  =1"),
        ("\t=1", "'\t=1"),
        ("-12.5e3", "-12.5e3"),
        ("plain", "plain"),
        ("\x1b[31mred", "\ufffd[31mred"),
        (None, None),
        (-3, -3),
    ],
)
def test_safe_cells(cell: object, written: object) -> None:
    """What begins like a formula gets an apostrophe; numbers stay numbers."""
    assert safe_cell(cell) == written


async def test_retry_runs_failed_children_again(cli: Cli) -> None:
    """All, or those of a key; a batch without failures is refused."""
    job = str(await a_book(cli.dsn, pages=4, problems=2))
    by_key = await cli("retry", job, "--key", "p001")
    assert by_key.code == 0
    assert f"1 failed child of batch {job}, generation 2" in by_key.out
    nothing = await cli("retry", job, "--error", "no such error")
    assert nothing.code == 1
    assert "no failed child to retry" in nothing.err


async def test_cancel_says_what_it_will_do_and_asks(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No changes nothing, nobody to ask needs --yes, yes ends the open children."""
    engine = Engine(cli.dsn)
    engine.handlers.update(app.handlers)
    async with engine:
        async with engine.worker(concurrency=1):
            handle = await engine.submit("book", {"pages": 5, "seconds": 0.2})

            async def one_is_done() -> bool:
                return (await handle.progress()).completed > 0

            await until(one_is_done)
        job = str(handle.id)
        monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
        no = await cli("cancel", job)
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        nobody = await cli("cancel", job)
        before = await handle.progress()
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
        yes = await cli("cancel", job)

        still_open = before.total - before.ended
        assert before.status == "waiting"
        assert f"{still_open} children that have not ended" in no.out
        assert (no.code, nobody.code, yes.code) == (1, 2, 0)
        assert "nothing was changed" in no.out
        assert "Give --yes" in nobody.err
        assert (await handle.progress()).cancelled == still_open
    again = await cli("cancel", job)
    assert again.code == 1
    assert "has closed already" in again.out


@pytest.mark.parametrize("name", ["show", "watch", "children", "retry", "cancel"])
async def test_a_job_that_is_not_there(cli: Cli, name: str) -> None:
    """Exit code 2 whatever is asked of it, also for a number that cannot be an id."""
    missing = await cli(name, "987654")
    assert (missing.code, missing.err) == (2, "fanout: there is no job 987654\n")
    for impossible in ("0", "x", str(2**63)):
        said = await cli(name, impossible)
        assert said.code == 2
        assert said.is_readable_error


async def test_workers_stuck_and_sweep(cli: Cli) -> None:
    """Who works, what does not move, and a round of mending by hand."""
    assert (await cli("workers")).out == "no workers\n"
    assert (await cli("stuck")).code == 0
    await cli("submit", "nobody_serves_this")
    stuck = await cli("stuck", "--json")
    assert stuck.code == 1
    [row] = stuck.lines()
    assert row["why"] == "no worker serves nobody_serves_this"
    assert "no worker serves" in (await cli("stuck")).out
    async with serving(cli.dsn):

        async def is_listed() -> bool:
            return bool((await cli("workers", "--json")).out)

        await until(is_listed)
        rows = (await cli("workers", "--json")).lines()
        assert rows[0]["state"] == "running"
        assert "book" in rows[0]["kinds"]
        assert "running" in (await cli("workers")).out
    swept = await cli("sweep")
    assert (swept.code, swept.out) == (0, "swept: 0 rescued, 0 recounted, 0 given up\n")


async def test_migrate_twice(
    empty_database: str, capsys: pytest.CaptureFixture[str], database: str
) -> None:
    """Before it, every command says what to do; after it, all is up to date."""
    before = await command(capsys, "jobs", "--dsn", empty_database)
    assert before.code == 3
    assert "run `fanout migrate`" in before.err
    first = await command(capsys, "migrate", "--dsn", empty_database)
    again = await command(capsys, "migrate", "--dsn", empty_database)
    assert (first.code, again.code) == (0, 0)
    assert f"version 0 → {expected_version()}" in first.out
    assert "is up to date" in again.out
    other = await command(capsys, "migrate", "--dsn", empty_database, "--schema", "Not Usable")
    assert other.code == 2


async def test_settings_name_unit_reason_and_variable(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every one; a changed one is marked, a wrong one named."""
    monkeypatch.setenv("FANOUT_LEASE", "60")
    rows = {row["name"]: row for row in (await cli.bare("settings", "--json")).lines()}
    assert set(rows) == set(Settings.model_fields)
    assert rows["lease"] == {
        "name": "lease",
        "value": 60.0,
        "default": 30,
        "unit": "s",
        "environment": "FANOUT_LEASE",
        "reason": Settings.model_fields["lease"].description,
    }
    assert rows["max_result_bytes"]["unit"] == "bytes"
    assert "* set by FANOUT_LEASE" in (await cli.bare("settings")).out
    monkeypatch.setenv("FANOUT_LEASE", "soon")
    wrong = await cli.bare("settings")
    assert wrong.code == 2
    assert "lease" in wrong.err


async def test_sql_and_explain_know_every_statement(cli: Cli, database: str) -> None:
    """Each one is printed, and each one has a plan, without being run."""
    listed = await cli.bare("sql")
    names = set(load_statements())
    assert {line.split()[0] for line in listed.out.splitlines()} == names
    assert "UPDATE" in (await cli.bare("sql", "finish")).out
    assert "other.job" in (await cli.bare("sql", "finish", "--schema", "other")).out
    assert (await cli.bare("sql", "no_such")).code == 2
    await cli("submit", "echo")
    for name in ("claim", "finish", "children"):
        said = await cli("explain", name)
        assert said.code == 0, said.err
        assert "cost=" in said.out
    connection = await connect(database, Settings(), "test")  # one for all the others
    try:
        for name, text in load_statements().items():
            assert "cost=" in "".join(await plan_of(connection, text)), name
    finally:
        await connection.close()
    assert (await cli("explain", "no_such")).code == 2
    [job] = (await cli("jobs", "--json")).lines()
    assert job["status"] == "pending"


async def test_doctor_on_a_healthy_database_and_on_none(cli: Cli, database: str) -> None:
    """A line each, a remedy where one is needed, and an exit code for scripts."""
    said = await cli("doctor", "--json")
    [report] = said.lines()
    levels = {check["name"]: check["level"] for check in report["checks"]}
    assert levels["schema"] == levels["listen"] == levels["primary"] == "ok"
    # The tests' own server runs without fsync.
    assert levels["fsync"] == "warn"
    assert (said.code, report["level"]) == (1, "warn")
    assert "→ set fsync = on" in (await cli("doctor")).out

    nowhere = await cli.bare("doctor", "--dsn", "postgresql://me:secret@127.0.0.1:1/none")
    assert nowhere.code == 2
    assert "fail connect" in nowhere.out
    assert "secret" not in nowhere.out + nowhere.err


def test_the_doctors_judgement() -> None:
    """Each finding turns its line, and only its line."""
    health = {
        "server_version": "18.0",
        "server_version_num": 180000,
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "max_connections": 100,
        "in_recovery": False,
        "notification_queue_usage": 0.0,
        "connections": 10,
        "oldest_transaction_seconds": None,
    }

    def worst(changed: dict[str, Any], **facts: Any) -> dict[str, Level]:
        given = {"skew_seconds": 0.0, "listen_seconds": 0.01, "schema_version": expected_version()}
        checks = findings(Facts(health | changed, **given | facts), Settings())
        assert all(check.remedy for check in checks if check.level)
        return {check.name: check.level for check in checks if check.level}

    stuck = [{"id": 1, "kind": "a", "why": "no worker serves a"}, {"id": 2, "why": "lease expired"}]
    assert worst({}) == {}
    assert worst({"synchronous_commit": "off"}) == {"sync commit": Level.WARN}
    assert worst({"full_page_writes": "off"}) == {"page writes": Level.WARN}
    assert worst({"server_version_num": 130000}) == {"version": Level.FAIL}
    assert worst({"server_version_num": 190000}) == {"version": Level.WARN}
    assert worst({"in_recovery": True}) == {"primary": Level.FAIL}
    assert worst({"connections": 95}) == {"connections": Level.WARN}
    assert worst({"oldest_transaction_seconds": 4000.0}) == {"transactions": Level.WARN}
    assert worst({"notification_queue_usage": 0.9}) == {"notify queue": Level.WARN}
    assert worst({}, skew_seconds=-30.0) == {"clock": Level.WARN}
    assert worst({}, listen_seconds=None) == {"listen": Level.WARN}
    assert worst({}, schema_version=0) == {"schema": Level.FAIL}
    assert worst({}, stuck=stuck) == {"served": Level.WARN, "stuck work": Level.WARN}


async def test_no_database_is_an_error_with_three_remedies(cli: Cli) -> None:
    """Nothing is started behind anyone's back."""
    said = await cli.bare("jobs")
    assert said.code == 2
    for remedy in ("--dsn", "DATABASE_URL", "fanout dev"):
        assert remedy in said.err


async def test_a_database_that_does_not_answer(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3, and never the password."""
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:secret@127.0.0.1:1/none")
    said = await cli.bare("jobs")
    assert said.code == 3
    assert said.is_readable_error
    assert "secret" not in said.err
    wrong = await cli.bare("jobs", "--dsn", "mysql://me:secret@localhost/x")
    assert wrong.code == 2
    assert "secret" not in wrong.err
    no_such = await cli.bare("jobs", "--dsn", cli.dsn.replace("/fanout_test", "/no_such"))
    assert no_such.code == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["jobs", "--no-such-option"],
        ["show"],
        ["children", "1", "--format", "xml"],
    ],
)
async def test_a_wrong_command_line_is_one_line(cli: Cli, arguments: list[str]) -> None:
    """Exit code 2, and where to look."""
    said = await cli.bare(*arguments)
    assert said.code == 2
    assert said.is_readable_error
    assert "--help" in said.err


async def test_a_traceback_on_request(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever looks for a defect."""
    monkeypatch.setenv("FANOUT_TRACEBACK", "1")
    with pytest.raises(JobNotFound):
        await cli("show", "987654")


async def test_help_and_version(cli: Cli) -> None:
    """Exit codes are part of the help."""
    for arguments in (["--help"], ["watch", "--help"], ["worker", "-h"]):
        said = await cli.bare(*arguments)
        assert said.code == 0
        assert "Exit codes" in said.out
    assert (await cli.bare("version")).out.startswith("fanout ")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:p@ss@host/x failed", "postgresql://me:***@host/x failed"),
        ("host=h password=abc user=u", "host=h password=*** user=u"),
        ("postgresql://me@host/x", "postgresql://me@host/x"),
        ("see http://host:80/a@b", "see http://host:80/a@b"),
    ],
)
def test_passwords_are_never_shown(text: str, shown: str) -> None:
    """Whatever message they come in."""
    assert without_password(text) == shown
