"""Suspects: tasks whose worker died. Any of them may be what killed it, so each is run alone until it is cleared.

They wait in the pending list under a name that is no worker's. Nothing is ever lost there: what nobody takes from it
is claimed, like everything a silent consumer holds, once a lease has passed.
"""

from __future__ import annotations

from typing import NamedTuple

from .errors import LeaseLost
from .gateway import Gateway
from .keys import GROUP, SUSPECTS, Partition
from .leases import Delivery
from .records import pairs
from .scripts import queue_script

__all__ = ["Suspect", "acquit", "set_aside", "take_suspect"]

_ASIDE = queue_script("aside")
_SUSPECT = queue_script("suspect")
_ACQUIT = queue_script("acquit")


class Suspect(NamedTuple):
    """What `take_suspect` found. delivery: None where nothing was to be run. more: whether others are waiting."""

    delivery: Delivery | None
    more: bool


async def set_aside(gateway: Gateway, delivery: Delivery, task_id: str) -> None:
    """Leave a suspect to a worker that runs it alone, at no cost. Raises `LeaseLost`."""
    partition = delivery.partition
    if not await gateway.run(_ASIDE, [partition.ready, partition.nudge], [*delivery.fence, SUSPECTS]):
        raise LeaseLost(task_id, "setting aside")


async def take_suspect(gateway: Gateway, partition: Partition, worker: str) -> Suspect:
    """Take the suspect that has waited longest in a partition.

    Raises `Unavailable` also where only the reply was lost: then a suspect may be this worker's, see `Consumer.adopt`.
    """
    # As text and not by its digest, for a digest the server does not know would have it asked again.
    ask = ("EVAL", _SUSPECT.source, 1, partition.ready, GROUP, worker, SUSPECTS)
    reply = await gateway.command(*ask, repeatable=False)
    if not reply:
        return Suspect(None, more=False)
    entry, count, fields, more = reply
    if entry is None:  # somebody deleted the message by hand
        return Suspect(None, more=bool(more))
    return Suspect(Delivery(partition, entry, worker, count, pairs(fields), claimed=True), more=bool(more))


async def acquit(gateway: Gateway, delivery: Delivery, task_id: str, crashes: int) -> None:
    """Clear a suspect that has recorded a new step. crashes: how many are counted by now. Raises `LeaseLost`."""
    partition = delivery.partition
    keys = [partition.ready, partition.record(task_id), partition.log(task_id)]
    if not await gateway.run(_ACQUIT, keys, [*delivery.fence, crashes]):
        raise LeaseLost(task_id, "clearing of suspicion")
