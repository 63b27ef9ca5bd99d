"""Unique tasks: one task of each key, whatever happens to the producers, the replies and the partitions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import orjson
import pytest
from perdure import TaskCancelled, Unique
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Gateway, KeyMissing, Namespace, Partition, Producer, QueueError, State, TaskHandle
from perdure.queues.delivery.due_set import promote_due
from perdure.queues.envelope import EnvelopeTemplate, readable_envelope
from perdure.queues.handle import answer_requests
from perdure.queues.partitions.resharding import set_partitions
from perdure.queues.security.encryption import Encryptor
from perdure.queues.transport.scripts import Script, queue_script
from perdure.queues.unique import (
    CLAIM_MS,
    STORE_MS,
    KeyHolder,
    Marker,
    UniqueTask,
    decode_marker,
    encode_marker,
    free_marker,
    write_marker,
)

from tests.support.consumers import needs_one_server, promote, read_one, take_over, worker
from tests.support.delivery_calls import SETTLING
from tests.support.lossy_proxy import lossy_gateway
from tests.support.task_places import DUE, PENDING, READY, dump, places

pytestmark = pytest.mark.integration

WAITING = Unique("while_queued", by="order")
LIVE = Unique("while_running", by="order")


async def pay(producer: Producer, order: object = 1, rule: Unique = LIVE, **more: Any) -> TaskHandle[Any]:
    return await producer.enqueue("pay", {"order": order}, queue="default", unique=rule, **more)


def digest_of(rule: Unique = LIVE, order: object = 1) -> str:
    message = EnvelopeTemplate("pay").message(orjson.dumps({"order": order}))
    return UniqueTask(rule, "pay").digest("default", message)


async def marker_of(gateway: Gateway, namespace: Namespace, rule: Unique = LIVE) -> Marker | None:
    place = namespace.unique(digest_of(rule))
    held = await gateway.command("GET", place.key)
    return None if held is None else decode_marker(gateway, place, held)


async def claim(
    gateway: Gateway,
    namespace: Namespace,
    task_id: str,
    rule: Unique = LIVE,
    *,
    age: int = 0,
    former: KeyHolder | None = None,
) -> None:
    """Leave the claim of a producer that has died before its task was stored. age: of the claim, in milliseconds."""
    place = namespace.unique(digest_of(rule))
    data = encode_marker(gateway, place, Marker(0, KeyHolder(task_id, 0), rule.span, former=former, claim=task_id))
    seconds, micros = await gateway.command("TIME", node_of=place.key)
    at = int(seconds) * 1000 + int(micros) // 1000 - age
    await gateway.command("SET", place.key, b"%d %b" % (at, data), "PX", 600_000)


# one task of each key


@pytest.mark.parametrize(
    "rule", [WAITING, LIVE, Unique(60, by="order"), Unique()], ids=["queued", "running", "60 s", "all"]
)
async def test_many_producers_at_once_store_one_task(
    gateway: Gateway, partition: Partition, namespace: Namespace, producer: Producer, rule: Unique
) -> None:
    async with Producer(namespace=namespace.name, gateway=gateway) as other:
        calls = [pay(one, 1, rule) for one in (producer, other) for _ in range(20)]
        handles = await asyncio.gather(*calls)
    assert len({handle.id for handle in handles}) == 1
    assert sum(not handle.existed for handle in handles) == 1
    assert await gateway.command("XLEN", partition.ready) == 1
    assert (await pay(producer, 2, rule)).existed is False, "another key"


async def test_a_key_is_free_once_a_worker_has_started_its_task(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    first = await pay(producer, rule=WAITING)
    assert (await pay(producer, rule=WAITING)).existed
    await read_one(await worker(gateway, partition))
    second = await pay(producer, rule=WAITING)
    assert second.id != first.id
    assert not second.existed


@pytest.mark.parametrize("act", ["reschedule", "park", "release"])
async def test_a_task_that_a_worker_gave_back_has_started(
    gateway: Gateway, partition: Partition, producer: Producer, act: str
) -> None:
    queued, live = await pay(producer, rule=WAITING), await pay(producer, 2)
    crew = await worker(gateway, partition)
    for handle in (queued, live):
        await SETTLING[act](gateway, await read_one(crew), handle.id)
    assert not (await pay(producer, rule=WAITING)).existed
    assert (await pay(producer, 2)).id == live.id, "it has not ended"


@pytest.mark.parametrize("act", ["succeed", "cancelled", "bury"])
async def test_a_key_is_free_once_its_task_has_ended(
    gateway: Gateway, partition: Partition, producer: Producer, act: str
) -> None:
    first = await pay(producer)
    delivery = await read_one(await worker(gateway, partition))
    assert (await pay(producer)).id == first.id, "it runs"
    await SETTLING[act](gateway, delivery, first.id)
    assert not (await pay(producer)).existed


async def test_a_promoted_task_has_not_started(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    first = await pay(producer, rule=WAITING, delay=60)
    await promote(gateway, partition, first.id)
    assert (await pay(producer, rule=WAITING)).id == first.id


async def test_a_task_of_a_dead_worker_has_started(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    first = await pay(producer, rule=WAITING)
    delivery = await read_one(await worker(gateway, partition, name="dead"))
    await take_over(gateway, delivery)
    assert not (await pay(producer, rule=WAITING)).existed
    assert first.id == delivery.fields[b"env"].decode().split('"id":"')[1].split('"')[0]


async def test_a_replayed_task_has_its_key_again_unless_another_has_it(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    crew = await worker(gateway, partition)
    first = await pay(producer)
    await SETTLING["bury"](gateway, await read_one(crew), first.id)
    [letter] = [letter async for letter in list_letters(gateway, [partition], Filter())]
    assert await replay(gateway, letter, Replay())
    assert (await pay(producer)).id == first.id
    await SETTLING["bury"](gateway, await read_one(crew), first.id)
    second = await pay(producer)
    assert not second.existed
    [letter] = [letter async for letter in list_letters(gateway, [partition], Filter())]
    assert await replay(gateway, letter, Replay())
    assert (await pay(producer)).id == second.id


async def test_a_window_outlasts_its_task_and_its_record(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    rule = Unique(60, by="order")
    first = await pay(producer, rule=rule)
    await SETTLING["succeed"](gateway, await read_one(await worker(gateway, partition)), first.id)
    await free_marker(gateway, namespace, digest_of(), first.id)
    assert (await pay(producer, rule=rule)).id == first.id
    await gateway.command("DEL", partition.record(first.id))
    assert (await pay(producer, rule=rule)).id == first.id
    ttl = await gateway.command("PTTL", namespace.unique(digest_of()).key)
    assert 30_000 < ttl <= 60_000
    place = namespace.unique(digest_of())
    held = await gateway.command("GET", place.key)
    at, _, data = held.partition(b" ")
    await gateway.command("SET", place.key, b"%d %b" % (int(at) - 61_000, data), "PX", 60_000)
    assert (await pay(producer, rule=rule)).id != first.id, "60 s have passed"


async def test_the_marker_of_a_live_task_outlasts_its_delay(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    day = 86_400_000
    await pay(producer, delay=500 * 86_400)
    ttl = await gateway.command("PTTL", namespace.unique(digest_of()).key)
    assert 899 * day < ttl <= 900 * day


# what is stored


async def test_no_key_and_no_value_holds_what_the_key_is_made_of(
    gateway: Gateway, namespace: Namespace, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "encryptor", Encryptor([b"k" * 32]))
    first = await pay(producer, "order-of-ada")
    assert (await pay(producer, "order-of-ada")).id == first.id
    held = await gateway.command("GET", namespace.unique(digest_of(order="order-of-ada")).key)
    assert first.id.encode() not in held
    assert "order-of-ada" not in str(await dump(gateway, namespace))


async def test_a_marker_that_was_moved_to_another_key_names_no_task(
    gateway: Gateway, namespace: Namespace, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "encryptor", Encryptor([b"k" * 32]))
    first, second = (namespace.unique(digest_of(order=order)) for order in (1, 2))
    victim = await pay(producer, 1)
    held = await gateway.command("GET", first.key)
    await gateway.command("SET", second.key, held, "PX", 60_000)
    await pay(producer, 2, Unique("while_running", by="order", keep="last"))
    assert await victim.status() is State.QUEUED
    monkeypatch.setattr(gateway, "encryptor", Encryptor([b"o" * 32]))
    with pytest.raises(KeyMissing, match="set PERDURE_ENCRYPTION_KEYS"):
        await pay(producer, 1)


@pytest.mark.parametrize(
    "junk", [b"", b"x", b"1 {}", b"1 [1,2,3,4,5,6,7]", b'9 ["a b",0,"while_running",false,"",0,""]']
)
async def test_what_another_program_wrote_holds_no_key(
    gateway: Gateway, namespace: Namespace, producer: Producer, junk: bytes
) -> None:
    await gateway.command("SET", namespace.unique(digest_of()).key, junk, "PX", 60_000)
    first = await pay(producer)
    assert not first.existed
    assert (await pay(producer)).id == first.id


async def test_the_envelope_names_the_digest(producer: Producer, gateway: Gateway, partition: Partition) -> None:
    handle = await pay(producer)
    stored = await gateway.command("HGET", partition.record(handle.id), "env")
    envelope = readable_envelope(stored)
    assert envelope is not None
    assert envelope.unique == digest_of()
    plain = await producer.enqueue("pay", {"order": 1}, queue="default")
    assert await gateway.command("HGET", partition.record(plain.id), "env") is None


async def test_freeing_removes_the_marker_of_this_task_only(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    handle = await pay(producer)
    await free_marker(gateway, namespace, digest_of(), "another")
    assert await marker_of(gateway, namespace) is not None
    await free_marker(gateway, namespace, digest_of(), handle.id)
    assert await marker_of(gateway, namespace) is None
    await free_marker(gateway, namespace, digest_of(), handle.id)


async def test_a_cancelled_task_leaves_no_marker(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    handle = await pay(producer)
    await handle.cancel()
    assert await marker_of(gateway, namespace) is None


# the acts of a producer, and its death between them


async def test_a_claim_without_a_task_is_waited_for(
    gateway: Gateway, namespace: Namespace, producer: Producer, scripts: Scripts
) -> None:
    """The producer is between its two acts: the other one gets its task."""
    await claim(gateway, namespace, "theirs")
    mine = asyncio.ensure_future(pay(producer))
    while scripts.runs["claim_unique"] < 4 and not mine.done():  # noqa: ASYNC110 - the other call looks again and again
        await asyncio.sleep(0.005)
    assert not mine.done()
    await producer.enqueue("pay", {"order": 1}, queue="default", task_id="theirs")
    assert (await mine).id == "theirs"
    assert (await mine).existed


async def test_a_claim_of_a_dead_producer_lapses(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    await claim(gateway, namespace, "theirs", age=CLAIM_MS - 100)
    handle = await pay(producer)
    assert not handle.existed
    assert handle.id != "theirs"


async def test_a_task_that_was_stored_confirms_a_claim_that_has_lapsed(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """The producer has died between storing its task and whatever came next."""
    await claim(gateway, namespace, "theirs", age=10 * CLAIM_MS)
    await producer.enqueue("pay", {"order": 1}, queue="default", task_id="theirs")
    assert (await pay(producer)).id == "theirs"


@pytest.fixture
def scripts(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """The scripts of the gateway: a test makes them fail."""
    return Scripts(gateway, monkeypatch)


class Killed(BaseException):
    """The end of a producer's process."""


class Scripts:
    """Scripts of a gateway whose producer dies, or is stopped.

    dies_after: script after which it dies. stops: number of stops before it stores a task, until its claim has ended.
    runs: calls of each script.
    """

    def __init__(self, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dies_after = ""
        self.stops = 0
        self.runs: Counter[str] = Counter()
        self._run = gateway.run
        monkeypatch.setattr(gateway, "run", self.run)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        changed = [*args]
        self.runs[script.name] += 1
        if script.name == "enqueue_one" and self.stops:
            self.stops -= 1
            changed[4] = int(changed[4]) - STORE_MS  # as if that time had passed
        answer = await self._run(script, keys, changed)
        if script.name == self.dies_after:
            self.dies_after = ""
            raise Killed
        return answer


async def test_a_producer_that_was_stopped_for_longer_than_its_claim_stores_nothing(
    gateway: Gateway, partition: Partition, producer: Producer, scripts: Scripts
) -> None:
    scripts.stops = 1
    handle = await pay(producer)
    assert scripts.stops == 0
    assert not handle.existed, "it has claimed the key again"
    assert (await pay(producer)).id == handle.id
    assert await gateway.command("XLEN", partition.ready) == 1
    scripts.stops = 3
    with pytest.raises(QueueError, match=r"could not store task .* within 5 s of its claim of a unique key"):
        await pay(producer, 2)
    assert await gateway.command("XLEN", partition.ready) == 1, "nothing is half done"


@pytest.mark.parametrize("script", ["claim_unique", "enqueue_one"])
@pytest.mark.parametrize("rule", [LIVE, Unique(60, by="order")], ids=["running", "60 s"])
async def test_a_producer_that_dies_after_an_act_leaves_at_most_one_task(
    gateway: Gateway,
    partition: Partition,
    namespace: Namespace,
    producer: Producer,
    scripts: Scripts,
    script: str,
    rule: Unique,
) -> None:
    scripts.dies_after = script
    with pytest.raises(Killed):
        await pay(producer, rule=rule)
    place = namespace.unique(digest_of())
    at, _, data = (await gateway.command("GET", place.key)).partition(b" ")
    await gateway.command("SET", place.key, b"%d %b" % (int(at) - CLAIM_MS, data), "PX", 60_000)
    handle = await pay(producer, rule=rule)
    assert handle.existed is (script == "enqueue_one")
    assert await gateway.command("XLEN", partition.ready) == 1


@pytest.mark.parametrize("script", ["claim_unique", "enqueue_one"])
@pytest.mark.parametrize("rule", [LIVE, Unique(60, by="order")], ids=["running", "60 s"])
async def test_a_lost_reply_stores_one_task(
    gateway: Gateway, partition: Partition, namespace_name: str, script: str, rule: Unique
) -> None:
    needs_one_server(gateway, "the line that loses replies stands before one server")
    async with (
        lossy_gateway(gateway) as (lossy, line),
        Producer(namespace=namespace_name, gateway=lossy) as producer,
    ):
        await pay(producer, 2, rule)
        line.lose(queue_script(script).sha.encode())
        first = await pay(producer, rule=rule)
        assert line.lost == 1
        assert not first.existed
        assert (await pay(producer, rule=rule)).id == first.id
    assert await gateway.command("XLEN", partition.ready) == 2


async def test_a_task_is_found_after_its_partition_was_closed(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    first = await pay(producer)
    await set_partitions(gateway, namespace, "default", 3)
    assert (await pay(producer)).id == first.id
    async with Producer(namespace=namespace.name, gateway=gateway) as other:
        assert (await pay(other)).id == first.id
        second = await pay(other, 2)
    assert (await pay(producer, 2)).id == second.id
    assert second.partition.index != partition.index


# ids of the caller


async def test_an_own_id_and_a_unique_key_name_one_task(producer: Producer) -> None:
    first = await pay(producer, task_id="mine")
    again = await pay(producer, task_id="mine")
    assert (first.existed, again.existed, again.id) == (False, True, "mine")
    other = await pay(producer, task_id="other")
    assert (other.existed, other.id) == (True, "mine")


async def test_a_repeated_call_does_not_replace_the_task_that_replaced_its_own(producer: Producer) -> None:
    """A handler that runs again, or a caller that repeats a call, finds what it stored before."""
    last = Unique("while_running", by="order", keep="last")
    await pay(producer, rule=last, task_id="mine")
    newer = await pay(producer, rule=last)
    again = await pay(producer, rule=last, task_id="mine")
    assert (again.id, again.existed) == ("mine", True)
    assert await newer.status() is State.QUEUED


async def test_a_call_is_repeated_after_its_claim(gateway: Gateway, namespace: Namespace, producer: Producer) -> None:
    """It died between claim and task; the repeated call has the same id, and does not wait for itself."""
    await claim(gateway, namespace, "mine")
    handle = await asyncio.wait_for(pay(producer, task_id="mine"), CLAIM_MS / 2000)
    assert (handle.id, handle.existed) == ("mine", False)


# the last one is kept

LAST = Unique("while_queued", by="order", keep="last")


async def test_the_last_task_replaces_the_one_before(
    gateway: Gateway, namespace: Namespace, partition: Partition, producer: Producer
) -> None:
    first = await pay(producer, rule=LAST)
    second = await pay(producer, rule=LAST)
    assert not second.existed
    assert await places(gateway, partition, first.id) == ["cancelled"]
    assert await places(gateway, partition, second.id) == [READY]
    assert (await first.record()).replaced_by == second.id
    with pytest.raises(TaskCancelled, match=f"since task {second.id} of the same key replaced it"):
        await first.result(timeout=5)
    assert f"since task {second.id} of the same key" in (await first.explain()).sentence
    assert await gateway.command("ZCARD", partition.due) == 0, "the request to cancel it is gone"
    marker = await marker_of(gateway, namespace, LAST)
    assert marker is not None
    assert (marker.holder.task_id, marker.former) == (second.id, None)


async def test_a_task_that_has_started_is_not_replaced(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    first = await pay(producer, rule=LAST)
    await read_one(await worker(gateway, partition))
    second = await pay(producer, rule=LAST)
    assert (await first.status(), await second.status()) == (State.RUNNING, State.QUEUED)
    assert await gateway.command("HGET", partition.control(first.id), "cancel") is None
    assert (await first.record()).replaced_by is None


async def test_a_running_task_is_asked_to_stop_if_it_has_the_key(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    rule = Unique("while_running", by="order", keep="last")
    first = await pay(producer, rule=rule)
    await read_one(await worker(gateway, partition))
    await pay(producer, rule=rule)
    assert await gateway.command("HGET", partition.control(first.id), "cancel") == b"1"


async def test_concurrent_replacements_leave_one_task(
    gateway: Gateway, partition: Partition, producer: Producer
) -> None:
    handles = await asyncio.gather(*(pay(producer, rule=LAST) for _ in range(10)))
    states = [await handle.status() for handle in handles]
    assert sorted(states) == ["cancelled"] * 9 + ["queued"]
    assert await gateway.command("XLEN", partition.ready) == 1


async def test_a_producer_that_dies_before_it_stores_the_new_task_leaves_the_old_one_its_key(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    first = await pay(producer)
    await claim(gateway, namespace, "theirs", age=2 * CLAIM_MS, former=KeyHolder(first.id, 0))
    assert (await pay(producer)).id == first.id
    last = Unique("while_running", by="order", keep="last")
    await pay(producer, rule=last)
    assert await first.status() is State.CANCELLED


async def test_a_producer_that_dies_after_it_stored_the_new_task_has_the_old_one_cancelled(
    gateway: Gateway, namespace: Namespace, producer: Producer
) -> None:
    """By the next producer of the key, whatever its rule is."""
    first = await pay(producer)
    await claim(gateway, namespace, "theirs", age=2 * CLAIM_MS, former=KeyHolder(first.id, 0))
    await producer.enqueue("pay", {"order": 1}, queue="default", task_id="theirs")
    assert (await pay(producer)).id == "theirs"
    assert await first.status() is State.CANCELLED


async def test_the_request_to_cancel_is_stored_with_the_new_task(
    gateway: Gateway, partition: Partition, producer: Producer, scripts: Scripts
) -> None:
    """A producer that dies before it cancels the old task itself leaves that to the workers."""
    first = await pay(producer, rule=LAST)
    scripts.dies_after = "enqueue_one"
    with pytest.raises(Killed):
        await pay(producer, rule=LAST)
    assert await first.status() is State.QUEUED
    await answer_all_requests(gateway, partition)
    assert await first.status() is State.CANCELLED
    assert await gateway.command("XLEN", partition.ready) == 1


async def test_a_request_to_cancel_leaves_a_started_task_alone(
    gateway: Gateway, partition: Partition, producer: Producer, scripts: Scripts
) -> None:
    first = await pay(producer, rule=LAST)
    scripts.dies_after = "enqueue_one"
    with pytest.raises(Killed):
        await pay(producer, rule=LAST)
    await read_one(await worker(gateway, partition))
    await answer_all_requests(gateway, partition)
    assert await first.status() is State.RUNNING
    assert await gateway.command("EXISTS", partition.control(first.id)) == 0


async def answer_all_requests(gateway: Gateway, partition: Partition) -> None:
    """Cancel what is to be cancelled, as a worker does."""
    await promote_due(gateway, partition, on_requests=partial(answer_requests, gateway, partition, retention=60.0))
    assert await gateway.command("ZCARD", partition.due) == 0


# a debounce


async def test_quiet_puts_off_the_last_task(gateway: Gateway, partition: Partition, producer: Producer) -> None:
    rule = Unique(by="order", quiet=60)
    handles = [
        await producer.enqueue("pay", {"order": 1, "note": number}, queue="default", unique=rule) for number in range(3)
    ]
    assert [await handle.status() for handle in handles] == ["cancelled", "cancelled", "scheduled"]
    assert await places(gateway, partition, handles[2].id) == [DUE]
    record = await handles[2].record()
    assert record.args == b'{"order":1,"note":2}'
    assert record.due_at is not None
    assert record.enqueued_at is not None
    assert record.due_at - record.enqueued_at == 60_000
    await promote(gateway, partition, handles[2].id)
    await read_one(await worker(gateway, partition))
    fourth = await pay(producer, rule=rule)
    assert await fourth.status() is State.SCHEDULED
    assert await places(gateway, partition, handles[2].id) == [PENDING], "it has started"


# the script


async def test_the_script_compares_what_was_read(gateway: Gateway, namespace: Namespace) -> None:
    place = namespace.unique("0" * 32)
    first = await write_marker(gateway, place, b"one", b"", 60_000)
    assert first.taken
    again = await write_marker(gateway, place, b"one", b"", 60_000)
    assert again == first, "a repeated claim finds itself"
    refused = await write_marker(gateway, place, b"two", b"", 60_000)
    assert (refused.taken, refused.held) == (False, b"%d one" % first.now)
    later = await write_marker(gateway, place, b"two", refused.held, 60_000, since_read=True)
    assert (later.taken, later.now) == (True, first.now)
    assert await gateway.command("GET", place.key) == b"%d two" % first.now
    assert 0 < await gateway.command("PTTL", place.key) <= 60_000
    assert not (await write_marker(gateway, place, b"", refused.held, 0)).taken
    assert (await write_marker(gateway, place, b"", b"%d two" % first.now, 0)).taken
    assert await gateway.command("EXISTS", place.key) == 0
    assert (await write_marker(gateway, place, b"", b"", 0)).taken, "it is free already"


async def test_a_task_with_large_arguments_is_unique(
    gateway: Gateway, producer: Producer, partition: Partition
) -> None:
    big = {"order": 1, "text": "x" * 1_200_000}
    handles = [await producer.enqueue("pay", big, queue="default", unique=LIVE) for _ in range(2)]
    assert handles[0].id == handles[1].id
    assert await gateway.command("XLEN", partition.ready) == 1


async def test_many_tasks_in_one_call(gateway: Gateway, producer: Producer, partition: Partition) -> None:
    many = [{"order": number % 10} for number in range(200)]
    handles = await producer.enqueue_many("pay", many, queue="default", unique=LIVE)
    assert len({handle.id for handle in handles}) == 10
    assert [handle.existed for handle in handles] == [False] * 10 + [True] * 190
    assert [handles[number].id == handles[number % 10].id for number in range(200)] == [True] * 200
    streamed = [one async for one in producer.enqueue_stream("pay", many, queue="default", unique=LIVE)]
    assert [one.id for one in streamed] == [one.id for one in handles]
    with pytest.raises(ValueError, match="unique key 'order' is missing in the arguments"):
        await producer.enqueue_many("pay", [{"order": 77}, {}], queue="default", unique=LIVE)
    assert await gateway.command("XLEN", partition.ready) == 10, "nothing is half done"


async def test_tasks_of_an_ordering_key_stay_in_order(
    gateway: Gateway, producer: Producer, partition: Partition
) -> None:
    handles = await producer.enqueue_many(
        "pay", [{"order": number} for number in range(30)], queue="default", unique=LIVE, key="k"
    )
    entries = [(await handle.record()).queued_at for handle in handles]
    stored = await gateway.command("XRANGE", partition.ready, "-", "+")
    order = [next(handle.id for handle in handles if handle.id.encode() in str(entry).encode()) for entry in stored]
    assert order == [handle.id for handle in handles]
    assert None not in entries
