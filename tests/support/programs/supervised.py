"""An application for supervised workers: it logs each process that imports it, and its steps wait for a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyio
from perdure import App, Context, Retry, current_step

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("supervised")


def note(what: str, key: str) -> None:
    """Append one line in one write, so that lines of several processes never mix."""
    os.write(JOURNAL, f"{os.getpid()} {what} {key}\n".encode())


note("imported", "module")


async def act(pause: float) -> None:
    note("begin", current_step().idempotency_key)
    await anyio.sleep(pause)


async def wait_for(name: str) -> None:
    note("begin", current_step().idempotency_key)
    while not Path(name).exists():  # noqa: ASYNC110, ASYNC240 - a file tells of nothing
        await anyio.sleep(0.005)


@app.task(retry=Retry(max_attempts=3, max_crashes=1000, base=0.0))
async def gated(ctx: Context, name: str, *, starts: bool = False, more: bool = False) -> int:
    """A quick step, and one that waits for a file; may start a program that outlives it, and would have it all open.

    more: take another step then.
    """
    await ctx.step("first", act, 0.0)
    if starts:
        await ctx.step("start", lambda: note("started", start_program()))  # not again when the task resumes
    await ctx.step("second", wait_for, name)
    if more:
        await ctx.step("third", act, 0.0)
    return os.getpid()


def start_program() -> str:
    """Start a program that outlives its worker and inherits all that it may. Return its process and number of pipes.

    It ends by itself after a minute, in case the test fails before its process group is killed.
    """
    listing = "import os, time; print(*os.listdir('/proc/self/fd'), flush=True); time.sleep(60)"
    program = subprocess.Popen([sys.executable, "-c", listing], stdout=subprocess.PIPE, text=True, close_fds=False)
    assert program.stdout is not None
    inherited = set(map(int, program.stdout.readline().split()))
    pipes = {int(one.name) for one in Path("/proc/self/fd").iterdir() if _is_pipe(one)}
    return f"{program.pid}:{len(inherited & pipes - {0, 1, 2})}"


def _is_pipe(descriptor: Path) -> bool:
    try:
        return str(descriptor.readlink()).startswith("pipe:")
    except OSError:
        return False


@app.task(retry=Retry(max_attempts=3, max_crashes=1000, base=0.0))
async def walk(ctx: Context, steps: int, pause: float) -> int:
    for _ in range(steps):
        await ctx.step("act", act, pause)
    return os.getpid()
