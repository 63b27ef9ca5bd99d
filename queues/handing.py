"""Storing the task that goes on where another has handed on: like enqueuing, with the handoff in its checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .envelope import Envelope
from .errors import HandOffRefused
from .gateway import Gateway
from .keys import Namespace, Partition
from .routes import spread
from .scripts import queue_script
from .sealing import arguments_of
from .way import Way

__all__ = ["MOST_HAND_OFFS", "Successor", "hand_on"]

_HAND: Final = queue_script("hand")

MOST_HAND_OFFS: Final = 100
"""How often a task may be handed on, from one to the next."""


@dataclass(frozen=True, slots=True)
class Successor:
    """The task that goes on. arguments: JSON. handoff: the field of the checkpoint that it finds, and its value.

    source: the task that hands on, and a token of this one time.
    """

    envelope: Envelope
    queue: str
    arguments: bytes
    handoff: tuple[str, bytes]
    source: str


async def hand_on(gateway: Gateway, namespace: Namespace, successor: Successor) -> Partition:
    """Store the task; returns where it is. May be asked again: one that is stored stays as it is by now.

    Raises `HandOffRefused` where its id is another task's.
    """
    task_id, number = successor.envelope.id, spread(successor.envelope.id)
    name, value = successor.handoff
    seal = gateway.sealer.of(namespace.partition(successor.queue), task_id)
    args = (
        successor.envelope.encode(),
        seal.close(arguments_of(successor.envelope.task), successor.arguments),
        successor.source,
        f"s:{name}",
        seal.close(f"s:{name}", value),
    )
    way = Way(gateway, namespace, successor.queue)
    await way.look()
    while True:
        for former in way.former(number):  # nothing new comes into closed partitions, so looking is enough
            if await gateway.command("HGET", former.record(task_id), "handed_from") == successor.source.encode():
                return former
        partition = way.partition(number)
        keys = [partition.ready, partition.closed, partition.record(task_id), partition.steps(task_id)]
        answer = await gateway.run(_HAND, keys, args)
        if answer >= 0:
            return partition
        if answer == -2:
            raise HandOffRefused(f"the task cannot be handed on: {task_id}, as which it would go on, is another task")
        await way.refused([partition])
