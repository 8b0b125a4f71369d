"""Every knob: read from code or environment, and refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from fanout import ConfigurationError, Settings

FIELDS = sorted(Settings.model_fields)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FIELDS:
        monkeypatch.delenv(f"FANOUT_{name.upper()}", raising=False)


def another(name: str) -> Any:
    """A valid value that is not the default."""
    default = Settings.model_fields[name].default
    if name == "schema_name":
        return "elsewhere"
    if isinstance(default, bool):
        return not default
    if name == "heartbeat":
        return 1.0
    if name == "webhook_networks":
        return "10.0.0.0/8"
    return 0.5 if name == "backoff_jitter" else default + 1


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_is_read_from_its_variable(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FANOUT_ and the name, in upper case."""
    value = another(name)
    monkeypatch.setenv(f"FANOUT_{name.upper()}", str(value))
    assert getattr(Settings(), name) == value
    others = {other: getattr(Settings(), other) for other in FIELDS if other != name}
    assert others == {other: Settings.model_fields[other].default for other in others}


@pytest.mark.parametrize("name", FIELDS)
def test_what_is_given_in_code_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment fills what code leaves open."""
    monkeypatch.setenv(f"FANOUT_{name.upper()}", str(another(name)))
    default = Settings.model_fields[name].default
    assert getattr(Settings(**{name: default}), name) == default


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_says_what_it_is_for(name: str) -> None:
    """One sentence, with its unit where it has one."""
    description = Settings.model_fields[name].description
    assert description
    assert description.endswith(".")
    if Settings.model_fields[name].annotation is float:
        assert "econds" in description or "Share" in description


NUMBERS = [name for name in FIELDS if type(Settings.model_fields[name].default) in (int, float)]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_wrong_value_is_refused_by_name(name: str) -> None:
    """The error names the field, the value it got, and where to set it."""
    for wrong in (-1, "many", None, math.nan, math.inf, 1e300, ""):
        with pytest.raises(ConfigurationError) as caught:
            Settings(**{name: wrong})
        assert caught.value.field == name
        assert f"got {wrong!r}" in str(caught.value)
        assert f"FANOUT_{name.upper()}" in caught.value.remedy


def test_a_wrong_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod with a typing error in its settings does not start."""
    monkeypatch.setenv("FANOUT_LEASE", "30s")
    with pytest.raises(ConfigurationError, match=r"lease: .*got '30s'.*FANOUT_LEASE"):
        Settings()


def test_three_heartbeats_must_fit_into_a_lease() -> None:
    """Else one lost beat would cost a healthy worker its jobs."""
    assert Settings(lease=30, heartbeat=10).heartbeat == 10
    assert Settings(lease=0.3, heartbeat=0.1).heartbeat == 0.1
    with pytest.raises(
        ConfigurationError, match=r"heartbeat: 10.5 s is too long for a lease of 30 s"
    ):
        Settings(heartbeat=10.5)
    with pytest.raises(ConfigurationError, match="FANOUT_HEARTBEAT"):
        Settings(lease=29)


@pytest.mark.parametrize(
    "name", ["", "Fanout", "a-b", "a.b", "pg_x", "1a", "a b", 'a"b', "a;b", "é", "x" * 41]
)
def test_a_schema_name_goes_into_sql_and_so_is_plain(name: str) -> None:
    """Lower-case letters, digits, underscores; nothing that would need quotes."""
    with pytest.raises(ConfigurationError) as caught:
        Settings(schema_name=name)
    assert caught.value.field == "schema_name"
    assert repr(name) in str(caught.value)


def test_a_misspelt_setting_is_refused() -> None:
    """It would else be ignored in silence."""
    with pytest.raises(ConfigurationError, match="leese"):
        Settings(leese=30)


def test_settings_do_not_change() -> None:
    """One frozen object, read once."""
    settings = Settings()
    with pytest.raises(ValidationError):
        settings.lease = 1
