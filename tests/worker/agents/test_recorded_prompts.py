"""Prompts of model calls, and costs of calls, as they are recorded for people: once, masked, bounded, encrypted."""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import pytest
from perdure import Agent, AgentState, App, Context, ContextBuilder, PlanStep, Retry, TaskHandle
from perdure.queues.security.keyring import generate_key
from perdure.worker.agents.context import recorded
from perdure.worker.agents.context.prompt import Prompt
from perdure.worker.agents.context.recorded import PROMPT_BYTES, BadPrompt, decode_head, decode_messages
from perdure.worker.durable.call_records import CHARGES, PROMPTS, CallRecord, cost_by_step, read_calls
from perdure.worker.durable.spent import Charge
from perdure.worker.durable.steps.current import current_step
from perdure.worker.settings import Settings
from pydantic import SecretStr

from tests.support.workers import bounded, redis_command, steal, work_off

pytestmark = pytest.mark.integration


class Work(AgentState):
    """A state without fields of its own."""


class Asks(Agent[Work]):
    """An agent that asks a model once, in its only step."""

    builder: ClassVar[ContextBuilder] = ContextBuilder(window=1_000_000, memory=False)

    async def plan(self, ctx: Context, state: Work) -> list[PlanStep]:
        return [PlanStep(key="ask", title="Ask")]

    async def act(self, ctx: Context, state: Work, step: PlanStep) -> str:
        return str(await self.builder.ask(ctx, state, self.model))

    async def model(self, prompt: Prompt) -> str:
        await current_step().spend(tokens=10, usd=0.5, model="m-1")
        return "yes"

    async def finish(self, ctx: Context, state: Work) -> None: ...


async def stored(app: App, handle: TaskHandle[Any], stream: str = PROMPTS) -> list[CallRecord]:
    return await read_calls(app.producer.gateway, handle.partition, handle.id, stream)


async def run(app: App, kind: type[Asks], goal: str = "go") -> TaskHandle[Any]:
    handle = await app.agent(kind, name="asks", retry=Retry(max_attempts=3, base=0.0)).enqueue(goal)
    await work_off(app)
    return handle


async def test_a_resumed_run_records_nothing_twice(app: App) -> None:
    lost: list[str] = []

    class Loses(Asks):
        """An agent that loses its lease after the answer is recorded."""

        async def act(self, ctx: Context, state: Work, step: PlanStep) -> str:
            answer = await super().act(ctx, state, step)
            if not lost:
                lost.append(answer)
                await ctx.step("flush", str)
                await steal(app, handle, expired=True)
                await asyncio.sleep(60)
            return answer

    handle = await app.agent(Loses, name="asks").enqueue("go")
    await work_off(app)
    await work_off(app)
    await bounded(handle.result())
    assert lost == ["yes"]
    (prompt,) = await stored(app, handle)
    assert decode_head(prompt).plan_step == "ask"
    (charge,) = await stored(app, handle, CHARGES)
    assert Charge.decode(charge.data).tokens == 10


async def test_each_try_of_a_call_is_recorded_with_its_number(app: App) -> None:
    tries: list[int] = []

    class Fails(Asks):
        """An agent whose model fails once; the conversation then has another message."""

        async def act(self, ctx: Context, state: Work, step: PlanStep) -> str:
            async def model(prompt: Prompt) -> str:
                tries.append(current_step().attempt)
                await current_step().spend(tokens=10, model="m-1")
                if len(tries) == 1:
                    raise ConnectionError("busy")
                return "yes"

            retry = Retry(max_attempts=2, base=0.0)
            inbox = [f"try {len(tries)}"]
            return str(await self.builder.ask(ctx, state, model, retry=retry, inbox=inbox))

    handle = await run(app, Fails)
    await bounded(handle.result())
    charges = [Charge.decode(record.data) for record in reversed(await stored(app, handle, CHARGES))]
    assert [charge.tries for charge in charges] == [1, 2]
    (cost,) = cost_by_step(charges)
    assert (cost.tries, cost.calls, cost.tokens, cost.unpriced) == (2, 2, 20, 2)
    assert len(await stored(app, handle)) == 1, "both tries had the same prompt"


async def test_no_prompts_are_kept_if_the_builder_keeps_none(app: App) -> None:
    class Keeps(Asks):
        """An agent that records no prompts."""

        builder = ContextBuilder(window=1_000_000, memory=False, keep_prompts=0)

    handle = await run(app, Keeps)
    assert await stored(app, handle) == []
    with pytest.raises(ValueError, match="keep_prompts must be a number of prompts, 0 or more, got -1"):
        ContextBuilder(window=10, keep_prompts=-1)


async def test_prompts_are_bounded_in_number_and_size(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PROMPTS_BYTES", 300_000)

    class Many(Asks):
        """An agent that builds large prompts."""

        async def act(self, ctx: Context, state: Work, step: PlanStep) -> str:
            for number in range(8):
                text = f"{number} {random.Random(number).randbytes(600_000).hex()}"
                await ContextBuilder(window=10_000_000, identity=text, memory=False).build(ctx, state)
            return "done"

    handle = await run(app, Many)
    found = await stored(app, handle)
    assert [record.number for record in found] == [8, 7, 6, 5], "the latest, the fewest that are kept"
    assert decode_head(found[0]).cut > 900_000
    messages = decode_messages(found[0])
    assert messages[0]["content"].startswith("7 ")
    assert messages[0]["content"].endswith("more characters]")
    assert len(messages[0]["content"]) < PROMPT_BYTES


async def test_a_prompt_with_odd_text_is_recorded(app: App) -> None:
    class Odd(Asks):
        """An agent with half of a surrogate pair in its prompt."""

        builder = ContextBuilder(window=1_000_000, memory=False, identity="half \ud800 \x00 \u202e")

    handle = await run(app, Odd)
    await bounded(handle.result())
    (record,) = await stored(app, handle)
    assert decode_messages(record)[0]["content"].startswith("half ? ")


async def test_a_record_that_another_program_changed_is_a_problem() -> None:
    for data in (b"", b"{}", b"[]\nx", b'{"event": "x"}\nx', b"{}\nno zlib"):
        with pytest.raises(BadPrompt):
            decode_head(CallRecord(1, 1, data))
            decode_messages(CallRecord(1, 1, data))
    for data in (b"", b"{}", b"[]", b'{"step": 1}', b'{"step":"s","tries":1,"attempt":1,"model":"","usd":"NaN"}'):
        with pytest.raises(ValueError):
            Charge.decode(data)


async def test_readers_of_the_task_do_not_get_them(app: App) -> None:
    handle = await run(app, Asks)
    events = [event async for event in handle.events(follow=False, include="emitted")]
    assert not [event for event in events if event.type == "emitted"]
    with pytest.raises(ValueError, match="name of a stream"):
        handle.stream(PROMPTS)


async def test_they_are_kept_as_long_as_the_record(app: App) -> None:
    handle = await run(app, Asks)
    record = await redis_command(app, "PTTL", handle.partition.record(handle.id))
    for stream in (PROMPTS, CHARGES):
        kept = await redis_command(app, "PTTL", handle.partition.stream(handle.id, stream))
        assert abs(kept - record) < 5_000


async def test_they_are_encrypted(settings: Settings) -> None:
    changed = {"encryption_keys": SecretStr(generate_key()), "encryption_required": True}

    class Secret(Asks):
        """An agent with a text to look for."""

        builder = ContextBuilder(window=1_000_000, memory=False, identity="a text to look for")

    async with App("test", settings=settings.model_copy(update=changed)) as app:
        handle = await run(app, Secret)
        await bounded(handle.result())
        for stream in (PROMPTS, CHARGES):
            (entry,) = await redis_command(app, "XRANGE", handle.partition.stream(handle.id, stream), "-", "+")
            assert b"m-1" not in b"".join(entry[1])
            assert b"tokens" not in b"".join(entry[1])
        (record,) = await stored(app, handle)
        assert decode_messages(record)[0]["content"] == "a text to look for"
    async with App("test", settings=settings) as blind:
        (record,) = await stored(blind, handle)
        with pytest.raises(BadPrompt, match="encrypt"):
            decode_head(record)
