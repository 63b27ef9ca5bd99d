"""What the saver and the store do beside LangGraph's tests of them."""

from __future__ import annotations

import asyncio
import operator
from typing import Annotated, Any, TypedDict

import pytest
from langgraph.channels.delta import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import START, StateGraph
from loguru import logger
from perdure import App
from perdure.integrations.langgraph import PerdureSaver, PerdureStore
from perdure.queues.errors import EventLoopError
from perdure.worker.errors import StepOutsideTask

CONFIG: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}


async def test_writes_outside_a_task_warn_once(perdure: Any) -> None:
    lines: list[str] = []
    sink = logger.add(lambda message: lines.append(str(message)), level="WARNING", format="{message}")
    logger.enable("perdure")
    try:
        async with App("outside") as app:
            saver = PerdureSaver(app, name="outside")
            for _ in range(2):
                await saver.aput(CONFIG, empty_checkpoint(), {}, {})
    finally:
        logger.remove(sink)
        logger.disable("perdure")
    assert [line for line in lines if "'outside'" in line and "outside a task" in line] == lines[:1] != []


async def test_a_saver_that_requires_a_task_refuses_writes_outside(perdure: Any) -> None:
    async with App("required") as app:
        saver, store = PerdureSaver(app, require_task=True), PerdureStore(app, require_task=True)
        with pytest.raises(StepOutsideTask, match="graph_task"):
            await saver.aput(CONFIG, empty_checkpoint(), {}, {})
        with pytest.raises(StepOutsideTask, match="graph_task"):
            await store.aput(("a",), "k", {"n": 1})
        assert await saver.aget_tuple(CONFIG) is None
        assert await store.aget(("a",), "k") is None


async def test_synchronous_calls_on_an_event_loop_are_refused(perdure: Any) -> None:
    async with App("loops") as app:
        saver = PerdureSaver(app)
        with pytest.raises(EventLoopError, match=r"await saver.aget_tuple"):
            saver.get_tuple(CONFIG)
        assert await asyncio.to_thread(saver.get_tuple, CONFIG) is None


async def test_the_first_writes_of_a_task_stay(perdure: Any) -> None:
    async with App("writes") as app:
        saver = PerdureSaver(app)
        stored = await saver.aput(CONFIG, empty_checkpoint(), {}, {})
        await saver.aput_writes(stored, [("a", 1), ("b", 2)], "task")
        await saver.aput_writes(stored, [("a", 3), ("b", 4), ("c", 5), ("__interrupt__", 6)], "task")
        await saver.aput_writes(stored, [("__interrupt__", 7)], "task")
        found = await saver.aget_tuple(stored)
    assert found is not None
    assert [(channel, value) for _, channel, value in found.pending_writes or []] == [
        ("__interrupt__", 7),
        ("a", 1),
        ("b", 2),
        ("c", 5),
    ]


async def test_pruning_keeps_what_delta_channels_are_built_from(perdure: Any) -> None:
    class Deltas(TypedDict):
        notes: Annotated[list[str], DeltaChannel(operator.add)]

    builder = StateGraph(Deltas)
    builder.add_node("note", lambda state: {"notes": [f"note {len(state['notes'])}"]})
    builder.add_edge(START, "note")
    async with App("deltas") as app:
        saver = PerdureSaver(app)
        graph = builder.compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "t"}}
        for _ in range(3):
            await graph.ainvoke({"notes": ["asked"]}, config)
        before = (await graph.aget_state(config)).values
        await saver.aprune(["t"])
        assert (await graph.aget_state(config)).values == before
        assert len(before["notes"]) == 6


async def test_values_that_no_checkpoint_has_are_deleted(perdure: Any) -> None:
    async with App("values") as app:
        saver = PerdureSaver(app)
        config = CONFIG
        for number in range(3):
            checkpoint = empty_checkpoint()
            checkpoint["channel_values"] = {"list": [number]}
            checkpoint["channel_versions"] = {"list": str(number)}
            config = await saver.aput(config, checkpoint, {}, {"list": str(number)})
        await saver.aprune(["t"])
        keys = [entry.key async for entry in app.store("langgraph", "t").list()]
        found = await saver.aget_tuple(CONFIG)
    assert found is not None
    assert found.checkpoint["channel_values"] == {"list": [2]}
    assert [key for key in keys if key.startswith("b/")] == ["b//list/2"]


async def test_items_expire_later_when_they_are_read(perdure: Any) -> None:
    async with App("expiry") as app:
        store = PerdureStore(app, ttl={"default_ttl": 1, "refresh_on_read": True})
        await store.aput(("a",), "k", {"n": 1})
        entries = app.store("langgraph-items", "a")
        first = await entries.entry("k")
        await store.aget(("a",), "k", refresh_ttl=False)
        assert await entries.entry("k") == first
        assert (await store.aget(("a",), "k")).value == {"n": 1}
        second = await entries.entry("k")
        assert second.expires_at > first.expires_at
        await store.aput(("a",), "for ever", {"n": 2}, ttl=None)
        assert (await entries.entry("for ever")).expires_at is None
