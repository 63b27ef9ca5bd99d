"""App of the simulated workers: tasks of every kind, whose steps write to a journal that no kill can touch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final
from unittest.mock import patch

import anyio
from perdure import Agent, AgentState, App, Context, PlanStep, Retry, Snooze, current_step
from perdure.queues.catalog import AppEntry
from perdure.worker import registry
from perdure.worker.agents import state_type
from perdure.worker.agents.state_type import StateType
from perdure.worker.arguments import Arguments
from perdure.worker.durable.steps.codec import Codec
from perdure.worker.middleware import CallNext, Middleware
from perdure.worker.settings import Settings

from .fleet.elements import RESTART_DELAYS, WorkerPlan
from .fleet.families import register_families
from .fleet.kit import TaskKit
from .fleet.limits import register_limits
from .fleet.streams import register_streams
from .fleet.values import register_values
from .fleet.waits import register_waits
from .loop import SimulatedLoop, current

__all__ = ["AGENT", "MESSAGES", "NAMESPACE", "Entry", "Journal", "make_app", "messages_of"]

NAMESPACE: Final = "sim"

AGENT: Final = "agent"
"""Name of the agent, of which some tasks are goals and all turns of sessions are."""

MESSAGES: Final = 2
"""Messages that a task of the kind `listens` waits for."""


def messages_of(task: str) -> list[str]:
    """Return the messages that a task waits for."""
    return [f"{task} message {number}" for number in range(MESSAGES)]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal.

    Attributes:
        at: Virtual time.
        what: "effect" of a step; "got" for a result that a handler has, so that it is recorded; "acked" by a producer;
            "result" of a handler; "failed" for an error of one, with its kind; "dies" for a handler that ends its
            process. Those of waits and families are in fleet/.
    """

    at: float
    what: str
    machine: str
    task: str
    step: str = ""
    value: Any = None
    run: int = 0


_CATALOG: Final[dict[tuple[int, bool], AppEntry]] = {}
_ARGUMENTS: Final[dict[str, Arguments]] = {}

_codec = cache(Codec)
_state_type = cache(StateType)

_RUN: ContextVar[int] = ContextVar("_RUN", default=0)


@dataclass
class Journal:
    """Log of a run that is kept outside of the simulated machines, so that no kill loses a line.

    Attributes:
        rests: Seconds between the last record of a task and its outcome.
        on_entry: Called with each entry.
        running: Handlers that run, by machine.
        die: Ends the process of the calling handler.
    """

    loop: SimulatedLoop
    rests: Mapping[str, float]
    on_entry: Callable[[Entry], None] = lambda entry: None
    die: Callable[[], None] = lambda: None
    entries: list[Entry] = field(default_factory=list)
    tokens: int = 0
    runs: int = 0
    running: Counter[str] = field(default_factory=Counter)

    @property
    def run(self) -> int:
        """Number of the calling run."""
        return _RUN.get()

    def write(self, what: str, task: str, step: str = "", value: Any = None) -> None:
        entry = Entry(self.loop.now, what, current().name, task, step, value, _RUN.get())
        self.entries.append(entry)
        self.on_entry(entry)

    async def rest(self, task: str) -> None:
        """Let a handler do something else after its last record."""
        if task in self.rests:
            await anyio.sleep(self.rests[task])

    def token(self) -> str:
        """Return a value that no other step makes."""
        self.tokens += 1
        return f"v{self.tokens}"


class _RunLog(Middleware):
    """Middleware that logs each run, and what it returns."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        self._journal.runs += 1
        _RUN.set(self._journal.runs)
        machine = current().name
        self._journal.running[machine] += 1
        self._journal.write("run", ctx.task_id)
        try:
            result = await call_next()
        except Exception as error:
            self._journal.write("failed", ctx.task_id, ctx.task, repr(error))
            await self._journal.rest(ctx.task_id)
            raise
        else:
            await self._journal.rest(ctx.task_id)
        finally:
            self._journal.running[machine] -= 1
        self._journal.write("result", ctx.task_id, value=result)
        return result


class _Progress(AgentState):
    steps: int = 0
    pause: float = 0.0


def make_app(journal: Journal, url: str, worker: WorkerPlan, release: int = 1) -> App:
    """Return the app of one simulated process. What all of them have alike is made once, since it is costly."""
    with (
        patch.object(registry, "Arguments", _arguments),
        patch.object(registry, "Codec", _codec),
        patch.object(state_type, "StateType", _state_type),
    ):
        app = _make_app(journal, url, worker, release)
    kind = (release, worker.supervised)
    entry = _CATALOG.get(kind) or _CATALOG.setdefault(kind, app.tasks.entry(app.name))
    # the schemas of the catalog are computed once per process, not once per app
    app.tasks.entry = lambda app: entry  # type: ignore[method-assign]
    return app


def _arguments(name: str, handler: Callable[..., Any], call_options: Collection[str]) -> Arguments:
    """Return the arguments of a handler, which is the same function in another process."""
    found = _ARGUMENTS.get(name)
    if found is None:
        found = _ARGUMENTS[name] = Arguments(name, handler, call_options)
    return found


def _make_app(journal: Journal, url: str, worker: WorkerPlan, release: int) -> App:
    settings = Settings(redis_url=url, lease=worker.lease, heartbeat=worker.heartbeat, namespace=NAMESPACE, grace=2.0)
    if worker.supervised:
        supervised = {"stall_limit": worker.stall_limit, "crash_threshold": worker.crash_threshold}
        settings = settings.model_copy(update=supervised | {"restart_delays": RESTART_DELAYS})
    app = App("sim", settings=settings, middleware=[_RunLog(journal)])
    retry = Retry(max_attempts=3, max_crashes=worker.max_crashes, base=0.1, cap=1.0)

    async def work(inputs: list[str], pause: float) -> str:
        step = current_step()
        task, _, key = step.idempotency_key.partition(":")
        token = journal.token()
        journal.write("effect", task, key, token)
        await anyio.sleep(pause)
        return token

    async def stepped(ctx: Context, name: str, inputs: list[str], pause: float, *, durability: Any = "sync") -> str:
        token: str = await ctx.options(durability=durability).step(name, work, inputs, pause)
        if durability == "sync":
            journal.write("got", ctx.task_id, value=token)
        return token

    @app.task(retry=retry, version=release)
    async def chain(ctx: Context, steps: int, pause: float) -> list[str]:
        """Steps that build on each other."""
        found: list[str] = []
        for number in range(steps):
            found.append(await stepped(ctx, f"step-{number}", list(found), pause))
        return found

    @app.task(retry=retry, version=release)
    async def hasty(ctx: Context, steps: int, pause: float) -> list[str]:
        """Steps recorded in the background, every third before the next begins."""
        found: list[str] = []
        for number in range(steps):
            durability = "sync" if number % 3 == 2 else "async"
            found.append(await stepped(ctx, f"step-{number}", list(found), pause, durability=durability))
        return found

    @app.task(retry=retry, version=release)
    async def fan(ctx: Context, steps: int, pause: float) -> list[str]:
        """Steps at the same time, and one that takes what all have made."""
        found: dict[int, str] = {}

        async def one(number: int) -> None:
            found[number] = await stepped(ctx, f"ray-{number}", [], pause * (1 + number / steps))

        async with anyio.create_task_group() as group:
            for number in range(steps):
                group.start_soon(one, number)
        rays = [found[number] for number in range(steps)]
        return [*rays, await stepped(ctx, "together", rays, pause)]

    @app.task(retry=retry, version=release)
    async def stumbles(ctx: Context, steps: int, pause: float) -> list[str]:
        """Fails at first, and keeps its checkpoint from attempt to attempt."""
        found: list[str] = []
        for number in range(steps):
            found.append(await stepped(ctx, f"step-{number}", list(found), pause))
            if number < ctx.attempt < 3:
                raise ValueError(f"attempt {ctx.attempt} fails")
        return found

    @app.task(retry=retry, version=release)
    async def doomed(ctx: Context, steps: int, pause: float) -> list[str]:
        """Fails in each attempt."""
        await stepped(ctx, "step-0", [], pause)
        raise ValueError("as it always does")

    @app.task(retry=retry, version=release)
    async def dozes(ctx: Context, steps: int, pause: float) -> list[str]:
        """Sleeps without a slot between its steps."""
        rested = ctx.resumed
        found = [await stepped(ctx, "step-0", [], pause)]
        if not rested:
            raise Snooze(pause * 2)
        found.append(await stepped(ctx, "step-1", list(found), pause))
        return found

    @app.task(retry=retry, version=release)
    async def listens(ctx: Context, steps: int, pause: float) -> list[str]:
        """Waits for messages without a worker, each of which it gets once and in order."""
        await stepped(ctx, "step-0", [], pause)
        await journal.rest(ctx.task_id)
        texts: list[str] = []
        while len(texts) < MESSAGES:
            texts += [message.content for message in await ctx.inbox(wait=math.inf, limit=1)]
        return texts

    @app.task(retry=retry, version=release)
    async def relay(ctx: Context, steps: int, pause: float) -> None:
        """Hands its work to another task."""
        await stepped(ctx, "step-0", [], pause)
        await ctx.continue_as(chain, why="the rest", arguments={"steps": steps, "pause": pause})

    @app.task(retry=retry, version=release)
    async def passes(ctx: Context, steps: int, pause: float) -> None:
        """Hands its work to a task that waits for the messages which were sent to this one."""
        await stepped(ctx, "step-0", [], pause)
        await ctx.continue_as(listens, why="the messages", arguments={"steps": 1, "pause": pause})

    kit = TaskKit(app, journal, stepped, {"retry": retry, "version": release})
    register_waits(kit)
    register_families(kit)
    register_streams(kit)
    register_values(kit)
    register_limits(kit)

    if worker.supervised:

        @app.task(retry=Retry(max_crashes=3, base=0.1, cap=1.0), version=release)
        async def poison(ctx: Context, steps: int, pause: float) -> None:
            """Ends the process that runs it, after some steps."""
            found: list[str] = []
            for number in range(steps - 1):
                found.append(await stepped(ctx, f"step-{number}", list(found), pause))
            await anyio.sleep(pause)
            journal.write("dies", ctx.task_id)
            journal.die()
            await anyio.sleep_forever()

    @app.agent(name=AGENT, retry=retry, version=release)
    class SimulatedAgent(Agent[_Progress]):
        """Agent whose steps each take the results before them."""

        snapshot_every = 5

        async def plan(self, ctx: Context, state: _Progress) -> list[PlanStep]:
            return [PlanStep(key=f"part-{number}", title=f"part {number}") for number in range(state.steps)]

        async def act(self, ctx: Context, state: _Progress, step: PlanStep) -> str:
            await ctx.decide(f"take {step.key}", reasoning=f"{len(state.results)} parts are done")
            return await stepped(ctx, "work", list(state.results.values()), state.pause)

        async def finish(self, ctx: Context, state: _Progress) -> list[str]:
            return list(state.results.values())

    return app
