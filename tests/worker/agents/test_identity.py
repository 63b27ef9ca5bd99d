"""Identity of an agent: read at the start of each run, apart from the state."""

from __future__ import annotations

from typing import Any

import pytest
from perdure import Agent, AgentState, App, Context, ContextBuilder, PlanStep, Retry
from perdure.worker.agents.identity import Identity, set_identity

from tests.support.command_line import call
from tests.support.workers import bounded, history, running_worker, wait_until, work_off

pytestmark = pytest.mark.integration


OWN = Identity(role="You are a clerk.", policies=("Be kind.",), goals=("Help.",), parameters={"limit": 1})


def test_the_text_for_a_model_has_no_parameters() -> None:
    assert OWN.text() == "You are a clerk.\n\n# Policies\n\n- Be kind.\n\n# Long-term goals\n\n- Help."
    assert Identity().text() == ""


async def test_a_stored_identity_replaces_that_of_the_class_from_the_next_run_on(app: App) -> None:
    seen: list[tuple[int, Any]] = []

    class Clerk(Agent[AgentState]):
        identity = OWN

        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=key, title=key) for key in ("a", "b")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
            assert ctx.identity is not None
            prompt = await ContextBuilder(window=8000, identity="Answer in one line.").build(ctx, state)
            assert prompt.messages[0].content == f"{OWN.text()}\n\nAnswer in one line."
            seen.append((ctx.identity.version, ctx.identity.identity.parameters["limit"]))
            if step.key == "b" and ctx.attempt == 1:
                changed = OWN.model_copy(update={"parameters": {"limit": 2}})
                producer = app.producer
                await set_identity(producer.gateway, producer.namespace, "clerk", changed, by="ada")
                assert ctx.identity.version == 0, "a run keeps its identity"
                raise ValueError("the attempt fails")

        async def finish(self, ctx: Context, state: AgentState) -> set[str]:
            return set(state.model_dump())

    clerk = app.agent(Clerk, retry=Retry(max_attempts=2, base=0.0))
    async with app:
        handle = await clerk.enqueue("work")
        await work_off(app)
        assert "identity" not in await bounded(handle.result())
        events = [event.data for event in await history(handle) if event.type == "identity_read"]
        await app.producer.gateway.command("DEL", app.producer.namespace.identity("clerk"))
    assert seen == [(0, 1), (0, 1), (1, 2)]
    assert events == [{"agent": "clerk"}, {"agent": "clerk", "number": 1, "former": 0, "by": "ada"}]


def test_a_person_changes_an_identity_from_the_command_line(
    app: App, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERDURE_REDIS_URL", app.settings.redis_url)
    monkeypatch.setenv("PERDURE_NAMESPACE", app.settings.namespace)
    file = tmp_path / "identity.json"
    file.write_text(OWN.model_dump_json())
    assert "has no identity stored" in call("identity", "show", "clerk").err
    assert call("identity", "set", "clerk", str(file), "--by", "ada", "--why", "start").out == "1\n"
    assert Identity.model_validate_json(call("identity", "show", "clerk").out) == OWN
    later = call("identity", "show", "clerk", "--version", "9")
    assert later.err == "perdure: agent 'clerk' has no version 9; 'perdure identity log clerk' lists the versions\n"
    file.write_text('{"rolle": "x"}')
    refused = call("identity", "set", "clerk", str(file))
    assert (refused.code, "rolle" in refused.err) == (2, True)
    file.write_text("{}")
    refused = call("identity", "set", "clerk", str(file), "--expect", "7")
    assert (refused.code, "has 1" in refused.err) == (1, True)
    [version] = call("identity", "log", "clerk", "--json").json
    assert (version["by"], version["why"], version["identity"]) == ("ada", "start", OWN.model_dump(mode="json"))


async def test_a_step_that_is_cut_off_keeps_the_identity_with_which_it_began(app: App) -> None:
    """Its recorded steps and its question have the parameter of that version. The next step has the new one."""
    seen: list[tuple[str, Any]] = []

    class Clerk(Agent[AgentState]):
        identity = OWN

        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=key, title=key) for key in ("first", "second")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            assert ctx.identity is not None
            limit = ctx.identity.identity.parameters["limit"]
            await ctx.step("check", lambda limit: seen.append((step.key, limit)), limit)
            answer = await ctx.ask("ada", f"pay {limit}?")
            return [limit, answer]

        async def finish(self, ctx: Context, state: AgentState) -> Any:
            return state.results

    async def waits(count: int) -> bool:
        asked = [event for event in await history(handle) if event.type == "waiting"]
        return len(asked) == count and (await handle.record()).waits is not None

    clerk = app.agent(Clerk)
    async with app, running_worker(app):
        producer = app.producer
        handle = await clerk.enqueue("work")
        await wait_until(lambda: waits(1), "it asks")
        changed = OWN.model_copy(update={"parameters": {"limit": 2}})
        await set_identity(producer.gateway, producer.namespace, "clerk", changed, by="ada")
        await handle.answer("question", "yes", by="ada")
        await wait_until(lambda: waits(2), "it asks again")
        await handle.answer("question", "yes too", by="ada")
        assert await bounded(handle.result()) == {"first": [1, "yes"], "second": [2, "yes too"]}
        events = [event.data for event in await history(handle) if event.type in ("identity_read", "waiting")]
        await producer.gateway.command("DEL", producer.namespace.identity("clerk"))
    assert seen == [("first", 1), ("second", 2)]
    assert [data.get("why", data.get("number")) for data in events] == [None, "pay 1?", 1, "pay 2?"]
