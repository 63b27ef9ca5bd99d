"""Sessions in the store: replayed, cut off, shared by concurrent runs, and expired."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from agents import Agent, function_tool
from perdure import App, Context, Retry
from perdure.integrations.openai_agents import PerdureRunner, PerdureSession
from perdure.queues import State
from perdure.queues.store.entries import NamespaceEntries
from perdure.testing import PerdureFixture
from perdure.worker.integrations import openai_session

from tests.adapters.openai_agents.scripted import Script


def message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def texts(session: PerdureSession) -> list[str]:
    """Return the items of a session for people: who, and what."""
    return [str(item.get("role") or item["type"]) for item in await session.get_items()]


async def test_a_conversation_over_two_tasks_is_not_doubled_by_their_attempts(perdure: PerdureFixture) -> None:
    app, script = App("agents"), Script([("look", {})])

    @function_tool
    def look() -> str:
        return "sunny"

    agent = Agent("clerk", model=script, tools=[look])

    @app.task(retry=Retry(max_attempts=3, base=0.01))
    async def ask(ctx: Context, question: str) -> str:
        session = PerdureSession(app, "user-42")
        result = await PerdureRunner().run(agent, question, session=session)
        if ctx.attempt < 3:
            raise OSError
        return str(result.final_output)

    async with app:
        for question in ("How is the weather?", "And now?"):
            handle = await ask.enqueue(question)
            await perdure.run_until_idle(app, wait_due=True)
            assert await handle.result() == "sunny"
        found = await texts(PerdureSession(app, "user-42"))
    turn = ["user", "function_call", "function_call_output", "assistant"]
    assert found == turn + turn
    assert script.counts["model"] == 4
    assert [item.get("role") for item in script.inputs[2]] == ["user", None, None, "assistant", "user"]


@pytest.mark.parametrize("call", ["add", "pop"])
async def test_a_change_whose_step_is_cut_off_is_made_once(
    perdure: PerdureFixture, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    app, sent = App("agents"), 0
    write = NamespaceEntries.write

    async def cut_off(entries: NamespaceEntries, *args: Any, **kwargs: Any) -> int:
        nonlocal sent
        version = await write(entries, *args, **kwargs)
        sent += 1
        if sent == (2 if call == "add" else 1):  # the first batch of `add` removes what has expired
            raise OSError("the worker dies before the step is recorded")
        return version

    @app.task(retry=Retry(max_attempts=2, base=0.01))
    async def change(ctx: Context) -> Any:
        session = PerdureSession(app, "user-42")
        return await (session.pop_item() if call == "pop" else session.add_items([message("c")]))

    async with app:
        session = PerdureSession(app, "user-42")
        if call == "pop":
            await session.add_items([message("a"), message("b")])
        monkeypatch.setattr(NamespaceEntries, "write", cut_off)
        handle = await change.enqueue()
        await perdure.run_until_idle(app, wait_due=True)
        assert sent >= 1
        if call == "pop":
            assert await handle.result() == message("b")
            assert await session.get_items() == [message("a")]
        else:
            assert await session.get_items() == [message("c")]


async def test_concurrent_batches_stay_together(perdure: PerdureFixture) -> None:
    app = App("agents")
    async with app:
        sessions = [PerdureSession(app, "user-42") for _ in range(5)]
        batches = [[message(f"{number}-{place}") for place in range(3)] for number in range(5)]
        await asyncio.gather(*(one.add_items(batch) for one, batch in zip(sessions, batches, strict=True)))
        found = await sessions[0].get_items()
        assert sorted([found[at : at + 3] for at in range(0, 15, 3)], key=str) == batches


async def test_large_batches_are_added_and_read_in_order(
    perdure: PerdureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_session, "_BATCH", 7)
    app = App("agents")
    async with app:
        session = PerdureSession(app, "user-42")
        items = [message(str(number)) for number in range(100)]
        await session.add_items(items)
        assert await session.get_items() == items
        assert await session.get_items(limit=2) == items[-2:]
        await session.clear_session()
        assert await session.get_items() == []


async def test_a_session_lives_as_a_whole_until_it_expires(perdure: PerdureFixture) -> None:
    app = App("agents")
    async with app:
        session = PerdureSession(app, "user-42", ttl=1.0)
        for text in "abcdefgh":  # for longer than the entry of the first item would live
            await session.add_items([message(text)])
            await asyncio.sleep(0.5)
        assert [item["content"] for item in await session.get_items()] == list("abcdefgh")
        await asyncio.sleep(1.1)
        assert await session.get_items() == []
        await session.add_items([message("i")])
        assert await session.get_items() == [message("i")]


async def test_a_session_of_another_id_is_another_one(perdure: PerdureFixture) -> None:
    app = App("agents")
    async with app:
        await PerdureSession(app, "a").add_items([message("a")])
        assert await PerdureSession(app, "b").get_items() == []


async def test_a_tool_that_writes_into_a_session_writes_once_per_call(perdure: PerdureFixture) -> None:
    app, script, tries = App("agents"), Script([("note", {})]), []
    agent = Agent("clerk", model=script)

    @function_tool(failure_error_function=None)
    async def note() -> str:
        session = PerdureSession(app, "notes")
        await session.add_items([message("first")])
        await session.add_items([message("second")])
        tries.append(1)
        if len(tries) < 3:
            raise OSError
        return "noted"

    agent.tools.append(note)
    runner = PerdureRunner(tool_options={"note": {"retry": Retry(max_attempts=2, base=0.01)}})

    @app.task(retry=Retry(max_attempts=2, base=0.01))
    async def run(ctx: Context) -> str:
        return str((await runner.run(agent, "Note.")).final_output)

    async with app:
        handle = await run.enqueue()
        await perdure.run_until_idle(app, wait_due=True)
        assert await handle.status() is State.SUCCEEDED
        found = await PerdureSession(app, "notes").get_items()
    assert len(tries) == 3
    assert found == [message("first"), message("second")]
