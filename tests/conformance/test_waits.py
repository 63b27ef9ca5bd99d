"""Waits and answers, as the scripts keep them: an answer is for one wait, and is there until the act that uses it."""

from __future__ import annotations

from typing import Any

import pytest
from perdure.queues import (
    AnswerRefused,
    Encryptor,
    Gateway,
    InvalidAnswer,
    LeaseLost,
    Namespace,
    Partition,
    PayloadTooLarge,
    Producer,
    State,
    TaskEnded,
    TaskNotFound,
    WaitNotFound,
    read_record,
)
from perdure.queues.defaults import MAX_SECONDS
from perdure.queues.delivery.checkpoint import Entry
from perdure.queues.delivery.leases import Delivery
from perdure.queues.delivery.settlement import Counters, park, succeed
from perdure.queues.errors import NoKey
from perdure.queues.inbox import read_inbox
from perdure.queues.waits import (
    Answer,
    answer_token,
    answer_wait,
    claim_token,
    closing,
    find_token,
    forget_ended_waits,
    free_token,
    list_waiting,
    look_at_wait,
    opening,
    question_digest,
    read_waits,
)

from tests.support.consumers import read_one, take_over, worker
from tests.support.delivery_calls import add_entries
from tests.support.workers import wait_until

pytestmark = pytest.mark.integration

NUMBER = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}


async def started(producer: Producer, partition: Partition, task: str = "t") -> Delivery:
    await producer.enqueue("t", task_id=task, queue="default")
    return await read_one(await worker(producer.gateway, partition))


def opened(
    wait: str, *, until: int | None = None, early: bool = True, lost: bool = False, task: str = "t", **fields: Any
) -> Entry:
    return opening(task, wait, {"who": "ada"} | fields, until=until, early=early, lost=lost)


def closed(wait: str, answer: Answer | None = None) -> Entry:
    return closing("t", wait, answer)


async def write(gateway: Gateway, delivery: Delivery, *entries: Entry, task: str = "t") -> None:
    cipher = gateway.encryptor.of(delivery.partition, task)
    await add_entries(gateway, delivery, task, [entry.encrypted(cipher) for entry in entries])


async def answered(gateway: Gateway, partition: Partition, wait: str) -> Answer | None:
    return (await look_at_wait(gateway, partition, "t", wait)).answer


async def test_an_open_wait_is_answered_once_by_name_and_by_id(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval", why="pay 900 EUR?", schema=NUMBER))
    (wait,) = (await read_waits(gateway, partition, "t")).open
    assert (wait.id, wait.name, wait.who, wait.why, wait.until) == ("approval", "approval", "ada", "pay 900 EUR?", None)
    found = await answer_wait(gateway, partition, "t", "approval", {"amount": 9}, by="ada", answer_id="a")
    assert found == ("t", "approval", State.QUEUED, False)
    assert await answer_wait(gateway, partition, "t", "approval", {"amount": 9}, by="ada", answer_id="a") == found
    for name in ("approval", "approval#1"):
        with pytest.raises(AnswerRefused, match="it has an answer already"):
            await answer_wait(gateway, partition, "t", name, {"amount": 8})
    answer = await answered(gateway, partition, "approval")
    assert answer is not None
    assert (answer.value, answer.by, answer.early) == ({"amount": 9}, "ada", False)
    assert (await read_waits(gateway, partition, "t")).open[0].answered
    await write(gateway, delivery, closed("approval", answer))
    assert (await read_waits(gateway, partition, "t")).open == []
    assert await answered(gateway, partition, "approval") is None
    assert (await answer_wait(gateway, partition, "t", "approval", {"amount": 9}, answer_id="a")).wait == "approval"
    with pytest.raises(AnswerRefused, match="1 wait of this name had an end already"):
        await answer_wait(gateway, partition, "t", "approval", {"amount": 8})
    assert [one async for one in read_inbox(gateway, partition, "t")] == [], "no field is foreign"


async def test_an_answer_by_name_goes_to_the_open_wait_of_that_name(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval"), opened("page 3/approval"), opened("approval#2"))
    with pytest.raises(WaitNotFound, match=r"several waits .* \(approval#1, page 3/approval, approval#2\)"):
        await answer_wait(gateway, partition, "t", "approval", 1)
    await answer_wait(gateway, partition, "t", "approval#1", 1)
    await answer_wait(gateway, partition, "t", "approval#2", 2)
    await answer_wait(gateway, partition, "t", "page 3/approval", 3)
    await write(gateway, delivery, closed("approval"), closed("page 3/approval"), opened("other"))
    with pytest.raises(AnswerRefused, match="it has an answer already"):
        await answer_wait(gateway, partition, "t", "approval", 1)
    await write(gateway, delivery, closed("approval#2"))
    with pytest.raises(WaitNotFound, match="open are: other"):
        await answer_wait(gateway, partition, "t", "approval#2", 1)
    with pytest.raises(WaitNotFound, match="open are: other"):
        await answer_wait(gateway, partition, "t", "page-4/approval", 1)
    with pytest.raises(ValueError, match="name of a wait must be"):
        await answer_wait(gateway, partition, "t", "pay out", 1)


async def test_an_early_answer_is_kept_for_the_first_wait_of_its_name(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    kept = await answer_wait(gateway, partition, "t", "approval", "yes", answer_id="a")
    assert kept == ("t", "approval", State.QUEUED, True)
    assert await answer_wait(gateway, partition, "t", "approval", "yes", answer_id="a") == kept
    with pytest.raises(AnswerRefused, match="an answer is kept already"):
        await answer_wait(gateway, partition, "t", "approval", "no")
    await answer_wait(gateway, partition, "t", "other", 1)
    assert {name: one.value for name, one in (await read_waits(gateway, partition, "t")).early.items()} == {
        "approval": "yes",
        "other": 1,
    }
    await write(gateway, delivery, opened("page/approval"))
    answer = await answered(gateway, partition, "page/approval")
    assert answer is not None
    assert (answer.value, answer.early) == ("yes", True)
    assert set((await read_waits(gateway, partition, "t")).early) == {"other"}
    await write(gateway, delivery, closed("page/approval", answer), opened("approval"))
    assert await answered(gateway, partition, "approval") is None
    assert [one async for one in read_inbox(gateway, partition, "t")] == [], "no field is foreign"


async def test_a_wait_that_takes_no_early_answer_leaves_it(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await answer_wait(gateway, partition, "t", "approval", "yes")
    await write(gateway, delivery, opened("approval", early=False, shows="digest"))
    assert await answered(gateway, partition, "approval") is None
    await answer_wait(gateway, partition, "t", "approval", "no")
    answer = await answered(gateway, partition, "approval")
    assert answer is not None
    assert (answer.value, answer.question) == ("no", question_digest("approval", {"who": "ada", "shows": "digest"}))
    await write(gateway, delivery, closed("approval"), opened("approval#2"))
    assert await answered(gateway, partition, "approval#2") is None, "it is for the first one only"


async def test_a_wait_that_is_opened_again_drops_its_answer(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval", shows="a", early=False))
    await answer_wait(gateway, partition, "t", "approval", "yes")
    await write(gateway, delivery, opened("approval", shows="b", early=False))
    assert await answered(gateway, partition, "approval") is None
    assert (await read_waits(gateway, partition, "t")).open[0].shows == "b"
    await write(gateway, delivery, closed("approval"))
    assert await gateway.command("ZCARD", partition.waiting) == 0, "it was counted once"


async def test_a_wait_that_was_lost_and_is_there_again_keeps_its_answer(
    producer: Producer, partition: Partition
) -> None:
    """A run that finds its wait lost opens it again, while the entry that opened it is written again as well."""
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await answer_wait(gateway, partition, "t", "approval", 1)
    await write(gateway, delivery, opened("approval"), opened("approval", lost=True))
    answer = await answered(gateway, partition, "approval")
    assert answer is not None
    assert (answer.value, answer.early) == (1, True)
    await answer_wait(gateway, partition, "t", "other", 2)
    await write(gateway, delivery, opened("other", lost=True))
    answer = await answered(gateway, partition, "other")
    assert answer is not None, "one that is not there is opened, and takes the answer that came early"


async def test_an_answer_after_the_time_of_a_wait_is_refused(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("past", until=1), opened("next", until=99_999_999_999_999))
    with pytest.raises(AnswerRefused, match="its time has passed"):
        await answer_wait(gateway, partition, "t", "past", 1)
    await answer_wait(gateway, partition, "t", "next", 1)


async def test_an_answer_must_fit_the_schema_of_its_wait(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    schema = {"$ref": "#/$defs/Pay", "$defs": {"Pay": NUMBER}}
    await write(gateway, delivery, opened("approval", schema=schema))
    with pytest.raises(InvalidAnswer, match="amount"):
        await answer_wait(gateway, partition, "t", "approval", {"amount": "nine"})
    with pytest.raises(InvalidAnswer):
        await answer_wait(gateway, partition, "t", "approval", 9)
    with pytest.raises(TypeError, match="JSON"):
        await answer_wait(gateway, partition, "t", "approval", object())
    with pytest.raises(PayloadTooLarge):
        await answer_wait(gateway, partition, "t", "approval", "x" * 100, limit=50)
    assert await answered(gateway, partition, "approval") is None
    await answer_wait(gateway, partition, "t", "approval", {"amount": 9})


async def test_an_answer_wakes_the_task_that_waits_for_it(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("page 3/approval"), opened("other"))
    await park(
        gateway,
        delivery,
        "t",
        Counters(),
        delay=60,
        waits="answer",
        conditions=[("answer", "page 3/approval"), ("time", "")],
        entries=2,
    )
    later = await gateway.command("ZSCORE", partition.due, "t")
    assert (await answer_wait(gateway, partition, "t", "other", 1)).state is State.WAITING
    assert await gateway.command("ZSCORE", partition.due, "t") == later, "the run does not wait for this one"
    await answer_wait(gateway, partition, "t", "approval", 1)
    assert float(await gateway.command("ZSCORE", partition.due, "t")) < float(later)


@pytest.mark.parametrize(("delay", "limited"), [(60, True), (MAX_SECONDS, False)])
async def test_a_wait_without_a_time_limit_is_due_at_no_time(
    producer: Producer, partition: Partition, delay: float, limited: bool
) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval"))
    await park(
        gateway, delivery, "t", Counters(), delay=delay, waits="answer", conditions=[("answer", "approval")], entries=1
    )
    record = await read_record(gateway, partition, "t")
    assert record is not None
    assert record.state is State.WAITING
    assert (record.due_at is not None) == limited


async def test_an_answer_before_the_park_is_seen_by_it(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval"))
    await answer_wait(gateway, partition, "t", "approval", 1)
    await park(
        gateway, delivery, "t", Counters(), delay=60, waits="answer", conditions=[("answer", "approval")], entries=1
    )
    seconds, micros = await gateway.command("TIME")
    now = int(seconds) * 1000 + int(micros) // 1000
    assert float(await gateway.command("ZSCORE", partition.due, "t")) <= now


async def test_who_lost_the_lease_opens_and_closes_no_wait(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    late = await started(producer, partition)
    await write(gateway, late, opened("approval"))
    await answer_wait(gateway, partition, "t", "approval", 1)
    await take_over(gateway, late)
    for entry in (opened("approval"), opened("other"), closed("approval")):
        with pytest.raises(LeaseLost):
            await write(gateway, late, entry)
    assert [(one.id, one.answered) for one in (await read_waits(gateway, partition, "t")).open] == [("approval", True)]


async def test_answers_to_ended_and_unknown_tasks_are_refused(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval"))
    await succeed(gateway, delivery, "t", b"1", Counters(1), ran=0, ttl=60, entries=1)
    with pytest.raises(TaskEnded, match="takes no more answers: it is succeeded"):
        await answer_wait(gateway, partition, "t", "approval", 1)
    with pytest.raises(TaskNotFound):
        await answer_wait(gateway, partition, "missing", "approval", 1)


async def test_early_answers_are_bounded(
    producer: Producer, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perdure.queues.waits.MAX_EARLY", 2)
    monkeypatch.setattr("perdure.queues.waits.EARLY_BYTES", 400)
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await answer_wait(gateway, partition, "t", "a", 1)
    with pytest.raises(AnswerRefused, match=r"1 answer with .* bytes came early"):
        await answer_wait(gateway, partition, "t", "b", "x" * 400)
    await answer_wait(gateway, partition, "t", "b", 1)
    with pytest.raises(AnswerRefused, match=r"2 answers with .* bytes came early"):
        await answer_wait(gateway, partition, "t", "c", 1)
    await write(gateway, delivery, opened("a"))
    await answer_wait(gateway, partition, "t", "c", 1)
    await write(gateway, delivery, closed("a"))


async def test_waits_and_answers_are_encrypted_with_their_place(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    gateway.encryptor = Encryptor([b"k" * 32])
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval", why="secret"), opened("other"))
    await answer_wait(gateway, partition, "t", "approval", "secret")
    await answer_wait(gateway, partition, "t", "early", "secret")
    inbox = partition.inbox("t")
    stored = await gateway.command("HGETALL", inbox)
    assert b"secret" not in b"".join(stored)
    await gateway.command("HSET", inbox, "a:other", stored[stored.index(b"a:approval") + 1])
    answer = await answered(gateway, partition, "other")
    assert answer is not None
    assert answer.problem is not None
    gateway.encryptor = Encryptor()
    with pytest.raises(NoKey):
        await answer_wait(gateway, partition, "t", "unknown", 1)
    with pytest.raises(AnswerRefused, match="encrypted"):
        await answer_wait(gateway, partition, "t", "other", 1)


async def test_the_index_has_the_tasks_that_wait(producer: Producer, partition: Partition) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval"), opened("other"))
    second = await started(producer, partition, "u")
    await write(gateway, second, opened("approval", task="u"), task="u")
    assert [
        (task.task_id, [wait.id for wait in task.waits.open]) async for task in list_waiting(gateway, [partition])
    ] == [("t", ["approval", "other"]), ("u", ["approval"])]
    await succeed(gateway, second, "u", b"1", Counters(1), ran=0, ttl=60, entries=1)
    await write(gateway, delivery, closed("approval"))
    assert [task.task_id async for task in list_waiting(gateway, [partition])] == ["t"]
    assert await forget_ended_waits(gateway, partition) == 1
    assert await gateway.command("ZRANGE", partition.waiting, 0, -1) == [b"t"]
    await write(gateway, delivery, closed("other"))
    assert await gateway.command("EXISTS", partition.waiting) == 0
    assert await forget_ended_waits(gateway, partition) == 0
    assert await read_record(gateway, partition, "t") is not None


async def test_a_token_names_one_open_wait(producer: Producer, partition: Partition, namespace: Namespace) -> None:
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval", token="order:17"), opened("other", token="order:17"))
    assert await claim_token(gateway, partition, "t", "approval", "order:17", timeout_ms=None) is None
    assert await claim_token(gateway, partition, "t", "approval", "order:17", timeout_ms=60_000) is None, "again"
    ttl = await gateway.command("PTTL", namespace.token("order:17").key)
    assert 29 * 86_400_000 < ttl <= 30 * 86_400_000 + 60_000
    held = await claim_token(gateway, partition, "t", "other", "order:17", timeout_ms=None)
    assert held is not None
    assert held.wait == "approval"
    await free_token(gateway, partition, "t", "other", "order:17")
    assert await find_token(gateway, namespace, "order:17") is not None, "it is of another wait"
    assert (await answer_token(gateway, namespace, "order:17", 1)).wait == "approval"
    with pytest.raises(WaitNotFound, match="no open wait has the token 'order:18'"):
        await answer_token(gateway, namespace, "order:18", 1)
    await write(gateway, delivery, closed("approval"))
    with pytest.raises(WaitNotFound, match="no open wait has the token"):
        await answer_token(gateway, namespace, "order:17", 2)
    assert await claim_token(gateway, partition, "t", "other", "order:17", timeout_ms=None) is None, "taken over"
    assert (await answer_token(gateway, namespace, "order:17", 2)).wait == "other"
    await free_token(gateway, partition, "t", "other", "order:17")
    assert await find_token(gateway, namespace, "order:17") is None


async def test_an_answer_is_notified(producer: Producer, partition: Partition) -> None:
    """A run that holds its waits in memory looks again then."""
    gateway = producer.gateway
    delivery = await started(producer, partition)
    await write(gateway, delivery, opened("approval"))
    handle = await producer.find("t")
    assert handle is not None
    received: list[bytes] = []
    async with handle._subscription() as notifications:
        await answer_wait(gateway, partition, "t", "approval", 1)

        async def notified() -> bool:
            received.append(await notifications.get())
            return b"answer" in received

        await wait_until(notified, "the answer is notified")
