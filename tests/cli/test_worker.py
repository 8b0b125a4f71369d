"""Worker processes: stopped gracefully and at once, started again, gone with their parent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from fanout import Engine, JobHandle, JobRow, UsageError
from fanout.cli.loading import load_app
from tests.cli.harness import APP, finished, program, spawned, until, worker

QUICK = {
    "FANOUT_LEASE": "1",
    "FANOUT_HEARTBEAT": "0.2",
    "FANOUT_SWEEP_INTERVAL": "0.2",
    "FANOUT_POLL_INTERVAL": "0.1",
}


@pytest.fixture
async def engine(database: str) -> AsyncIterator[Engine]:
    """To submit and look with; it runs nothing."""
    async with Engine(database) as engine:
        yield engine


async def until_running(handle: JobHandle) -> None:
    async def runs() -> bool:
        return (await handle.job()).status == "processing"

    await until(runs)


async def stopped(process: Process, *signals: signal.Signals) -> tuple[int, str]:
    """Send signals to the parent alone; (exit code, stderr)."""
    for number in signals:
        process.send_signal(number)
        await asyncio.sleep(0.3)
    said = await finished(process)
    return said.code, said.err


def seen_again(row: JobRow) -> tuple[str, int, int]:
    return str(row.status), row.failures, row.deaths


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_lets_running_handlers_end(
    engine: Engine, database: str, processes: str, number: signal.Signals
) -> None:
    """Exit code 0; what was due meanwhile is not claimed."""
    async with worker(database, "--processes", processes) as process:
        runs = await engine.submit("nap", 1.0)
        await until_running(runs)
        process.send_signal(number)
        await asyncio.sleep(0.3)
        late = await engine.submit("nap", 0.0)
        code, err = await stopped(process)
    assert code == 0, err
    assert (await runs.job()).result == "slept"
    assert (await late.job()).status == "pending"
    assert "Traceback" not in err


async def test_after_the_grace_the_rest_is_released_at_no_cost(
    engine: Engine, database: str
) -> None:
    """A deploy uses up no retry."""
    async with worker(database, "--stop-grace", "0.2") as process:
        handle = await engine.submit("nap", 60.0)
        await until_running(handle)
        code, _ = await stopped(process, signal.SIGTERM)
    assert code == 0
    assert seen_again(await handle.job()) == ("pending", 0, 0)


@pytest.mark.parametrize("processes", ["0", "1"])
async def test_the_second_signal_stops_at_once(
    engine: Engine, database: str, processes: str
) -> None:
    """Released at no cost, and the exit code says it was by signal."""
    async with worker(database, "--processes", processes) as process:
        handle = await engine.submit("nap", 60.0)
        await until_running(handle)
        began = time.monotonic()
        code, _ = await stopped(process, signal.SIGTERM, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 5
    assert seen_again(await handle.job()) == ("pending", 0, 0)


async def test_a_handler_that_blocks_the_loop_cannot_hold_up_a_hard_stop(
    engine: Engine, database: str
) -> None:
    """A thread hears the second signal, and ends the process."""
    async with worker(database) as process:
        handle = await engine.submit("block", 120.0)
        await until_running(handle)
        began = time.monotonic()
        code, _ = await stopped(process, signal.SIGTERM, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert time.monotonic() - began < 10


async def test_a_copy_of_the_first_signal_to_the_child_is_no_second_one(
    engine: Engine, database: str
) -> None:
    """Service managers signal the whole group."""
    async with worker(database) as process:
        handle = await engine.submit("nap", 1.0)
        await until_running(handle)
        for child in psutil.Process(process.pid).children():
            child.send_signal(signal.SIGTERM)
        code, _ = await stopped(process, signal.SIGTERM)
    assert code == 0
    assert (await handle.job()).result == "slept"


async def test_a_child_that_is_killed_is_started_again(
    engine: Engine, database: str, tmp_path: Path
) -> None:
    """And its job runs again, alone, to its end."""
    async with worker(database, **QUICK) as process:
        handle = await engine.submit("die_once", str(tmp_path / "mark"))
        await handle.wait(20)
        code, err = await stopped(process, signal.SIGTERM)
    assert (await handle.job()).result == "lived"
    assert "was ended by SIGKILL" in err
    assert code == 0


async def test_a_handler_that_cannot_be_stopped_costs_the_process(
    engine: Engine, database: str
) -> None:
    """It exits with 75, is started again, and the others' work goes on."""
    async with worker(
        database, "--stop-grace", "0.2", **QUICK, FANOUT_TIMEOUT_GRACE="0.2"
    ) as process:
        [before] = psutil.Process(process.pid).children()
        await engine.submit("hang", 120.0)
        await asyncio.to_thread(before.wait, 20)
        other = await engine.submit("echo", 1)
        await other.wait(20)
        code, err = await stopped(process, signal.SIGTERM)
    assert "could not stop a handler" in err
    assert code == 0


async def test_children_do_not_outlive_their_parent(engine: Engine, database: str) -> None:
    """However it dies: they see the end of their socket."""
    async with worker(database, "--processes", "2", "--stop-grace", "0.1") as process:
        children = psutil.Process(process.pid).children()
        handle = await engine.submit("nap", 60.0)
        await until_running(handle)
        process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 10)
    assert len(children) == 2
    assert alive == []
    assert seen_again(await handle.job()) == ("pending", 0, 0)


async def test_a_database_that_is_down_is_waited_for(tmp_path: Path) -> None:
    """Said once, not a crash; and a signal still ends it."""
    dsn = "postgresql://me:secret@127.0.0.1:1/none"
    process = await spawned("worker", "--app", APP, DATABASE_URL=dsn)
    assert process.stderr is not None
    async with asyncio.timeout(60):
        err = (await process.stderr.readuntil(b"waits for the database")).decode()
    await asyncio.sleep(1)  # time for more tries, which say nothing
    code, rest = await stopped(process, signal.SIGTERM)
    err += rest
    assert code == 0
    assert err.count("waits for the database") == 1
    assert "secret" not in err
    assert "Traceback" not in err


async def test_ready_file_and_json_logs(engine: Engine, database: str, tmp_path: Path) -> None:
    """For scripts: a file while all work, and lines with job, attempt, kind and worker."""
    ready = tmp_path / "ready"
    arguments = ["--log-format", "json", "--ready-file", str(ready), "--processes", "2"]
    async with worker(database, *arguments) as process:
        assert ready.read_text() == f"{process.pid}\n"
        handle = await engine.submit("page", {"problem": "torn"})
        await handle.wait(20)
        code, err = await stopped(process, signal.SIGTERM)
    assert code == 0
    assert not ready.exists()
    lines = [json.loads(line) for line in err.splitlines()]
    assert all(line["worker"] and line["at"].endswith("Z") for line in lines)
    [failed] = [line for line in lines if line["job_id"] == handle.id]
    assert (failed["attempt"], failed["kind"], failed["level"]) == (1, "page", "info")


@pytest.mark.parametrize(
    ("app", "told"),
    [
        ("no_such_module:engine", "importing 'no_such_module' failed: ModuleNotFoundError"),
        ("tests.cli.cli_app:wrong", "Its engines: tests.cli.cli_app:engine"),
        ("tests.cli.cli_app:echo", "is a Handler"),
        ("tests.cli.cli_app", "names no module and engine"),
        ("json:no_such", "Make one there"),
    ],
)
def test_an_app_that_cannot_be_had_says_what_there_is(app: str, told: str) -> None:
    """Which import failed, or which engines the module has."""
    with pytest.raises(UsageError) as refused:
        load_app(app)
    assert told in str(refused.value)
    assert refused.value.field == "app"


async def test_a_wrong_app_is_bad_input() -> None:
    """Exit code 2, told once and not by every process."""
    said = await program("worker", "--app", "no_such_module:engine", "--processes", "4")
    assert said.code == 2
    assert said.err.count("importing 'no_such_module' failed") == 1
    assert said.is_readable_error


async def test_an_app_without_a_database_is_bad_input() -> None:
    """The engine's own error, with its remedies."""
    said = await program("worker", "--app", "fanout.demo.app:engine", "-n", "3")
    assert said.code == 2
    assert said.err.count("neither a DSN nor DATABASE_URL") == 1


async def test_the_command_line_does_not_lose_against_the_app(database: str) -> None:
    """An engine that names its own database refuses another one."""
    said = await program("worker", "--app", "tests.cli.cli_fixed:engine", "--dsn", database)
    assert said.code == 2
    assert "names a database of its own" in said.err


async def test_a_reader_that_leaves_early_is_no_error(engine: Engine, database: str) -> None:
    """`fanout … | head -1`."""
    handle = await engine.submit("book", {"pages": 3})
    command = f"{sys.executable} -m fanout sql finish | head -1; echo ${{PIPESTATUS[0]}}"
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", command),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    said = await finished(process)
    assert said.err == ""
    assert said.out.splitlines()[-1] in ("0", "141")
    assert handle.id


async def test_ctrl_c_ends_a_command_quietly(engine: Engine, database: str) -> None:
    """130, and no traceback."""
    handle = await engine.submit("nap", 1.0)
    process = await spawned("watch", str(handle.id), DATABASE_URL=database)
    assert process.stderr is not None
    first = await process.stderr.readline()
    assert b"no worker serves" in first
    code, err = await stopped(process, signal.SIGINT)
    assert code == 130
    assert err == ""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
