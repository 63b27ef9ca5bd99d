"""What is measured: the lines of the report, and how one round of each is run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import cells
from .amounts import Amounts
from .cells import CONCURRENCY, Facts
from .roster import PERDURE, PERDURE_FSYNC, QUEUES, STEPS, Peer
from .servers import Postgres
from .sessions import Failed

__all__ = ["NAPPING", "Line", "Measure", "measures"]

NAPPING = 100
"""Concurrency of the 10 ms naps."""

Round = Callable[[Peer, Amounts, Facts, Postgres | None], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One thing that is measured. how: what exactly is timed. less: whether a smaller value is the better one."""

    key: str
    title: str
    unit: str
    how: str
    less: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """A round measures some lines for one peer. at_once: it mostly waits, so all peers are measured together."""

    key: str
    lines: Sequence[Line]
    peers: Sequence[Peer]
    round: Round
    seconds: Callable[[Amounts], float]
    """About how long a round takes, for the estimate that is printed first."""

    at_once: bool = False

    def beside(self, peer: Peer) -> str:
        """The key of the Perdure that a peer is compared with: what keeps data on disk, with what does too."""
        return PERDURE.key if peer.store == "redis" else PERDURE_FSYNC.key


def measures(amounts: Amounts) -> Sequence[Measure]:
    """All that is measured, in the order of the report."""
    limited = f"or, of a slower one, what ended within {amounts.limit:g} s"
    drained = (
        "from the first handler's beginning until all have run and the result of the last one can be read by the "
        f"client; {limited}"
    )
    return [
        Measure(
            "noop",
            [
                Line(
                    "noop",
                    f"No-op tasks, concurrency {CONCURRENCY}",
                    "tasks/s",
                    f"{amounts.tasks:,} tasks enqueued first, then one worker started: {drained}",
                ),
                Line(
                    "enqueue",
                    "Enqueue, one by one",
                    "tasks/s",
                    f"the same {amounts.tasks:,} tasks, each call awaited by one of 32 coroutines; in a plain loop "
                    "where the client blocks, since its threads are no faster",
                ),
            ],
            QUEUES,
            _noop,
            lambda size: 3 + size.tasks / 4_000 + size.limit * 0.8,
        ),
        Measure(
            "bulk",
            [Line("bulk", "Enqueue, one bulk call", "tasks/s", f"{amounts.bulk:,} no-op tasks in one call")],
            QUEUES,
            _bulk,
            lambda size: 1 + size.bulk / 20_000,
        ),
        Measure(
            "echo",
            [
                Line(
                    "echo",
                    f"1 KB echo, concurrency {CONCURRENCY}",
                    "tasks/s",
                    f"{amounts.tasks:,} tasks that take 1,024 bytes and return them, enqueued first: {drained}",
                )
            ],
            QUEUES,
            _echo,
            lambda size: 3 + size.tasks / 8_000 + size.limit * 0.8,
        ),
        Measure(
            "nap",
            [
                Line(
                    "nap",
                    f"10 ms sleep, concurrency {NAPPING}",
                    "tasks/s",
                    f"{amounts.naps:,} tasks that sleep 10 ms, enqueued first (the sleeps alone would allow "
                    f"{NAPPING * 100:,} tasks/s): {drained}",
                )
            ],
            QUEUES,
            _nap,
            lambda size: 3 + size.naps / 8_000 + size.limit * 0.7,
        ),
        Measure(
            "spread",
            [
                Line(
                    "spread",
                    f"Fan-out of {amounts.children:,}",
                    "tasks/s",
                    f"a parent that enqueues {amounts.children:,} no-op children and ends when it has, or its "
                    "continuation has, all their results: children per second between its beginning and that end",
                )
            ],
            QUEUES,
            _spread,
            lambda size: 4 + size.children / 250,
        ),
        Measure(
            "steps",
            [
                Line(
                    "steps",
                    "Durable steps, one task at a time",
                    "steps/s",
                    f"up to {amounts.walks:,} tasks of 10 steps within {amounts.walk_limit:g} s, each from its call to "
                    "its result, the next one after it; Perdure's worker is another process",
                ),
            ],
            STEPS,
            _steps,
            lambda size: 5 + size.walk_limit,
        ),
        Measure(
            "steps_shared",
            [
                Line(
                    "steps_shared",
                    f"Durable steps, {CONCURRENCY} tasks at once",
                    "steps/s",
                    f"the same with {CONCURRENCY} callers",
                ),
            ],
            STEPS,
            _steps_shared,
            lambda size: 6 + size.walk_limit,
        ),
        Measure(
            "recovery",
            [
                Line(
                    "recovery",
                    "kill -9 to the task running again, by default",
                    "s",
                    "a worker is killed with a task running while another one is idle, until that one has run the "
                    f"task; a default above {amounts.patience:g} s is read from the peer's own code, not waited for",
                    less=True,
                )
            ],
            [*QUEUES, *(peer for peer in STEPS if not peer.worker)],
            _recovery,
            lambda size: 15 + size.patience,
            at_once=True,
        ),
        Measure(
            "recovery_set",
            [
                Line(
                    "recovery_set",
                    f"kill -9 to the task running again, timeout set to {amounts.silence:g} s",
                    "s",
                    "the same with the peer's own timeout set to Perdure's default",
                    less=True,
                )
            ],
            QUEUES,
            _recovery_set,
            lambda size: 30 + 5 * size.silence,
            at_once=True,
        ),
    ]


def _noop(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    found = cells.drained(peer, "noop", size.tasks, "singly", size.limit, CONCURRENCY)
    return {"noop": found["run"], "enqueue": found["enqueue"]}


def _bulk(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"bulk": cells.enqueued(peer, size.bulk)}


def _echo(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"echo": cells.drained(peer, "echo", size.tasks, "bulk", size.limit, CONCURRENCY)["run"]}


def _nap(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"nap": cells.drained(peer, "nap", size.naps, "bulk", size.limit, NAPPING)["run"]}


def _spread(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    found = cells.drained(peer, "spread", 1, "singly", _SPREAD_WITHIN, CONCURRENCY, size.children)
    return {"spread": found["run"]}


_SPREAD_WITHIN = 60.0
_MARGIN = 2.5
"""How many times its default timeout a recovery is waited for."""


def _steps(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"steps": cells.walked(peer, size.walks, 1, size.walk_limit, database)}


def _steps_shared(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"steps_shared": cells.walked(peer, size.walks, CONCURRENCY, size.walk_limit, database)}


def _recovery(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    if not peer.worker:
        raise Failed(f"no worker of its own to kill; taken up by {peer.guarantee.recovery}")
    if facts.recovery is None:
        raise Failed(facts.recovery_where)
    if facts.recovery > size.patience:
        raise Failed(f"default {facts.recovery:,.0f} s ({facts.recovery_where}), not waited for")
    return {"recovery": cells.recovered(peer, None, _MARGIN * facts.recovery)}


def _recovery_set(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"recovery_set": cells.recovered(peer, size.silence, 8 * size.silence)}
