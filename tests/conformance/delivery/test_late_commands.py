"""Late duplicates: a command was sent again on another connection, and the bytes of the first one arrive afterwards.

Between the two, the same worker continues as far as it can, so that as much as possible of the fence is the
same. The late bytes change nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, purge, replay
from perdure.queues import Gateway, LeaseLost, Namespace, Partition, Producer, State
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history, write_entries
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.delivery.leases import Delivery, RunStatus
from perdure.queues.delivery.quarantine_store import clear_quarantined, quarantine, report_crash, take_quarantined
from perdure.queues.delivery.settlement import await_version, raise_count
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
from perdure.queues.transport.scripts import queue_script

from tests.support.consumers import claim_all, claim_one, make_due, promote, read_one, worker
from tests.support.delivery_calls import SETTLING, add_entries, beat
from tests.support.lossy_proxy import LossyProxy, deliver_unchanged

SCRIPTS = {
    "succeed": "finish",
    "cancelled": "finish",
    "reschedule": "reschedule",
    "park": "park",
    "release": "release",
    "give_back": "release",
}
"""Scripts of the calls that settle a delivery; burying has another folder."""


async def next_delivery(gateway: Gateway, partition: Partition, producer: Producer, act: str) -> Delivery:
    """Return the next delivery of task x to the same worker, after such an act."""
    a = await worker(gateway, partition)
    if act in ("release", "give_back"):
        return await claim_one(a)
    if act in ("reschedule", "park"):
        await promote(gateway, partition, "x")
    elif act.startswith("bury"):
        (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
        assert await replay(gateway, letter, Replay())
    else:
        await producer.enqueue_fresh(EnvelopeTemplate("t").message(b"{}", task_id="x"), queue="default")
    return await read_one(a)


@pytest.mark.parametrize("act", SETTLING)
async def test_a_settlement_that_arrives_late_changes_nothing(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    delivery: Delivery,
    line: tuple[Gateway, LossyProxy],
    act: str,
) -> None:
    late, proxy = line
    name = "entry" if act == "bury_unreadable" else "x"
    proxy.hold(queue_script(SCRIPTS[act]).sha.encode() if act in SCRIPTS else b"EVALSHA")
    await SETTLING[act](late, delivery, name)
    await deliver_unchanged(gateway, namespace, proxy)
    if act == "bury_unreadable":
        return
    second = await next_delivery(gateway, partition, producer, act)
    await add_entries(gateway, second, "x", [Entry(Kind.DONE, "step", b"1")])
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["succeed"](gateway, second, "x")
    await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize(
    "kind", [Kind.SAVED, Kind.INTENT, Kind.DONE, Kind.DROP, Kind.EVENT, Kind.CONSUMED, Kind.EXCUSE]
)
async def test_an_entry_that_arrives_late_changes_nothing(
    gateway: Gateway, namespace: Namespace, delivery: Delivery, line: tuple[Gateway, LossyProxy], kind: Kind
) -> None:
    late, proxy = line
    proxy.hold(queue_script("write_checkpoint").sha.encode())
    await write_entries(late, delivery, "x", [Entry(kind, "1", b"1 57" if kind is Kind.EXCUSE else b"57")], first=1)
    await deliver_unchanged(gateway, namespace, proxy)
    for number, entry in enumerate([Entry(Kind.SAVED, "1", b"58"), Entry(Kind.SAVED, "1", b"136")], 2):
        await write_entries(gateway, delivery, "x", [entry], first=number)
        await deliver_unchanged(gateway, namespace, proxy)
    assert (await load_history(gateway, delivery, "x")).saved == {"1": b"136"}


Call = Callable[[Gateway, Delivery], Awaitable[object]]

OTHER_CALLS: dict[str, Call] = {
    "raise_count": raise_count,
    "quarantine": lambda gateway, delivery: quarantine(gateway, delivery, "x"),
    "clear_quarantined": lambda gateway, delivery: clear_quarantined(gateway, delivery, "x"),
}


@pytest.mark.parametrize("act", OTHER_CALLS)
async def test_another_call_of_a_run_that_arrives_late_changes_nothing(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    delivery: Delivery,
    line: tuple[Gateway, LossyProxy],
    act: str,
) -> None:
    late, proxy = line
    proxy.hold(queue_script(act).sha.encode())
    await OTHER_CALLS[act](late, delivery)
    await deliver_unchanged(gateway, namespace, proxy)
    if act == "quarantine":
        taken = await take_quarantined(gateway, partition, delivery.worker)
        assert taken.delivery is not None
        assert taken.delivery.fence != delivery.fence
        await deliver_unchanged(gateway, namespace, proxy)
    else:
        with suppress(LeaseLost):
            await SETTLING["release"](gateway, delivery, "x")
        await claim_all(await worker(gateway, partition))
        await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize("delay", [0.0, 60.0])
async def test_an_enqueue_that_arrives_late_stores_nothing_more(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    line: tuple[Gateway, LossyProxy],
    delay: float,
) -> None:
    late, proxy = line
    async with Producer(namespace=namespace.name, gateway=late) as another:
        await another.enqueue("t", queue="warm")
        proxy.hold(queue_script("schedule" if delay else "enqueue").sha.encode())
        await another.enqueue("t", task_id="y", delay=delay, queue="default")
    await deliver_unchanged(gateway, namespace, proxy)
    if delay:
        await make_due(gateway, partition, "y")
        assert await promote(gateway, partition, "y") == 1
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["succeed"](gateway, await read_one(await worker(gateway, partition)), "y")
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_message_that_arrives_late_is_not_sent_again(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    delivery: Delivery,
    line: tuple[Gateway, LossyProxy],
) -> None:
    """The run has used it."""
    late, proxy = line
    proxy.hold(queue_script("send_message").sha.encode())
    sent = await send_message(late, partition, "x", "hello", sender="s", message_id="m")
    await deliver_unchanged(gateway, namespace, proxy)
    await write_entries(gateway, delivery, "x", [Entry(Kind.CONSUMED, str(sent.number), b"")], first=1)
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_heartbeat_that_arrives_late_takes_nothing_back(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, line: tuple[Gateway, LossyProxy]
) -> None:
    late, proxy = line
    proxy.hold(queue_script("renew_leases").sha.encode())
    await beat(late, (delivery, "x", RunStatus(2.0, "list", 1.0)))
    await SETTLING["release"](gateway, delivery, "x")
    await deliver_unchanged(gateway, namespace, proxy)
    await claim_one(await worker(gateway, partition))
    await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize("then", ["enqueued fresh", "expired, enqueued again", "replayed"])
async def test_a_cancellation_that_arrives_late_spares_the_next_task_of_the_id(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    delivery: Delivery,
    line: tuple[Gateway, LossyProxy],
    then: str,
) -> None:
    late, proxy = line
    if then == "replayed":
        await SETTLING["bury"](gateway, delivery, "x")
    async with Producer(namespace=namespace.name, gateway=late) as another:
        handle = await another.find("x")
        assert handle is not None
        proxy.hold(queue_script("cancel").sha.encode())
        assert await handle.cancel() == (State.DEAD if then == "replayed" else State.RUNNING)
    await deliver_unchanged(gateway, namespace, proxy)
    if then == "replayed":
        await next_delivery(gateway, partition, producer, "bury")
    else:
        await SETTLING["cancelled"](gateway, delivery, "x")
        await deliver_unchanged(gateway, namespace, proxy)
        if then == "enqueued fresh":
            await next_delivery(gateway, partition, producer, "cancelled")
        else:
            await gateway.command("DEL", partition.record("x"), partition.steps("x"), partition.log("x"))
            await producer.enqueue("t", task_id="x", queue="default")
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_fresh_start_that_arrives_late_spares_what_replaced_it(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    delivery: Delivery,
    line: tuple[Gateway, LossyProxy],
) -> None:
    """The task that it started has ended, and another one that replaced this one, too."""
    late, proxy = line
    message = EnvelopeTemplate("t").message(b"{}", task_id="x")
    await SETTLING["succeed"](gateway, delivery, "x")
    async with Producer(namespace=namespace.name, gateway=late) as another:
        await another.find("x")
        proxy.hold(queue_script("reset_task").sha.encode())
        await another.enqueue_fresh(message, queue="default")
    await deliver_unchanged(gateway, namespace, proxy)
    for _ in range(2):
        await SETTLING["succeed"](gateway, await read_one(await worker(gateway, partition)), "x")
        await deliver_unchanged(gateway, namespace, proxy)
        await producer.enqueue_fresh(message, queue="default")
        await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize("act", ["replay", "purge"])
async def test_a_call_for_a_dead_letter_that_arrives_late_changes_nothing(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    producer: Producer,
    delivery: Delivery,
    line: tuple[Gateway, LossyProxy],
    act: str,
) -> None:
    """The same task has died again since, or another one of its id."""
    late, proxy = line
    await SETTLING["bury"](gateway, delivery, "x")
    (letter,) = [one async for one in list_letters(gateway, [partition], Filter())]
    proxy.hold(b"EVALSHA")
    assert await (replay(late, letter, Replay()) if act == "replay" else purge(late, letter))
    await deliver_unchanged(gateway, namespace, proxy)
    if act == "purge":
        await producer.enqueue("t", task_id="x", queue="default")
    second = await read_one(await worker(gateway, partition))
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["bury"](gateway, second, "x")
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_crash_report_that_arrives_late_counts_no_other_crash(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, line: tuple[Gateway, LossyProxy]
) -> None:
    """The same worker has claimed the message again."""
    late, proxy = line
    proxy.hold(queue_script("report_crash").sha.encode())
    await report_crash(late, namespace, ["default"], delivery.worker, exit_status="SIGKILL", steps={})
    await deliver_unchanged(gateway, namespace, proxy)
    again = await claim_one(await worker(gateway, partition))
    assert (again.worker, again.entry) == (delivery.worker, delivery.entry)
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["reschedule"](gateway, again, "x")
    await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize("for_claim", [False, True])
async def test_a_promotion_that_arrives_late_leaves_the_next_delay(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    delivery: Delivery,
    line: tuple[Gateway, LossyProxy],
    for_claim: bool,
) -> None:
    late, proxy = line
    await SETTLING["reschedule"](gateway, delivery, "x")
    proxy.hold(queue_script("promote").sha.encode())
    await make_due(gateway, partition, "x")
    assert (await promote_due(late, partition, for_claim=for_claim))[0] == 1
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["reschedule"](
        gateway, await (claim_one if for_claim else read_one)(await worker(gateway, partition)), "x"
    )
    await deliver_unchanged(gateway, namespace, proxy)


async def test_a_wait_for_a_version_that_arrives_late_parks_no_other_delivery(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, line: tuple[Gateway, LossyProxy]
) -> None:
    late, proxy = line
    proxy.hold(queue_script("await_version").sha.encode())
    await await_version(late, delivery, "x", DATA_FORMAT + 1, limit=600)
    await deliver_unchanged(gateway, namespace, proxy)
    await promote(gateway, partition, "x")
    second = await read_one(await worker(gateway, partition))
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["succeed"](gateway, second, "x")
    await deliver_unchanged(gateway, namespace, proxy)


@pytest.mark.parametrize("what", ["fork", "import", "successor"])
async def test_a_derived_task_that_arrives_late_is_not_stored_again(
    gateway: Gateway,
    namespace: Namespace,
    partition: Partition,
    delivery: Delivery,
    line: tuple[Gateway, LossyProxy],
    what: str,
) -> None:
    """It has run; the continued task knows its successor even when that one's record has expired."""
    late, proxy = line
    proxy.hold(queue_script("enqueue_successor" if what == "successor" else "enqueue_copy").sha.encode())
    if what == "fork":
        origin = await read_task_input(late, partition, "x")
        copied: dict[str, Any] = {"at": "x 0-0", "arguments": b"{}", "event": b"{}", "fields": {"d:a": b"1"}}
        await store_fork(late, namespace, origin, "y", **copied)
    elif what == "import":
        past = TaskPast(1, 1, None, [("s:a", b"1")], (), [("1-0", {"type": b"started", "n": b"1"})])
        moved: dict[str, Any] = {"envelope": Envelope(id="y", task="t").encode(), "arguments": b"{}", "past": past}
        await store_copy(late, namespace, "default", "y", **moved, source="import 1")
    else:
        following = Successor(Envelope(id="y", task="t"), "default", b"{}", ("#received", b"{}"), "x token")
        await enqueue_successor(late, namespace, following)
    await deliver_unchanged(gateway, namespace, proxy)
    second = await read_one(await worker(gateway, partition))
    await deliver_unchanged(gateway, namespace, proxy)
    await SETTLING["succeed"](gateway, second, "y")
    await deliver_unchanged(gateway, namespace, proxy)
    if what == "successor":
        proxy.late, kept = b"", proxy.late
        proxy.hold(queue_script("confirm_successor").sha.encode())
        await confirm_successor(late, namespace, "x token")
        await deliver_unchanged(gateway, namespace, proxy)
        await SETTLING["succeed"](gateway, delivery, "x")
        await deliver_unchanged(gateway, namespace, proxy)
        proxy.late = kept
        await deliver_unchanged(gateway, namespace, proxy)


async def test_a_task_that_is_replaced_while_it_is_cancelled_is_cancelled(
    gateway: Gateway, producer: Producer, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller reads the record again."""
    handle = await producer.find("x")
    assert handle is not None
    await SETTLING["succeed"](gateway, delivery, "x")
    pipeline = Gateway.pipeline

    async def replaced(self: Gateway, *arguments: Any, **options: Any) -> Any:
        found = await pipeline(self, *arguments, **options)
        monkeypatch.undo()
        await producer.enqueue_fresh(EnvelopeTemplate("t").message(b"{}", task_id="x"), queue="default")
        return found

    monkeypatch.setattr(Gateway, "pipeline", replaced)
    assert await handle.cancel() == State.CANCELLED
