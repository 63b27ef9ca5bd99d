"""Errors of steps."""

from __future__ import annotations

from typing import Any

from ...deadletter.error_text import error_text
from ...queues import PerdureError, resolve_command
from ...queues.doubts import failure_text

__all__ = [
    "OrphanedSteps",
    "ResolutionMismatch",
    "ResultMismatch",
    "StepDefinitionError",
    "StepError",
    "StepExited",
    "StepInDoubt",
    "StepMismatch",
    "StepOutOfOrder",
    "StepOutsideTask",
    "StepResolvedAsFailed",
    "StepStillRunning",
    "StepTimeout",
    "UnserialisableResult",
]


class StepError(PerdureError):
    """Base of errors in the definition or call of a step."""


class StepDefinitionError(StepError, ValueError):
    """A name, a function, its arguments or options cannot make a step. Retrying does not help."""


class StepOutsideTask(StepError, RuntimeError):
    """A step was called outside of a running task, or from another task, so it could not be recorded."""


class StepMismatch(StepError):
    """A resumed run called a recorded step with other arguments, or asked another question than the answered one."""

    def __init__(
        self, step: str, recorded: str, asked: str, *, after_new: bool = False, question: bool = False
    ) -> None:
        """Create the error.

        Args:
            after_new: A step before it was not recorded, as if Redis had lost its record.
            question: The step is a question, `recorded` and `asked` name the person and its text.
        """
        what = f"step {step!r} was recorded with arguments {recorded} and is now called with {asked}"
        remedy = "give the step another name or a scope, use ctx.options(on_mismatch='rerun')"
        if question:
            what = f"question {recorded} is recorded with its answer, and the handler now asks {asked} in its place"
            remedy = (
                "ask again with ctx.options(on_mismatch='rerun').ask(...), give a question whose text differs in each "
                "run a key, ctx.ask(..., key=...), put a new question into a scope"
            )
        lost = "a step before it was not recorded, so Redis has lost data, or " if after_new else ""
        super().__init__(
            f"{what}: {lost}the handler or its inputs changed while the task was running; {remedy}, or replay the task "
            "from the dead letters with --fresh"
        )
        self.step, self.recorded, self.asked = step, recorded, asked


class StepOutOfOrder(StepMismatch):
    """A new step came before recorded ones of its scope, in a task with `strict_order=True`. It did not run."""

    def __init__(self, step: str, recorded: str) -> None:
        """recorded: the step that should have come first."""
        StepError.__init__(
            self,
            f"step {step!r} is new, but step {recorded!r} of its scope was recorded by an earlier run and has not been "
            "called yet, and the task has strict_order=True: call the new step after the recorded ones, give it a "
            "scope (concurrent branches need one each), branch by ctx.version, or replay the task from the "
            "dead letters with --fresh",
        )
        self.step, self.recorded, self.asked = step, recorded, ""


class ResultMismatch(StepError):
    """The recorded result of a step does not fit the type that its function declares now. It did not run again."""


class ResolutionMismatch(ResultMismatch):
    """A person's result for a step in doubt does not fit the type that its function declares. It did not run."""

    def __init__(self, task_id: str, step: str, problem: str) -> None:
        super().__init__(
            f"step {step!r} was resolved with a result that does not fit: {problem}; replace it: "
            f"{resolve_command(task_id, step)}; then replay the task"
        )
        self.task_id, self.step = task_id, step


class OrphanedSteps(StepError):
    """A handler with `on_orphan="fail"` returned without asking for all recorded steps. The message has the remedy."""


class StepTimeout(StepError, TimeoutError):
    """A step exceeded its timeout. seconds: the timeout."""

    def __init__(self, step: str, seconds: float) -> None:
        super().__init__(f"step {step!r} ran longer than {seconds:g} s")
        self.step, self.seconds = step, seconds


class StepStillRunning(StepTimeout):
    """A plain function still runs in the thread of an earlier try of its step, so it was not called again.

    step: its key. seconds: since that try was given up.
    """

    def __init__(self, step: str, seconds: float) -> None:
        StepError.__init__(
            self,
            f"step {step!r} was not called again: its function still runs in a thread, which cannot be stopped, "
            f"{seconds:.1f} s after its step timed out or was cancelled; give the function a time-out of its own, such "
            "as that of its client, or make it async",
        )
        self.step, self.seconds = step, seconds


class StepExited(StepError):
    """A step raised SystemExit or KeyboardInterrupt, which would end the worker. It is not retried.

    step: its key. raised: what it raised.
    """

    def __init__(self, step: str, raised: BaseException) -> None:
        super().__init__(
            f"step {step!r} raised {type(raised).__name__}({error_text(raised)}), which would end the worker: raise an "
            "exception in its place, or run the program in a process of its own"
        )
        self.step, self.raised = step, raised


class StepInDoubt(StepError):
    """A risky step was started, has no recorded result, and must not run twice (`in_doubt="fail"`).

    A person decides what it did: `perdure task resolve`, or `TaskHandle.resolve_step`.
    """

    def __init__(self, step: str, idempotency_key: str, arguments: str = "") -> None:
        """arguments: their text, for people."""
        task_id = idempotency_key.removesuffix(f":{step}")
        called = f" with arguments {arguments}" if arguments else ""
        super().__init__(
            f"step {step!r} was started{called} and has no recorded result: find out whether its effect happened "
            f"(idempotency key {idempotency_key}), then run: {resolve_command(task_id, step)}; then replay the task"
        )
        self.step, self.idempotency_key, self.arguments = step, idempotency_key, arguments


class StepResolvedAsFailed(StepError):
    """A risky step was cut off, and a person decided that it failed: `perdure task resolve ID STEP --failed TEXT`.

    text: of the person.
    """

    def __init__(self, step: str, text: str) -> None:
        super().__init__(failure_text(step, text))
        self.step, self.text = step, text


class UnserialisableResult(StepError, TypeError):
    """A result has no JSON form, is not of the type that its function declares, or cannot be read back.

    data: the JSON of a result that cannot be read back; misread: its part that is read back as another type.
    """

    def __init__(self, what: str, problem: str, data: bytes | None = None, misread: Any = None) -> None:
        super().__init__(f"{what}: its result cannot be stored: {problem}")
        self.what, self.data, self.misread = what, data, misread
