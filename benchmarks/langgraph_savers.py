"""Supersteps per second of one graph with PerdureSaver beside the savers of SQLite and in memory, in one run.

Each saver runs the same graph of one node, which appends to a list, and stores a checkpoint before the next superstep
begins. The savers take turns, so that a load of the machine slows all of them.

    build/adapters/langgraph-newest/bin/python -m benchmarks.langgraph_savers
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from perdure import App
from perdure.integrations.langgraph import PerdureSaver, graph_task
from perdure.testing import run_worker

from .support.machine import origin_line


class State(TypedDict):
    left: int
    notes: Annotated[list[str], operator.add]


async def work(state: State) -> dict[str, Any]:
    return {"left": state["left"] - 1, "notes": [f"note {state['left']}"]}


def work_sync(state: State) -> dict[str, Any]:
    return {"left": state["left"] - 1, "notes": [f"note {state['left']}"]}


def build(node: Any) -> StateGraph[State]:
    builder = StateGraph(State)
    builder.add_node("work", node)
    builder.add_edge(START, "work")
    builder.add_conditional_edges("work", lambda state: "work" if state["left"] else END)
    return builder


Measure = Callable[[str, int], Awaitable[float]]


def of_saver(saver: Any) -> Measure:
    """Return a function that runs the graph on a thread, and returns the supersteps per second."""
    graph = build(work).compile(checkpointer=saver)

    async def measure(thread: str, supersteps: int) -> float:
        config = {"configurable": {"thread_id": thread}, "recursion_limit": supersteps + 10}
        start = time.perf_counter()
        await graph.ainvoke({"left": supersteps, "notes": []}, config, durability="sync")
        return supersteps / (time.perf_counter() - start)

    return measure


def of_sync_saver(saver: Any) -> Measure:
    graph = build(work_sync).compile(checkpointer=saver)

    async def measure(thread: str, supersteps: int) -> float:
        config = {"configurable": {"thread_id": thread}, "recursion_limit": supersteps + 10}

        def run() -> float:
            start = time.perf_counter()
            graph.invoke({"left": supersteps, "notes": []}, config, durability="sync")
            return supersteps / (time.perf_counter() - start)

        return await asyncio.to_thread(run)

    return measure


@asynccontextmanager
async def savers(folder: Path, fsync: str) -> AsyncIterator[dict[str, Measure]]:
    """Open the savers. fsync: policy of the append-only file of the server."""
    app = App("benchmark", redis_url="embedded:")
    app.configure(data_dir=folder / "perdure")
    task = graph_task(app, build(work), name="walk", recursion_limit=100_000)

    async def in_task(thread: str, supersteps: int) -> float:
        start = time.perf_counter()
        handle = await task.enqueue({"left": supersteps, "notes": []}, thread_id=f"task-{thread}")
        await handle.result(timeout=600)
        return supersteps / (time.perf_counter() - start)

    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app)
        await app.producer.gateway.command("CONFIG", "SET", "appendfsync", fsync)
        sqlite = await stack.enter_async_context(AsyncSqliteSaver.from_conn_string(str(folder / "async.sqlite")))
        sqlite_sync = stack.enter_context(SqliteSaver.from_conn_string(str(folder / "sync.sqlite")))
        await stack.enter_async_context(run_worker(app))
        yield {
            "InMemorySaver": of_saver(InMemorySaver()),
            "AsyncSqliteSaver": of_saver(sqlite),
            "PerdureSaver": of_saver(PerdureSaver(app)),
            "PerdureSaver in a task": in_task,
            "SqliteSaver, synchronous": of_sync_saver(sqlite_sync),
            "PerdureSaver, synchronous": of_sync_saver(PerdureSaver(app, name="sync")),
        }


async def main(supersteps: int, rounds: int, fsync: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with savers(Path(folder), fsync) as measures:
            found: dict[str, list[float]] = {name: [] for name in measures}
            for number in range(rounds + 1):
                for name, measure in measures.items():
                    rate = await measure(f"thread-{number}", supersteps)
                    if number:  # the first round warms up
                        found[name].append(rate)
    print(origin_line(f"the embedded server, appendfsync {fsync}"))
    for name, rates in found.items():
        print(f"{name:28} {statistics.median(rates):7.0f} supersteps/s   ({min(rates):.0f} to {max(rates):.0f})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--supersteps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--fsync", choices=("everysec", "always"), default="everysec", help="of the server")
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.supersteps, options.rounds, options.fsync)))
