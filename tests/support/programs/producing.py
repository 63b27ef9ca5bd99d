"""A producer of unique tasks that kills itself with SIGKILL at one act, or enqueues until another process kills it.

Arguments: JSON with `rule` (of `Unique`), `orders`, and `kill`: "before SCRIPT" or "after SCRIPT", empty for none.
Each task that is enqueued or found is a line in the journal: `PID enqueued ORDER:ID:EXISTED`.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from perdure import App, Context, Unique
from perdure.queues.transport.gateway import Gateway
from perdure.queues.transport.scripts import Script

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
GIVEN: dict[str, Any] = json.loads(sys.argv[1])

app = App("shop")


@app.task(unique=Unique(**GIVEN["rule"]))
async def pay(ctx: Context, order: int) -> int:
    return order


run = Gateway.run


async def dying(self: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any], derived: Any = None) -> Any:
    """Run a script, and end this process before or after it if that is its time."""
    when, _, name = GIVEN["kill"].partition(" ")
    if script.name == name and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    answer = await run(self, script, keys, args, derived)
    if script.name == name:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


if GIVEN["kill"]:
    Gateway.run = dying  # type: ignore[method-assign]


async def enqueue(order: int) -> None:
    handle = await pay.enqueue(order)
    os.write(JOURNAL, f"{os.getpid()} enqueued {order}:{handle.id}:{handle.existed}\n".encode())


async def main() -> None:
    async with app:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            orders = random.sample(GIVEN["orders"], len(GIVEN["orders"]))
            for start in range(0, len(orders), 8):
                await asyncio.gather(*(enqueue(order) for order in orders[start : start + 8]))
            if not GIVEN.get("forever"):
                return


if __name__ == "__main__":
    asyncio.run(main())
