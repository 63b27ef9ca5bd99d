"""Addresses of servers, parsed from URLs.

    redis://[user:password@]host[:port][/db]                            one server
    redis+cluster://[user:password@]host:port[,host:port...]            a Redis Cluster, by any of its nodes
    redis+sentinel://[user:password@]host:port[,...]/service[/db]       the primary that these sentinels name
    rediss://, rediss+cluster://, rediss+sentinel://                    the same with TLS
    unix:///path/to.sock, unix:/path/to.sock                            one server on a unix socket
    embedded:[/data/dir]                                                the embedded server, which Perdure starts

Queries: with TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs`, `ssl_check_hostname`;
with Sentinel `sentinel_username`, `sentinel_password`. User and password are those of the servers that hold the data.

This is the only parser of addresses: all clients are made from `Address.options` and `Address.sentinel_options`.
"""

from __future__ import annotations

import math
import re
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

from ..errors import ConfigurationError
from ..regular_files import open_regular
from ..security.urls import shown_url

_ONE_SERVER = ("redis", "rediss", "unix")
_CLUSTER = ("redis+cluster", "rediss+cluster")
_SENTINEL = ("redis+sentinel", "rediss+sentinel")
_KNOWN: Final = (
    "redis://host:6379/0, rediss://..., redis+cluster://host:6379, redis+sentinel://host:26379/service, "
    "unix:///path/to.sock, embedded: or embedded:/data/dir"
)
_NODE = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[^:\[\]\s]+))(?::(?P<port>\d+))?")
_FOR_SENTINELS: Final = ("sentinel_username", "sentinel_password")
_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_FILE_BYTES: Final = 1 << 24
"""Largest file of certificates or of a key."""

_PLACES: Final = ("host", "port", "path")
_FIXED: Final = (
    "decode_responses",
    "encoding",
    "encoding_errors",
    "max_connections",
    "protocol",
    "retry_on_timeout",
    "socket_timeout",
    "timeout",
)
"""Options of other clients of the same URL, which Perdure sets by itself."""


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
        """Parse a URL. Raises `ConfigurationError`.

        Args:
            data_dir: returns the directory for `embedded:` without a path; called in that case only.
        """
        text = text.strip()
        scheme, colon, rest = text.partition(":")
        if not colon:
            raise ConfigurationError(f"address must be a URL, got {shown_url(text)!r}; known are {_KNOWN}")
        if scheme == "embedded":
            path = rest.removeprefix("//")
            return cls(directory=(Path(unquote(path)).expanduser() if path else data_dir()).absolute())
        if scheme == "unix" and rest.startswith("/") and not rest.startswith("//"):
            text = f"unix://{rest}"
        address = cls(text)
        if scheme != "unix" and _has_plain_password(text):
            raise ConfigurationError(f"{address.shown!r}: write '/', '#', '?', '@' of a password as %2F, %23, %3F, %40")
        if "#" in text:
            raise ConfigurationError(f"{address.shown!r}: write '#' as %23")
        for name, value in parse_qsl(_Parts.of(text).query, keep_blank_values=True):
            if "@" in name or ("@" in value and name not in _TEXTS):  # the end of a password
                raise ConfigurationError(f"{address.shown!r}: write '?' and '@' of a password as %3F and %40")
        if scheme in _ONE_SERVER:
            _check_one_server(address)
        elif scheme in (*_CLUSTER, *_SENTINEL):
            _check_several(address)
        elif "@" in text and not rest.startswith("//"):  # the text before the colon may be a user or a password
            raise ConfigurationError(f"address must be a URL, got {address.shown!r}; known are {_KNOWN}")
        else:
            raise ConfigurationError(f"unknown scheme {scheme!r} in {address.shown!r}; known are {_KNOWN}")
        _check_query(address)
        return address

    def __repr__(self) -> str:
        return f"Address({self.shown!r})"

    @property
    def embedded(self) -> bool:
        """Whether it is an embedded server."""
        return self.directory is not None

    @property
    def scheme(self) -> str:
        """Scheme of the URL, such as `redis` or `rediss+cluster`; `embedded` without one."""
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
        """Whether connections use TLS."""
        return self.scheme.startswith("rediss")

    @property
    def user(self) -> str:
        """The name of the ACL user; empty for the default user."""
        user = "" if self.embedded else _Parts.of(self.url).user or self.query.get("username", "")
        return "" if user == "default" else user

    @property
    def query(self) -> dict[str, str]:
        """The query parameters of the URL."""
        return {} if self.embedded else dict(parse_qsl(_Parts.of(self.url).query))

    def options(self, node: Node | None = None) -> dict[str, Any]:
        """Return the options of a connection, by the names of the client library.

        Args:
            node: a node of the cluster; by default the server of the address, the first of several.
        """
        parts = _Parts.of(self.url)
        options = _options(self.query)
        credentials = {"username": parts.user, "password": parts.password}
        options |= {name: value for name, value in credentials.items() if value}
        if self.scheme == "unix":
            return options | {"path": unquote(parts.path)}
        if node is None:
            node = self.nodes[0] if self.nodes else _one_node(parts.hosts)
        database = parts.path.strip("/")
        if self.service is not None:
            database = database.partition("/")[2]
        return {"db": int(database or 0)} | options | {"host": node.host, "port": node.port}

    def sentinel_options(self, node: Node) -> dict[str, Any]:
        """Return the options of a connection to one sentinel, with the user and password of sentinels."""
        query = self.query
        options = _options({name: value for name, value in query.items() if name.startswith("ssl_")})
        options |= {name.removeprefix("sentinel_"): query[name] for name in _FOR_SENTINELS if name in query}
        return options | {"host": node.host, "port": node.port}

    def check_files(self) -> None:
        """Check that the files of the query are files that can be read. Raises `ConfigurationError`."""
        for name in _FILES:
            if (file := self.query.get(name)) is None:
                continue
            try:
                open_regular(file, limit=_FILE_BYTES).close()
            except FileNotFoundError:
                raise ConfigurationError(f"{self.shown}: the file of {name} does not exist: {file}") from None
            except OSError as error:
                problem = f"could not read the file of {name}: {file}: {error.strerror}"
                raise ConfigurationError(f"{self.shown}: {problem}") from None

    @property
    def shown(self) -> str:
        """The address without its passwords, for messages."""
        if self.directory is not None:
            return f"embedded:{self.directory}"
        return shown_url(self.url)

    @property
    def described(self) -> str:
        """The address for a worker's first line, where a forgotten URL must be noticed."""
        if not self.embedded:
            return self.shown
        return f"{self.shown} (only processes on this host share it; PERDURE_REDIS_URL names another server)"


def _has_plain_password(url: str) -> bool:
    """Whether the credentials contain a '/', '#' or '?', so that the host would be read wrongly."""
    found = re.match(r"[^@/]*//[^/?#]*[/#]", url)
    if found is not None:
        return "@" in url[found.end() :].partition("?")[0]
    authority, _, query = url.partition("//")[2].partition("?")
    port = authority.rpartition(":")[2]
    return "@" in query and ":" in authority and not port.isdigit() and not set(authority) & set("@/#]")


class _Parts(NamedTuple):
    """The parts of a URL with a list of hosts, which urllib cannot parse; all but user and password as written."""

    user: str
    password: str
    hosts: str
    path: str
    query: str

    @classmethod
    def of(cls, url: str) -> _Parts:
        rest, _, query = url.partition("://")[2].partition("?")
        authority, slash, path = rest.partition("/")
        credentials, _, hosts = authority.rpartition("@")
        user, _, password = credentials.partition(":")
        return cls(unquote(user), unquote(password), hosts, slash + path, query)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("must be a number")
    return int(text)


def _flag(text: str) -> bool:
    if text.lower() in ("true", "yes", "on", "1"):
        return True
    if text.lower() in ("false", "no", "off", "0"):
        return False
    raise ValueError("must be true or false")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ValueError("must be a number of seconds")
    return seconds


def _requirement(text: str) -> str:
    if text not in ("none", "optional", "required"):
        raise ValueError("must be none, optional or required")
    return text


def _tls_version(text: str) -> ssl.TLSVersion:
    try:
        return ssl.TLSVersion(int(text))
    except ValueError:
        raise ValueError("must be the number of a TLS version, such as 771 for 1.2") from None


def _verify_flags(text: str) -> list[ssl.VerifyFlags]:
    names = text.replace("[", "").replace("]", "").split(",")
    try:
        return [ssl.VerifyFlags[name.strip()] for name in names]
    except KeyError:
        raise ValueError(f"must be names of ssl.VerifyFlags: {', '.join(ssl.VerifyFlags.__members__)}") from None


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "db": _number,
    "username": str,
    "password": str,
    "client_name": str,
    "socket_connect_timeout": _seconds,
    "socket_keepalive": _flag,
    "health_check_interval": _seconds,
    "ssl_ca_certs": str,
    "ssl_ca_path": str,
    "ssl_ca_data": str,
    "ssl_certfile": str,
    "ssl_keyfile": str,
    "ssl_password": str,
    "ssl_cert_reqs": _requirement,
    "ssl_check_hostname": _flag,
    "ssl_min_version": _tls_version,
    "ssl_ciphers": str,
    "ssl_include_verify_flags": _verify_flags,
    "ssl_exclude_verify_flags": _verify_flags,
}
"""Options of the query that a connection gets, and what parses them."""

_TEXTS: Final = ("username", "password", "ssl_password", *_FOR_SENTINELS, *_FILES, "ssl_ca_path", "ssl_ca_data")
"""Options whose values may contain an @."""


def _options(query: Mapping[str, str]) -> dict[str, Any]:
    return {name: _PARSERS[name](value) for name, value in query.items() if name in _PARSERS}


def _one_node(hosts: str) -> Node:
    """Parse host:port, of which both may be missing. Raises `ValueError`."""
    return _node(f"localhost{hosts}" if not hosts or hosts.startswith(":") else hosts, 6379)


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
    parts = _Parts.of(address.url)
    if address.scheme == "unix":
        if "://" not in address.url and address.url != "unix:":
            raise ConfigurationError(f"{address.shown!r}: the path must be absolute: write unix:///path/to.sock")
        if not parts.path:
            raise ConfigurationError(f"{address.shown!r} names no socket: write unix:///path/to.sock")
        if parts.hosts:
            raise ConfigurationError(f"{address.shown!r}: the path must be absolute: write unix:///path/to.sock")
        if "\0" in unquote(parts.path):
            raise ConfigurationError(f"{address.shown!r}: the path must not contain a null byte")
        return
    if "://" not in address.url:
        raise ConfigurationError(f"{address.shown!r} names no host: write {address.scheme}://host:6379")
    try:
        if "," not in parts.hosts:
            _ = _one_node(parts.hosts)
            _ = urlsplit(address.url).port
    except ValueError as error:
        raise ConfigurationError(f"{address.shown!r}: {error}") from None
    if "," in parts.hosts:
        raise ConfigurationError(
            f"{address.shown!r} names several hosts: write {address.scheme}+cluster:// for a Redis Cluster, "
            f"or {address.scheme}+sentinel://.../service for sentinels"
        )
    _check_number(address, parts.path.strip("/"))


def _check_several(address: Address) -> None:
    parts = _Parts.of(address.url)
    example = "host:6379" if address.clustered else "host:26379/service"
    if "://" not in address.url or not parts.hosts:
        raise ConfigurationError(f"{address.shown!r} names no host: write {address.scheme}://{example}")
    try:
        _ = address.nodes
    except ValueError as error:
        raise ConfigurationError(f"{address.shown!r}: {error}") from None
    if address.clustered:
        database = address.query.get("db", parts.path.strip("/"))
        if database not in ("", "0"):
            raise ConfigurationError(f"{address.shown!r}: a Redis Cluster has database 0 only; leave out {database!r}")
        return
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ConfigurationError(
            f"{address.shown!r} names no service: write {address.scheme}://host:26379/service, "
            "with the name by which the sentinels monitor the primary"
        )
    _check_number(address, database)


def _check_number(address: Address, database: str) -> None:
    database = address.query.get("db", database)
    if database and not (database.isascii() and database.isdigit()):
        raise ConfigurationError(f"{address.shown!r}: the database must be a number, got {database!r}")


def _check_query(address: Address) -> None:
    given = parse_qsl(_Parts.of(address.url).query, keep_blank_values=True)
    names = [name for name, _ in given]
    for name, value in given:
        if name in _PLACES:
            raise ConfigurationError(
                f"{address.shown!r}: {name} cannot be an option; write it before the '?': {_KNOWN}"
            )
        if name not in _PARSERS and name not in _FIXED and name not in _FOR_SENTINELS:
            known = ", ".join(sorted([*_PARSERS, *_FOR_SENTINELS]))
            raise ConfigurationError(f"{address.shown!r}: unknown option {name!r}; known are {known}")
        if names.count(name) > 1:
            raise ConfigurationError(f"{address.shown!r}: {name} is given more than once")
        if name.startswith("ssl_") and not address.encrypted:
            raise ConfigurationError(f"{address.shown!r}: {name} needs TLS, so the scheme must begin with rediss")
        if name in _FOR_SENTINELS and address.service is None:
            raise ConfigurationError(f"{address.shown!r}: {name} is for redis+sentinel:// and rediss+sentinel:// only")
        if name == "protocol" and value not in ("", "2"):
            raise ConfigurationError(f"{address.shown!r}: protocol must be 2 (RESP2), got {value!r}; leave it out")
        if value and name in _PARSERS:
            try:
                _PARSERS[name](value)
            except ValueError as error:
                raise ConfigurationError(f"{address.shown!r}: {name} {error}, got {value!r}") from None
