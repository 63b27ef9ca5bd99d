"""Place of a task, read atomically, for the tests of guarantee 1; and a dump of a namespace."""

from __future__ import annotations

from typing import Any

import orjson
from perdure.queues import Gateway, Namespace, Partition
from perdure.queues.keys import GROUP

from tests.support.servers.every_node import whereabouts

READY, PENDING, DUE, LIMITED, DEAD = "ready", "pending", "due", "limited", "dead"


async def places(gateway: Gateway, partition: Partition, task_id: str) -> list[str]:
    """Return every place that holds the task: exactly one, unless its record was purged or has expired."""
    return (await all_places(gateway, partition, [task_id]))[task_id]


_LOOK = """
local held = redis.pcall('XPENDING', KEYS[1], ARGV[1], '-', '+', 10000)
if held.err then
  held = {} -- no group yet: nothing was ever read
end
local found = {redis.call('XRANGE', KEYS[1], '-', '+'), held, redis.call('XRANGE', KEYS[2], '-', '+')}
for i = 4, #KEYS do
  local record = redis.call('HMGET', KEYS[i], 'state', 'entry', 'dead')
  local list = string.match(redis.call('HGET', KEYS[i], 'gate') or '', '^%S+')
  local place = list and redis.call('ZSCORE', string.match(KEYS[1], '^(.*:)ready$') .. 'limited:' .. list, ARGV[i - 2])
  found[#found + 1] = {redis.call('ZSCORE', KEYS[3], ARGV[i - 2]), record,
    place and (record[1] == 'limited' or string.sub(list, 1, 1) ~= 'o') and 1 or 0}
end
return found
"""


async def all_places(gateway: Gateway, partition: Partition, task_ids: list[str]) -> dict[str, list[str]]:
    """Return the places of several tasks at one instant. Fails if a record disagrees with the streams."""
    streams = [partition.ready, partition.dead, partition.due]
    records = [partition.record(task_id) for task_id in task_ids]
    ready, pending, dead, *rest = await gateway.command(
        "EVAL", _LOOK, 3 + len(records), *streams, *records, GROUP, *task_ids
    )
    held = {one[0] for one in pending}
    messages = [(entry, _message_id(pairs)) for entry, pairs in ready]
    letters = [(entry, _fields(pairs)[b"id"].decode()) for entry, pairs in dead]
    found: dict[str, list[str]] = {}
    for task_id, score, record, listed in ((task_id, *one) for task_id, one in zip(task_ids, rest, strict=True)):
        at = [(PENDING if entry in held else READY, entry) for entry, one in messages if one == task_id]
        at += [(DEAD, entry) for entry, one in letters if one == task_id]
        names = [name for name, _ in at]
        state = record[0].decode() if record[0] else None
        if score is not None:
            names.append(DUE)
        if listed:
            names.append(LIMITED)
        if state in ("succeeded", "cancelled"):
            names.append(state)
        _check_record(task_id, names, at, state, record)
        found[task_id] = names
    return found


def _check_record(task_id: str, names: list[str], at: list[tuple[str, bytes]], state: str | None, record: Any) -> None:
    reported = {READY: "queued", PENDING: "queued", DUE: "scheduled"}
    for name in names:
        assert state == reported.get(name, name), f"{task_id} is {name}, its record says {state}"
    for name, entry in at:
        assert record[2 if name == DEAD else 1] == entry, f"{task_id}: the record names another entry ({name})"
    if state in ("queued", "scheduled", "limited", "dead"):
        assert names, f"{task_id} is {state}, and nowhere"


def _message_id(pairs: list[bytes]) -> str | None:
    try:
        return str(orjson.loads(_fields(pairs)[b"env"])["id"])
    except (LookupError, TypeError, orjson.JSONDecodeError):
        return None


def _fields(pairs: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


async def keys(gateway: Gateway, namespace: Namespace) -> list[bytes]:
    """Return every key of the namespace."""
    found: list[bytes] = []
    for pattern in (f"{{{namespace.name}:*", f"{{{namespace.name}}}:*"):
        for node_of in whereabouts(gateway):
            cursor = b"0"
            while True:
                cursor, page = await gateway.command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000, node_of=node_of)
                found += page
                if int(cursor) == 0:
                    break
    return sorted(set(found))


async def dump(gateway: Gateway, namespace: Namespace) -> dict[bytes, Any]:
    """All that the namespace holds, groups and pending lists included: what an act that is refused must not change.

    Left out is what passes by itself: how long an entry has been idle, how long a key still lives (not that it has a
    time to live), when the partition was touched or a limit was published. Consumers without anything pending are left
    out too: asking for messages makes one.
    """
    return {key: await _content(gateway, key) for key in await keys(gateway, namespace)}


async def _content(gateway: Gateway, key: bytes) -> Any:
    kind = await gateway.command("TYPE", key)
    lives = await gateway.command("PTTL", key) == -1
    match kind.decode() if isinstance(kind, bytes) else kind:
        case "hash":
            flat = await gateway.command("HGETALL", key)
            return lives, _fields(flat)
        case "zset" if key.endswith(b"~limits:0}:limits"):
            return lives, sorted(await gateway.command("ZRANGE", key, 0, -1))
        case "zset":
            return lives, await gateway.command("ZRANGE", key, 0, -1, "WITHSCORES")
        case "stream":
            return lives, await gateway.command("XRANGE", key, "-", "+"), await _groups(gateway, key)
        case _ if key.endswith((b":seen", b"~limits:0}:clock")):
            return lives
        case "set":
            found = sorted(await gateway.command("SMEMBERS", key))
        case "list":
            found = await gateway.command("LRANGE", key, 0, -1)
        case _:
            found = await gateway.command("GET", key)
    return lives, found


async def _groups(gateway: Gateway, key: bytes) -> list[Any]:
    groups = []
    for flat in await gateway.command("XINFO", "GROUPS", key):
        group = dict(zip(flat[::2], flat[1::2], strict=True))
        entries = await gateway.command("XPENDING", key, group[b"name"], "-", "+", 10_000)
        held = [(entry, owner, count) for entry, owner, _, count in entries]
        groups.append((group[b"name"], group[b"last-delivered-id"], held))
    return groups


async def lifetimes(gateway: Gateway, partition: Partition, task_id: str) -> dict[str, int]:
    """Return the PTTL in milliseconds of each key of the task; -1 for a key without TTL."""
    parts = {
        "record": partition.record(task_id),
        "steps": partition.steps(task_id),
        "log": partition.log(task_id),
    }
    found = {name: await gateway.command("PTTL", key) for name, key in parts.items()}
    return {name: ttl for name, ttl in found.items() if ttl != -2}
