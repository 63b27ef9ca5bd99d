"""Settings that all workers of a namespace must share: stored by an operator, read at each registration.

Nothing is stored until an operator does so; the first worker to start sets nothing.

A lease is used twice: a worker renews its deliveries each third of it, and claims those of others that were not renewed
for as long. Workers notice a change one after the other. So for `CHANGE` seconds after it they renew by the shorter and
claim by the longer of the leases that any of them may use. After that, each worker that still registers uses the new
one. One that did not register meanwhile is presumed dead, or its event loop is blocked for longer than a stall limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from .errors import Refused, WrongType
from .junk import report_once
from .keys import Namespace
from .transport.gateway import Gateway
from .transport.scripts import milliseconds, pairs, queue_script

_SET = queue_script("set_config")

SharedName = Literal["lease", "dead_letter_ttl", "result_ttl"]

SHARED: Final[tuple[SharedName, ...]] = get_args(SharedName)
"""Names of the settings that can be stored."""

CHANGE: Final = 120.0
"""Seconds for which a change of the lease is in progress: twice the default stall limit, and many registrations at the
default interval.
"""

_OF_A_CHANGE: Final = ("lease_low", "lease_high", "lease_changed_at")
"""Fields of a change of the lease."""

_LEASE_FIELDS: Final = ("lease", "lease_low", "lease_high")

_LEASES: Final = (0.3, 3600.0)
"""Shortest and longest lease, in seconds; `Settings.lease` has the same bounds."""

_MAX_LENGTH: Final = 1e13
"""Largest stored number, a time of Redis' clock in milliseconds included: Redis refuses a TTL beyond its clock."""


@dataclass(frozen=True, slots=True)
class SharedConfig:
    """The stored settings of a namespace.

    Attributes:
        stored: Seconds by name, only of the settings that are stored.
        former_leases: Leases that workers may still use.
        changing: Seconds for which a change of the lease is in progress.
        ignored: Stored values by name that no setting can have, such as those of another program.
    """

    stored: Mapping[SharedName, float] = field(default_factory=dict)
    former_leases: Sequence[float] = ()
    changing: float = 0.0
    ignored: Mapping[SharedName, bytes] = field(default_factory=dict, compare=False)

    def leases(self, own: float) -> tuple[float, float]:
        """Return the lease to renew by and the lease to claim by. own: the lease of this worker's settings."""
        lease = self.stored.get("lease", own)
        used = (lease, own, *self.former_leases) if self.changing > 0 else (lease,)
        return min(used), max(used)

    @classmethod
    def decode(cls, fields: Mapping[bytes, bytes], now_ms: int) -> SharedConfig:
        """Decode the stored hash. Fields of later versions, and values that no setting can have, are ignored."""
        numbers = {name: read_seconds(fields.get(name.encode())) for name in (*SHARED, *_OF_A_CHANGE)}
        known = {name: number for name, number in numbers.items() if number is not None and _is_possible(name, number)}
        changing = max(0.0, (known.get("lease_changed_at", 0.0) - now_ms) / 1000)
        former = [known[name] for name in ("lease_low", "lease_high") if name in known]
        stored: dict[SharedName, float] = {name: known[name] for name in SHARED if name in known}
        ignored: dict[SharedName, bytes] = {
            name: fields[name.encode()] for name in SHARED if name.encode() in fields and name not in known
        }
        return cls(stored, former if changing else (), changing, ignored)


def _is_possible(name: str, seconds: float) -> bool:
    return name not in _LEASE_FIELDS or _LEASES[0] <= seconds <= _LEASES[1]


async def load_config(gateway: Gateway, namespace: Namespace) -> SharedConfig:
    """Return the stored settings; none, with a warning, if the hash is of another type."""
    found, now = await gateway.pipeline_each([("HGETALL", namespace.config), ("TIME",)], node_of=namespace.config)
    if isinstance(found, WrongType):
        report_once(f"the stored settings are ignored: {namespace.config}: {found}")
        found = []
    for reply in (found, now):
        if isinstance(reply, Refused):
            raise reply
    return SharedConfig.decode(pairs(found), milliseconds(now))


async def set_config(
    gateway: Gateway, namespace: Namespace, name: SharedName, value: float | None, *, change: float = CHANGE
) -> bool:
    """Store a setting, or remove it with None. Return whether that changed anything.

    Args:
        change: Seconds for which a change of the lease is in progress: several registrations of each worker.
    """
    text = "" if value is None else f"{value:.15g}"
    while True:
        try:
            old, last = await gateway.command("HMGET", namespace.config, name, "change")
        except WrongType:
            await gateway.set_keys_aside([namespace.config])
            continue
        if (old or b"") == text.encode():
            return False
        if await gateway.run(_SET, [namespace.config], [name, text, round(change * 1000), last or 0]):
            return True


def read_seconds(value: bytes | None) -> float | None:
    """Return a stored value in seconds; None for one that is missing or cannot be read."""
    try:
        seconds = float(value or b"nan")
    except ValueError:
        return None
    return seconds if 0 < seconds <= _MAX_LENGTH else None
