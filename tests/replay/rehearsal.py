"""Rehearsals of a task: undisturbed, stopped at each write, and failed after each call.

A stopped process does nothing more: its commands reach no server, what it does is not in the journal, and its lease
has expired. Then another worker in the same process continues.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import redis
from perdure import App, Context, Middleware, Settings, Worker
from perdure.deadletter.letters import Filter, list_letters
from perdure.deadletter.replay import Replay, replay
from perdure.queues import Partition
from perdure.queues.keys import Namespace
from perdure.queues.stream_items import decode_item, stream_names
from perdure.worker.durable.waiting import WaitBoard
from perdure.worker.log import logger
from perdure.worker.middleware import CallNext
from perdure.worker.testing.cut_off import Cut, CutOffProcess, RunWrite, deliver_notices, expire_leases

from tests.replay.journal import STEPS, AttemptFailed, Journal, Observer
from tests.support.emitted import visible

Build = Callable[[App, Journal], Any]

_BOUND: Final = 60.0
"""Seconds that one process may work."""

_TASK: Final = "-task"
"""End of the id of the rehearsed task."""

When = Literal["before", "after", "late", "reply", "attempt", "kill"]


@dataclass(frozen=True)
class Disturbance:
    """What happens to a task, once.

    Attributes:
        when: `before`: the process stops before a write reaches the server. `late`: the same, and the write arrives
            when the next worker has ended the task. `after`: the process stops when the write is done and its reply is
            not read yet. `reply`: the reply is lost, and the process continues. `attempt`: the attempt fails after a
            call. `kill`: SIGKILL after a write.
        number: Of the write, or of the call.
    """

    when: When
    number: int

    def __str__(self) -> str:
        return f"{self.when}-{self.number}"


class Reply(NamedTuple):
    """An answer to a wait, by its name or its id."""

    wait: str
    value: Any


@dataclass(frozen=True)
class Handler:
    """A task of the suite.

    Attributes:
        build: Defines the task in an app; what it calls outside is a line of the journal.
        arguments: Of the task.
        answers: Messages that are sent each time the task waits, sender and content, or answers to a wait.
        flaky: Its steps do not end in the same way each time, so a stopped task may go another way from a step that was
            in flight. Only what the handler has continued from must stay, and `allowed` holds.
        retried: Whether the task has more than one attempt.
        enqueues: Whether it enqueues tasks, which are run to their end.
        spawns: Whether it spawns children.
        replays: Whether dead letters are replayed when it waits.
        cancels: Whether it is cancelled when it waits.
        undoes: Whether it forgets steps, so that a later attempt runs them again.
        races: Whether it cuts off branches, which a later run may not start at all.
        agent: Whether it is an agent, whose finished steps are not called again.
        beyond: External calls that a retry adds.
        allowed: Checks the external calls of any rehearsal; returns what is wrong, or an empty text.
        expects: Its result.
        streams: The visible items of its streams, in order; those of branches (`races`) in any order.
    """

    name: str
    build: Build
    arguments: dict[str, Any] = field(default_factory=dict)
    answers: Sequence[tuple[str, Any] | Reply] = ()
    flaky: bool = False
    retried: bool = True
    enqueues: bool = False
    spawns: bool = False
    replays: bool = False
    cancels: bool = False
    undoes: bool = False
    races: bool = False
    agent: bool = False
    beyond: Sequence[str] = ()
    allowed: Callable[[Counter[str]], str] = lambda effects: ""
    expects: Any = None
    streams: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass
class Seen:
    """What one rehearsal showed.

    Attributes:
        result: Of the task, or the reason and the text of its dead letter.
        effects: External calls by name.
        runs: The lines of the journal, by run of the handler.
        writes, calls: How many there were until the end, for the next disturbances.
        streams: The visible items of its streams.
    """

    result: str
    effects: Counter[str]
    runs: list[list[dict[str, Any]]]
    writes: int
    calls: int
    streams: dict[str, list[Any]] = field(default_factory=dict)

    def own(self, run: int = -1) -> list[str]:
        """Return what the handler's own asyncio task saw in a run, in order."""
        return [_outcome(line) for line in self.runs[run] if "end" in line and not (line["task"] or line["within"])]

    def all(self) -> list[str]:
        """Return what the handler's own asyncio task saw in all runs, each outcome once."""
        return list(dict.fromkeys(shown for run in range(len(self.runs)) for shown in self.own(run)))

    def beside(self, run: int = -1) -> Counter[str]:
        """Return what the handler's other asyncio tasks saw in a run, in any order."""
        return Counter(
            _outcome(line) for line in self.runs[run] if "end" in line and line["task"] and not line["within"]
        )


def _outcome(line: dict[str, Any]) -> str:
    return f"{line['end']} -> {line.get('value') or line.get('raised')}"


class Process(CutOffProcess):
    """One worker process, which is disturbed at a write."""

    def __init__(self, stop: Disturbance | None, writes: int = 0, dies: Callable[[], None] | None = None) -> None:
        self._stop = stop
        super().__init__(self._cut, writes=writes, bound=_BOUND, dies=dies)

    def _cut(self, write: RunWrite) -> Cut | None:
        stop = self._stop
        if stop is None or stop.when == "attempt" or write.number != stop.number:
            return None
        return _CUTS[stop.when]


_CUTS: Final[Mapping[When, Cut]] = {
    "before": "before",
    "late": "before",
    "after": "after",
    "kill": "after",
    "reply": "reply",
}


def kill() -> None:
    """End this process as `kill -9` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


class _FailAttempt(Middleware):
    """Notes each run of the handler, and lets an attempt fail where the observer has ended it."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        if not ctx.task_id.endswith(_TASK):  # one that the task has enqueued
            return await call_next()
        self._observer.begin_run()
        try:
            return await call_next()
        except BaseException as error:
            if _has_failed(error):
                raise ConnectionResetError("the attempt fails here") from None
            raise


def _has_failed(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(map(_has_failed, error.exceptions))
    return isinstance(error, AttemptFailed)


@contextmanager
def _parking_soon() -> Iterator[None]:
    """Park runs for waits that are longer than 50 ms."""
    seconds = WaitBoard.park_after
    WaitBoard.park_after = 0.05
    try:
        yield
    finally:
        WaitBoard.park_after = seconds


class Rehearsal:
    """One task from its enqueue to its outcome, with at most one disturbance."""

    def __init__(self, handler: Handler, settings: Settings, folder: Path, name: str) -> None:
        """name: of the app and its queue."""
        self.handler = handler
        self.journal = Journal(folder / f"{name}.journal")
        self.settings = settings
        self.name = name
        self._task_id = f"{name}{_TASK}"
        self._sent = 0
        self._stuck = ""
        self._partition: Partition = Namespace(settings.namespace).partition(name)

    def play(self, disturbance: Disturbance | None = None, *, killed: Callable[[], None] | None = None) -> Seen:
        """Run the task to its outcome.

        killed: works on the task in a process that is killed, in place of the first process here.
        """
        fails_after = disturbance.number if disturbance is not None and disturbance.when == "attempt" else None
        observer, writes, stop = Observer(self.journal, fails_after), 0, disturbance
        with redis.Redis.from_url(self.settings.redis_url) as client, observer.watching():
            client.response_callbacks.clear()
            Process(None).run(lambda: self.enqueue(observer))
            if killed is not None:
                killed()
                Process(None).run(self.expire_leases)
                stop = None
            while not self._stuck and not self._has_ended(client):
                process = Process(stop, writes)
                process.run(lambda: self.work(observer))
                writes = process.writes
                if process.dead:
                    Process(None).run(self.expire_leases)
                    if process.held is not None and disturbance is not None and disturbance.when == "late":
                        Process(None).run(lambda: self.work(observer))
                        with suppress(redis.ResponseError):
                            client.execute_command(*process.held)
                    stop = None
                if self.handler.spawns:
                    Process(None).run(self.expire_leases)
                    Process(None).run(lambda: self.work(observer, deliver=True))
                if not self._has_ended(client):
                    Process(None).run(lambda: self.end_wait(observer))
            if self.handler.enqueues:
                Process(None).run(self.expire_leases)
                Process(None).run(lambda: self.work(observer, deliver=self.handler.spawns))
            result, streams = self._stuck or self._result(client), self._streams(client)
        return Seen(result, self._effects(), self._runs(), writes, observer.calls, streams)

    async def enqueue(self, observer: Observer) -> None:
        app, task = self._app(observer)
        async with app:
            await app.producer.enqueue(task.name, self.handler.arguments, queue=self.name, task_id=self._task_id)

    async def work(self, observer: Observer, *, deliver: bool = False) -> None:
        """Work until nothing is left to do at once.

        deliver: first do what a dead process has left of joins, as if time had passed.
        """
        app, _ = self._app(observer)
        async with Worker(app, concurrency=4) as worker:
            if deliver:
                await deliver_notices(app.producer.gateway, self._partition)
            with _parking_soon():
                await worker.run(burst=True)

    async def expire_leases(self) -> None:
        async with App(self.name, settings=self.settings) as app:
            await expire_leases(app.producer.gateway, [self._partition])

    async def end_wait(self, observer: Observer) -> None:
        """If the task waits, send it the next message, or wait until its time has passed."""
        app, _ = self._app(observer)
        async with app:
            gateway = app.producer.gateway
            state, waits = await gateway.command("HMGET", self._record, "state", "waits")
            if state != b"scheduled" or waits is None:
                return
            due = await gateway.command("ZSCORE", self._partition.due, self._task_id)
            if due is None:
                return
            if self.handler.replays:
                async for dead in list_letters(gateway, [self._partition], Filter()):
                    await replay(gateway, dead, Replay())
                    return
            if self.handler.cancels:
                handle = await app.producer.find(self._task_id, queue=self.name)
                assert handle is not None
                await handle.cancel()
                return
            if self._sent < len(self.handler.answers):
                sent = self.handler.answers[self._sent]
                self._sent += 1
                handle = await app.producer.find(self._task_id, queue=self.name)
                assert handle is not None
                if isinstance(sent, Reply):
                    await handle.answer(sent.wait, sent.value)
                else:
                    await handle.send(sent[1], sender=sent[0])
                return
            now = await gateway.command("TIME")
            delay = int(due) / 1000 - int(now[0]) - int(now[1]) / 1e6
            if delay > _BOUND:
                self._stuck = f"the task waits for {delay:g} s"
            else:
                await asyncio.sleep(max(0.0, delay))

    def _app(self, observer: Observer) -> tuple[App, Any]:
        app = App(self.name, settings=self.settings, middleware=[_FailAttempt(observer)])
        return app, self.handler.build(app, self.journal)

    @property
    def _record(self) -> str:
        return self._partition.record(self._task_id)

    def _has_ended(self, client: redis.Redis) -> bool:
        return client.hget(self._record, "state") in (b"succeeded", b"dead", b"cancelled")

    def _result(self, client: redis.Redis) -> str:
        found: Any = client.hmget(self._record, "state", "result", "reason", "error")
        state, result, reason, error = found
        if state == b"succeeded":
            return str(result.decode())
        if state != b"dead":
            return f"{state.decode()} {(reason or b'').decode()}"
        failure = json.loads(error)
        return f"dead: {reason.decode()} {failure['error']}: {failure['message']}"

    def _streams(self, client: redis.Redis) -> dict[str, list[Any]]:
        """Return the visible items of each stream. Their numbers have no gap."""
        found: dict[str, list[Any]] = {}
        names: Any = client.hget(self._record, "streams")
        for name in stream_names(names):
            raw: Any = client.execute_command("XRANGE", self._partition.stream(self._task_id, name), "-", "+")
            entries = [decode_item(entry, fields) for entry, fields in raw]
            assert [entry.number for entry in entries] == [*range(1, len(entries) + 1)]
            found[name] = [json.loads(item.data) for item in visible(entries)]
        return found

    def _effects(self) -> Counter[str]:
        return Counter(line["effect"] for line in self.journal.lines() if "effect" in line)

    def _runs(self) -> list[list[dict[str, Any]]]:
        runs: list[list[dict[str, Any]]] = []
        for line in self.journal.lines():
            if "run" in line:
                runs.append([])
            elif runs:
                runs[-1].append(line)
        return runs


# what must hold


def problems(handler: Handler, undisturbed: Seen, seen: Seen, disturbance: Disturbance | None) -> list[str]:
    """Return what differs from a task that is never disturbed, though a stop or a retry must not show."""
    found = []
    again = _may_act_again(seen, disturbance)
    if not handler.flaky:
        if seen.result != undisturbed.result:
            found.append(f"result {seen.result}, undisturbed {undisturbed.result}")
        own, before = (seen.all(), undisturbed.all()) if handler.agent else (seen.own(), undisturbed.own())
        if own != before:
            found.append(f"the handler saw {own}, undisturbed {before}")
        if not handler.races and seen.beside() != undisturbed.beside():
            found.append(f"its tasks saw {seen.beside()}, undisturbed {undisturbed.beside()}")
        for name in seen.effects | undisturbed.effects:
            more = seen.effects[name] - undisturbed.effects[name]
            less = 0 if disturbance is None or disturbance.when != "attempt" else -undisturbed.effects[name]
            if name not in handler.beyond and not less <= more <= again[name]:
                found.append(f"{name}: {seen.effects[name]} calls, undisturbed {undisturbed.effects[name]}")
    for number in range(0 if handler.undoes else len(seen.runs) - 1):
        found += _contradictions(seen.runs[number], seen.runs[number + 1 :])
    for stream in {*handler.streams, *seen.streams}:
        items, wanted = seen.streams.get(stream, []), handler.streams.get(stream, [])
        if (sorted(items) != sorted(wanted)) if handler.races else items != wanted:
            found.append(f"stream {stream} has {items}, not {wanted}")
    if problem := handler.allowed(seen.effects):
        found.append(problem)
    if handler.expects is not None and not handler.flaky and not _is(seen.result, handler.expects):
        found.append(f"result {seen.result}, expected {handler.expects}")
    if "dead: not_retryable" in seen.result and "dead: not_retryable" not in undisturbed.result:
        found.append(f"result {seen.result}")
    return found


def _may_act_again(seen: Seen, disturbance: Disturbance | None) -> Counter[str]:
    """Return how many more calls are right: one of a step in flight, and those of a step whose failure is retried."""
    if disturbance is None:
        return Counter()
    effects = seen.effects
    if disturbance.when != "attempt":
        return Counter(dict.fromkeys(effects, 1))
    known = {label for label, _ in _binding(seen.runs[0])}
    return Counter(line["effect"] for line in seen.runs[0] if "effect" in line and line["call"] not in known)


def _is(result: str, expected: Any) -> bool:
    return result.startswith("dead:") if expected == "dead" else result == json.dumps(expected, separators=(",", ":"))


def _contradictions(lines: list[dict[str, Any]], later: list[list[dict[str, Any]]]) -> Iterator[str]:
    """Yield what later runs saw or did otherwise than a run from which the handler had continued."""
    known = dict(_binding(lines))
    for run in later:
        for line in run:
            if "end" in line and line["end"] in known and _outcome(line) != known[line["end"]]:
                yield f"a later run saw {_outcome(line)}, before {known[line['end']]}"
            if "effect" in line and line["call"] in known:
                yield f"recorded {line['call']} called {line['effect']} again"


def _binding(lines: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the calls whose outcome is history: confirmed results, and failures after which the handler continued."""
    for place, line in enumerate(lines):
        if "end" not in line or line["within"]:
            continue
        if ("value" in line and line["end"].startswith(STEPS)) or _has_continued(line, lines[place + 1 :]):
            yield line["end"], _outcome(line)


def _has_continued(line: dict[str, Any], after: list[dict[str, Any]]) -> bool:
    """Return whether a later call of an asyncio task that received the outcome, or of the handler's, has acted."""
    begun = {one["begin"] for one in after if "begin" in one and one["task"] in (0, line["task"], line["by"])}
    return any(
        (one.get("effect") and one["call"] in begun) or (one.get("end") in begun and "value" in one) for one in after
    )


def disturbances(handler: Handler, undisturbed: Seen) -> list[Disturbance]:
    """Return all disturbances of a task: at each write, and after each call of the handler's own asyncio task."""
    whens: tuple[When, ...] = ("before", "after", "late", "reply")
    found = [Disturbance(when, number) for number in range(1, undisturbed.writes + 1) for when in whens]
    calls = undisturbed.calls if handler.retried else 0
    return found + [Disturbance("attempt", number) for number in range(1, calls + 1)]


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the workers' log of deaths out of the output."""
    logger.disable("perdure")
    try:
        yield
    finally:
        logger.enable("perdure")
