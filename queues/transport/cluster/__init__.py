"""Redis Cluster: which node serves which key, and a wire that follows keys when they move."""

from .client import ClusterConnection
from .hash_slots import UnknownCommandError, slot_of
from .redirects import RedirectPolicy
from .sync_client import SyncClusterConnection
from .topology import Topology, discover_topology

__all__ = [
    "ClusterConnection",
    "RedirectPolicy",
    "SyncClusterConnection",
    "Topology",
    "UnknownCommandError",
    "discover_topology",
    "slot_of",
]
