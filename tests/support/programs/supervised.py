"""An application for supervised workers: it logs each process that imports it, and its steps wait for a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Worker, current_step

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)

app = App("supervised")


def note(what: str, key: str) -> None:
    """Append one line in one write, so that lines of several processes never mix."""
    os.write(JOURNAL, f"{os.getpid()} {what} {key}\n".encode())


note("imported", "module")

stop_worker = Worker.stop


def stop(worker: Worker) -> None:
    stop_worker(worker)
    note("stopping", "worker")


Worker.stop = stop  # type: ignore[assignment,method-assign]


async def act(pause: float) -> None:
    note("begin", current_step().idempotency_key)
    await anyio.sleep(pause)


async def wait_for(name: str) -> None:
    note("begin", current_step().idempotency_key)
    await wait_for_file(Path(name))


async def wait_for_file(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110, ASYNC240 - a file has no event
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


@app.task(retry=Retry(max_attempts=3, max_crashes=1000, base=0.0))
async def die(ctx: Context) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Climb(AgentState):
    """State of the agent. folder: of the files that it waits for."""

    folder: str
    steps: int


@app.agent(name="climbing", retry=Retry(base=0.0))
class Climbing(Agent[Climb]):
    """An agent that waits at each fifth step of its plan for a file named after it."""

    async def plan(self, ctx: Context, state: Climb) -> list[PlanStep]:
        return [PlanStep(key=str(number), title="climb") for number in range(1, state.steps + 1)]

    async def act(self, ctx: Context, state: Climb, step: PlanStep) -> str:
        note("begin", f"{ctx.task_id}:{step.key}")
        if int(step.key) % 5 == 0:
            await wait_for_file(Path(state.folder, step.key))
        return step.key

    async def finish(self, ctx: Context, state: Climb) -> int:
        return os.getpid()
