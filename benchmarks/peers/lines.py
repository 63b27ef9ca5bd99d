"""The benchmarks of the report, and one round of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from . import measurements
from .measurements import CONCURRENCY, Facts
from .processes import Failed
from .servers import Postgres
from .setups import PERDURE, PERDURE_FSYNC, QUEUES, STEPS, Peer
from .sizes import Amounts

__all__ = ["NAPPING", "Line", "Measure", "measures"]

NAPPING = 100
"""Concurrency of the tasks that sleep 10 ms."""

Round = Callable[[Peer, Amounts, Facts, Postgres | None], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One benchmark. how: what exactly is timed. less: whether a smaller value is better."""

    key: str
    title: str
    unit: str
    how: str
    less: bool = False


@dataclass(frozen=True, slots=True)
class Measure:
    """A round of some lines for one peer. at_once: it mostly waits, so all peers are measured concurrently."""

    key: str
    lines: Sequence[Line]
    peers: Sequence[Peer]
    round: Round
    seconds: Callable[[Amounts], float]
    """Approximate seconds of a round, for the estimate printed at the start."""

    at_once: bool = False

    def beside(self, peer: Peer) -> str:
        """Return the key of the Perdure setup to compare with: a peer that fsyncs needs one that does, too."""
        return PERDURE.key if peer.store == "redis" else PERDURE_FSYNC.key


def measures(amounts: Amounts, best: Mapping[str, Peer]) -> Sequence[Measure]:
    """Return all benchmarks, in the order of the report. best: the settings that the sweep chose, by project.

    No-op tasks and durable steps are measured with the defaults and with the best settings, the other lines with the
    best settings.
    """
    queues = [setup for peer in QUEUES for setup in (peer, *([best[peer.key]] if peer.key in best else []))]
    steps = [setup for peer in STEPS for setup in (peer, *([best[peer.key]] if peer.key in best else []))]
    chosen = [best.get(peer.key, peer) for peer in QUEUES]
    # How Redis writes to disk matters to neither fan-out nor recovery.
    queues_once = [peer for peer in QUEUES if peer is not PERDURE_FSYNC]
    limit = f"{amounts.limit:g} s"
    drained = (
        f"are enqueued, enough for twice {limit} at the rate that the sweep found; then one worker is started; tasks "
        f"finished in the {limit} after the start of the first handler"
    )
    return [
        Measure(
            "noop",
            [
                Line(
                    "noop",
                    f"No-op tasks, concurrency {CONCURRENCY}",
                    "tasks/s",
                    f"tasks {drained}",
                ),
                Line(
                    "enqueue",
                    "Enqueue, one by one",
                    "tasks/s",
                    "the same tasks, each call awaited by one of 32 coroutines; blocking "
                    "clients use a plain loop, because threads do not speed them up",
                ),
            ],
            queues,
            _noop,
            lambda size: 5 + size.limit,
        ),
        Measure(
            "bulk",
            [Line("bulk", "Enqueue, one bulk call", "tasks/s", f"{amounts.bulk:,} no-op tasks in one call")],
            QUEUES,
            _bulk,
            lambda size: 2 + size.bulk / 10_000,
        ),
        Measure(
            "echo",
            [
                Line(
                    "echo",
                    f"1 KB echo, concurrency {CONCURRENCY}",
                    "tasks/s",
                    f"tasks that take 1,024 bytes and return them {drained}",
                )
            ],
            chosen,
            _echo,
            lambda size: 5 + size.limit,
        ),
        Measure(
            "nap",
            [
                Line(
                    "nap",
                    f"10 ms sleep, concurrency {NAPPING}",
                    "tasks/s",
                    f"tasks that sleep 10 ms (the sleeps allow {NAPPING * 100:,} tasks/s) {drained}",
                )
            ],
            chosen,
            _nap,
            lambda size: 5 + size.limit,
        ),
        Measure(
            "spread",
            [
                Line(
                    "spread",
                    f"Fan-out of {amounts.children:,}",
                    "tasks/s",
                    f"a parent enqueues {amounts.children:,} no-op children and ends when it, or its continuation, has "
                    "all their results; children per second between its start and that end",
                )
            ],
            [best.get(peer.key, peer) for peer in queues_once],
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
                    f"up to {amounts.walks:,} tasks of 10 steps within {amounts.walk_limit:g} s, one after the "
                    "other, each from its call to its result; Perdure's worker is a separate process",
                ),
            ],
            steps,
            _steps,
            lambda size: 5 + size.walk_limit,
        ),
        Measure(
            "steps_shared",
            [
                Line(
                    "steps_shared",
                    f"Durable steps, {CONCURRENCY} tasks concurrently",
                    "steps/s",
                    f"the same with {CONCURRENCY} concurrent callers",
                ),
            ],
            steps,
            _steps_shared,
            lambda size: 6 + size.walk_limit,
        ),
        Measure(
            "recovery",
            [
                Line(
                    "recovery",
                    "kill -9 until the task runs again, default timeout",
                    "s",
                    "a worker with a running task is killed while another worker is idle; time until that one has run "
                    f"the task; defaults above {amounts.patience:g} s are read from the peer's code instead of "
                    "waited for",
                    less=True,
                )
            ],
            [*queues_once, *(peer for peer in STEPS if not peer.worker)],
            _recovery,
            lambda size: 15 + size.patience,
            at_once=True,
        ),
        Measure(
            "recovery_set",
            [
                Line(
                    "recovery_set",
                    f"kill -9 until the task runs again, timeout {amounts.silence:g} s",
                    "s",
                    "the same with the peer's timeout set to Perdure's default lease",
                    less=True,
                )
            ],
            queues_once,
            _recovery_set,
            lambda size: 30 + 5 * size.silence,
            at_once=True,
        ),
    ]


def _free(peer: Peer) -> int:
    """Return the concurrency of a setup on the lines that leave it free."""
    return peer.concurrency or CONCURRENCY


def _noop(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    found = measurements.queue_rates(peer, "noop", size.tasks, "singly", size.limit, _free(peer), database)
    return {"noop": found["run"], "enqueue": found["enqueue"]}


def _bulk(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"bulk": measurements.bulk_rate(peer, size.bulk, database)}


def _echo(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    found = measurements.queue_rates(peer, "echo", size.tasks, "bulk", size.limit, _free(peer), database)
    return {"echo": found["run"]}


def _nap(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    tasks = min(size.tasks, math.ceil(NAPPING * 100 * size.limit))
    return {"nap": measurements.queue_rates(peer, "nap", tasks, "bulk", size.limit, NAPPING, database)["run"]}


def _spread(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    found = measurements.queue_rates(
        peer, "spread", 1, "singly", _SPREAD_WITHIN, CONCURRENCY, database, children=size.children
    )
    return {"spread": found["run"]}


_SPREAD_WITHIN = 60.0
_MARGIN = 2.5
"""Longest wait for a recovery, as a multiple of the default timeout."""


def _steps(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"steps": measurements.step_rate(peer, size.walks, 1, size.walk_limit, database)}


def _steps_shared(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"steps_shared": measurements.step_rate(peer, size.walks, CONCURRENCY, size.walk_limit, database)}


def _recovery(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    if not peer.worker:
        raise Failed(f"has no worker to kill; resumed by {peer.guarantee.recovery}")
    if facts.recovery is None:
        raise Failed(facts.recovery_where)
    if facts.recovery > size.patience:
        raise Failed(f"default {facts.recovery:,.0f} s ({facts.recovery_where}), not waited for")
    return {"recovery": measurements.recovery_seconds(peer, None, _MARGIN * facts.recovery, database)}


def _recovery_set(peer: Peer, size: Amounts, facts: Facts, database: Postgres | None) -> Mapping[str, float]:
    return {"recovery_set": measurements.recovery_seconds(peer, size.silence, 8 * size.silence, database)}
