"""Taking work: what the one loop does with what it reads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from perdure.queues import Gateway, Partition, Producer
from perdure.queues.delivery.consumer import Consumer
from perdure.queues.delivery.leases import Delivery, Leases
from perdure.queues.delivery.settlement import release
from perdure.worker.runtime.intake import Intake
from perdure.worker.runtime.quarantine_gate import QuarantineGate
from perdure.worker.runtime.reclaim import ReclaimSchedule
from perdure.worker.runtime.slots import Slots
from perdure.worker.runtime.supervisor_link import Link

from tests.support.consumers import Held, age, read, read_one, worker


def _never(delivery: Delivery) -> None:
    raise AssertionError(delivery)


async def _never_back(delivery: Delivery) -> None:
    raise AssertionError(delivery)


def _nothing() -> None:
    """Do nothing."""


def _intake(
    consumer: Consumer,
    slots: Slots,
    reclaim: ReclaimSchedule,
    gate: QuarantineGate,
    start: Callable[[Delivery], None] = _never,
    give_back: Callable[[Delivery], Awaitable[None]] = _never_back,
) -> Intake:
    """Return the loop; by default it must start and give back nothing."""
    return Intake(
        consumer,
        slots,
        reclaim,
        gate,
        start=start,
        on_due=_nothing,
        on_route_changed=_nothing,
        give_back=give_back,
    )


@pytest.mark.parametrize("stopping", [True, False])
async def test_a_nudge_that_reaches_a_stopping_worker_reaches_another(
    gateway: Gateway, partition: Partition, stopping: bool
) -> None:
    first, second = await worker(gateway, partition), await worker(gateway, partition, name="b")

    sweep = ReclaimSchedule([partition], 60.0)
    sweep.reached(partition, "0-0")
    alone = QuarantineGate(None, window=60.0)
    intake = _intake(first, Slots(1), sweep, alone)
    await first.nudge(partition)
    if stopping:
        intake.stop()
    await intake._read(None)
    assert (await second.read(1, block=None)).claimable is stopping
    assert (sweep.next_claim() is None) is stopping


async def test_what_was_read_just_now_is_not_taken_for_a_suspect_whose_answer_was_lost(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    """It is held from the next tick of the event loop on, when its run begins; a suspect is looked for before that."""
    leases: Leases = Leases()
    consumer = await worker(gateway, partition, leases=leases)
    started: list[asyncio.Task[None]] = []

    async def run(delivery: Delivery) -> None:
        leases.hold(Held(delivery, handle.id))

    intake = _intake(
        consumer,
        Slots(8),
        ReclaimSchedule([partition], 60.0),
        QuarantineGate(None, window=60.0),
        start=lambda delivery: started.append(asyncio.create_task(run(delivery))),
    )
    handle = await producer.enqueue("task", queue="default")
    await intake._read(None)
    await intake._claim_quarantined()
    await asyncio.gather(*started)
    assert len(started) == 1


async def test_what_was_left_in_a_partition_is_claimed_when_its_server_returns(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for the next sweep: the worker that ran the task may have been lost with the server."""
    consumer, lost = await worker(gateway, partition), await worker(gateway, partition, name="lost")
    await producer.enqueue("task", queue="default")
    left = await read_one(lost)
    await age(gateway, left)
    sweep = ReclaimSchedule([partition], 60.0)
    sweep.reached(partition, "0-0")
    started: list[Delivery] = []

    gate = QuarantineGate(None, window=60.0)
    intake = _intake(consumer, Slots(1), sweep, gate, start=started.append)
    monkeypatch.setattr(consumer, "returned", lambda: [partition])
    await intake._take()
    assert [one.entry for one in started] == [left.entry]


async def test_what_was_claimed_for_a_slot_that_was_taken_meanwhile_is_given_back(
    gateway: Gateway, partition: Partition, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An execution that could not store its outcome occupies its slot again while the claim is on its way."""
    for _ in range(2):
        await producer.enqueue("task", queue="default")
    for delivery in await read(await worker(gateway, partition, name="b"), 2):
        await release(gateway, delivery, None, data=None)
    consumer = await worker(gateway, partition)
    slots, gate, claim = Slots(2), QuarantineGate(None, window=60.0), consumer.claim
    started: list[Delivery] = []
    returned: list[Delivery] = []

    async def claim_slowly(*args: Any) -> Any:
        found = await claim(*args)
        slots.leak(1)
        return found

    def start(delivery: Delivery) -> None:
        started.append(delivery)
        slots.leak(1)
        gate.resolved(delivery)

    async def give_back(delivery: Delivery) -> None:
        returned.append(delivery)

    monkeypatch.setattr(consumer, "claim", claim_slowly)
    sweep = ReclaimSchedule([partition], 60.0)
    intake = _intake(consumer, slots, sweep, gate, start=start, give_back=give_back)
    await intake._claim()
    assert (len(started), len(returned)) == (1, 1)
    assert gate.has_room


class _Link:
    """Link of a worker to its supervisor, which starts other processes for suspects."""

    role = "worker"


@pytest.mark.parametrize("supervised", [True, False])
async def test_new_messages_are_read_while_it_is_unknown_whether_a_claimed_task_is_a_suspect(
    gateway: Gateway, partition: Partition, producer: Producer, supervised: bool
) -> None:
    """Only a worker that would run the suspect itself takes no other task until it knows."""
    link = cast("Link", _Link()) if supervised else None
    await producer.enqueue("task", queue="default")
    await age(gateway, await read_one(await worker(gateway, partition, name="lost")))
    started: list[Delivery] = []

    gate = QuarantineGate(link, window=60.0)
    intake = _intake(
        await worker(gateway, partition), Slots(8), ReclaimSchedule([partition], 60.0), gate, start=started.append
    )
    await intake._claim()
    await producer.enqueue("task", queue="default")
    assert gate.has_room is supervised
    assert await asyncio.wait_for(intake.take_once(), 10) and len(started) == (2 if supervised else 1)
