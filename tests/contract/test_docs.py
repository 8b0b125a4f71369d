"""What the documents say of routes, problems, settings and figures is what there is."""

from __future__ import annotations

import re
from pathlib import Path

from fanout_api import ApiSettings, problems
from fanout_api.routes import TABLE
from fanout_streaming import RelaySettings

from fanout import Settings
from tests.cases import test_security

ROOT = Path(__file__).parents[2]
DOCS = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}


def routes() -> str:
    """The table of routes, as docs/http.md has it."""
    lines = ["| route | scope | answers | what |", "|---|---|---|---|"]
    for one in TABLE.endpoints:
        scope = "open" if one.is_open else str(one.scope or "any key")
        scope += ", no tenant" if one.is_whole else ""
        answers = ", ".join(map(str, one.answers))
        lines.append(f"| `{one.method} {one.path}` | {scope} | {answers} | {one.summary} |")
    return "\n".join(lines)


def all_problems() -> str:
    """The table of problems, as docs/http.md has it."""
    told = {(status, kind): title for _, status, kind, title in problems.TABLE}
    errors: list[type[problems.ApiError]] = [problems.ApiError, *problems.ApiError.__subclasses__()]
    for one in errors:
        told[one.status, one.kind] = one.title
    told[405, "method-not-allowed"] = "This method is not for this page"
    told[500, "defect"] = "This is a defect of the server"
    lines = ["| status | type | title |", "|---|---|---|"]
    lines += [
        f"| {status} | `urn:fanout:{kind}` | {told[status, kind]} |"
        for status, kind in sorted(told)
    ]
    return "\n".join(lines)


def test_routes_and_problems_are_what_the_api_has() -> None:
    """docs/http.md holds both tables, word for word."""
    assert routes() in DOCS["http.md"], routes()
    assert all_problems() in DOCS["http.md"], all_problems()


def test_settings_and_figures_that_are_named_exist() -> None:
    """`FANOUT_…` and `fanout_…`, wherever they stand."""
    known = {
        str(model.model_config["env_prefix"]) + name.upper()
        for model in (Settings, ApiSettings, RelaySettings)
        for name in model.model_fields
    } | {"FANOUT_EMBEDDED_HOME", "FANOUT_TEST_DSN", "FANOUT_TRACEBACK"}
    text = "".join(DOCS.values())
    assert set(re.findall(r"FANOUT_[A-Z_]+", text)) - known == set()
    source = (ROOT / "api/fanout_api/metrics.py").read_text(encoding="utf-8")
    figures = set(re.findall(r"`fanout_([a-z_]+?)(?:_total)?(?:[{`])", text))
    assert {
        one
        for one in figures
        if one not in source and one not in {"streaming", "api", "webhook", "dsn"}
    } == set()


def test_tests_that_are_named_exist() -> None:
    """A guarantee, or a feature, beside a test that is gone would be a claim."""
    text = "".join(DOCS.values()) + (ROOT / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(tests/[\w/.]+)`", text))
    assert len(named) > 20
    assert {one for one in named if not (ROOT / one).exists()} == set()


def test_grants_are_those_that_were_tested() -> None:
    """docs/operating.md gives what tests/cases/test_security.py works with, and no more."""
    told = re.findall(r"^GRANT [^;]+;", DOCS["operating.md"], re.MULTILINE)
    tested = [
        re.sub(r"\s+", " ", grant).strip() + ";"
        for grants in (test_security.RUNTIME, test_security.SUBMITTER, test_security.READER)
        for grant in grants.split(";")
        if grant.strip()
    ]
    plain = [re.sub(r"TO \w+;", "TO {role};", re.sub(r"\s+", " ", grant)) for grant in told]
    assert plain == tested
