"""The simulated world: one server, its workers and producers, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import anyio
from perdure import Producer, Worker
from perdure.queues import QueueError, TaskHandle, Unavailable
from perdure.queues.runtime import RUNTIME, Runtime

from .app import Journal, make_app, messages_of
from .checks import Checks, Violation
from .engine import engine_time
from .faults import strike
from .loop import Machine, SimulatedLoop, Standstill, current
from .network import Network, connector
from .plan import SPAN, Plan, TaskPlan
from .server import SimulatedServer
from .sockets import sync_connection
from .threads import SimulatedEvent, SimulatedThread

__all__ = ["Outcome", "World"]

_HOST: Final = "redis"
_PATIENCE: Final = 120.0
"""Virtual seconds after the last fault within which every task must have an outcome."""


@dataclass
class Process:
    """A worker process, which an init system starts again after it has ended.

    Attributes:
        worker: The worker, once it has connected.
        troubled_until: Virtual time at which the last fault of this process or of its connections ends.
    """

    name: str
    machine: Machine
    worker: Worker | None = None
    troubled_until: float = -math.inf

    def holds(self, worker: bytes, entry: bytes, count: int) -> bool:
        """Return whether this is that worker, and a run of it holds the delivery."""
        own = self.worker
        if own is None or own.id.encode() != worker:
            return False
        return any((one.delivery.entry, one.delivery.count) == (entry, count) for one in own._leases.holders())


@dataclass
class Outcome:
    """Result of a run.

    Attributes:
        digest: SHA-1 of all commands and of the journal: two runs of one seed have the same.
    """

    plan: Plan
    violations: list[Violation]
    digest: str
    seconds: float
    callbacks: int
    commands: int


class World:
    """One run of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = Random(f"run {plan.seed} {plan.variant}")
        self.loop = SimulatedLoop(self.random, self._connect)
        self.loop.run_thread = lambda run, name: SimulatedThread(self.loop, run, name).start()
        self.network = Network(self.loop)
        self._connector = connector(self.network)
        self.server = SimulatedServer(self.loop, _HOST)
        self.server.limits = {b"MOST_RESTARTS = 250": b"MOST_RESTARTS = %d" % plan.restarts}
        self.network.hosts[_HOST] = self.server
        self.journal = Journal(self.loop)
        self.main = self.loop.machine("run")
        self.begin = self.loop.now
        self.story: list[tuple[float, str]] = []
        self.processes: list[Process] = []
        self.handles: dict[str, TaskHandle[Any]] = {}
        self.cancelled: set[str] = set()
        self.checks = Checks(self)
        self._names = iter(range(10**6))
        self._ids = iter(range(10**6))
        self._started: list[asyncio.Future[Any]] = []
        self.set_back = 0.0  # seconds by which due tasks are late, see docs/explanation/recovery.md
        self.forks = 0
        self.repaired = self.loop.now  # when the last fault ends
        self.producer: Producer | None = None
        self.over = False

    # the run

    def play(self) -> Outcome:
        """Run the plan to its end."""
        with engine_time(), self._runtime():
            try:
                self._in(self.main, self.loop.run_until_complete, self._task(self.main, self._live()))
            except Standstill as problem:
                self.checks.add("standstill", str(problem))
            finally:
                self.over = True
            self.checks.finish()
        return Outcome(
            self.plan,
            self.checks.violations,
            self._digest(),
            self.loop.now - self.begin,
            self.loop.callbacks,
            self.server.executed,
        )

    async def _live(self) -> None:
        for _ in range(self.plan.workers):
            self.start_worker()
        self._machine = self._spawn("producer", self._produce)
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, self.begin + fault.at - self.loop.now))
            self.tell(f"fault: {fault}")
            await strike(self, fault)
        await asyncio.sleep(max(self.begin + SPAN, self.repaired) - self.loop.now)
        await self._settle_down()

    async def _settle_down(self) -> None:
        ends = self.loop.now + _PATIENCE + self.set_back
        while self.loop.now < ends and self._is_busy():
            while self.loop.now < ends and self._is_busy():  # noqa: ASYNC110 - it looks from outside
                await asyncio.sleep(0.5)
            await asyncio.sleep(1.0)  # in which a fault that waits for a command may come

    def _is_busy(self) -> bool:
        """Return whether a fault lasts, or a task may still get an outcome."""
        return self.loop.now < self.repaired or bool(self.checks.unfinished())

    def _digest(self) -> str:
        seen = hashlib.sha1(usedforsecurity=False)
        for entry in self.journal.entries:
            seen.update(repr(entry).encode())
        for written in self.server.log:
            seen.update(repr(written).encode())
        return seen.hexdigest()

    # processes

    def start_worker(self) -> Process:
        """Start a worker process."""
        name = f"w{next(self._names)}"
        process = Process(name, self.loop.machine(name))
        self.processes.append(process)
        self.tell(f"{name} starts")
        self._start(process.machine, self._work(process))
        return process

    async def _work(self, process: Process) -> None:
        app = make_app(self.journal, f"redis://{_HOST}", self.plan.lease)
        try:
            async with Worker(app, concurrency=self.plan.slots) as worker:
                process.worker = worker
                await worker.run()
            self.tell(f"{process.name} has stopped")
        except QueueError as error:
            self.tell(f"{process.name} ended: {error}")
        except BaseException as error:  # noqa: BLE001 - a defect, which the run reports
            self.checks.add("worker failed", f"{process.name}: {error!r}")
        if not self.over:
            self.on(self.main, lambda: self.later(1.0, self.start_worker))
        self.end(process)

    def end(self, process: Process) -> None:
        """End a process, as SIGKILL does, and close its connections, as its operating system does."""
        self.loop.kill(process.machine)
        if process in self.processes:
            self.processes.remove(process)
        for connection in self.network.of(process.machine):
            connection.close()

    def process_of(self, machine: Machine) -> Process:
        """Return the process that runs on a machine."""
        return next(process for process in self.processes if process.machine is machine)

    def is_worker(self, machine: Machine) -> bool:
        """Return whether a living worker process runs on a machine."""
        return any(process.machine is machine for process in self.processes)

    def trouble(self, machine: Machine, seconds: float = 0.0) -> None:
        """Note that a process is not to be judged as healthy for so many seconds."""
        for process in self.processes:
            if process.machine is machine:
                process.troubled_until = max(process.troubled_until, self.loop.now + seconds)

    def signal(self, process: Process) -> None:
        """Ask a worker to stop, as SIGTERM does."""
        if process.worker is not None:
            self.on(process.machine, process.worker.stop)

    async def _produce(self) -> None:
        url = f"redis://{_HOST}"
        async with Producer(url, namespace="sim") as producer, anyio.create_task_group() as group:
            self.producer = producer
            for task in self.plan.tasks:
                group.start_soon(self._enqueue, producer, task)
            await anyio.sleep_forever()

    async def _enqueue(self, producer: Producer, task: TaskPlan) -> None:
        """Enqueue one task until it is stored, as a caller does that must not lose it."""
        await asyncio.sleep(max(0.0, self.begin + task.at - self.loop.now))
        arguments: dict[str, Any] = {"steps": task.steps, "pause": task.pause}
        if task.kind == "agent":
            arguments["goal"] = "take all parts"
        while True:
            try:
                handle = await producer.enqueue(task.kind, arguments, queue="sim", task_id=task.id, delay=task.delay)
            except QueueError:
                await asyncio.sleep(0.2)
            else:
                self.handles[task.id] = handle
                self.journal.write("acked", task.id)
                if task.kind == "listens":
                    await self._talk(handle, task.pause)
                return

    async def _talk(self, handle: TaskHandle[Any], pause: float) -> None:
        """Send messages to a task, one after the other, each until it is stored."""
        for text in messages_of(handle.id):
            await asyncio.sleep(2 * pause)
            while True:
                try:
                    await handle.send(text, sender="producer", message_id=text)
                except Unavailable:
                    await asyncio.sleep(0.2)
                except QueueError as error:  # it was cancelled, or its writes were lost
                    self.tell(f"sending {text}: {error}")
                    return
                else:
                    break

    def _spawn(self, name: str, begin: Callable[[], Coroutine[Any, Any, None]]) -> Machine:
        machine = self.loop.machine(name)

        async def whole() -> None:
            try:
                await begin()
            except BaseException as error:  # noqa: BLE001 - a defect, which the run reports
                self.checks.add(f"{name} failed", repr(error))

        self._start(machine, whole())
        return machine

    def later(self, delay: float, act: Callable[[], Any]) -> None:
        """Do something after so many seconds."""
        self.repaired = max(self.repaired, self.loop.now + delay)
        self.loop.call_later(delay, act, context=self.loop.context_of(self.main))

    def on(self, machine: Machine, act: Callable[[], Any]) -> None:
        """Run a function on a machine's event loop."""
        self.loop.call_soon(act, context=self.loop.context_of(machine))

    def on_producer(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine function in the process of the producer."""
        self._start(self._machine, act())

    def tell(self, text: str) -> None:
        """Add a line to the story of the run."""
        self.story.append((self.loop.now - self.begin, text))

    def _start(self, machine: Machine, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine on a machine; the loop keeps the task."""
        self._started.append(self._task(machine, coroutine))

    def _task(self, machine: Machine, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        context = self.loop.context_of(machine)
        return context.run(lambda: self.loop.create_task(coroutine, context=context))

    def _in(self, machine: Machine, function: Callable[..., Any], *args: Any) -> Any:
        return self.loop.context_of(machine).run(function, *args)

    async def _connect(self, *args: Any) -> Any:
        return await self._connector(*args)

    @contextmanager
    def _runtime(self) -> Iterator[None]:
        """Install the clock, the randomness and the threads of this world."""
        loop, random = self.loop, self.random
        replaced = Runtime(
            monotonic=lambda: loop.now,
            wall_clock=lambda: self.server.now,
            uniform=random.uniform,
            token=lambda size: random.randbytes(size).hex(),
            task_id=lambda: f"task-{next(self._ids)}",
            thread=lambda target, name: SimulatedThread(loop, target, name),
            event=lambda: SimulatedEvent(loop),
            sync_connection=sync_connection(self.network),
            host=lambda: current().name,
            pid=lambda: current().number,
        )
        with ExitStack() as stack:
            for name in Runtime.__slots__:
                stack.callback(setattr, RUNTIME, name, getattr(RUNTIME, name))
                setattr(RUNTIME, name, getattr(replaced, name))
            yield
