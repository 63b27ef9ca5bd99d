"""Event loop of the simulated world: virtual time, and a seeded order of the machines that run.

Every callback belongs to the machine in whose context it was scheduled. Callbacks of one thread of a machine run in the
order in which asyncio would run them; which machine runs next is drawn from the seed. A killed machine runs nothing
more, and a frozen one keeps its callbacks until it continues, so both happen between any two awaits.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

from anyio._backends._asyncio import _task_states

__all__ = ["CURRENT", "MAIN_THREAD", "Machine", "SimulatedLoop", "Standstill", "current"]

MAIN_THREAD: Final = ""

_LEAST, _MAX = 5e-6, 60e-6
"""Seconds that a callback takes."""

_LIMIT = 300_000
"""Callbacks of one run at most; an ordinary one has about 10,000."""


class Standstill(Exception):
    """Nothing is scheduled any more, or callbacks without end, and the run has not ended."""


@dataclass(eq=False)
class Machine:
    """A process with its threads. The server, the network and the run itself are machines too.

    Attributes:
        number: Position among the machines, which no two runs of a seed may draw differently.
        host: Name of the computer; by default, the machine is the only process of its own.
        frozen: Whether none of its threads runs. blocked: Whether its main thread, the event loop, does not.
        signal_handlers: Functions that its main thread calls for signals, by number.
        signals: Signals that wait until it is no longer frozen.
    """

    name: str
    number: int
    host: str = ""
    dead: bool = False
    frozen: bool = False
    blocked: bool = False
    ready: dict[str, deque[asyncio.Handle]] = field(default_factory=dict)
    signal_handlers: dict[int, Callable[[], None]] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)

    def __hash__(self) -> int:
        return self.number


CURRENT: ContextVar[tuple[Machine, str]] = ContextVar("CURRENT")
"""The machine, and the name of its thread, to which the running code belongs."""


def current() -> Machine:
    """Return the machine to which the running code belongs."""
    return CURRENT.get()[0]


class _Task(asyncio.Task[Any]):
    """A task whose hash is its position in its run, so that sets of tasks have the same order in each process."""

    def __init__(self, coroutine: Any, number: int, **options: Any) -> None:
        self._number = number
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class SimulatedLoop(asyncio.BaseEventLoop):
    """Event loop with virtual time."""

    def __init__(self, random: Random, connect: Callable[..., Any], begin: float = 1000.0) -> None:
        super().__init__()
        self.random = random
        self.now = begin
        self.callbacks = 0
        self.run_thread: Callable[[Callable[[], None], str], None] | None = None
        self._connect = connect
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timer_count = 0
        self._machines: list[Machine] = []
        self._threads: list[tuple[Machine, str, deque[asyncio.Handle]]] = []
        self._machine_count = 0
        self._tasks: list[asyncio.Task[Any]] = []
        self.set_task_factory(self._make_task)
        self.set_exception_handler(self._on_error)
        self.failures: list[dict[str, Any]] = []

    # machines

    def machine(self, name: str, host: str = "") -> Machine:
        """Return a new machine."""
        machine = Machine(name, self._machine_count, host or name)
        self._machine_count += 1
        self._machines.append(machine)
        return machine

    def context_of(self, machine: Machine, thread: str = MAIN_THREAD) -> Context:
        """Return an empty context of a machine."""
        context = Context()
        context.run(CURRENT.set, (machine, thread))
        return context

    def kill(self, machine: Machine) -> None:
        """End a machine: nothing of it runs any more, not even the end of a `finally` block."""
        machine.dead = True
        machine.ready.clear()
        if machine in self._machines:
            self._machines.remove(machine)
            self._list_threads()

    def forget_tasks(self) -> None:
        """Remove the tasks from what asyncio and anyio keep per process: those of other runs have the same hashes."""
        for task in self._tasks:
            asyncio._unregister_task(task)
            _task_states.pop(task, None)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
        task = _Task(coroutine, len(self._tasks), loop=loop, **options)
        task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio has no public switch for it
        # A task of a killed machine must not be collected: that would run its `finally` blocks.
        self._tasks.append(task)
        return task

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context)

    # what asyncio asks of a loop; its stubs type the arguments of callbacks, which are passed on here as they are

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        if context is None:
            context = copy_context()
            context.run(_enter_main_thread)
        return self.call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:  # type: ignore[override]
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Leave a cancelled timer in the heap until it is due."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run a function in a thread of the calling machine."""
        future, context = self.create_future(), copy_context()

        def run() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - it is raised where the future is awaited
                self.call_soon(_settle, future, None, error, context=context)
            else:
                self.call_soon(_settle, future, result, None, context=context)

        assert self.run_thread is not None
        self.run_thread(run, "executor")
        return future

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        """Let the main thread of the calling machine call a function for a signal."""
        current().signal_handlers[sig] = partial(callback, *args)

    def remove_signal_handler(self, sig: int) -> bool:
        return current().signal_handlers.pop(sig, None) is not None

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Connect to a simulated server."""
        return await self._connect(factory, host, port)

    # the schedule

    def _enqueue(self, handle: asyncio.Handle) -> None:
        machine, thread = handle._context[CURRENT]  # type: ignore[attr-defined]
        if not machine.dead:
            ready = machine.ready.get(thread)
            if ready is None:
                ready = machine.ready[thread] = deque()
                self._list_threads()
            ready.append(handle)

    def _list_threads(self) -> None:
        """List the threads of all machines, which change seldom."""
        self._threads = [
            (machine, thread, ready) for machine in self._machines for thread, ready in machine.ready.items()
        ]

    def _run_once(self) -> None:
        """Run one callback of one thread; if none is ready, advance the time to the next timer."""
        timers = self._timers
        if timers and timers[0][0] <= self.now:
            self._fire_timers()
        waiting = [
            ready
            for machine, thread, ready in self._threads
            if ready and not machine.frozen and not (machine.blocked and thread == MAIN_THREAD)
        ]
        if not waiting:
            if not timers:
                raise Standstill(f"nothing is scheduled at {self.now:.3f}")
            self.now = max(self.now, timers[0][0])
            return
        random = self.random.random
        handle = (waiting[0] if len(waiting) == 1 else waiting[int(random() * len(waiting))]).popleft()
        if handle._cancelled:
            return
        if self.callbacks > _LIMIT:
            raise Standstill(f"{_LIMIT} callbacks have run at {self.now:.3f}: something repeats without end")
        self.now += _LEAST + (_MAX - _LEAST) * random()
        self.callbacks += 1
        handle._run()

    def _fire_timers(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            timer = heapq.heappop(self._timers)[2]
            if not timer._cancelled:
                self._enqueue(timer)

    def _write_to_self(self) -> None:
        """Do nothing: no other thread wakes this loop."""

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there are no files."""


def _enter_main_thread() -> None:
    CURRENT.set((CURRENT.get()[0], MAIN_THREAD))


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if not future.done():
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
