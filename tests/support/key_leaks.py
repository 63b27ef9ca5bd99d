"""Check of guarantee 5: every key belongs to a live task or has a TTL."""

from __future__ import annotations

import re
from collections import defaultdict

import redis.asyncio

LIVE = {b"queued", b"scheduled"}

_OF_A_TASK = re.compile(rb"(?P<tag>\{[^}]*:[^}]*\}):(?:record|steps|log|inbox|control):(?P<id>.*)")

_OF_A_SESSION = re.compile(rb"(?P<tag>\{[^}]*:~sessions:\d+\}):(?:session|history):(?P<id>.*)")


async def check_for_leaks(client: redis.asyncio.Redis, namespace: str) -> None:
    """Fail if a key of the namespace has no TTL and no live task; then empty the namespace."""
    client.response_callbacks.clear()
    keys = await _keys(client, namespace)
    leaked = await _leaks(client, keys)
    for key in keys:  # one by one: in a cluster, a command has keys of one slot only
        await client.execute_command("DEL", key)
    assert not leaked, f"keys left behind that never expire: {leaked}"


async def _keys(client: redis.asyncio.Redis, namespace: str) -> list[bytes]:
    found: list[bytes] = []
    for pattern in (f"{{{namespace}:*", f"{{{namespace}}}:*"):
        cursor = b"0"
        while True:
            cursor, page = await client.execute_command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found += page
            if int(cursor) == 0:
                break
    return found


async def _leaks(client: redis.asyncio.Redis, keys: list[bytes]) -> list[str]:
    leaked: list[str] = []
    timelines: list[bytes] = []
    settled: set[bytes] = set()
    tasks: dict[bytes, list[bytes]] = defaultdict(list)
    for key in keys:
        if found := _OF_A_TASK.fullmatch(key):
            tasks[found["tag"] + b":record:" + found["id"]].append(key)
        elif key.endswith(b":nudge") and await client.execute_command("XLEN", key) > 16:
            leaked.append(f"{key.decode()} grows")
        elif found := _OF_A_SESSION.fullmatch(key):
            timeline = found["tag"] + b":timeline"  # a worker deletes the session by it, once it has been idle
            if await client.execute_command("ZSCORE", timeline, found["id"]) is None:
                leaked.append(f"{key.decode()} (not in the timeline of its sessions)")
        elif key.endswith(b":timeline"):
            timelines.append(key)
    for record, parts in tasks.items():
        kind = await client.execute_command("TYPE", record)
        state = await client.execute_command("HGET", record, "state") if kind in (b"hash", "hash") else None
        if state in LIVE:
            continue
        if state is not None:
            settled.add(record.partition(b"}")[0])
        ttls = {part: await client.execute_command("PTTL", part) for part in parts}
        leaked += [f"{part.decode()} (state {state})" for part, ttl in ttls.items() if ttl == -1]
    for key in timelines:
        if key.partition(b"}")[0] in settled and await client.execute_command("PTTL", key) == -1:
            leaked.append(f"{key.decode()} (outcomes give it a TTL)")
    return leaked
