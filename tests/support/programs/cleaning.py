"""A worker process whose tasks have a clean-up task, and note in the journal how their runs stop.

Lines of the journal: process, what happened, task id. SIGTERM stops the worker as `perdure worker run` does.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import anyio
from perdure import App, Context, Retry, Worker

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("cleaning")


def note(what: str, task_id: str) -> None:
    os.write(JOURNAL, f"{os.getpid()} {what} {task_id}\n".encode())


async def book(task_id: str) -> str:
    note("book", task_id)
    return f"booking of {task_id}"


@app.task(retry=Retry(max_attempts=1, max_crashes=1000))
async def give_back(ctx: Context, task_id: str) -> None:
    ended = await ctx.ended_task(task_id)
    note(f"{ended.state} with {len(ended.steps)} steps", task_id)
    await ctx.step("give back", note, "give back", task_id)


@app.task(on_end=give_back, retry=Retry(max_attempts=1, max_crashes=1000))
async def stay(ctx: Context, asks: bool) -> None:
    await ctx.step("book", book, ctx.task_id)
    try:
        if asks:
            await ctx.ask("ada", "confirm?")
        else:
            note("sleeps", ctx.task_id)
            await anyio.sleep_forever()
    except BaseException as error:
        stop = ctx.stopping
        note(f"{type(error).__name__} {stop and stop.reason} {stop and stop.ends_task}", ctx.task_id)
        raise


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.stop)
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
