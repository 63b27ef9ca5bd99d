"""Cancellation of a run, which reaches its handler only; notification of observers."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from perdure.queues import Address, Gateway, Namespace
from perdure.queues.delivery.checkpoint import History
from perdure.queues.delivery.leases import Delivery
from perdure.queues.envelope import Envelope
from perdure.worker.durable.extras import Host
from perdure.worker.durable.run import Run, RunObserver
from perdure.worker.durable.steps.threads import Threads
from perdure.worker.durable.stop_reasons import STOP_RULES, StopReason, stop_of_event
from perdure.worker.settings import Settings

BOUND = 30.0


def make_run() -> Run:
    delivery = Delivery(Namespace("ns").partition("default"), b"1-1", "a", 1, {})
    envelope = Envelope(id="x", task="t")
    gateway = Gateway(Address("redis://nowhere"))
    return Run(gateway, delivery, envelope, History(), host=Host(Threads(1)), settings=Settings())


async def perform(run: Run, handler: Any) -> str:
    """Run a handler as the executor does, followed by code that must not be cancelled with it."""
    try:
        with run:
            await handler()
        ended = "returned"
    except asyncio.CancelledError:
        ended = "cancelled"
    await run.drain_cancellation()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return ended


async def started(handler: Any) -> tuple[Run, asyncio.Task[str]]:
    run = make_run()
    started = asyncio.Event()

    async def begin() -> None:
        started.set()
        await handler(run)

    task = asyncio.create_task(perform(run, begin))
    await asyncio.wait_for(started.wait(), BOUND)
    return run, task


class Kept(dict[str, bytes]):
    """Mapping that a weak reference can observe."""


async def for_ever(run: Run) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("why", list(StopReason))
async def test_a_cancelled_run_cancels_its_handler_only(why: StopReason) -> None:
    run, task = await started(for_ever)
    run.cancel(why)
    assert await asyncio.wait_for(task, BOUND) == "cancelled"
    assert run.stop_reason is why
    assert task.cancelling() == 0


async def test_a_run_cancelled_before_its_start_stops_at_the_first_await() -> None:
    run = make_run()
    run.cancel(StopReason.CANCELLED)
    assert await asyncio.wait_for(perform(run, lambda: for_ever(run)), BOUND) == "cancelled"


async def test_a_handler_that_ignores_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "cancel_interval", 0.01)
    cancelled = 0

    async def stubborn(run: Run) -> None:
        nonlocal cancelled
        while cancelled < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1

    run, task = await started(stubborn)
    run.cancel(StopReason.CANCELLED)
    assert await asyncio.wait_for(task, BOUND) == "returned"
    assert cancelled == 3
    assert task.cancelling() == 0


async def test_a_late_cancellation_does_not_hit_later_code() -> None:
    async def ends_itself(run: Run) -> None:
        run.cancel(StopReason.CANCELLED)  # no await is left to cancel

    _, task = await started(ends_itself)
    assert await asyncio.wait_for(task, BOUND) == "returned"


async def test_a_cancellation_after_the_handler_has_no_effect() -> None:
    run, task = await started(lambda run: asyncio.sleep(0))
    assert await asyncio.wait_for(task, BOUND) == "returned"
    run.cancel(StopReason.LOST)
    assert run.stop_reason is StopReason.LOST


async def test_a_lost_lease_overrides_every_other_reason() -> None:
    run = make_run()
    for why in (StopReason.CANCELLED, StopReason.TIMED_OUT, StopReason.LOST, StopReason.RELEASED):
        run.cancel(why)
    assert run.stop_reason is StopReason.LOST


async def test_the_time_limit_cancels_the_handler() -> None:
    run, task = await started(for_ever)
    run.limit(0.01)
    assert await asyncio.wait_for(task, BOUND) == "cancelled"
    assert run.stop_reason is StopReason.TIMED_OUT


async def test_a_cancelled_worker_cancels_later_code_too() -> None:
    run, task = await started(for_ever)
    run.cancel(StopReason.CANCELLED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND)


async def test_a_finished_run_is_freed_without_the_garbage_collector() -> None:
    """The run is in no reference cycle, so its memory is freed at once."""
    gc.collect()
    gc.disable()
    try:
        run = make_run()
        run.history.done = kept = Kept()
        assert run.recorder is run.recorder
        writer = run.close()
        assert writer is not None
        await writer.close()
        gone = weakref.ref(kept)
        del run, writer, kept
        assert gone() is None
    finally:
        gc.enable()


class Seen(RunObserver):
    """Observer that keeps its notifications."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def on_step(self, key: str) -> None:
        self.calls.append(("step", key))

    def on_recorded(self) -> None:
        self.calls.append("recorded")


async def test_every_observer_is_notified_in_the_order_of_registration() -> None:
    run = make_run()
    first, second = Seen(), Seen()
    second.calls = first.calls
    run.observe(first)
    run.observe(second)
    run.step_began("a")
    run.step_recorded()
    run.step_recorded(stored=False)
    assert first.calls == [("step", "a"), ("step", "a"), "recorded", "recorded"]
    assert run.steps_recorded == 2


async def test_an_observer_may_end_its_registration_while_it_is_notified() -> None:
    run = make_run()
    last = Seen()

    class Once(Seen):
        def on_recorded(self) -> None:
            super().on_recorded()
            run.unobserve(self)

    once = Once()
    run.observe(once)
    run.observe(last)
    run.step_recorded()
    run.step_recorded()
    assert (once.calls, last.calls) == (["recorded"], ["recorded", "recorded"])


async def test_a_run_finds_its_observer_by_type() -> None:
    run = make_run()
    assert run.observer(Seen) is None
    seen = Seen()
    run.observe(RunObserver())
    run.observe(seen)
    assert run.observer(Seen) is seen


def test_every_stop_reason_has_a_rule() -> None:
    assert set(STOP_RULES) == set(StopReason)


def test_only_runs_that_ended_by_themselves_cost_an_attempt() -> None:
    free = {reason for reason, rule in STOP_RULES.items() if rule.act in ("park", "release", "cancel", None)}
    assert not [reason for reason in free if STOP_RULES[reason].attempt]


@pytest.mark.parametrize(
    ("event", "after", "why"),
    [
        ("handed_off", "hand_off", "shutdown"),
        ("attempt_failed", "failure", "failure"),
        ("snoozed", "wait", "waiting"),
        ("waiting", "wait", "waiting"),
        ("crashed", "crash", "crash"),
        ("crash_backoff", "crash", "crash"),
        ("replayed", "replay", "burial"),
        ("forked", "fork", "asked"),
    ],
)
def test_the_stored_words_of_a_stop_stay_as_they_are(event: str, after: str, why: str) -> None:
    stop = stop_of_event(event)
    assert stop is not None
    assert (STOP_RULES[stop].after, STOP_RULES[stop].why) == (after, why)


@pytest.mark.parametrize("event", ["step_completed", "buried", "succeeded", "returned", "cancelled"])
def test_other_events_do_not_say_why_a_run_stopped(event: str) -> None:
    assert stop_of_event(event) is None
