"""Arguments that the published definitions of tasks mark as secret: they are masked, and no filter finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from ..deadletter.letters import DeadLetter
from ..queues.argument_conditions import ArgumentCondition
from ..queues.errors import PerdureError
from ..queues.producer import Producer
from ..queues.records import Record
from ..queues.security.secret_arguments import SecretPaths, schema_secrets
from ..queues.task_filter import is_secret

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


async def check_conditions(producer: Producer, where: Sequence[ArgumentCondition], task: str | None) -> None:
    """Refuse conditions on arguments that the catalog marks as secret. task: the only task that they are for.

    Raises:
        ValueError: A condition is on a secret argument.
    """
    for name, paths in (await defined_secrets(producer)).items() if where else ():
        for condition in where:
            if task in (None, name) and is_secret(condition, paths):
                argument = ".".join(condition.path)
                other = "" if task is not None else ", or name another task"
                raise ValueError(f"argument {argument!r} of task {name!r} is secret: leave the condition out{other}")
