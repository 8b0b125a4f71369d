"""From `module:engine` to an engine, with an error that says what is there instead."""

from __future__ import annotations

import importlib
import os
import sys
import traceback

from fanout.engine import Engine
from fanout.errors import ConfigurationError, UsageError

__all__ = ["load_app"]

REMEDY = (
    "Give --app module:engine, as shop.jobs:engine, from the folder that `import shop` works in"
)


def load_app(app: str) -> Engine:
    """Import an engine with its handlers.

    Raises:
        UsageError: it cannot be had; says which import failed, or which engines the module has.
    """
    module_name, _, attribute = app.partition(":")
    if not module_name or not attribute:
        raise UsageError("app", f"{app!r} names no module and engine", REMEDY)
    # As `python -m` does, which a console script does not.
    if os.getcwd() not in sys.path:  # noqa: PTH109 - a string, as in sys.path
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        module = importlib.import_module(module_name)
    except ConfigurationError:
        raise
    except Exception as error:
        raise UsageError(
            "app", f"importing {module_name!r} failed: {_told(error)}", REMEDY
        ) from error
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Engine):
        return _with_handlers(found, app)
    engines = sorted(name for name, value in vars(module).items() if isinstance(value, Engine))
    raise UsageError(
        "app",
        f"{module_name!r} has no engine {attribute!r}"
        if found is None
        else f"{app!r} is a {type(found).__name__}",
        f"Its engines: {', '.join(f'{module_name}:{name}' for name in engines)}"
        if engines
        else "Make one there: engine = Engine()",
    )


def _with_handlers(engine: Engine, app: str) -> Engine:
    if not engine.handlers:
        raise UsageError(
            "app",
            f"the engine {app} has no handler",
            "Register one with @engine.job, in a module that it imports",
        )
    return engine


def _told(error: Exception) -> str:
    """The error and the line of the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"
