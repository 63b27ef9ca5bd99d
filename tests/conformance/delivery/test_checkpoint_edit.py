"""Edits of the checkpoint of a task that no worker has: in one act, and never under a run."""

from __future__ import annotations

import pytest
from perdure.deadletter.burial import bury
from perdure.deadletter.letters import find_letter
from perdure.deadletter.policy import Reason
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Gateway, Namespace, Partition, Producer, State
from perdure.queues.delivery.checkpoint import Entry, Kind, Position, edit_checkpoint, load_history, read_position
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, message_after, park, release
from perdure.queues.event_log import read_events

from tests.support.consumers import promote, read_one, worker
from tests.support.delivery_calls import EVIDENCE, add_entries
from tests.support.task_places import DUE, dump, places

EVENT = ("archived", b'{"messages":1}')


@pytest.fixture
async def delivery(gateway: Gateway, partition: Partition, producer: Producer) -> Delivery:
    """A task with one event and two entries, that a worker has."""
    await producer.enqueue("t", {"n": 1}, task_id="x", queue="default")
    found = await read_one(await worker(gateway, partition))
    await add_entries(gateway, found, "x", [Entry(Kind.EVENT, "started", b"1"), Entry(Kind.SAVED, "#state", b"old")])
    return found


async def edit(gateway: Gateway, partition: Partition, position: Position) -> bool | None:
    fields = {"s:#state": b"new", "c:#step:a": b"record"}
    dropped = ["s:#blob", "s:#state2"]
    return await edit_checkpoint(
        gateway, partition, "x", position, event=EVENT, fields=fields, dropped=dropped, wakes="compaction"
    )


@pytest.mark.parametrize(("waits", "woken"), [("compaction", True), ("approval", False)])
async def test_a_parked_task_is_edited_and_woken_if_it_waits_for_that(
    gateway: Gateway, partition: Partition, delivery: Delivery, waits: str, woken: bool
) -> None:
    await add_entries(gateway, delivery, "x", [Entry(Kind.SAVED, "#blob", b"large")])
    await park(gateway, delivery, "x", Counters(), delay=3600, waits=waits, conditions=[message_after(0)])
    position = await read_position(gateway, partition, "x")
    assert position == Position(State.SCHEDULED, 1, 3)
    assert await edit(gateway, partition, position) is woken
    assert await places(gateway, partition, "x") == [DUE]
    seconds, _ = await gateway.command("TIME")
    assert (float(await gateway.command("ZSCORE", partition.due, "x")) <= (int(seconds) + 1) * 1000) is woken
    event = (await read_events(gateway, partition, "x"))[-1]
    assert (event.type, event.number, event.data) == ("archived", 2, {"messages": 1})
    await promote(gateway, partition, "x")
    again = await read_one(await worker(gateway, partition))
    history = await load_history(gateway, again, "x")
    assert (history.events, history.entries, history.saved) == (2, 4, {"#state": b"new"})
    await add_entries(gateway, again, "x", [Entry(Kind.EVENT, "changed", b"3")])


async def test_a_dead_letter_is_edited_and_stays_one(
    gateway: Gateway, partition: Partition, delivery: Delivery
) -> None:
    await bury(
        gateway, delivery, "x", task="t", reason=Reason.NOT_RETRYABLE, evidence=EVIDENCE, counters=Counters(),
        retention=3600,
    )  # fmt: skip
    assert await edit(gateway, partition, await read_position(gateway, partition, "x")) is False
    assert await gateway.command("HGET", partition.steps("x"), "s:#state") == b"new"
    assert 0 < await gateway.command("PTTL", partition.steps("x")) <= 3_600_000


async def test_a_task_that_a_worker_has_is_not_edited(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    position = await read_position(gateway, partition, "x")
    before = await dump(gateway, namespace)
    assert await edit(gateway, partition, position) is None
    assert await dump(gateway, namespace) == before
    await park(gateway, delivery, "x", Counters(), delay=0, waits="compaction", conditions=[message_after(0)])
    await promote(gateway, partition, "x")
    await read_one(await worker(gateway, partition))
    position = await read_position(gateway, partition, "x")
    before = await dump(gateway, namespace)
    assert await edit(gateway, partition, position) is None
    assert await dump(gateway, namespace) == before


@pytest.mark.parametrize("queued", ["ready", "released"])
async def test_a_queued_task_is_edited_before_a_worker_takes_it(
    gateway: Gateway, partition: Partition, delivery: Delivery, queued: str
) -> None:
    if queued == "ready":
        await park(gateway, delivery, "x", Counters(), delay=0, waits="compaction", conditions=[message_after(0)])
        await promote(gateway, partition, "x")
    else:
        await release(gateway, delivery, "x", data={})
    assert await edit(gateway, partition, await read_position(gateway, partition, "x")) is False
    taker = await worker(gateway, partition, name="b", lease=0)
    again = await read_one(taker) if queued == "ready" else (await taker.claim(partition, "0-0", 1))[1][0]
    history = await load_history(gateway, again, "x")
    assert (history.events, history.entries, history.saved) == (2, 3, {"#state": b"new"})
    await add_entries(gateway, again, "x", [Entry(Kind.EVENT, "changed", b"3")])


@pytest.mark.parametrize("since", ["replayed", "promoted"])
async def test_an_edit_of_a_task_with_equal_numbers_that_was_queued_since_is_refused(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery, since: str
) -> None:
    """The command arrives late: another message, or another replay, has the same last event and last entry."""
    if since == "replayed":
        await bury(
            gateway, delivery, "x", task="t", reason=Reason.NOT_RETRYABLE, evidence=EVIDENCE, counters=Counters(),
            retention=3600,
        )  # fmt: skip
        position = await read_position(gateway, partition, "x")
        found = await find_letter(gateway, [partition], "x")
        assert found is not None
        assert await replay(gateway, found, Replay())
    else:
        await park(gateway, delivery, "x", Counters(), delay=0, waits="compaction", conditions=[message_after(0)])
        position = await read_position(gateway, partition, "x")
        await promote(gateway, partition, "x")
    before = await dump(gateway, namespace)
    assert await edit(gateway, partition, position) is None
    assert await dump(gateway, namespace) == before


async def test_an_edit_of_what_has_changed_since_is_refused(
    gateway: Gateway, namespace: Namespace, partition: Partition, delivery: Delivery
) -> None:
    await park(gateway, delivery, "x", Counters(), delay=3600, waits="compaction", conditions=[message_after(0)])
    position = await read_position(gateway, partition, "x")
    assert await edit(gateway, partition, position) is True
    before = await dump(gateway, namespace)
    assert await edit(gateway, partition, position) is None, "the second of two, or a call after a lost reply"
    assert await dump(gateway, namespace) == before


async def test_an_unknown_task_is_not_created(gateway: Gateway, namespace: Namespace, partition: Partition) -> None:
    position = await read_position(gateway, partition, "x")
    assert position == Position(None, 0, 0)
    assert await edit(gateway, partition, position) is None
    assert await gateway.command("EXISTS", partition.record("x"), partition.steps("x"), partition.log("x")) == 0
