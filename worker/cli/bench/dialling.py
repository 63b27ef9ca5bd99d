"""The raw client's connection: one, to the server that holds its keys."""

from __future__ import annotations

import redis
from redis.crc import key_slot

from ....queues import Gateway, Unavailable
from ....queues.cluster.topology import Topology
from ....queues.connection import sync_client
from .raw import RawClient

__all__ = ["dial"]


def dial(gateway: Gateway, key: str) -> RawClient:
    """Connect to the server, or to the node of the cluster that has the key. Raises the client library's errors."""
    address = gateway.address
    if not address.clustered:
        return RawClient(sync_client(address, gateway.socket))
    trouble: Exception | None = None
    for asked in address.nodes:
        try:
            with sync_client(address, None, node=asked) as client:
                topology = Topology.read(client.execute_command("CLUSTER SLOTS"), asked)
        except redis.ConnectionError as error:
            trouble = error
            continue
        return RawClient(sync_client(address, None, node=topology.serving(key_slot(key.encode()))))
    raise Unavailable(f"no node of {address.shown} can be reached") from trouble
