"""Agents of the OpenAI Agents SDK as durable tasks: their model requests and tool calls are steps.

A durable agent is a copy of an agent whose model, tools, handoffs and MCP servers call the originals in steps. A
resumed run calls the runner again from its top; the steps return their records, so the conversation, the usage and the
decisions are those of the run before. A model request is matched to its record by its input; instructions may differ
in each run. A tool call is matched by its id and its arguments.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import hashlib
import json
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, cast

from agents import (
    Agent,
    CodeInterpreterTool,
    CustomTool,
    FileSearchTool,
    FunctionTool,
    Handoff,
    HostedMCPTool,
    ImageGenerationTool,
    Model,
    ModelProvider,
    ModelResponse,
    RunConfig,
    Runner,
    RunResult,
    RunResultStreaming,
    ToolOutputFileContent,
    ToolOutputImage,
    ToolOutputText,
    WebSearchTool,
)
from agents.tool import invoke_function_tool
from agents.tool_context import ToolContext
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from pydantic_core import PydanticSerializationError, to_json, to_jsonable_python

from ...queues.durations import Duration
from ...queues.errors import ConfigurationError
from ..context import Context
from ..durable.steps.current import current_step, step_here
from .agent_calls import (
    ToolApproval,
    call_number,
    call_step_id,
    check_inside,
    durable_context,
    shortened_item,
    shortened_text,
    wait_name,
)

_RESPONSE: Final[TypeAdapter[Any]] = TypeAdapter(ModelResponse)
_EVENT: Final[TypeAdapter[Any]] = TypeAdapter(ResponseStreamEvent)
_JSON: Final[Mapping[str, Any]] = {"mode": "json", "by_alias": True, "exclude_unset": True}
"""Form of recorded responses, from which the SDK's models read the same: fields that are not set stay so."""

_OUTPUTS: Final = (ToolOutputText, ToolOutputImage, ToolOutputFileContent)
_REMOTE: Final = (CodeInterpreterTool, FileSearchTool, HostedMCPTool, ImageGenerationTool, WebSearchTool)
"""Tools that the provider of the model runs: their results are part of its response."""

_KEPT: Final = ("type", "item_id", "output_index", "sequence_number")
_TERMINAL: Final = ("response.completed", "response.incomplete", "response.failed")


class PerdureRunner:
    """Runs agents of the OpenAI Agents SDK in tasks, as `agents.Runner` does.

        runner = PerdureRunner()

        @app.task
        async def answer(ctx: Context, question: str) -> str:
            return (await runner.run(agent, question)).final_output

    A tool that needs an approval waits for the answer of a person: the task is parked meanwhile. The wait has the name
    `approve-TOOL`, and takes a `ToolApproval`. Outside a task the runner does what `Runner` does.
    """

    def __init__(
        self,
        *,
        require: bool = False,
        emit_to: str | None = None,
        waits: bool = True,
        who: str = "",
        wait_timeout: Duration | None = None,
        model_options: Mapping[str, Any] | None = None,
        tool_options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Create the runner.

        Args:
            require: refuse to run outside a task, with `StepOutsideTask`; else this is warned of once.
            emit_to: name of the task's stream that gets the events of models and the items of runs, for
                `handle.stream(emit_to)`. Models are streamed then.
            waits: wait for approvals in `run`; else it returns a result with `interruptions`.
            who: person or group that is asked for approvals.
            wait_timeout: time after which an approval is refused; None to wait for ever.
            model_options: options of the steps of model requests, see `Context.options`.
            tool_options: options of the steps of tool calls, by the names of tools.
        """
        self.require = require
        self.emit_to = emit_to
        self.waits = waits
        self.who = who
        self.wait_timeout = wait_timeout
        self.model_options = dict(model_options or {})
        self.tool_options = {name: dict(options) for name, options in (tool_options or {}).items()}

    async def run(
        self, starting_agent: Agent[Any], input: Any, *, run_config: RunConfig | None = None, **options: Any
    ) -> RunResult | RunResultStreaming:
        """Run an agent, and wait for approvals. Arguments and errors are those of `Runner.run`."""
        config, agent = self._prepare(starting_agent, run_config)
        ctx = durable_context()
        while True:
            result = await self._run_once(ctx, agent, input, run_config=config, **options)
            if ctx is None or not self.waits or not result.interruptions:
                return result
            state: Any = result.to_state()
            approvals = await asyncio.gather(*(self._approve(ctx, item) for item in result.interruptions))
            for item, approval in zip(result.interruptions, approvals, strict=True):
                if approval.approved:
                    state.approve(item)
                else:
                    state.reject(item, rejection_message=approval.message or None)
            input = state
            options.pop("context", None)  # the state has it

    def run_streamed(
        self, starting_agent: Agent[Any], input: Any, *, run_config: RunConfig | None = None, **options: Any
    ) -> RunResultStreaming:
        """Run an agent, and return its events while it runs. Arguments and errors are those of `Runner.run_streamed`.

        A resumed run has no deltas of a recorded response, only its end.
        """
        config, agent = self._prepare(starting_agent, run_config)
        return Runner.run_streamed(agent, input, run_config=config, **options)

    def durable(
        self, agent: Agent[Any], *, model: str | Model | None = None, model_provider: ModelProvider | None = None
    ) -> Agent[Any]:
        """Return a copy of an agent, and of those to which it hands off, whose requests and tool calls are steps.

        For an agent that is a tool of another one: `runner.durable(agent).as_tool(...)`; else the call of the tool is
        one step.

        Args:
            model: in place of those of the agents.
            model_provider: of models that are given by name; the default one of the SDK else.

        Raises:
            ConfigurationError: a tool acts on this machine and is no function tool.
        """
        return _Copies(self, model, model_provider or RunConfig().model_provider).of(agent)

    def _prepare(self, agent: Agent[Any], run_config: RunConfig | None) -> tuple[RunConfig, Agent[Any]]:
        config = run_config or RunConfig()
        if durable_context() is None:
            check_inside(f"agent {agent.name!r}", require=self.require)
            return config, agent
        agent = self.durable(agent, model=config.model, model_provider=config.model_provider)
        return dataclasses.replace(config, model=None), agent

    async def _run_once(
        self, ctx: Context | None, agent: Agent[Any], input: Any, **options: Any
    ) -> RunResult | RunResultStreaming:
        if ctx is None or self.emit_to is None:
            return await Runner.run(agent, input, **options)
        result = Runner.run_streamed(agent, input, **options)
        run = call_number(ctx, "#openai_agents")
        number = 0
        async for event in result.stream_events():
            if event.type == "run_item_stream_event":
                number += 1
                raw = to_jsonable_python(event.item.raw_item, fallback=str)
                item = {"type": "run_item", "name": event.name, "agent": event.item.agent.name, "item": raw}
                kept = ("type", "name", "agent")
                await ctx.emit(shortened_item(item, kept), self.emit_to, key=f"{agent.name}:{run}:{number}")
        return result

    async def _approve(self, ctx: Context, item: Any) -> ToolApproval:
        raw = item.raw_item
        arguments = raw.get("arguments") if isinstance(raw, dict) else getattr(raw, "arguments", None)
        shows = {"agent": item.agent.name, "tool": item.tool_name, "arguments": _parsed(arguments)}
        approval: ToolApproval | None = await ctx.wait_for(
            wait_name(f"approve-{item.tool_name}"),
            ToolApproval,
            who=self.who,
            shows=shows,
            timeout=self.wait_timeout,
            default=None,
        )
        return approval or ToolApproval(approved=False, message="The call was not approved in time.")


def _parsed(arguments: Any) -> Any:
    """Return the arguments of a call as data; a text that is no JSON as it is."""
    with suppress(ValueError, TypeError):
        return json.loads(arguments)
    return to_jsonable_python(arguments, fallback=str)


class _Copies:
    """Durable copies of agents, each made once: agents may hand off to each other."""

    def __init__(self, runner: PerdureRunner, model: str | Model | None, provider: ModelProvider) -> None:
        self._runner = runner
        self._model = model
        self._provider = provider
        self._made: dict[int, Agent[Any]] = {}
        self._originals: list[Agent[Any]] = []
        """They live as long as their ids are keys."""

    def of(self, agent: Agent[Any]) -> Agent[Any]:
        """Return the durable copy of an agent."""
        if isinstance(agent.model, _StepModel):
            return agent
        if (made := self._made.get(id(agent))) is not None:
            return made
        model = agent.model if self._model is None else self._model
        step_model = _StepModel(self._runner, agent.name, model, self._provider)
        made = agent.clone(model=step_model, tools=[self._tool(tool, agent) for tool in agent.tools], handoffs=[])
        made.model_settings = agent.model_settings  # a copy with a model has other defaults
        self._made[id(agent)] = made
        self._originals.append(agent)
        made.mcp_servers = [_step_server(self._runner, server, agent.name) for server in agent.mcp_servers]
        for handoff in agent.handoffs:
            made.handoffs.append(self._handoff(handoff, agent) if isinstance(handoff, Handoff) else self.of(handoff))
        return made

    def _handoff(self, handoff: Handoff[Any, Any], source: Agent[Any]) -> Handoff[Any, Any]:
        """Return a handoff whose callback is called in a step, if the agent is known without calling it."""
        reference = handoff._agent_ref
        target = None if reference is None else cast("Agent[Any] | None", reference())

        async def invoke(context: Any, arguments: str) -> Agent[Any]:
            ctx = durable_context()
            if ctx is None or target is None:
                return self.of(cast("Agent[Any]", await handoff.on_invoke_handoff(context, arguments)))

            async def call(arguments: str) -> None:
                await handoff.on_invoke_handoff(context, arguments)

            with ctx.scope(source.name):
                await ctx.step(handoff.tool_name, call, arguments)
            return self.of(target)

        made = dataclasses.replace(handoff, on_invoke_handoff=invoke)
        if target is not None:
            made._agent_ref = weakref.ref(self.of(target))
        return made

    def _tool(self, tool: Any, agent: Agent[Any]) -> Any:
        if isinstance(tool, FunctionTool):
            nested = tool._agent_instance
            return tool if nested is not None and isinstance(nested.model, _StepModel) else self._function(tool, agent)
        if isinstance(tool, CustomTool):
            return self._custom(tool, agent)
        if isinstance(tool, _REMOTE):
            return tool
        raise ConfigurationError(
            f"tool {getattr(tool, 'name', tool)!r} of agent {agent.name!r} is a {type(tool).__name__}, which acts "
            "outside a step: give the agent a function tool in its place"
        )

    def _function(self, tool: FunctionTool, agent: Agent[Any]) -> FunctionTool:
        async def invoke(context: ToolContext[Any], arguments: str) -> Any:
            async def call() -> Any:
                return await invoke_function_tool(function_tool=tool, context=context, arguments=arguments)

            return await self._call(agent, tool.name, context, arguments, call)

        changed: dict[str, Any] = {"on_invoke_tool": invoke, "timeout_seconds": None}  # the time-out is in the step
        prepare = getattr(tool.on_invoke_tool, "prepare_arguments", None)
        if callable(policy := tool.needs_approval) and callable(prepare):

            async def needs_approval(context: Any, arguments: dict[str, Any], call_id: str) -> bool:
                prepared = prepare(json.dumps(arguments), tool.name)
                if prepared is not None and not prepared.unchanged:  # as the SDK decides: the policy has not seen them
                    return True
                return bool(await policy(context, arguments, call_id))

            changed["needs_approval"] = needs_approval
        return dataclasses.replace(tool, **changed)

    def _custom(self, tool: CustomTool, agent: Agent[Any]) -> CustomTool:
        async def invoke(context: ToolContext[Any], text: str) -> Any:
            async def call() -> Any:
                result = tool.on_invoke_tool(context, text)
                return await result if isinstance(result, Awaitable) else result

            return await self._call(agent, tool.name, context, text, call)

        return dataclasses.replace(tool, on_invoke_tool=invoke)

    async def _call(
        self,
        agent: Agent[Any],
        name: str,
        context: ToolContext[Any],
        arguments: str,
        call: Callable[[], Awaitable[Any]],
    ) -> Any:
        """Return the result of a tool call, which is a step, as the SDK takes it."""
        ctx = durable_context()
        if ctx is None:
            return await call()

        async def tool(arguments: Any) -> Any:
            return _output_data(await call())

        call_id = context.tool_call_id
        with ctx.scope(agent.name):
            options = {"step_id": call_step_id(ctx, name, call_id), **self._runner.tool_options.get(name, {})}
            data = await ctx.options(call=call_id, **options).tool(name, tool, _parsed(arguments))
        return _output_of(data)


def _output_data(result: Any) -> Any:
    """Return the result of a tool as JSON data: structured outputs, data, and the text of anything else."""
    if isinstance(result, _OUTPUTS):
        return {"#output": result.model_dump(mode="json")}
    if isinstance(result, list) and any(isinstance(item, _OUTPUTS) for item in result):
        return {"#outputs": [_output_data(item) for item in result]}
    if isinstance(result, BaseModel):
        return str(result)
    try:
        return to_jsonable_python(result)
    except PydanticSerializationError:
        return str(result)


def _output_of(data: Any) -> Any:
    if isinstance(data, dict) and len(data) == 1:
        if (output := data.get("#output")) is not None:
            return next(kind for kind in _OUTPUTS if kind.model_fields["type"].default == output["type"])(**output)
        if (outputs := data.get("#outputs")) is not None:
            return [_output_of(item) for item in outputs]
    return data


class _StepModel(Model):
    """A model whose requests are steps."""

    def __init__(self, runner: PerdureRunner, agent: str, model: str | Model | None, provider: ModelProvider) -> None:
        self._runner = runner
        self._agent = agent
        self._given = model
        self._provider = provider

    @property
    def inner(self) -> Model:
        """The model that answers."""
        return self._given if isinstance(self._given, Model) else self._provider.get_model(self._given)

    async def close(self) -> None:
        await self.inner.close()

    async def _cleanup_on_run_end(self, owner: object) -> None:
        await self.inner._cleanup_on_run_end(owner)

    def get_retry_advice(self, request: Any) -> Any:
        return self.inner.get_retry_advice(request)

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        ctx, model = durable_context(), self.inner
        if ctx is None:
            return await model.get_response(*args, **kwargs)

        async def request() -> Any:
            response = await model.get_response(*args, **kwargs)
            await self._charge(response.usage)
            return _RESPONSE.dump_python(response, **_JSON)

        response: ModelResponse = _RESPONSE.validate_python(await self._step(ctx, request, _input(args, kwargs)))
        return response

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        """Yield the events of a response while its step runs; of a recorded one, its end."""
        ctx, model = durable_context(), self.inner
        if ctx is None:
            async for event in model.stream_response(*args, **kwargs):
                yield event
            return
        queue: asyncio.Queue[Any] = asyncio.Queue()

        async def request() -> Any:
            last = None
            async for event in model.stream_response(*args, **kwargs):
                await self._emit(event)
                if event.type in _TERMINAL:
                    last = event
                else:
                    queue.put_nowait(event)
            if last is None:
                return None
            if last.response.usage is not None:
                await self._charge(last.response.usage)
            return last.model_dump(**_JSON)

        call = asyncio.ensure_future(self._step(ctx, request, _input(args, kwargs)))
        call.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (event := await queue.get()) is not None:
                yield event
            data = await call
        finally:
            if not call.done():
                call.cancel()
                await asyncio.wait([call])
        if data is not None:
            yield _EVENT.validate_python(data)

    async def _step(self, ctx: Context, request: Callable[[], Awaitable[Any]], given: Any) -> Any:
        async def model(latest: str, conversation: str) -> Any:
            return await request()

        digest = hashlib.blake2b(to_json(given, fallback=str), digest_size=12).hexdigest()
        with ctx.scope(self._agent):
            options = ctx.options(**self._runner.model_options)
            return await options.step("model.request", model, _latest_text(given), digest)

    async def _charge(self, usage: Any) -> None:
        """Charge the tokens of a response to the budgets of the task: once, as its step is recorded."""
        if usage.input_tokens or usage.output_tokens:
            given = self._given if isinstance(self._given, str) else getattr(self.inner, "model", None)
            name = given if isinstance(given, str) and given else None
            await current_step().spend(input_tokens=usage.input_tokens, output_tokens=usage.output_tokens, model=name)

    async def _emit(self, event: Any) -> None:
        step = step_here()
        if step is not None and self._runner.emit_to is not None:
            item = shortened_item(event.model_dump(mode="json"), _KEPT)
            await step.emit(item, self._runner.emit_to)


def _input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the input of a model request."""
    return args[1] if len(args) > 1 else kwargs.get("input")


def _latest_text(given: Any) -> str:
    """Return the beginning of the latest text or tool result, for people."""
    last = given[-1] if isinstance(given, list) and given else given
    content = (last.get("content") or last.get("output")) if isinstance(last, dict) else last
    return shortened_text(content)


def _step_server(runner: PerdureRunner, server: Any, agent: str) -> Any:
    """Return an MCP server whose discovery and calls are steps."""
    from mcp.types import CallToolResult, Tool

    result_type: TypeAdapter[Any] = TypeAdapter(CallToolResult)
    tools_type: TypeAdapter[Any] = TypeAdapter(list[Tool])
    made = copy.copy(server)

    async def list_tools(*args: Any, **kwargs: Any) -> Any:
        ctx = durable_context()
        if ctx is None:
            return await server.list_tools(*args, **kwargs)

        async def discover() -> Any:
            return tools_type.dump_python(await server.list_tools(*args, **kwargs), mode="json")

        with ctx.scope(agent):
            return tools_type.validate_python(await ctx.step(f"{server.name}.list_tools", discover))

    async def call_tool(tool_name: str, arguments: dict[str, Any] | None, *args: Any, **kwargs: Any) -> Any:
        ctx = durable_context()
        if ctx is None:
            return await server.call_tool(tool_name, arguments, *args, **kwargs)

        async def call(arguments: dict[str, Any] | None) -> Any:
            return result_type.dump_python(await server.call_tool(tool_name, arguments, *args, **kwargs), mode="json")

        with ctx.scope(agent):
            options = ctx.options(**runner.tool_options.get(tool_name, {}))
            return result_type.validate_python(await options.tool(tool_name, call, arguments))

    made.list_tools, made.call_tool = list_tools, call_tool
    return made
