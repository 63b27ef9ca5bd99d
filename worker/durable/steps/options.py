"""Options of a step, and its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Generic, Literal, TypeVar

from ....deadletter.policy import Retry
from ....queues.durations import Duration, to_seconds
from ...errors import StepDefinitionError

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


LONGEST_NAME: Final = 200
"""Characters of the name of a step."""


def check_name(what: str, name: object) -> None:
    """Raise `StepDefinitionError` if a step, its id or a scope cannot have this name."""
    if not (isinstance(name, str) and 0 < len(name) <= LONGEST_NAME and "#" not in name):
        function = getattr(name, "__name__", None) if callable(name) else None
        remedy = "" if function is None else f": the name comes first, as in ctx.step({function!r}, {function})"
        raise StepDefinitionError(f"{what} must be 1 to {LONGEST_NAME} characters without '#', got {name!r}{remedy}")
