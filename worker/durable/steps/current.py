"""The running step: what its function and the rest of the package see of it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import orjson

from ....deadletter.policy import Retry
from ....queues.delivery.checkpoint import Entry, Kind
from ....queues.durations import Duration, to_seconds
from ....queues.envelope import check_size
from ....queues.wording import shortened
from ...errors import StepDefinitionError, StepOutsideTask
from ..emitting import emit_item
from ..handler_task import InFlight
from ..journal.tool_notes import TOOLS, ToolCalls, encode_note, is_note
from ..run import Run
from .codec import Codec
from .failures import handle_failures

if TYPE_CHECKING:
    from ..budget_left import BudgetLeft
    from ..spent import Spent

CURRENT_RUN: ContextVar[Run | None] = ContextVar("perdure_run", default=None)
CURRENT_STEP: ContextVar[Step | None] = ContextVar("perdure_step", default=None)


FORGOTTEN: Final = "#forgotten"
"""Checkpoint key of the numbers of attempts that have forgotten a step, by its key."""


class Step(InFlight):
    """The running step, as its function sees it: `current_step()`.

    note: entry which says that the call is in flight. noted: hash and text of the arguments of a step that stores
    this once it has been running for a while; None for any other. remembered: number of writes to the long-term memory
    in this try. recorded: whether its result is put into the checkpoint. enqueued: number of equal calls that have
    enqueued tasks in this try, by their hash. records_nested: whether steps within are recorded.
    """

    __slots__ = (
        "__weakref__",
        "_replicated",
        "_run",
        "attempt",
        "caller",
        "enqueued",
        "key",
        "note",
        "noted",
        "recorded",
        "records_nested",
        "remembered",
        "scope",
        "tool",
    )

    def __init__(
        self,
        run: Run,
        key: str,
        *,
        replicated: bool,
        tool: str | None = None,
        tries: int = 0,
        caller: asyncio.Task[Any] | None = None,
        noted: tuple[str, str] | None = None,
        records_nested: bool = False,
    ) -> None:
        """tries: that have ended."""
        self._run = run
        self._replicated = replicated
        self.tool = tool
        self.caller = caller
        self.key = key
        self.scope = run.keys.scope
        self.attempt = tries + 1
        self.note: Entry | None = None
        self.noted = noted
        self.recorded = False
        self.remembered = 0
        self.enqueued: dict[str, int] | None = None
        self.records_nested = records_nested

    def intent(self) -> tuple[Entry, ...]:
        """Return the entries which say that the call is in flight, unless they are stored already."""
        known = self._run.history.intents.get(self.key)
        if self.note is not None or self.noted is None or not (known is None or is_note(known)):
            return ()
        digest, arguments = self.noted
        call = f"{self.key.partition('#')[0]}({arguments})"
        self.note = Entry(Kind.INTENT, self.key, encode_note(digest, "", call))
        calls = ToolCalls.decode(self._run.history.saved.get(TOOLS))
        return self.note, store_calls(self._run, calls.with_open(self.key))

    @property
    def idempotency_key(self) -> str:
        """`task_id:step_key`: the same in every run of this step; pass it to services that must not act twice.

        It has a further number after `ctx.forget`: `task_id:step_key:1` is another act than `task_id:step_key`.
        """
        key = f"{self._run.id}:{self.key}"
        forgotten = self._run.history.saved.get(FORGOTTEN)
        number = 0 if forgotten is None else orjson.loads(forgotten).get(self.key, 0)
        return f"{key}:{number}" if number else key

    @property
    def saved(self) -> Any:
        """The value saved last in this step, by this run or an earlier one; else None."""
        data = self._run.history.saved.get(self.key)
        return None if data is None else _PLAIN.decode(data)

    async def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report how far the task is, see `Context.progress`.

        From a step in a thread: `anyio.from_thread.run(step.progress, done, total)`.
        """
        report_progress(self._run, done, total, note)

    async def emit(self, item: Any, to: str = "output", *, key: str | None = None) -> None:
        """Emit an item into a stream of the task, see `Context.emit`.

        From a step in a thread: `anyio.from_thread.run(step.emit, item)`.
        """
        await emit(self._run, item, to, key, step=self)

    async def spend(
        self,
        *,
        tokens: int | None = None,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        usd: float | Decimal | None = None,
        model: str | None = None,
    ) -> BudgetLeft:
        """Charge what a call has cost to the budgets of the task, see `Context.spend`.

        From a step in a thread: `anyio.from_thread.run(partial(step.spend, tokens=1200))`.
        """
        from ..spent import Spent

        return await self.charge(Spent.of(tokens, input_tokens, output_tokens, usd, model))

    async def charge(self, spent: Spent) -> BudgetLeft:
        """Charge what a call of the step has cost, see `spend`."""
        from ..budget_left import BudgetLeft
        from ..call_records import record_charge

        run = self._run
        check_place(run, "#spend", own=True, within=True)
        await run.check_stopped()
        if run.spending is not None:
            return await run.spending.spend(spent, in_step=True)
        await record_charge(run, spent, spent.amounts, step=self.key, tries=self.attempt)
        return BudgetLeft()

    async def save(self, value: Any) -> None:
        """Save the step's progress: JSON data that `saved` returns when the step runs again.

        A changed value is progress: it excuses earlier crashes, as a record does. Each save ends the idle time.
        From a step in a thread: `anyio.from_thread.run(step.save, value)`. Raises `PayloadTooLarge`, `LeaseLost`.
        """
        data, _ = _PLAIN.encode("save in step", self.key, value)
        check_size(f"what step {self.key!r} saves", len(data), self._run.payload_limit)
        run, former = self._run, self._run.history.saved.get(self.key)
        entry, changed = Entry(Kind.SAVED, self.key, data), data != former
        await run.recorder.put(entry, wait=True, replicated=self._replicated, progress=changed)
        run.touch()
        run.history.saved[self.key] = data
        if changed:
            run.progressed()


def store_calls(run: Run, calls: ToolCalls) -> Entry:
    """Set the account of a run's calls, and return the entry that stores it."""
    data = run.history.saved[TOOLS] = calls.encode()
    return Entry(Kind.SAVED, TOOLS, data)


_PLAIN = Codec(Any)


async def emit(run: Run, item: Any, to: str, key: str | None, *, step: Step | None = None) -> None:
    """Emit an item into a stream of the task. See `Context.emit`. step: the running one if that is the caller."""
    step = CURRENT_STEP.get() if step is None else step
    if step is None:
        await check_call(run, _EMIT, own=True)
    else:
        check_place(run, _EMIT, own=True, within=True)
        await run.check_stopped()
        if step.recorded:
            raise StepOutsideTask(
                f"ctx.emit was called by what step {step.key!r} had started, after the step was recorded: "
                "a step must await what emits"
            )
    await emit_item(run, item, to, key, step)


_EMIT: Final = "#emit"
"""Name of the call in errors."""


def current_step() -> Step:
    """Return the running step. Raises `StepOutsideTask` outside a step."""
    step = CURRENT_STEP.get()
    if step is None:
        raise StepOutsideTask("no step is running here: current_step() is for the function that ctx.step calls")
    return step


def step_here() -> Step | None:
    """Return the running step, or None."""
    return CURRENT_STEP.get()


def log_fields() -> dict[str, str]:
    """Return the name and id of the running task and the key of the running step, for lines of a log."""
    run, step = CURRENT_RUN.get(), CURRENT_STEP.get()
    if run is None:
        return {}
    found = {"task": run.envelope.task, "id": run.id}
    return found if step is None else found | {"step": step.key}


@dataclass(slots=True)
class StepCall:
    """A step that the handler called.

    Attributes:
        name: the name given to `ctx.step` or `ctx.tool`, or the key of a step of an agent's plan.
        key: the name that identifies the step within the task, such as `page#2`.
        tool: name of the tool if the step is a tool call.
        attempt: number of the current try of the function, from 1.
        recorded: whether the outcome comes from the record of an earlier run, so that the function is not called.
        call_id: the id that the model gave to the call of a tool, if it has one.
    """

    name: str
    key: str
    tool: str | None = None
    attempt: int = 1
    recorded: bool = False
    call_id: str | None = None


async def check_call(run: Run, name: Any, *, own: bool = False, within: bool = False) -> None:
    """Check a call of the context, see `check_place`; one of a stopped run is refused.

    A call that is not a step handles the failures before it; a step does so once it is known to be recorded.

    Raises `StepOutsideTask`, `CancelledError`, `LeaseLost`.
    """
    check_place(run, name, own=own, within=within)
    await run.check_stopped()
    if not within:
        run.note_caller()
    if own and run.failures:
        await handle_failures(run)


def check_place(run: Run, name: Any, *, own: bool = False, within: bool = False) -> None:
    """Check that a step may be called here under this name. own: an internal name. within: allowed inside a step.

    Raises `StepOutsideTask`.
    """
    here = CURRENT_RUN.get()
    if here is None or run.closed:
        raise StepOutsideTask(
            f"{_called(name)} was called outside a running task, where it cannot be recorded: call "
            f"{_call_of(name)} only from the handler that was given this ctx, while it runs"
        )
    if here is not run:
        raise StepOutsideTask(
            f"{_called(name)} was called with the ctx of task {run.id}, from within task {here.id}: "
            "use the ctx that this handler was given"
        )
    if not within and (outer := CURRENT_STEP.get()) is not None:
        raise StepOutsideTask(
            f"{_called(name)} was called inside step {outer.key!r}: a step is recorded as a whole; "
            "call it as a plain function, or from the handler"
        )
    if not own:
        check_name("name", name)


def _call_of(name: object) -> str:
    """Return the method of the context that makes a call. The names of calls that are no steps begin with `#`."""
    if not isinstance(name, str) or not name.startswith("#"):
        return "ctx.step"
    word = name[1:].partition(":")[0]
    return f"ctx.{_CALLS.get(word, word)}"


def _called(name: object) -> str:
    call = _call_of(name)
    return f"step {name!r}" if call == "ctx.step" else call


_CALLS: Final = {"get": "values.get", "set": "values.set", "completed": "as_completed"}

R = TypeVar("R")

Durability = Literal["sync", "async", "replicated"]


@dataclass(frozen=True, slots=True)
class AlreadyDone(Generic[R]):
    """The answer of `verify` when the effect has happened; `result` becomes the step's result."""

    result: R


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of one step.

    Attributes:
        timeout: seconds for one try.
        retry: tries within this run, with backoff; None for one try.
        durability: `sync` records the result before the next line runs; `async` in the background, but before the
            outcome; `replicated` waits until replicas have the record, too.
        risky: record the intent before the function is called.
        verify: called with the step's arguments if an intent without a result is found; returns `AlreadyDone(result)`,
            or None if the effect did not happen.
        in_doubt: without `verify`: `retry` calls the function again under the same idempotency key, `fail` makes the
            task a dead letter, and a person decides (`perdure task resolve`).
        on_mismatch: what follows if the recorded arguments differ from the present ones: `error` or `rerun`.
        step_id: identifies the step within its scope, in place of its arguments and its number; unique in a run.
        nested: what happens to steps that are called within a step. `run`: they are plain calls with a timeout and
            retries, and part of the outer step. `record`, of the outer or the inner step: their results are kept until
            the outer step is recorded, so that they do not run again if the outer one does. Risky ones always are.
        reasoning: why a tool is called, for the event log.
        intent: note that a tool call is in flight, for the handoff document, without waiting for the write.
        call: the id that the model gave to the call of a tool.
    """

    timeout: float | None = None
    retry: Retry | None = None
    durability: Durability = "sync"
    risky: bool = False
    verify: Callable[..., Any] | None = None
    in_doubt: Literal["retry", "fail"] = "retry"
    on_mismatch: Literal["error", "rerun"] = "error"
    step_id: str | None = None
    nested: Literal["run", "record"] = "run"
    reasoning: str = ""
    call: str | None = None
    intent: bool = True

    def __post_init__(self) -> None:
        retry: object = self.retry
        if retry is not None and not isinstance(retry, Retry):
            raise StepDefinitionError(f"retry must be a Retry, such as Retry(max_attempts=3), got {retry!r}")
        if self.verify is not None and not (self.risky and callable(self.verify)):
            raise StepDefinitionError(f"verify must be a function, used with risky=True, got {self.verify!r}")
        if self.timeout is not None and not self.timeout > 0:
            raise StepDefinitionError(f"timeout must be more than 0 seconds, got {self.timeout}")
        if self.step_id is not None:
            check_name("step_id", self.step_id)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise StepDefinitionError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")


STEP_OPTIONS: Final = tuple(one.name for one in fields(StepOptions))

STEP_WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("attempts", "max_attempts", "max_retries", "retries", "tries"), "retry=Retry(max_attempts=...)"),
    **dict.fromkeys(("backoff", "delay"), "retry=Retry(base=..., factor=...)"),
    **dict.fromkeys(("id", "idempotency_key", "key"), "step_id"),
    "why": "reasoning",
}
"""Names that these options have elsewhere."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "durability": ("sync", "async", "replicated"),
    "in_doubt": ("retry", "fail"),
    "on_mismatch": ("error", "rerun"),
    "nested": ("run", "record"),
}

DEFAULT_OPTIONS: Final[Mapping[Durability, StepOptions]] = {
    "sync": StepOptions(durability="sync"),
    "async": StepOptions(durability="async"),
    "replicated": StepOptions(durability="replicated"),
}
"""Options of steps by the durability of their task."""


def step_timeout(timeout: Duration | None) -> float | None:
    """Return the time-out of a step in seconds. Raises `StepDefinitionError`."""
    try:
        return None if timeout is None else to_seconds(timeout, "timeout")
    except TypeError as error:
        raise StepDefinitionError(str(error)) from None


MAX_NAME_LENGTH: Final = 200
"""Characters of the name of a step."""


def check_name(what: str, name: object) -> None:
    """Raise `StepDefinitionError` if a step, its id or a scope cannot have this name."""
    if not (isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and "#" not in name):
        function = getattr(name, "__name__", None) if callable(name) else None
        remedy = "" if function is None else f": the name comes first, as in ctx.step({function!r}, {function})"
        raise StepDefinitionError(f"{what} must be 1 to {MAX_NAME_LENGTH} characters without '#', got {name!r}{remedy}")


_NOTE = 200
"""Most characters of a note; a longer one is cut."""


def report_progress(run: Run, done: float, total: float | None, note: str) -> None:
    """Report how far a run is. Raises `ValueError`, and `StepOutsideTask` after its end.

    It restarts the idle time. It excuses no crash: nothing is recorded that a resumed run could continue from.
    """
    if run.closed:
        raise StepOutsideTask("ctx.progress was called after the task had ended")
    _check_number("done", done)
    if total is not None:
        _check_number("total", total)
        if not total:
            raise ValueError("total must be more than 0, or None if it is unknown, got 0")
    if run.redact is not None:
        note = run.redact(note)
    note = shortened(note, _NOTE)
    run.touch()
    run.recorder.report(Entry(Kind.PROGRESS, "", orjson.dumps({"done": done, "total": total, "note": note})))


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")
