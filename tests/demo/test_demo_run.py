"""The demo as a person runs it: real files, real workers, twice, interrupted, on bad input."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from fanout import Engine
from fanout.cli import demo_page
from tests.cli.harness import Said, finished, nothing_left, program, spawned
from tests.demo.builders import docx_file, pdf_bytes

PROSE = "The quick brown fox jumps over the lazy dog, and the dog sleeps on in the warm sun. "


def corpus(folder: Path) -> Path:
    """Five documents that can be read, two of them with the same bytes, and three that cannot."""
    folder.mkdir(parents=True)
    (folder / "notes on foxes.md").write_text(f"# Foxes\n\n{PROSE * 3}")
    (folder / "page.html").write_text(f"<title>A page</title><p>{PROSE * 2}</p>")
    (folder / "copy one.txt").write_text(PROSE)
    (folder / "copy two.txt").write_text(PROSE)
    (folder / "paper.pdf").write_bytes(pdf_bytes([PROSE], title="A paper"))
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4\nnot much of one")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "old.doc").write_bytes(b"\xd0\xcf\x11\xe0")
    return folder


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Lines of the results file, by the file's name."""
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    found = {Path(line["document"]).name: line for line in lines}
    assert len(found) == len(lines)
    return found


async def demo(dsn: str, paths: list[Path], out: Path, *more: str) -> Said:
    """A run against a given server."""
    return await program("demo", *map(str, paths), "--dsn", dsn, "--results", str(out), *more)


async def test_documents_are_read_and_failures_have_reasons(database: str, tmp_path: Path) -> None:
    """And run again, an unchanged corpus is not read twice, a changed one only where it changed."""
    docs, out = corpus(tmp_path / "my papers"), tmp_path / "out"
    first = await demo(database, [docs], out)
    assert first.code == 0, first.err
    assert "Traceback" not in first.err
    assert "documents: 8 · completed with failures" in first.out
    assert "could not be read" in first.out
    for reason in ("the file is empty", "unsupported type .doc", "the PDF is damaged"):
        assert reason in first.out
    found = results(out)
    assert found["notes on foxes.md"]["title"] == "Foxes"
    assert found["paper.pdf"]["language"] == "en"
    assert found["old.doc"]["status"] == "failed"
    assert "# Corpus report" in (out / "report.md").read_text()
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []

    again = await demo(database, [docs], out)
    assert (again.code, "nothing has changed: 5 taken from before" in again.out) == (0, True)

    (docs / "page.html").write_text(f"<title>Another page</title><p>{PROSE}</p>")
    docx_file(docs / "new.docx", heading="New", paragraphs=[PROSE])
    changed = await demo(database, [docs], out)
    assert "2 extracted now, 4 unchanged, taken from before" in changed.out
    assert results(out)["page.html"]["title"] == "Another page"
    assert results(out)["copy one.txt"]["read_at"] is not None

    (out / "report.md").unlink()
    assert (await demo(database, [docs], out)).code == 0
    assert (out / "report.md").is_file()

    fresh = await demo(database, [docs], out, "--fresh", "--workers", "1")
    assert "6 extracted now" in fresh.out
    assert "taken from before" not in fresh.out


async def test_one_file_no_file_and_bad_paths(database: str, tmp_path: Path) -> None:
    """One file is a corpus, an empty folder an empty batch, a missing path bad input."""
    docs, out = corpus(tmp_path / "docs"), tmp_path / "out"
    one = await demo(database, [docs / "copy one.txt"], out)
    assert (one.code, "documents: 1 · completed" in one.out) == (0, True)
    empty = tmp_path / "empty"
    empty.mkdir()
    none = await demo(database, [empty], out)
    assert none.code == 0
    assert "no document was found: an empty batch" in none.out
    assert results(out) == {}

    missing = await demo(database, [docs, tmp_path / "nowhere"], out)
    assert missing.code == 2
    assert "nowhere: no such file" in missing.err
    assert missing.is_readable_error
    unwritable = await demo(database, [docs], docs / "page.html")
    assert unwritable.code == 2
    assert "results: " in unwritable.err


async def progress_of(process: asyncio.subprocess.Process) -> int:
    """Wait until some documents have been read; how many, of what it said."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            if (said := re.search(rb"(\d+) of \d+", line)) and int(said[1]) > 0:
                return int(said[1])
    pytest.fail("it ended before it could be interrupted")


async def test_interrupted_it_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    """On the embedded server: nothing is left running, nothing is lost, nothing done twice."""
    docs, out, home = tmp_path / "many", tmp_path / "out", folder / "pg"
    docs.mkdir()
    for n in range(300):
        (docs / f"{n:03}.md").write_text(f"# Number {n}\n\n" + f"{PROSE} This is the {n}th. " * 40)
    arguments = ["demo", str(docs), "--results", str(out)]
    environment = {"FANOUT_EMBEDDED_HOME": str(home)}
    process = await spawned(*arguments, **environment)
    await progress_of(process)
    process.send_signal(signal.SIGINT)
    interrupted = await finished(process)
    assert interrupted.code == 130
    assert "goes on where it was" in interrupted.err
    assert "Traceback" not in interrupted.err
    await nothing_left(home)

    second = await program(*arguments, **environment)
    assert second.code == 0, second.err
    had_done = re.search(
        r"an interrupted run had done (\d+), this one did the other (\d+)", second.out
    )
    assert had_done is not None, second.out
    assert int(had_done[1]) > 0
    assert int(had_done[1]) + int(had_done[2]) == 300
    assert len(results(out)) == 300
    assert "documents: 300 · completed" in second.out
    await nothing_left(home)


async def heard(process: asyncio.subprocess.Process, pattern: str) -> str:
    """Wait until the command says something on stderr; the pattern's group."""
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            if said := re.search(pattern, line.decode()):
                return said[1]
    pytest.fail(f"it ended, and never said {pattern}")


async def client_sees(client: httpx.AsyncClient, batch: str) -> str:
    """A job's status, as the API tells it."""
    return str((await client.get(f"/v1/jobs/{batch}")).json()["status"])


async def test_the_page_shows_the_batch_and_stays_only_if_asked(
    folder: Path, tmp_path: Path
) -> None:
    """Its address leads to this batch, whose log says what was read; `--keep-open` leaves page,
    database and workers there, and one Ctrl-C ends them all: the run itself went well."""
    home = folder / "pg"
    arguments = ["demo", str(corpus(tmp_path / "docs")), "--results", str(tmp_path / "out")]
    environment = {"FANOUT_EMBEDDED_HOME": str(home)}
    process = await spawned(*arguments, "--port", "0", "--keep-open", **environment)
    address = await heard(process, r"the page is at (http://127\.0\.0\.1:\d+/#/jobs/\d+)")
    url, _, batch = address.partition("#/jobs/")
    await heard(process, "(stays open) until Ctrl-C")
    async with httpx.AsyncClient(base_url=url) as client:
        assert "<title>" in (await client.get("/")).text
        assert (await client.get(f"/v1/jobs/{batch}")).json()[
            "outcome"
        ] == "completed with failures"
        said = await client.get(
            f"/v1/jobs/{batch}/events", headers={"accept": "application/x-ndjson"}
        )
        assert "words, en: Foxes" in said.text
        await client.post(f"/v1/jobs/{batch}/retry", json={})
        async with asyncio.timeout(30):
            while await client_sees(client, batch) != "completed":  # noqa: ASYNC110 - over HTTP
                await asyncio.sleep(0.1)
    process.send_signal(signal.SIGINT)
    ended = await finished(process)
    assert (ended.code, "completed with failures" in ended.out) == (0, True), ended.err
    assert "Traceback" not in ended.err
    await nothing_left(home)
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(url)


async def test_without_the_extra_it_goes_on_without_a_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says what to install."""
    monkeypatch.setattr("fanout.cli.api.LIBRARIES", ("starlette", "no_such_library"))
    async with demo_page.page_beside(Engine("postgresql://nobody@127.0.0.1:1/none"), None) as page:
        assert page is None
    assert 'pip install "pgfanout[api]"' in capsys.readouterr().err


async def test_an_unreadable_file_is_a_failed_child(database: str, tmp_path: Path) -> None:
    """Closed to this user, or gone before the snapshot: counted, with the reason."""
    docs, out = tmp_path / "docs", tmp_path / "out"
    docs.mkdir()
    (docs / "good.txt").write_text(PROSE)
    (docs / "nowhere.txt").symlink_to(tmp_path / "gone.txt")
    closed = docs / "closed.txt"
    closed.write_text(PROSE + "secret")
    closed.chmod(0)
    said = await demo(database, [docs], out)
    assert said.code == 0
    assert results(out)["nowhere.txt"]["error"] == "the link leads nowhere"
    if os.geteuid() != 0:  # root may read everything
        assert results(out)["closed.txt"]["error"] == "permission denied"
    assert "could not be read" in said.out
