"""`fanout limit`: list, set, reset."""

from __future__ import annotations

from tests.cli.test_commands import Cli, cli

__all__ = ["cli"]


async def test_a_limit_is_set_listed_and_reset(cli: Cli) -> None:
    """What is not named stays; `none` lifts one bound; a script reads JSON."""
    said = await cli("limit", "set", "parser", "4", "--requests-per-minute", "30")
    assert (said.code, said.out.strip()) == (0, "parser: 4 at once, 30 requests a minute")
    assert (await cli("limit", "set", "parser", "none", "--burst", "2")).code == 0
    [row] = (await cli("limit", "--json")).lines()
    assert (row["name"], row["concurrency"], row["requests_per_minute"], row["burst"]) == (
        "parser",
        None,
        30,
        2,
    )
    assert (row["in_use"], row["waiting"], row["set_by"]) == (0, 0, "operator")
    assert "30 requests a minute, 2 s burst" in (await cli("limit")).out
    assert (await cli("limit", "reset", "parser")).out.strip() == "parser reset: no limit"
    assert "no limits; set one with" in (await cli("limit")).out


async def test_bad_input_is_told_with_its_remedy(cli: Cli) -> None:
    """Names, numbers, and rates of a kind."""
    for arguments in (
        ("par.ser", "4"),
        ("parser", "four"),
        ("parser",),
        ("kind:leaf", "--requests-per-minute", "3"),
    ):
        said = await cli("limit", "set", *arguments)
        assert said.code == 2, arguments
        assert said.err
