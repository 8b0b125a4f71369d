"""HTTP over the engine: routes, server-sent events, the page. Never touches asyncpg."""

__all__: list[str] = []
