"""Masking of the arguments that the published definitions of tasks mark as secret."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ..deadletter.letters import DeadLetter
from ..queues.errors import PerdureError
from ..queues.producer import Producer
from ..queues.records import Record
from ..queues.security.secret_arguments import SecretPaths, schema_secrets

Shown = TypeVar("Shown", Record, DeadLetter)


async def defined_secrets(producer: Producer) -> dict[str, SecretPaths]:
    """Return the secret arguments by the name of the task, of all versions that workers have published.

    Nothing, if this user may not read the catalog, or another program has damaged it.
    """
    known: dict[str, SecretPaths] = {}
    try:
        for task in (await producer.catalog()).all_versions:
            if found := schema_secrets(task.arguments):
                known[task.name] = tuple(dict.fromkeys([*known.get(task.name, ()), *found]))
    except PerdureError:  # it hides no list
        pass
    return known


async def mask_defined(producer: Producer) -> Callable[[Shown], Shown]:
    """Return a function that masks what the definitions of tasks mark, whatever the marks of a stored task say.

    A producer without the types of the task sets no marks, and without encryption a client can remove them.
    """
    known = await defined_secrets(producer)

    def masked(shown: Shown) -> Shown:
        paths = known.get(shown.task or "")
        return replace(shown, masked=paths) if paths else shown

    return masked
