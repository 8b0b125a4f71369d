"""docs/batches.md: its programs run as printed, on stand-ins of what the reader has."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "batches.md").read_text(encoding="utf-8")
SERVICES = """
parsed, asked = [], set()


async def parse(name, *, idempotency_key):
    assert idempotency_key not in parsed, "parsed twice"
    parsed.append(idempotency_key)
    return {"text": f"text of {name}", "pages": 7, "cost": 0.01}


async def summarize(text, *, idempotency_key):
    if idempotency_key not in asked:
        asked.add(idempotency_key)
        raise ConnectionResetError("the answer is lost")
    return {"summary": f"summary of {text[8:]}", "tokens": 1200, "cost": 0.02}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for program in re.findall(r"^```python\n(# \w+\.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / program.split(maxsplit=2)[1]).write_text(program, encoding="utf-8")
    (tmp_path / "services.py").write_text(SERVICES, encoding="utf-8")
    return tmp_path


def ran(folder: Path, program: str, database: str) -> str:
    """What a program prints."""
    done = subprocess.run(
        [sys.executable, program],
        cwd=folder,
        env={"DATABASE_URL": database, "PATH": "/usr/bin:/bin", "FANOUT_BACKOFF_BASE": "0.05"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_paid_work_is_paid_once_and_added_up(folder: Path, database: str) -> None:
    """The second step fails and is tried again; the first one is not, and the sums are right."""
    [printed] = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert ran(folder, "papers.py", database) == printed


def test_a_batch_is_steered(folder: Path, database: str) -> None:
    """Paused, grown, resumed and cancelled, without a worker."""
    grown, outcome = ran(folder, "steer.py", database).splitlines()
    assert (grown.split(maxsplit=1)[0], outcome) == ("1", "cancelled")
    assert "paused" in grown
