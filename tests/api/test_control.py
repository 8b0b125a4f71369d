"""Limits, schedules, and what a batch is told at its submit."""

from __future__ import annotations

from typing import Any

import pytest
from fanout_api.routes import TABLE

from fanout import Status
from fanout.access import Scope
from fanout.cron import Schedule, Schedules
from tests.api.harness import House
from tests.api.test_jobs import problem

OPTIONS = {
    "partition": "customer-7",
    "closing": "aggregate",
    "concurrency": 3,
    "fail_after": 4,
    "deadline_seconds": 3600,
    "budget": {"cost": 50, "tokens": 1e6},
    "webhook": "ops",
}


async def put(house: House, path: str, body: Any) -> Any:
    return await house.client.put(path, json=body)


# -- limits ----------------------------------------------------------------------------------------


async def test_a_limit_is_set_shown_listed_and_reset(own: House) -> None:
    """What is left out stays, null lifts a bound; a limit that nobody named is 404."""
    assert (await own.client.get("/v1/limits")).json() == {"limits": []}
    problem(await own.client.get("/v1/limits/parser"), 404)
    made = await put(own, "/v1/limits/parser", {"concurrency": 2, "requests_per_minute": 60})
    assert made.status_code == 200
    view = made.json()
    assert (view["name"], view["concurrency"], view["set_by"]) == ("parser", 2, "operator")
    assert (view["in_use"], view["waiting"]) == (0, 0)
    lifted = (await put(own, "/v1/limits/parser", {"requests_per_minute": None})).json()
    assert (lifted["concurrency"], lifted["requests_per_minute"]) == (2, None)
    assert (await own.client.get("/v1/limits/parser")).json() == lifted
    kind = await put(own, "/v1/limits/kind:paper", {"concurrency": 5, "per_partition": 1})
    assert kind.json()["per_partition"] == 1
    names = [one["name"] for one in (await own.client.get("/v1/limits")).json()["limits"]]
    assert names == ["kind:paper", "parser"]
    assert (await own.client.delete("/v1/limits/parser")).status_code == 204
    problem(await own.client.delete("/v1/limits/parser"), 404)


@pytest.mark.parametrize(
    ("name", "body", "status"),
    [
        ("parser", {}, 422),
        ("parser", {"concurrency": -1}, 422),
        ("parser", {"concurrency": "2"}, 422),
        ("parser", {"requests_per_minute": 0}, 422),
        ("parser", {"slots": 2}, 422),
        ("kind:paper", {"requests_per_minute": 5}, 422),
        ("a.b", {"concurrency": 1}, 404),
        ("%00", {"concurrency": 1}, 404),
        ("x" * 64, {"concurrency": 1}, 404),
    ],
)
async def test_a_limit_that_cannot_be_is_refused(
    shared: House, name: str, body: Any, status: int
) -> None:
    """And nothing is changed."""
    problem(await put(shared, f"/v1/limits/{name}", body), status)
    assert (await shared.client.get("/v1/limits")).json() == {"limits": []}


# -- schedules -------------------------------------------------------------------------------------


async def test_a_schedule_is_shown_paused_resumed_and_run(own: House) -> None:
    """Run now: a job, at once, whatever its times."""
    await Schedules(own.engine.store).add(
        Schedule("nightly", "single", "0 3 * * *", payload='{"a":1}', options='{"concurrency":2}')
    )
    (listed,) = (await own.client.get("/v1/cron")).json()["schedules"]
    assert listed == (await own.client.get("/v1/cron/nightly")).json()
    assert (listed["kind"], listed["payload"], listed["options"]) == (
        *("single", {"a": 1}),
        {"concurrency": 2},
    )
    assert listed["declared_by"] == "operator"
    assert (await own.post("/v1/cron/nightly/pause")).json()["enabled"] is False
    assert (await own.post("/v1/cron/nightly/resume")).json()["enabled"] is True
    ran = await own.post("/v1/cron/nightly/run")
    assert ran.status_code == 201
    job = (await own.client.get(f"/v1/jobs/{ran.json()['job_id']}")).json()
    assert (job["kind"], job["payload"], job["concurrency"]) == ("single", {"a": 1}, 2)


@pytest.mark.parametrize("name", ["nobody", "a.b", "%00", "kind:x"])
async def test_a_schedule_that_is_not_there_is_404(shared: House, name: str) -> None:
    """For each verb."""
    problem(await shared.client.get(f"/v1/cron/{name}"), 404)
    for verb in ("pause", "resume", "run"):
        problem(await shared.post(f"/v1/cron/{name}/{verb}"), 404)


# -- webhooks --------------------------------------------------------------------------------------

HOOK = {"name": "ops", "url": "https://example.com/hooks/1", "tenant": "a"}


async def test_an_endpoint_is_added_rotated_switched_tested_and_removed(own: House) -> None:
    """Its secrets are in the answers that make them, and in no other."""
    made = await own.post("/v1/webhooks", HOOK)
    assert made.status_code == 201, made.text
    secret = made.json()["secret"]
    assert secret.startswith("whsec_")
    (listed,) = (await own.client.get("/v1/webhooks")).json()["endpoints"]
    assert (listed["name"], listed["tenant"], listed["events"]) == ("ops", "a", ["batch.closed"])
    assert problem(await own.post("/v1/webhooks", HOOK), 422)["field"] == "name"
    rotated = (await own.post("/v1/webhooks/ops/rotate", {"keep_seconds": 60})).json()["secret"]
    assert rotated != secret
    off = (await own.post("/v1/webhooks/ops/disable", {"reason": "moved"})).json()
    assert (off["enabled"], off["disabled_reason"]) == (False, "moved")
    on = await own.post("/v1/webhooks/ops/enable")
    assert on.json()["enabled"] is True
    tested = await own.post("/v1/webhooks/ops/test")
    assert tested.status_code == 201
    job = await own.client.get(f"/v1/jobs/{tested.json()['job_id']}")
    assert job.json()["payload"]["type"] == "webhook.test"
    told = (await own.client.get("/v1/webhooks")).text + on.text + job.text + tested.text
    assert secret not in told
    assert rotated not in told
    assert (await own.client.delete("/v1/webhooks/ops")).status_code == 204
    for verb in ("rotate", "disable", "enable", "test"):
        problem(await own.post(f"/v1/webhooks/ops/{verb}"), 404)
    problem(await own.client.delete("/v1/webhooks/ops"), 404)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"url": "http://example.com/"}, "url"),
        ({"url": "https://127.0.0.1/"}, "url"),
        ({"url": "https://user:pass@example.com/"}, "url"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"events": []}, "events"),
        ({"events": ["batch.opened"]}, "events"),
        ({"name": "a/b"}, "name"),
        ({"name": ""}, "name"),
        ({"secret": "mine"}, "secret"),
    ],
)
async def test_an_endpoint_that_cannot_be_is_refused(
    shared: House, more: dict[str, Any], field: str
) -> None:
    """Other schemes, addresses of this machine, passwords in addresses; nothing is kept."""
    told = problem(await shared.post("/v1/webhooks", {**HOOK, **more}), 422)
    assert told["field"].split(".")[0] == field
    assert (await shared.client.get("/v1/webhooks")).json() == {"endpoints": []}


# -- what a batch is told --------------------------------------------------------------------------


async def test_a_batch_is_told_at_its_submit(shared: House) -> None:
    """Every option arrives in the row, and is shown."""
    made = await shared.post("/v1/jobs", {"kind": "single", **OPTIONS})
    assert made.status_code == 201, made.text
    view = made.json()
    for name in ("closing", "concurrency", "fail_after", "budget"):
        assert view[name] == OPTIONS[name], name
    assert view["deadline"] > view["created_at"]
    assert view["sums"] is view["progress"]["sums"] is None
    share = await shared.post("/v1/jobs", {"kind": "single", "fail_after": "2.5 %"})
    assert (share.json()["fail_after"], share.json()["fail_after_percent"]) == (None, 2.5)
    dated = {"kind": "single", "deadline": "2100-01-01T02:00:00+02:00"}
    assert (await shared.post("/v1/jobs", dated)).json()["deadline"] == "2100-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"partition": ""}, "partition"),
        ({"partition": "é" * 128}, "partition"),
        ({"closing": "never"}, "closing"),
        ({"concurrency": 0}, "concurrency"),
        ({"fail_after": 0}, "fail_after"),
        ({"fail_after": "0 %"}, "fail_after"),
        ({"fail_after": "101 %"}, "fail_after"),
        ({"fail_after": "many"}, "fail_after"),
        ({"deadline": "2100-01-01T00:00:00"}, "deadline"),
        ({"deadline": "9999-12-31T23:59:59-14:00"}, "deadline"),
        ({"deadline": "2100-01-01T00:00:00Z", "deadline_seconds": 5}, "deadline"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"budget": {}}, "budget"),
        ({"budget": {"cost": 0}}, "budget"),
        ({"budget": {"a b": 1}}, "budget"),
        ({"budget": {f"{'x' * 60}{n}": 1 for n in range(9)}}, "budget"),
        ({"webhook": ""}, "webhook"),
    ],
)
async def test_an_option_that_cannot_be_names_the_field(
    shared: House, more: dict[str, Any], field: str
) -> None:
    """422, and what would be right."""
    told = problem(await shared.post("/v1/jobs", {"kind": "single", **more}), 422)
    assert told["field"].split(".")[0] == field
    assert told["remedy"]


async def test_children_of_one_error_and_their_attempts(own: House) -> None:
    """`?error=` pages through those that failed with it; a child's runs are told one by one."""
    handle = await own.closed_batch(n=3, bad=3)
    path = f"/v1/jobs/{handle.id}/children"
    (reason,) = (await own.client.get(f"/v1/jobs/{handle.id}/failures")).json()["reasons"]
    asked = {"error": reason["error"], "limit": "2"}
    first = (await own.client.get(path, params=asked)).json()
    rest = (await own.client.get(path, params={**asked, "after": first["next"]})).json()
    assert [c["document_key"] for c in first["children"] + rest["children"]] == [
        f"bad-{n:04}" for n in range(3)
    ]
    assert rest["next"] is None
    none = await own.client.get(path, params={"error": "another"})
    assert none.json()["children"] == []
    both = await own.client.get(path, params={"error": "another", "status": "completed"})
    assert problem(both, 422)["field"] == "error"
    attempts = f"/v1/jobs/{first['children'][0]['id']}/attempts"
    (run,) = (await own.client.get(attempts)).json()["attempts"]
    assert (run["attempt"], run["outcome"], run["error"]) == (1, Status.FAILED, reason["error"])
    (run,) = (await own.client.get(f"/v1/jobs/{handle.id}/attempts")).json()["attempts"]
    assert (run["outcome"], run["error"]) == ("completed", None)
    assert run["took_seconds"] >= 0


# -- the stored log --------------------------------------------------------------------------------


async def test_the_stored_log_is_looked_through(own: House) -> None:
    """By text and level, in pages; failures are errors in it; a child's has its own lines."""
    handle = await own.closed_batch(n=2, bad=1, lines=30)
    path = f"/v1/jobs/{handle.id}/log"

    async def found(**asked: str) -> Any:
        answer = await own.client.get(path, params=asked)
        assert answer.status_code == 200, answer.text
        return answer.json()

    page = await found(contains="LINE 2", limit="5")
    assert [line["event"]["message"] for line in page["lines"]] == [
        *("line 2", "line 20", "line 21", "line 22", "line 23")
    ]
    rest = await found(contains="LINE 2", limit="500", after=page["next"])
    assert len(rest["lines"]) == 6
    assert rest["next"] is None
    assert page["lines"][0]["id"] == "1.3"
    (failed,) = (await found(level="error"))["lines"]
    assert failed["event"]["type"] == "failed"
    child = f"/v1/jobs/{failed['event']['job']}/log"
    (same,) = (await own.client.get(child)).json()["lines"]
    assert same == failed
    for cursor in ("x", "7.3", "1.999999999999"):
        assert (await found(after=cursor))["next"] is None
    for bad in ({"level": "loud"}, {"contains": ""}, {"limit": "0"}, {"q": "x"}):
        problem(await own.client.get(path, params=bad), 422)
    problem(await own.client.get("/v1/jobs/987654321/log"), 404)


async def test_what_is_of_all_tenants_is_for_keys_without_one_and_changed_by_operators() -> None:
    """Limits, schedules, webhooks: the table that the router runs says so of each route."""
    found = [one for one in TABLE.endpoints if one.tag in {"limits", "cron", "webhooks"}]
    assert len(found) == 16
    for one in found:
        assert one.is_whole, one.path
        assert one.scope == (Scope.READ if one.method == "GET" else Scope.OPERATE), one.path
