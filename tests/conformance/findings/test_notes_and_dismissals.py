"""Notes of tool calls in the checkpoint, and dismissals of findings in the log, as the scripts keep them."""

from __future__ import annotations

import pytest
from perdure.queues import Gateway, Partition, Producer, TaskEnded, TaskNotFound
from perdure.queues.delivery.checkpoint import Entry, Kind, load_history, write_entries
from perdure.queues.delivery.settlement import Counters, succeed
from perdure.queues.event_log import read_events

from tests.support.consumers import read_one, take_over, worker

NOTE = b'{"h":"x","a":"fetch()","t":"fetch"}'


async def test_an_empty_intent_deletes_the_intent_and_a_record_does(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    await producer.enqueue("t", task_id="x", queue="default")
    delivery = await read_one(await worker(gateway, partition))
    notes = [Entry(Kind.INTENT, step, NOTE) for step in ("a", "b", "c")]
    await write_entries(gateway, delivery, "x", notes, first=1)
    done = [Entry(Kind.DONE, "a", b"1"), Entry(Kind.INTENT, "b", b""), Entry(Kind.INTENT, "never", b"")]
    await write_entries(gateway, delivery, "x", done, first=4)
    await write_entries(gateway, delivery, "x", notes, first=1)  # late bytes of an earlier write
    history = await load_history(gateway, await take_over(gateway, delivery), "x")
    assert history.intents == {"c": NOTE}


async def test_a_dismissal_needs_a_finding_of_a_task_that_has_not_ended(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handle = await producer.enqueue("t", task_id="x", queue="default")
    with pytest.raises(ValueError, match="event must be that of a finding, got 1; 'perdure task show x'"):
        await handle.dismiss(1)
    delivery = await read_one(await worker(gateway, partition))
    finding = Entry(Kind.EVENT, "incoherent", b"1", b'{"check":"progress","key":"k"}')
    other = Entry(Kind.EVENT, "decided", b"2", b'{"choice":"c"}')
    await write_entries(gateway, delivery, "x", [finding, other], first=1)
    with pytest.raises(ValueError, match="got 2"):
        await handle.dismiss(2)
    await handle.dismiss(1)
    await handle.dismiss(1)
    events = await read_events(gateway, partition, "x")
    assert [(one.type, one.number, one.data) for one in events[2:]] == [
        ("dismissed", None, {"event": 1, "finding": "k"})
    ] * 2
    await succeed(gateway, delivery, "x", b"null", Counters(), ran=0, ttl=60)
    with pytest.raises(TaskEnded):
        await handle.dismiss(1)
    await gateway.command("DEL", partition.record("x"))
    with pytest.raises(TaskNotFound):
        await handle.dismiss(1)
    assert len(await read_events(gateway, partition, "x")) == 4
