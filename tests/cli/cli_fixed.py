"""An app whose engine names its own database."""

from __future__ import annotations

from fanout import Engine, Job

engine = Engine("postgresql://elsewhere/its_own")


@engine.job
async def noop(job: Job[None]) -> None:
    pass
