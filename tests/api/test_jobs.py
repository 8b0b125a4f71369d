"""Submitting, listing, showing, steering: each route, good and bad."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from typing import Any

import pytest
from fanout_api.exports import safe_cell

from fanout import JobHandle
from tests.api.harness import House

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
async def batch(shared: House) -> JobHandle:
    """A closed batch: 5 good children, 2 that failed."""
    return await shared.closed_batch(n=5, bad=2)


def problem(response: Any, status: int) -> dict[str, Any]:
    """A problem of the shape that every one has."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == PROBLEM
    told: dict[str, Any] = response.json()
    assert {"type", "title", "status", "detail", "request_id"} <= set(told)
    assert told["status"] == status
    assert told["request_id"] == response.headers["x-request-id"]
    return told


async def test_a_submitted_job_is_created_and_can_be_found(shared: House) -> None:
    """201, with its address; GET of that shows it."""
    made = await shared.post("/v1/jobs", {"kind": "single", "payload": {"a": 1}})
    assert made.status_code == 201
    found = await shared.client.get(made.headers["location"])
    assert found.status_code == 200
    view = found.json()
    assert view["id"] == made.json()["id"]
    assert (view["kind"], view["payload"], view["status"]) == ("single", {"a": 1}, "pending")
    assert view["progress"]["percent"] == 0


async def test_a_key_makes_one_job(shared: House) -> None:
    """The first is 201, the same again 200 with the same id, other content 409."""
    body = {"kind": "single", "payload": [1]}
    first = await shared.post("/v1/jobs", body, Idempotency_Key="k-1")
    again = await shared.post("/v1/jobs", body, Idempotency_Key="k-1")
    other = await shared.post("/v1/jobs", {**body, "payload": [2]}, Idempotency_Key="k-1")
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["id"] == again.json()["id"]
    assert problem(other, 409)["type"] == "urn:fanout:key-conflict"


async def test_simultaneous_submits_of_a_key_make_one_job(shared: House) -> None:
    """One 201, all others 200, one id."""
    answers = await asyncio.gather(
        *(shared.post("/v1/jobs", {"kind": "single"}, Idempotency_Key="k-2") for _ in range(20))
    )
    assert sorted(a.status_code for a in answers) == [200] * 19 + [201]
    assert len({a.json()["id"] for a in answers}) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "kind"),
        ({"kind": "a:b"}, "kind"),
        ({"kind": 5}, "kind"),
        ({"kind": "single", "priority": 10}, "priority"),
        ({"kind": "single", "priority": "5"}, "priority"),
        ({"kind": "single", "priority": True}, "priority"),
        ({"kind": "single", "delay": -1}, "delay"),
        ({"kind": "single", "run_at": "2030-01-01T00:00:00"}, "run_at"),
        ({"kind": "single", "run_at": "0001-01-01T00:00:00+14:00"}, "run_at"),
        ({"kind": "single", "run_at": "9999-12-31T23:59:59-14:00"}, "run_at"),
        ({"kind": "single", "run_at": "2030-01-01T00:00:00Z", "delay": 1}, "run_at"),
        ({"kind": "single", "max_retries": -1}, "max_retries"),
        ({"kind": "single", "max_retries": 10**30}, "max_retries"),
        ({"kind": "single", "on_closed": "x.y"}, "on_closed"),
        ({"kind": "single", "payload": "x" * 1100}, "payload"),
        ({"kind": "batch", "payload": {"n": "many"}}, "payload.n"),
        ({"kind": "single", "status": "completed"}, "status"),
        ({"kind": "single", "tenant": "other"}, "tenant"),
        ({"kind": "single", "attempt": 7}, "attempt"),
        ([], "body"),
        ("kind", "body"),
    ],
)
async def test_bad_input_names_the_field_and_the_remedy(
    shared: House, body: Any, field: str
) -> None:
    """422, and nothing was submitted."""
    before = (await shared.client.get("/v1/jobs?limit=1")).json()["jobs"]
    told = problem(await shared.post("/v1/jobs", body), 422)
    assert told["field"] == field
    assert told["remedy"]
    assert (await shared.client.get("/v1/jobs?limit=1")).json()["jobs"] == before


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/jobs?limit=0", "limit"),
        ("/v1/jobs?limit=1&limit=2", "limit"),
        ("/v1/jobs?limit=x", "limit"),
        ("/v1/jobs?before=0", "before"),
        ("/v1/jobs?before=99999999999999999999", "before"),
        ("/v1/jobs?status=done", "status"),
        ("/v1/jobs?kind=a%00b", "kind"),
        ("/v1/jobs?stauts=failed", "stauts"),
        ("/v1/jobs/1/children?after=", "after"),
        ("/v1/jobs/1/export?what=all", "what"),
        ("/v1/jobs/1/export?format=xls", "format"),
    ],
)
async def test_a_wrong_parameter_is_named(shared: House, path: str, field: str) -> None:
    """Also one that is not there at all: a typing error must not be a filter that finds all."""
    assert problem(await shared.client.get(path), 422)["field"] == field


async def test_a_key_beyond_text_is_refused(shared: House, batch: JobHandle) -> None:
    """NUL in a page's key reaches no statement."""
    found = await shared.client.get(f"/v1/jobs/{batch.id}/children?after=a%00b")
    assert problem(found, 422)["field"] == "after_key"


@pytest.mark.parametrize(
    "job_id", ["0", "-1", "abc", "1e3", "%C2%B2", "٣", str(2**63), "9" * 5000, "%00"]
)
@pytest.mark.parametrize("rest", ["", "/children", "/events"])
async def test_what_cannot_be_an_id_is_not_found(shared: House, job_id: str, rest: str) -> None:
    """404, whatever stands there."""
    problem(await shared.client.get(f"/v1/jobs/{job_id}{rest}"), 404)


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("GET", ""),
        ("GET", "/children"),
        ("GET", "/failures"),
        ("GET", "/grid"),
        ("GET", "/keys"),
        ("GET", "/tree"),
        ("GET", "/history"),
        ("GET", "/export"),
        ("GET", "/events"),
        ("GET", "/events/1"),
        ("POST", "/cancel"),
        ("POST", "/retry"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/priority"),
        ("POST", "/concurrency"),
        ("POST", "/children"),
    ],
)
async def test_an_unknown_job_is_not_found_anywhere(shared: House, method: str, rest: str) -> None:
    """Every route says the same."""
    more = {
        "/priority": {"priority": 1},
        "/concurrency": {"concurrency": None},
        "/children": {"kind": "paper", "documents": [{"key": "a"}]},
    }
    body: Any = more.get(rest, {}) if method == "POST" else None
    found = await shared.client.request(method, f"/v1/jobs/987654321{rest}", json=body)
    assert problem(found, 404)["detail"] == "there is no job 987654321"


async def test_an_open_batch_is_steered(own: House) -> None:
    """Paused and resumed, another priority and concurrency, one more document: as it is then."""
    job_id = (await own.post("/v1/jobs", {"kind": "batch", "payload": {"n": 2}})).json()["id"]
    url = f"/v1/jobs/{job_id}"
    assert [(await own.post(f"{url}/pause")).json()["paused"] for _ in "ab"] == [True, False]
    view = (await own.client.get(url)).json()
    assert (view["paused"], view["progress"]["paused"]) == (True, True)
    assert (await own.client.get("/v1/jobs")).json()["jobs"][0]["paused"]
    assert (await own.post(f"{url}/priority", {"priority": 1})).json()["priority"] == 1
    for most in (3, None):
        view = (await own.post(f"{url}/concurrency", {"concurrency": most})).json()
        assert view["concurrency"] == most
    document = {"key": "late", "payload": {"pages": 2}}
    body = {"kind": "paper", "documents": [document]}
    added = [(await own.post(f"{url}/children", body)).json() for _ in "ab"]
    assert added == [{"created": 1, "known": 0}, {"created": 0, "known": 1}]
    assert [(await own.post(f"{url}/resume")).json()["resumed"] for _ in "ab"] == [True, False]
    async with own.engine.worker():
        assert (await own.engine.handle(job_id).wait(30)).total == 3
    for verb, more in (("pause", {}), ("priority", {"priority": 2}), ("children", body)):
        assert problem(await own.post(f"{url}/{verb}", more), 409)["type"] == "urn:fanout:refused"
    assert problem(await own.post(f"{url}/concurrency", {}), 422)["field"] == "concurrency"


async def test_jobs_come_in_pages_without_overlap(own: House) -> None:
    """Newest first, by keyset; `next` is null on the last page."""
    for _ in range(7):
        await own.post("/v1/jobs", {"kind": "single"})
    seen: list[int] = []
    before = ""
    page: Any = None
    for _ in range(3):
        page = (await own.client.get(f"/v1/jobs?limit=3{before}")).json()
        seen += [job["id"] for job in page["jobs"]]
        before = f"&before={page['next']}"
    assert page["next"] is None
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == 7


async def test_jobs_can_be_filtered(shared: House, batch: JobHandle) -> None:
    """By kind and by status."""
    page = (await shared.client.get("/v1/jobs?kind=batch&status=completed")).json()
    assert [job["id"] for job in page["jobs"]] == [batch.id]
    assert page["jobs"][0]["outcome"] == "completed with failures"
    assert (await shared.client.get("/v1/jobs?kind=nobody")).json()["jobs"] == []


async def test_children_come_in_pages_and_by_status(shared: House, batch: JobHandle) -> None:
    """By document key; `next` leads on."""
    url = f"/v1/jobs/{batch.id}/children"
    first = (await shared.client.get(f"{url}?limit=4")).json()
    second = (await shared.client.get(url, params={"limit": 4, "after": first["next"]})).json()
    keys = [c["document_key"] for c in first["children"] + second["children"]]
    assert keys == ["bad-0000", "bad-0001", *(f"doc-{n:04}" for n in range(5))]
    assert second["next"] is None
    failed = (await shared.client.get(f"{url}?status=failed")).json()["children"]
    assert [c["status"] for c in failed] == ["failed"] * 2
    assert failed[0]["took_seconds"] >= 0
    child = (await shared.client.get(f"/v1/jobs/{failed[0]['id']}")).json()
    assert (child["root_id"], child["document_key"]) == (batch.id, "bad-0000")


async def test_failures_are_grouped(shared: House, batch: JobHandle) -> None:
    """One reason, how often, and where to look."""
    (reason,) = (await shared.client.get(f"/v1/jobs/{batch.id}/failures")).json()["reasons"]
    assert (reason["count"], reason["example"]) == (2, "bad-0000")


async def test_the_grid_has_a_letter_a_child(shared: House, batch: JobHandle) -> None:
    """In the order of keys."""
    grid = (await shared.client.get(f"/v1/jobs/{batch.id}/grid")).json()
    assert grid == {"total": 7, "kind": "squares", "states": "ffccccc"}


async def test_each_square_of_the_grid_has_a_key(shared: House, batch: JobHandle) -> None:
    """In the order of the letters, from any place on, and without a child's row."""
    url = f"/v1/jobs/{batch.id}/keys"
    keys = (await shared.client.get(url)).json()["keys"]
    children = [child async for child in batch.children()]
    assert keys == [{"id": c.id, "key": c.document_key} for c in children]
    page = (await shared.client.get(url, params={"first": 5, "limit": 1})).json()["keys"]
    assert page == keys[5:6]
    assert (await shared.client.get(url, params={"first": 5000})).status_code == 422


async def test_the_chain_of_a_job_is_told(own: House) -> None:
    """A batch and what followed its close, from either end."""
    handle = await own.engine.submit("batch", {"n": 3, "bad": 1}, on_closed="single")
    async with own.engine.worker():
        await handle.wait(30)
    told = (await own.client.get(f"/v1/jobs/{handle.id}/tree")).json()
    first, then = told["nodes"]
    assert (first["id"], first["relation"], first["level"]) == (handle.id, "top", 0)
    assert (first["outcome"], first["total"]) == ("completed with failures", 4)
    assert (then["kind"], then["relation"], then["under_id"]) == ("single", "follow_up", handle.id)
    other = (await own.client.get(f"/v1/jobs/{then['id']}/tree")).json()
    assert [node["id"] for node in other["nodes"]] == [handle.id, then["id"]]


async def test_the_grid_of_very_many_is_counts(own: House) -> None:
    """Above 5,000 children: at most 500 buckets that hold all of them."""
    handle = await own.closed_batch(n=0)
    await own.engine.store.rows("about")
    async with own.engine.store._pool.acquire() as conn:
        await conn.execute(
            """INSERT INTO fanout.job (kind, status, parent_id, root_id, depth, document_key,
                                       finished_at)
               SELECT 'paper', 'completed', $1, $1, 1, 'd' || n, now()
                 FROM generate_series(1, 5001) n""",
            handle.id,
        )
        await conn.execute(
            "UPDATE fanout.job SET total = 5001, completed = 5001 WHERE id = $1", handle.id
        )
    grid = (await own.client.get(f"/v1/jobs/{handle.id}/grid")).json()
    assert (grid["kind"], grid["total"]) == ("density", 5001)
    assert 400 < len(grid["buckets"]) <= 500
    assert sum(bucket["c"] for bucket in grid["buckets"]) == 5001


async def test_the_history_counts_all_that_ended(shared: House, batch: JobHandle) -> None:
    """At most 120 buckets."""
    history = (await shared.client.get(f"/v1/jobs/{batch.id}/history")).json()
    assert 1 <= len(history["buckets"]) <= 120
    assert sum(b["completed"] for b in history["buckets"]) == 5
    assert sum(b["failed"] for b in history["buckets"]) == 2
    assert history["bucket_seconds"] >= 1


async def test_results_can_be_downloaded(shared: House, batch: JobHandle) -> None:
    """As CSV and as JSON lines, under a name that is no user's."""
    url = f"/v1/jobs/{batch.id}/export"
    table = await shared.client.get(f"{url}?what=results&format=csv")
    rows = list(csv.reader(io.StringIO(table.text)))
    assert rows[0] == ["document_key", "result"]
    assert rows[1] == ["doc-0000", '{"pages": 0}']
    assert len(rows) == 6
    name = f'attachment; filename="fanout-job-{batch.id}-results.csv"'
    assert table.headers["content-disposition"] == name
    lines = (await shared.client.get(f"{url}?what=results&format=jsonl")).text.splitlines()
    assert [json.loads(line)["result"]["pages"] for line in lines] == [0, 1, 2, 3, 4]


async def test_a_formula_in_an_error_is_text_in_the_download(
    shared: House, batch: JobHandle
) -> None:
    """A spreadsheet would run it."""
    table = await shared.client.get(f"/v1/jobs/{batch.id}/export?what=failures")
    rows = list(csv.DictReader(io.StringIO(table.text)))
    assert [row["error"] for row in rows] == ["'=cmd|' /C calc'!A0"] * 2
    lines = await shared.client.get(f"/v1/jobs/{batch.id}/export?what=failures&format=jsonl")
    assert json.loads(lines.text.splitlines()[0])["error"] == "=cmd|' /C calc'!A0"


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("  =1", "'  =1"),
        ("\uff1d1", "'\uff1d1"),
        ("a=1", "a=1"),
        ("", ""),
        (None, ""),
        (5, 5),
        (-5, "'-5"),
        (True, "true"),
        ({"a": "=1"}, '{"a": "=1"}'),
    ],
)
def test_a_cell_is_never_a_formula(value: Any, cell: Any) -> None:
    """Every sign that begins one is guarded, the wide forms too."""
    assert safe_cell(value) == cell


async def test_a_batch_can_be_cancelled_once(own: House) -> None:
    """True, then False; the reason stands in the job."""
    job_id = (await own.post("/v1/jobs", {"kind": "single"})).json()["id"]
    first = await own.post(f"/v1/jobs/{job_id}/cancel", {"reason": "wrong folder"})
    again = await own.post(f"/v1/jobs/{job_id}/cancel")
    assert (first.json(), again.json()) == ({"cancelled": True}, {"cancelled": False})
    view = (await own.client.get(f"/v1/jobs/{job_id}")).json()
    assert (view["status"], view["reason"]) == ("cancelled", "wrong folder")


async def test_failed_children_can_be_run_again(own: House) -> None:
    """Some by key, then nothing that is left to refuse."""
    batch = await own.closed_batch(n=1, bad=2)
    url = f"/v1/jobs/{batch.id}/retry"
    assert (await own.post(url, {"keys": ["bad-0001"]})).json() == {"retried": 1}
    assert (await own.post(url, {"error": "=cmd|' /C calc'!A0"})).json() == {"retried": 1}
    assert problem(await own.post(url), 409)["type"] == "urn:fanout:refused"


async def test_a_key_that_is_no_text_is_refused(shared: House) -> None:
    """Twice, or not UTF-8."""
    twice = await shared.client.post(
        "/v1/jobs",
        json={"kind": "single"},
        headers=[("Idempotency-Key", "a"), ("Idempotency-Key", "b")],
    )
    assert problem(twice, 422)["field"] == "Idempotency-Key"
    odd = await shared.client.post(
        "/v1/jobs", json={"kind": "single"}, headers=[(b"Idempotency-Key", b"\xff\xfe")]
    )
    assert problem(odd, 422)["field"] == "Idempotency-Key"


async def test_the_installation_is_described(shared: House, batch: JobHandle) -> None:
    """Kinds with their schemas, workers, what is stuck, versions."""
    kinds = (await shared.client.get("/v1/kinds")).json()["kinds"]
    schema = {kind["name"]: kind["payload_schema"] for kind in kinds}
    assert schema["batch"]["properties"]["n"]["type"] == "integer"
    assert schema["single"] is None
    about = (await shared.client.get("/v1/about")).json()
    assert (about["auth"], about["scopes"]) == ("none", ["operate", "read", "submit"])
    assert (await shared.client.get("/v1/workers")).status_code == 200
    assert (await shared.client.get("/v1/alerts?open=true")).json() == {"alerts": []}
    assert (await shared.client.get("/v1/stuck")).status_code == 200


async def test_a_wrong_method_is_told_as_a_problem(shared: House) -> None:
    """405 with the methods that there are; an unknown page is 404."""
    wrong = await shared.client.put("/v1/jobs", json={})
    assert problem(wrong, 405)
    assert set(wrong.headers["allow"].split(", ")) == {"GET", "HEAD", "POST"}
    problem(await shared.client.get("/v2/jobs"), 404)
