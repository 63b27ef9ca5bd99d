"""Notes of tool calls in flight: what the next run and people see of a call that a crash cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from perdure import App, Context, Retry, Settings, Snooze, TaskHandle, current_step
from perdure.queues import Gateway
from perdure.queues.delivery.step_pages import PAGE
from perdure.queues.transport.scripts import Script
from perdure.worker.durable.journal.resumption import Resumption
from perdure.worker.durable.steps.current import AlreadyDone
from pydantic import SecretStr

from tests.support.runs import current_run
from tests.support.stored_data import everything
from tests.support.workers import (
    bounded,
    recorded_steps,
    running_worker,
    steal,
    wait_until,
    work_off,
)

pytestmark = pytest.mark.integration


async def intents(app: App, handle: TaskHandle[Any]) -> dict[str, bytes]:
    return {key: value for key, value in (await recorded_steps(app, handle)).items() if key.startswith("i:")}


async def crash_in_call(app: App, handle: TaskHandle[Any], started: asyncio.Event) -> dict[str, bytes]:
    """Take the task from the worker that is in a call; return the intents at that time."""
    await bounded(started.wait())

    async def noted() -> bool:
        return bool(await intents(app, handle))

    await wait_until(noted, "the note of the call")
    found = await intents(app, handle)
    await steal(app, handle, expired=True)
    return found


async def test_a_resumed_run_reports_the_call_in_flight_and_its_record_drops_the_note(app: App) -> None:
    started, found, verified = asyncio.Event(), list[Resumption](), list[str]()

    async def fetch(url: str, token: str, page: int = 1) -> int:
        if not started.is_set():
            started.set()
            await asyncio.sleep(60)
        return page

    async def verify(*_: Any, **__: Any) -> AlreadyDone[int] | None:
        verified.append("verify")
        return AlreadyDone(7)

    @app.task
    async def job(ctx: Context, url: str, token: SecretStr) -> int:
        if ctx.resumption is not None:
            found.append(ctx.resumption)
            options = ctx.options(risky=True, verify=verify)  # a new release: the note must not put it in doubt
            return await options.tool("fetch", fetch, url, token.get_secret_value(), page=2)
        caller = ctx.options(reasoning=f"{'x' * 190} {token.get_secret_value()}")
        return await caller.tool("fetch", fetch, url, token.get_secret_value(), page=2)

    handle = await job.enqueue("https://example.org", SecretStr("open-sesame"))
    async with running_worker(app):
        assert list(await crash_in_call(app, handle, started)) == ["i:fetch"]
    await work_off(app)
    assert await bounded(handle.result()) == 2
    assert verified == []
    call = f'fetch(url="https://example.org", token="**********", page=2), because: {"x" * 190} *********'
    assert found[0].summary().endswith(f"in flight: {call}")
    assert found[0].handoff is not None
    assert not found[0].handoff.dependencies.in_doubt
    assert f"- was in flight: {call}; check whether it took effect first" in found[0].handoff.to_markdown()
    assert await intents(app, handle) == {}


async def test_the_call_in_flight_is_found_in_a_large_checkpoint(app: App) -> None:
    started, found = asyncio.Event(), list[Resumption]()

    async def fetch(url: str) -> None:
        if not started.is_set():
            started.set()
            await asyncio.sleep(60)

    @app.task(durability="async")
    async def job(ctx: Context) -> None:
        for number in range(2 * PAGE):
            await ctx.step(f"step-{number}", int, number)
        if ctx.resumption is not None:
            found.append(ctx.resumption)
        await ctx.tool("fetch", fetch, "a")

    handle = await job.enqueue()
    async with running_worker(app):
        await crash_in_call(app, handle, started)
    await work_off(app)
    await bounded(handle.result())
    assert found[0].summary().endswith('in flight: fetch(url="a")')


async def test_no_note_is_left_by_calls_that_ended_or_have_none(app: App) -> None:
    fields: list[dict[str, bytes]] = []

    @app.task(retry=Retry(max_attempts=1))
    async def job(ctx: Context) -> None:
        await ctx.tool("good", len, "x")
        for tool in ("bad", "worse"):
            with suppress(ValueError):
                await ctx.options(retry=Retry(max_attempts=2, base=0.0)).tool(tool, int, "x")
        await ctx.step("store", len, "x")
        fields.append(await intents(app, handle))

        async def look() -> None:
            await current_step().save("all entries before this one are stored")
            fields.append(await intents(app, handle))

        await ctx.options(intent=False).tool("quiet", look)
        raise ValueError("no more")

    handle = await job.enqueue()
    await work_off(app)
    assert fields == [{}, {}]
    assert await intents(app, handle) == {}


@pytest.mark.parametrize(("intent", "commands"), [(True, 20), (False, 10)])
async def test_a_note_costs_one_command_per_call(
    app: App, monkeypatch: pytest.MonkeyPatch, intent: bool, commands: int
) -> None:
    """Ten calls, each longer than the write of its note. The write of the result deletes the note."""
    written: list[int] = []
    run = Gateway.run

    async def counted(gateway: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        found = await run(gateway, script, keys, args)
        if script.name == "write_checkpoint":
            written.append(1)
        return found

    @app.task
    async def job(ctx: Context) -> None:
        async def fetch(number: int) -> int:
            for _ in range(3):  # replies come in the order of the commands: a note is stored by then
                await current_run(ctx).gateway.command("PING")
            return number

        for number in range(10):
            await ctx.options(intent=intent).tool("fetch", fetch, number)

    monkeypatch.setattr(Gateway, "run", counted)
    handle = await job.enqueue()
    await work_off(app)
    await bounded(handle.result())
    assert len(written) == commands


async def test_a_call_that_a_stop_cut_off_is_in_the_stored_handoff(app: App) -> None:
    started = asyncio.Event()

    async def fetch(url: str) -> None:
        started.set()
        await asyncio.sleep(60)

    found: list[Resumption] = []

    @app.task
    async def job(ctx: Context) -> None:
        if ctx.resumption is not None:
            found.append(ctx.resumption)
            raise Snooze(60)
        await ctx.tool("fetch", fetch, "a")

    await job.options(timeout=0.5, max_attempts=2).enqueue()
    async with running_worker(app):
        await bounded(started.wait())

        async def resumed() -> bool:
            return bool(found)

        await wait_until(resumed, "the second attempt")
    assert found[0].handoff is not None
    assert found[0].handoff.goal == "job()"
    assert [one.call for one in found[0].handoff.dependencies.in_flight] == ['fetch(url="a")']


async def test_notes_are_encrypted(settings: Settings) -> None:
    keys = {"encryption_keys": SecretStr("c2VhbGluZy1rZXktb2YtMzItYnl0ZXMtZm9yLXRlc3Q=")}
    started = asyncio.Event()

    async def fetch(patient: str) -> str:
        if not started.is_set():
            started.set()
            await asyncio.sleep(60)
        return ""

    async with App("sealed", settings=settings.model_copy(update=keys)) as app:

        @app.task
        async def job(ctx: Context) -> str:
            await ctx.tool("fetch", fetch, "the-patient-is-Ada")
            assert ctx.resumption is not None
            assert ctx.resumption.handoff is not None
            return ctx.resumption.handoff.to_markdown()

        handle = await job.enqueue()
        async with running_worker(app):
            await crash_in_call(app, handle, started)
            assert "the-patient-is-Ada" not in str(await everything(app))
        await work_off(app)
        assert 'was in flight: fetch(patient="the-patient-is-Ada")' in await bounded(handle.result())
