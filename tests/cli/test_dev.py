"""`fanout dev` and `fanout up` as developers run them: code changes, breaks, and is mended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from fanout.cli.sources import Sources
from tests.cli.harness import command, environment, finished, nothing_left, until

APP = """
from fanout import Engine, Job

engine = {engine}


@engine.job
async def {kind}(job: Job[None]) -> None:
    pass
"""


@contextlib.asynccontextmanager
async def running(where: Path, *arguments: str, home: Path) -> AsyncIterator[Process]:
    """`fanout` in a folder of one's own; killed in the end if the test did not stop it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fanout", *arguments),
        cwd=where,
        env=environment(FANOUT_EMBEDDED_HOME=str(home)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


async def heard(stream: asyncio.StreamReader | None, pattern: str) -> str:
    """Wait for a line; what it says."""
    assert stream is not None
    async with asyncio.timeout(60):
        async for line in stream:
            if found := re.search(pattern, line.decode()):
                return found[0]
    pytest.fail(f"it ended, and never said {pattern}")


@pytest.mark.parametrize("engine", ["Engine()", "Engine.embedded()"])
async def test_dev_runs_what_the_code_says_now(folder: Path, tmp_path: Path, engine: str) -> None:
    """Changed code is served by API and workers; code that cannot be imported is waited for; one
    Ctrl-C ends it all."""
    file = tmp_path / "shop.py"
    file.write_text(APP.format(engine=engine, kind="before"))
    async with running(
        tmp_path, "dev", "--app", "shop:engine", "--port", "0", "-n", "1", home=folder / "pg"
    ) as process:
        url = await heard(process.stdout, r"http://127\.0\.0\.1:\d+/")
        await heard(process.stdout, "^ready")
        async with httpx.AsyncClient(base_url=url) as client:

            async def kinds() -> set[str]:
                answer = await client.get("/v1/kinds")
                return {kind["name"] for kind in answer.json()["kinds"] if kind["workers"]}

            file.write_text(APP.format(engine=engine, kind="between") + "this is no Python")
            assert "SyntaxError" in await heard(process.stderr, "importing 'shop' failed.*")
            await heard(process.stderr, "waits for a change")
            file.write_text(APP.format(engine=engine, kind="after"))
            await heard(process.stdout, "^ready")
            await until(lambda: _is(kinds, "after"))
            made = (await client.post("/v1/jobs", json={"kind": "after"})).json()["id"]
            async with asyncio.timeout(20):
                while (await client.get(f"/v1/jobs/{made}")).json()["status"] != "completed":  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        process.send_signal(signal.SIGINT)
        ended = await finished(process)
        assert ended.code == 0, ended.err
        assert "Traceback" not in ended.err
    await nothing_left(folder / "pg")


async def _is(kinds: object, name: str) -> bool:
    return name in await kinds()  # type: ignore[operator]


async def test_changes_of_an_app_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is new, changed or gone; not a cache, nor what is no code."""
    package = tmp_path / "changing_package"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    sources = Sources.of_app("changing_package.jobs:engine")
    assert package in sources.folders
    seen = asyncio.create_task(sources.changed(0.01))
    for name in ("__pycache__/jobs.py", "notes.txt"):
        (package / name).write_text("new")
    await asyncio.wait([seen], timeout=0.2)
    assert not seen.done()
    (package / "jobs.py").write_text("engine = None")
    assert await seen == str(package / "jobs.py")


@pytest.mark.parametrize("name", ["up", "api"])
async def test_without_the_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """One line, and the exit code of bad input."""
    monkeypatch.setattr("fanout.cli.api.LIBRARIES", ("no_such_library",))
    said = await command(capsys, name)
    assert (said.code, said.is_readable_error) == (2, True)
    assert 'pip install "pgfanout[api]"' in said.err
