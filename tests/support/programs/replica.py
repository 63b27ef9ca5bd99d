"""One worker process, which the tests of the guarantees start, stop, freeze and kill.

Every effect is a line in the journal, a file that all replicas append to: the process, what it did, to which task and
step. A step that waits, waits for a token on a Redis list, which the test pushes.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import anyio
import redis.asyncio
from loguru import logger
from perdure import Agent, AgentState, AlreadyDone, App, Coherence, Context, PlanStep, Retry, Worker, current_step
from perdure.queues import Partition
from perdure.queues.partitions.resharding import PartitionStatus, partition_status
from perdure.worker.agents.coherence.monitor import CoherenceMonitor
from perdure.worker.artifacts.links import ArtifactLink
from perdure.worker.artifacts.task_artifacts import Artifacts
from perdure.worker.durable.steps.current import CURRENT_RUN, Step
from perdure.worker.runtime.shared_settings import WorkerTimings

JOURNAL = os.open(os.environ["JOURNAL"], os.O_APPEND | os.O_WRONLY)
PATIENT = Retry(max_attempts=3, max_crashes=1000, base=0.0)

if "RARE_SWEEPS" in os.environ:  # then only a nudge makes a worker claim at once
    Worker.timings = WorkerTimings(sweep_interval=1000.0)

logger.enable("perdure")  # tests read the log; the library is quiet otherwise

app = App("replica")


def note(what: str, ctx: Context | None = None) -> None:
    """Append one line in one write, so that lines of several processes never mix."""
    key = current_step().idempotency_key if ctx is None else ctx.task_id
    os.write(JOURNAL, f"{os.getpid()} {what} {key}\n".encode())


async def token(name: str) -> str:
    """Wait for a token and take it."""
    client = redis.asyncio.Redis.from_url(app.settings.redis_url, socket_timeout=None, decode_responses=True)
    async with client:
        found = await client.execute_command("BLPOP", f"{{{app.settings.namespace}}}:token:{name}", 0)
    return str(found[1])


async def work(value: int, pause: float) -> int:
    note("begin")
    await anyio.sleep(pause)
    note("end")
    return value * 3 + 1


async def look(gate: str, pause: float) -> bool:
    note("begin")
    await anyio.sleep(pause)
    return await anyio.Path(gate).exists()


@app.task(retry=PATIENT)
async def pipeline(ctx: Context, value: int, steps: int, pause: float, gate: str = "") -> int:
    """Steps that build on each other; before them, steps until a file exists."""
    note("run", ctx)
    while gate and not await ctx.step("look", look, gate, pause):
        pass
    for number in range(1, steps + 1):
        value = await ctx.step("work", work, value, pause)
        note(f"recorded {number}", ctx)
    return value


async def gated(gate: str) -> str:
    note("begin")
    saved = current_step().saved
    await current_step().save({"seen": os.getpid()})
    note("saved")
    value = await token(gate)
    note("end")
    return f"{value} after {'nothing' if saved is None else 'progress'}"


async def quick(name: str) -> str:
    note("begin")
    return name


@app.task(retry=PATIENT)
async def gate(ctx: Context, name: str) -> dict[str, object]:
    """A quick step, one that waits for a token, a quick step."""
    note("run", ctx)
    try:
        first = await ctx.step("first", quick, "first")
        second = await ctx.step("second", gated, name)
        third = await ctx.step("third", quick, "third")
    except BaseException:
        note("left", ctx)
        raise
    return {"steps": [first, second, third], "pid": os.getpid(), "attempt": ctx.attempt, "crashes": ctx.crashes}


@app.task(retry=PATIENT)
async def resumes(ctx: Context, gate: str) -> dict[str, object]:
    """Return what it knows of the previous run."""
    note("run", ctx)
    await ctx.decide("go on", reasoning="there is no other way")
    await ctx.step("first", quick, "first")
    await ctx.step("second", gated, gate)
    await ctx.step("third", quick, "third")
    found = ctx.resumption
    if found is None or found.handoff is None:
        return {"pid": os.getpid()}
    reported = found.handoff.model_dump(include={"why", "last_completed"})
    reasons = [made.reasoning for made in found.handoff.decisions]
    return {"after": found.after, "gap": found.gap, "restored": found.restored, "reasons": reasons, **reported}


async def freezes(seconds: float, gate: str) -> int:
    note("begin")
    await anyio.sleep(seconds)
    while gate and not Path(gate).exists():  # noqa: ASYNC110, ASYNC240 - a file tells of nothing
        await anyio.sleep(0.005)
    note("end")
    return os.getpid()


@app.task(retry=PATIENT)
async def sleeper(ctx: Context, seconds: float = 0.0, gate: str = "") -> int:
    """A step that sleeps, and waits for a file: one that comes while the process is frozen makes for a late write."""
    note("run", ctx)
    try:
        found = await ctx.step("sleep", freezes, seconds, gate)
        note("went on", ctx)
    except BaseException:
        note("left", ctx)
        raise
    return found


@app.task(retry=PATIENT)
async def blocks(ctx: Context, seconds: float) -> int:
    """A handler that blocks the event loop."""
    note("run", ctx)
    time.sleep(seconds)  # noqa: ASYNC251 - that is the point
    return os.getpid()


def block(gate: str, *, keeps_the_lock: bool) -> None:
    """Wait for a byte from a named pipe, within C code: with Python's lock, or without."""
    libc = ctypes.PyDLL(None) if keeps_the_lock else ctypes.CDLL(None)
    pipe = os.open(gate, os.O_RDWR)  # for writing too, so that opening does not wait
    libc.read(pipe, ctypes.create_string_buffer(1), 1)
    os.close(pipe)


@app.task(retry=PATIENT)
async def stalls(ctx: Context, gate: str, keeps_the_lock: bool) -> int:
    """Block the event loop in the first run until a file appears, then continue; do not wait in the next run."""
    note("run", ctx)
    if ctx.crashes == 0:
        block(gate, keeps_the_lock=keeps_the_lock)
        note("came back", ctx)
    try:
        return await ctx.step("after", os.getpid)
    except BaseException:
        note("left", ctx)
        raise


@app.task(retry=Retry(max_crashes=2))
async def killer(ctx: Context) -> None:
    note("run", ctx)
    os.kill(os.getpid(), signal.SIGKILL)


async def charge(before: str, after: str) -> str:
    note("begin")
    await token(before)
    note("charged")
    await token(after)
    return "charged by the first run"


def find_charge(before: str, after: str) -> AlreadyDone[str] | None:
    charged = f" charged {current_step().idempotency_key}"
    found = any(line.endswith(charged) for line in Path(os.environ["JOURNAL"]).read_text("utf-8").splitlines())
    note("verified")
    return AlreadyDone("found to be charged") if found else None


@app.task(retry=PATIENT)
async def payment(ctx: Context, before: str, after: str) -> str:
    return await ctx.options(risky=True, verify=find_charge).step("charge", charge, before, after)


@app.task(retry=PATIENT)
async def doubtful(ctx: Context, before: str, after: str) -> str:
    return await ctx.options(risky=True, in_doubt="fail").step("charge", charge, before, after)


async def learns(gate: str, ctx: Context) -> str:
    """Store a memory that names the process, then wait."""
    for number in range(3):
        await ctx.memory.add(f"{number}: as process {os.getpid()} says it", type="lesson")
    note("learned")
    return await token(gate)


@app.task(retry=PATIENT)
async def student(ctx: Context, gate: str) -> list[str]:
    await ctx.step("learn", lambda: learns(gate, ctx))
    return [one.memory.text for one in await ctx.memory.search("process says")]


@app.task(retry=PATIENT, durability="async")
async def hasty(ctx: Context, gate: str) -> list[str]:
    """Steps recorded in the background, then one that waits for a token."""
    found = [await ctx.step("quick", quick, str(number)) for number in range(20)]
    note("steps done", ctx)
    found.append(await ctx.step("gated", token, gate))
    return found


async def earlier_waits(partition: Partition) -> bool:
    """Whether a message that producers put into a former partition has never been delivered."""
    gateway = app.producer.gateway
    for index in range(partition.index):
        former = app.producer.namespace.partition(partition.queue, index)
        if await partition_status(gateway, former) is PartitionStatus.CLOSED and former.index not in route_mates(
            partition.index
        ):
            return True
    return False


def route_mates(index: int) -> range:
    """The partitions of the same generation, of a queue that went from 1 to 4 to 2 to 8."""
    return next(mates for mates in (range(1), range(1, 5), range(5, 7), range(7, 15)) if index in mates)


@app.task(retry=PATIENT)
async def keyed(ctx: Context, key: str, number: int, pause: float) -> int:
    """Log the start of a keyed task, and whether messages of former partitions are still unread."""
    os.write(JOURNAL, f"{os.getpid()} start {key}:{number}\n".encode())
    run = CURRENT_RUN.get()
    assert run is not None
    if await earlier_waits(run.delivery.partition):
        os.write(JOURNAL, f"{os.getpid()} early {key}:{number}\n".encode())
    await anyio.sleep(pause)
    return number


@app.task(retry=PATIENT)
async def saves(ctx: Context) -> str:
    """Two artifacts, the bytes of the first of which are this run's own; both are linked when a token allows it."""
    note("run", ctx)
    first = await ctx.artifacts.save("of one run", f"run of {os.getpid()}")
    await ctx.artifacts.save("of any run", "the same")
    return first.hash


@app.agent(name="circling", retry=PATIENT)
class Circling(Agent[AgentState]):
    """Repeat the same call until the task is buried."""

    coherence = Coherence(repetition="bury")

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="search", title="search")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> None:
        while True:
            await ctx.tool("search", quick, "the same")

    async def finish(self, ctx: Context, state: AgentState) -> None:
        raise AssertionError("not reached: the task is buried before")


if "DIES_BEFORE_IT_ACTS" in os.environ:

    async def die(watch: CoherenceMonitor) -> None:
        os.write(JOURNAL, f"{os.getpid()} found incoherent\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)

    CoherenceMonitor._bury = die  # type: ignore[assignment,method-assign]


if "HELD_LINKS" in os.environ:
    link = Artifacts._link

    async def held(artifacts: Artifacts, kept: ArtifactLink, key: str | None, step: Step | None) -> None:
        os.write(JOURNAL, f"{os.getpid()} saved {kept.hash}\n".encode())
        await token("link")
        await link(artifacts, kept, key, step)
        os.write(JOURNAL, f"{os.getpid()} linked {kept.hash}\n".encode())

    Artifacts._link = held  # type: ignore[assignment,method-assign]


async def main() -> None:
    async with Worker(app, concurrency=int(sys.argv[1])) as worker:

        def stop() -> None:
            worker.stop()
            os.write(JOURNAL, f"{os.getpid()} stopping worker\n".encode())

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        sys.stdout.write(f"{worker.id}\n")
        sys.stdout.flush()
        await worker.run()


if __name__ == "__main__":
    anyio.run(main)
