"""Addresses of servers, parsed from URLs.

    redis://[user:password@]host[:port][/db]                            one server
    redis+cluster://[user:password@]host:port[,host:port...]            a Redis Cluster, by any of its nodes
    redis+sentinel://[user:password@]host:port[,...]/service[/db]       the primary that these sentinels name
    rediss://, rediss+cluster://, rediss+sentinel://                    the same with TLS
    unix:///path/to.sock                                                one server on a unix socket
    embedded:[/data/dir]                                                the embedded server, which Perdure starts

Queries: with TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs`, `ssl_check_hostname`;
with Sentinel `sentinel_username`, `sentinel_password`. User and password are those of the servers that hold the data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from ..errors import BadAddress

__all__ = ["Address", "Node"]

_ONE_SERVER = ("redis", "rediss", "unix")
_CLUSTER = ("redis+cluster", "rediss+cluster")
_SENTINEL = ("redis+sentinel", "rediss+sentinel")
_KNOWN: Final = (
    "redis://host:6379/0, rediss://..., redis+cluster://host:6379, redis+sentinel://host:26379/service, "
    "unix:///path/to.sock, embedded: or embedded:/data/dir"
)
_NODE = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:\[\]\s]+))(?::(?P<port>\d+))?")
_PARAMETER = re.compile(r"[?&][^=&?]*=")
_FOR_SENTINELS: Final = ("sentinel_username", "sentinel_password")


class Node(NamedTuple):
    """Host and port of one server of a cluster or of one sentinel."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address: a URL, or the data directory of an embedded server.

    assumed: no address was configured, so it is that of the embedded server.
    """

    url: str = ""
    directory: Path | None = None
    assumed: bool = field(default=False, compare=False)

    @classmethod
    def parse(cls, text: str, *, data_dir: Callable[[], Path]) -> Address:
        """Parse a URL. Raises `BadAddress`.

        Args:
            data_dir: returns the directory for `embedded:` without a path; called in that case only.
        """
        text = text.strip()
        scheme, colon, rest = text.partition(":")
        if not colon:
            raise BadAddress(f"address must be a URL, got {text!r}; known are {_KNOWN}")
        if scheme == "embedded":
            path = rest.removeprefix("//")
            return cls(directory=(Path(unquote(path)).expanduser() if path else data_dir()).absolute())
        address = cls(text)
        if scheme != "unix" and _has_plain_password(text):
            raise BadAddress(f"{address.shown!r}: write '/' and '#' of a password as %2F and %23")
        if scheme in _ONE_SERVER:
            _check_one_server(address)
        elif scheme in (*_CLUSTER, *_SENTINEL):
            _check_several(address)
        else:
            raise BadAddress(f"unknown scheme {scheme!r} in {address.shown!r}; known are {_KNOWN}")
        _check_query(address)
        return address

    @property
    def embedded(self) -> bool:
        return self.directory is not None

    @property
    def scheme(self) -> str:
        return "embedded" if self.embedded else self.url.partition(":")[0]

    @property
    def clustered(self) -> bool:
        """Whether the address is that of a Redis Cluster."""
        return self.scheme in _CLUSTER

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The cluster nodes or sentinels of the address; empty for any other server."""
        if self.scheme not in (*_CLUSTER, *_SENTINEL):
            return ()
        port = 6379 if self.clustered else 26379
        return tuple(_node(text, port) for text in _Parts.of(self.url).hosts.split(","))

    @property
    def service(self) -> str | None:
        """The name by which sentinels know the primary; None if the address has no sentinels."""
        if self.scheme not in _SENTINEL:
            return None
        return unquote(_Parts.of(self.url).path.strip("/").partition("/")[0])

    @property
    def encrypted(self) -> bool:
        return self.scheme.startswith("rediss")

    @property
    def user(self) -> str:
        """The name of the ACL user; empty for the default user."""
        user = "" if self.embedded else unquote(_Parts.of(self.url).credentials.partition(":")[0].rstrip("@"))
        user = self.query.get("username", user)
        return "" if user == "default" else user

    @property
    def query(self) -> dict[str, str]:
        """The query parameters of the URL."""
        return {} if self.embedded else dict(parse_qsl(_Parts.of(self.url).query))

    def url_of(self, node: Node) -> str:
        """Return the plain URL of one server: a node of the cluster, or the primary that a sentinel named."""
        parts = _Parts.of(self.url)
        database = parts.path.strip("/").partition("/")[2] if self.service is not None else ""
        query = urlencode({name: value for name, value in self.query.items() if name not in _FOR_SENTINELS})
        return f"{self._plain_scheme}://{parts.credentials}{node}/{database}" + (f"?{query}" if query else "")

    def url_of_sentinel(self, node: Node) -> str:
        """Return the plain URL of one sentinel, with the user and password of sentinels."""
        about_tls = {name: value for name, value in self.query.items() if name.startswith("ssl_")}
        own = {name.removeprefix("sentinel_"): self.query[name] for name in _FOR_SENTINELS if name in self.query}
        query = urlencode(about_tls | own)
        return f"{self._plain_scheme}://{node}/" + (f"?{query}" if query else "")

    @property
    def _plain_scheme(self) -> str:
        return "rediss" if self.encrypted else "redis"

    @property
    def shown(self) -> str:
        """The address without its passwords, for messages."""
        if self.directory is not None:
            return f"embedded:{self.directory}"
        url = _mask_passwords(self.url)
        head, at, tail = url.rpartition("@")
        if not at:
            return url
        scheme, _, credentials = head.partition("://")
        user = credentials.partition(":")[0]
        return f"{scheme}://{user}:***@{tail}"

    @property
    def described(self) -> str:
        """The address for a worker's first line, where a forgotten URL must be noticed."""
        if not self.embedded:
            return self.shown
        return f"{self.shown} (only processes on this host share it; PERDURE_REDIS_URL names another server)"


def _has_plain_password(url: str) -> bool:
    """Whether the credentials contain a '/' or '#', so that the host would be read wrongly."""
    found = re.match(r"[^@/]*//[^@/?#]*[/#]", url)
    return found is not None and "@" in url[found.end() :].partition("?")[0]


def _mask_passwords(url: str) -> str:
    """Mask the values of parameters whose name ends in 'password'."""
    parts, at = [], 0
    for found in _PARAMETER.finditer(url):
        if found.start() >= at and found[0][:-1].lower().endswith("password"):
            parts += [url[at : found.end()], "***"]
            end = url.find("&", found.end())
            at = len(url) if end < 0 else end
    return "".join(parts) + url[at:]


class _Parts(NamedTuple):
    """The parts of a URL with a list of hosts, which urllib cannot parse; `credentials` include the @."""

    credentials: str
    hosts: str
    path: str
    query: str

    @classmethod
    def of(cls, url: str) -> _Parts:
        rest = url.partition("://")[2].partition("#")[0]
        rest, _, query = rest.partition("?")
        authority, slash, path = rest.partition("/")
        credentials, at, hosts = authority.rpartition("@")
        return cls(credentials + at, hosts, slash + path, query)


def _node(text: str, default_port: int) -> Node:
    """Parse host:port. Raises `ValueError`."""
    found = _NODE.fullmatch(text)
    if found is None:
        if not text.strip():
            raise ValueError("one of the hosts is empty: write host:port,host:port")
        raise ValueError("one of the hosts is not host:port (write an IPv6 address in brackets)")
    port = int(found["port"] or default_port)
    if not 0 < port < 65536:
        raise ValueError(f"Port out of range 1-65535: {port}")
    return Node(unquote(found["six"] or found["host"]), port)


def _check_one_server(address: Address) -> None:
    try:
        parts = urlsplit(address.url)
        hosts = parts.netloc.rpartition("@")[2]
        if parts.scheme != "unix" and "," not in hosts:
            _ = parts.port
    except ValueError as error:
        raise BadAddress(f"{address.shown!r}: {error}") from None
    if parts.scheme == "unix":
        if not parts.path:
            raise BadAddress(f"{address.shown!r} names no socket: write unix:///path/to.sock")
        return
    if "," in hosts:
        raise BadAddress(
            f"{address.shown!r} names several hosts: write {parts.scheme}+cluster:// for a Redis Cluster, "
            f"or {parts.scheme}+sentinel://.../service for sentinels"
        )
    _check_number(address, parts.path.strip("/"))


def _check_several(address: Address) -> None:
    parts = _Parts.of(address.url)
    example = "host:6379" if address.clustered else "host:26379/service"
    if "://" not in address.url or not parts.hosts:
        raise BadAddress(f"{address.shown!r} names no host: write {address.scheme}://{example}")
    try:
        _ = address.nodes
    except ValueError as error:
        raise BadAddress(f"{address.shown!r}: {error}") from None
    if address.clustered:
        database = address.query.get("db", parts.path.strip("/"))
        if database not in ("", "0"):
            raise BadAddress(f"{address.shown!r}: a Redis Cluster has database 0 only; leave out {database!r}")
        return
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise BadAddress(
            f"{address.shown!r} names no service: write {address.scheme}://host:26379/service, "
            "with the name by which the sentinels monitor the primary"
        )
    _check_number(address, database)


def _check_number(address: Address, database: str) -> None:
    database = address.query.get("db", database)
    if database and not database.isdigit():
        raise BadAddress(f"{address.shown!r}: the database must be a number, got {database!r}")


def _check_query(address: Address) -> None:
    query = address.query
    if query.get("protocol", "2") != "2":
        raise BadAddress(f"{address.shown!r}: protocol must be 2 (RESP2), got {query['protocol']!r}; leave it out")
    for name in query:
        if name.startswith("ssl_") and not address.encrypted:
            raise BadAddress(f"{address.shown!r}: {name} needs TLS, so the scheme must begin with rediss")
        if name in _FOR_SENTINELS and address.service is None:
            raise BadAddress(f"{address.shown!r}: {name} is for redis+sentinel:// and rediss+sentinel:// only")
    required = query.get("ssl_cert_reqs", "required")
    if required not in ("none", "optional", "required"):
        raise BadAddress(f"{address.shown!r}: ssl_cert_reqs must be none, optional or required, got {required!r}")
