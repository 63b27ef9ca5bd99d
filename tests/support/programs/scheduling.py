"""A worker process that fires a schedule each second, and kills itself with SIGKILL at one act.

Arguments: JSON with `queue` that the worker serves, and `kill`: "before SCRIPT" or "after SCRIPT", empty for none. Each
run of the task is a line in the journal: the id of the task.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

from perdure import App, Context, Every, Worker
from perdure.queues.transport.gateway import Gateway
from perdure.queues.transport.scripts import Script

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
GIVEN: dict[str, Any] = json.loads(sys.argv[1])

app = App("clock")


@app.task(result_ttl=0.2)
async def tick(ctx: Context) -> None:
    os.write(JOURNAL, f"{ctx.task_id}\n".encode())


app.schedule("tick", tick, Every(1), missed="all")

run = Gateway.run


async def dying(self: Gateway, script: Script, keys: Sequence[str], args: Sequence[Any], derived: Any = None) -> Any:
    """Run a script, and end this process before or after it if that is its time."""
    when, _, act = GIVEN["kill"].partition(" ")
    own = script.name == "fire_schedule" if act == "fire" else script.name == "write_compared" and _says(args, act)
    if own and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    answer = await run(self, script, keys, args, derived)
    if own:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer


def _says(args: Sequence[Any], act: str) -> bool:
    """Return whether a change of the schedule is the claim of a firing, or the end of one."""
    fields = dict(zip(args[6::2], args[7::2], strict=True))
    return "firing" in fields and bool(fields["firing"]) == (act == "claim")


if GIVEN["kill"]:
    Gateway.run = dying  # type: ignore[method-assign]


async def main() -> None:
    async with Worker(app, queues=[GIVEN["queue"]]) as worker:
        print("ready", flush=True)  # noqa: T201 - the test waits for it
        await worker.run()


asyncio.run(main())
