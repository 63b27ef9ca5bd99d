"""The raw client's share of each benchmark: the same work with the fewest commands and round trips.

Rates are per second. A message has the content of a no-op task of Perdure.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from perdure.queues.envelope import Envelope, new_task_id

from ..support.deployment import Deployment
from .client import RawClient

__all__ = [
    "READ_BATCH",
    "WRITE_BATCH",
    "add",
    "add_message",
    "make_group",
    "read_and_delete",
    "release",
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

_RELEASED_IDLE = 60_000  # milliseconds; this idle time marks a released message
_FIELDS = ("env", Envelope(id=new_task_id(), task="noop").encode(), "args", b'{"number":12345}')


def make_group(deployment: Deployment) -> None:
    """Create the streams that the raw client reads."""
    with RawClient(deployment.url) as client:
        for stream in (deployment.raw.ready, deployment.raw.nudge):
            client.call("XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM")


def add(deployment: Deployment, count: int) -> float:
    """Return messages added per second, with many XADD per round trip."""
    with RawClient(deployment.url) as client:
        return _add(client, deployment, count)


def read_and_delete(deployment: Deployment, count: int) -> float:
    """Return messages read, acknowledged and deleted per second; one round trip settles a batch and reads the next."""
    stream = deployment.raw.ready
    read = ("XREADGROUP", "GROUP", GROUP, READER, "COUNT", READ_BATCH, "STREAMS", stream, ">")
    done = 0
    with RawClient(deployment.url) as client:
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


def steps(deployment: Deployment, count: int, *, at_once: int) -> float:
    """Return steps recorded per second (owner check, HSET and XADD in one script), `at_once` per round trip.

    Leaves `at_once` messages with their step records and logs.
    """
    keys = deployment.raw
    with RawClient(deployment.url) as client:
        _add(client, deployment, at_once)
        entries = [take_message(client, deployment).decode() for _ in range(at_once)]
        script = client.call("SCRIPT", "LOAD", _STEP)
        fences = [
            ("EVALSHA", script, 3, keys.ready, keys.steps(entry), keys.log(entry), GROUP, READER, entry)
            for entry in entries
        ]
        began = time.perf_counter()
        for number in range(count // at_once):
            client.pipeline([(*fence, f"step#{number}", _STEP_VALUE) for fence in fences])
        return count // at_once * at_once / (time.perf_counter() - began)


def _add(client: RawClient, deployment: Deployment, count: int) -> float:
    command = ("XADD", deployment.raw.ready, "*", *_FIELDS)
    began = time.perf_counter()
    for start in range(0, count, WRITE_BATCH):
        client.pipeline([command] * min(WRITE_BATCH, count - start))
    return count / (time.perf_counter() - began)


def add_message(client: RawClient, deployment: Deployment) -> None:
    """Add one message."""
    client.call("XADD", deployment.raw.ready, "*", *_FIELDS)


def take_message(client: RawClient, deployment: Deployment) -> bytes:
    """Read one message; return its entry id."""
    reply = client.call("XREADGROUP", "GROUP", GROUP, READER, "COUNT", 1, "STREAMS", deployment.raw.ready, ">")
    entry: bytes = reply[0][1][0][0]
    return entry


def release(client: RawClient, deployment: Deployment, entry: bytes) -> None:
    """Release a pending message and wake a blocked reader."""
    ready, nudge = deployment.raw.ready, deployment.raw.nudge
    client.pipeline(
        [
            ("XCLAIM", ready, GROUP, "released", 0, entry, "IDLE", _RELEASED_IDLE, "JUSTID"),
            ("XADD", nudge, "*", "why", "released"),
        ]
    )


def wait_for_message(client: RawClient, deployment: Deployment) -> None:
    """Wait for a new or released message, and read it."""
    ready, nudge = deployment.raw.ready, deployment.raw.nudge
    reply = client.call("XREADGROUP", "GROUP", GROUP, READER, "BLOCK", 0, "STREAMS", nudge, ready, ">", ">")
    if reply[0][0] == nudge.encode():
        client.call("XAUTOCLAIM", ready, GROUP, READER, _RELEASED_IDLE, "0-0", "COUNT", 1)
