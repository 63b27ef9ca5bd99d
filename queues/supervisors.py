"""What supervisors keep in Redis: that they are there, how often their workers crashed lately, and that they paused.

Counter and pause go by a name that a supervisor keeps when it is started again, so that no crash loop escapes by that.
All times are Redis' own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

import orjson

from .keys import Namespace
from .transport import Gateway, pairs, queue_script

__all__ = [
    "ChildInfo",
    "SupervisorInfo",
    "SupervisorState",
    "count_crash",
    "list_supervisors",
    "paused_supervisors",
    "resume_supervisor",
    "supervise",
    "withdraw_supervisor",
]

_TALLY = queue_script("count_crash")
_SUPERVISE = queue_script("register_supervisor")
_RESUME = queue_script("unpause_supervisor")

_REMEMBERED_MS: Final = 30 * 24 * 3600 * 1000
"""Milliseconds for which a pause is kept after its supervisor was last seen."""


class SupervisorState(NamedTuple):
    """Where a supervisor stands. crashes: of its workers within the window. paused_since: milliseconds of Redis' clock,
    0 where it is not paused. why: the crash that was one too many.
    """

    crashes: int
    paused_since: int
    why: str

    @property
    def paused(self) -> bool:
        return self.paused_since > 0


@dataclass(frozen=True, slots=True)
class ChildInfo:
    """One child of a supervisor. role: worker or isolated. worker: its id, empty while it starts."""

    pid: int
    role: str
    state: str
    worker: str = ""


@dataclass(frozen=True, slots=True)
class SupervisorInfo:
    """One supervisor. name: by which its crashes are counted and by which it is resumed. processes: how many children
    it is to have. started, paused_since: milliseconds of Redis' clock. seen: seconds since its last sign of life; None
    where it is gone, and only its pause is left.

    Supervisors of several versions read each other's announcements: a field that is added here needs a default.
    """

    id: str
    name: str
    app: str = ""
    host: str = ""
    pid: int = 0
    version: str = ""
    processes: int = 0
    children: tuple[ChildInfo, ...] = ()
    started: int = 0
    seen: float | None = None
    crashes: int = 0
    window: float = 0.0
    paused_since: int = 0
    why: str = ""

    def summary(self) -> dict[str, Any]:
        """The supervisor as plain data, for programs."""
        return asdict(self) | {"paused_since": self.paused_since or None, "why": self.why or None}


async def supervise(gateway: Gateway, namespace: Namespace, info: SupervisorInfo, ttl: float) -> SupervisorState:
    """Say that the supervisor is there, and hear where it stands. ttl: seconds after which it counts as gone."""
    keys = [
        namespace.supervisors,
        namespace.supervisor(info.id),
        namespace.crashes(info.name),
        namespace.paused,
        namespace.pause(info.name),
    ]
    told = orjson.dumps({name: value for name, value in asdict(info).items() if name in _TOLD})
    times = (round(ttl * 1000), round(info.window * 1000), _REMEMBERED_MS)
    return _standing(await gateway.run(_SUPERVISE, keys, [info.id, info.name, told, *times]))


async def withdraw_supervisor(gateway: Gateway, namespace: Namespace, supervisor_id: str) -> None:
    """Say that the supervisor has ended. Its crashes, and its pause, stay."""
    await gateway.pipeline(
        [("DEL", namespace.supervisor(supervisor_id)), ("ZREM", namespace.supervisors, supervisor_id)]
    )


async def count_crash(
    gateway: Gateway, namespace: Namespace, supervisor: str, worker: str, *, why: str, threshold: int, window: float
) -> SupervisorState:
    """Count the crash of one worker, once however often it is told. threshold: with more crashes than that within
    `window` seconds the supervisor is paused from now on.
    """
    args = (supervisor, worker, threshold, max(1, round(window * 1000)), _REMEMBERED_MS, why)
    return _standing(await gateway.run(_TALLY, _keys_of_pause(namespace, supervisor), args))


async def resume_supervisor(gateway: Gateway, namespace: Namespace, supervisor: str) -> bool:
    """Lift a supervisor's pause and forget its crashes; returns whether it was paused."""
    return bool(await gateway.run(_RESUME, _keys_of_pause(namespace, supervisor), [supervisor]))


async def paused_supervisors(gateway: Gateway, namespace: Namespace) -> list[str]:
    """Names of the supervisors that are paused, whether they run at present or not."""
    return [name.decode() for name in await gateway.command("ZRANGE", namespace.paused, 0, -1)]


async def list_supervisors(gateway: Gateway, namespace: Namespace) -> list[SupervisorInfo]:
    """Supervisors that were heard of lately, the longest running first; then those of which only a pause is left."""
    ids = [one.decode() for one in await gateway.command("ZRANGE", namespace.supervisors, 0, -1)]
    found = await gateway.pipeline([("HGETALL", namespace.supervisor(one)) for one in ids])
    seconds, micros = await gateway.command("TIME", node_of=namespace.supervisors)
    now = int(seconds) * 1000 + int(micros) // 1000
    told = [_read(pairs(flat), now) for flat in found if flat]
    names = {info["name"] for info in told}
    absent = [name for name in await paused_supervisors(gateway, namespace) if name not in names]
    told += [{"id": name, "name": name} for name in absent]
    pauses = await gateway.pipeline([("HGETALL", namespace.pause(info["name"])) for info in told])
    counts = await gateway.pipeline([("ZCARD", namespace.crashes(info["name"])) for info in told])
    supervisors = [
        SupervisorInfo(**info, crashes=crashes, paused_since=int(pause.get(b"since", 0)), why=_text(pause, b"why"))
        for info, flat, crashes in zip(told, pauses, counts, strict=True)
        if (pause := pairs(flat)) or info["name"] in names
    ]
    return sorted(supervisors, key=lambda info: (info.seen is None, info.started, info.id))


def _read(found: Mapping[bytes, bytes], now: int) -> dict[str, Any]:
    """What a supervisor told of itself; fields of a version that this one does not know are left out."""
    told = orjson.loads(found.get(b"told", b"{}"))
    known = {name: value for name, value in told.items() if name in _TOLD}
    known["children"] = tuple(
        ChildInfo(**{name: value for name, value in child.items() if name in _OF_A_CHILD})
        for child in told.get("children", ())
    )
    seen = max(0.0, (now - int(found.get(b"seen", now))) / 1000)
    return known | {"started": int(found.get(b"started", now)), "seen": seen}


def _standing(reply: Any) -> SupervisorState:
    return SupervisorState(int(reply[0]), int(reply[1]), reply[2].decode("utf-8", "replace"))


def _keys_of_pause(namespace: Namespace, supervisor: str) -> list[str]:
    return [namespace.crashes(supervisor), namespace.paused, namespace.pause(supervisor)]


def _text(found: Mapping[bytes, bytes], name: bytes) -> str:
    return found.get(name, b"").decode("utf-8", "replace")


_OF_A_CHILD = {one.name for one in fields(ChildInfo)}
_TOLD = {one.name for one in fields(SupervisorInfo)} - {"started", "seen", "crashes", "paused_since", "why"}
