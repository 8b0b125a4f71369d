"""How long until the next run."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fanout import Settings
from fanout.backoff import retry_delay

DAY = 86_400.0

settings = st.builds(
    Settings,
    backoff_base=st.floats(0.001, 1000),
    backoff_max=st.floats(0.001, 100_000),
    backoff_jitter=st.floats(0, 0.99),
)


def test_the_default_doubles_from_ten_seconds() -> None:
    """10, 20, 40 s, give or take a fifth, and never more than ten minutes."""
    random = Random(1)
    for failures, around in enumerate((10, 20, 40, 80, 160, 320, 600, 600)):
        for _ in range(50):
            delay = retry_delay(failures, None, Settings(), random)
            assert around * 0.8 <= delay <= min(around * 1.2, 600)


def test_jitter_spreads_a_wave() -> None:
    """A hundred children that failed at once do not come back at once."""
    random = Random(1)
    delays = {round(retry_delay(0, None, Settings(), random), 3) for _ in range(100)}
    assert len(delays) > 80


@given(settings, st.integers(0, 10**6), st.integers())
def test_a_delay_is_within_its_bounds(settings: Settings, failures: int, seed: int) -> None:
    """Above zero and at most `backoff_max`, whatever the settings, however many failures."""
    delay = retry_delay(failures, None, settings, Random(seed))
    assert 0 < delay <= settings.backoff_max


@given(settings, st.integers(0, 1000), st.floats(allow_nan=False), st.integers())
def test_a_service_is_never_asked_early(
    settings: Settings, failures: int, asked: float, seed: int
) -> None:
    """Not before its Retry-After, as far as that is a day; jitter only adds to it."""
    delay = retry_delay(failures, asked, settings, Random(seed))
    assert delay >= min(max(asked, 0), DAY)
    assert delay <= max(settings.backoff_max, DAY) * (1 + settings.backoff_jitter)
