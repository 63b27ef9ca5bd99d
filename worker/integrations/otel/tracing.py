"""Middleware that makes spans of enqueueing, runs and steps.

A task may wait for days, and run on several workers. So each run has a trace of its own, whose root links to the span
of the enqueueing, whose context is in the headers of the task, and to the run before, whose context that one has left
in the checkpoint. No span is open while a task waits: a run that parks ends, and so does its span.

A run leaves its context with its first record, without a write of its own. One without a record leaves it after
`_SOON` seconds, or when it ends in a failure. So a run has no link to one that was killed in its first second, before
it had recorded anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.context import Context as TraceContext
from opentelemetry.context import attach, detach
from opentelemetry.trace import (
    Link,
    Span,
    SpanKind,
    TracerProvider,
    get_current_span,
    get_tracer,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from ....deadletter.burial import Evidence
from ....queues.errors import PerdureError
from ...durable.journal.step_record import TRACE
from ...durable.run import Run
from ...durable.steps.current import CURRENT_RUN, StepCall
from ...durable.stop_reasons import STOP_RULES
from ...middleware import CallNext, EnqueueCall, Middleware, Settlement
from . import conventions as names
from .guard import Guard
from .run_trace import RunTrace, set_error

if TYPE_CHECKING:
    from ...context import Context

_SOON: Final = 1.0
"""Seconds after which a run that has recorded nothing leaves its context."""

_PARENT: Final = "traceparent"
_STATE: Final = "tracestate"
_HEADERS: Final = (_PARENT, _STATE)

_W3C: Final = TraceContextTextMapPropagator()


class Tracing(Middleware):
    """Middleware that traces tasks with OpenTelemetry: `App("shop", middleware=[Tracing()])`.

    It must be the first of the list, so that other middleware runs within its spans. Without a tracer provider that
    records, it only hands on the W3C trace context of the caller.

    Args:
        tracer_provider: makes the tracer; by default the global provider of the program.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        self._tracer = get_tracer("perdure", version("perdure"), tracer_provider, names.SCHEMA_URL)
        self._guard = Guard()

    async def enqueue(self, call: EnqueueCall, call_next: CallNext) -> str:
        """Put the W3C context of a new span into the headers, unless the caller has set one."""
        span = self._guard.call(self._start_enqueueing, call)
        if span is None:
            task_id: str = await call_next()
            return task_id
        try:
            task_id = await call_next()
        except BaseException as error:
            self._guard.call(_end_enqueueing, span, error)
            raise
        self._guard.call(_end_enqueueing, span, task_id)
        return task_id

    async def run(self, ctx: Context, call_next: CallNext) -> Any:
        """Run the handler within the spans of a new trace."""
        run = ctx._run
        try:
            await run.history.read_unfinished(TRACE)
        except PerdureError as unread:  # what the task itself needs of it fails by itself
            self._guard.failed(unread)
        begun = self._guard.call(self._start_run, run)
        if begun is None:
            return await call_next()
        trace, context = begun
        token = attach(context)
        if trace is None:
            try:
                return await call_next()
            finally:
                detach(token)
        timer = asyncio.get_running_loop().call_later(_SOON, self._guard.call, _leave, run)
        error: BaseException | None = None
        try:
            return await call_next()
        except BaseException as raised:
            error = raised
            if isinstance(raised, Exception) or run.stop_reason is not None:
                self._guard.call(_leave, run)
            raise
        finally:
            timer.cancel()
            detach(token)
            self._guard.call(trace.handler_ended, error)

    async def step(self, ctx: Context, step: StepCall, call_next: CallNext) -> Any:
        """Call a step within a span; a recorded one has none."""
        trace = None if step.recorded else ctx._run.observer(RunTrace)
        span = None if trace is None else self._guard.call(self._start_step, trace, step)
        if trace is None or span is None:
            return await call_next()
        token = attach(set_span_in_context(span))
        error: BaseException | None = None
        try:
            return await call_next()
        except BaseException as raised:
            error = raised
            raise
        finally:
            detach(token)
            self._guard.call(trace.step_ended, step.key, span, error)

    async def settle(self, ctx: Context, settlement: Settlement, call_next: CallNext) -> None:
        """End the span of the run with the outcome, once it is stored."""
        await call_next()
        trace = ctx._run.observer(RunTrace)
        if trace is not None:
            self._guard.call(trace.settled, settlement)

    def _start_enqueueing(self, call: EnqueueCall) -> Span | None:
        """Start the span of an enqueueing, and put its context into the headers; None if the caller has set one.

        A child has the headers of its parent, which are replaced, and so is a context that is not valid.
        """
        if (given := call.headers.get(_PARENT)) is not None:
            run = CURRENT_RUN.get()
            inherited = run is not None and given == run.envelope.headers.get(_PARENT)
            if not inherited and _link(call.headers, names.ENQUEUE):
                return None
        span = self._tracer.start_span(
            f"{names.ENQUEUE} {call.task}",
            kind=SpanKind.PRODUCER,
            attributes={
                names.MESSAGING_SYSTEM: names.SYSTEM,
                names.MESSAGING_OPERATION_NAME: names.ENQUEUE,
                names.MESSAGING_OPERATION_TYPE: names.CREATE,
                names.MESSAGING_DESTINATION_NAME: call.queue,
                names.TASK_NAME: call.task,
            },
        )
        if span.is_recording() or get_current_span().get_span_context().is_valid:
            call.headers.pop(_STATE, None)  # of the context that is replaced
            _W3C.inject(call.headers, set_span_in_context(span))
        return span if span.is_recording() else None

    def _start_run(self, run: Run) -> tuple[RunTrace | None, TraceContext]:
        """Start the spans of a run. Return its trace, None if it is not sampled, and the context of the handler."""
        envelope = run.envelope
        links = [*_link(envelope.headers, names.ENQUEUE), *_link(_left_by(run), names.PREVIOUS_RUN)]
        span = self._tracer.start_span(
            f"{names.RUN} {envelope.task}", TraceContext(), SpanKind.CONSUMER, _attributes(run), links
        )
        context = set_span_in_context(span)
        if not span.is_recording():
            return None, context
        trace = RunTrace(run, span, self._guard)
        run.observe(trace)
        left: dict[str, str] = {}
        _W3C.inject(left, context)
        if left:
            run.leave(TRACE, "\n".join(left.get(name, "") for name in _HEADERS).encode())
        if run.is_agent:
            attributes = _agent_attributes(run)
            agent = self._tracer.start_span(f"{names.INVOKE_AGENT} {envelope.task}", context, attributes=attributes)
            trace.invoke_agent(agent)
            context = set_span_in_context(agent, context)
        return trace, context

    def _start_step(self, trace: RunTrace, step: StepCall) -> Span:
        attributes: dict[str, AttributeValue] = {names.STEP_KEY: step.key}
        name = f"step {step.name}"
        if step.tool is not None:
            name = f"{names.EXECUTE_TOOL} {step.tool}"
            attributes[names.GEN_AI_OPERATION_NAME] = names.EXECUTE_TOOL
            attributes[names.GEN_AI_TOOL_NAME] = step.tool
            attributes[names.GEN_AI_TOOL_TYPE] = names.FUNCTION
            if step.call_id is not None:
                attributes[names.GEN_AI_TOOL_CALL_ID] = step.call_id
        span = self._tracer.start_span(name, attributes=attributes)
        trace.step_began(step.key, span)
        return span


def _end_enqueueing(span: Span, outcome: str | BaseException) -> None:
    """End the span of an enqueueing. outcome: the id of the task, or the error."""
    if isinstance(outcome, str):
        span.set_attribute(names.MESSAGING_MESSAGE_ID, outcome)
    elif isinstance(outcome, Exception):
        set_error(span, Evidence.brief(outcome))
    span.end()


_NO_MORE_RUNS: Final = (None, "cancel", "succeed")
"""Acts of the table of stop reasons after which nothing may be stored, or no run follows."""


def _leave(run: Run) -> None:
    """Store the context of a run for the next one, unless none follows or nothing may be stored."""
    stop = run.stop_reason
    if not run.closed and (stop is None or STOP_RULES[stop].act not in _NO_MORE_RUNS):
        run.store_left()


def _left_by(run: Run) -> Mapping[str, str]:
    """Return the context that an earlier run has left."""
    data = run.history.saved.get(TRACE)
    return {} if data is None else dict(zip(_HEADERS, data.decode("ascii", "replace").split("\n"), strict=False))


def _link(headers: Mapping[str, str], what: str) -> list[Link]:
    """Return a link to the span whose context the headers have; none if they have no valid one."""
    if _PARENT not in headers:
        return []
    found = get_current_span(_W3C.extract(headers, TraceContext())).get_span_context()
    return [Link(found, {names.LINK: what})] if found.is_valid else []


def _attributes(run: Run) -> dict[str, AttributeValue]:
    delivery, counters = run.delivery, run.history.counters
    return {
        names.MESSAGING_SYSTEM: names.SYSTEM,
        names.MESSAGING_OPERATION_NAME: names.RUN,
        names.MESSAGING_OPERATION_TYPE: names.PROCESS,
        names.MESSAGING_DESTINATION_NAME: delivery.partition.queue,
        names.MESSAGING_DESTINATION_PARTITION_ID: str(delivery.partition.index),
        names.MESSAGING_MESSAGE_ID: run.id,
        names.MESSAGING_CLIENT_ID: delivery.worker,
        names.TASK_NAME: run.envelope.task,
        names.TASK_ATTEMPT: counters.attempts + 1,
        names.TASK_CRASHES: counters.crashes,
        names.TASK_RESUMED: run.history.records > 0,
    }


def _agent_attributes(run: Run) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        names.GEN_AI_OPERATION_NAME: names.INVOKE_AGENT,
        names.GEN_AI_AGENT_NAME: run.envelope.task,
    }
    if session := run.envelope.session:
        found[names.GEN_AI_CONVERSATION_ID] = session
    return found
