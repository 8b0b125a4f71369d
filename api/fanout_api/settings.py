"""The API's knobs, read once into a frozen object."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from fanout import ConfigurationError

__all__ = ["ApiSettings"]

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]")

Seconds = Annotated[float, Field(gt=0, le=366 * 86_400, allow_inf_nan=False)]


class ApiSettings(BaseSettings):
    """Settings of one app: `ApiSettings(auth="key")` or FANOUT_API_AUTH=key.

    Raises:
        ConfigurationError: names the field and the value got.
    """

    model_config = SettingsConfigDict(env_prefix="FANOUT_API_", frozen=True, extra="forbid")

    auth: Literal["none", "key"] = Field(
        "none",
        description="none: everybody on this machine and nobody else. key: bearer keys.",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        LOOPBACK_HOSTS,
        description="Names in the Host header that are answered, without port; '*': all. A web "
        "site that rebinds its name to this server's address is not.",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Other origins whose pages may read with credentials, as "
        "https://app.example.com.",
    )
    max_body_bytes: int = Field(
        64 << 10, ge=1024, description="A larger request body is refused; jobs carry 1 KB."
    )
    receive_deadline: Seconds = Field(
        15, description="Seconds in which a request must have arrived, headers and body."
    )
    max_page: int = Field(200, ge=1, le=1000, description="Most rows of one page.")
    session_seconds: Seconds = Field(
        12 * 3600, description="Seconds that a browser stays logged in."
    )
    https: bool = Field(
        default=False,
        description="Browsers reach this over HTTPS that ends at a proxy: cookies are Secure.",
    )
    recheck_seconds: Seconds = Field(
        300, description="Seconds after which an open stream's key is looked at again."
    )
    max_streams: int = Field(20_000, ge=1, description="Streams that are open at once, in all.")
    streams_per_caller: int = Field(
        1000, ge=1, description="Streams that one key may have open at once in this process."
    )
    send_timeout: Seconds = Field(
        20, description="Seconds after which a reader that takes nothing is dropped."
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as invalid:
            first = invalid.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(
                field,
                f"{first['msg']}, got {first['input']!r}",
                f"Set it in code or as FANOUT_API_{field.upper()}",
            ) from None

    @field_validator("allowed_hosts", "allowed_origins", mode="before")
    @classmethod
    def _from_environment(cls, value: object) -> object:
        if isinstance(value, str):  # FANOUT_API_ALLOWED_HOSTS=a.example,b.example
            return tuple(value.replace(",", " ").split())
        return value
