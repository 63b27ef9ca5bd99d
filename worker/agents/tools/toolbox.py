"""Definitions of the tools for providers, and the call of a tool as a durable step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from ....queues.errors import ConfigurationError
from ...context import Context
from ...durable.journal.chat import Message, ToolCall
from ...durable.journal.quoting import quoted_name
from ..journal.state import AgentState
from .readers import TOOLS, ArgumentsRefused, Reader, ReadInbox, check_arguments, inbox_text, schema_of


class AgentTools:
    """Tools by which a model reads its task: steps, log, memories, artifacts, inbox.

    Attributes:
        names: Names of the tools.
    """

    def __init__(
        self, names: Sequence[str] = tuple(TOOLS), *, subjects: Collection[str] = (), limit: int = 8_000
    ) -> None:
        """Choose the tools.

        Args:
            subjects: Subjects such as `user:42` whose profiles `search_memory` searches besides the agent's own
                memories. The model cannot choose others.
            limit: Characters of a result; a longer one is cut, with a note how to get the rest.

        Raises `ConfigurationError`.
        """
        for option, texts in (("names", names), ("subjects", subjects)):
            if isinstance(texts, str):
                raise ConfigurationError(f"{option} must be a list of texts, got {texts!r}")
        for name in names:
            if name not in TOOLS:
                raise ConfigurationError(f"names must be among {', '.join(TOOLS)}, got {name!r}")
        if limit < 500:
            raise ConfigurationError(f"limit must be 500 characters or more, got {limit}")
        self.names = tuple(names)
        self._subjects = tuple(subjects)
        self._limit = limit

    def openai(self) -> list[dict[str, Any]]:
        """Return `tools` of a request to OpenAI's Chat Completions, and to endpoints of the same form."""
        return [
            {
                "type": "function",
                "function": {"name": name, "description": TOOLS[name].__doc__, "parameters": schema_of(TOOLS[name])},
            }
            for name in self.names
        ]

    def anthropic(self) -> list[dict[str, Any]]:
        """Return `tools` of a request to Anthropic's Messages API."""
        return [
            {"name": name, "description": TOOLS[name].__doc__, "input_schema": schema_of(TOOLS[name])}
            for name in self.names
        ]

    async def call(self, ctx: Context, state: AgentState, call: ToolCall) -> Message:
        """Call a tool as a durable step, and record its result in the conversation; return that message.

        If the model asked for an unknown tool or gave wrong arguments, the message says so; the run continues.

        Raises the errors of `ctx.tool`, `MemoryStoreError` and `StoreUnavailable`.
        """
        try:
            text = await self._result(ctx, state, call)
        except ArgumentsRefused as error:
            text = f"error: {error}"
        return await ctx.add_message("tool", text, tool_call_id=call.id, name=call.name)

    async def _result(self, ctx: Context, state: AgentState, call: ToolCall) -> str:
        kind = TOOLS.get(call.name) if call.name in self.names else None
        if kind is None:
            raise ArgumentsRefused(f"there is no tool {quoted_name(call.name)}; the tools are {', '.join(self.names)}")
        arguments = check_arguments(kind, call.arguments)
        if isinstance(arguments, ReadInbox):  # a recorded step of its own, which also removes the messages
            return inbox_text(await ctx.inbox(limit=arguments.limit), self._limit, self.names)
        reader = Reader(ctx, state, self._subjects, self._limit)
        read = getattr(reader, kind.tool)
        text: str = await ctx.options(call=call.id, intent=False).tool(kind.tool, read, **arguments.model_dump())
        return text
