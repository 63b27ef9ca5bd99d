"""An example application: a task that shows which worker took each of its steps.

    perdure enqueue relay --args '{"steps": 20}'

Stop, kill or redeploy workers while it runs: its result names every worker that carried it, each step once.
"""

from __future__ import annotations

import os
import socket

import anyio
from perdure import App, Context

app = App("example")


@app.task
async def relay(ctx: Context, steps: int = 10, seconds: float = 1.0) -> list[str]:
    """Carry on for `steps` steps of `seconds` each."""
    return [await ctx.step("carry", carry, number, seconds) for number in range(1, steps + 1)]


async def carry(number: int, seconds: float) -> str:
    await anyio.sleep(seconds)
    return f"step {number} by {socket.gethostname()}-{os.getpid()}"
