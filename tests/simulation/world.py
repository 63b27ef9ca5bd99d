"""The simulated world: one server, its workers and producers, and what goes wrong with them."""

from __future__ import annotations

import asyncio
import math
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Final, NoReturn
from unittest.mock import patch

import anyio
import loguru
from anyio._backends._asyncio import CancelScope
from perdure import Producer, Worker
from perdure.queues import QueueError, TaskHandle, Unavailable
from perdure.queues.runtime import RUNTIME, Runtime
from perdure.queues.transport import gateway
from perdure.queues.transport.scripts import queue_script, queue_scripts
from perdure.worker.durable import emitting
from perdure.worker.durable.run import Run
from perdure.worker.log import logger
from perdure.worker.testing.fake_engine import engine_runtime

from .app import NAMESPACE, Journal, make_app, messages_of
from .checks import Checks, Violation
from .faults import strike
from .fleet.elements import WorkerPlan
from .fleet.families import see_to
from .fleet.limits import arguments_of, queue_of
from .fleet.pages import Pages
from .fleet.processes import SimulatedProcess
from .fleet.releases import own_library
from .fleet.resharding import ask_again
from .fleet.sessions import Caller
from .fleet.settings import store_lease, worker_type
from .fleet.streams import GOALS, LIMITS
from .fleet.supervisors import Host, start_child
from .fleet.values import STEERED, steer
from .fleet.waits import ASKING, attend
from .loop import MAIN_THREAD, Machine, SimulatedLoop, Standstill, current
from .network import Connection, Network, connector
from .plan import LISTENING, SPAN, Plan, TaskPlan
from .server import SimulatedServer
from .sockets import sync_connection
from .threads import ProcessEnded, SimulatedEvent, SimulatedThread, leave, sleep

__all__ = ["Outcome", "World", "log_errors"]

_HOST: Final = "redis"
_PATIENCE: Final = 120.0
"""Virtual seconds after the last fault within which every task must have an outcome."""

_SCRIPTS: Final = sorted(queue_scripts(), key=lambda script: script.name)
"""Scripts that a worker loads when it connects. A process that has run other tests may have read more, in any order."""

_RESTED: Final = 2.0
"""Leases after a trouble of a worker before it counts as healthy again: time to find a dead connection and renew."""


@dataclass
class Process:
    """A worker process, which its supervisor or an init system starts again after it has ended.

    Attributes:
        host: Supervisor of the process; None without one. role: as a child of that.
        worker: The worker, once it has connected; connected: when it had.
        troubled_until: Virtual time at which the last fault of this process or of its connections ends.
    """

    name: str
    machine: Machine
    plan: WorkerPlan
    release: int
    worker: Worker | None = None
    connected: float = math.inf
    troubled_until: float = -math.inf
    host: Host | None = None
    role: Callable[[], str] = lambda: "worker"

    def holds(self, worker: bytes, entry: bytes, count: int) -> bool:
        """Return whether this is that worker, and a run of it holds the delivery."""
        if self.worker is None or self.worker.id.encode() != worker:
            return False
        return any((one.delivery.entry, one.delivery.count) == (entry, count) for one in self.runs())

    def runs(self) -> list[Run]:
        """Return the runs of its worker."""
        return [] if self.worker is None else self.worker._leases.holders()


@dataclass
class Outcome:
    """Result of a run.

    Attributes:
        digest: SHA-1 of all bytes that were sent with their times, of the journal and of the story: two runs of one
            seed have the same.
    """

    plan: Plan
    violations: list[Violation]
    digest: str
    seconds: float
    callbacks: int
    commands: int


def log_errors() -> None:
    """Let workers log, so that worlds see errors, and show nothing of it."""
    loguru.logger.remove()
    loguru.logger.enable("perdure")


class World:
    """One run of a plan."""

    url: Final = f"redis://{_HOST}"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = Random(f"run {plan.seed} {plan.variant}")
        self.loop = SimulatedLoop(self.random, self._connect)
        self.loop.run_thread = lambda run, name: SimulatedThread(self.loop, run, name).start()
        self.network = Network(self.loop)
        self._connector = connector(self.network)
        self.server = SimulatedServer(self.loop, _HOST)
        self.server.limits = {b"MAX_RESTARTS = 250": b"MAX_RESTARTS = %d" % plan.restarts}
        self.network.hosts[_HOST] = self.server
        self.journal = Journal(self.loop, {task.id: task.rest for task in plan.tasks if task.rest})
        self.journal.die = lambda: self.end_machine(current())
        self.main = self.loop.machine("run")
        self.begin = self.loop.now
        self.story: list[tuple[float, str]] = []
        self.processes: list[Process] = []
        self.doubted_until = -math.inf
        """Virtual time until which a worker may lose a lease though it is healthy, see docs/explanation/recovery.md."""
        self.hosts: list[Host] = []
        self.children: dict[Machine, SimulatedProcess] = {}
        self.replays: Counter[str] = Counter()  # of tasks whose crashes are counted from zero again
        self.handles: dict[str, TaskHandle[Any]] = {}
        self.cancelled: set[str] = set()
        self.unsent: set[str] = set()  # tasks that miss a message, since the server had lost them when it was sent
        self.checks = Checks(self)
        self._names = iter(range(10**6))
        self._ids = iter(range(10**6))
        self._started: list[asyncio.Future[Any]] = []
        self.set_back = 0.0  # seconds by which due tasks are late, see docs/explanation/recovery.md
        self.forks = 0
        self.pages = Pages(self)
        self.callers = [Caller(self, session) for session in plan.sessions]
        self.release = 1  # of the workers that start now
        self.repaired = self.struck = self.loop.now  # when the last fault ends, and when it came
        self.producer: Producer | None = None
        self.over = False

    # the run

    def play(self) -> Outcome:
        """Run the plan to its end."""
        with engine_runtime(self.random), self._runtime():
            try:
                self._in(self.main, self.loop.run_until_complete, self._task(self.main, self._live()))
            except Standstill as problem:
                self.checks.add("standstill", str(problem))
            finally:
                self.over = True
                self.loop.forget_tasks()
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
        if any(fault.kind == "deploy" for fault in self.plan.faults):
            self.server.translate = lambda machine, data: own_library(self, machine, data)
        if self.plan.stored_lease:
            store_lease(self, self.plan.stored_lease)
        for _ in range(self.plan.workers):
            self.start_worker()
        self._machine = self.spawn("producer", self._produce)
        if self.plan.again:
            self.spawn("caller", lambda: ask_again(self, self.url))
        for caller in self.callers:
            caller.start()
        self.pages.start()
        for fault in self.plan.faults:
            await asyncio.sleep(max(0.0, self.begin + fault.at - self.loop.now))
            self.tell(f"fault: {fault}")
            self.struck = self.loop.now
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
        seen = self.network.sent.copy()
        for entry in self.journal.entries:
            seen.update(repr(entry).encode())
        seen.update(repr((self.loop.now, self.loop.callbacks, self.story)).encode())
        return seen.hexdigest()

    # processes

    def start_worker(self) -> None:
        """Start a worker process, or a supervisor in a plan that has supervisors."""
        number = next(self._names)
        if self.plan.supervisors is not None:
            Host(self, number, self.plan.worker(number), self.release, self.plan.supervisors).start()
            return
        name = f"w{number}"
        process = Process(name, self.loop.machine(name), self.plan.worker(number), self.release)
        self.processes.append(process)
        self.tell(f"{name} starts")
        self.start_on(process.machine, self._work(process))

    def add_process(self, machine: Machine, host: Host) -> Process:
        """Add a worker process that a supervisor has started."""
        process = Process(machine.name, machine, host.plan, host.release, host=host)
        self.processes.append(process)
        return process

    async def _work(self, process: Process) -> None:
        try:
            app = make_app(self.journal, self.url, process.plan, process.release)
            kind = worker_type(process.plan.sweep, self.plan.clean)
            async with kind(app, concurrency=process.plan.slots) as worker:
                process.worker, process.connected = worker, self.loop.now
                await worker.run()
            self.tell(f"{process.name} has stopped")
        except QueueError as error:
            self.tell(f"{process.name} ended: {error}")
        except BaseException as error:  # noqa: BLE001 - a defect, which the run reports
            self.checks.add("worker failed", f"{process.name}: {error!r}")
        if not self.over:
            self.on(self.main, lambda: self.later(1.0, self.start_worker))
        self.end(process)

    def kill(self, machine: Machine, seconds: float) -> None:
        """Kill the process of a machine. Its supervisor starts another one, or an init system after so many seconds."""
        supervised = machine in self.children
        self.end_machine(machine)
        if not supervised:
            self.later(seconds, self.start_worker)

    def end(self, process: Process) -> None:
        """End a worker process, as SIGKILL does."""
        self.end_machine(process.machine)

    def end_machine(self, machine: Machine, code: int = -signal.SIGKILL) -> None:
        """End all that runs on a machine, close its connections and pipes, and let its parent know."""
        if machine.dead:
            return
        process = next((one for one in self.processes if one.machine is machine), None)
        if process is not None:
            if process.host is not None:
                self.checks.supervisors.ended(process, process.host, code)
            self.processes.remove(process)
        for host in [one for one in self.hosts if one.machine is machine]:
            self.hosts.remove(host)
            self.checks.supervisors.orphaned(host)
        self.loop.kill(machine)
        for connection in self.network.of(machine):
            connection.close()
        for child in self.children.values():
            if child.parent is machine and not child.machine.dead:
                child.orphan()
        if (started := self.children.pop(machine, None)) is not None:
            started.ended(code)

    def send_signal(self, machine: Machine, number: int) -> None:
        """Send a signal to a process. One that is stopped gets it when it continues, unless it is SIGKILL."""
        if machine.dead:
            return
        if number == signal.SIGKILL:
            self.end_machine(machine)
        elif machine.frozen:
            machine.signals.append(number)
        elif (handler := machine.signal_handlers.get(number)) is not None:
            self.on(machine, handler)
        else:
            self.end_machine(machine, -number)

    def unblock(self, machine: Machine) -> None:
        """Let a blocked event loop continue."""
        machine.blocked = False
        self.checks.supervisors.continued[machine] = self.loop.now

    def thaw(self, machine: Machine) -> None:
        """Let a frozen process continue."""
        machine.frozen = False
        self.checks.supervisors.continued[machine] = self.loop.now
        signals, machine.signals = machine.signals, []
        for number in signals:
            self.send_signal(machine, number)

    def process_of(self, machine: Machine) -> Process:
        """Return the process that runs on a machine."""
        return next(process for process in self.processes if process.machine is machine)

    def release_of(self, machine: Machine) -> int:
        """Return the release of the worker on a machine; the first for all else."""
        return next((one.release for one in self._all() if one.machine is machine), 1)

    def _all(self) -> list[Process | Host]:
        return [*self.processes, *self.hosts]

    def is_healthy(self, process: Process) -> bool:
        """Return whether the last fault of a process is so long ago that it has all of its leases."""
        quiet = max(process.troubled_until, self.doubted_until)
        return self.loop.now > quiet + _RESTED * self.plan.longest_lease

    def is_worker(self, machine: Machine) -> bool:
        """Return whether a living worker process runs on a machine."""
        return any(process.machine is machine for process in self.processes)

    def is_supervisor(self, machine: Machine) -> bool:
        """Return whether a living supervisor runs on a machine."""
        return any(host.machine is machine for host in self.hosts)

    def is_producer(self, machine: Machine) -> bool:
        """Return whether the producer runs on a machine."""
        return machine is self._machine

    def doubt_leases(self, seconds: float = 0.0) -> None:
        """Note that each process may lose its leases for so many seconds."""
        self.doubted_until = max(self.doubted_until, self.loop.now + seconds)

    def trouble(self, machine: Machine, seconds: float = 0.0) -> None:
        """Note that a process is not to be judged as healthy for so many seconds."""
        for one in self._all():
            if one.machine is machine:
                one.troubled_until = max(one.troubled_until, self.loop.now + seconds)

    def signal(self, process: Process) -> None:
        """Ask a worker to stop, as SIGTERM does."""
        if process.host is not None:
            self.send_signal(process.machine, signal.SIGTERM)
        elif process.worker is not None:
            self.on(process.machine, process.worker.stop)

    async def _produce(self) -> None:
        async with Producer(self.url, namespace=NAMESPACE) as producer, anyio.create_task_group() as group:
            self.producer = producer
            for number, task in enumerate(self.plan.tasks):
                if not (self.plan.again and number % 2):
                    group.start_soon(self.enqueue, producer, task)
            await anyio.sleep_forever()

    async def enqueue(self, producer: Producer, task: TaskPlan) -> None:
        """Enqueue one task until it is stored, as a caller does that must not lose it."""
        await asyncio.sleep(max(0.0, self.begin + task.at - self.loop.now))
        if task.key:
            self.checks.order.called[task.id] = self.loop.now
        self.checks.limits.called[task.id] = self.loop.now
        while True:
            try:
                handle = await self.store(producer, task)
            except QueueError:
                await asyncio.sleep(0.2)
            else:
                self.handles[task.id] = handle
                self.journal.write("acked", task.id)
                if task.kind == "passes":
                    await self._wait_for_successor(task.id)
                if task.kind in LISTENING:
                    await self._talk(handle, 0.0 if task.kind == "passes" else task.pause)
                if task.kind in STEERED:
                    await steer(self, producer, task)
                if task.kind in ASKING:
                    await attend(self, producer, task)
                await see_to(self, producer, task)
                return

    async def store(self, producer: Producer, task: TaskPlan) -> TaskHandle[Any]:
        """Enqueue a task once; return its handle."""
        arguments: dict[str, Any] = {"steps": task.steps, "pause": task.pause, **arguments_of(task)}
        if task.kind == "agent" or task.kind in GOALS:
            arguments["goal"] = "take all parts"
        lane: dict[str, Any] = {"idle": True} if task.lane == "idle" else {"priority": task.lane or None}
        return await producer.enqueue(
            task.kind, arguments, queue=queue_of(task), task_id=task.id, delay=task.delay, key=task.key or None, **lane
        )

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
                    self.unsent.add(handle.id)
                    return
                else:
                    break

    async def _wait_for_successor(self, task: str) -> None:
        """Wait until a successor is about to be stored, so that messages come while the task hands its work over."""
        stored, script = asyncio.Event(), queue_script("enqueue_successor").sha.encode()

        def look(line: Connection, data: bytes) -> bool:
            if script in data:
                stored.set()
            return False

        self.network.traps.append((f":record:{task}.h1\r".encode(), look))
        with anyio.move_on_after(5.0):
            await stored.wait()

    def spawn(self, name: str, begin: Callable[[], Coroutine[Any, Any, None]]) -> Machine:
        """Run a coroutine function on a new machine."""
        machine = self.loop.machine(name)

        async def whole() -> None:
            try:
                await begin()
            except BaseException as error:  # noqa: BLE001 - a defect, which the run reports
                self.checks.add(f"{name} failed", repr(error))

        self.start_on(machine, whole())
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
        self.start_on(self._machine, act())

    def tell(self, text: str) -> None:
        """Add a line to the story of the run."""
        self.story.append((self.loop.now - self.begin, text))

    def start_on(self, machine: Machine, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine on a machine; the loop keeps the task."""
        self._started.append(self._task(machine, coroutine))

    def _task(self, machine: Machine, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        context = self.loop.context_of(machine)
        return context.run(lambda: self.loop.create_task(coroutine, context=context))

    def start_thread(self, machine: Machine, main: Callable[[], None]) -> None:
        """Run a function in the main thread of a machine, in place of its event loop."""
        self._in(machine, SimulatedThread(self.loop, main, MAIN_THREAD).start)

    def _in(self, machine: Machine, function: Callable[..., Any], *args: Any) -> Any:
        return self.loop.context_of(machine).run(function, *args)

    async def _connect(self, *args: Any) -> Any:
        return await self._connector(*args)

    def _on_error(self, text: str) -> None:
        """Report an exception that a worker has logged, because it must not occur, and continued after."""
        if "\nTraceback" in text:
            self.checks.add("worker failed", text.strip().split("\n")[-1])

    def _exit(self, code: int) -> NoReturn:
        """End the running process."""
        self.end_machine(current(), code)
        leave()

    @contextmanager
    def _runtime(self) -> Iterator[None]:
        """Install the clock, the randomness and the threads of this world, and read what its workers log."""
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
            host=lambda: current().host,
            pid=lambda: current().number,
            exit=self._exit,
            sleep=lambda seconds: sleep(loop, seconds),
            cpus=lambda: 2,
            set_signal_handler=_set_signal_handler,
            start_process=partial(start_child, self),
        )
        with ExitStack() as stack:
            stack.callback(logger.remove, logger.add(self._on_error, level="ERROR", format="{message}"))
            for name in Runtime.__slots__:
                stack.callback(setattr, RUNTIME, name, getattr(RUNTIME, name))
                setattr(RUNTIME, name, getattr(replaced, name))
            stack.enter_context(patch.object(gateway, "queue_scripts", lambda: _SCRIPTS))
            for name, limit in LIMITS.items():
                stack.enter_context(patch.object(emitting, name, limit))
            # anyio cancels the scopes within a scope in the order of a set
            stack.enter_context(patch.object(CancelScope, "__hash__", lambda scope: hash(scope._host_task)))
            yield


def _set_signal_handler(number: int, handler: Any) -> Any:
    """Set the handler of a signal of the running process, as `signal.signal` does."""
    handlers = current().signal_handlers
    former = handlers.pop(number, None)
    if handler is not None:
        handlers[number] = _SignalHandler(handler, number)
    return former.function if isinstance(former, _SignalHandler) else None


@dataclass(frozen=True, slots=True)
class _SignalHandler:
    """Handler of a signal. Those of the event loop are plain functions."""

    function: Callable[[int, Any], Any]
    number: int

    def __call__(self) -> None:
        with suppress(ProcessEnded):
            self.function(self.number, None)
