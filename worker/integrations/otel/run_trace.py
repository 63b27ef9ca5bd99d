"""Trace of one run: its span, the spans of its steps, and what they get from the events of the run."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import Span, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from ....deadletter.burial import Evidence
from ...durable.journal.event import Event
from ...durable.journal.run_events import StepFailed
from ...durable.run import Run, RunObserver
from ...durable.stop_reasons import STOP_RULES, StopReason
from ...middleware import Settlement
from . import conventions as names
from .guard import Guard

if TYPE_CHECKING:
    from ...durable.spent import Charge


class RunTrace(RunObserver):
    """The spans of one run.

    The span of the run ends when the outcome is stored, so that it has the outcome, or else when the run is over.
    """

    __slots__ = ("_agent", "_guard", "_run", "_span", "_spent", "_steps")

    def __init__(self, run: Run, span: Span, guard: Guard) -> None:
        self._run = run
        self._guard = guard
        self._span: Span | None = span
        self._agent: Span | None = None
        self._steps: dict[str, Span] = {}
        self._spent: dict[Span, _Spent] = {}

    # the run

    def invoke_agent(self, span: Span) -> None:
        """Set the span of the agent, which ends with the handler."""
        self._agent = span

    def handler_ended(self, error: BaseException | None) -> None:
        """End the span of the agent."""
        span, self._agent = self._agent, None
        if span is not None:
            if isinstance(error, Exception) and self._run.stop_reason is None:
                set_error(span, Evidence.brief(error, self._run.redact))
            span.end()

    def settled(self, settlement: Settlement) -> None:
        """End the span of the run with its outcome."""
        span = self._span
        if span is None:
            return
        if span.is_recording():
            span.set_attributes(_outcome(settlement))
            if settlement.error is not None and STOP_RULES[StopReason(settlement.stop)].act in ("fail", "bury"):
                evidence = Evidence.of(settlement.error, self._run.redact)
                add_exception(span, evidence)
                set_error(span, evidence)
        self._end(span)

    def on_close(self) -> None:
        """End the span of a run without an outcome: it has lost its lease, or storing the outcome has failed."""
        if self._span is not None:
            self._guard.call(self._close, self._span)

    def _close(self, span: Span) -> None:
        stop = self._run.stop_reason
        span.set_attribute(names.RUN_STOP, "not_stored" if stop is None else stop.value)
        span.set_status(Status(StatusCode.ERROR, "the run has ended without an outcome"))
        self._end(span)

    def _end(self, span: Span) -> None:
        self._span = None
        self._steps.clear()
        self._spent.clear()
        span.end()

    # its steps

    def step_began(self, key: str, span: Span) -> None:
        self._steps[key] = span

    def step_ended(self, key: str, span: Span, error: BaseException | None) -> None:
        """End the span of a step. Its exceptions are events of it: one for each try."""
        self._steps.pop(key, None)
        self._spent.pop(span, None)
        if isinstance(error, Exception):
            set_error(span, Evidence.brief(error, self._run.redact))
        span.end()

    def on_event(self, event: Event, number: int) -> None:
        if isinstance(event, StepFailed) and event.step is not None and (span := self._steps.get(event.step)):
            evidence = Evidence(event.error, event.message)
            self._guard.call(add_exception, span, evidence, {names.STEP_ATTEMPT: event.attempt})

    def on_charge(self, charge: Charge) -> None:
        self._guard.call(self._charge, charge)

    def _charge(self, charge: Charge) -> None:
        """Add the cost of a call to the spans of its step and of the agent or the run."""
        for span in (self._steps.get(charge.step), self._agent or self._span):
            if span is not None and span.is_recording():
                spent = self._spent.setdefault(span, _Spent())
                spent.add(charge)
                span.set_attributes(spent.attributes())


class _Spent:
    """Sums of the charges of one span."""

    __slots__ = ("_input", "_model", "_output", "_tokens", "_usd")

    def __init__(self) -> None:
        self._tokens: int | None = None
        self._input: int | None = None
        self._output: int | None = None
        self._usd: Decimal | None = None
        self._model = ""

    def add(self, charge: Charge) -> None:
        self._tokens = _sum(self._tokens, charge.tokens)
        self._input = _sum(self._input, charge.input_tokens)
        self._output = _sum(self._output, charge.output_tokens)
        if charge.usd is not None:
            self._usd = charge.usd + (self._usd or 0)
        self._model = charge.model or self._model

    def attributes(self) -> dict[str, AttributeValue]:
        found: dict[str, AttributeValue | None] = {
            names.SPENT_TOKENS: self._tokens,
            names.GEN_AI_USAGE_INPUT_TOKENS: self._input,
            names.GEN_AI_USAGE_OUTPUT_TOKENS: self._output,
            names.SPENT_USD: None if self._usd is None else float(self._usd),
            names.GEN_AI_REQUEST_MODEL: self._model or None,
        }
        return {name: value for name, value in found.items() if value is not None}


def _sum(total: int | None, count: int | None) -> int | None:
    return total if count is None else (total or 0) + count


def _outcome(settlement: Settlement) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        names.TASK_STATE: str(settlement.state),
        names.RUN_STOP: settlement.stop,
    }
    if settlement.delay is not None:
        found[names.RUN_DELAY] = settlement.delay
    if settlement.reason is not None:
        found[names.DEAD_LETTER_REASON] = settlement.reason
    return found


def add_exception(span: Span, evidence: Evidence, attributes: Mapping[str, Any] | None = None) -> None:
    """Add the event of an exception, whose texts are free of secrets."""
    found = {names.EXCEPTION_TYPE: evidence.error, names.EXCEPTION_MESSAGE: evidence.message, **(attributes or {})}
    if evidence.traceback:
        found[names.EXCEPTION_STACKTRACE] = evidence.traceback
    span.add_event(names.EXCEPTION, found)


def set_error(span: Span, evidence: Evidence) -> None:
    """Set the status of a span that has failed."""
    span.set_attribute(names.ERROR_TYPE, evidence.error)
    span.set_status(Status(StatusCode.ERROR, f"{evidence.error}: {evidence.message}"))
