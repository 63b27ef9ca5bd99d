"""Filters of tasks, and conditions on their stored arguments."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic_core import from_json

from .argument_conditions import ArgumentCondition, all_match
from .errors import DecryptionError, LargeValueLost
from .keys import Partition, belongs_to
from .records import Record, State
from .security.secret_arguments import ANY, SecretPaths
from .transport.gateway import Gateway
from .transport.large_values import read_arguments


@dataclass(frozen=True, slots=True)
class TaskFilter:
    """Filter of tasks.

    Attributes:
        states: Any of them; empty for all.
        since, until: Bounds of the time of enqueueing, in milliseconds of Redis' clock.
        error: Text in the reason, the name or the message of the error, in any case.
        key: The ordering key of the task.
        tags: All of them.
        headers: All of them, with these values.
        where: Conditions on the arguments, all of them. They are read apart from the record: see `arguments_problem`.
        tenant: Only tasks of this tenant.
    """

    states: Collection[State] = ()
    task: str | None = None
    since: int | None = None
    until: int | None = None
    error: str | None = None
    key: str | None = None
    tags: Collection[str] = ()
    app: str | None = None
    where: Sequence[ArgumentCondition] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    tenant: str | None = None

    def matches(self, record: Record) -> bool:
        """Return whether a record matches, apart from its time and its arguments."""
        return (
            belongs_to(self.tenant, record.id)
            and (not self.states or record.state in self.states)
            and self.task in (None, record.task)
            and self.app in (None, record.app)
            and self.key in (None, record.key)
            and all(tag in record.tags for tag in self.tags)
            and all(record.headers.get(name) == value for name, value in self.headers.items())
            and (self.error is None or self.error.casefold() in _error_text(record))
        )

    def is_of_time(self, record: Record) -> bool:
        """Return whether a task was enqueued within the bounds."""
        at = record.enqueued_at or 0
        return (self.since is None or at >= self.since) and (self.until is None or at <= self.until)

    def form(self) -> dict[str, Any]:
        """Return the filter as JSON data, for `parse`."""
        found: dict[str, Any] = {
            name: value
            for name in ("task", "since", "until", "error", "key", "app", "tenant")
            if (value := getattr(self, name)) is not None
        }
        if self.states:
            found["states"] = sorted(self.states)
        if self.tags:
            found["tags"] = list(self.tags)
        if self.headers:
            found["headers"] = dict(self.headers)
        if self.where:
            found["where"] = [str(condition) for condition in self.where]
        return found

    @classmethod
    def parse(cls, form: Mapping[str, Any]) -> TaskFilter:
        """Return the filter of JSON data. Raises `ValueError`, `TypeError` for data of another form."""
        known = dict(form)
        states = frozenset(State(state) for state in known.pop("states", ()))
        where = tuple(ArgumentCondition.parse(str(given)) for given in known.pop("where", ()))
        return cls(states=states, tags=tuple(known.pop("tags", ())), where=where, **known)

    def at_most(self, until: int) -> TaskFilter:
        """Return this filter for tasks that were enqueued by a time, in milliseconds."""
        return replace(self, until=until if self.until is None else min(until, self.until))


def _error_text(record: Record) -> str:
    error = record.error or {}
    return f"{record.reason or ''} {error.get('error', '')}: {error.get('message', '')}".casefold()


async def arguments_match(
    gateway: Gateway,
    partition: Partition,
    task_id: str,
    task: str | None,
    stored: bytes | None,
    secrets: SecretPaths,
    conditions: Sequence[ArgumentCondition],
) -> bool:
    """Return whether the stored arguments of a task fulfil conditions. Nothing that is secret fulfils one.

    Args:
        secrets: Paths of its secret arguments, as its envelope has them.

    Raises:
        DecryptionError, LargeValueLost: The arguments cannot be read.
    """
    if not conditions:
        return True
    if stored is None or any(is_secret(condition, secrets) for condition in conditions):
        return False
    try:
        arguments = from_json(await read_arguments(gateway, partition, task_id, task or "?", secrets, stored))
    except (DecryptionError, LargeValueLost):
        raise
    except ValueError:  # no JSON: another program wrote it
        return False
    return isinstance(arguments, Mapping) and all_match(conditions, arguments)


def is_secret(condition: ArgumentCondition, secrets: SecretPaths) -> bool:
    """Return whether a condition is on a secret argument, on a part of one, or on what contains one."""
    return any(
        all(name in (ANY, part) for name, part in zip(secret, condition.path, strict=False)) for secret in secrets
    )
