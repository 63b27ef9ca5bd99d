"""crash_everywhere and crash_at: a task whose worker is cut off at a write, and continued by another worker.

A task is run undisturbed first, twice: what differs between these runs, such as a time that a step returns, is not
compared. Then it is run again for each write, with the worker cut off before it and after it. Each run has a server of
the process, a namespace of its own and the clock of `perdure_clock`, so that days of sleep and the delays of retries
pass at once.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, cast

import anyio
import anyio.to_thread
import orjson

from ...queues.durations import Duration, to_seconds
from ...queues.errors import ConfigurationError
from ...queues.inspection.views import queue_partitions
from ...queues.keys import Namespace
from ...queues.records import State
from ...queues.waits import wait_name
from ...queues.wording import counted
from ..app import App
from ..context import Context
from ..durable.steps.current import CURRENT_STEP, StepCall
from ..middleware import CallNext, Middleware
from .clock import PerdureClock
from .cut_off import IS_DEAD, Cut, CutOffProcess, RunWrite, deliver_notices, expire_leases
from .idle import next_due, run_until_idle

if TYPE_CHECKING:
    from ...queues.handle import TaskHandle
    from .timed_server import TimedServer

Place = Literal["before", "after"]

_PROCESSES: Final = 100
"""Most workers of one run: one for each wait, and one for the crash."""

_FOR_EVER: Final = 50 * 366 * 86_400.0
"""Seconds from which on a wait has no time limit."""

_ENDED: Final = (State.SUCCEEDED, State.DEAD, State.CANCELLED)

_Effects = Counter[tuple[str, str]]
"""Effects by their names and the steps in which they happened; outside of a step, its name is empty."""

_EFFECTS: ContextVar[_Effects | None] = ContextVar("perdure_effects", default=None)


def record_effect(name: str) -> None:
    """Count an effect outside of the task, such as a mail that a fake of the mail service would have sent.

    `crash_everywhere` compares the counts with those of an undisturbed run. Elsewhere the call does nothing.
    """
    counts, step = _EFFECTS.get(), CURRENT_STEP.get()
    if counts is not None and not IS_DEAD.get()():
        counts[name, "" if step is None else step.key] += 1


class CrashProblem(NamedTuple):
    """A difference after a crash.

    Attributes:
        place: the crash, such as "before write 3 (records step 'charge')".
        text: what differs from the undisturbed run, or from the run before the crash.
    """

    place: str
    text: str


def shown_places(places: Sequence[str]) -> str:
    """Return the first place, and how many more there are."""
    return places[0] if len(places) == 1 else f"{places[0]} and at {counted(len(places) - 1, 'other place')}"


@dataclass(frozen=True)
class CrashComparison:
    """The findings of `crash_everywhere`.

    Attributes:
        task: name of the task.
        outcome: of the undisturbed run: its state and its result, or the reason of the dead letter and its error.
        writes: what each write of the undisturbed run does.
        crashes: runs with a crash.
        problems: what must not be.
        repeated: steps and effects that ran once more after a crash, which is right for a step in flight, with the
            number of crashes. If one must not happen twice, give it an idempotency key or `verify=`.
        varying: steps whose value, and "result" if that, differs between two undisturbed runs: these are not compared.
    """

    task: str
    outcome: str
    writes: Sequence[str]
    crashes: int
    problems: Sequence[CrashProblem]
    repeated: Mapping[str, int]
    varying: Sequence[str]

    def by_text(self) -> dict[str, list[str]]:
        """Return the problems with the places where each was found."""
        found: dict[str, list[str]] = {}
        for problem in self.problems:
            found.setdefault(problem.text, []).append(problem.place)
        return found

    def check(self) -> None:
        """Raise `AssertionError` if there are problems; its text has all of them."""
        __tracebackhide__ = True
        if self.problems:
            lines = "\n".join(f"- crash {shown_places(places)}: {text}" for text, places in self.by_text().items())
            raise AssertionError(f"task {self.task!r} does not continue as before after a crash:\n{lines}")


async def crash_everywhere(
    app: App,
    task: Any,
    args: Mapping[str, Any] | Sequence[Any] = (),
    *,
    answers: Mapping[str, Any] | None = None,
    messages: Sequence[Any] = (),
    reset: Callable[[], object] | None = None,
    places: Sequence[Place] = ("before", "after"),
    limit: int | None = None,
    timeout: Duration = 30.0,
    on_crash: Callable[[int, int], object] | None = None,
) -> CrashComparison:
    """Run a task once for each of its writes, with a worker that is cut off there, and compare it with one that is not.

    The functions of its steps are called for real in each run: give them fakes of what they must not do. They run in
    another thread than the caller, each worker in an event loop of its own. Needs the extra `testing`.

        report = await crash_everywhere(app, invoice, [["book", "boat"]], answers={"finance": "yes"})
        report.check()

    Args:
        app: the app of the task; it need not be open.
        task: the task or agent, or its name.
        args: its arguments, by name or in order.
        answers: answers to waits, by their names, given each time the task waits with one of them open.
        messages: messages to the task: one is sent each time it waits and no answer fits.
        reset: called before each run, to bring what is outside of the task to its first state.
        places: where the worker is cut off: before a write reaches the server, after it is done.
        limit: most crashes; they are spread evenly over the writes. None for all.
        timeout: seconds for which one worker may run.
        on_crash: called with the number of crashes so far and of all, for a display of the progress.

    Returns:
        The report; `report.check()` raises if it has problems.

    Raises:
        ValueError: the undisturbed run does not end: it waits for an answer or a message that is not given.
        ConfigurationError: the extra `testing` is missing.
    """
    given = _Given(app, task, args, answers or {}, messages, reset, to_seconds(timeout, "timeout"))
    return await anyio.to_thread.run_sync(partial(_crash_everywhere, given, tuple(places), limit, on_crash))


async def crash_at(app: App, step: str, *, when: Place = "before", timeout: Duration = 30.0) -> None:
    """Run a worker until it records a step, and cut it off there. The next worker continues at once.

        handle = await invoice.enqueue(["book"])
        await crash_at(app, "charge")              # the card is charged, and no record says so
        await perdure.run_until_idle(app)

    Args:
        app: the app; it need not be open.
        step: the key of the step, such as "charge" or "page#2".
        when: before the record reaches the server, or after it is stored.
        timeout: seconds for which the worker may run.

    Raises `AssertionError` if no task has recorded this step.
    """
    __tracebackhide__ = True
    recorded: list[str] = []

    def choose(write: RunWrite) -> Cut | None:
        steps = [name for kind, name in write.entries() if kind in ("done", "mark")]
        recorded.extend(steps)
        return when if step in steps else None

    def run() -> bool:
        process = CutOffProcess(choose, bound=to_seconds(timeout, "timeout") + 5)
        process.run(lambda: run_until_idle(app, allow_failures=True, timeout=timeout))
        if process.dead:
            anyio.run(_after_crash, app)
        return process.dead

    if not await anyio.to_thread.run_sync(run):
        found = ", ".join(map(repr, dict.fromkeys(recorded))) or "no step"
        raise AssertionError(f"no task recorded step {step!r}; recorded: {found}")


@dataclass(frozen=True)
class _Given:
    """A task to run, and what it is given."""

    app: App
    task: Any
    args: Mapping[str, Any] | Sequence[Any]
    answers: Mapping[str, Any]
    messages: Sequence[Any]
    reset: Callable[[], object] | None
    timeout: float

    @property
    def name(self) -> str:
        return self.task if isinstance(self.task, str) else str(self.task.name)

    def enqueue(self) -> Awaitable[TaskHandle[Any]]:
        task = self.app.tasks[self.task] if isinstance(self.task, str) else self.task
        if isinstance(self.args, Mapping):
            return cast("Awaitable[TaskHandle[Any]]", task.enqueue(**self.args))
        return cast("Awaitable[TaskHandle[Any]]", task.enqueue(*self.args))


class _Seen(NamedTuple):
    """The findings of one run of the task. cut: what was in flight when its worker was cut off; None if it was not."""

    outcome: str
    runs: Sequence[Mapping[str, str]]
    calls: Counter[str]
    effects: _Effects
    writes: Sequence[str]
    cut: frozenset[str] | None

    def last(self) -> dict[str, str]:
        """Return the last outcome of each step over all runs."""
        return {key: value for run in self.runs for key, value in run.items()}


@dataclass
class _Observer(Middleware):
    """Notes what the handler sees of its steps, and how often their functions are called."""

    task_id: str = ""
    runs: list[dict[str, str]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[str] = field(default_factory=Counter)
    recorded: set[str] = field(default_factory=set)
    """Steps that have a record of their own; the others, steps of plans, are stored by a write that follows them."""
    unwritten: set[str] = field(default_factory=set)
    """Steps without one, and failures, that have ended since the last write: the next one stores them."""

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        if ctx.task_id == self.task_id and not IS_DEAD.get()():
            self.runs.append({})
        return await call_next()

    async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
        key = step.key if ctx.task_id == self.task_id else f"{step.key} of {ctx.task}"
        seen = self.runs[-1] if self.runs and ctx.task_id == self.task_id else {}
        dead = IS_DEAD.get()
        if not (step.recorded or dead()):
            self.calls[key] += 1
        self.in_flight[key] += 1
        first = step.attempt
        try:
            value = await call_next()
        except Exception as error:
            if not dead():
                seen[key] = f"raised {type(error).__name__}: {error}"
                self.in_flight[key] -= 1
                self.unwritten.add(key)
            raise
        if not dead():
            seen[key] = _shown(value)
            self.in_flight[key] -= 1
            if key not in self.recorded:
                self.unwritten.add(key)
            self.calls[key] += step.attempt - first
        return value


def _shown(value: object) -> str:
    try:
        return orjson.dumps(value, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        return repr(value)


def _crash_everywhere(
    given: _Given, places: Sequence[Place], limit: int | None, on_crash: Callable[[int, int], object] | None
) -> CrashComparison:
    try:
        from .timed_server import TimedServer  # imports fakeredis, an extra
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("fakeredis", "lupa"):
            raise
        raise ConfigurationError(
            f"crash_everywhere needs the package {package}: pip install 'perdure[testing]'"
        ) from None
    with tempfile.TemporaryDirectory(prefix="perdure-") as folder:

        def play(number: int = 0, place: Place = "before") -> _Seen:
            with TimedServer() as server:
                return _Run(given, server, Path(folder), number, place).play()

        usual, again = play(), play()
        varying = sorted(key for key, value in usual.last().items() if again.last().get(key) != value)
        varying += ["result"] if usual.outcome != again.outcome else []
        numbers = range(1, len(usual.writes) + 1)
        crashes: list[tuple[int, Place]] = [(number, place) for number in numbers for place in places]
        if limit is not None and len(crashes) > limit:
            crashes = [crashes[at * len(crashes) // limit] for at in range(limit)]
        problems: list[CrashProblem] = []
        repeated: Counter[str] = Counter()
        for done, (number, place) in enumerate(crashes, 1):
            seen = play(number, place)
            shown = f"{place} write {number} ({usual.writes[number - 1]})"
            problems += [CrashProblem(shown, text) for text in _differences(usual, seen, frozenset(varying))]
            repeated.update((seen.calls - usual.calls).keys())
            repeated.update({name for name, step in (seen.effects - usual.effects) if step})
            if on_crash is not None:
                on_crash(done, len(crashes))
    return CrashComparison(given.name, usual.outcome, usual.writes, len(crashes), problems, +repeated, varying)


def _differences(usual: _Seen, seen: _Seen, varying: frozenset[str]) -> Iterator[str]:
    """Yield what a task with a crash must not do otherwise than an undisturbed one."""
    if seen.outcome != usual.outcome and "result" not in varying:
        yield f"the outcome is {seen.outcome}, undisturbed {usual.outcome}"
    before, after = usual.last(), seen.last()
    yield from (f"step {key!r} was not called" for key in before.keys() - after.keys())
    yield from (
        f"step {key!r} was called, which an undisturbed run does not call" for key in after.keys() - before.keys()
    )
    for key in sorted((before.keys() & after.keys()) - varying):
        if before[key] != after[key]:
            yield f"step {key!r} gave {after[key]}, undisturbed {before[key]}"
    yield from _changed_values(seen.runs)
    in_flight = seen.cut or frozenset()
    for key in sorted(seen.calls):
        more = seen.calls[key] - usual.calls[key]
        if more > (key in in_flight):
            called = counted(more, "more time")
            yield f"the function of step {key!r} was called {called}, though it was recorded before the crash"
    for name, step in sorted(seen.effects):
        more = seen.effects[name, step] - usual.effects[name, step]
        if more > (step in in_flight):
            where = f"in step {step!r}" if step else "outside of a step, where each run repeats it"
            yield f"effect {name!r} happened {counted(more, 'more time')} {where}"


def _changed_values(runs: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield the steps that have another value in a later run."""
    for number, run in enumerate(runs):
        for later in runs[number + 1 :]:
            for key, value in run.items():
                if not value.startswith("raised ") and later.get(key, value) != value:
                    yield f"step {key!r} gave {later[key]} after the crash, and {value} before it"


class _Run:
    """One run of the task from its enqueue to its outcome, with at most one crash."""

    def __init__(self, given: _Given, server: TimedServer, folder: Path, number: int, place: Place) -> None:
        """number: of the write at which the worker is cut off; 0 for none."""
        self._given = given
        self._clock = PerdureClock(server, folder)
        self._number = number
        self._place: Place = place
        self._observer = _Observer()
        self._effects: _Effects = Counter()
        self._writes: list[str] = []
        self._sent = 0
        self._outcome: str | None = None
        self._waits = ""
        self._later = False
        self._goes_on = True

    def play(self) -> _Seen:
        given, app = self._given, self._given.app
        if given.reset is not None:
            given.reset()
        cut: frozenset[str] | None = None
        token, own = _EFFECTS.set(self._effects), app.middleware
        app.middleware = (*own, self._observer)
        try:
            with self._clock:
                anyio.run(self._enqueue)
                number, writes = self._number, 0
                for _ in range(_PROCESSES):
                    process = CutOffProcess(partial(self._choose, number), writes=writes, bound=given.timeout + 5)
                    process.run(self._work)
                    writes = process.writes
                    if process.dead:
                        number, cut = 0, frozenset(+self._observer.in_flight) | self._observer.unwritten
                        self._observer.in_flight.clear()
                        anyio.run(_after_crash, app)
                        continue
                    anyio.run(self._look)
                    if self._outcome is not None or not self._goes_on:
                        break
        finally:
            app.middleware = own
            _EFFECTS.reset(token)
        if self._outcome is None:
            if not self._number:
                raise ValueError(f"task {given.name!r} does not end: it {self._waits}")
            self._outcome = f"it {self._waits}"
        observer = self._observer
        return _Seen(self._outcome, observer.runs, observer.calls, self._effects, self._writes, cut)

    def _choose(self, number: int, write: RunWrite) -> Cut | None:
        self._writes.append(str(write))
        cut: Place | None = self._place if write.number == number else None
        if cut != "before":
            self._observer.recorded |= {step for kind, step in write.entries() if kind in ("done", "mark")}
            self._observer.unwritten.clear()
        return cut

    async def _enqueue(self) -> None:
        async with self._given.app:
            handle = await self._given.enqueue()
            self._observer.task_id = handle.id

    async def _work(self) -> None:
        later, self._later = self._later, False
        await self._clock.run_until_idle(
            self._given.app, wait_due=later, allow_failures=True, timeout=self._given.timeout
        )

    async def _look(self) -> None:
        """Note the outcome; or answer what the task waits for, or let the time of its next wait pass."""
        app, given = self._given.app, self._given
        async with app:
            handle = await app.producer.find(self._observer.task_id)
            if handle is None:
                self._outcome = "deleted"
                return
            record = await handle.record()
            if record.state in _ENDED:
                self._outcome = await _outcome(handle, record)
                return
            names = []
            for wait in await handle.waits():
                name = wait_name(wait.id)
                names.append(name)
                if wait.id in given.answers or name in given.answers:
                    await handle.answer(wait.id, given.answers.get(wait.id, given.answers.get(name)))
                    return
            if self._sent < len(given.messages):
                await handle.send(given.messages[self._sent])
                self._sent += 1
                return
            shown = f"waits for {', '.join(map(repr, names))}: give answers=" if names else f"stays {record.state}"
            self._waits, self._later = shown, True
        self._goes_on = await next_due(app, app.tasks.queues) < _FOR_EVER


async def _outcome(handle: TaskHandle[Any], record: Any) -> str:
    if record.state is State.SUCCEEDED:
        return f"succeeded: {(await handle.read_result()).decode('utf-8', 'replace')}"
    error = record.error or {}
    return " ".join(filter(None, (f"{record.state}: {record.reason or ''}", error.get("error"), error.get("message"))))


async def _after_crash(app: App) -> None:
    """Let all leases of the namespace expire, and the janitor's time come."""
    gateway = app.settings.make_gateway(app.encryptor)
    await gateway.open()
    try:
        partitions = await queue_partitions(gateway, Namespace(app.settings.namespace))
        await expire_leases(gateway, partitions)
        for partition in partitions:
            await deliver_notices(gateway, partition)
    finally:
        await gateway.close()
