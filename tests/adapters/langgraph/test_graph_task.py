"""Graphs as tasks, in process."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

import pytest
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables.config import var_child_runnable_config
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Send, interrupt
from perdure import App, Retry
from perdure.integrations.langgraph import graph_task
from perdure.queues.errors import InvalidAnswer, TaskFailed
from perdure.queues.store.entries import Fence
from perdure.worker.context import current_context
from perdure.worker.errors import TaskDefinitionError
from perdure.worker.store import entries_of
from pydantic import BaseModel


class State(TypedDict, total=False):
    items: list[str]
    notes: Annotated[list[Any], operator.add]


def graph_of(**nodes: Any) -> StateGraph[State]:
    """Return a graph that runs its nodes one after the other."""
    builder = StateGraph(State)
    before = START
    for name, node in nodes.items():
        builder.add_node(name, node)
        builder.add_edge(before, name)
        before = name
    builder.add_edge(before, END)
    return builder


async def test_several_interrupts_wait_at_once(perdure: Any) -> None:
    async def review(state: Any) -> State:
        return {"notes": [[state["item"], interrupt(f"publish {state['item']}?")]]}

    builder = StateGraph(State)
    builder.add_node("review", review)
    builder.add_conditional_edges(START, lambda state: [Send("review", {"item": item}) for item in state["items"]])
    app = App("reviews")
    task = graph_task(app, builder, name="reviews")
    async with app:
        handle = await task.enqueue({"items": ["a", "b", "c"], "notes": []})
        await perdure.run_until_idle(app)
        waits = {wait.shown: wait for wait in await handle.waits()}
        assert {wait.name for wait in waits.values()} == {"review"}
        for item in "cab":
            await handle.answer(waits[f"publish {item}?"].id, item == "b")
        await perdure.run_until_idle(app)
        assert (await handle.result(timeout=5))["notes"] == [["a", False], ["b", True], ["c", False]]


async def test_interrupts_of_one_node_have_an_answer_each(perdure: Any) -> None:
    """Both show the same, and the node runs again from its top for each answer."""
    runs = []

    async def ask(state: State) -> State:
        runs.append(1)
        return {"notes": [interrupt("sure?"), interrupt("sure?")]}

    app = App("asks")
    task = graph_task(app, graph_of(ask=ask), name="asks")
    async with app:
        handle = await task.enqueue({"notes": []})
        for answer in ("first", "second"):
            await perdure.run_until_idle(app)
            await handle.answer("ask", answer)
        await perdure.run_until_idle(app)
        assert (await handle.result(timeout=5))["notes"] == ["first", "second"]
    assert len(runs) == 3


async def test_an_answer_is_checked_by_the_schema_of_its_interrupt(perdure: Any) -> None:
    class Decision(BaseModel):
        approved: bool

    async def ask(state: State) -> State:
        return {"notes": [interrupt("pay?", response_schema=Decision).approved]}

    app = App("schemas")
    task = graph_task(app, graph_of(ask=ask), name="schemas")
    async with app:
        handle = await task.enqueue({"notes": []})
        await perdure.run_until_idle(app)
        with pytest.raises(InvalidAnswer, match="approved"):
            await handle.answer("ask", {"approve": True})
        await handle.answer("ask", {"approved": True})
        await perdure.run_until_idle(app)
        assert (await handle.result(timeout=5))["notes"] == [True]


async def test_nodes_with_one_step_name_stay_apart(perdure: Any) -> None:
    """The second node fails once. Its step is recorded then, and is not taken for that of the first node."""
    calls: list[str] = []

    async def model(node: str) -> str:
        calls.append(node)
        return f"answer {len(calls)}"

    async def first(state: State) -> State:
        return {"notes": [await current_context().step("model", model, "same")]}

    async def second(state: State) -> State:
        answer = await current_context().step("model", model, "same")
        if len(failed) < 1:
            failed.append(1)
            raise ConnectionError("once")
        return {"notes": [answer]}

    failed: list[int] = []
    app = App("steps")
    task = graph_task(app, graph_of(first=first, second=second), name="steps", retry=Retry(max_attempts=2, base=0.01))
    async with app:
        handle = await task.enqueue({"notes": []})
        await perdure.run_until_idle(app, wait_due=True)
        assert (await handle.result(timeout=5))["notes"] == ["answer 1", "answer 2"]
    assert calls == ["same", "same"]


async def test_a_step_whose_node_is_not_known_is_refused(perdure: Any) -> None:
    """Its record could be taken for that of another node."""

    async def node(state: State) -> State:
        var_child_runnable_config.set(None)  # as in a task that was not started by LangGraph
        return await current_context().step("note", note)

    async def note() -> State:
        return {"notes": ["x"]}

    app = App("unknown")
    task = graph_task(app, graph_of(node=node), name="unknown", retry=Retry(max_attempts=1))
    async with app:
        handle = await task.enqueue({"notes": []})
        await perdure.run_until_idle(app, allow_failures=True)
        with pytest.raises(TaskFailed, match="no node"):
            await handle.result(timeout=5)


async def test_what_a_cut_off_superstep_has_streamed_is_void(perdure: Any) -> None:
    tries: list[int] = []

    async def fine(state: State) -> State:
        get_stream_writer()("fine")
        return {"notes": ["fine"]}

    async def flaky(state: State) -> State:
        tries.append(1)
        get_stream_writer()(f"try {len(tries)}")
        if len(tries) == 1:
            raise ConnectionError("once")
        return {"notes": ["flaky"]}

    app = App("streams")
    task = graph_task(app, graph_of(fine=fine, flaky=flaky), name="streams", retry=Retry(max_attempts=2, base=0.01))
    async with app:
        handle = await task.enqueue({"notes": []})
        await perdure.run_until_idle(app, wait_due=True)
        items = [item async for item in handle.stream("custom")]
    assert [item.value for item in items if item.kind == "item"] == ["fine", "try 1", "try 2"]
    void = [item for item in items if item.kind not in ("item", "end")]
    assert len(void) == 1, items
    assert void[0].step == items[1].step != items[0].step


async def test_tokens_of_a_model_are_emitted(perdure: Any) -> None:
    model = GenericFakeChatModel(messages=iter([AIMessage("the tide is high")]))

    async def talk(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("talk", talk)
    builder.add_edge(START, "talk")
    app = App("tokens")
    task = graph_task(app, builder, name="tokens", stream=["messages"])
    async with app:
        handle = await task.enqueue({"messages": [{"role": "user", "content": "tide?"}]})
        await perdure.run_until_idle(app)
        result = await handle.result(timeout=5)
        items = [item.value async for item in handle.stream("messages") if item.kind == "item"]
    assert [message["content"] for message in result["messages"]] == ["tide?", "the tide is high"]
    assert "".join(item["content"] for item in items) == "the tide is high"
    assert {item["node"] for item in items} == {"talk"}
    assert len(items) > 1


async def test_a_breakpoint_before_a_node_waits_for_a_person(perdure: Any) -> None:
    async def draft(state: State) -> State:
        return {"notes": ["draft"]}

    async def publish(state: State) -> State:
        return {"notes": ["published"]}

    graph = graph_of(draft=draft, publish=publish).compile(interrupt_before=["publish"])
    app = App("breakpoints")
    task = graph_task(app, graph, name="breakpoints")
    async with app:
        handle = await task.enqueue({"notes": []})
        await perdure.run_until_idle(app)
        [wait] = await handle.waits()
        assert (wait.name, wait.why) == ("publish", "breakpoint before publish")
        await handle.answer("publish", True)
        await perdure.run_until_idle(app)
        assert (await handle.result(timeout=5))["notes"] == ["draft", "published"]


async def test_tasks_of_one_thread_continue_it(perdure: Any) -> None:
    async def count(state: State) -> State:
        return {"notes": [len(state["notes"])]}

    app = App("threads")
    task = graph_task(app, graph_of(count=count), name="threads")
    async with app:
        for expected in ([0], [0, 1]):
            handle = await task.enqueue({"items": []}, thread_id="user-42 {ü}/|")
            await perdure.run_until_idle(app)
            assert (await handle.result(timeout=5))["notes"] == expected
        other = await task.enqueue({"items": []})
        await perdure.run_until_idle(app)
        assert (await other.result(timeout=5))["notes"] == [0]


async def test_a_task_whose_thread_another_one_continued_is_not_resumed(perdure: Any) -> None:
    async def ask(state: State) -> State:
        if state["items"]:
            return {"notes": ["other"]}
        return {"notes": [interrupt("sure?")]}

    app = App("moved")
    task = graph_task(app, graph_of(ask=ask), name="moved", retry=Retry(max_attempts=1))
    async with app:
        first = await task.enqueue({"items": [], "notes": []}, thread_id="shared")
        await perdure.run_until_idle(app)
        second = await task.enqueue({"items": ["x"], "notes": []}, thread_id="shared")
        await perdure.run_until_idle(app)
        assert (await second.result(timeout=5))["notes"] == ["other"]
        await first.answer("ask", "yes")
        await perdure.run_until_idle(app, allow_failures=True)
        with pytest.raises(TaskFailed, match=f"thread 'shared' was continued by {second.id}"):
            await first.result(timeout=5)


def test_a_graph_that_cannot_be_a_task_is_refused() -> None:
    async def node(state: State) -> State:
        return {}

    app = App("refusals")
    for given, text in (
        ({"graph": object()}, "compiled graph"),
        ({"graph": graph_of(node=node).compile(interrupt_after=["node"])}, "interrupt_after"),
        ({"graph": graph_of(node=node), "stream": ["tokens"]}, "stream must be"),
        ({"graph": graph_of(node=node), "write": "exit"}, "write must be"),
    ):
        with pytest.raises(TaskDefinitionError, match=text):
            graph_task(app, name="refused", **given)


async def test_a_run_that_another_one_has_followed_cannot_store_a_checkpoint(perdure: Any) -> None:
    """The next delivery looks at the thread while a node runs, so that what follows the node is refused."""
    runs: list[int] = []

    async def node(state: State) -> State:
        run = current_context()._run
        runs.append(run.delivery.count)
        if len(runs) == 1:
            entries = entries_of(run.gateway, run.settings, ("langgraph", run.id))
            await entries.read(["c"], Fence(run.id, run.delivery.entry, run.delivery.count + 1))
        return {"notes": [len(runs)]}

    app = App("fenced")
    app.configure(lease=1.0)
    task = graph_task(app, graph_of(node=node, last=lambda state: {"notes": ["last"]}), name="fenced")
    async with app, perdure.run_worker(app):
        handle = await task.enqueue({"notes": []})
        assert (await handle.result(timeout=30))["notes"] == [2, "last"]
    assert runs == [1, 2]
