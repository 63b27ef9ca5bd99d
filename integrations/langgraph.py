"""Adapter for LangGraph: a saver, a store, and graphs as tasks. It needs the extra `langgraph`."""

from ..worker.integrations.extra import check_package

check_package("perdure.integrations.langgraph", "langgraph", extra="langgraph")

from ..worker.integrations.langgraph.graph_task import ThreadMoved, graph_task  # noqa: E402 - after the check
from ..worker.integrations.langgraph.item_store import PerdureStore  # noqa: E402
from ..worker.integrations.langgraph.saver import PerdureSaver  # noqa: E402

__all__ = ["PerdureSaver", "PerdureStore", "ThreadMoved", "graph_task"]
