"""Redis Cluster: which node serves which key, and a wire that follows keys when they move."""

from .client import ClusterWire
from .hash_slots import UnknownCommandError, slot_of
from .redirects import Pursuit
from .sync_client import ClusterLine
from .topology import Topology, learn

__all__ = ["ClusterLine", "ClusterWire", "Pursuit", "Topology", "UnknownCommandError", "learn", "slot_of"]
