"""`python -m benchmarks.scale.agents`: what one node, or three, carry of a million agents that mostly sleep.

Few agents give the costs of a waking and of a step. A simulation with these costs says what a hundredth of the
million costs, on one node and on a cluster of three primaries; the same is then run, and both stand side by side. The
last table is the plan for the million, which was not run.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from statistics import quantiles
from typing import Annotated, Final

import hiredis
import redis
import typer
from perdure import PerdureError, Producer
from perdure.queues.partitions.resharding import set_partitions
from perdure.worker.log import configure_logging
from rich import box
from rich.console import Console
from rich.table import Table

from ..raw.client import RawClient
from ..support.cluster import Cluster, own_cluster
from ..support.machine import origin_line, run
from ..support.processes import started
from ..support.server import NoServer, own_server, server_line
from ..support.usage import Meter
from .capacity import PARTITIONS_PER_NODE, USED
from .simulation import Costs, Fleet, Forecast, nodes_for, simulate

MILLION: Final = 1_000_000
NODE_MEMORY: Final = 16e9
"""Bytes of a node of the plan."""

_PROCESSES: Final = 2
_CONCURRENCY: Final = 256
_PARKED_A_SECOND: Final = 400
"""Agents that the workers of a slow machine park; the first sleep ends when all are parked."""

_EDGE: Final = 0.1
"""Share of the time at its start and its end that is not counted."""

_COUNTED: Final = 20_000
"""Wakings of a simulation."""

_LOOK: Final = 0.1
_STOPPED_WITHIN: Final = 60.0
_WIDTH: Final = 148


@dataclass(frozen=True, slots=True)
class Seen:
    """Measurements of a run. idle: cores that the idle workers use, of all nodes. loads: share of a core by node.
    empty, parked: bytes of all nodes before there were agents, and when all were parked. rate: wakings per second.
    """

    idle: float
    loads: Sequence[float]
    empty: float
    parked: float
    rate: float
    late: Sequence[float]

    def percentile(self, number: int) -> float:
        return quantiles(self.late, n=100, method="inclusive")[number - 1]


@dataclass(frozen=True, slots=True)
class Plan:
    """A fleet that is run on a cluster. seconds: measured after all are parked. settle: seconds before and after."""

    fleet: Fleet
    seconds: float
    settle: float
    partitions: int = 1


async def observe(cluster: Cluster, plan: Plan) -> Seen:
    """Park the agents, let each wake once within `every`, and measure the servers meanwhile."""
    fleet, random = plan.fleet, Random(1)
    async with AsyncExitStack() as stack:
        producer = await stack.enter_async_context(
            Producer(cluster.deployment.url, namespace=cluster.deployment.namespace)
        )
        if plan.partitions > 1:
            await set_partitions(producer.gateway, producer.namespace, "bench", plan.partitions)
        module, slots = "benchmarks.scale.agent_process", str(_CONCURRENCY)
        starting = (stack.enter_async_context(started(module, cluster.deployment, slots)) for _ in range(_PROCESSES))
        workers = await asyncio.gather(*starting)
        meters = [Meter(node) for node in cluster.nodes]
        await asyncio.sleep(plan.settle)
        idle = sum(meter.read().load for meter in meters)
        empty = _memory(cluster)

        begin = time.time() + plan.settle + fleet.agents / _PARKED_A_SECOND
        wakings = math.ceil(plan.seconds / fleet.every) + 1
        given = {"every": fleet.every, "wakings": wakings, "steps": fleet.steps, "think": fleet.think}
        await producer.enqueue_many(
            "agent",
            ({"first": begin + random.uniform(0, fleet.every)} | given for _ in range(fleet.agents)),
            queue="bench",
        )
        due = [("ZCARD", producer.namespace.partition("bench", index).due) for index in range(plan.partitions)]
        while sum(await producer.gateway.pipeline(due)) < fleet.agents:
            if time.time() > begin:
                raise PerdureError("the agents were not parked in time: the machine is slow or busy")
            await asyncio.sleep(_LOOK)
        parked = _memory(cluster)

        edge = plan.seconds * _EDGE
        await asyncio.sleep(begin + edge - time.time())
        meters = [Meter(node) for node in cluster.nodes]
        await asyncio.sleep(begin + plan.seconds - edge - time.time())
        loads = [meter.read().load for meter in meters]
        for worker in workers:
            worker.send(signal.SIGTERM)
        notes = [note for worker in workers for note in json.loads(await worker.line(_STOPPED_WITHIN))]
    late = [late for ended, late in notes if begin + edge <= ended < begin + plan.seconds - edge]
    return Seen(idle, loads, empty, parked, len(late) / (plan.seconds - 2 * edge), late)


def _memory(cluster: Cluster) -> float:
    """Return the bytes that all nodes use."""
    total = 0
    for node in cluster.nodes:
        with RawClient(node.url) as client:
            info = client.call("INFO", "memory").decode()
        total += next(int(line.split(":")[1]) for line in info.splitlines() if line.startswith("used_memory:"))
    return total


def measured_costs(few: tuple[Plan, Seen], more: tuple[Plan, Seen]) -> Costs:
    """Return the costs from two runs that differ in the number of steps."""
    (plan, seen), (plan_more, seen_more) = few, more
    spent, spent_more = (max(0.0, sum(one.loads) - one.idle) / one.rate * 1e6 for one in (seen, seen_more))
    step = (spent_more - spent) / (plan_more.fleet.steps - plan.fleet.steps)
    return Costs(
        waking=spent - plan.fleet.steps * step,
        step=step,
        idle=seen.idle,
        latency=seen.percentile(50),
        parked=(seen.parked - seen.empty) / plan.fleet.agents,
    )


def shares_of(cluster: Cluster, partitions: int) -> list[float]:
    """Return the share of the partitions that each node has."""
    counts = [0] * len(cluster.nodes)
    namespace = Producer(cluster.deployment.url, namespace=cluster.deployment.namespace).namespace
    for index in range(partitions):
        counts[cluster.node_of(namespace.partition("bench", index).ready)] += 1
    return [count / partitions for count in counts]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run.

    agents: a hundredth of the plan; each wakes once. few: agents that give the costs, which wake as often in all.
    seconds, settle: see `Plan`.
    """

    agents: int = MILLION // 100
    few: int = 2_500
    seconds: float = 40.0
    settle: float = 5.0
    primaries: int = 3

    def plan(self, agents: int, steps: int, rate: float = 1.0, partitions: int = 1) -> Plan:
        """Return a plan with so many wakings a second as all agents have, times `rate`."""
        every = self.seconds * agents / self.agents / rate
        return Plan(Fleet(agents, every, steps, _THINK), self.seconds, self.settle, partitions)


FULL: Final = Sizes()
QUICK: Final = Sizes(agents=120, few=60, seconds=3.0, settle=1.0)

_THINK: Final = 0.2
_STEPS: Final = (1, 6)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Only check that it runs; ignore the figures.")] = False,
) -> None:
    """Measure the costs of sleeping agents, and compare a simulation with a run of 10,000."""
    configure_logging("ERROR")
    sizes = QUICK if quick else FULL
    all_on_one = sizes.plan(sizes.agents, _STEPS[1])
    spread = sizes.plan(sizes.agents, _STEPS[1], partitions=sizes.primaries * PARTITIONS_PER_NODE)
    try:
        with own_server(fsync=False) as deployment:
            print(origin_line(server_line(deployment)))
        costs = [_costs(sizes, rate) for rate in (1.0, 1 / sizes.primaries)]
        one = _observe_alone(all_on_one)
        _say(spread, sizes.primaries)
        with own_cluster(sizes.primaries) as cluster:
            shares = shares_of(cluster, spread.partitions)
            three = run(observe(cluster, spread))
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    _show_costs(costs)
    _show_comparison(
        all_on_one.fleet,
        (simulate(all_on_one.fleet, costs[0], seconds=sizes.seconds), one),
        (simulate(spread.fleet, costs[1], seconds=sizes.seconds, shares=shares), three),
    )
    _show_plan(costs[0])


def _costs(sizes: Sizes, rate: float) -> Costs:
    """Measure the costs with few agents. rate: wakings a second, as a share of those of all agents."""
    few, more = (sizes.plan(sizes.few, steps, rate) for steps in _STEPS)
    return measured_costs((few, _observe_alone(few)), (more, _observe_alone(more)))


def _observe_alone(plan: Plan) -> Seen:
    """Run a plan on a server of its own."""
    _say(plan, 1)
    with own_server(fsync=False) as deployment:
        return run(observe(Cluster(deployment, [deployment]), plan))


def _say(plan: Plan, nodes: int) -> None:
    fleet = plan.fleet
    text = f"{fleet.agents:,} agents, {fleet.rate:,.0f} wakings of {fleet.steps} steps a second, nodes: {nodes}"
    print(text, file=sys.stderr)


def _show_costs(found: Sequence[Costs]) -> None:
    """Print the costs at the rate of all agents on one node, and at that of a node of several."""
    table = _table("few agents", "at the rate of one node", "of one of three nodes")
    table.add_row("Redis CPU of a waking: promote, read, load, park again", *(f"{one.waking:,.0f} µs" for one in found))
    table.add_row("Redis CPU of a durable step", *(f"{one.step:,.0f} µs" for one in found))
    table.add_row("Redis CPU of the idle workers", *(f"{one.idle * 100:.1f} % of a core" for one in found))
    table.add_row("from the end of a sleep to the handler, p50", *(f"{one.latency:.1f} ms" for one in found))
    table.add_row("memory of a parked agent", *(f"{one.parked:,.0f} bytes" for one in found))
    _print(table)


def _show_comparison(fleet: Fleet, one: tuple[Forecast, Seen], three: tuple[Forecast, Seen]) -> None:
    table = _table(f"{fleet.agents:,} agents", "one node: simulated", "seen", "three nodes: simulated", "seen")

    def loads(values: Sequence[float]) -> str:
        return ", ".join(f"{value * 100:.1f}" for value in values) + " %"

    found = (*one, *three)
    table.add_row("CPU of each node", *(loads(each.loads) for each in found))
    table.add_row(
        "memory of the agents",
        *(
            f"{(each.memory if isinstance(each, Forecast) else each.parked - each.empty) / 1e6:,.1f} MB"
            for each in found
        ),
    )
    for name, number in (("p50", 50), ("p99", 99)):
        table.add_row(
            f"from the end of a sleep to the handler, {name}",
            *(f"{_late(each, number):.1f} ms" for each in found),
        )
    table.add_row("wakings per second", *(f"{_rate(each, fleet):,.0f}" for each in found))
    _print(table)


def _late(found: Forecast | Seen, number: int) -> float:
    if isinstance(found, Seen):
        return found.percentile(number)
    return found.median if number == 50 else found.worst


def _rate(found: Forecast | Seen, fleet: Fleet) -> float:
    return found.rate if isinstance(found, Seen) else fleet.rate


def _show_plan(costs: Costs) -> None:
    """Print what a million agents need, simulated with the number of nodes that the costs give."""
    table = _table(
        "a million agents that wake",
        "wakings/s",
        "steps/s",
        "running",
        "memory",
        "nodes",
        "CPU of each",
        "simulated p50, p99",
    )
    for text, every in (("every minute", 60.0), ("every 10 minutes", 600.0), ("every hour", 3600.0)):
        fleet = Fleet(MILLION, every, 10, 3.0)
        nodes = nodes_for(fleet, costs, used=USED, memory=NODE_MEMORY)
        one = Fleet(MILLION // nodes, every, fleet.steps, fleet.think)
        found = simulate(one, costs, seconds=max(5.0, _COUNTED / one.rate))
        table.add_row(
            text,
            f"{fleet.rate:,.0f}",
            f"{fleet.rate * fleet.steps:,.0f}",
            f"{fleet.running:,.0f}",
            f"{fleet.memory(costs) / 1e9:.1f} GB",
            str(nodes),
            f"{max(found.loads) * 100:.0f} %",
            f"{found.median:.1f}, {found.worst:.1f} ms",
        )
    _print(table)


def _table(*heads: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    return table


def _print(table: Table) -> None:
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
