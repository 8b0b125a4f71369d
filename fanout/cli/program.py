"""The commands, put together. One group a module; this one only names them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from platform import python_version

import typer

from . import (
    alerts,
    api,
    children,
    cron,
    demo,
    dev,
    doctor,
    fleet,
    jobs,
    keys,
    limits,
    schema,
    statements,
    steer,
    submit,
    tree,
    up,
    watch,
    webhooks,
    worker,
)
from .exits import EPILOG

__all__ = ["program"]

program = typer.Typer(
    name="fanout",
    help="Fan-out jobs on PostgreSQL alone: counted exactly, closed once.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> None:
    """Print the version."""
    try:
        own = version_of("pgfanout")
    except PackageNotFoundError:
        own = "unknown (run from a source tree)"
    print(f"fanout {own}, Python {python_version()}")  # noqa: T201 - what the command is for


GROUPS: dict[str, dict[str, Callable[..., int | None]]] = {
    "Begin": {
        "demo": demo.demo,
        "up": up.up,
        "dev": dev.dev,
        "migrate": schema.migrate,
        "doctor": doctor.doctor,
    },
    "Run": {"worker": worker.worker, "api": api.api, "submit": submit.submit},
    "Watch": {
        "jobs": jobs.jobs,
        "show": jobs.show,
        "watch": watch.watch,
        "children": children.children,
        "tree": tree.tree,
        "workers": fleet.workers,
        "stuck": fleet.stuck,
        "alerts": alerts.alerts,
    },
    "Steer": {
        "pause": steer.pause,
        "resume": steer.resume,
        "priority": steer.priority,
        "concurrency": steer.concurrency,
        "add": steer.add,
        "retry": steer.retry,
        "cancel": steer.cancel,
        "sweep": steer.sweep,
    },
    "Look inside": {
        "sql": statements.sql,
        "explain": statements.explain,
        "settings": schema.settings,
        "version": version,
    },
}

for panel, commands in GROUPS.items():
    for name, command in commands.items():
        program.command(name, rich_help_panel=panel, epilog=EPILOG)(command)
program.add_typer(cron.cron, name="cron", rich_help_panel="Steer")
program.add_typer(keys.keys, name="keys", rich_help_panel="Steer")
program.add_typer(webhooks.webhooks, name="webhooks", rich_help_panel="Steer")
program.add_typer(limits.limit, name="limit", rich_help_panel="Steer")
