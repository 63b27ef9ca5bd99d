"""Late duplicates of what runs and producers call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from perdure.deadletter.replay import Replay, purge, replay
from perdure.queues import Gateway, LeaseLost, State
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history, write_entries
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.delivery.leases import Delivery, RunStatus
from perdure.queues.delivery.paused_tasks import await_resume
from perdure.queues.delivery.quarantine_store import clear_quarantined, quarantine, report_crash, take_quarantined
from perdure.queues.delivery.settlement import Counters, await_version, raise_count
from perdure.queues.derived_tasks import (
    Successor,
    TaskPast,
    confirm_successor,
    enqueue_successor,
    read_task_input,
    store_copy,
    store_fork,
)
from perdure.queues.envelope import Envelope, EnvelopeTemplate
from perdure.queues.inbox import send_message
from perdure.queues.keys import DATA_FORMAT
from perdure.queues.limits.control import LimitControl
from perdure.queues.transport.scripts import queue_script
from perdure.queues.unique import write_marker
from perdure.queues.values import encode_value, update_value
from perdure.queues.waits import answer_wait, claim_token, closing, look_at_wait, opening

from tests.conformance.late import Moments, Scene, Table
from tests.support.consumers import make_due
from tests.support.delivery_calls import SETTLING, beat

COMMANDS = Table()

SCRIPTS = {
    "succeed": "finish",
    "cancelled": "finish",
    "reschedule": "reschedule",
    "park": "park",
    "release": "release",
    "give_back": "release",
}
"""Scripts of the calls that settle a delivery; burying has another folder."""


async def next_delivery(scene: Scene, act: str) -> Delivery:
    """Return the next delivery of task x to the same worker, after such an act."""
    if act in ("release", "give_back"):
        return await scene.claim()
    if act in ("reschedule", "park"):
        await scene.promote()
    elif act.startswith("bury"):
        assert await replay(scene.gateway, await scene.letter(), Replay())
    else:
        await scene.enqueue_fresh()
    return await scene.read()


@COMMANDS.each(*SETTLING)
async def settlement(scene: Scene, variant: str) -> Moments:
    delivery = await scene.enqueue_and_read()
    if variant in SCRIPTS:
        scene.hold(SCRIPTS[variant])
    else:
        scene.proxy.hold(b"EVALSHA")
    unreadable = variant == "bury_unreadable"
    await SETTLING[variant](scene.late, delivery, "entry" if unreadable else "x")
    yield
    if unreadable:
        return
    second = await next_delivery(scene, variant)
    await scene.add_entries(second, Entry(Kind.DONE, "step", b"1"))
    yield
    await scene.settle("succeed", second)
    yield


@COMMANDS.each(
    *(
        Kind.SAVED,
        Kind.INTENT,
        Kind.DONE,
        Kind.DROP,
        Kind.EVENT,
        Kind.CONSUMED,
        Kind.EXCUSE,
        Kind.WAIT,
        Kind.WAIT_CLOSED,
        Kind.EMITTED,
        Kind.EMITTING,
        Kind.CUT_OFF,
    )
)
async def entry(scene: Scene, variant: Kind) -> Moments:
    delivery = await scene.enqueue_and_read()
    scene.hold("write_checkpoint")
    value = b"1 57" if variant is Kind.EXCUSE else b"57"
    place = {Kind.EMITTED: "output 100 1 1 s", Kind.CUT_OFF: "output 1 s"}.get(variant, "1")
    await write_entries(scene.late, delivery, "x", [Entry(variant, place, value, b"0 1 0 x")], first=1)
    yield
    for number, value in ((2, b"58"), (3, b"136")):
        await write_entries(scene.gateway, delivery, "x", [Entry(Kind.SAVED, "1", value)], first=number)
        yield
    assert (await load_history(scene.gateway, delivery, "x")).saved == {"1": b"136"}


OTHER_CALLS: dict[str, Callable[[Gateway, Delivery], Awaitable[object]]] = {
    "raise_count": raise_count,
    "quarantine": lambda gateway, delivery: quarantine(gateway, delivery, "x"),
    "clear_quarantined": lambda gateway, delivery: clear_quarantined(gateway, delivery, "x"),
}


@COMMANDS.each(*OTHER_CALLS)
async def call_of_a_run(scene: Scene, variant: str) -> Moments:
    delivery = await scene.enqueue_and_read()
    scene.hold(variant)
    await OTHER_CALLS[variant](scene.late, delivery)
    yield
    if variant == "quarantine":
        taken = await take_quarantined(scene.gateway, scene.partition, delivery.worker)
        assert taken.delivery is not None
        assert taken.delivery.fence != delivery.fence
    else:
        with suppress(LeaseLost):
            await scene.settle("release", delivery)
        await scene.claim_all()
    yield


@COMMANDS.each("enqueue", "schedule")
async def enqueue(scene: Scene, variant: str) -> Moments:
    delay = 60.0 if variant == "schedule" else 0.0
    async with scene.late_producer() as producer:
        await producer.enqueue("t", queue="warm")
        scene.hold(variant)
        await producer.enqueue("t", task_id="y", delay=delay, queue="default")
    yield
    if delay:
        assert await scene.promote("y") == 1
        yield
    await scene.settle("succeed", await scene.read(), "y")
    yield


@COMMANDS.case
async def message(scene: Scene) -> Moments:
    """The run has used it."""
    delivery = await scene.enqueue_and_read()
    scene.hold("send_message")
    sent = await send_message(scene.late, scene.partition, "x", "hello", sender="s", message_id="m")
    yield
    await write_entries(scene.gateway, delivery, "x", [Entry(Kind.CONSUMED, str(sent.number), b"")], first=1)
    yield


@COMMANDS.each("of a page", "of the run")
async def value(scene: Scene, variant: str) -> Moments:
    """A later value stays."""
    delivery = await scene.enqueue_and_read()
    scene.hold("update_value")
    await update_value(scene.late, scene.partition, "x", "speed", 1, by="ada")
    yield
    if variant == "of a page":
        await update_value(scene.gateway, scene.partition, "x", "speed", 2, by="ada")
    else:
        entry = Entry(Kind.VALUE, "speed", encode_value("speed", 2, "handler"))
        await write_entries(scene.gateway, delivery, "x", [entry], first=1)
    yield


@COMMANDS.each("by name", "early")
async def answer(scene: Scene, variant: str) -> Moments:
    """The run has used it, and another wait of its name is open."""
    delivery = await scene.enqueue_and_read()
    opened = [opening("x", wait, {}, until=None, early=True) for wait in ("approval", "approval#2")]
    if variant == "by name":
        await write_entries(scene.gateway, delivery, "x", opened[:1], first=1)
    scene.hold("answer")
    found = await answer_wait(scene.late, scene.partition, "x", "approval", "yes", answer_id="a")
    assert found.early is (variant == "early")
    yield
    first = 2
    if variant == "early":
        await write_entries(scene.gateway, delivery, "x", opened[:1], first=1)
    look = await look_at_wait(scene.gateway, scene.partition, "x", "approval")
    assert look.answer is not None
    closed = closing("x", "approval", look.answer)
    await write_entries(scene.gateway, delivery, "x", [closed, opened[1]], first=first)
    yield


@COMMANDS.case
async def claim_of_a_token(scene: Scene) -> Moments:
    """Another wait has taken it over."""
    delivery = await scene.enqueue_and_read()
    fields = {"token": "order:17"}
    waits = [opening("x", wait, fields, until=None, early=True) for wait in ("approval", "other")]
    await write_entries(scene.gateway, delivery, "x", waits, first=1)
    scene.hold("claim_token")
    assert await claim_token(scene.late, scene.partition, "x", "approval", "order:17", timeout_ms=None) is None
    yield
    closed = closing("x", "approval")
    await write_entries(scene.gateway, delivery, "x", [closed], first=3)
    assert await claim_token(scene.gateway, scene.partition, "x", "other", "order:17", timeout_ms=None) is None
    yield


@COMMANDS.case
async def claim_of_a_unique_key(scene: Scene) -> Moments:
    """Another producer has the key: at first that of the same moment, then one that has replaced it."""
    place = scene.namespace.unique("0" * 32)
    scene.hold("claim_unique")
    claimed = await write_marker(scene.late, place, b"one", b"", 60_000)
    assert claimed.taken
    yield
    assert (await write_marker(scene.gateway, place, b"two", b"%d one" % claimed.now, 60_000)).taken
    yield


@COMMANDS.each("number", "hold")
async def change_of_a_limit(scene: Scene, variant: str) -> Moments:
    """Another operator has changed the limit since, or released it."""
    mine, theirs = (
        LimitControl(through, scene.namespace, "openai", by="ada") for through in (scene.late, scene.gateway)
    )
    scene.hold("set_limit")
    if variant == "number":
        await mine.set({"total": "1"}, "total=1")
    else:
        await mine.hold(600)
    yield
    await (theirs.set({"total": "2"}, "total=2") if variant == "number" else theirs.release())
    yield


@COMMANDS.each("stored", "ended")
async def task_of_a_claim(scene: Scene, variant: str) -> Moments:
    """It was stored, and has run and expired meanwhile; or its claim has ended."""
    at, message = scene.partition, EnvelopeTemplate("t").message(b"{}", task_id="x")
    seconds, micros = await scene.gateway.command("TIME", node_of=at.ready)
    until = int(seconds) * 1000 + int(micros) // 1000 + (500 if variant == "ended" else 60_000)
    scene.hold("enqueue_one")
    keys = [at.ready, at.closed, at.timeline, at.record("x"), at.due, at.nudge]
    args = ("x", message.envelope, message.arguments, 0, until, "")
    assert await scene.late.run(queue_script("enqueue_one"), keys, args) == 1
    yield
    if variant == "ended":
        await scene.gateway.command("DEL", at.record("x"))
        await asyncio.sleep(0.6)  # the clock of Redis
        yield


@COMMANDS.case
async def heartbeat(scene: Scene) -> Moments:
    delivery = await scene.enqueue_and_read()
    scene.hold("renew_leases")
    await beat(scene.late, (delivery, "x", RunStatus(2.0, "list", 1.0)))
    await scene.settle("release", delivery)
    yield
    await scene.claim()
    yield


@COMMANDS.each("enqueued fresh", "expired, enqueued again", "replayed")
async def cancellation(scene: Scene, variant: str) -> Moments:
    """The next task of the id is spared."""
    delivery = await scene.enqueue_and_read()
    if variant == "replayed":
        await scene.settle("bury", delivery)
    async with scene.late_producer() as producer:
        handle = await producer.find("x")
        assert handle is not None
        scene.hold("cancel")
        assert await handle.cancel() == (State.DEAD if variant == "replayed" else State.RUNNING)
    yield
    if variant == "replayed":
        await next_delivery(scene, "bury")
        yield
        return
    await scene.settle("cancelled", delivery)
    yield
    if variant == "enqueued fresh":
        await next_delivery(scene, "cancelled")
    else:
        await scene.forget()
        await scene.enqueue()
    yield


@COMMANDS.case
async def fresh_start(scene: Scene) -> Moments:
    """The task that it started has ended, and another one that replaced this one, too."""
    await scene.settle("succeed", await scene.enqueue_and_read())
    async with scene.late_producer() as producer:
        await producer.find("x")
        scene.hold("reset_task")
        await producer.enqueue_fresh(EnvelopeTemplate("t").message(b"{}", task_id="x"), queue="default")
    yield
    for _ in range(2):
        await scene.settle("succeed", await scene.read())
        yield
        await scene.enqueue_fresh()
        yield


@COMMANDS.each("replay", "purge")
async def call_for_a_dead_letter(scene: Scene, variant: str) -> Moments:
    """The same task has died again since, or another one of its id."""
    await scene.settle("bury", await scene.enqueue_and_read())
    letter = await scene.letter()
    scene.proxy.hold(b"EVALSHA")
    assert await (replay(scene.late, letter, Replay()) if variant == "replay" else purge(scene.late, letter))
    yield
    if variant == "purge":
        await scene.enqueue()
    second = await scene.read()
    yield
    await scene.settle("bury", second)
    yield


@COMMANDS.case
async def crash_report(scene: Scene) -> Moments:
    """The same worker has claimed the message again."""
    delivery = await scene.enqueue_and_read()
    scene.hold("report_crash")
    await report_crash(scene.late, scene.namespace, ["default"], delivery.worker, exit_status="SIGKILL", steps={})
    yield
    again = await scene.claim()
    assert (again.worker, again.entry) == (delivery.worker, delivery.entry)
    yield
    await scene.settle("reschedule", again)
    yield


@COMMANDS.each("for reading", "for claiming")
async def promotion(scene: Scene, variant: str) -> Moments:
    """The next delay is left."""
    for_claim = variant == "for claiming"
    await scene.settle("reschedule", await scene.enqueue_and_read())
    scene.hold("promote")
    await make_due(scene.gateway, scene.partition, "x")
    assert (await promote_due(scene.late, scene.partition, for_claim=for_claim))[0] == 1
    yield
    await scene.settle("reschedule", await (scene.claim() if for_claim else scene.read()))
    yield


@COMMANDS.case
async def wait_for_a_version(scene: Scene) -> Moments:
    """No other delivery is parked."""
    delivery = await scene.enqueue_and_read()
    scene.hold("await_version")
    await await_version(scene.late, delivery, "x", DATA_FORMAT + 1, limit=600)
    yield
    second = await scene.promote_and_read()
    yield
    await scene.settle("succeed", second)
    yield


@COMMANDS.case
async def wait_for_the_end_of_a_pause(scene: Scene) -> Moments:
    """No other delivery is parked."""
    delivery = await scene.enqueue_and_read()
    scene.hold("await_resume")
    await await_resume(scene.late, delivery, "x", 7, Counters())
    yield
    second = await scene.promote_and_read()
    yield
    await scene.settle("succeed", second)
    yield
    await scene.gateway.command("DEL", scene.partition.paused)


@COMMANDS.each("fork", "import", "successor")
async def derived_task(scene: Scene, variant: str) -> Moments:
    """It has run; the continued task knows its successor even when that one's record has expired."""
    delivery = await scene.enqueue_and_read()
    scene.hold("enqueue_successor" if variant == "successor" else "enqueue_copy")
    late, namespace = scene.late, scene.namespace
    if variant == "fork":
        origin = await read_task_input(late, scene.partition, "x")
        copied: dict[str, Any] = {"at": "x 0-0", "arguments": b"{}", "event": b"{}", "fields": {"d:a": b"1"}}
        await store_fork(late, namespace, origin, "y", **copied)
    elif variant == "import":
        past = TaskPast(1, 1, None, [("s:a", b"1")], (), [("1-0", {"type": b"started", "n": b"1"})])
        moved: dict[str, Any] = {"envelope": Envelope(id="y", task="t").encode(), "arguments": b"{}", "past": past}
        await store_copy(late, namespace, "default", "y", **moved, source="import 1")
    else:
        following = Successor(Envelope(id="y", task="t"), "default", b"{}", ("#received", b"{}"), "x token")
        await enqueue_successor(late, namespace, following)
    yield
    second = await scene.read()
    yield
    await scene.settle("succeed", second, "y")
    yield
    if variant == "successor":
        scene.proxy.late, kept = b"", scene.proxy.late
        scene.hold("confirm_successor")
        await confirm_successor(late, namespace, "x token")
        yield
        await scene.settle("succeed", delivery)
        yield
        scene.proxy.late = kept
        yield
