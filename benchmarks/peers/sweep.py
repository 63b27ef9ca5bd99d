"""The sweep: a short round of every documented setting of each peer, which chooses the best one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .measurements import CONCURRENCY, Facts, queue_rates, step_rate
from .processes import Failed
from .servers import Postgres
from .setups import QUEUES, STEPS, Peer
from .sizes import Amounts

__all__ = ["Swept", "sweep"]

_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Swept:
    """The outcome of a sweep.

    best: the setup that was fastest, by project, where it is not the one with the defaults. rates: no-op tasks per
    second by setup. tried: a row per setting, as data: its peer, name, unit, rate, or the reason why it is missing.
    """

    best: Mapping[str, Peer]
    rates: Mapping[str, float]
    tried: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, tried: Sequence[Mapping[str, Any]]) -> Swept:
        """Return the outcome of rows. Settings that no longer exist are left out."""
        peers = {peer.key: peer for peer in (*STEPS, *QUEUES)}
        best: dict[str, Peer] = {}
        rates: dict[str, float] = {}
        for key, peer in peers.items():
            found = {row["name"]: row["rate"] for row in tried if row["peer"] == key and row["rate"] is not None}
            settings = {_DEFAULT: peer} | {choice.name: peer.at(choice) for choice in peer.choices}
            known = {name: rate for name, rate in found.items() if name in settings}
            if peer not in QUEUES and not known:
                continue
            fastest = max(known, key=known.__getitem__, default=_DEFAULT)
            if fastest != _DEFAULT:
                best[key] = settings[fastest]
            if peer in QUEUES:
                rates |= {settings[name].key: rate for name, rate in known.items() if name in (_DEFAULT, fastest)}
        return cls(best, rates, tried)


def sweep(
    peers: Mapping[str, Facts | str], size: Amounts, database: Postgres | None, say: Callable[[str], None]
) -> Swept:
    """Measure each setting once: no-op tasks of queues, durable steps of 32 tasks of the others."""
    tried: list[Mapping[str, Any]] = []
    measured = [(peer, True) for peer in QUEUES] + [(peer, False) for peer in STEPS if peer not in QUEUES]
    for peer, queue in measured:
        if not isinstance(peers.get(peer.key), Facts) or (not queue and not peer.choices):
            continue
        for name, setup in [(_DEFAULT, peer), *((choice.name, peer.at(choice)) for choice in peer.choices)]:
            row: dict[str, Any] = {
                "peer": peer.key,
                "name": name,
                "unit": "tasks/s" if queue else "steps/s",
                "rate": None,
                "reason": None,
            }
            try:
                row["rate"] = _rate(setup, size, database, queue=queue)
            except (Failed, OSError, ValueError) as error:
                row["reason"] = str(error)
            tried.append(row)
            say(f"sweep: {peer.name}, {name}: {row['reason'] or format(row['rate'], ',.0f')}")
    return Swept.of(tried)


def _rate(setup: Peer, size: Amounts, database: Postgres | None, *, queue: bool) -> float:
    if not queue:
        return step_rate(setup, size.walks, CONCURRENCY, size.sweep_limit, database)
    found = queue_rates(
        setup,
        "noop",
        size.swept,
        "singly",
        size.sweep_limit,
        setup.concurrency or CONCURRENCY,
        database,
        within=size.sweep_fill,
    )
    return found["run"]
