"""The table of routes, filled by its groups."""

from __future__ import annotations

from fanout_api.table import Table

from . import batches, cron, installation, jobs, limits, sessions, streams, verbs, webhooks

__all__ = ["TABLE"]

TABLE = Table()
for group in (jobs, verbs, batches, streams, limits, cron, webhooks, installation, sessions):
    TABLE.endpoints.extend(group.routes.endpoints)
