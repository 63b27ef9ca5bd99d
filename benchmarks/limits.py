"""What a raw client reaches: the least that the same work needs of Redis, in the fewest round trips.

Rates are per second. A message carries what a no-op task of Perdure carries.
"""

from __future__ import annotations

from perdure.queues import Envelope, new_task_id
from perdure.worker.cli.bench import limits
from perdure.worker.cli.bench.limits import GROUP, READ_BATCH, READER, WRITE_BATCH, make_groups

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

_GIVEN_BACK_IDLE = 60_000  # milliseconds; by this idle time a given-back message is known
_FIELDS = ("env", Envelope(id=new_task_id(), task="noop").encode(), "args", b'{"number":12345}')


def make_group(place: Place) -> None:
    """Make the streams that the raw client reads."""
    with RawClient(place.url) as client:
        make_groups(client, place.raw.ready, place.raw.nudge)


def add(place: Place, count: int) -> float:
    """Messages added per second, many XADD to a round trip."""
    with RawClient(place.url) as client:
        return limits.add(client, place.raw.ready, _FIELDS, count)


def read_and_delete(place: Place, count: int) -> float:
    """Messages read, acknowledged and deleted per second; a batch is settled in the round trip that reads the next."""
    with RawClient(place.url) as client:
        return limits.read_and_delete(client, place.raw.ready, count)


def steps(place: Place, count: int, *, at_once: int) -> float:
    """Steps recorded per second (check the owner, HSET, XADD in one script), of `at_once` tasks in one round trip."""
    with RawClient(place.url) as client:
        return limits.steps(client, place.raw, _FIELDS, count, at_once=at_once)


def add_message(client: RawClient, place: Place) -> None:
    """Add one message."""
    client.call("XADD", place.raw.ready, "*", *_FIELDS)


def take_message(client: RawClient, place: Place) -> bytes:
    """Become the owner of one message; returns its entry id."""
    return limits.take(client, place.raw.ready)


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
