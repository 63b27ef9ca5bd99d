"""Redis Cluster: which node serves which key, and a wire that follows keys when they move."""

from .line import ClusterLine
from .pursuit import Pursuit
from .routing import UnknownCommandError, slot_of
from .topology import Topology, learn
from .wire import ClusterWire

__all__ = ["ClusterLine", "ClusterWire", "Pursuit", "Topology", "UnknownCommandError", "learn", "slot_of"]
