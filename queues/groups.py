"""Groups: tasks that are enqueued together, whose results are the first argument of another task, the callback.

Only the callback is enqueued. Its arguments hold the messages of the tasks of the group; its first run spawns them as
its children, is parked until they have ended, and calls its handler with their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import orjson

from .envelope import EnvelopeTemplate, LimitUse, TaskMessage, check_task_id, encode_arguments
from .partitions.route import spread

GroupErrors: TypeAlias = Literal["raise", "wait"]
"""Effect of a task of a group that fails: the callback fails as well, or waits for the replay of the task."""

DEFAULT_GROUP_LIMIT: Final = 50
"""Tasks of a group that are open at once."""

MAX_GROUP: Final = 100_000
"""Tasks of one group."""


class GroupItem(NamedTuple):
    """One task of a group. data: its arguments, JSON. key: its ordering key. limits: their uses."""

    data: bytes
    key: str | None = None
    limits: tuple[LimitUse, ...] = ()


class Group(NamedTuple):
    """The tasks of a group, which differ in their arguments and keys. envelope: as that of one task, without its id."""

    envelope: Mapping[str, Any]
    queue: str
    items: Sequence[GroupItem]
    limit: int
    errors: GroupErrors
    arguments: Mapping[str, Any]
    """Further arguments of the callback, by name."""

    def message(
        self, number: int, task_id: str, headers: Mapping[str, str], inherited: Mapping[str, Any]
    ) -> TaskMessage:
        """Return the message of a task of the group. headers, inherited: what it has from the callback."""
        data, key, limits = self.items[number]
        merged = {**headers, **self.envelope.get("headers", {})}
        form = {**self.envelope, "id": check_task_id(task_id), **inherited}
        if merged:
            form["headers"] = merged
        if key is not None:
            form["key"] = key
        place = spread(task_id if key is None else key)
        return TaskMessage(task_id, orjson.dumps(form), data, place, own_id=True).with_limits(limits)


def check_group(items: Sequence[Any], limit: object, errors: object) -> None:
    """Raise `ValueError` if a group cannot be enqueued."""
    if type(limit) is not int or limit < 1:
        raise ValueError(f"limit must be a whole number of at least 1, got {limit!r}")
    if errors not in ("raise", "wait"):
        raise ValueError(f"errors must be 'raise' or 'wait', got {errors!r}")
    if len(items) > MAX_GROUP:
        raise ValueError(f"a group can have at most {MAX_GROUP:,} tasks, got {len(items):,}")


def encode_group(
    form: EnvelopeTemplate,
    queue: str,
    items: Sequence[GroupItem],
    *,
    limit: int,
    errors: GroupErrors,
    arguments: Mapping[str, Any],
) -> bytes:
    """Return the arguments of the callback of a group. form: of its tasks. Raises `TypeError`, `ValueError`."""
    rest, secrets = encode_arguments(arguments)
    if secrets:
        raise ValueError("the arguments of the callback of a group cannot hold secrets")
    head = orjson.loads(form.message(b"{}", task_id="group").envelope)
    del head["id"]
    listed: list[list[Any]] = [[item.data.decode(), item.key] for item in items]
    for fields, item in zip(listed, items, strict=True):
        if item.limits:
            fields.append([list(use) for use in item.limits])
    named = {"envelope": head, "queue": queue, "limit": limit, "errors": errors, "items": listed}
    return orjson.dumps({"group": named, "arguments": orjson.loads(rest)})


def decode_group(data: bytes) -> Group:
    """Return a group from the arguments of its callback. Raises `ValueError`."""
    try:
        found = orjson.loads(data)
        named = found["group"]
        items = [
            GroupItem(item.encode(), key, tuple(LimitUse(*use) for uses in limits for use in uses))
            for item, key, *limits in named["items"]
        ]
        return Group(named["envelope"], named["queue"], items, named["limit"], named["errors"], found["arguments"])
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a group: {error!r}") from None
