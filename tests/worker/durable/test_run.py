"""Stopping a run cancels its handler, and nothing that follows in the same task; observers are notified."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from perdure.queues import Address, Delivery, Envelope, Gateway, History, Namespace
from perdure.worker.durable import STOP_RULES, Run, RunObserver, StopReason, Threads, stop_of_event
from perdure.worker.durable import run as runs
from perdure.worker.settings import Settings

BOUND = 10.0


def make_run() -> Run:
    delivery = Delivery(Namespace("ns").partition("default"), b"1-1", "a", 1, {})
    envelope = Envelope(id="x", task="t")
    threads = Threads(1)
    gateway = Gateway(Address("redis://nowhere"))
    return Run(gateway, delivery, envelope, History(), payload_limit=1, threads=threads, settings=Settings())


async def perform(run: Run, handler: Any) -> str:
    """What the executor does: the handler within the run, then something that must not be cancelled with it."""
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


async def begun(handler: Any) -> tuple[Run, asyncio.Task[str]]:
    run = make_run()
    started = asyncio.Event()

    async def begin() -> None:
        started.set()
        await handler(run)

    task = asyncio.create_task(perform(run, begin))
    await asyncio.wait_for(started.wait(), BOUND)
    return run, task


class Kept(dict[str, bytes]):
    """A mapping that can be watched going away."""


async def for_ever(run: Run) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("why", list(StopReason))
async def test_the_handler_is_cancelled_and_what_follows_it_is_not(why: StopReason) -> None:
    run, task = await begun(for_ever)
    run.cancel(why)
    assert await asyncio.wait_for(task, BOUND) == "cancelled"
    assert run.stop_reason is why
    assert task.cancelling() == 0


async def test_ended_before_it_began_the_handler_gets_no_further_than_its_first_wait() -> None:
    run = make_run()
    run.cancel(StopReason.CANCELLED)
    assert await asyncio.wait_for(perform(run, lambda: for_ever(run)), BOUND) == "cancelled"


async def test_a_handler_that_goes_on_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_CANCEL_AGAIN", 0.01)
    cancelled = 0

    async def stubborn(run: Run) -> None:
        nonlocal cancelled
        while cancelled < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled += 1

    run, task = await begun(stubborn)
    run.cancel(StopReason.CANCELLED)
    assert await asyncio.wait_for(task, BOUND) == "returned"
    assert cancelled == 3
    assert task.cancelling() == 0


async def test_an_end_that_comes_with_the_handlers_own_last_line_hits_nothing_else() -> None:
    async def ends_itself(run: Run) -> None:
        run.cancel(StopReason.CANCELLED)  # and there is no await left that could be cancelled

    _, task = await begun(ends_itself)
    assert await asyncio.wait_for(task, BOUND) == "returned"


async def test_after_the_handler_nothing_is_cancelled() -> None:
    run, task = await begun(lambda run: asyncio.sleep(0))
    assert await asyncio.wait_for(task, BOUND) == "returned"
    run.cancel(StopReason.LOST)
    assert run.stop_reason is StopReason.LOST


async def test_a_lost_lease_beats_every_other_end() -> None:
    run = make_run()
    for why in (StopReason.CANCELLED, StopReason.TIMED_OUT, StopReason.LOST, StopReason.RELEASED):
        run.cancel(why)
    assert run.stop_reason is StopReason.LOST


async def test_the_time_limit_ends_it() -> None:
    run, task = await begun(for_ever)
    run.limit(0.01)
    assert await asyncio.wait_for(task, BOUND) == "cancelled"
    assert run.stop_reason is StopReason.TIMED_OUT


async def test_who_cancels_the_worker_cancels_what_follows_too() -> None:
    run, task = await begun(for_ever)
    run.cancel(StopReason.CANCELLED)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND)


async def test_a_run_is_gone_when_it_is_over_without_a_collector() -> None:
    """No cycle is left behind: memory is given back at once, whatever the pace."""
    gc.collect()
    gc.disable()
    try:
        run = make_run()
        run.history.done = kept = Kept()
        assert run.recorder is run.recorder
        await run.close()
        gone = weakref.ref(kept)
        del run, kept
        assert gone() is None
    finally:
        gc.enable()


class Seen(RunObserver):
    """Keeps what it was notified of."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def on_step(self, key: str) -> None:
        self.calls.append(("step", key))

    def on_recorded(self) -> None:
        self.calls.append("recorded")

    def on_stop(self, reason: StopReason) -> None:
        self.calls.append(reason)


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


async def test_observers_learn_the_first_reason_of_a_stop_once() -> None:
    run = make_run()
    seen = Seen()
    run.observe(seen)
    run.cancel(StopReason.TIMED_OUT)
    run.cancel(StopReason.LOST)
    assert seen.calls == [StopReason.TIMED_OUT]


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
