"""Breaks the machine on purpose, to see which test turns red: `python -m tests.machine.mutants`."""

from __future__ import annotations


def put_in(name: str) -> None:
    """Break it as `name` says."""
    raise NotImplementedError(name)
