"""Pauses by operators: rules that hold a whole queue, or the tasks of a name or with certain arguments.

The rules of a namespace are one hash. Workers read it with their registration, and when a notification says that it has
changed. A rule for a queue alone makes workers leave its partitions out: they read and claim nothing there, and admit
no task that waits for limits, while due tasks and schedules continue. Any other rule parks the tasks that it matches
before their handlers start, in the due set, until an operator removes the rule.

Each rule has a number that no other rule ever gets, and a partition has its paused tasks by the numbers of their rules.
So a task whose worker has parked it after the rule was removed is found by its number: see delivery/paused_tasks.py.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import orjson

from .argument_conditions import ArgumentCondition
from .compared_writes import write_compared
from .errors import PauseError, QueueError, WrongType
from .keys import Namespace, check_name
from .transport.gateway import Gateway
from .transport.scripts import milliseconds, pairs
from .wording import ago_text, short

MAX_RULES: Final = 100
"""Largest number of rules: workers read all of them with each registration."""

MAX_CONDITIONS: Final = 10
"""Most conditions of a rule."""

_TRIES: Final = 100
"""Changes by others that one call may meet."""

_KIND: Final = "pause"
"""Kind of encrypted data: a rule."""

_OWN: Final = (b"revision", b"token")
"""Fields of the hash that are no rules."""


@dataclass(frozen=True)
class PauseRule:
    """A pause.

    Attributes:
        queue: Only tasks of this queue; None for those of all queues.
        task: Only tasks with this name.
        where: Conditions on the arguments; all of them must be fulfilled.
        number: Revision of the rules that stored it.
        at: Milliseconds of Redis' clock.
        by, why: Who paused it, and the reason; may be empty.
    """

    queue: str | None = None
    task: str | None = None
    where: tuple[ArgumentCondition, ...] = ()
    number: int = 0
    at: int = 0
    by: str = ""
    why: str = ""

    @cached_property
    def id(self) -> str:
        """Name of the rule: the same for the same queue, task and conditions, in any order."""
        parts = [self.queue, self.task, sorted({str(condition) for condition in self.where})]
        return hashlib.blake2b(orjson.dumps(parts), digest_size=8).hexdigest()

    @property
    def whole_queue(self) -> bool:
        """Whether it holds a whole queue, so that workers read nothing from it."""
        return self.task is None and not self.where

    def names(self, queue: str, task: str) -> bool:
        """Return whether it may hold a task with this name on this queue, whatever the arguments."""
        return self.queue in (None, queue) and self.task in (None, task)

    @property
    def target(self) -> str:
        """The tasks that it holds, for people: `tasks 'report' of queue 'audit' with tenant=acme`."""
        if self.whole_queue:
            return f"queue {self.queue!r}"
        words = ["tasks"] if self.task is None else [f"tasks {self.task!r}"]
        words += [] if self.queue is None else [f"of queue {self.queue!r}"]
        words += [f"with {' and '.join(map(str, self.where))}"] if self.where else []
        return " ".join(words)

    @property
    def command(self) -> str:
        """The command that removes it."""
        words = ["perdure", "queue", "resume"]
        words += [self.queue] if self.queue is not None else []
        words += ["--task", self.task] if self.task is not None else []
        for condition in self.where:
            words += ["--where", str(condition)]
        return shlex.join(words)

    def origin(self, now: int) -> str:
        """Return who paused it, when and why, for the end of a sentence. now: milliseconds of Redis' clock."""
        text = f"by {short(self.by)}" if self.by else "by an operator"
        return f"{text} {ago_text(self.at, now)}" + (f" ({short(self.why)})" if self.why else "")

    def encode(self) -> bytes:
        shown = {"queue": self.queue, "task": self.task, "where": list(map(str, self.where))}
        return orjson.dumps(shown | {"at": self.at, "by": self.by[:200], "why": self.why[:2_000]})

    @classmethod
    def decode(cls, number: int, data: bytes) -> PauseRule:
        """Decode a stored rule. Raises `ValueError`, `LookupError`, `TypeError`."""
        form = orjson.loads(data)
        queue, task = form["queue"], form["task"]
        if queue is not None:
            check_name("queue", queue)
        where = tuple(ArgumentCondition.parse(str(text)) for text in form["where"])
        rule = cls(queue, None if task is None else str(task), where, number, int(form["at"]))
        if rule.queue is None and rule.whole_queue:
            raise ValueError("it names neither a queue nor tasks")
        return cls(rule.queue, rule.task, where, number, rule.at, str(form["by"]), str(form["why"]))

    def summary(self) -> dict[str, Any]:
        """Return the rule as plain data. at: milliseconds."""
        return {
            "queue": self.queue,
            "task": self.task,
            "where": [str(condition) for condition in self.where],
            "at": self.at,
            "by": self.by,
            "why": self.why,
        }


@dataclass(frozen=True)
class Pauses:
    """The rules of a namespace.

    Attributes:
        rules: In the order in which they were stored.
        revision: Number of changes so far; 0 if there never was a rule.
        problems: What cannot be read, by the name of the field.
        unread: Numbers of the rules that cannot be read.
    """

    rules: Sequence[PauseRule] = ()
    revision: int = 0
    problems: Mapping[str, str] = field(default_factory=dict)
    unread: Sequence[int] = ()

    @cached_property
    def queues(self) -> Mapping[str, PauseRule]:
        """The rules that hold a whole queue, by its name."""
        return {rule.queue: rule for rule in self.rules if rule.whole_queue and rule.queue is not None}

    @cached_property
    def of_tasks(self) -> Sequence[PauseRule]:
        """The rules that park tasks."""
        return [rule for rule in self.rules if not rule.whole_queue]

    def find(self, rule_id: str) -> PauseRule | None:
        return next((rule for rule in self.rules if rule.id == rule_id), None)

    def numbered(self, number: int) -> PauseRule | None:
        """Return the rule with a number; None without it."""
        return next((rule for rule in self.rules if rule.number == number), None)

    @classmethod
    def decode(cls, gateway: Gateway, namespace: Namespace, fields: Mapping[bytes, bytes]) -> Pauses:
        """Decode the stored hash. A field that another program wrote, or that needs another key, is a problem."""
        rules, problems, unread = [], {}, []
        for name, value in fields.items():
            if name in _OWN:
                continue
            number, _, data = value.partition(b" ")
            rule_id = name.decode("utf-8", "backslashreplace")
            try:
                if not number.isdigit():
                    raise ValueError("it has no number")
                plain = gateway.encryptor.of(namespace.pause_place, rule_id).decrypt(_KIND, data)
                rule = PauseRule.decode(int(number), plain)
                if rule.id != rule_id:
                    raise ValueError("it is stored under the name of another rule")
                rules.append(rule)
            except (QueueError, ValueError, LookupError, TypeError, AttributeError) as error:
                problems[rule_id] = f"could not read the pause: {error}"
                unread += [int(number)] if number.isdigit() and len(number) < _DIGITS else []
        revision = fields.get(b"revision", b"0")
        known = int(revision) if revision.isdigit() and len(revision) < _DIGITS else 0
        return cls(sorted(rules, key=lambda rule: rule.number), known, problems, unread)


_DIGITS: Final = 15


async def load_pauses(gateway: Gateway, namespace: Namespace) -> Pauses:
    """Return the rules. Raises `WrongType` if another program wrote their key."""
    return Pauses.decode(gateway, namespace, pairs(await gateway.command("HGETALL", namespace.pauses)))


class PauseStore:
    """Changes of the rules of a namespace."""

    def __init__(self, gateway: Gateway, namespace: Namespace) -> None:
        self._gateway = gateway
        self._namespace = namespace

    async def add(self, rule: PauseRule) -> tuple[PauseRule, bool]:
        """Store a rule; return it as it is stored, and whether this call has stored it. One that exists stays.

        Raises `PauseError` if there are too many rules.
        """
        for _ in range(_TRIES):
            found, now = await self._read()
            if (known := found.find(rule.id)) is not None:
                return known, False
            if len(found.rules) + len(found.problems) >= MAX_RULES:
                raise PauseError(
                    f"could not pause {rule.target}: there are {MAX_RULES} pauses already; end some, see "
                    "'perdure queue list'"
                )
            stored = PauseRule(rule.queue, rule.task, rule.where, found.revision + 1, now, rule.by, rule.why)
            cipher = self._gateway.encryptor.of(self._namespace.pause_place, rule.id)
            value = b"%d %b" % (stored.number, cipher.encrypt(_KIND, stored.encode()))
            if await self._write(found, rule.id, value):
                return stored, True
        raise PauseError(f"could not pause {rule.target}: others change the pauses all the time; try again")

    async def remove(self, rule: PauseRule) -> PauseRule | None:
        """Remove the rule with this queue, task and conditions, also if it cannot be read; return it as it was stored.

        None without such a rule. What it held is woken by `wake_paused`.
        """
        removed = None
        for _ in range(_TRIES):
            found, _ = await self._read()
            known = found.find(rule.id) or (rule if rule.id in found.problems else None)
            if known is None:
                return removed  # by this call, whose reply was lost, or by another one meanwhile
            removed = known
            if await self._write(found, rule.id, b""):
                return removed
        raise PauseError("could not resume: others change the pauses all the time; try again")

    async def _read(self) -> tuple[Pauses, int]:
        key = self._namespace.pauses
        try:
            found, time = await self._gateway.pipeline([("HGETALL", key), ("TIME",)], node_of=key)
        except WrongType:
            if not await self._gateway.set_keys_aside([key]):
                raise
            return await self._read()
        return Pauses.decode(self._gateway, self._namespace, pairs(found)), milliseconds(time)

    async def _write(self, found: Pauses, rule_id: str, value: bytes) -> bool:
        """Store a rule, or remove it, if nothing has changed since the rules were read. Return whether that was so."""
        changed = await write_compared(self._gateway, self._namespace.pauses, found.revision, {rule_id: value})
        if changed:
            with suppress(QueueError):  # a hint: workers read the rules with each registration
                await self._gateway.command("PUBLISH", self._namespace.pause_channel, "")
        return changed
