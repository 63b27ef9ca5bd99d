"""Secret arguments by the published definitions of their tasks, for tasks whose own marks are missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ....deadletter.letters import DeadLetter
from ....queues.errors import PerdureError
from ....queues.producer import Producer
from ....queues.records import Record
from ....queues.security.secret_arguments import SecretPaths, schema_secrets

Shown = TypeVar("Shown", Record, DeadLetter)


async def mask_defined(producer: Producer) -> Callable[[Shown], Shown]:
    """Return a function that masks what the definitions of tasks mark, whatever the marks of a stored task say.

    A producer without the types of the task sets no marks, and without encryption a client can remove them.
    """
    known: dict[str, SecretPaths] = {}
    try:
        for task in (await producer.catalog()).all_versions:
            if found := schema_secrets(task.arguments):
                known[task.name] = tuple(dict.fromkeys([*known.get(task.name, ()), *found]))
    except PerdureError:  # a user that may not read the catalog, or damage there, hides no list
        pass

    def masked(shown: Shown) -> Shown:
        paths = known.get(shown.task or "")
        return replace(shown, masked=paths) if paths else shown

    return masked
