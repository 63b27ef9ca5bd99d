"""What a raw client reaches: the least that the same work needs of Redis, in the fewest round trips.

Rates are per second. A message carries what a no-op task of Perdure carries.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from perdure.queues import Envelope, new_task_id

from .place import Place
from .raw import RawClient

__all__ = [
    "READ_BATCH",
    "WRITE_BATCH",
    "add",
    "add_message",
    "hand_over",
    "make_group",
    "read_and_delete",
    "steps",
    "take_message",
    "wait_for_message",
]

READ_BATCH: Final = 100
WRITE_BATCH: Final = 500

GROUP: Final = "limit"
READER: Final = "reader"

_STEP = Path(__file__).with_name("step.lua").read_text("utf-8")
_STEP_VALUE = b'{"h":"0123456789abcdef01234567","a":"12345"}\n12345'

_GIVEN_BACK_IDLE = 60_000  # milliseconds; by this idle time a given-back message is known
_FIELDS = ("env", Envelope(id=new_task_id(), task="noop").encode(), "args", b'{"number":12345}')


def make_group(place: Place) -> None:
    """Make the streams that the raw client reads."""
    with RawClient(place.url) as client:
        for stream in (place.raw.ready, place.raw.nudge):
            client.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")


def add(place: Place, count: int) -> float:
    """Messages added per second, many XADD to a round trip."""
    with RawClient(place.url) as client:
        return _add(client, place, count)


def read_and_delete(place: Place, count: int) -> float:
    """Messages read, acknowledged and deleted per second; a batch is settled in the round trip that reads the next."""
    stream = place.raw.ready
    read = ("XREADGROUP", "GROUP", GROUP, READER, "COUNT", READ_BATCH, "STREAMS", stream, ">")
    done = 0
    with RawClient(place.url) as client:
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


def steps(place: Place, count: int, *, at_once: int) -> float:
    """Steps recorded per second (check the owner, HSET, XADD in one script), of `at_once` tasks in one round trip.

    Leaves `at_once` messages, and the step records and log of each.
    """
    keys = place.raw
    with RawClient(place.url) as client:
        _add(client, place, at_once)
        entries = [take_message(client, place).decode() for _ in range(at_once)]
        script = client.call("SCRIPT", "LOAD", _STEP)
        fences = [
            ("EVALSHA", script, 3, keys.ready, keys.steps(entry), keys.log(entry), GROUP, READER, entry)
            for entry in entries
        ]
        began = time.perf_counter()
        for number in range(count // at_once):
            client.pipeline([(*fence, f"step#{number}", _STEP_VALUE) for fence in fences])
        return count // at_once * at_once / (time.perf_counter() - began)


def _add(client: RawClient, place: Place, count: int) -> float:
    command = ("XADD", place.raw.ready, "*", *_FIELDS)
    began = time.perf_counter()
    for start in range(0, count, WRITE_BATCH):
        client.pipeline([command] * min(WRITE_BATCH, count - start))
    return count / (time.perf_counter() - began)


def add_message(client: RawClient, place: Place) -> None:
    """Add one message."""
    client.call("XADD", place.raw.ready, "*", *_FIELDS)


def take_message(client: RawClient, place: Place) -> bytes:
    """Become the owner of one message; returns its entry id."""
    reply = client.call("XREADGROUP", "GROUP", GROUP, READER, "COUNT", 1, "STREAMS", place.raw.ready, ">")
    entry: bytes = reply[0][1][0][0]
    return entry


def hand_over(client: RawClient, place: Place, entry: bytes) -> None:
    """Give a pending message back and wake a reader that waits."""
    ready, nudge = place.raw.ready, place.raw.nudge
    client.pipeline(
        [
            ("XCLAIM", ready, GROUP, "nobody", 0, entry, "IDLE", _GIVEN_BACK_IDLE, "JUSTID"),
            ("XADD", nudge, "*", "why", "released"),
        ]
    )


def wait_for_message(client: RawClient, place: Place) -> None:
    """Wait until a message comes or one is given back, and take it."""
    ready, nudge = place.raw.ready, place.raw.nudge
    reply = client.call("XREADGROUP", "GROUP", GROUP, READER, "BLOCK", 0, "STREAMS", nudge, ready, ">", ">")
    if reply[0][0] == nudge.encode():
        client.call("XAUTOCLAIM", ready, GROUP, READER, _GIVEN_BACK_IDLE, "0-0", "COUNT", 1)
