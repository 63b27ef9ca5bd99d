"""Workers that exit at one moment each: before the n-th call of a run to Redis.

Called with the numbers of queues. For each it forks a process, which works that queue until nothing is left to do and
kills itself (SIGKILL) at the moment of that number, if it gets there. Prints for each number how the process ended.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import anyio
from perdure import App, Context, Retry, Worker
from perdure.queues import Gateway
from perdure.worker.durable.steps.current import CURRENT_RUN

app = App("reader")
SETTLING = ("retry", "finish", "bury")


@app.task(name="converse", retry=Retry(max_crashes=1000))
async def converse(ctx: Context, friend: str) -> list[Any]:
    """Read until the end, and send on what was read, in the same order."""
    heard: list[Any] = []
    while "end" not in heard:
        for message in await ctx.inbox(wait=None if len(heard) < 2 else 3600, limit=2):
            await ctx.send(friend, message.content)
            heard.append(message.content)
    return heard


class Moments:
    """Counts what the run asks of Redis, and ends the process before one of them.

    That is after the one before, too: what happens between the two, Redis does not know.
    """

    def __init__(self, last: int) -> None:
        self._left = last
        for name in ("run", "command", "pipeline"):
            setattr(Gateway, name, self._watched(getattr(Gateway, name)))

    def _watched(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        async def asked(gateway: Gateway, *args: Any, **options: Any) -> Any:
            if CURRENT_RUN.get() is not None or getattr(args[0], "name", "") in SETTLING:
                self._pass()
            return await ask(gateway, *args, **options)

        return asked

    def _pass(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


async def work(queue: str) -> None:
    async with Worker(app, queues=[queue], concurrency=1) as worker:
        await worker.run(burst=True)


def main() -> None:
    started = {}
    for number in map(int, sys.argv[1:]):
        process = os.fork()
        if not process:
            Moments(number)
            anyio.run(work, f"q{number}")
            os._exit(0)
        started[process] = number
    for process, number in started.items():
        _, status = os.waitpid(process, 0)
        sys.stdout.write(f"{number} {os.waitstatus_to_exitcode(status)}\n")


if __name__ == "__main__":
    main()
