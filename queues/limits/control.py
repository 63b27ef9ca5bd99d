"""Changes of limits by operators: numbers in place of the defined ones, holds, releases; and notes of who did what.

What an operator sets is stored beside the definition that workers publish, and stays until it is reset, also when
workers start again with other code. Each change leaves a note in the audit of the namespace, those of breakers as well.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import orjson

from ..durations import parse_duration
from ..envelope import MAX_COST, LimitUse, plain_data
from ..errors import ChangedMeanwhile, QueueError, WrongType
from ..keys import Namespace
from ..security.encryption import TaskCipher
from ..transport.gateway import Gateway
from ..transport.pipelining import Command
from ..transport.scripts import queue_script
from ..wording import counted, duration
from .definition import MAX_COUNT, Breaker, Rate, parse_rate
from .store import BreakerChange, LimitStore, Released, ReleaseRequest, parse_member

_SET: Final = queue_script("set_limit")

NOTES: Final = 1_000
"""Number of notes that are kept, of all limits."""

_NOTES_TTL_MS: Final = 365 * 86_400_000
"""TTL of the notes, from the last one on."""

_RECENT: Final = 100
"""Notes among which the last one of a breaker is looked for."""

_BREAKER: Final = "breaker"
"""First word of the notes of breakers."""

_NOTE: Final = "note"
"""Kind of encrypted data: who changed what, and why."""

NONE: Final = "none"
"""Value of a setting for no such number."""

_ABSENT: Final = "-"
"""Stored value for no such number."""

MAX_HOLD: Final = 366 * 86_400.0
"""Seconds of the longest hold."""

SETTINGS: Final[Mapping[str, Sequence[str]]] = {
    "total": ("total",),
    "running": ("running",),
    "rate": ("interval", "burst"),
    "cost": ("cost_interval", "cost_burst"),
    "burst": ("burst",),
    "errors": ("errors",),
    "calls": ("calls",),
    "window": ("window",),
    "open": ("open",),
}
"""Settings that operators may change, with the stored fields of each."""

_OF_A_BREAKER: Final = {"errors": 0.5, "calls": 20, "window": 60_000, "open": 30_000}
"""Defaults of the fields of a breaker, as `Breaker` has them."""


class LimitNote(NamedTuple):
    """Note of a change. at: milliseconds of Redis' clock. by: who did it; empty if that is not known."""

    at: int
    limit: str
    by: str
    what: str
    why: str = ""


def parse_hold(text: str | float) -> float:
    """Return the seconds of a hold that a person wrote: `90`, `15m`, `2h`. Raises `ValueError`."""
    seconds = parse_duration(text, positive=True)
    if seconds > MAX_HOLD:
        raise ValueError(f"must be at most {duration(MAX_HOLD, whole=True)}, got {text!r}")
    return seconds


def read_setting(name: str, text: str) -> dict[str, str]:
    """Return the stored fields of a setting and their values; empty values for the ones of the code.

    Raises `ValueError`; its text is the end of a sentence that starts with the name of the setting.
    """
    if name not in SETTINGS:
        raise ValueError(f"must be one of {', '.join(SETTINGS)}")
    text = text.strip()
    if text in ("", NONE):
        return dict.fromkeys(SETTINGS[name], _ABSENT if text else "")
    if name in ("rate", "cost"):
        return dict(zip(SETTINGS[name], _rate_fields(parse_rate(text)), strict=True))
    if name in ("window", "open"):
        return {name: str(max(1, round(parse_duration(text, positive=True) * 1000)))}
    if name == "errors":
        return {name: repr(_share(text))}
    least, most = (0, MAX_COUNT) if name in ("total", "running") else (1, MAX_COST if name == "burst" else MAX_COUNT)
    digits = text.replace("_", "")
    if not (digits.isascii() and digits.isdigit() and least <= int(digits) <= most):
        raise ValueError(f"must be a whole number from {least} to {most:,}, or {NONE}, got {text!r}")
    return {name: str(int(digits))}


def _rate_fields(rate: Rate) -> tuple[str, str]:
    return f"{rate.interval_ms:.17g}", str(rate.at_once)


def _share(text: str) -> float:
    try:
        return Breaker(errors=float(text)).errors
    except ValueError:
        raise ValueError(f"must be a share, more than 0 and at most 1, or {NONE}, got {text!r}") from None


def check_settings(
    name: str, defined: Mapping[str, str], overrides: Mapping[str, str], fields: Mapping[str, str]
) -> dict[str, str]:
    """Return the fields to store for new ones of a limit.

    Args:
        defined: What workers have published.
        overrides: What operators have set before.

    Raises `ValueError` if the numbers contradict each other.
    """
    found = dict(fields)
    if "running" in found and not defined.get("by"):
        if found["running"] and found.get("total"):
            raise ValueError(f"limit {name!r} has no keys, so that total and running mean the same: give total")
        # as a definition without `by` is published
        found |= {"total": found.get("total") or found["running"], "running": ""}
    stored = {**defined, **overrides, **found}
    stored = {field: value or defined.get(field, "") for field, value in stored.items()}
    total, running = _count(stored.get("total")), _count(stored.get("running"))
    if total and running is not None and running > total:  # a total of 0 lets nothing start
        raise ValueError(f"running of limit {name!r} must be at most total, got {running} of {total}")
    for interval, burst, setting in (("interval", "burst", "rate"), ("cost_interval", "cost_burst", "cost")):
        if found.get(burst, "") not in ("", _ABSENT) and stored.get(interval, "") in ("", _ABSENT):
            raise ValueError(f"burst of limit {name!r} must go with a {setting}: set {setting} as well")
    if stored.get("errors", "") not in ("", _ABSENT):
        for field, default in _OF_A_BREAKER.items():
            if stored.get(field, "") in ("", _ABSENT):
                found[field] = str(default)
    return found


def _count(value: str | None) -> int | None:
    return int(value) if value and value.isascii() and value.isdigit() else None


class LimitControl:
    """Changes of one limit by an operator.

    Args:
        by: Who does it; kept with each change.
    """

    def __init__(self, gateway: Gateway, namespace: Namespace, name: str, *, by: str = "") -> None:
        self._gateway = gateway
        self._namespace = namespace
        self._name = name
        self._by = by

    async def set(self, fields: Mapping[str, str], what: str, why: str = "", *, revision: int | None = None) -> None:
        """Store fields in place of those of the definition, see `read_setting`.

        Args:
            what: The change, for people.
            revision: `LimitView.revision` as the caller has read it; None for whatever it is now.

        Raises:
            ChangedMeanwhile: The revision is another one.
        """
        await self._change(what, why, fields=fields, revision=revision)

    async def hold(self, seconds: float, why: str = "") -> int:
        """Let nothing start for some seconds; return until when, in ms of Redis' clock. A later time stays."""
        return await self._change(f"hold for {duration(seconds)}", why, hold_ms=round(seconds * 1000))

    async def release(self, why: str = "") -> None:
        """End every hold, and close the breaker."""
        await self._change("release", why, release=True)

    async def release_task(self, task_id: str, why: str = "") -> Released | None:
        """Take the tokens of a task away, in the state that they have now; None if it holds none.

        A run that still works is stopped at its next renewal, unless there is room for it.
        """
        requests = await self._tokens(task_id)
        if not requests:
            return None
        store = LimitStore(self._gateway, self._namespace)
        released = await store.release(requests)
        await self._change(f"release {counted(len(requests), 'token')} of task {task_id}", why)
        return released

    async def _tokens(self, task_id: str) -> list[ReleaseRequest]:
        found: dict[str, ReleaseRequest] = {}
        cursor = b"0"
        while True:
            cursor, page = await self._gateway.command(
                "ZSCAN", self._namespace.limits.holders(self._name), cursor, "MATCH", f"*/{task_id}/*", "COUNT", 1000
            )
            for entry in page[::2]:
                key, _, member = entry.decode("utf-8", "replace").partition("/")
                place = parse_member(member)
                if place is not None and place.task_id == task_id:
                    found[member] = ReleaseRequest(member, [LimitUse(self._name, key)])
            if cursor == b"0":
                return list(found.values())

    async def _change(
        self,
        what: str,
        why: str,
        *,
        fields: Mapping[str, str] | None = None,
        hold_ms: int = 0,
        release: bool = False,
        revision: int | None = None,
    ) -> int:
        keys, token = self._namespace.limits, secrets.token_hex(8)
        note = _encode_note(self._gateway, self._namespace, self._name, self._by, what, why)
        changed = [text for pair in (fields or {}).items() for text in pair]
        while True:
            try:
                last = revision
                if last is None:
                    last = await self._gateway.command("HGET", keys.control(self._name), "change")
                args = [self._name, last or 0, token, hold_ms, "1" if release else "", NOTES, note, *changed]
                stored, until = await self._gateway.run(_SET, [keys.clock], args)
            except WrongType:
                if not await self._gateway.set_keys_aside(
                    [keys.control(self._name), keys.limit(self._name), keys.audit]
                ):
                    raise
                continue
            if stored:
                return int(until)
            if revision is not None:
                raise await self._changed()

    async def _changed(self) -> ChangedMeanwhile:
        """Return the error of a revision that is not the stored one, with the last change."""
        notes = await read_notes(self._gateway, self._namespace, self._name, most=1)
        what = f": {notes[0].by or 'an operator'}: {notes[0].what}" if notes else ""
        return ChangedMeanwhile(
            f"could not change limit {self._name!r}: it was changed since you have read it{what}; look at it again"
        )


async def note_breaker(gateway: Gateway, namespace: Namespace, changes: Sequence[BreakerChange]) -> None:
    """Note in the audit that breakers opened or closed. A worker has logged it, so a failure is no error.

    A breaker whose probes fail opens again and again, and is noted once.
    """
    for change in changes:
        what = describe_change(change)
        with suppress(QueueError):
            known = [note.what for note in await read_notes(gateway, namespace, change.limit, scan=_RECENT)]
            last = next((text for text in known if text.startswith(_BREAKER)), "")
            if not (change.state == "open" and last.startswith(f"{_BREAKER} opened")):
                note = _encode_note(gateway, namespace, change.limit, "", what, "")
                entry: Command = ("XADD", namespace.limits.audit, "MAXLEN", "~", NOTES, "*", "limit", change.limit)
                await gateway.pipeline([(*entry, "note", note), ("PEXPIRE", namespace.limits.audit, _NOTES_TTL_MS)])


def describe_change(change: BreakerChange) -> str:
    """Return a change of a breaker as a phrase without its limit."""
    match change.state:
        case "open":
            return f"{_BREAKER} opened: {change.failed} of {counted(change.calls, 'call')} failed"
        case "half-open":
            return f"{_BREAKER} half-open: one task is the probe"
    return f"{_BREAKER} closed: its probe succeeded"


async def read_notes(
    gateway: Gateway, namespace: Namespace, limit: str | None = None, most: int = 20, scan: int = NOTES * 2
) -> list[LimitNote]:
    """Return the last notes, the newest first; one that cannot be read says so.

    Args:
        limit: Only those of this limit.
        scan: Largest number of notes that are read.
    """
    found: list[LimitNote] = []
    for entry, flat in await gateway.command("XREVRANGE", namespace.limits.audit, "+", "-", "COUNT", scan):
        fields = dict(zip(flat[::2], flat[1::2], strict=False))
        name = fields.get(b"limit", b"").decode("utf-8", "replace")
        if limit in (None, name) and len(found) < most:
            at = int(entry.partition(b"-")[0])
            found.append(_decode_note(gateway, namespace, at, name, fields.get(b"note", b"")))
    return found


def _cipher(gateway: Gateway, namespace: Namespace, limit: str) -> TaskCipher:
    return gateway.encryptor.of(namespace.limits.place, f"control:{limit}")


def _encode_note(gateway: Gateway, namespace: Namespace, limit: str, by: str, what: str, why: str) -> bytes:
    note: dict[str, Any] = {"by": by[:200], "what": what[:500], "why": why[:2_000]}
    return _cipher(gateway, namespace, limit).encrypt(_NOTE, orjson.dumps(note))


def _decode_note(gateway: Gateway, namespace: Namespace, at: int, limit: str, data: bytes) -> LimitNote:
    try:
        fields = plain_data(_cipher(gateway, namespace, limit).decrypt(_NOTE, data))
        return LimitNote(at, limit, str(fields["by"]), str(fields["what"]), str(fields["why"]))
    except (QueueError, ValueError, LookupError, TypeError) as error:
        return LimitNote(at, limit, "", f"(could not be read: {error})")
