"""Supervisors in Redis: registry, crash counter and pause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NamedTuple

import orjson

from .errors import Refused
from .keys import Namespace, is_name
from .member_registry import MemberRegistry
from .transport.gateway import Gateway
from .transport.scripts import milliseconds, pairs, queue_script
from .wording import iso_time

_COUNT = queue_script("count_crash")
_REGISTER = queue_script("register_supervisor")
_UNPAUSE = queue_script("unpause_supervisor")

_PAUSE_TTL_MS: Final = 30 * 24 * 3600 * 1000
"""Milliseconds for which a pause is kept after the last registration of its supervisor."""

_DIGITS: Final = 15
"""Most digits of a time in milliseconds."""


class SupervisorState(NamedTuple):
    """Crash count and pause of a supervisor.

    crashes: crashes of its workers within the window. paused_since: milliseconds of Redis' clock, 0 if it is not
    paused. why: the crash that caused the pause.
    """

    crashes: int
    paused_since: int
    why: str

    @property
    def paused(self) -> bool:
        return self.paused_since > 0


@dataclass(frozen=True, slots=True)
class ChildInfo:
    """A child process of a supervisor. role: worker, isolated or spare. worker: its id, empty while it starts."""

    pid: int
    role: str
    state: str
    worker: str = ""


@dataclass(frozen=True, slots=True)
class SupervisorInfo:
    """A registered supervisor. Supervisors of several versions read each other: a new field needs a default.

    Attributes:
        name: Name by which its crashes are counted and by which it is resumed.
        processes: Target number of children.
        started, paused_since: Milliseconds of Redis' clock.
        seen: Seconds since its last registration; None if it is gone, and only its pause is left.
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
        """Return the supervisor as plain data, times as ISO 8601."""
        times = {"started": iso_time(self.started or None), "paused_since": iso_time(self.paused_since or None)}
        return asdict(self) | times | {"why": self.why or None}


async def supervise(gateway: Gateway, namespace: Namespace, info: SupervisorInfo, ttl: float) -> SupervisorState:
    """Register a supervisor for `ttl` seconds. Return its crash count and pause."""
    keys = [
        namespace.supervisors,
        namespace.supervisor(info.id),
        namespace.crashes(info.name),
        namespace.paused,
        namespace.pause(info.name),
    ]
    data = orjson.dumps({name: value for name, value in asdict(info).items() if name in _REGISTERED})
    times = (round(ttl * 1000), round(info.window * 1000), _PAUSE_TTL_MS)
    return _state(await gateway.run(_REGISTER, keys, [info.id, info.name, data, *times]))


async def withdraw_supervisor(gateway: Gateway, namespace: Namespace, supervisor_id: str) -> None:
    """Deregister a supervisor for good. Its crashes and its pause are kept."""
    await MemberRegistry(gateway, namespace.supervisors, namespace.supervisor).withdraw(supervisor_id)


async def count_crash(
    gateway: Gateway, namespace: Namespace, supervisor: str, worker: str, *, why: str, threshold: int, window: float
) -> SupervisorState:
    """Count the crash of a worker. Idempotent. With more than `threshold` crashes in `window` seconds, pause."""
    args = (supervisor, worker, threshold, max(1, round(window * 1000)), _PAUSE_TTL_MS, why)
    return _state(await gateway.run(_COUNT, _keys_of_pause(namespace, supervisor), args))


async def resume_supervisor(gateway: Gateway, namespace: Namespace, supervisor: str) -> bool:
    """Lift a supervisor's pause, and count its crashes from zero. Return whether it was paused."""
    since = await gateway.command("HGET", namespace.pause(supervisor), "since")
    if since is None:
        return False
    await gateway.run(_UNPAUSE, _keys_of_pause(namespace, supervisor), [supervisor, since])
    return True


async def paused_supervisors(gateway: Gateway, namespace: Namespace) -> list[str]:
    """Return the names of the paused supervisors, running or not."""
    names = await MemberRegistry(gateway, namespace.paused, namespace.pause).members(until="+inf")
    return [name for name in names if is_name(name)]


async def list_supervisors(
    gateway: Gateway, namespace: Namespace, problems: dict[str, str] | None = None
) -> list[SupervisorInfo]:
    """Return the registered supervisors, the longest running first; then those with only a pause left.

    problems: gets what another program wrote, by the name of the entry or key.
    """
    problems = {} if problems is None else problems
    registry = MemberRegistry(gateway, namespace.supervisors, namespace.supervisor, problems=problems)
    known = await registry.read(_decode)
    now = milliseconds(await gateway.command("TIME", node_of=namespace.supervisors))
    names = {info["name"] for info in known}
    absent = [name for name in await paused_supervisors(gateway, namespace) if name not in names]
    known += [{"id": name, "name": name} for name in absent]
    pauses = await gateway.pipeline_each([("HGETALL", namespace.pause(info["name"])) for info in known])
    counts = await gateway.pipeline_each([("ZCOUNT", namespace.crashes(info["name"]), 0, now) for info in known])
    supervisors: list[SupervisorInfo] = []
    for info, flat, crashes in zip(known, pauses, counts, strict=True):
        pause: Mapping[bytes, bytes] = {} if isinstance(flat, Refused) else pairs(flat)
        for reply in (flat, crashes):
            if isinstance(reply, Refused):
                problems[info["name"]] = f"its pause or its crashes are ignored: {reply}"
        if pause or info["name"] in names:
            since = pause.get(b"since", b"0")
            supervisors.append(
                SupervisorInfo(
                    **info,
                    crashes=crashes if isinstance(crashes, int) else 0,
                    paused_since=int(since) if since.isdigit() and len(since) <= _DIGITS else 0,
                    why=_text(pause, b"why"),
                )
            )
    return sorted(supervisors, key=lambda info: (info.seen is None, info.started, info.id))


def _decode(_: str, found: Mapping[bytes, bytes], now: int) -> dict[str, Any]:
    """Decode a registration without fields that only later versions know."""
    stored = orjson.loads(found.get(b"told", b"{}"))
    known = {name: value for name, value in stored.items() if name in _REGISTERED}
    known["children"] = tuple(
        ChildInfo(**{name: value for name, value in child.items() if name in _CHILD_FIELDS})
        for child in stored.get("children", ())
    )
    seen = max(0.0, (now - int(found.get(b"seen", now))) / 1000)
    SupervisorInfo(**known, started=0, seen=seen, crashes=0, paused_since=0, why="")  # raises for a missing field
    return known | {"started": int(found.get(b"started", now)), "seen": seen}


def _state(reply: Any) -> SupervisorState:
    return SupervisorState(int(reply[0]), int(reply[1]), reply[2].decode("utf-8", "replace"))


def _keys_of_pause(namespace: Namespace, supervisor: str) -> list[str]:
    return [namespace.crashes(supervisor), namespace.paused, namespace.pause(supervisor)]


def _text(found: Mapping[bytes, bytes], name: bytes) -> str:
    return found.get(name, b"").decode("utf-8", "replace")


_CHILD_FIELDS = {one.name for one in fields(ChildInfo)}
_REGISTERED = {one.name for one in fields(SupervisorInfo)} - {"started", "seen", "crashes", "paused_since", "why"}
