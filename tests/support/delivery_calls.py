"""All calls on a delivery, with one signature, so that a test covers all of them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from perdure.deadletter.burial import Evidence, bury
from perdure.deadletter.policy import Reason
from perdure.queues import Gateway
from perdure.queues.delivery.checkpoint import Entry, Kind, Written, write_entries
from perdure.queues.delivery.heartbeat import renewal
from perdure.queues.delivery.leases import Delivery, RunStatus
from perdure.queues.delivery.settlement import Counters, cancelled, message_after, park, release, reschedule, succeed
from perdure.queues.stream_items import item_place, keyed_place
from perdure.queues.transport.scripts import queue_script


async def add_entries(gateway: Gateway, delivery: Delivery, task_id: str, entries: Sequence[Entry]) -> Written:
    """Write entries after those that are stored, as the next run of the task would."""
    first = await last_entry(gateway, delivery, task_id) + 1
    return await write_entries(gateway, delivery, task_id, entries, first=first)


async def last_entry(gateway: Gateway, delivery: Delivery, task_id: str) -> int:
    """Return the number of the last stored entry."""
    return int(await gateway.command("HGET", delivery.partition.record(task_id), "entries") or 0)


Act = Callable[[Gateway, Delivery, str], Awaitable[object]]

EVIDENCE = Evidence("ValueError", "no such file", "Traceback ...")


async def _succeed(gateway: Gateway, delivery: Delivery, task_id: str, entries: int = 0) -> None:
    await succeed(gateway, delivery, task_id, b'{"ok":true}', Counters(1), ran=0.5, ttl=60, entries=entries)


async def _cancelled(gateway: Gateway, delivery: Delivery, task_id: str) -> None:
    await cancelled(gateway, delivery, task_id, Counters(), ran=0.5, ttl=60)


async def _reschedule(gateway: Gateway, delivery: Delivery, task_id: str, entries: int = 0) -> None:
    data: dict[str, object] = {"error": "ValueError", "message": "no such file"}
    await reschedule(
        gateway, delivery, task_id, Counters(1), delay=60, event="attempt_failed", data=data, entries=entries
    )


async def _park(gateway: Gateway, delivery: Delivery, task_id: str, entries: int = 0) -> None:
    conditions = [message_after(0)]
    await park(
        gateway, delivery, task_id, Counters(), delay=60, waits="message", conditions=conditions, entries=entries
    )


async def _release(gateway: Gateway, delivery: Delivery, task_id: str, entries: int = 0) -> None:
    await release(gateway, delivery, task_id, data={"why": "shutdown"}, entries=entries)


async def _give_back(gateway: Gateway, delivery: Delivery, task_id: str) -> None:
    await release(gateway, delivery, None, data=None)


async def _bury(gateway: Gateway, delivery: Delivery, task_id: str, entries: int = 0) -> None:
    await bury(
        gateway,
        delivery,
        task_id,
        task="t",
        reason=Reason.ATTEMPTS_EXHAUSTED,
        evidence=EVIDENCE,
        counters=Counters(3),
        retention=60,
        entries=entries,
    )


async def _bury_unreadable(gateway: Gateway, delivery: Delivery, task_id: str) -> None:
    await bury(gateway, delivery, task_id, task="?", reason=Reason.UNREADABLE, evidence=EVIDENCE, counters=Counters())


async def _record(gateway: Gateway, delivery: Delivery, task_id: str) -> None:
    await add_entries(
        gateway,
        delivery,
        task_id,
        [
            Entry(Kind.DONE, "list", b"[1]"),
            Entry(Kind.SAVED, "sum", b"2"),
            Entry(Kind.EMITTED, item_place("output", 100, "sum", 1, 1), b"3"),
            Entry(Kind.EMITTED, keyed_place("output", 100, "ab"), b"4"),
        ],
    )


async def beat(gateway: Gateway, *held: tuple[Delivery, str, RunStatus], lease: float = 60.0) -> list[list[int]]:
    """Renew leases of one worker on one partition. Return the positions of the lost ones, and of the cancelled ones."""
    delivery = held[0][0]
    call = renewal(delivery.partition, lease, delivery.worker, held)
    answer: list[list[int]] = (await gateway.run(queue_script("renew_leases"), *call))[1:]
    return answer


SETTLING: dict[str, Act] = {
    "succeed": _succeed,
    "cancelled": _cancelled,
    "reschedule": _reschedule,
    "park": _park,
    "release": _release,
    "give_back": _give_back,
    "bury": _bury,
    "bury_unreadable": _bury_unreadable,
}
"""Calls that settle a delivery."""

SETTLING_WITH: dict[str, Callable[[Gateway, Delivery, str, int], Awaitable[object]]] = {
    "succeed": _succeed,
    "reschedule": _reschedule,
    "park": _park,
    "release": _release,
    "bury": _bury,
}
"""Calls that settle a delivery, given the number of the last entry that they follow from."""

WRITING: dict[str, Act] = {"record": _record}
"""Calls that write for a running delivery."""

FENCED = SETTLING | WRITING
