"""A deployment that is mutated: tasks in every state, a session, workers, and what an operator and a user expect."""

from __future__ import annotations

import asyncio
import functools
import unicodedata
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import anyio.to_thread
import redis.asyncio
from perdure import Agent, AgentState, App, Context, PlanStep, Producer, Retry, Settings, State, TaskHandle, Worker
from perdure.queues.supervisors import SupervisorInfo, count_crash, supervise
from perdure.worker.agents.identity import Identity, set_identity
from perdure.worker.runtime.shared_settings import WorkerTimings

from tests.fuzz.mutations import Mutation, Mutator
from tests.fuzz.places import STORE
from tests.support.command_line import call
from tests.support.workers import bounded, wait_until

__all__ = ["DETAILS", "LISTS", "QUEUE", "TIMINGS", "World"]

QUEUE: Final = "fuzzed"

LISTS: Final[Sequence[tuple[str, ...]]] = (
    ("task", "list"),
    ("task", "list", "--state", "running"),
    ("task", "list", "--queue", QUEUE, "--state", "queued"),
    ("task", "catalog"),
    ("task", "versions"),
    ("dlq", "list"),
    ("session", "list"),
    ("store", "list"),
    ("store", "list", "/".join(STORE)),
    ("worker", "list"),
    ("queue", "list"),
    ("queue", "partitions", QUEUE),
    ("queue", "junk"),
    ("job", "list"),
    ("config", "show"),
)
"""Lists that print whatever is stored, with exit code 0."""

TASKS: Final = ("succeeded", "dead", "parked", "delayed", "cancelled", "walking")
DETAILS: Final[Sequence[tuple[str, ...]]] = (
    *(("task", "show", task) for task in TASKS),
    *(("task", "why", task) for task in TASKS),
    *(("task", "events", task) for task in TASKS),
    ("task", "inbox", "parked"),
    ("task", "state", "parked"),
    ("task", "result", "succeeded"),
    ("task", "artifact", "succeeded"),
    ("task", "events", "--queue", QUEUE),
    ("dlq", "show", "dead"),
    ("dlq", "groups"),
    ("dlq", "export"),
    ("session", "show", "Talker", "ada"),
    ("store", "show", "/".join(STORE), "long"),
    ("identity", "show", "Talker"),
    ("identity", "log", "Talker"),
    ("worker", "health"),
    ("queue", "metrics"),
    ("doctor",),
)
"""Commands that may refuse what is damaged, with exit code 1 and one line."""

_SERVED: Final = 20.0
"""Seconds within which a new task has its result. The bound decides nothing on an idle machine."""

_WALK: Final = 40
TIMINGS: Final = WorkerTimings(sweep_interval=0.3, clean_interval=0.1, clean_lock=0.1)
_LETTER: Final = Retry(max_attempts=1)


class Talker(Agent[AgentState]):
    """An agent that answers with what it was sent."""

    async def plan(self, ctx: Context, state: AgentState) -> list[PlanStep]:
        return [PlanStep(key="say", title="say")]

    async def act(self, ctx: Context, state: AgentState, step: PlanStep) -> str:
        return "said"

    async def finish(self, ctx: Context, state: AgentState) -> str:
        return f"echo: {state.goal}"


async def _ended(task: TaskHandle[Any]) -> bool:
    return (await task.record()).finished_at is not None


async def _waits(task: TaskHandle[Any]) -> bool:
    return (await task.record()).state is State.WAITING


def make_app(settings: Settings) -> App:
    """Return the app of the workers."""
    app = App(QUEUE, settings=settings)

    @app.task
    async def sound(ctx: Context, number: int) -> int:
        return await ctx.step("double", lambda: number * 2)

    @app.task(retry=_LETTER)
    async def fails(ctx: Context) -> None:
        raise ValueError("broken")

    @app.task
    async def waits(ctx: Context) -> str:
        return str(await ctx.ask("ada", "continue?", timeout=3600.0))

    @app.task
    async def walks(ctx: Context) -> int:
        for number in range(_WALK):
            await ctx.step(f"step {number}", functools.partial(asyncio.sleep, 0.02))
            await ctx.progress(number, _WALK)
            await ctx.emit(number)
            await ctx.emit(number, to="keyed", key=f"{number % 3}")
        return _WALK

    app.agent(Talker)
    return app


class World:
    """The namespace of a run. `reset` puts it back into the state that `build` left.

    Attributes:
        mutator: Applies mutations.
    """

    def __init__(self, settings: Settings, client: redis.asyncio.Redis) -> None:
        self._settings = settings
        self._client: Any = client  # its types are of all its modes at once
        self._ground: list[tuple[bytes, int, bytes]] = []
        self.mutator = Mutator(client, settings.namespace)

    async def build(self) -> None:
        """Store tasks in every state, a session and what operators store, and keep a copy of all keys."""
        async with make_app(self._settings) as app:
            producer, tasks = app.producer, app.tasks
            gateway, names = producer.gateway, producer.namespace
            async with _worker(app):
                done = await tasks["sound"].options(task_id="succeeded").enqueue(1)
                dead = await tasks["fails"].options(task_id="dead").enqueue()
                parked = await tasks["waits"].options(task_id="parked").enqueue()
                cancelled = await tasks["waits"].options(task_id="cancelled").enqueue()
                await tasks["sound"].options(task_id="delayed", delay=3600.0).enqueue(2)
                await tasks["sound"].options(task_id="late", delay=7200.0).enqueue(2)
                assert await bounded(done.result()) == 2
                await cancelled.cancel()
                turn = await app.session(Talker, "ada").send("hello")
                assert await bounded(turn.result()) == "echo: hello"
                for task in (dead, cancelled):
                    await wait_until(functools.partial(_ended, task), "the task ended")
                await wait_until(functools.partial(_waits, parked), "the task waits")
            for name, ttl in (("short", 3600.0), ("long", None)):
                await app.store(STORE).put(name, "x" * 200_000, ttl=ttl)
            await producer.enqueue("sound", {"number": 3}, task_id="unserved", queue="unserved")
            await producer.enqueue("newer", {}, task_id="newer", queue=QUEUE)
            await set_identity(gateway, names, "Talker", Identity(role="repeats what it hears"))
            await supervise(gateway, names, SupervisorInfo(id="s", name="s", processes=1), 3600.0)
            await count_crash(gateway, names, "s", "w", why="killed", threshold=0, window=3600.0)
        for key in await self.mutator.keys():
            data, left = await self._client.dump(key), await self._client.pttl(key)
            if data is not None:
                self._ground.append((key, max(left, 0), data))

    async def reset(self) -> None:
        """Delete all keys, and restore those of the copy."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for key in await self.mutator.keys():
                pipeline.unlink(key)
            for key, ttl, data in self._ground:
                pipeline.restore(key, ttl, data, replace=True)
            await pipeline.execute()

    async def clear(self) -> None:
        """Delete all keys."""
        for key in await self.mutator.keys():
            await self._client.unlink(key)

    async def check(self, mutations: Sequence[Mutation], as_json: bool) -> tuple[list[str], list[str]]:
        """Mutate a new copy while a worker runs. Return what is broken then, and the commands that were sent."""
        await self.reset()
        broken: list[str] = []
        sent: list[str] = []
        async with make_app(self._settings) as app, _worker(app, broken, "the worker that ran"):
            await app.tasks["walks"].options(task_id="walking").enqueue()
            for position, mutation in enumerate(mutations):
                sent.append(await self.mutator.apply(mutation))
                if position % 10 == 9:
                    await anyio.sleep(0.02)  # the loops of the worker see some of the states in between
            try:
                async with make_app(self._settings) as second, _worker(second, broken, "a new worker"):
                    broken += await self._run_tasks()
                    for commands, codes in ((LISTS, (0,)), (DETAILS, (0, 1))):
                        broken += await anyio.to_thread.run_sync(self._print, commands, codes, as_json)
            except Exception as error:  # noqa: BLE001 - whatever it is, the run names the mutation
                broken.append(f"a new worker did not start: {type(error).__name__}: {error}")
        return broken, sent

    async def _run_tasks(self) -> list[str]:
        """Run new tasks and delayed ones; return what does not work."""
        broken = []
        async with Producer(self._settings.redis_url, namespace=self._settings.namespace) as producer:
            for name, delay in (("a new task", 0.0), ("a delayed task", 0.05)):
                try:
                    with anyio.fail_after(_SERVED):
                        handle = await producer.enqueue("sound", {"number": 4}, delay=delay, queue=QUEUE)
                        assert await handle.result() == 8
                except Exception as error:  # noqa: BLE001 - whatever it is, the run names the mutation
                    broken.append(f"{name}: {type(error).__name__}: {error}")
        return broken

    def _print(self, commands: Sequence[tuple[str, ...]], codes: Sequence[int], as_json: bool) -> list[str]:
        place = ("--redis-url", self._settings.redis_url, "--namespace", self._settings.namespace)
        broken = []
        for command in commands:
            options = ("--json",) if as_json and command[-1] not in ("export", "metrics", "result") else ()
            try:
                answer = call(*command, *options, *place)
            except Exception as error:  # noqa: BLE001 - an error that the command line does not explain
                broken.append(f"perdure {' '.join(command)}: {type(error).__name__}: {error}")
                continue
            shown = answer.out + answer.err
            if answer.code not in codes or "Traceback" in answer.err:
                broken.append(f"perdure {' '.join(command)}: exit code {answer.code}: {answer.err[-500:]}")
            elif not _is_clean(shown):
                broken.append(f"perdure {' '.join(command)}: control characters")
        return broken


def _is_clean(text: str) -> bool:
    """Return whether a terminal shows the text and does nothing else."""
    return not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in set(text) - {"\n", "\t"})


@asynccontextmanager
async def _worker(app: App, broken: list[str] | None = None, name: str = "the worker") -> AsyncIterator[None]:
    """Run a worker for the block. If it ends before, `broken` says so."""
    async with Worker(app, concurrency=8) as worker:
        running = asyncio.create_task(worker.run())
        try:
            yield
        finally:
            if running.done() and broken is not None:
                broken.append(f"{name} ended: {running.exception()!r}")
            worker.stop()
            worker.stop()
            try:
                await bounded(running)
            except Exception as error:
                if broken is None:
                    raise
                broken.append(f"{name} could not stop: {error!r}")
