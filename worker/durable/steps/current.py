"""The running step: what its function and the rest of the package see of it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ....queues.delivery.checkpoint import Entry, Kind
from ....queues.envelope import check_size
from ...errors import StepOutsideTask
from ..progress import report_progress
from ..run import Run
from .codec import Codec
from .options import check_name

CURRENT_RUN: ContextVar[Run | None] = ContextVar("perdure_run", default=None)
CURRENT_STEP: ContextVar[Step | None] = ContextVar("perdure_step", default=None)


class Step:
    """The running step, as its function sees it: `current_step()`.

    remembered: number of writes to the long-term memory in this try. records_nested: whether steps within are recorded.
    """

    __slots__ = (
        "__weakref__",
        "_replicated",
        "_run",
        "attempt",
        "key",
        "records_nested",
        "remembered",
        "scope",
        "tool",
    )

    def __init__(self, run: Run, key: str, *, replicated: bool, tool: str | None = None) -> None:
        self._run = run
        self._replicated = replicated
        self.tool = tool
        self.key = key
        self.scope = run.keys.scope
        self.attempt = 1
        self.remembered = 0
        self.records_nested = False

    @property
    def idempotency_key(self) -> str:
        """`task_id:step_key`: the same in every run of this step; pass it to services that must not act twice."""
        return f"{self._run.id}:{self.key}"

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


_PLAIN = Codec(Any)


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
        recorded: whether the result comes from the record of an earlier run, so that the function is not called.
    """

    name: str
    key: str
    tool: str | None = None
    attempt: int = 1
    recorded: bool = False


async def check_call(run: Run, name: Any, *, own: bool = False, within: bool = False) -> None:
    """Check a call of the context, see `check_place`; one of a stopped run is refused.

    Raises `StepOutsideTask`, `CancelledError`, `LeaseLost`.
    """
    check_place(run, name, own=own, within=within)
    await run.check_stopped()


def check_place(run: Run, name: Any, *, own: bool = False, within: bool = False) -> None:
    """Check that a step may be called here under this name. own: an internal name. within: allowed inside a step.

    Raises `StepOutsideTask`.
    """
    here = CURRENT_RUN.get()
    if here is None or run.closed:
        raise StepOutsideTask(
            f"step {name!r} was called outside a running task, where it cannot be recorded: call ctx.step only from "
            "the handler that was given this ctx, while it runs"
        )
    if here is not run:
        raise StepOutsideTask(
            f"step {name!r} was called with the ctx of task {run.id}, from within task {here.id}: "
            "use the ctx that this handler was given"
        )
    if not within and (outer := CURRENT_STEP.get()) is not None:
        raise StepOutsideTask(
            f"step {name!r} was called inside step {outer.key!r}: a step is recorded as a whole; "
            "call it as a plain function, or from the handler"
        )
    if not own:
        check_name("name", name)
