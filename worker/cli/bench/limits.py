"""What a raw client reaches: the least that the same work needs of Redis, in the fewest round trips.

Rates are per second. A message carries what a no-op task of Perdure carries.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ....queues import Partition
from .raw import RawClient

__all__ = ["GROUP", "READER", "READ_BATCH", "WRITE_BATCH", "add", "make_groups", "read_and_delete", "steps", "take"]

READ_BATCH: Final = 100
WRITE_BATCH: Final = 500

GROUP: Final = "limit"
READER: Final = "reader"

_STEP = Path(__file__).with_name("step.lua").read_text("utf-8")
_STEP_VALUE = b'{"h":"0123456789abcdef01234567","a":"12345"}\n12345'

Fields = Sequence[str | bytes]


def make_groups(client: RawClient, *streams: str) -> None:
    """Make the streams that the raw client reads."""
    for stream in streams:
        client.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")


def add(client: RawClient, stream: str, message: Fields, count: int) -> float:
    """Messages added per second, many XADD to a round trip."""
    command = ("XADD", stream, "*", *message)
    began = time.perf_counter()
    for start in range(0, count, WRITE_BATCH):
        client.pipeline([command] * min(WRITE_BATCH, count - start))
    return count / (time.perf_counter() - began)


def read_and_delete(client: RawClient, stream: str, count: int) -> float:
    """Messages read, acknowledged and deleted per second; a batch is settled in the round trip that reads the next."""
    read = ("XREADGROUP", "GROUP", GROUP, READER, "COUNT", READ_BATCH, "STREAMS", stream, ">")
    done = 0
    began = time.perf_counter()
    reply = client.call(*read)
    while reply:
        entries = [entry for entry, _ in reply[0][1]]
        done += len(entries)
        _, _, reply = client.pipeline([("XACK", stream, GROUP, *entries), ("XDEL", stream, *entries), read])
    took = time.perf_counter() - began
    if done != count:
        raise RuntimeError(f"the raw client read {done} of {count} messages")
    return count / took


def take(client: RawClient, stream: str) -> bytes:
    """Become the owner of one message; returns its entry id."""
    reply = client.call("XREADGROUP", "GROUP", GROUP, READER, "COUNT", 1, "STREAMS", stream, ">")
    entry: bytes = reply[0][1][0][0]
    return entry


def steps(client: RawClient, keys: Partition, message: Fields, count: int, *, at_once: int) -> float:
    """Steps recorded per second (check the owner, HSET, XADD in one script), of `at_once` tasks in one round trip.

    Leaves `at_once` messages, and the keys `keys.steps` and `keys.log` of each entry id.
    """
    add(client, keys.ready, message, at_once)
    entries = [take(client, keys.ready).decode() for _ in range(at_once)]
    script = client.call("SCRIPT", "LOAD", _STEP)
    fences = [
        ("EVALSHA", script, 3, keys.ready, keys.steps(entry), keys.log(entry), GROUP, READER, entry)
        for entry in entries
    ]
    began = time.perf_counter()
    for number in range(count // at_once):
        client.pipeline([(*fence, f"step#{number}", _STEP_VALUE) for fence in fences])
    return count // at_once * at_once / (time.perf_counter() - began)
