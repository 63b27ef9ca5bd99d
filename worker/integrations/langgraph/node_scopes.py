"""Keys of steps that the nodes of a graph call.

LangGraph continues a graph at the superstep that was cut off, and calls no node again that has ended before. So the
handler's calls are not in one order from its top, and two nodes may use one name of a step. Each execution of a node
gets a scope of its own, named by the node and a digest of LangGraph's checkpoint namespace, which is the same when the
node runs again after a crash or an answer.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from langgraph.config import get_config

from ...durable.run import Run
from ...durable.steps.keys import StepKeys
from ...errors import StepOutsideTask

NODES: Final = "graph/"
"""Scope of all nodes."""

_NAME: Final = 64
"""Most characters of a node's name in a scope."""


def plain_name(node: str) -> str:
    """Return the name of a node as the name of a scope or a wait may be."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", node)[:_NAME]


class NodeKeys(StepKeys):
    """Keys of a run whose calls are made by the nodes of a graph."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self.skip([NODES])  # nodes that have ended are not run again

    @property
    def scope(self) -> str:
        """Prefix of the keys of the steps that are called here.

        Raises `StepOutsideTask` beside the handler where LangGraph does not name the node.
        """
        scope, ns = super().scope, _checkpoint_ns()
        if not ns:
            if not self._run.is_own_task():
                raise StepOutsideTask(
                    "a step was called by a part of the graph that is no node: call steps in nodes that are async "
                    "functions"
                )
            return scope
        prefix = node_scope(ns)
        return scope if scope.startswith(prefix) else prefix + scope


def node_scope(ns: str) -> str:
    """Return the scope of an execution of a node by its checkpoint namespace, such as `agent:ID|tools:ID`."""
    node = ns.rpartition("|")[2].partition(":")[0]
    return f"{NODES}{plain_name(node)}-{hashlib.blake2b(ns.encode(), digest_size=8).hexdigest()}/"


def _checkpoint_ns() -> str:
    try:
        configurable = get_config().get("configurable", {})
    except RuntimeError:  # no node runs here
        return ""
    return str(configurable.get("checkpoint_ns", ""))
