"""The OpenAPI document: whole, and true."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

from fanout_api.routes import TABLE
from openapi_pydantic import OpenAPI

from tests.api.harness import House

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,response_headers_conformance,unsupported_method,"
    "allow_header_conformance,use_after_free,ensure_resource_availability,missing_required_header"
)


async def test_every_route_is_in_the_document(shared: House) -> None:
    """With a summary, and a schema for each JSON answer."""
    answer = await shared.client.get("/openapi.json")
    document = OpenAPI.model_validate(answer.json())
    assert document.openapi.startswith("3.1")
    raw = answer.json()["paths"]
    assert {(m.upper(), path) for path, item in raw.items() for m in item} == {
        (endpoint.method, endpoint.path) for endpoint in TABLE.endpoints
    }
    for item in raw.values():
        for operation in item.values():
            assert operation["summary"]
            assert "421" in operation["responses"]


async def test_the_server_keeps_to_its_document(shared: House, tmp_path: Path) -> None:
    """Schemathesis finds no 5xx and no answer that is not documented."""
    await shared.closed_batch(n=3, bad=1, lines=3)
    program = Path(sys.executable).with_name("schemathesis")
    found = str(program) if program.exists() else shutil.which("schemathesis")
    assert found is not None
    process = await asyncio.create_subprocess_exec(
        found, "run", f"{shared.url}/openapi.json",
        f"--checks={CHECKS}", "--phases=examples,coverage,fuzzing", "--max-examples=15",
        "--max-time=10", "--request-timeout=3", "--generation-database=none", "--seed=1",
        "--no-color", "--suppress-health-check=all",
        # Two would parse Python at once, which CPython 3.11.7 does not survive (gh-106905).
        "--workers=1",
        # A job that is submitted here has no worker, so that its stream would not end.
        "--exclude-operation-id=job_events", "--exclude-operation-id=many_events",
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": ""},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    async with asyncio.timeout(60):
        out, _ = await process.communicate()
    assert process.returncode == 0, out.decode()[-6000:]
