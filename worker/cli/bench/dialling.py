"""The raw client's connection: one, to the server that holds its keys."""

from __future__ import annotations

from redis.crc import key_slot

from ....queues import Gateway
from ....queues.cluster.topology import learn
from ....queues.connection import COMMAND_TIMEOUT, sync_client
from .raw import RawClient

__all__ = ["dial"]


def dial(gateway: Gateway, key: str) -> RawClient:
    """Connect to the server, or to the node of the cluster that has the key. Raises the client library's errors."""
    address = gateway.address
    if not address.clustered:
        return RawClient(sync_client(address, gateway.socket))
    topology = learn(address, address.nodes, timeout=COMMAND_TIMEOUT)
    return RawClient(sync_client(address, None, node=topology.serving(key_slot(key.encode()))))
