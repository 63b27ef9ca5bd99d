"""What kind of server has been reached, and whether Perdure can work with it as the address says."""

from __future__ import annotations

from typing import Final

from .address import Address
from .errors import Refused

__all__ = ["check_server"]

OLDEST_SERVER: Final = (6, 2)


def check_server(address: Address, info: bytes) -> None:
    """Raise `Refused` where the server is too old, or of another kind than the address says.

    info: what `INFO server` answered.
    """
    found = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    mode = found.get("redis_mode") or found.get("server_mode", "")  # Valkey's name for it
    secure = "s" if address.encrypted else ""
    if mode == "sentinel":
        raise Refused(f"{address.shown} is a sentinel: write redis{secure}+sentinel://host:port/service")
    if mode == "cluster" and not address.clustered:
        raise Refused(f"{address.shown} is a node of a Redis Cluster: write redis{secure}+cluster://host:port")
    version = found.get("redis_version", "")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise Refused(f"{address.shown} is Redis {version or '?'}: Perdure needs {oldest} or newer")
