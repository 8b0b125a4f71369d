"""An engine on the test's own database."""

from __future__ import annotations

import pytest

from fanout import Engine
from tests.engine.running import quick


@pytest.fixture
def engine(database: str) -> Engine:
    """An engine that is not started: the test registers its handlers first."""
    return Engine(database, settings=quick())
