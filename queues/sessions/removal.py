"""Removal of sessions: at once with all that was said in them, or after their retention."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Final

from ..derived_tasks import MAX_HAND_OFFS
from ..inspection.views import find_task, queue_partitions
from ..junk import set_aside, split
from ..keys import GROUP, RESERVED, Namespace, Partition
from ..transport.gateway import Gateway
from ..transport.scripts import pairs, queue_script
from .record import SessionAddress, TurnId, is_digest

_FORGET = queue_script("session_forget")
_FORGET_TASK = queue_script("forget_task")

_NUMBER: Final = re.compile(rb"[0-9]{1,9}")
"""The number of a turn."""

_PAGE: Final = 100
"""Sessions, and turns of a session, that are looked at in one round."""


async def forget_session(gateway: Gateway, address: SessionAddress, *, born: str = "", idle_ms: str = "") -> bool:
    """Delete a session with its state and history, and then the tasks of its turns; return whether it was there.

    If the caller dies before all tasks are deleted, a worker deletes the rest (`finish_forgetting`).

    Args:
        born: Only if its first message was sent at this time; by default the session that is there now.
        idle_ms: Only if no turn runs, and nothing has happened for so many milliseconds; the tasks are left to expire.
    """
    keys = [*address.keys, address.partition.forgotten, address.partition.last_forgotten]
    born = born or (await gateway.command("HGET", address.session, "born") or b"").decode()
    there = bool(await gateway.run(_FORGET, keys, [address.digest, born, idle_ms]))
    if idle_ms:
        return there
    for noted, last in pairs(await gateway.command("HGETALL", address.partition.forgotten)).items():
        if noted.startswith(f"{address.digest} ".encode()):
            await _forget_turns(gateway, address, noted.decode(), int(last))
    return there


async def is_forgotten(gateway: Gateway, address: SessionAddress, turn: TurnId) -> bool:
    """Return whether the session of a turn was deleted."""
    return bool(await gateway.command("HGET", address.session, "born") != turn.born.encode())


def _is_noted(text: str) -> bool:
    digest, _, born = text.partition(" ")
    return is_digest(digest) and born.isdecimal()


async def finish_forgetting(gateway: Gateway, namespace: Namespace) -> None:
    """Delete tasks of forgotten sessions that their callers have left."""
    partitions = namespace.session_partitions
    pages = await gateway.pipeline([("HSCAN", one.forgotten, 0, "COUNT", _PAGE) for one in partitions])
    for partition, (_, page) in zip(partitions, pages, strict=True):
        numbers = pairs(page)
        noted, foreign = split(numbers, _is_noted)
        foreign += [one.encode() for one in noted if not _NUMBER.fullmatch(numbers[one.encode()])]
        await set_aside(gateway, partition, partition.forgotten, "hash", foreign)
        for session in noted:
            if session.encode() not in foreign:
                address = SessionAddress(partition, session.partition(" ")[0])
                await _forget_turns(gateway, address, session, int(numbers[session.encode()]))


async def _forget_turns(gateway: Gateway, address: SessionAddress, noted: str, last: int) -> None:
    namespace = Namespace(address.partition.namespace)
    digest, _, born = noted.partition(" ")
    partitions = await queue_partitions(gateway, namespace)
    for first in range(max(last, 1), 0, -_PAGE):
        turns = [str(TurnId(digest, born, number)) for number in range(first, max(first - _PAGE, 0), -1)]
        async for partition, task_id in _existing(gateway, partitions, turns):
            await forget_task(gateway, partition, task_id)
    await gateway.command("HDEL", address.partition.forgotten, noted)


async def _existing(
    gateway: Gateway, partitions: Sequence[Partition], tasks: Sequence[str]
) -> AsyncIterator[tuple[Partition, str]]:
    """Yield those of the tasks that have a record, with their partitions."""
    counts = await gateway.pipeline([("EXISTS", *map(one.record, tasks)) for one in partitions])
    for partition in [one for one, count in zip(partitions, counts, strict=True) if count]:
        found = await gateway.pipeline([("EXISTS", partition.record(task_id)) for task_id in tasks])
        for task_id in [one for one, exists in zip(tasks, found, strict=True) if exists]:
            yield partition, task_id


async def forget_task(gateway: Gateway, partition: Partition, task_id: str) -> None:
    """Delete a task in whatever state it is, and its successors first, so that no link to them is lost. Idempotent.

    The worker that runs it loses its lease.
    """
    namespace = Namespace(partition.namespace)
    chain = [(partition, task_id, "")]
    while chain and len(chain) <= MAX_HAND_OFFS + 1:
        where, task_id, known = chain.pop()
        ready, record, steps, log, inbox, control = where.run_keys(task_id)
        keys = [ready, record, steps, log, inbox, control, where.due, where.dead, where.timeline]
        args = (GROUP, RESERVED, task_id, known, namespace.worker_channel(""))
        if await gateway.run(_FORGET_TASK, keys, args) == -1:
            following = (await gateway.command("HGET", record, "handed_to") or b"").decode()
            chain.append((where, task_id, following))
            if following and (place := await find_task(gateway, namespace, following)) is not None:
                chain.append((place, following, ""))


async def forget_idle_sessions(gateway: Gateway, namespace: Namespace, ttl: float) -> int:
    """Delete sessions without a message for `ttl` seconds whose turns have ended or failed; return their number.

    The tasks of their turns expire by themselves.
    """
    partitions = namespace.session_partitions
    seconds, _ = await gateway.command("TIME", node_of=partitions[0].due)
    before = int((int(seconds) - ttl) * 1000)
    pages = await gateway.pipeline(
        [("ZRANGE", one.timeline, "-inf", before, "BYSCORE", "LIMIT", 0, _PAGE) for one in partitions]
    )
    forget = partial(forget_session, gateway, idle_ms=str(round(ttl * 1000)))
    forgotten = 0
    for partition, page in zip(partitions, pages, strict=True):
        digests, foreign = split(page, is_digest)
        await set_aside(gateway, partition, partition.timeline, "zset", foreign)
        for digest in digests:
            forgotten += await forget(SessionAddress(partition, digest))
    return forgotten
