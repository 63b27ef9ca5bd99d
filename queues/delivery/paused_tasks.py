"""Paused tasks: parked by a pause of an operator (see pauses.py), and woken when it has ended.

A partition has its paused tasks by the numbers of their rules. The script that parks a task cannot see the rules, which
are in another hash slot: a task that is parked after its rule was removed has a number that no rule has any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from ..errors import LeaseLost
from ..keys import Partition
from ..pauses import PauseRule, Pauses
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import queue_script
from .leases import Delivery
from .settlement import Counters

_AWAIT: Final = queue_script("await_resume")
_WAKE: Final = queue_script("wake_paused")

LOOK: Final = 3600.0
"""Seconds after which a parked task is looked at again in any case, such as if the paused tasks were lost."""

_TTL: Final = 2 * LOOK

_PAGE: Final = 500
"""Tasks that one script wakes."""

_PAGES: Final = 100
"""Scripts of one call for a partition that a worker makes: the other chores come next."""


class Woken(NamedTuple):
    """Outcome of `wake_paused`. taken: tasks that are paused no more. woken: those of them that are due now."""

    taken: int
    woken: int


async def await_resume(gateway: Gateway, delivery: Delivery, task_id: str, number: int, counters: Counters) -> None:
    """Park a task that a rule holds, and acknowledge its message.

    Args:
        number: Of the rule.

    Raises:
        LeaseLost: The lease has passed to another worker.
    """
    place = delivery.partition
    keys = [place.ready, place.record(task_id), place.due, place.nudge, place.control(task_id), place.paused]
    args: list[Argument] = [*delivery.fence, task_id, number, round(LOOK * 1000), round(_TTL * 1000)]
    args += ("attempts", counters.attempts, "crashes", counters.crashes, "returns", counters.requeues)
    if not await gateway.run(_AWAIT, keys, args):
        raise LeaseLost(task_id, "park")


async def wake_paused(gateway: Gateway, partition: Partition, pauses: Pauses, *, pages: int = _PAGES) -> Woken:
    """Make the tasks of a partition due whose rule is not among these, at most so many pages of them.

    The tasks of rules that are later than these stay: the caller does not know them.
    """
    numbers = sorted([*(rule.number for rule in pauses.of_tasks), *pauses.unread])
    keys = [partition.due, partition.paused, partition.nudge]
    taken = woken = 0
    for _ in range(pages):
        some, due = await gateway.run(_WAKE, keys, [_PAGE, pauses.revision, *numbers])
        taken, woken = taken + some, woken + due
        if some < _PAGE:
            break
    return Woken(taken, woken)


async def count_held(gateway: Gateway, partitions: Iterable[Partition], rules: Sequence[PauseRule]) -> dict[int, int]:
    """Return the number of tasks that each rule has parked, by its number."""
    places = list(partitions)
    asked = [(rule.number, place) for rule in rules for place in places]
    counts = await gateway.pipeline_each([("ZCOUNT", place.paused, number, number) for number, place in asked])
    found = dict.fromkeys((rule.number for rule in rules), 0)
    for (number, _), count in zip(asked, counts, strict=True):
        found[number] += count if isinstance(count, int) else 0
    return found
