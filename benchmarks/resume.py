"""`python -m benchmarks.resume`: the cost of resuming a task with a long history, and of its next calls.

An agent and a function make the same small calls. After a number of calls the worker is stopped, and a new worker
resumes the task. The agent is interrupted within a step of its plan, the function between two steps. The resumed runs
are interrupted within their first new call, so that each has the same history; the last run, in which memory is traced,
ends the task. Times are medians of the resumed runs.

The calls are recorded in the background, except for the last ones of the first run, whose written bytes are counted.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Final

import hiredis
import redis
import typer
from perdure import Agent, AgentState, App, Context, PerdureError, PlanStep, Worker
from perdure.queues import Partition, TaskHandle
from perdure.worker.durable.steps.current import Durability
from perdure.worker.log import configure_logging

from .raw.client import RawClient
from .support.deployment import Deployment
from .support.machine import origin_line, run
from .support.server import NoServer, own_server, server_line

SIZES: Final = (100, 10_000, 100_000)
STEPS: Final = 20
"""Steps of the agent's plan; its calls are spread over them."""

RESUMES: Final = 7
"""Resumed runs whose times are measured."""

INTO_A_STEP: Final = 50
"""Calls of the agent in the interrupted step."""

BEGIN, END = "<!-- resume: begin -->", "<!-- resume: end -->"
"""Marks around the table in a document."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The figures of one history. events: in the log. start: median of the seconds from the start of a worker to that
    of the handler. resume: the same to the first new call. memory: largest number of bytes that Python allocated in the
    last run. written: bytes that Redis received per call, at the end of the history. checkpoint: bytes of memory in
    Redis.
    """

    what: str
    events: int
    start: float
    resume: float
    memory: int
    written: float
    checkpoint: int


@dataclass(slots=True)
class Scene:
    """The state of one benchmark. calls: their total number. resuming: whether the present run is measured.
    starts, resumes: when the handlers of these runs started, and when they made their first new call.
    """

    deployment: Deployment
    calls: int
    made: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    first: bool = True
    resuming: bool = False
    starts: list[float] = field(default_factory=list)
    resumes: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    @property
    def window(self) -> int:
        """Number of calls before the interruption for which written bytes are counted."""
        return max(10, self.calls // STEPS)

    async def call(self, number: int) -> dict[str, int]:
        """Make the small call of both tasks."""
        if self.resuming:
            self.resumes.append(perf_counter())
            await self.interruption()
        self.made += 1
        if self.made in (self.calls - self.window, self.calls):  # what was in the background has been sent
            self.received.append(self._received())
        return {"page": number}

    def handler_started(self) -> None:
        if self.resuming and len(self.starts) == len(self.resumes):
            self.starts.append(perf_counter())

    @property
    def in_background(self) -> int:
        """Number of calls that are recorded in the background: all before the window but two, so none is left in it."""
        return max(0, self.calls - self.window - 2)

    def durability(self, number: int) -> Durability:
        """Return how a call is recorded: in the window, and just before it, with a round trip."""
        return "async" if number < self.in_background else "sync"

    async def interruption(self) -> None:
        """Block, so that the run is interrupted here."""
        self.reached.set()
        await asyncio.Event().wait()

    async def after_history(self) -> None:
        """Interrupt the first run."""
        if self.first:
            await self.interruption()

    def _received(self) -> int:
        with RawClient(self.deployment.url) as client:
            info = client.call("INFO", "stats").decode()
        return next(int(line.split(":")[1]) for line in info.splitlines() if line.startswith("total_net_input_bytes"))


def _agent(app: App, scene: Scene) -> Any:
    each, rest = divmod(scene.calls - min(INTO_A_STEP, scene.calls // 2), STEPS - 1)

    class Reader(Agent[AgentState]):
        async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
            return [PlanStep(key=f"chapter-{number}", title=f"read chapter {number}") for number in range(STEPS)]

        async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> int:
            scene.handler_started()
            last = step.key == f"chapter-{STEPS - 1}"
            pages = min(INTO_A_STEP, scene.calls // 2) if last else each + (rest if step.key == "chapter-0" else 0)
            for number in range(pages):
                caller = ctx.options(reasoning="the plan says so", durability=scene.durability(scene.made))
                await caller.tool("read", scene.call, number)
            if last:
                await scene.after_history()
                await ctx.tool("read", scene.call, pages)
            return pages

        async def finish(self, ctx: Context, state: AgentState) -> int:
            return len(state.results)

    return app.agent(name="read")(Reader)


def _function(app: App, scene: Scene) -> Any:
    @app.task(name="walk")
    async def walk(ctx: Context, goal: str) -> int:
        scene.handler_started()
        background, early = ctx.options(durability="async"), scene.in_background
        for number in range(early):  # nothing else in these loops: its time would be added to that of the steps
            await background.step("read", scene.call, number)
        for number in range(early, scene.calls):
            await ctx.step("read", scene.call, number)
        await scene.after_history()
        await ctx.step("read", scene.call, scene.calls)
        return scene.calls

    return walk


async def measure(deployment: Deployment, what: str, calls: int) -> Outcome:
    """Create a history of `calls` calls, interrupt it, and resume it; trace memory in a run apart, as it takes time."""
    scene = Scene(deployment, calls)
    app = deployment.app()
    task = _agent(app, scene) if what == "agent" else _function(app, scene)
    async with app:
        handle: TaskHandle[Any] = await task.enqueue(goal="read it all")
        await _run_until_interrupted(app, scene)
        events = await app.producer.gateway.command("XLEN", handle.partition.log(handle.id))
        checkpoint = await _memory(app, handle.partition, handle.id)
        scene.first, scene.resuming = False, True
        began = []
        for _ in range(RESUMES):
            scene.reached = asyncio.Event()
            gc.collect()
            began.append(perf_counter())
            await _run_until_interrupted(app, scene)
        scene.resuming = False
        memory = await _run_traced(app)
        await handle.result(timeout=1)
    first, last = scene.received
    start = median(at - start for at, start in zip(scene.starts, began, strict=True))
    resume = median(at - start for at, start in zip(scene.resumes, began, strict=True))
    return Outcome(what, events, start, resume, memory, (last - first) / scene.window, checkpoint)


async def _run_until_interrupted(app: App, scene: Scene) -> None:
    async with Worker(app) as worker:
        running = asyncio.create_task(worker.run())
        await scene.reached.wait()
        worker.stop()
        worker.stop()
        await running


async def _run_traced(app: App) -> int:
    """Run the task to its end, and return the largest number of bytes that Python allocated meanwhile."""
    gc.collect()
    tracemalloc.start()
    try:
        async with Worker(app) as worker:
            await worker.run(burst=True)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


async def _memory(app: App, partition: Partition, task_id: str) -> int:
    found = await app.producer.gateway.command("MEMORY", "USAGE", partition.steps(task_id), "SAMPLES", 0)
    return int(found or 0)


async def _all(deployment: Deployment, sizes: Sequence[int]) -> list[Outcome]:
    found = []
    for what in ("agent", "function"):
        for calls in sizes:
            here = deployment.within(f"{what}-{calls}")
            print(f"{what}, {calls:,} calls ...", file=sys.stderr)
            found.append(await measure(here, what, calls))
            here.purge()
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the figures as a Markdown table."""
    lines = [
        "| | events | handler starts | first new call | memory | bytes to Redis per call | checkpoint |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.what} | {one.events:,} | {one.start * 1000:,.0f} ms | {one.resume * 1000:,.0f} ms | "
        f"{one.memory / 1024:,.0f} KB | {one.written:,.0f} | "
        f"{one.checkpoint / 1024:,.0f} KB |"
        for one in outcomes
    ]
    return "\n".join(lines)


def write(document: Path, text: str) -> None:
    """Replace the text between the marks of a document."""
    former = document.read_text("utf-8")
    head, begin, rest = former.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise typer.BadParameter(f"{document} must have the lines {BEGIN} and {END}")
    document.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}", "utf-8")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Only check that it runs; ignore the figures.")] = False,
    document: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="Also write the table to this document.")
    ] = None,
) -> None:
    """Measure resumed runs after 100, 10,000 and 100,000 events, and the bytes of a call."""
    if quick and document is not None:
        raise typer.BadParameter("--quick cannot be combined with --write: its figures are meaningless")
    configure_logging("ERROR")
    try:
        with own_server(fsync=False) as deployment:
            conditions = [origin_line(server_line(deployment))]
            found = table(run(_all(deployment, (100, 500) if quick else SIZES)))
    except (NoServer, PerdureError, redis.RedisError, hiredis.HiredisError) as error:
        print(f"could not measure: {error}", file=sys.stderr)
        raise typer.Exit(1) from error
    text = "\n".join([*conditions, "", found])
    print(text)
    if document is not None:
        write(document, "\n".join([*conditions, "", found]))


if __name__ == "__main__":
    typer.run(main)
