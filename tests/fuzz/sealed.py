"""A sealed deployment whose data is forged: honest tasks, sessions and operators, and what they must never see.

The program tests/support/programs/witness.py runs as worker processes. A round lets its tasks come to a wait, kills the
worker, sends what the tasks wait for, applies forgeries, and starts another worker. It is checked that

- each value that a handler has seen is the one of its task and place;
- each result, stream, history and stored entry that a client reads is the true one, or an error;
- no worker has ended, and a task that is enqueued afterwards has its result;
- lists show the rows that no forgery has touched.
"""

from __future__ import annotations

import asyncio
import functools
import io
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import anyio
import anyio.to_thread
import orjson
import redis.asyncio
from perdure import App, PerdureError, Settings, State, TaskHandle
from perdure.queues import Namespace
from perdure.queues.keys import SessionPartition
from perdure.queues.sessions.record import SessionAddress
from perdure.worker.agents.identity import Identity, set_identity
from perdure.worker.transfer.export import export_task

from tests.fuzz.forgeries import FORGED, Applied, Forger, Forgery, Stored, read_stored
from tests.fuzz.places import places
from tests.support.command_line import call
from tests.support.paths import PROGRAMS
from tests.support.processes import WorkerProcess, WorkerProcesses, worker_processes
from tests.support.programs.witness import LARGE, QUEUE, SCHEDULE, STORE, TURN, make_program, truth
from tests.support.workers import bounded, wait_until

__all__ = ["Finding", "SealedWorld"]

COHORT: Final[Mapping[str, int]] = {
    "steps": 20,
    "thinker": 16,
    "parent": 6,
    "fails": 6,
    "brief": 4,
    "stores": 6,
    "relay": 4,
    "limited": 4,
}
"""Tasks of each handler in a round."""

SESSIONS: Final = 20
EXPORTED: Final = [f"{name}-{number}" for name in ("steps", "thinker", "fails") for number in range(5)]
"""Tasks that an operator exports after the forgeries."""

UNTOUCHED: Final = "untouched"
PACE: Final = "pace-"
"""Start of the ids of tasks that run while others are waited for."""

_SERVED: Final = 30.0
"""Seconds within which a new task has its result. The bound decides nothing on an idle machine."""

_QUIET: Final = 0.6
"""Seconds without a line in the journal after which nothing more is expected."""

_LISTS: Final[Mapping[tuple[str, ...], Sequence[str]]] = {
    ("task", "list", "--limit", "5000", "--json"): [f"{UNTOUCHED}-{name}" for name in ("brief", "fails", "steps")],
    ("dlq", "list", "--limit", "5000", "--json"): [f"{UNTOUCHED}-fails"],
    ("session", "list", "--limit", "5000", "--json"): [f'"{UNTOUCHED}"'],
    ("store", "list", "--json"): [UNTOUCHED],
    ("schedule", "list", "--json"): [UNTOUCHED],
    ("queue", "list", "--json"): [QUEUE],
}
"""Lists, and the rows that they must show."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a round has found wrong. subject: text that the keys of the task or session have in common."""

    subject: str
    seen: str

    def among(self, applied: Iterable[Applied]) -> list[Applied]:
        """Return the forgeries that wrote to keys of the subject, or name it."""
        named = re.compile(re.escape(self.subject.encode()) + rb"(?![\w-])")
        return [
            one
            for one in applied
            if any(named.search(key) for key in one.keys) or named.search(one.commands.encode("utf-8", "replace"))
        ]


@dataclass(slots=True)
class _Round:
    """The tasks of one round."""

    handles: dict[str, TaskHandle[Any]] = field(default_factory=dict)
    turns: dict[tuple[str, int], Any] = field(default_factory=dict)
    texts: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    answered: set[tuple[str, int]] = field(default_factory=set)
    children: dict[str, list[Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    succeeded: set[str] = field(default_factory=set)
    done: dict[str, int] = field(default_factory=dict)

    def wrong(self, subject: str, seen: object) -> None:
        self.findings.append(Finding(self.digests.get(subject, subject), f"{subject}: {str(seen)[:300]}"))


class SealedWorld:
    """Runs rounds in one namespace.

    Attributes:
        places: Kinds of keys that are forged.
        forger: Applies forgeries.
        failed: Tasks of the last round without a result.
    """

    def __init__(
        self, settings: Settings, client: redis.asyncio.Redis, folder: Path, plain: Stored | None = None, twin: str = ""
    ) -> None:
        """plain: Keys of `shapes` of a world without encryption. twin: its namespace."""
        self._settings = settings
        self._client: Any = client
        self._folder = folder
        self._environment = {
            "PERDURE_ENCRYPTION_KEYS": settings.encryption_keys.get_secret_value(),
            "PERDURE_ENCRYPTION_REQUIRED": "1" if settings.encryption_required else "0",
            "PERDURE_PAYLOAD_LIMIT": str(settings.payload_limit),
        }
        self._rounds = 0
        self._twin, self._plain = twin, plain or {}
        names = Namespace(settings.namespace)
        self.places = list(places(names, names.partition(QUEUE), SessionPartition(names.name, 0)))
        self.forger = Forger(client, settings.namespace, self.places, twin, self._plain)
        self.failed: set[str] = set()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[App, WorkerProcesses]]:
        """Start a round on an empty namespace."""
        await self.clear()
        self._rounds += 1
        folder = self._folder / f"round-{self._rounds}"
        folder.mkdir(parents=True)
        self.forger = Forger(self._client, self._settings.namespace, self.places, self._twin, self._plain)
        with worker_processes(self._settings, folder, PROGRAMS / "witness.py", self._environment) as workers:
            program = make_program(self._settings, lambda *_: None, lambda: True)
            self._talker = program.talker
            async with program.app as app:
                yield app, workers

    async def clear(self) -> None:
        """Delete all keys."""
        for key in await read_stored(self._client, self._settings.namespace):
            await self._client.unlink(key)

    async def shapes(self) -> Stored:
        """Return all keys of the tasks of a round, at the moment at which others are forged."""
        async with self._open() as (app, workers):
            state = _Round()
            first = await self._begin(app, workers, state)
            early = await read_stored(self._client, self._settings.namespace)
            await self._advance(app, first, state)
            return early | await read_stored(self._client, self._settings.namespace)

    async def round(self, forgeries: Sequence[Forgery]) -> tuple[list[Finding], list[Applied]]:
        """Run the tasks of a round with forgeries. Return what is wrong, and the forgeries as they were applied."""
        async with self._open() as (app, workers):
            state = _Round()
            first = await self._begin(app, workers, state)
            await self.forger.read()
            await self._advance(app, first, state)
            await self.forger.read()
            applied = [await self.forger.apply(one) for one in forgeries]
            for task_id in EXPORTED:
                await self._export(app, task_id, state)
            (workers.journal.parent / f"{workers.journal.name}-mended").touch()
            second = await workers.start(concurrency=16).ready()
            await self._finish(app, second, state)
            await self._settle(app, workers, state, to_the_end=not forgeries)
            await self._read_all(app, state)
            await anyio.to_thread.run_sync(self._check_lists, state)
            if (code := second.process.poll()) is not None:
                state.wrong("the worker", f"ended with exit code {code}")
            self._check_journal(workers.journal, state)
            self.failed = {one for one in state.handles if not one.startswith(UNTOUCHED)} - state.succeeded
            return state.findings, applied

    # honest programs

    async def _begin(self, app: App, workers: WorkerProcesses, state: _Round) -> WorkerProcess:
        """Enqueue all tasks, and wait until each has come to its first wait or end."""
        worker = await workers.start(concurrency=16).ready()
        for version in (1, 2):
            identity = Identity(role=truth("identity", f"role {version}"))
            await set_identity(app.producer.gateway, app.producer.namespace, "thinker", identity)
        for name, count in COHORT.items():
            for task_id in [f"{name}-{number}" for number in range(count)]:
                await self._enqueue(app, name, task_id, state)
        for name in ("steps", "fails", "brief"):
            await self._enqueue(app, name, f"{UNTOUCHED}-{name}", state)
        for number in range(SESSIONS):
            await self._send(app, f"talk-{number}", 1, state)
        await self._send(app, UNTOUCHED, 1, state)
        await app.store(*STORE[:1], UNTOUCHED).put("k", truth(UNTOUCHED, "stored"))
        for turn in list(state.turns.values()):
            await bounded(turn.result())
        await wait_until(functools.partial(self._all_wait, state), "all tasks wait or have ended")
        return worker

    async def _enqueue(self, app: App, name: str, task_id: str, state: _Round, delay: float = 0.0) -> None:
        arguments: dict[str, Any] = {"text": truth(task_id, "text")}
        if name == "steps" and task_id[-1] in "02468":
            arguments["large"] = truth(task_id, "large") * LARGE
        if name == "thinker":
            arguments = {"goal": truth(task_id, "goal")}
        state.handles[task_id] = await app.tasks[name].options(task_id=task_id, delay=delay).enqueue(**arguments)

    async def _send(self, app: App, session: str, number: int, state: _Round) -> None:
        text = truth(session, f"message {number}")
        turn = await app.session(self._talker, session).send(text)
        state.turns[session, turn.number] = turn
        state.texts.setdefault((session, turn.number), []).append(text)
        state.digests[session] = SessionAddress.of(Namespace(self._settings.namespace), "talker", session).digest

    async def _all_wait(self, state: _Round) -> bool:
        records = await asyncio.gather(*(handle.record() for handle in state.handles.values()))
        moving = (State.QUEUED, State.RUNNING, State.SCHEDULED)
        return not any(record.state in moving or record.state.value == "limited" for record in records)

    async def _advance(self, app: App, worker: WorkerProcess, state: _Round) -> None:
        """Let the tasks come to the next wait, kill the worker, and store what they get from the next one."""
        for name, handle in state.handles.items():
            if not name.startswith(UNTOUCHED):
                await self._answer(app, handle, state, "go1")
        for number in range(SESSIONS):
            await self._send(app, f"talk-{number}", 2, state)
        for (session, number), turn in list(state.turns.items()):
            await bounded(turn.result())
            state.answered.add((session, number))
        await wait_until(functools.partial(self._all_wait, state), "all tasks wait or have ended")
        worker.kill()
        for position, (name, handle) in enumerate(list(state.handles.items())):
            if name.startswith(UNTOUCHED):
                continue
            if position % 2:
                await self._answer(app, handle, state, "go2")
            if name.startswith("steps"):
                await handle.send(truth(name, "message"), sender="ada")
        for number in range(SESSIONS):
            await self._send(app, f"talk-{number}", 3, state)
            if number % 2:
                await self._send(app, f"talk-{number}", 4, state)
        for name, count in COHORT.items():
            for task_id in [f"{name}-late-{number}" for number in range(count // 3)]:
                await self._enqueue(app, name, task_id, state, delay=0.2 if task_id[-1] == "1" else 0.0)

    async def _answer(self, app: App, handle: TaskHandle[Any], state: _Round, name: str) -> None:
        kind = handle.id.partition("-")[0]
        if kind == "parent":
            for number in range(3):
                value = truth(handle.id, f"go {number}")
                await _tolerated(functools.partial(app.answer, f"child:{handle.id}:{number}", value), state, handle.id)
        if kind in ("steps", "thinker", "stores", "relay", "parent") and (
            name != "go1" or kind in ("steps", "thinker")
        ):
            await _tolerated(functools.partial(handle.answer, name, truth(handle.id, name)), state, handle.id)

    async def _export(self, app: App, task_id: str, state: _Round) -> None:
        """Export a task. What is decrypted in the file is read as truth by an import."""
        file, no_artifacts = io.BytesIO(), cast("Any", None)
        with _Tolerating(state, task_id):
            await export_task(app.producer, state.handles[task_id], no_artifacts, file)
            for line in file.getvalue().splitlines():
                if FORGED.encode() in line and not orjson.loads(line).get("plain"):
                    state.wrong(task_id, f"export: {line.decode()}")

    async def _finish(self, app: App, worker: WorkerProcess, state: _Round) -> None:
        """Give the tasks what they wait for, replay dead letters, and run new tasks."""
        await self._enqueue(app, "brief", "new", state)
        await self._enqueue(app, "brief", "new-delayed", state, delay=0.05)
        for name in ("go1", "go2", "go3"):
            for task_id, handle in state.handles.items():
                if not task_id.startswith(UNTOUCHED):
                    await self._answer(app, handle, state, name)
        for number in range(SESSIONS):
            session = f"talk-{number}"
            following = max(at for one, at in state.turns if one == session) + 1
            await _tolerated(functools.partial(self._send, app, session, following, state), state, session)
        for task_id in ("new", "new-delayed"):
            try:
                with anyio.fail_after(_SERVED):
                    assert await state.handles[task_id].result() == truth(task_id, "result")
            except Exception as error:  # noqa: BLE001 - the run names any failure
                state.wrong(task_id, f"a new task: {type(error).__name__}: {error}")
        letters = (await anyio.to_thread.run_sync(self._command, "dlq", "list", "--limit", "5000", "--json")).json
        dead = [one["id"] for one in letters if not one["id"].startswith((UNTOUCHED, "-"))]
        await anyio.to_thread.run_sync(self._command, "dlq", "replay", *dead)
        for task_id, handle in state.handles.items():
            if not task_id.startswith(UNTOUCHED):
                for name in ("go2", "go3"):
                    await self._answer(app, handle, state, name)

    def _command(self, *command: str) -> Any:
        return call(*command, "--redis-url", self._settings.redis_url, "--namespace", self._settings.namespace)

    async def _settle(self, app: App, workers: WorkerProcesses, state: _Round, *, to_the_end: bool) -> None:
        """Answer what is asked only now, until nothing happens any more while the worker runs another task.

        to_the_end: Wait until all tasks have ended, as they do without forgeries.
        """
        seen = -1
        with anyio.move_on_after(_SERVED):
            while (now := _count(workers.journal)) != seen or (to_the_end and not await self._all_end(state)):
                for task_id, handle in state.handles.items():
                    if task_id.startswith(("parent", "stores")) or "late" in task_id:
                        for name in ("go1", "go2", "go3"):
                            await self._answer(app, handle, state, name)
                await anyio.sleep(_QUIET)
                seen = now
                await self._enqueue(app, "brief", f"{PACE}{len(state.handles)}", state)
                await _tolerated(functools.partial([*state.handles.values()][-1].result, _SERVED), state, "the worker")

    async def _all_end(self, state: _Round) -> bool:
        handles = [handle for name, handle in state.handles.items() if not name.startswith(UNTOUCHED)]
        records = await asyncio.gather(*(handle.record() for handle in handles))
        return all(record.state.terminal for record in records)

    # what honest programs see

    async def _read_all(self, app: App, state: _Round) -> None:
        await asyncio.gather(*(self._read_task(handle, state) for handle in state.handles.values()))
        sessions = sorted({session for session, _ in state.turns})
        await asyncio.gather(*(self._read_session(app, session, state) for session in sessions))
        store = app.store(*STORE)
        for task_id in state.handles:
            for key, copies in ((task_id, 1), (f"{task_id}/large", LARGE)):
                with _Tolerating(state, task_id):
                    found = await store.get(key)
                    place = "stored" if copies == 1 else "stored large"
                    if found not in (None, truth(task_id, place) * copies):
                        state.wrong(task_id, f"store: {found}")

    async def _read_task(self, handle: TaskHandle[Any], state: _Round) -> None:
        task_id = handle.id
        with _Tolerating(state, task_id):
            record = await handle.record()
            if record.state is State.SUCCEEDED:
                found = await handle.result(timeout=5.0)
                state.succeeded.add(task_id)
                copies = LARGE if task_id.startswith("steps") and task_id[-1] in "02468" else 1
                if found != truth(task_id, "result") * copies:
                    state.wrong(task_id, f"result: {found}")
            shown = record.shown_arguments(), record.shown_result(), record.shown_progress()
            if FORGED in repr(shown):
                state.wrong(task_id, f"record: {shown}")
        with _Tolerating(state, task_id):
            async for event in handle.events(follow=False):
                if event.number is not None and FORGED in repr(event.data):
                    state.wrong(task_id, f"event {event.number}: {event.data}")
        if task_id.startswith("steps"):
            items = []
            with _Tolerating(state, task_id), anyio.move_on_after(0.3):
                async for item in handle.stream():
                    items += [item.value] if item.kind == "item" and item.problem is None else []
            true = [truth(task_id, f"item {number}") for number in range(3)]
            if items != [one for one in true if one in items]:
                state.wrong(task_id, f"stream: {items}")

    async def _read_session(self, app: App, session: str, state: _Round) -> None:
        with _Tolerating(state, session):
            async for message in app.session(self._talker, session).history():
                said = state.texts.get((session, message.turn), [])
                true = said if message.role == "user" else [f"answer to {text}" for text in said]
                if message.content not in true and not message.content.startswith("("):
                    state.wrong(session, f"history of turn {message.turn}: {message.role}: {message.content}")
        for (name, number), turn in state.turns.items():
            if name == session:
                with _Tolerating(state, session):
                    answer = await turn.result(timeout=1.0)
                    if answer not in [f"answer to {text}" for text in state.texts[name, number]]:
                        state.wrong(session, f"turn {number}: {answer}")

    def _check_lists(self, state: _Round) -> None:
        for command, rows in _LISTS.items():
            answer = self._command(*command)
            if answer.code != 0 or "Traceback" in answer.err:
                state.wrong(" ".join(command[:2]), f"exit code {answer.code}: {answer.err[-300:]}")
            for row in rows:
                if row not in answer.out:
                    state.wrong(" ".join(command[:2]), f"does not show {row}: {answer.out[-200:]} {answer.err[-200:]}")

    # what handlers have seen

    def _check_journal(self, journal: Path, state: _Round) -> None:
        sessions = {digest: session for session, digest in state.digests.items()}
        for line in journal.read_bytes().splitlines():
            _, task_id, place, value = orjson.loads(line)
            if task_id.startswith(TURN):
                digest, _, rest = task_id.removeprefix(TURN).partition("-")
                subject = sessions.get(digest, task_id)
                number = re.match(r"\d+", rest.partition(".")[2])
                problem = _wrong_turn(subject, int(number[0]) if number else 0, place, value, state)
            else:
                subject, problem = task_id, _wrong(task_id, place, value, state)
            if problem is not None:
                state.wrong(subject, f"handler of {task_id}: {place}: {problem}")


def _wrong_turn(session: str, number: int, place: str, value: Any, state: _Round) -> str | None:
    """Return what is wrong with what a turn has seen, None if it is what it may see."""
    if place not in ("turn", "turn end") or value["goal"] not in state.texts.get((session, number), []):
        return str(value)
    known = [text for at in range(1, number + 1) for text in state.texts.get((session, at), [])]
    needed = [state.texts[one, at] for one, at in state.answered if one == session and at < number]
    heard = value["heard"]
    if heard != [text for text in known if text in heard] or not all(
        any(t in heard for t in texts) for texts in needed
    ):
        return f"turn {number} after {sorted(needed)}: {value}"
    return None


def _count(journal: Path) -> int:
    """Return the number of lines in the journal, but those of the tasks that set the pace."""
    return sum(PACE.encode() not in line for line in journal.read_bytes().splitlines())


_STEP = re.compile(r"step(\d)")


def _wrong(task_id: str, place: str, value: Any, state: _Round) -> str | None:  # noqa: PLR0911 - one per place
    """Return what is wrong with a value that a task has seen, None if it is the true one."""
    copies = LARGE if place in ("large", "big", "stored large") else 1
    match place:
        case "child":
            parent, number = value
            true = (
                parent in state.handles and number in (0, 1, 2) and state.children.setdefault(task_id, value) == value
            )
            return None if true else str(value)
        case "child step" | "child go":
            parent, number = state.children.get(task_id, ["?", 0])
            true_value: Any = truth(parent, f"work {number}" if place == "child step" else f"go {number}")
        case "relay":
            text, source = value
            own = truth(task_id, "text") if not source else truth(source, "handed")
            return None if text == own and (not source or source in state.handles) else str(value)
        case "beat":
            true_value = truth(SCHEDULE, "beat")
        case "title":
            key, title = value
            number = _STEP.fullmatch(key)
            return None if number and title == truth(task_id, f"title {number[1]}") else str(value)
        case "state":
            before = state.done.get(task_id, 0)
            state.done[task_id] = len(value["results"])
            return _wrong_state(task_id, value, before)
        case "role":
            return None if value in (truth("identity", "role 2"), "") else str(value)
        case "level 1" if value is None:
            return None  # as if the value had been deleted
        case _:
            true_value = truth(task_id, place) * copies
    return None if value == true_value else str(value)


def _wrong_state(task_id: str, state: Mapping[str, Any], before: int) -> str | None:
    """Return what is wrong with the state of an agent, None if it may be that of a run.

    before: Steps that were done when the agent looked the last time.
    """
    done = [key for key in ("step1", "step2", "step3") if key in state["results"]]
    ends = [key[-1] for key in done]
    true = {
        "results": {f"step{number}": truth(task_id, f"done {number}") for number in ends},
        "context": {f"step{number}": truth(task_id, f"context {number}") for number in ends},
        "plan": [truth(task_id, f"title {number}") for number in (1, 2, 3)],
    }
    if len(done) < before:
        return f"{len(done)} steps are done, after {before} were"
    if done != ["step1", "step2", "step3"][: len(done)] or any(state[name] != value for name, value in true.items()):
        return str(state)
    for name, word in (("decisions", "decision"), ("facts", "fact"), ("messages", "said")):
        texts = [truth(task_id, f"{word} {number}") for number in (1, 2, 3)]
        full: list[Any] = [["user", text] for text in texts] if name == "messages" else texts
        if state[name] not in (full[: len(done)], full[: len(done) + 1]):
            return f"{name} after {len(done)} steps: {state[name]}"
    return None


class _Tolerating:
    """Take errors that a damaged task may raise; others are wrong."""

    def __init__(self, state: _Round, subject: str) -> None:
        self._state, self._subject = state, subject

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> bool:
        if isinstance(error, (PerdureError, TimeoutError)):
            return True
        if isinstance(error, Exception):
            self._state.wrong(self._subject, f"a client: {type(error).__name__}: {error}")
            return True
        return False


async def _tolerated(call: Callable[[], Awaitable[object]], state: _Round, subject: str) -> None:
    with _Tolerating(state, subject):
        await call()
