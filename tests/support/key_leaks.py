"""Check of guarantee 5: every key belongs to a live task or has a TTL."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import redis

LIVE = {b"queued", b"scheduled", b"limited"}

_OF_A_TASK = re.compile(
    rb"(?P<tag>\{[^}]*:[^}]*\}):(?:(?:record|steps|log|inbox|control):(?P<id>.*)"
    rb"|stream(?:-keys)?:(?P<emitter>.*):[^:]*)"
)

_OF_A_SESSION = re.compile(rb"(?P<tag>\{[^}]*:~sessions:\d+\}):(?:session|history):(?P<id>.*)")


def check_for_leaks(url: str, namespace: str) -> None:
    """Fail if a key of the namespace has no TTL and no live task; then empty the namespace.

    The client is synchronous, which is cheaper: this runs after thousands of tests.
    """
    with redis.Redis.from_url(url, protocol=2, single_connection_client=True) as client:
        client.response_callbacks.clear()
        keys = _keys(client, namespace)
        leaked = _leaks(client, keys)
        _all(client, [("DEL", key) for key in keys])  # in a cluster, a command has keys of one slot only
    assert not leaked, f"keys left behind that never expire: {leaked}"


def leaked_keys(url: str, namespace: str) -> list[str]:
    """Return the keys of a namespace that have no TTL and no live task."""
    with redis.Redis.from_url(url, protocol=2, single_connection_client=True) as client:
        client.response_callbacks.clear()
        return _leaks(client, _keys(client, namespace))


def _keys(client: redis.Redis, namespace: str) -> list[bytes]:
    found: list[bytes] = []
    for pattern in (f"{{{namespace}:*", f"{{{namespace}}}:*"):
        cursor = b"0"
        while True:
            cursor, page = client.execute_command("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
            found += page
            if int(cursor) == 0:
                break
    return found


def _leaks(client: redis.Redis, keys: list[bytes]) -> list[str]:
    leaked: list[str] = []
    bounded: list[bytes] = []
    timelines: list[bytes] = []
    tasks: dict[bytes, list[bytes]] = defaultdict(list)
    for key in keys:
        if b":~limits:" in key:
            name = key.partition(b"}:")[2]
            if name.startswith(b"holders:"):
                leaked += _endless_tokens(client, key)
            elif not name.startswith(b"control:limit:"):  # kept until an operator resets it
                bounded.append(key)
        elif found := _OF_A_TASK.fullmatch(key):
            tasks[found["tag"] + b":record:" + (found["id"] or found["emitter"])].append(key)
        elif b":~unique:" in key or b":fired:" in key or key.endswith(b":session:forgotten"):
            bounded.append(key)
        elif key.endswith(b":nudge") and client.execute_command("XLEN", key) > 16:
            leaked.append(f"{key.decode()} grows")
        elif found := _OF_A_SESSION.fullmatch(key):
            timeline = found["tag"] + b":timeline"  # a worker deletes the session by it, once it has been idle
            if client.execute_command("ZSCORE", timeline, found["id"]) is None:
                leaked.append(f"{key.decode()} (not in the timeline of its sessions)")
        elif key.endswith(b":timeline"):
            timelines.append(key)
    kinds = _all(client, [("TYPE", record) for record in tasks])
    hashes = [record for record, kind in zip(tasks, kinds, strict=True) if kind in (b"hash", "hash")]
    states = dict(zip(hashes, _all(client, [("HGET", record, "state") for record in hashes]), strict=True))
    ended = {part: record for record, parts in tasks.items() if states.get(record) not in LIVE for part in parts}
    settled = {record.partition(b"}")[0] for record, state in states.items() if state not in (None, *LIVE)}
    timelines = [key for key in timelines if key.partition(b"}")[0] in settled]
    bounded += [*ended, *timelines]
    for key, ttl in zip(bounded, _all(client, [("PTTL", key) for key in bounded]), strict=True):
        if ttl == -1:
            state = f"state {states.get(ended[key])}" if key in ended else "its writers give it a TTL"
            leaked.append(f"{key.decode()} ({state})")
    return leaked


_LIFE = 3_600_000
"""Milliseconds within which a token expires at the latest that nothing renews."""


def _endless_tokens(client: redis.Redis, key: bytes) -> list[str]:
    """Return the tokens of a limit that do not expire soon."""
    clock = client.execute_command("GET", key.partition(b"}:")[0] + b"}:clock")
    latest = int(clock.split()[1]) + _LIFE if clock else 0
    tokens = client.execute_command("ZRANGE", key, latest, "+inf", "BYSCORE")
    return [f"{key.decode()}: token {token.decode()}" for token in tokens]


def _all(client: redis.Redis, commands: Sequence[tuple[bytes | str, ...]]) -> list[Any]:
    """Execute commands in one round trip."""
    if not commands:
        return []
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        found: list[Any] = pipeline.execute()
    return found
