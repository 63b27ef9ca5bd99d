"""The rounds: interleaved, so that what the machine does meanwhile meets every peer alike."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .amounts import Amounts
from .cells import Facts
from .lines import Measure
from .roster import Peer
from .servers import Postgres
from .sessions import Failed

__all__ = ["Cell", "estimate", "measure"]

Say = Callable[[str], None]

_TOGETHER = 20
"""Peers measured at the same time where they mostly wait."""


@dataclass(slots=True)
class Cell:
    """What was found for a line and a peer: a value per round, or why there is none (any more)."""

    values: list[float] = field(default_factory=list)
    reason: str | None = None


def measure(
    measures: Sequence[Measure],
    peers: Mapping[str, Facts | str],
    size: Amounts,
    database: Postgres | None,
    say: Say,
) -> dict[tuple[str, str], Cell]:
    """Every cell, by line and peer. peers: what each said of itself, or why it cannot be measured."""
    found: dict[tuple[str, str], Cell] = defaultdict(Cell)
    for what in measures:
        there = [peer for peer in what.peers if peer.key in peers]
        for number in range(size.recoveries if what.at_once else size.rounds):

            def one(peer: Peer, what: Measure = what, number: int = number) -> None:
                began = time.monotonic()
                outcome = _round(what, peer, peers[peer.key], size, database, found)
                if outcome is not None:
                    say(f"{what.key}, round {number + 1}: {peer.name}: {outcome} [{time.monotonic() - began:.0f} s]")

            if what.at_once:
                with ThreadPoolExecutor(_TOGETHER) as together:
                    list(together.map(one, there))
            else:
                for peer in there:
                    one(peer)
    return dict(found)


def estimate(measures: Sequence[Measure], peers: Mapping[str, Facts | str], size: Amounts) -> float:
    """About how many seconds it will take."""
    total = 0.0
    for what in measures:
        there = sum(1 for peer in what.peers if isinstance(peers.get(peer.key), Facts))
        rounds = size.recoveries * bool(there) if what.at_once else size.rounds * there
        total += rounds * what.seconds(size)
    return total


def _round(
    what: Measure,
    peer: Peer,
    facts: Facts | str,
    size: Amounts,
    database: Postgres | None,
    found: dict[tuple[str, str], Cell],
) -> str | None:
    """Measure and keep; returns what to say of it. A peer that failed once is not measured again."""
    cells = {line.key: found[line.key, peer.key] for line in what.lines}
    if any(cell.reason for cell in cells.values()):
        return None
    try:
        if isinstance(facts, str):
            raise Failed(facts)
        if what.key in peer.cannot:
            raise Failed(peer.cannot[what.key])
        values = what.round(peer, size, facts, database)
    except (Failed, OSError, ValueError) as error:
        for cell in cells.values():
            cell.reason = str(error)
        return f"no figure: {error}"
    for key, cell in cells.items():
        cell.values.append(values[key])
    return ", ".join(f"{values[line.key]:,.1f} {line.unit}" for line in what.lines)
