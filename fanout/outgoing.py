"""HTTP to places that somebody else named: only where it may go, and to the very address that was
looked at.

A name is resolved once. Every address it has must be one that the policy allows, and the connection
goes to one of these, with the name in SNI, certificate and Host: a name server that answers
differently the second time is not asked a second time. Redirects are not followed, proxies of the
environment are not used, of the answer only the head is read.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final
from urllib.parse import urlsplit

import httpcore

from .errors import PermanentError, TransientError, UsageError
from .wire import checked_text

__all__ = ["Answer", "Policy", "Sender", "Target", "target_of"]

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_URL_BYTES: Final = 2048
MOST_ADDRESSES_TRIED: Final = 3
LEAST_OTHER_PORT: Final = 1024
PORTS: Final = {"https": 443, "http": 80}

_HOST: Final = re.compile(
    r"(?=.{1,253}\Z)([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.?",
    re.IGNORECASE,
)
_NUMBER: Final = re.compile(r"(0x[0-9a-f]*|[0-9]+)", re.IGNORECASE)
_DOTTED: Final = re.compile(r"(0|[1-9][0-9]{0,2})(\.(0|[1-9][0-9]{0,2})){3}")

NEVER: Final[tuple[Network, ...]] = (
    ip_network("168.63.129.16/32"),  # the host of a virtual machine in Azure: public by its look
    ip_network("192.0.0.0/24"),  # of protocols, and of metadata in Oracle's cloud
    ip_network("192.88.99.0/24"),
    ip_network("2001::/32"),  # Teredo: it carries an address in disguise
)
CARRIERS: Final[tuple[tuple[IPv6Network, int], ...]] = (
    (IPv6Network("::ffff:0:0/96"), 0),
    (IPv6Network("::/96"), 0),
    (IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (IPv6Network("64:ff9b:1::/48"), 0),
    (IPv6Network("2002::/16"), 80),  # 6to4
)
"""IPv6 networks whose addresses carry an IPv4 address, and how many bits from the right."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Where requests may go beyond public addresses over https."""

    allow_http: bool = False
    networks: tuple[Network, ...] = ()
    """Networks that are allowed though they are private."""

    def refusal(self, address: str) -> str | None:
        """Why nothing is sent to an address; None: it is fine."""
        try:
            it = ip_address(address)
        except ValueError:
            return "it is no address that can be judged"  # with a zone, for one
        if any(_holds(network, it) for network in self.networks):
            return None
        return next((why for one in _carried(it) if (why := _not_public(one))), None)


def _holds(network: Network, address: Address) -> bool:
    return address.version == network.version and address in network


def _carried(address: Address) -> Iterable[Address]:
    """The address, and an IPv4 address that it stands for."""
    yield address
    if isinstance(address, IPv6Address):
        for network, shift in CARRIERS:
            if address in network:
                yield IPv4Address((int(address) >> shift) & 0xFFFFFFFF)


def _not_public(address: Address) -> str | None:
    if address.is_loopback:
        return "it is this machine itself"
    if address.is_link_local:
        return "it is link-local, as the metadata services of clouds are"
    if address.is_multicast:
        return "it is a multicast address"
    if isinstance(address, IPv6Address):
        # One that carries an IPv4 address is judged by that.
        if any(address in network for network, _ in CARRIERS):
            return None
        if address.is_site_local:
            return "it is no public address"
    if not address.is_global or address.is_reserved or address.is_unspecified:
        return "it is no public address"
    if any(_holds(network, address) for network in NEVER):
        return "it is reserved"
    return None


@dataclass(frozen=True, slots=True)
class Target:
    """A URL, taken apart and checked."""

    scheme: str
    host: str
    """Without brackets."""
    port: int
    path: str
    """Path and query."""

    @property
    def authority(self) -> str:
        """What stands in the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if PORTS[self.scheme] == self.port else f"{host}:{self.port}"


def target_of(url: str, policy: Policy, field: str = "url") -> Target:
    """Take a URL apart. A name in it is not resolved here.

    Raises:
        UsageError: nothing may be sent there, and why.
    """
    checked_text(url, field, MAX_URL_BYTES)
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise UsageError(
            field, "is not plain ASCII", "Percent-encode it, and write the host in punycode"
        )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UsageError(field, "cannot be read", "Give https://host/path") from None
    scheme = parts.scheme.lower()
    if scheme != "https" and not (scheme == "http" and policy.allow_http):
        raise UsageError(
            field,
            f"has the scheme {scheme!r}",
            "Give an https:// one; http needs FANOUT_WEBHOOK_HTTP=true",
        )
    if parts.username is not None or parts.password is not None or "@" in parts.netloc:
        raise UsageError(field, "holds a user or password", "Leave them out: requests are signed")
    if parts.fragment:
        raise UsageError(field, "has a fragment", "Leave out # and what follows")
    port = PORTS[scheme] if port is None else port
    if port not in PORTS.values() and port < LEAST_OTHER_PORT:
        raise UsageError(
            field, f"has port {port}", f"Use 443, 80, or one from {LEAST_OTHER_PORT} on"
        )
    host = _host(parts.hostname or "", field, policy)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(scheme, host, port, path)


def _host(host: str, field: str, policy: Policy) -> str:
    if ":" in host or _DOTTED.fullmatch(host):
        if why := policy.refusal(host):
            raise UsageError(field, f"leads to {host}: {why}", NETWORKS_REMEDY)
        return host
    if not _HOST.fullmatch(host):
        raise UsageError(field, f"has no host that can be resolved: {host!r}", "Give a name")
    # 2130706433, 0x7f.1 and 0177.0.0.1 are 127.0.0.1 to a resolver.
    if _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
        raise UsageError(field, f"has a number for a host: {host!r}", "Give a name")
    return host.removesuffix(".")  # no certificate has it


NETWORKS_REMEDY: Final = "Name its network in FANOUT_WEBHOOK_NETWORKS if it may be reached"


@dataclass(frozen=True, slots=True)
class Answer:
    """The head of an answer."""

    status: int
    retry_after: str | None
    """As it stands in the header."""


async def _resolved(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Sender:
    """Sends requests under one policy. `resolve` gives all addresses of a host."""

    def __init__(
        self, policy: Policy, timeout_seconds: float, resolve: Resolve = _resolved
    ) -> None:
        self.policy = policy
        self._timeout = timeout_seconds
        self._resolve = resolve

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        return httpcore.default_ssl_context()

    async def post(self, target: Target, headers: Sequence[tuple[str, str]], body: bytes) -> Answer:
        """Send it, within the timeout in all, and return the head of the answer.

        Raises:
            PermanentError: the host leads to an address that nothing is sent to.
            TransientError: it could not be reached, or did not answer in time.
        """
        try:
            async with asyncio.timeout(self._timeout):
                return await self._post(target, headers, body)
        except TimeoutError:
            raise TransientError(
                f"{target.host} did not answer within {self._timeout:g} s"
            ) from None
        except socket.gaierror as unknown:
            raise TransientError(f"{target.host} cannot be resolved: {unknown.strerror}") from None
        except (
            httpcore.NetworkError,
            httpcore.TimeoutException,
            httpcore.ProtocolError,
            OSError,
        ) as broken:
            raise TransientError(
                f"{target.host}: {type(broken).__name__}: {str(broken) or 'no more is known'}"
            ) from None

    async def _post(
        self, target: Target, headers: Sequence[tuple[str, str]], body: bytes
    ) -> Answer:
        # A pool for one request: an idle connection would outlive the look at its address.
        async with (
            httpcore.AsyncConnectionPool(
                ssl_context=self._tls if target.scheme == "https" else None,
                max_connections=1,
                retries=0,
                network_backend=_Looked(self.policy, self._resolve),
            ) as pool,
            pool.stream(
                "POST",
                httpcore.URL(
                    scheme=target.scheme.encode(),
                    host=target.host.encode(),
                    port=target.port,
                    target=target.path.encode(),
                ),
                headers=[
                    ("host", target.authority),
                    ("content-length", str(len(body))),
                    ("connection", "close"),
                    *headers,
                ],
                content=body,
            ) as response,
        ):
            after = next((v for name, v in response.headers if name.lower() == b"retry-after"), b"")
            return Answer(response.status, after.decode("latin-1")[:100] or None)


class _Looked(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were looked at, never to a name."""

    def __init__(self, policy: Policy, resolve: Resolve) -> None:
        self._policy = policy
        self._resolve = resolve
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        for address in addresses:
            # All of them: a name with one public and one private address is up to something.
            if why := self._policy.refusal(address):
                raise PermanentError(f"{host} leads to {address}: {why}. {NETWORKS_REMEDY}")
        error: httpcore.ConnectError | httpcore.ConnectTimeout | None = None
        for address in addresses[:MOST_ADDRESSES_TRIED]:
            try:
                return await self._backend.connect_tcp(
                    address, port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as failed:
                error = failed
        raise error or httpcore.ConnectError("it has no address")
