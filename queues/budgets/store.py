"""Ledgers of budgets in Redis: what was spent, and by how much budgets were raised.

A charge has a nonce, under which it counts once, however often its call is repeated. The scripts say what is left if a
process dies: charge_budget.lua, raise_budget.lua, ask_for_budget.lua.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from ..defaults import nearest
from ..envelope import BudgetUse, readable_envelope
from ..errors import BudgetNotFound, DecryptionError, Refused, WrongType
from ..junk import report_once
from ..keys import BUDGET_PARTITIONS, LedgerKeys, Namespace, Partition
from ..limits.parked import parked_waiter, wake_parked
from ..runtime import RUNTIME
from ..transport.gateway import Gateway
from ..transport.pipelining import Argument
from ..transport.scripts import pairs, queue_script
from ..wording import iso_time
from .definition import UNITS, amount_text, budget_name, from_amount

KEPT_MS: Final = 400 * 86_400_000
"""Milliseconds for which a ledger without a window is kept after its last charge; as long as an open wait."""

MAX_LISTED: Final = 10_000
"""Most ledgers of one list."""

_NAMED: Final = 5
"""Keys of a budget that an error names."""

ASKER_LIFE: Final = 900.0
"""Seconds after which a task that waits for a budget must have looked again; else another one asks a person."""

_LABEL: Final = "budget key"
_BY: Final = "budget raise"

_CHARGE: Final = queue_script("charge_budget")
_RAISE: Final = queue_script("raise_budget")
_ASK: Final = queue_script("ask_for_budget")


class Standing(NamedTuple):
    """Amounts of a budget at one moment.

    spent, limits: amounts by unit; a limit with its raises. raises: number that grows with each raise, and differs
    between windows. notice: whether most of it is used, and the caller is the one to say so. ends_ms: milliseconds
    since the epoch at which its window ends, None for ever or before the first charge.
    """

    ledger: str
    spent: Mapping[str, int]
    limits: Mapping[str, int]
    raises: int
    notice: bool
    ends_ms: int | None

    @property
    def used_up(self) -> tuple[str, ...]:
        """The units of which nothing is left."""
        return tuple(unit for unit in self.limits if self.left(unit) <= 0)

    def left(self, unit: str) -> int:
        """Return what is left of a limited unit; less than 0 if more was spent."""
        return self.limits[unit] - self.spent.get(unit, 0)


class Ledger(NamedTuple):
    """A ledger for people.

    limits: with raises, as of the last charge. total: what was spent before the last reset. label: text of its key.
    at: milliseconds of the last charge. by: who raised it last. raises: as `Standing.raises`.
    """

    ledger: str
    label: str
    spent: Mapping[str, int]
    limits: Mapping[str, int]
    raised: Mapping[str, int]
    total: Mapping[str, int]
    at: int
    ends_ms: int | None
    asker: str
    by: str
    raises: int = 0

    @property
    def name(self) -> str:
        """Name of the budget; empty for that of a task."""
        return budget_name(self.ledger)

    @property
    def used_up(self) -> bool:
        """Whether nothing is left of one of its units."""
        return any(self.spent.get(unit, 0) >= limit for unit, limit in self.limits.items())

    def spent_text(self, unit: str) -> str:
        """Return what was spent of a unit: `$4.10 of $5.00 (82 %)`."""
        spent, limit = self.spent.get(unit, 0), self.limits.get(unit)
        text = amount_text(unit, spent, bare=True)
        if limit is not None:
            text += f" of {amount_text(unit, limit, bare=True)}" + (f" ({spent / limit:.0%})" if limit else "")
        if added := self.raised.get(unit):
            text += f", {amount_text(unit, added, bare=True)} of it added"
        if total := self.total.get(unit):
            text += f", and {amount_text(unit, total, bare=True)} before the last reset"
        return text

    def summary(self) -> dict[str, Any]:
        """Return it as JSON data: money in dollars, time in seconds."""
        found: dict[str, Any] = {"ledger": self.ledger, "name": self.name or None, "key": self.label or None}
        for kind in ("spent", "limits", "raised", "total"):
            amounts: Mapping[str, int] = getattr(self, kind)
            found[kind] = {unit: from_amount(unit, amount) for unit, amount in amounts.items()}
        times = {"at": self.at, "window_ends": self.ends_ms}
        found |= {name: iso_time(at) if at else None for name, at in times.items()}
        return found | {"asks": self.asker.rpartition("task:")[2] or None, "raised_by": self.by or None}


class BudgetStore:
    """Ledgers of a namespace."""

    def __init__(self, gateway: Gateway, namespace: Namespace) -> None:
        self._gateway = gateway
        self._namespace = namespace

    async def charge(self, uses: Sequence[BudgetUse], nonce: str, amounts: Mapping[str, int]) -> list[Standing]:
        """Charge amounts by unit to each ledger, once for a nonce; without a nonce only look.

        The calls share a round trip. One that fails leaves the others done: repeat it with the same nonce.

        Raises `QueueError`.
        """
        return list(await asyncio.gather(*(self._charge(use, nonce, amounts) for use in uses)))

    async def _charge(self, use: BudgetUse, nonce: str, amounts: Mapping[str, int]) -> Standing:
        keys = self._namespace.ledger(use.ledger)
        window = "" if use.window_ms is None else use.window_ms
        label = self._sealed(keys.place, use.ledger, _LABEL, use.label) if nonce and use.label else b""
        args: list[Argument] = [use.ledger, nonce, window, KEPT_MS, "1" if use.name else "", label]
        for unit in UNITS:
            args += (use.limits.get(unit, ""), amounts.get(unit, ""))
        reply = await self._gateway.run(_CHARGE, [keys.ledger, keys.charged, keys.named], args)
        numbers = [int(number) for number in reply[3:]]
        spent = {unit: numbers[2 * at] for at, unit in enumerate(UNITS)}
        raised = {unit: numbers[2 * at + 1] for at, unit in enumerate(UNITS)}
        limits = {unit: limit + raised[unit] for unit, limit in use.limits.items()}
        return Standing(use.ledger, spent, limits, int(reply[0]), reply[2] == b"1", int(reply[1]) if reply[1] else None)

    async def raise_(
        self, ledger: str, amounts: Mapping[str, int], *, number: int | None = None, by: str = "", again: bool = False
    ) -> bool:
        """Add amounts to a budget, and wake the tasks that wait for it. Return False if its number is another one.

        Args:
            number: `Standing.raises` as the caller has read it; None for whatever it is now.
            by: who does it.
            again: begin it again: nothing counts as spent, and former raises are forgotten.

        Raises:
            BudgetNotFound: nothing was charged to the ledger yet.
        """
        keys = self._namespace.ledger(ledger)
        sealed = self._sealed(keys.place, ledger, _BY, by)
        while True:
            known = await self._gateway.command("HGET", keys.ledger, "number") if number is None else number
            args: list[Argument] = [known or 0, RUNTIME.token(8), "1" if again else "", sealed]
            args += [amounts.get(unit, "") for unit in UNITS]
            reply = await self._gateway.run(_RAISE, [keys.ledger, keys.waiting], args)
            if reply[0] == -1:
                raise BudgetNotFound(f"nothing was charged to budget {ledger} yet")
            if reply[0] == 1:
                break
            if number is not None:
                return False
        await wake_parked(self._gateway, self._namespace, [waiter.decode("utf-8", "replace") for waiter in reply[2]])
        return True

    async def reset(self, ledger: str, *, by: str = "") -> bool:
        """Begin a budget again; return whether there was one."""
        try:
            return await self.raise_(ledger, {}, by=by, again=True)
        except BudgetNotFound:
            return False

    async def wait(self, ledger: str, partition: Partition, task_id: str, number: int) -> bool | None:
        """Let a task wait for a budget, until it has not called this for `ASKER_LIFE`.

        Return whether it is the one that asks a person; None if the budget was raised since the caller has read it.
        """
        keys, waiter = self._namespace.ledger(ledger), parked_waiter(partition, task_id)
        args: list[Argument] = [waiter, round(ASKER_LIFE * 1000), number]
        asks: int = await self._gateway.run(_ASK, [keys.ledger, keys.waiting], args)
        return None if asks < 0 else asks == 1

    async def keep(self, ledger: str, seconds: float) -> None:
        """Keep the ledger of a task that has ended for as long as its record, which later charges renew."""
        key, kept = self._namespace.ledger(ledger).ledger, round(seconds * 1000)
        if await self._gateway.command("PEXPIRE", key, kept):
            await self._gateway.pipeline([("HSET", key, "kept", kept), ("PEXPIRE", key, kept)])

    async def load(self, ledger: str) -> Ledger | None:
        """Return a ledger; None if nothing was charged to it yet, or it is of another type."""
        (found,) = await self._load([ledger])
        return found

    async def find(self, which: str) -> Ledger:
        """Return the ledger of a task, of a named budget without keys, or of `NAME:KEY`.

        Raises:
            BudgetNotFound: Nothing was charged to it yet, or it has several keys, which the text names.
        """
        found = await self.load(which)
        if found is not None:
            return found
        listed = await self.list_named()
        named = [ledger for ledger in listed if ledger.name == which]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(f"{ledger.ledger} ({ledger.label})" for ledger in named[:_NAMED])
            more = "" if len(named) <= _NAMED else f" and {len(named) - _NAMED} more, see 'perdure budget list {which}'"
            raise BudgetNotFound(f"budget {which!r} has {len(named)} keys: give one of {ids}{more}")
        names = sorted({ledger.name for ledger in listed})
        hint = nearest(which, names) or "; 'perdure budget list' lists named budgets"
        raise BudgetNotFound(f"nothing was charged to a budget {which!r} in namespace {self._namespace.name!r}{hint}")

    async def of_task(self, task_id: str, envelope: bytes | None) -> list[Ledger]:
        """Return the ledgers of a task, and of those that have spawned it, to which something was charged.

        envelope: as it is stored. Which named budgets the task has itself is only known to a worker.
        """
        read = readable_envelope(envelope)
        inherited = () if read is None else read.budgets
        found = await self._load(list(dict.fromkeys([task_id, *(use.ledger for use in inherited)])))
        return [ledger for ledger in found if ledger is not None]

    async def list_named(self, name: str | None = None, *, most: int = MAX_LISTED) -> list[Ledger]:
        """Return the ledgers of named budgets, or of one, the last charged first. most: largest number."""
        keys = [self._namespace.ledger_index(at) for at in range(BUDGET_PARTITIONS)]
        found = await self._gateway.pipeline_each([("ZRANGE", key, 0, -1, "WITHSCORES") for key in keys])
        listed: list[tuple[float, str]] = []
        for key, members in zip(keys, found, strict=True):
            if isinstance(members, WrongType):
                report_once(f"budgets are not listed: {key}: {members}")
                continue
            if isinstance(members, Refused):
                raise members
            ids = [member.decode("utf-8", "replace") for member in members[::2]]
            listed += zip(map(float, members[1::2]), ids, strict=True)
        wanted = [(at, one) for at, one in listed if budget_name(one) and name in (None, budget_name(one))]
        latest = [one for _, one in heapq.nlargest(most, wanted)]
        ledgers = [ledger for ledger in await self._load(latest) if ledger is not None]
        return sorted(ledgers, key=lambda ledger: (-ledger.at, ledger.ledger))

    async def _load(self, ledgers: Sequence[str]) -> list[Ledger | None]:
        if not ledgers:
            return []
        keys = [self._namespace.ledger(one) for one in ledgers]
        replies = await self._gateway.pipeline_each([("HGETALL", key.ledger) for key in keys])
        return [self._read(one, key, reply) for one, key, reply in zip(ledgers, keys, replies, strict=True)]

    def _read(self, ledger: str, keys: LedgerKeys, found: Any) -> Ledger | None:
        if isinstance(found, WrongType):
            report_once(f"a budget cannot be read: {keys.ledger}: {found}")
            return None
        if isinstance(found, Refused):
            raise found
        fields = pairs(found)
        if not fields:
            return None

        def amounts(kind: str) -> dict[str, int]:
            read = {unit: _number(fields.get(f"{kind}_{unit}".encode())) for unit in UNITS}
            return {unit: amount for unit, amount in read.items() if amount is not None}

        raised = amounts("raised")
        limits = {unit: limit + raised.get(unit, 0) for unit, limit in amounts("limit").items()}
        return Ledger(
            ledger,
            self._opened(keys.place, ledger, _LABEL, fields.get(b"label", b"")),
            amounts("spent"),
            limits,
            raised,
            amounts("total"),
            _number(fields.get(b"at")) or 0,
            _number(fields.get(b"ends")),
            fields.get(b"asker", b"").decode("utf-8", "replace"),
            self._opened(keys.place, ledger, _BY, fields.get(b"by", b"")),
            _number(fields.get(b"number")) or 0,
        )

    def _sealed(self, place: Partition, ledger: str, what: str, text: str) -> bytes:
        return self._gateway.encryptor.of(place, ledger).encrypt(what, text[:200].encode())

    def _opened(self, place: Partition, ledger: str, what: str, stored: bytes) -> str:
        if not stored:
            return ""
        try:
            return self._gateway.encryptor.of(place, ledger).decrypt(what, stored).decode("utf-8", "replace")
        except DecryptionError:
            return "(encrypted)"


def _number(value: bytes | None) -> int | None:
    """Return a stored amount; None for one that is missing, or that another program wrote."""
    return int(value) if value is not None and value.isdigit() and len(value) <= 16 else None
