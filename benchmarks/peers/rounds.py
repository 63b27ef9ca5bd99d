"""The rounds of all benchmarks, interleaved so that other load affects all setups alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from .lines import Measure
from .measurements import Facts
from .processes import Failed
from .servers import Postgres
from .setups import Peer
from .sizes import Amounts

__all__ = ["Cell", "estimate", "measure"]

Say = Callable[[str], None]
_Turn = tuple[Measure, int, Peer]

_TOGETHER = 20
"""Concurrent measurements of benchmarks that mostly wait."""


@dataclass(slots=True)
class Cell:
    """The values of a line and a setup, one per round, and the reason if a round failed."""

    values: list[float] = field(default_factory=list)
    reason: str | None = None


def measure(
    measures: Sequence[Measure],
    peers: Mapping[str, Facts | str],
    size: Amounts,
    database: Postgres | None,
    rates: Mapping[str, float],
    say: Say,
) -> dict[tuple[str, str], Cell]:
    """Return every cell by line and setup.

    peers: facts of each, or why it cannot be measured. rates: no-op tasks per second of setups, as far as known.
    """
    turns = [turn for what in measures if not what.at_once for turn in _turns(what, peers, size.rounds)]
    together = [turn for what in measures if what.at_once for turn in _turns(what, peers, size.recoveries)]
    found = {(line.key, peer.key): Cell() for what, _, peer in (*turns, *together) for line in what.lines}

    def take(turn: _Turn) -> None:
        what, number, peer = turn
        began = time.monotonic()
        outcome = _round(what, peer, peers[peer.key], size.for_rate(rates.get(peer.key)), database, found)
        if outcome is not None:
            say(f"{what.key}, round {number}: {peer.name}: {outcome} [{time.monotonic() - began:.0f} s]")

    for turn in turns:
        take(turn)
    with ThreadPoolExecutor(_TOGETHER) as pool:
        try:
            list(pool.map(take, together))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # running rounds end by themselves, with their processes
            raise
    return found


def estimate(measures: Sequence[Measure], peers: Mapping[str, Facts | str], size: Amounts) -> float:
    """Return the approximate seconds of a run."""
    total = 0.0
    for what in measures:
        turns = _turns(what, peers, size.recoveries if what.at_once else size.rounds)
        able = sum(1 for _, _, peer in turns if isinstance(peers[peer.key], Facts) and what.key not in peer.cannot)
        total += what.seconds(size) * (max(1.0, able / _TOGETHER) if what.at_once else able)
    return total


def _turns(what: Measure, peers: Mapping[str, Facts | str], rounds: int) -> list[_Turn]:
    """Return each setup once, then each again."""
    return [(what, number, peer) for number in range(1, 1 + rounds) for peer in what.peers if peer.key in peers]


def _round(
    what: Measure,
    peer: Peer,
    facts: Facts | str,
    size: Amounts,
    database: Postgres | None,
    found: Mapping[tuple[str, str], Cell],
) -> str | None:
    """Measure one round; return a line for the log. A setup that failed once is not measured again."""
    cells = {line.key: found[line.key, peer.key] for line in what.lines}
    if any(cell.reason is not None for cell in cells.values()):
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
