"""The limits of one task, and their uses by a call: what an envelope says of them.

The app that enqueues a task, a producer that has read the catalog and the command line derive keys and costs from the
arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from pydantic_core import from_json

from ..argument_keys import KeyProblem, named_values, returned_values
from ..durations import to_seconds
from ..envelope import LimitUse, TaskMessage
from ..errors import InvalidLimitUse
from .definition import Limit, LimitCost, Rate, check_cost, check_limits, key_digest

Costs = Mapping[str, int]
"""Costs of a call, by the names of limits."""


class UseOfLimit(NamedTuple):
    """A limit with the values that make the key of a call, None without keys."""

    use: LimitUse
    values: Sequence[Any] | None


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """The limits of one task, with what each call costs there.

    defaults: those of its arguments, as JSON data, where the producer knows them.
    """

    limits: tuple[LimitCost, ...]
    task: str
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, task: str, published: Mapping[str, Any]) -> TaskLimits:
        """Return the limits that workers have published for a task. Raises `ValueError`, `TypeError`, `LookupError`."""
        found, defaults = [], published.get("defaults")
        for fields in published["limits"]:
            cost = Rate(**fields["cost"]) if fields.get("cost") else None
            given: dict[str, Any] = {"by": fields.get("by"), "cost": cost, "over": fields.get("over", "wait")}
            given |= {"while_parked": bool(fields.get("while_parked"))}
            if fields.get("ordered"):
                given |= {"ordered": True, "running": 1}  # as many as the published definition says
            found.append(LimitCost(Limit(fields["name"], **given), _units(fields["name"], fields["units"], cost)))
        return cls(check_limits(found), task, defaults if isinstance(defaults, dict) else {})

    def published(self) -> dict[str, Any]:
        """Return them as JSON data, for the catalog of tasks. function: whether a function makes the key."""
        shown: list[dict[str, Any]] = []
        for limit, units in self.limits:
            fields: dict[str, Any] = {"name": limit.name, "units": units, "function": callable(limit.by)}
            fields |= {"by": None if callable(limit.by) else limit.by, "over": limit.over}
            fields |= {"ordered": limit.ordered, "while_parked": limit.while_parked, "cost": None}
            if (cost := limit.rates[1]) is not None:
                fields["cost"] = {"count": cost.count, "per": to_seconds(cost.per), "burst": cost.burst}
            shown.append(fields)
        return {"limits": shown, "defaults": dict(self.defaults)}

    @property
    def keyed(self) -> bool:
        """Whether the arguments of a call matter."""
        return any(limit.by is not None for limit, _ in self.limits)

    def limited(
        self, message: TaskMessage, costs: Costs | None = None, arguments: Mapping[str, Any] | None = None
    ) -> TaskMessage:
        """Return a message that is not encrypted yet with its uses. Raises `InvalidLimitUse`.

        Args:
            costs: those of the call.
            arguments: in place of those of the message.
        """
        given: Mapping[str, Any] = arguments or {}
        secrets: set[str] = set()
        if arguments is None and self.keyed:
            secrets = {path[0] for path in orjson.loads(message.envelope).get("secrets", ()) if path}
            given = from_json(message.arguments)  # which keeps whole numbers of any size
        limited = message.with_limits(tuple(use for use, _ in self.uses(given, secrets, costs)))
        if limited.ordered and message.number is not None and b'"key":' in message.envelope:
            self._check_key(message)
        return limited

    def _check_key(self, message: TaskMessage) -> None:
        """Raise `InvalidLimitUse` for a message with an ordering key: its tasks are in the partition of another key."""
        if (key := orjson.loads(message.envelope).get("key")) is not None:
            (name,) = (limit.name for limit, _ in self.limits if limit.ordered)
            raise InvalidLimitUse(
                f"task {self.task!r}: key must not be given beside limit {name!r}, which is ordered, got {key!r}: the "
                "limit keeps the order of the tasks of its own key"
            )

    def uses(self, given: Mapping[str, Any], secrets: Collection[str], costs: Costs | None = None) -> list[UseOfLimit]:
        """Return the uses by a call with these arguments, as JSON data. secrets: names of those that hold secrets.

        Raises `InvalidLimitUse`.
        """
        self.check_costs(costs or {})
        arguments = {**self.defaults, **given} if self.defaults else given
        found = []
        for limit, units in self.limits:
            values = self._values(limit, arguments, secrets)
            cost = units if not costs else costs.get(limit.name, units)
            found.append(UseOfLimit(LimitUse(limit.name, key_digest(limit.name, values), cost, limit.flags), values))
        return found

    def uses_of(self, given: Mapping[str, Any], costs: Costs | None = None) -> tuple[LimitUse, ...]:
        """Return the uses by a call whose arguments hold no secrets. Raises `InvalidLimitUse`."""
        return tuple(use for use, _ in self.uses(given, (), costs))

    def check_costs(self, costs: Costs) -> None:
        """Raise `InvalidLimitUse` for costs of a call that its limits do not have, or never let pass."""
        known = {limit.name: limit for limit, _ in self.limits}
        for name, cost in costs.items():
            if name not in known:
                names = ", ".join(known) or "none"
                raise InvalidLimitUse(f"task {self.task!r}: costs must name limits of the task, {names}; got {name!r}")
            try:
                check_cost(name, cost, known[name].rates[1])
            except ValueError as error:
                raise InvalidLimitUse(f"task {self.task!r}: {error}") from None

    def _values(self, limit: Limit, arguments: Mapping[str, Any], secrets: Collection[str]) -> list[Any] | None:
        if (by := limit.by) is None:
            return None
        try:
            if callable(by):
                return returned_values(by, arguments)
            names = (by,) if isinstance(by, str) else by
            return list(named_values(names, arguments, secrets).values())
        except KeyProblem as problem:
            raise InvalidLimitUse(f"task {self.task!r}: key of limit {limit.name!r}: {problem}") from None


def _units(name: str, given: object, rate: Rate | None) -> int:
    return 1 if rate is None else check_cost(name, given, rate)
