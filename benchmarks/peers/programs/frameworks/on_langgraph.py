"""LangGraph, in the calling process: a graph of ten nodes, each checkpointed before the next one runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TypedDict

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

from ..setup import CONCURRENCY, DATABASE_URL

BLOCKING = False

_SQLITE = "sqlite:///"


class Walk(TypedDict):
    number: int


async def add(state: Walk) -> Walk:
    return {"number": state["number"] + 1}


def graph() -> StateGraph:
    built = StateGraph(Walk)
    names = [f"add_{at}" for at in range(10)]
    for name in names:
        built.add_node(name, add)
    for before, after in pairwise([START, *names, END]):
        built.add_edge(before, after)
    return built


@asynccontextmanager
async def walker() -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """Provide a run of the graph, each on its own LangGraph thread."""
    async with saver() as checkpointer:
        await checkpointer.setup()
        compiled = graph().compile(checkpointer=checkpointer)

        async def one(number: int) -> int:
            thread = {"configurable": {"thread_id": str(number)}}
            return (await compiled.ainvoke({"number": number}, thread, durability="sync"))["number"]

        yield one


@asynccontextmanager
async def saver() -> AsyncIterator[AsyncPostgresSaver | AsyncSqliteSaver]:
    if DATABASE_URL.startswith(_SQLITE):
        async with AsyncSqliteSaver.from_conn_string(DATABASE_URL.removeprefix(_SQLITE)) as found:
            yield found
    else:
        options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
        async with AsyncConnectionPool(DATABASE_URL, min_size=1, max_size=CONCURRENCY, kwargs=options) as pool:
            yield AsyncPostgresSaver(pool)
