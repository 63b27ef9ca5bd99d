"""`python -m benchmarks.support.stream_process STREAMS RATE SECONDS`: a process that writes many streams.

Each of the streams of the tasks `t0`, `t1`, ..., which no worker runs, gets RATE items a second, each with the present
time, and a message on its channel, as a worker writes them.
"""

from __future__ import annotations

import sys
import time
from typing import Final

from perdure.queues import Partition

from ..raw.client import RawClient
from .deployment import Deployment
from .processes import report

ROUNDS: Final = 10
"""Rounds in which the items of one period are written, so that they do not come all at once."""


def write(deployment: Deployment, streams: int, rate: float, seconds: float) -> None:
    partition = Partition(deployment.namespace, "bench", 0)
    keys = [partition.stream(f"t{number}", "times") for number in range(streams)]
    with RawClient(deployment.url) as client:
        start = time.monotonic()
        for number in range(1, round(rate * seconds) + 1):
            for part in range(ROUNDS):
                late = start + (number - 1 + part / ROUNDS) / rate - time.monotonic()
                if late > 0:
                    time.sleep(late)
                some = keys[part::ROUNDS]
                item = ("t", 1, "u", "", "y", 0, "n", number)
                now = repr(time.monotonic())
                writes = [("XADD", key, "MAXLEN", "~", 1000, f"{number}-0", *item, "d", now) for key in some]
                if some:
                    client.pipeline([*writes, *(("PUBLISH", key, number) for key in some)])


if __name__ == "__main__":
    report()
    write(Deployment.from_environment(), int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    report()
