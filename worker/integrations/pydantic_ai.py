"""Agents of Pydantic AI as durable tasks: a capability by its public interface for engines of durable execution.

`pydantic_ai.durable_exec` gives an engine each model request, tool call and tool discovery as an operation, and asks it
to run that once. Here an operation is a step of the running task. A resumed run calls the agent again from its top; the
steps return their records, so the conversation, the usage and the decisions are those of the run before.

Operations are matched to records by what they are called with: a model request by the texts of its conversation
without times, instructions and system prompts, which may differ in each run; a tool call by its id and its arguments.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final, Generic, Literal, TypeVar

from pydantic import JsonValue, TypeAdapter
from pydantic_ai import RunContext
from pydantic_ai.agent import AgentRunResult, EventStreamHandler
from pydantic_ai.capabilities.abstract import WrapRunHandler
from pydantic_ai.durable_exec import (
    JSON_CODEC,
    BaseDurabilityCapability,
    BoundDurableOperation,
    DurabilityEngineSpec,
    DurableOperation,
    DurableOperationBackend,
    DurableOperationId,
    EventStreamHandlerId,
    ExternalEventError,
    ExternalEventWaiter,
    JournalOperationNamer,
    ModelCompactMessagesId,
    ModelRequestId,
    ToolsetCallToolId,
    conversation_id_from_run_id,
    durable_unit_scope,
    external_event_scope,
    record_durable_unit,
    replay_scope,
)
from pydantic_ai.messages import AgentStreamEvent, ModelMessage, ModelResponse, ToolCallPart
from pydantic_ai.models import Model
from pydantic_ai.tools import (
    AgentDepsT,
    DeferredToolRequests,
    DeferredToolResults,
    ToolApproved,
    ToolDenied,
)
from pydantic_core import to_json

from ...deadletter.policy import Retry
from ...queues.durations import Duration
from ..context import Context
from ..durable.steps.current import current_step, step_here
from ..durable.waiting import REQUIRED
from ..errors import RunStopped, UnserialisableResult, WaitTimedOut
from .agent_calls import (
    ToolDecision,
    call_number,
    call_step_id,
    check_inside,
    durable_context,
    run_id,
    shortened_item,
    shortened_text,
    wait_name,
)

ParamsT = TypeVar("ParamsT")
WireT = TypeVar("WireT")
ResultT = TypeVar("ResultT")

OPTIONS_KEY: Final = "perdure"
"""Key of a tool's metadata under which it has options of its step."""

_EVENT: Final[TypeAdapter[Any]] = TypeAdapter(AgentStreamEvent)
_KEPT: Final = ("event_kind", "index", "tool_call_id")


class PerdureDurability(BaseDurabilityCapability[AgentDepsT]):
    """Capability that makes the model requests and tool calls of an agent steps of the running task.

        agent = Agent("openai:gpt-5.2", name="support", capabilities=[PerdureDurability()])

        @app.task
        async def answer(ctx: Context, question: str) -> str:
            return (await agent.run(question)).output

    Tools that need an approval, and external tools, wait for an answer: the task is parked meanwhile. The wait of an
    approval has the name `approve-TOOL`, and takes a `ToolDecision`; that of an external tool has the tool's name, and
    takes its result. Outside a task the agent runs as it would without the capability.
    """

    engine_spec = DurabilityEngineSpec(
        engine_name="Perdure",
        durable_unit_noun="step",
        durable_container_noun="task",
        codec=JSON_CODEC,
        serialization_failure=lambda error: UnserialisableResult("step of an agent", str(error)),
        toolset_lifecycles={"function": "enter-always", "mcp": "enter-in-durable-unit", "dynamic": "enter-never"},
        unsupported_runtime_toolset_kinds=frozenset({"function", "mcp", "dynamic"}),
        tool_config_key=OPTIONS_KEY,
        cancellation_error_types=(RunStopped,),
    )

    def __init__(
        self,
        *,
        models: Mapping[str, Model] | None = None,
        event_stream_handler: EventStreamHandler[AgentDepsT] | None = None,
        name: str | None = None,
        require: bool = False,
        emit_to: str | None = None,
        waits: bool = True,
        who: str = "",
        wait_timeout: Duration | None = None,
        model_options: Mapping[str, Any] | None = None,
        tool_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Create the capability.

        Args:
            models: further models by the names under which a run may choose them.
            event_stream_handler: called with the events of the agent: those of the model within its step, and others
                in a step of each.
            name: of the agent, before the keys of its steps; that of the agent by default.
            require: refuse to run outside a task, with `StepOutsideTask`; else this is warned of once.
            emit_to: name of the task's stream that gets the events of the agent, for `handle.stream(emit_to)`.
            waits: wait for approvals and external tools. Else, and where another capability handles them first, the run
                ends with `DeferredToolRequests`.
            who: person or group that is asked for approvals.
            wait_timeout: time after which an approval is refused, and an external tool has failed; None to wait for
                ever.
            model_options: options of the steps of model requests, see `Context.options`.
            tool_options: options of the steps of tool calls. A tool has its own in its metadata, as
                `metadata={"perdure": {"timeout": 30, "risky": True}}`; with `{"perdure": False}` it is no step.
        """
        self._user_handler = event_stream_handler
        handler = event_stream_handler if emit_to is None else self._handle_and_emit
        super().__init__(models=models, event_stream_handler=handler, name=name)
        self.require = require
        self.emit_to = emit_to
        self.waits = waits
        self.who = who
        self.wait_timeout = wait_timeout
        self.model_options = dict(model_options or {})
        self.tool_options = dict(tool_options or {})

    @property
    def in_durable_context(self) -> bool:
        return durable_context() is not None

    def get_default_run_id(self) -> str | None:
        ctx = durable_context()
        return None if ctx is None else run_id(ctx, "#pydantic_ai")

    def get_default_conversation_id(self, run_id: str) -> str | None:
        return conversation_id_from_run_id(run_id) if self.in_durable_context else None

    async def get_run_start_time(self, run_id: str) -> datetime | None:
        ctx = durable_context()
        if ctx is None:
            return None
        with ctx.scope(self.name):
            return await ctx.step("run_start", _now)

    def get_durable_operation_backend(self) -> DurableOperationBackend[Mapping[str, Any]]:
        return _StepBackend(self)

    async def wrap_run(self, ctx: RunContext[AgentDepsT], *, handler: WrapRunHandler) -> AgentRunResult[Any]:
        here = durable_context()
        if here is None:
            check_inside(f"agent {self.name!r}", require=self.require)
            return await super().wrap_run(ctx, handler=handler)
        with replay_scope(), external_event_scope(_Waiter(here, self.name)):
            return await super().wrap_run(ctx, handler=handler)

    async def handle_deferred_tool_calls(
        self, ctx: RunContext[AgentDepsT], *, requests: DeferredToolRequests
    ) -> DeferredToolResults | None:
        """Wait for people's decisions on tool calls, and for the results of external tools: for all at once."""
        here = durable_context()
        if here is None or not self.waits:
            return None
        metadata = requests.metadata
        approvals = [self._approve(here, call, metadata.get(call.tool_call_id)) for call in requests.approvals]
        results = [self._await_result(here, call, metadata.get(call.tool_call_id)) for call in requests.calls]
        found = await asyncio.gather(*approvals, *results)
        count = len(approvals)
        ids = [call.tool_call_id for call in (*requests.approvals, *requests.calls)]
        return requests.build_results(
            approvals=dict(zip(ids[:count], found[:count], strict=True)),
            calls=dict(zip(ids[count:], found[count:], strict=True)),
        )

    async def _approve(self, ctx: Context, call: ToolCallPart, metadata: Any) -> ToolApproved | ToolDenied:
        decision: ToolDecision | None = await ctx.wait_for(
            wait_name(f"approve-{call.tool_name}"), ToolDecision, **self._asked(call, metadata, default=None)
        )
        if decision is None:
            return ToolDenied("The call was not approved in time.")
        if decision.approved:
            return ToolApproved(override_args=decision.arguments)
        return ToolDenied(decision.message) if decision.message else ToolDenied()

    async def _await_result(self, ctx: Context, call: ToolCallPart, metadata: Any) -> Any:
        try:
            return await ctx.wait_for(wait_name(call.tool_name), **self._asked(call, metadata, default=REQUIRED))
        except WaitTimedOut:
            from pydantic_ai.exceptions import ToolFailed

            return ToolFailed("No result of the tool arrived in time.")

    def _asked(self, call: ToolCallPart, metadata: Any, *, default: Any) -> dict[str, Any]:
        shows = {"tool": call.tool_name, "arguments": call.args_as_dict()}
        if metadata:
            shows["metadata"] = metadata
        return {"who": self.who, "shows": shows, "timeout": self.wait_timeout, "default": default}

    # events

    async def _handle_and_emit(self, ctx: RunContext[AgentDepsT], events: AsyncIterable[AgentStreamEvent]) -> None:
        """Emit the events, and call the handler of the agent's author with them, if there is one."""
        emitting = self._emitting(ctx, events)
        if self._user_handler is not None:
            await self._user_handler(ctx, emitting)
        async for _ in emitting:  # what the handler has left
            pass

    async def _emitting(
        self, ctx: RunContext[AgentDepsT], events: AsyncIterable[AgentStreamEvent]
    ) -> AsyncIterator[AgentStreamEvent]:
        async for event in events:
            await self._emit(ctx, event)
            yield event

    async def _emit(self, ctx: RunContext[AgentDepsT], event: AgentStreamEvent) -> None:
        if self.emit_to is None:
            return
        step, here = step_here(), durable_context()
        if step is None and here is None:
            return
        item = _EVENT.dump_python(event, mode="json", fallback=str)
        item = shortened_item(item, _KEPT)
        if step is not None:
            await step.emit(item, self.emit_to)
        elif here is not None:  # events of tools come in another order in a resumed run
            call = getattr(event, "tool_call_id", None) or getattr(getattr(event, "part", None), "tool_call_id", "")
            name = f"{ctx.run_id}:{item['event_kind']}:{call}"
            await here.emit(item, self.emit_to, key=f"{name}:{call_number(here, f'#event:{name}')}")


async def _now() -> datetime:
    return datetime.now(UTC)


class _StepBackend(DurableOperationBackend[Mapping[str, Any]]):
    """Runs the operations of an agent as steps of the task."""

    def __init__(self, capability: Any) -> None:
        self.capability = capability
        self.namer = JournalOperationNamer("")

    def bind(
        self, operation: DurableOperation[ParamsT, WireT, ResultT]
    ) -> BoundDurableOperation[ParamsT, WireT, ResultT]:
        return _StepOperation(self, operation)

    def config_for_tool(
        self, operation: DurableOperation[ParamsT, WireT, ResultT], *, tool: object | None, tool_name: str
    ) -> Mapping[str, Any] | Literal[False]:
        definition = getattr(tool, "tool_def", None)
        config = (getattr(definition, "metadata", None) or {}).get(OPTIONS_KEY, {})
        if config is False:
            return False
        options = {**self.capability.tool_options, **config}
        if isinstance(retry := options.get("retry"), Mapping):  # of the recorded definition of a tool
            options["retry"] = Retry(**retry)
        return options

    def registrations(self) -> Sequence[Callable[..., object]]:
        return ()

    def step_name(self, operation_id: DurableOperationId, label: str | None) -> str:
        """Return the name of the step of an operation; tool calls have that of the tool."""
        if isinstance(operation_id, ToolsetCallToolId) and label:
            return label
        name: str = self.namer.invocation_name(operation_id, label=label).operation_name
        return name.removeprefix("__").replace("model.request_stream", "model.request")


class _StepOperation(BoundDurableOperation[ParamsT, WireT, ResultT], Generic[ParamsT, WireT, ResultT]):
    """An operation that is a step when it is called."""

    def __init__(self, backend: _StepBackend, operation: DurableOperation[ParamsT, WireT, ResultT]) -> None:
        self._backend = backend
        self._operation = operation

    @property
    def operation(self) -> DurableOperation[ParamsT, WireT, ResultT]:
        return self._operation

    async def __call__(self, params: ParamsT, *, config: object | None = None) -> ResultT:
        operation, capability = self._operation, self._backend.capability
        identity, ctx = operation.operation_id, durable_context()
        result: ResultT
        if ctx is None or (isinstance(identity, EventStreamHandlerId) and capability._user_handler is None):
            result = await operation.handler(params)  # that of events emits them, under keys
            return result
        label = None if operation.invocation_label is None else operation.invocation_label(params)
        name = self._backend.step_name(identity, label)
        executed = False

        async def perform(**_: Any) -> Any:
            nonlocal executed
            executed = True
            with durable_unit_scope():
                value = await operation.handler(params)
            if isinstance(value, ModelResponse) and isinstance(identity, ModelRequestId | ModelCompactMessagesId):
                await _charge(value)
            return operation.result_codec.dump(value)

        options = dict(config) if isinstance(config, Mapping) else {}
        arguments: dict[str, Any] = {}
        if operation.config_role == "model":
            options = {**capability.model_options, **options}
            arguments = _request_arguments(params)
        elif isinstance(identity, ToolsetCallToolId):
            arguments = dict(getattr(params, "tool_args", {}))
        with ctx.scope(capability.name):
            if isinstance(identity, ToolsetCallToolId):
                run_context: Any = getattr(params, "ctx", None)
                call_id = getattr(run_context, "tool_call_id", None)
                step_id = call_step_id(ctx, name, call_id)
                caller = ctx.options(**{"call": call_id, "step_id": step_id, **options})
                payload = await caller.tool(name, _with_names(perform, arguments), **arguments)
            elif isinstance(identity, EventStreamHandlerId):
                payload = await ctx.options(durability="async").step("event", perform)
            else:
                payload = await ctx.options(**options).step(name, perform, **arguments)
        record_durable_unit(executed=executed)
        result = operation.result_codec.load(payload)
        return result


async def _charge(response: ModelResponse) -> None:
    """Charge the tokens of a response to the budgets of the task: once, as its step is recorded."""
    usage = response.usage
    if usage.input_tokens or usage.output_tokens:
        provider, model = response.provider_name, response.model_name
        name = f"{provider}/{model}" if provider and model else model
        await current_step().spend(
            input_tokens=usage.input_tokens, output_tokens=usage.output_tokens, model=name or None
        )


def _with_names(perform: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]) -> Callable[..., Awaitable[Any]]:
    """Give a function the names of its arguments, under which the log has them."""
    kind = inspect.Parameter.KEYWORD_ONLY
    if all(name.isidentifier() for name in arguments):
        named = [inspect.Parameter(name, kind) for name in arguments]
        perform.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return perform


def _request_arguments(params: Any) -> dict[str, Any]:
    """Return what a model request is recognized by in a resumed run."""
    messages: list[ModelMessage] = getattr(params, "messages", None) or []
    parts = [[_part_identity(part) for part in message.parts] for message in messages]
    digest = hashlib.blake2b(to_json(parts, fallback=lambda _: None), digest_size=12).hexdigest()
    return {"model": params.model_id or "default", "latest": _latest_text(messages), "conversation": digest}


_CONTENTS: Final = ("content", "tool_name", "tool_call_id", "args")


def _part_identity(part: Any) -> Any:
    kind = part.part_kind
    if kind == "system-prompt":
        return None
    content = part.content if hasattr(part, "content") else None
    found = {name: getattr(part, name, None) for name in _CONTENTS[1:]}
    return [kind, _plain_content(content), found]


def _plain_content(content: Any) -> Any:
    if isinstance(content, list | tuple):
        return [_plain_content(item) for item in content]
    identifier = getattr(content, "identifier", None)
    return content if identifier is None else str(identifier)


def _latest_text(messages: Sequence[ModelMessage]) -> str:
    """Return the beginning of the latest text or tool result, for people."""
    for message in reversed(messages):
        for part in reversed(message.parts):
            content = getattr(part, "content", None)
            if part.part_kind != "system-prompt" and content:
                return shortened_text(content)
    return ""


class _Waiter(ExternalEventWaiter):
    """Waits for external events as waits of the task: `app.answer(token, payload)` resolves the token."""

    def __init__(self, ctx: Context, agent: str) -> None:
        self._ctx = ctx
        self._agent = agent

    async def wait(
        self, name: str, *, ask: Callable[[str], Awaitable[JsonValue]], timeout: timedelta | None
    ) -> JsonValue:
        ctx = self._ctx
        wait = wait_name(name)
        token = f"{ctx.task_id}:{wait}:{call_number(ctx, f'#event:{wait}')}"
        opened = await ctx.open_wait(wait, timeout=timeout, why=f"agent {self._agent} asks", token=token)
        with ctx.scope(self._agent):
            answer: JsonValue = await ctx.step(f"{wait}.ask", partial(_ask, ask), token)
        if answer is not None:
            await opened.close()
            return answer
        try:
            value: JsonValue = await opened
        except WaitTimedOut as error:
            raise ExternalEventError(f"No resolution arrived within {timeout}.") from error
        return value


async def _ask(ask: Callable[[str], Awaitable[JsonValue]], token: str) -> Any:
    return await ask(token)
