"""The relay between stored events and the browsers that watch them. Knows no web framework."""

__all__: list[str] = []
