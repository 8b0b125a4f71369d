"""The README is true: its program runs, its commands and names exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import fanout
from fanout.statements import load_statements

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_program_of_the_readme_runs_as_printed(tmp_path: Path, database: str) -> None:
    """What a new user copies works, on any database."""
    [program] = [block for block in _blocks("python") if block.startswith("# papers.py")]
    file = tmp_path / "papers.py"
    file.write_text(program.replace("Engine.embedded()", "Engine()"), encoding="utf-8")

    ran = subprocess.run(
        [sys.executable, file],
        env={"DATABASE_URL": database, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "completed with failures 85 15"
    assert ran.stdout.splitlines()[1] == "paper-0 no text found (scanned images?)"


def _written_to(folder: Path) -> None:
    """The programs of the README, as a reader has them in the end."""
    for block in _blocks("python"):
        name = re.match(r"# (\w+\.py)", block)
        assert name is not None, block
        text = block.replace("Engine.embedded()", "Engine()")
        (folder / name[1]).write_text(text, encoding="utf-8")


def test_the_service_of_the_readme_is_mounted_and_followed(tmp_path: Path, database: str) -> None:
    """The app submits, works, serves the page under its prefix, and a program reads its events."""
    _written_to(tmp_path)
    environment = {"DATABASE_URL": database, "PATH": "/usr/bin:/bin", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "service:app", "--port", "0"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    ) as serving:
        try:
            assert serving.stderr is not None
            said = next(line for line in serving.stderr if "running on" in line)
            [url] = re.findall(r"http://[\d.:]+", said)
            with httpx.Client(base_url=url) as client:
                job = client.post("/imports", json={"ids": [1, 7, 9]}).json()["job"]
                assert "<title>" in client.get("/fanout/").text
                assert "FanoutEvents" in client.get("/fanout/static/fanout-events.js").text
                lines = client.get(
                    f"/fanout/v1/jobs/{job}/events", headers={"accept": "application/x-ndjson"}
                ).text
                assert "1 pages" in lines
                assert "2 pages" in lines
            followed = subprocess.run(
                [sys.executable, "watch.py", str(job)],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert followed.returncode == 0, followed.stderr
            assert "log paper-9 2 pages" in followed.stdout
            assert "failed paper-7 no text found" in followed.stdout
        finally:
            serving.terminate()


def test_every_command_of_the_readme_exists() -> None:
    """`fanout X` and `make X`, wherever they are named."""
    commands = set(re.findall(r"(?:^\$ |`)fanout ([a-z]+)", README, re.MULTILINE))
    help_text = subprocess.run(
        [sys.executable, "-m", "fanout", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert {command for command in commands if f" {command} " not in help_text} == set()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"make ([a-z][a-z-]+)", README)) - {"it"}
    assert {verb for verb in verbs if not re.search(rf"^{verb}:", makefile, re.MULTILINE)} == set()


def test_every_path_and_view_of_the_readme_exists() -> None:
    """Links, files and SQL names are no memories."""
    paths = re.findall(
        r"\]\(([\w./-]+)\)|`((?:fanout|docs|streaming|api|benchmarks)/[\w./]*)`", README
    )
    assert [
        path for pair in paths if (path := pair[0] or pair[1]) and not (ROOT / path).exists()
    ] == []
    schema = "".join(path.read_text() for path in (ROOT / "fanout/sql/schema").glob("*.sql"))
    views = set(re.findall(r"FROM (fanout\.\w+)", README))
    assert {view for view in views if f"VIEW {view}" not in schema} == set()
    assert load_statements()


@pytest.mark.parametrize("name", fanout.__all__)
def test_every_public_name_has_a_docstring(name: str) -> None:
    """`__all__` is a promise: each name says what it is."""
    assert (getattr(fanout, name).__doc__ or "").strip()
