"""Explanation of a task: why it is in its state, and what happens next.

| module | what it holds |
|---|---|
| `facts` | what is read of a task, its workers and its queue |
| `limited_task` | what a task in the waiting list of its limits waits for |
| `sentences` | a pure function from facts to an `Explanation` |

Before a change: an explanation is read by people in trouble. It states what Redis says, and nothing that it does not.
"""

from __future__ import annotations

from ..keys import Partition
from ..transport.gateway import Gateway
from .facts import read_facts
from .sentences import Explanation, explain_facts


async def explain_task(gateway: Gateway, partition: Partition, task_id: str) -> Explanation | None:
    """Return the explanation of a task, None if there is no record of it."""
    facts = await read_facts(gateway, partition, task_id)
    return None if facts is None else explain_facts(facts)
