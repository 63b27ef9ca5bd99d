"""`python -m benchmarks.waking`: the latency of a message that wakes one of many parked tasks, and their memory.

Tasks wait for a message in a worker of another process, which parks all of them. Then one after the other gets its
message: the latency is from the call that sends it to the line of the handler after `ctx.inbox`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass
from random import Random
from statistics import quantiles
from typing import Annotated, Final

import hiredis
import redis
import typer
from perdure import PerdureError, Producer
from perdure.queues import Partition
from perdure.worker.log import configure_logging

from .raw.client import RawClient
from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.processes import started
from .support.server import NoServer, own_server, server_line

_AT_ONCE: Final = 500
_IDLE_AGAIN: Final = 0.004
"""Seconds for a worker to settle a task and block on the next read."""

_PARKED_WITHIN: Final = 300.0
_REPORTED_WITHIN: Final = 10.0
_WARM_UP: Final = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures. latencies: in milliseconds. memory: bytes of Redis for each parked task. keys: the same by key."""

    latencies: list[float]
    memory: float
    keys: dict[str, int]


async def measure(deployment: Deployment, parked: int, woken: int) -> Outcome:
    """Park so many tasks, and wake some of them."""
    before = _memory(deployment)
    ids = [f"t{number}" for number in range(parked)]
    async with (
        Producer(deployment.url, namespace=deployment.namespace) as producer,
        started("benchmarks.support.worker_process", deployment) as worker,
    ):
        for start in range(0, parked, _AT_ONCE):
            some = ids[start : start + _AT_ONCE]
            await asyncio.gather(*(producer.enqueue("await_mail", task_id=name, queue="bench") for name in some))
        partition = Partition(deployment.namespace, "bench", 0)
        deadline = time.monotonic() + _PARKED_WITHIN
        while (waiting := await producer.gateway.command("ZCARD", partition.due)) < parked:
            if time.monotonic() > deadline:
                raise PerdureError(f"{waiting} of {parked} tasks were parked within {_PARKED_WITHIN:g} s")
            await asyncio.sleep(0.2)
        memory = (_memory(deployment) - before) / parked
        keys = _keys(deployment, partition, ids[0])
        found = []
        for name in Random(1).sample(ids, _WARM_UP + woken):
            await asyncio.sleep(_IDLE_AGAIN)
            sent = time.monotonic()
            await producer.send_message(name, "now")
            found.append((await worker.reported(_REPORTED_WITHIN) - sent) * 1000)
    return Outcome(found[_WARM_UP:], memory, keys)


def _memory(deployment: Deployment) -> int:
    with RawClient(deployment.url) as client:
        info = client.call("INFO", "memory").decode()
    return next(int(line.split(":")[1]) for line in info.splitlines() if line.startswith("used_memory:"))


def _keys(deployment: Deployment, partition: Partition, task: str) -> dict[str, int]:
    keys = {
        "record": partition.record(task),
        "checkpoint": partition.steps(task),
        "event log": partition.log(task),
        "inbox": partition.inbox(task),
    }
    with RawClient(deployment.url) as client:
        return {name: client.call("MEMORY", "USAGE", key, "SAMPLES", 0) or 0 for name, key in keys.items()}


def main(
    parked: Annotated[int, typer.Option(help="Parked tasks.")] = 10_000,
    woken: Annotated[int, typer.Option(help="Tasks that are woken.")] = 1_000,
    quick: Annotated[bool, typer.Option("--quick", help="Few tasks, to try the program.")] = False,
) -> None:
    """Measure the latency of a message to one of 10,000 parked tasks, and the memory of each."""
    configure_logging("ERROR")
    if quick:
        parked, woken = 200, 50
    if woken + _WARM_UP > parked:
        raise typer.BadParameter(f"--woken must be at most {parked - _WARM_UP}, got {woken}")
    try:
        with own_server(fsync=False) as deployment:
            print(origin_line(server_line(deployment)))
            found = run(measure(deployment, parked, woken))
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    late = quantiles(found.latencies, n=100, method="inclusive")
    print(f"message to handler, {parked:,} tasks parked: p50 {late[49]:.1f} ms, p99 {late[98]:.1f} ms")
    keys = ", ".join(f"{name} {size:,}" for name, size in found.keys.items())
    print(f"memory of a parked task: {found.memory:,.0f} bytes ({keys})")


if __name__ == "__main__":
    typer.run(main)
