"""Replay of exported logs: a check, before a deployment, that new code continues what the old code has recorded."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal, TypeAlias

import anyio
import orjson
from pydantic import SecretStr

from ...deadletter.error_text import error_text
from ...queues.durations import Duration, to_seconds
from ...queues.envelope import new_task_id
from ...queues.errors import ConfigurationError, NotOpen, PerdureError, TaskNotFound
from ...queues.sessions.record import parse_turn_id
from ...queues.wording import counted, shortened
from ..app import App
from ..artifacts.store import artifact_store
from ..context import Context
from ..durable.run import Run, RunObserver
from ..durable.steps.current import StepCall
from ..durable.steps.matching import read_recorded_steps
from ..durable.stop_reasons import StopReason
from ..errors import StepMismatch, TransferError
from ..middleware import CallNext, Middleware, Settlement
from ..transfer.export import LineWriter, read_lines, unpack
from ..transfer.import_ import import_task
from .fixture import PerdureFixture, embedded_server
from .idle import make_worker

_SHOWN: Final = 200
"""Most characters of a value in a difference."""

_IN_MEMORY: Final = 1 << 22
"""Bytes of a log that are held in memory."""

ReplayEnd: TypeAlias = Literal["finished", "failed", "stopped", "waiting"]


@dataclass(frozen=True, slots=True)
class ReplayedLog:
    """A log that was replayed with the code of an app.

    Attributes:
        task: name of the task.
        task_id: its id.
        recorded: number of the recorded steps.
        met: number of those that the code has asked for.
        end: `finished` if the handler has returned, `failed` if it has raised, `stopped` before it would have run a
            step that is not recorded, or where it reads another task by its handle, which the log does not have,
            `waiting` where it waits for a message, an answer, a child or a time.
        at: the step at which it was stopped, the error, or what it waits for.
        differences: what the code does in another way than the log, a sentence each; empty if it continues the task.
    """

    task: str
    task_id: str
    recorded: int
    met: int
    end: ReplayEnd
    at: str
    differences: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether the code continues what is recorded."""
        return not self.differences

    def check(self) -> None:
        """Raise `AssertionError` if there are differences; it lists them."""
        __tracebackhide__ = True  # pytest shows the line of the test
        if self.differences:
            raise AssertionError(f"task {self.task!r} {self.task_id}: {'; '.join(self.differences)}")


async def replay_log(app: App, file: Path | str | IO[bytes], *, timeout: Duration = 60.0) -> ReplayedLog:
    """Run a handler of an app with the records of an exported task, without a step that is not recorded.

    The task runs in a namespace of its own on the server of the app, which is removed afterwards. Recorded steps return
    their records; where the handler asks for anything else, it ends. No outcome is stored: no cleanup, webhook or retry
    follows. The lifespan of the app is opened, and code of the handler outside steps runs, as in each resumed run.

    Args:
        app: the app, which is not open.
        file: file of `perdure task export`, of a task that has ended or not.
        timeout: seconds or a timedelta that the replay may take.

    Raises:
        TransferError: the file is damaged, or of another version.
        ConfigurationError: the app is open.
        TimeoutError: the handler did not end in time.
        OSError: the file cannot be read.
    """
    limit = to_seconds(timeout, "timeout")
    with suppress(NotOpen):
        raise ConfigurationError(
            f"app {app.name!r} must not be open while a log is replayed, got one that is open in namespace "
            f"{app.producer.namespace.name!r}: call replay_log outside 'async with app:'"
        )
    with _opened(file) as source, tempfile.SpooledTemporaryFile(_IN_MEMORY) as copy:
        log = await anyio.to_thread.run_sync(_copy_log, source, copy)
        task = app.tasks.get(log.task)
        if task is None:
            known = ", ".join(sorted(app.tasks)) or "none"
            missing = f"app {app.name!r} has no task {log.task!r}; it has: {known}"
            return ReplayedLog(log.task, log.task_id, log.recorded, 0, "failed", "UnknownTask", (missing,))
        replay = _Replay(log.run_id, task)
        with tempfile.TemporaryDirectory(prefix="perdure-replay-") as folder, _own_namespace(app, Path(folder)):
            try:
                async with asyncio.timeout(limit):
                    await _run(app, log, copy, replay)
            except TimeoutError:
                raise TimeoutError(f"task {log.task!r} {log.task_id} did not end within {limit:g} seconds") from None
    return replay.report(log)


async def _run(app: App, log: _Log, file: IO[bytes], replay: _Replay) -> None:
    """Import the task of a file, and run it until its replay has ended."""
    async with app:
        store = await artifact_store(app.producer.gateway, app.settings)
        new_id = log.run_id if log.run_id != log.task_id else None
        await import_task(app.producer, store, file, new_id=new_id)
        async with make_worker(app, replay, 4, [log.queue]) as worker:
            running = asyncio.create_task(worker.run(), name="perdure log replay")
            ended = asyncio.create_task(replay.ended.wait())
            try:
                await asyncio.wait([running, ended], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    running.result()
            finally:
                ended.cancel()
                running.cancel()
                await asyncio.wait([running, ended])


@contextmanager
def _own_namespace(app: App, folder: Path) -> Iterator[None]:
    """Let the apps of the process use a new namespace, on the server of the app or an embedded one in the folder.

    Their artifacts and memories are files in the folder, and nothing is posted to their webhook.
    """
    with ExitStack() as stack:
        address = app.settings.address
        url = stack.enter_context(embedded_server(folder / "server")) if address.embedded else app.settings.redis_url
        stack.enter_context(PerdureFixture(url, folder / "data"))
        App.overrides = {**App.overrides, "memory": "", "artifacts": "", "webhook_url": SecretStr("")}
        yield


@contextmanager
def _opened(file: Path | str | IO[bytes]) -> Iterator[IO[bytes]]:
    if isinstance(file, (Path, str)):
        with Path(file).open("rb") as opened:
            yield opened
    else:
        yield file


@dataclass(frozen=True, slots=True)
class _Log:
    """Identity and result of an exported task.

    Attributes:
        run_id: id of the task in the replay: another one for a turn of a session.
        result: its result as JSON, None if the file has none.
        succeeded: whether it has ended with a result.
    """

    task: str
    task_id: str
    run_id: str
    queue: str
    recorded: int
    succeeded: bool
    result: bytes | None


def _copy_log(source: IO[bytes], target: IO[bytes]) -> _Log:
    """Copy an exported task without its outcome, as one that continues. Raises `TransferError`."""
    out, found, result, recorded = LineWriter(target), {}, None, 0
    for number, line in read_lines(source):
        kind = line.pop("kind", "")
        if number == 1:
            found = dict(line)
            line |= {"state": "queued", "ended": False, "finished": None, "due": None}
        if kind == "sealed" and line.get("name") == "result":
            result = _bytes(line, number)
        if kind == "checkpoint" and _is_step(str(line.get("name"))):
            recorded += 1
        if kind not in ("outcome", "sealed"):
            out.write(kind, **line)
    out.end()
    target.seek(0)
    try:
        task_id, task, queue = str(found["id"]), str(found["task"]), str(found["queue"])
    except KeyError as error:
        raise TransferError(f"line 1: {error.args[0]}: it is missing") from None
    run_id = task_id if parse_turn_id(task_id) is None else new_task_id()
    return _Log(task, task_id, run_id, queue, recorded, found.get("state") == "succeeded", result)


def _bytes(line: dict[str, Any], number: int) -> bytes:
    try:
        return unpack(line)
    except (KeyError, TypeError, ValueError) as error:
        raise TransferError(f"line {number}: {error}") from None


def _is_step(name: str) -> bool:
    """Return whether a field of a checkpoint is the record of a step, not of another call."""
    return name.startswith("d:") and not name.startswith("d:#") and "/#" not in name


class _LogEnds(BaseException):
    """The handler has started what is not recorded; no `except Exception` of its code sees it."""


class _Replay(Middleware):
    """Runs one task until it begins what is not recorded, and no other task."""

    def __init__(self, task_id: str, task: Any) -> None:
        self.ended = asyncio.Event()
        self._task_id = task_id
        self._task = task
        self._end: tuple[ReplayEnd, str] = ("waiting", "")
        self._recorded: list[str] = []
        self._asked: set[str] = set()
        self._unasked: list[str] = []
        self._beyond = False
        """Whether the handler has read what no log has."""
        self._result: bytes | None = None
        self._error: BaseException | None = None

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        if ctx.task_id != self._task_id:  # one that the lifespan or a schedule has enqueued
            await anyio.sleep_forever()
        run = ctx._run
        self._recorded = [key for key in await read_recorded_steps(run) if _is_step(f"d:{key}")]
        run.observe(_Stops(run, self._recorded))
        try:
            value = await call_next()
            self._result, _ = self._task.result.encode("task", self._task.name, value)
            self._finish(run, "finished", "")
        except _LogEnds as ends:
            self._finish(run, "stopped", str(ends))
        except TaskNotFound as error:  # the task of a handle, which the log does not have
            self._beyond = True
            self._finish(run, "stopped", error_text(error))
        except Exception as error:  # noqa: BLE001 - what the handler raises is the outcome of the replay
            self._error = error
            self._finish(run, "failed", f"{type(error).__name__}: {error_text(error)}")
        run.cancel(StopReason.LOST)  # so that no outcome is stored, and nothing follows from it
        await anyio.sleep_forever()

    async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
        self._asked.add(step.key)
        try:
            return await call_next()
        except _LogEnds as ends:
            run = ctx._run
            self._finish(run, "stopped", str(ends))
            run.cancel(StopReason.LOST)
            await anyio.sleep_forever()

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        if ctx.task_id == self._task_id and not self.ended.is_set():
            self._error = settlement.error
            shown = "" if settlement.error is None else f"{type(settlement.error).__name__}: {settlement.error}"
            self._finish(ctx._run, "waiting" if settlement.error is None else "failed", shown or settlement.stop)
        await call_next()

    def _finish(self, run: Run, end: ReplayEnd, at: str) -> None:
        if not self.ended.is_set():
            self._end = (end, at)
            self._unasked = [key for key in run.keys.unasked(self._recorded) if key not in self._asked]
            self.ended.set()

    def report(self, log: _Log) -> ReplayedLog:
        """Return what the replay has found."""
        end, at = self._end
        differences = []
        left = ", ".join(repr(key) for key in sorted(self._unasked))
        if self._beyond:
            pass
        elif end == "stopped" and (self._unasked or log.succeeded):
            what = f"step {at!r} would run, which is not recorded"
            differences.append(f"{what}, before {left}" if left else f"{what}, and the recorded run ended without it")
        elif end == "failed":
            problem = isinstance(self._error, PerdureError)
            if log.succeeded or problem:
                differences.append(str(self._error) if isinstance(self._error, StepMismatch) else at)
        elif left:
            noun = counted(len(self._unasked), "recorded step is", "recorded steps are")
            differences.append(f"{noun} not asked for: {left}")
        if end == "waiting" and log.succeeded:
            differences.append(f"the handler waits ({at}), and the recorded run ended without that")
        if end == "finished" and log.result is not None and self._result is not None:
            recorded, now = orjson.loads(log.result), orjson.loads(self._result)
            if recorded != now:
                differences.append(f"the result is {_shown(now)}; recorded is {_shown(recorded)}")
        met = len(self._recorded) - len(self._unasked)
        return ReplayedLog(log.task, log.task_id, log.recorded, met, end, at, tuple(differences))


class _Stops(RunObserver):
    """Stops a run where it begins what is not recorded."""

    __slots__ = ("_recorded", "_run")

    def __init__(self, run: Run, recorded: list[str]) -> None:
        self._run, self._recorded = run, recorded

    def on_step(self, key: str) -> None:
        within = f"{key}/"
        if self._run.is_agent and any(known.startswith(within) for known in self._recorded):
            return  # a step of its plan that has started: what it has recorded is replayed
        raise _LogEnds(key)


def _shown(value: Any) -> str:
    return shortened(orjson.dumps(value).decode(), _SHOWN)
