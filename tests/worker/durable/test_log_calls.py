"""Events that handlers log: written once, with what they describe, and without secrets."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from typing import Any, Literal

import orjson
import pytest
from perdure import (
    Agent,
    AgentState,
    App,
    Context,
    PayloadTooLarge,
    PlanStep,
    Retry,
    Settings,
    Snooze,
    TaskHandle,
)
from perdure.context import ToolCall
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.worker.agents.journal.registration import register_event
from perdure.worker.durable.journal.event import Event
from perdure.worker.durable.journal.parsing import Unreadable, parse_event
from perdure.worker.durable.journal.run_events import AttemptFailed, Buried, Replayed, StepCompleted
from pydantic import BaseModel, SecretStr

from tests.support.stored_data import everything
from tests.support.workers import bounded, history, letter, recorded_steps, work_off

pytestmark = [pytest.mark.integration, pytest.mark.app("logging")]

NASTY = ('pa"ss\\wo\trd é', "tool", "choice", "987654321")
"""Secrets that JSON escapes, names of fields, and digits that occur in a number."""


async def test_events_contain_no_secret_and_stay_readable(app: App) -> None:
    @app.task(retry=Retry(max_attempts=1))
    async def tell(ctx: Context, secrets: list[SecretStr]) -> None:
        first, *others = [secret.get_secret_value() for secret in secrets]
        for secret in (first, *others):
            await ctx.decide(f"use {secret}", reasoning=orjson.dumps({"a": secret}).decode(), alternatives=[secret])
            await ctx.add_message("tool", secret, tool_call_id="c")
            await ctx.discover(secret, source=repr(secret))
        await ctx.tool("tool", lambda **given: {"long": first * 2000} | given, choice=first, number=987654321)
        with suppress(ValueError):
            await ctx.tool("fail", int, f"choice {first}")

    handle = await tell.enqueue([SecretStr(secret) for secret in NASTY])
    await work_off(app)
    await bounded(handle.result())
    stored = await redis_log(app, handle)
    for secret in (NASTY[0], orjson.dumps(NASTY[0]).decode()[1:-1], repr(NASTY[0])[1:-1], NASTY[3]):
        assert secret not in stored
    events = [parse_event(event) for event in await history(handle)]
    assert not [str(event) for event in events if isinstance(event, Unreadable)]
    assert [event.type for event in events][-2:] == ["tool_called", "step_failed"]


async def test_what_is_no_event_is_refused_without_a_retry(app: App) -> None:
    @app.task
    async def tell(ctx: Context) -> None:
        await ctx.record_event("x")  # type: ignore[arg-type]

    handle = await tell.enqueue()
    await work_off(app)
    found = await letter(app, handle)
    assert (found.reason, found.message) == (Reason.NOT_RETRYABLE, "event must be an Event, got 'x'")


async def test_a_call_with_arguments_above_the_limit_of_an_event_is_made_once(settings: Settings) -> None:
    """They are in no record, only in the log, which has their beginning."""
    calls: list[str] = []

    def count(text: str, short: int) -> int:
        calls.append(text)
        return len(text) + short

    async with App("logging", settings=settings.model_copy(update={"payload_limit": 4096})) as app:

        @app.task(retry=Retry(max_attempts=1))
        async def tell(ctx: Context, secret: SecretStr) -> list[int]:
            text = "x" * 500 + secret.get_secret_value() + "y" * 9000
            options = ctx.options(reasoning="z" * 9000)
            return [await options.tool("a", count, text, 1), await options.tool("a", count, f"{text}.", 1)]

        handle = await tell.enqueue(SecretStr("987654321" * 2))
        await work_off(app)
        first, second = await bounded(handle.result())
        events = [event.data for event in await history(handle) if event.type == "tool_called"]
        assert (len(calls), second - first) == (2, 1)
        assert [one["result"] for one in events] == [first, second]
        assert [one["arguments"]["short"] for one in events] == [1, 1]
        shown = [one["arguments"]["text"] for one in events]
        assert shown[0].startswith('"xxx')
        assert "(9,520 bytes, digest " in shown[0]
        assert shown[0] != shown[1]  # a check of repeated calls tells them apart
        assert "98765" not in await redis_log(app, handle)


async def test_many_arguments_are_counted_in_the_log(settings: Settings) -> None:
    largest: Any = max  # without a signature: the arguments are named by their places
    async with App("logging", settings=settings.model_copy(update={"payload_limit": 4096})) as app:

        @app.task(retry=Retry(max_attempts=1))
        async def tell(ctx: Context) -> int:
            return await ctx.tool("a", largest, *range(2000))

        handle = await tell.enqueue()
        await work_off(app)
        assert await bounded(handle.result()) == 1999
        (event,) = [event.data for event in await history(handle) if event.type == "tool_called"]
        assert event["arguments"] == {"arguments": "(2,000 arguments, 21,781 bytes)"}


async def test_a_secret_at_the_cut_of_a_long_result_is_masked(app: App) -> None:
    @app.task
    async def tell(ctx: Context, secret: SecretStr) -> None:
        for before in range(16_384 - 8, 16_384):
            await ctx.tool(f"t{before}", lambda length: "x" * length + secret.get_secret_value() + "y" * 100, before)

    handle = await tell.enqueue(SecretStr("abcdefgh"))
    await work_off(app)
    await bounded(handle.result())
    shown = [event.data["result"] for event in await history(handle) if event.type == "tool_called"]
    assert len(shown) == 8
    assert {letter for result in shown for letter in result} <= set('"xy*')


async def redis_log(app: App, handle: Any) -> str:
    entries = await app.producer.gateway.command("XRANGE", handle.partition.log(handle.id), "-", "+")
    return "\n".join(part.decode() for _, fields in entries for part in fields)


async def test_each_failed_try_of_a_step_is_logged_before_the_outcome(app: App) -> None:
    tries: list[int] = []

    async def flaky() -> int:
        tries.append(1)
        raise ConnectionError("no reply")

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.options(retry=Retry(max_attempts=2, base=0.0)).step("call", flaky)

    handle = await job.enqueue()
    await work_off(app)
    logged = [(event.type, event.step, event.number) for event in await history(handle)]
    assert logged == [("step_failed", "call", 1), ("step_failed", "call", 2), ("buried", None, None)]
    data = (await history(handle))[1].data
    assert data == {"step": "call", "attempt": 2, "error": "ConnectionError", "message": "no reply"}


async def test_a_step_that_reschedules_is_not_logged_as_failed(app: App) -> None:
    asked: list[int] = []

    async def not_now() -> None:
        asked.append(1)
        if len(asked) == 1:
            raise Snooze(after=0)

    @app.task
    async def job(ctx: Context) -> None:
        await ctx.step("wait", not_now)

    handle = await job.enqueue()
    await work_off(app)
    assert [event.type for event in await history(handle)] == ["snoozed", "step_completed"]


async def test_a_risky_step_is_logged_in_the_write_of_its_intent(app: App) -> None:
    seen: list[Any] = []

    @app.task
    async def job(ctx: Context) -> None:
        async def act() -> None:
            handle = await app.producer.find(ctx.task_id)
            assert handle is not None
            seen.append((list(await recorded_steps(app, handle)), [event.type for event in await history(handle)]))

        await ctx.options(risky=True).step("pay", act)

    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert seen == [(["i:pay"], ["step_started"])]
    assert [event.type for event in await history(handle)] == ["step_started", "step_completed"]


async def test_a_plain_step_writes_only_its_record_and_event(app: App) -> None:
    @app.task
    async def job(ctx: Context) -> int:
        return await ctx.step("one", lambda: 1)

    handle = await job.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == 1
    written = 'type\nstep_completed\nstep\none\ndata\n{"attempt":1,"ms":N}\ne\n1'
    assert re.sub('"ms":[0-9]+', '"ms":N', await redis_log(app, handle)) == written
    assert b"events" not in (await everything(app)).split(b"\n")


async def test_an_event_over_the_limit_is_refused_and_takes_no_number(settings: Settings) -> None:
    async with App("small", settings=settings.model_copy(update={"payload_limit": 1000})) as app:

        @app.task
        async def job(ctx: Context) -> None:
            with pytest.raises(PayloadTooLarge, match=f"event 'decided' of task {ctx.task_id} is "):
                await ctx.decide("x" * 1000)
            await ctx.decide("y")

        handle = await job.enqueue()
        await work_off(app)
        await bounded(handle.result())
        assert [(event.number, event.data["choice"]) for event in await history(handle)] == [(1, "y")]


async def test_events_written_by_scripts_are_typed(app: App) -> None:
    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def fails(ctx: Context) -> None:
        await ctx.step("one", lambda: 1)
        raise ValueError("no")

    handle = await fails.enqueue()
    await work_off(app)
    assert await replay(app.producer.gateway, await letter(app, handle), Replay(fresh=True))
    events = [parse_event(event) for event in await history(handle) if event.number is None]
    logged = [StepCompleted, AttemptFailed, Buried, Replayed]
    assert [type(event) for event in events] == logged
    assert (events[1].error, events[2].message, events[3].fresh) == ("ValueError", "no", True)  # type: ignore[attr-defined]
    await handle.cancel()


@pytest.mark.parametrize("in_agent", [True, False])
async def test_a_message_that_was_recorded_with_another_text_is_returned_as_recorded(app: App, in_agent: bool) -> None:
    """The ids of a model's tool calls differ in each run; a result must answer the call that the conversation has."""
    runs: list[int] = []

    async def ask(ctx: Context) -> list[tuple[str, str | None, int | None]]:
        runs.append(1)
        call = ToolCall(id=f"call-{len(runs)}", name="search")
        asked = await ctx.add_message("assistant", f"try {len(runs)}", tool_calls=[call])
        if len(runs) < 3:
            raise ConnectionError("down")
        found = await ctx.add_message("tool", "3 results", tool_call_id=asked.tool_calls[0].id)
        return [(one.content, one.tool_call_id, one.n) for one in (asked, found)]

    class Asking(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key="ask", title="ask")]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> Any:
            return await ask(ctx)

        async def finish(self, ctx: Context, state: AgentState) -> list[Any]:
            assert [(one.content, one.tool_call_id, one.n) for one in state.messages] == [
                tuple(one) for one in state.results["ask"]
            ]
            return list(state.results["ask"])

    retry = Retry(max_attempts=3, base=0.0)
    handle: TaskHandle[Any]
    if in_agent:
        handle = await app.agent(name="ask", retry=retry)(Asking).enqueue("x")
    else:
        handle = await app.task(name="ask", retry=retry)(ask).enqueue()
    await work_off(app)
    asked, found = await bounded(handle.result())
    assert (asked[0], found[1], len(runs)) == ("try 1", "call-1", 3)
    added = [event for event in await history(handle) if event.type == "message_added"]
    assert [event.number for event in added] == [asked[2], found[2]]


class Reading(BaseModel):
    value: float
    note: str = ""


@register_event
class Measured(Event):
    """Event of an application, with a model whose own configuration makes null of NaN."""

    type: Literal["measured"] = "measured"
    reading: Reading


async def test_what_utf_8_and_json_lack_is_stored_by_every_call_and_read_the_same(app: App) -> None:
    """Half of a character is U+FFFD, a number that is not finite has its name; nothing is lost, in either attempt."""
    half, seen = "a\ud83d", list[Any]()

    @app.task(retry=Retry(max_attempts=2, base=0.0))
    async def tell(ctx: Context) -> list[Any]:
        await ctx.decide(half, reasoning=half, alternatives=[half])
        await ctx.discover(half, source=half)
        call = ToolCall(id="c", name=half, arguments={half: [float("nan"), float("inf")], f"{half}b": float("nan")})
        added = await ctx.add_message("assistant", half, tool_calls=[call], reasoning=[{"score": float("nan")}])
        await ctx.record_event(Measured(reading=Reading.model_construct(value=float("nan"), note=half)))
        await ctx.send(ctx.task_id, {half: float("nan")})
        (received,) = await ctx.inbox()
        deep: Any = half
        for _ in range(400):
            deep = {"a": deep}
        await ctx.add_message("assistant", tool_calls=[ToolCall(id="d", name="deep", arguments=deep)])
        seen.append([added.model_dump(exclude={"tool_calls"}), added.tool_calls[0].name, received.content])
        if ctx.attempt == 1:
            raise ConnectionError("cut off")
        return [added.content, received.content]

    handle = await tell.enqueue()
    await work_off(app)
    assert await bounded(handle.result()) == ["a\ufffd", {"a\ufffd": "NaN"}]
    assert repr(seen[0]) == repr(seen[1])
    assert repr(seen[0]).isascii() is False
    assert "\ud83d" not in repr(seen)
    events = {event.type: event.data for event in reversed(await history(handle))}
    assert events["decided"] == {"choice": "a\ufffd", "reasoning": "a\ufffd", "alternatives": ["a\ufffd"]}
    assert events["message_added"]["message"]["tool_calls"][0]["arguments"] == {
        "a\ufffd": ["NaN", "Infinity"],
        "a\ufffdb": "NaN",
    }
    assert events["measured"]["reading"] == {"value": "NaN", "note": "a\ufffd"}
    measured = next(parse_event(event) for event in await history(handle) if event.type == "measured")
    assert isinstance(measured, Measured) and math.isnan(measured.reading.value)
