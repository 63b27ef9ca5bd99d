"""Simulation of many agents on Redis nodes, driven by measured costs.

Each agent sleeps for a time, is woken, records some durable steps that each take a while, and sleeps again. A node
executes commands in one thread: it is a queue with one server. The wakings of many agents are independent of each
other, so they arrive at random.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import quantiles

__all__ = ["Costs", "Fleet", "Forecast", "nodes_for", "simulate"]

ACTS = 4
"""Commands of a waking one after the other: promote, read, load the checkpoint, park again."""

BEFORE = 3
"""Commands before the first line of the handler after its sleep."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured costs. waking, step: microseconds of Redis CPU. idle: share of a core that the idle workers use.
    latency: milliseconds from the end of a sleep to the handler when the server has little to do. parked: bytes of
    Redis for each parked agent.
    """

    waking: float
    step: float
    idle: float
    latency: float
    parked: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """A number of agents. every: seconds between two wakings of one. steps: of a waking. think: seconds before each
    step after the first.
    """

    agents: int
    every: float
    steps: int
    think: float

    @property
    def rate(self) -> float:
        """Wakings per second of all agents."""
        return self.agents / self.every

    @property
    def running(self) -> float:
        """Agents that run at a time, on average: the slots that workers need."""
        return self.rate * max(0, self.steps - 1) * self.think

    def load(self, costs: Costs) -> float:
        """Cores of Redis that the fleet uses, without idle workers."""
        return self.rate * (costs.waking + self.steps * costs.step) / 1e6

    def memory(self, costs: Costs) -> float:
        """Bytes of Redis for the agents."""
        return self.agents * costs.parked


@dataclass(frozen=True, slots=True)
class Forecast:
    """Results of a simulation. loads: share of a core by node. median, worst: milliseconds from the end of a sleep to
    the handler, p50 and p99. running: most agents that ran at a time. memory: bytes of the agents.
    """

    loads: Sequence[float]
    median: float
    worst: float
    running: int
    memory: float


def simulate(
    fleet: Fleet, costs: Costs, *, seconds: float, shares: Sequence[float] = (1.0,), seed: int = 1
) -> Forecast:
    """Simulate a fleet for a time, after as long as a waking takes: the nodes start idle.

    Args:
        shares: Share of the agents on each node; they add up to 1.
    """
    random = Random(seed)
    free, busy = [0.0] * len(shares), [0.0] * len(shares)
    act, step = costs.waking / ACTS / 1e6, costs.step / 1e6
    between = max(0.0, costs.latency / 1e3 - BEFORE * act) / BEFORE
    begin = fleet.steps * fleet.think + 1.0
    end = begin + seconds
    late: list[float] = []
    running = most = 0

    # Each entry: time, order, node, number of the agent's next command, end of its sleep.
    order = len(shares)
    events: list[tuple[float, int, int, int, float]] = []
    for node, share in enumerate(shares):
        if share:
            first = random.expovariate(fleet.rate * share)
            events.append((first, node, node, 0, first))
    heapq.heapify(events)
    while events:
        now, _, node, number, due = heapq.heappop(events)
        if number == 0:
            following = now + random.expovariate(fleet.rate * shares[node])
            if following < end:
                heapq.heappush(events, (following, order, node, 0, following))
                order += 1
        stepping = BEFORE <= number < BEFORE + fleet.steps
        cost = step if stepping else act
        done = max(now, free[node]) + cost
        free[node] = done
        if begin <= now < end:
            busy[node] += cost
        if number == BEFORE - 1:
            running += 1
            most = max(most, running)
            if begin <= due:
                late.append((done + between - due) * 1e3)
        if number == BEFORE + fleet.steps:
            running -= 1
            continue
        thinks = BEFORE <= number < BEFORE + fleet.steps - 1
        pause = between if number < BEFORE - 1 else fleet.think if thinks else 0.0
        heapq.heappush(events, (done + pause, order, node, number + 1, due))
        order += 1
    found = quantiles(late, n=100, method="inclusive") if len(late) > 1 else [math.nan] * 99
    loads = [used / seconds + costs.idle / len(shares) for used in busy]
    return Forecast(loads, found[49], found[98], most, fleet.memory(costs))


def nodes_for(fleet: Fleet, costs: Costs, *, used: float, memory: float) -> int:
    """Return how many nodes carry a fleet. used: share of a core that is planned for. memory: bytes of a node."""
    return max(1, math.ceil(fleet.load(costs) / used), math.ceil(fleet.memory(costs) / memory))
