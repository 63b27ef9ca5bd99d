"""Schedule of faults, drawn from a seed: which fault comes when, on which host, for how long.

The same seed and options give the same schedule. How faults and work interleave is not reproducible.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

__all__ = ["WEIGHTS", "Plan", "schedule"]

WEIGHTS: Final[dict[str, int]] = {
    "kill": 10,
    "kill_host": 5,
    "kill_supervisor": 3,
    "kill_all": 2,
    "freeze": 8,
    "blink": 4,
    "redis_kill": 4,
    "redis_stop": 2,
    "redis_freeze": 2,
    "newcomer": 2,
    "lose_tail": 3,
    "failover": 3,
    "clock": 3,
    "flush": 3,
    "cut_all": 3,
    "cut_news": 2,
    "cut_one": 4,
    "hold": 5,
    "late": 4,
    "slow": 3,
    "crawl": 3,
    "break": 4,
    "deploy": 6,
    "settings": 3,
    "reload": 3,
    "resume": 2,
    "replay": 4,
    "replay_fresh": 1,
    "partitions": 1,
    "kill_producer": 2,
    "plan": 2,
    "pause": 3,
}
"""Relative frequency of each fault."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One fault. at: seconds after the start. host: number of the host. draw: 0 to 1, for other choices;
    length: 0 to 1, for the duration.
    """

    at: float
    fault: str
    host: int
    draw: float
    length: float


def schedule(seed: int, seconds: float, pause: float, hosts: int, faults: Sequence[str]) -> list[Plan]:
    """Return the faults of a run. pause: mean seconds between two. faults: the possible ones, from `WEIGHTS`.

    If there is time, each fault comes once before any comes for the second time.
    """
    dice = random.Random(seed)
    once = list(faults)
    dice.shuffle(once)
    plans: list[Plan] = []
    at = 2.0
    while at < seconds:
        weights = [WEIGHTS[fault] for fault in faults]
        fault = once.pop() if once and dice.random() < 0.6 else dice.choices(faults, weights)[0]
        plans.append(Plan(round(at, 3), fault, dice.randrange(hosts), dice.random(), dice.random()))
        at += dice.expovariate(1 / pause)
    return plans
