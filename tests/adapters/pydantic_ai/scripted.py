"""A scripted model for agents of tests, and a counter of what they call."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from pydantic_ai import ModelResponse, TextPart, ToolCallPart
from pydantic_ai.messages import ModelMessage, ModelRequest, RetryPromptPart, ToolReturnPart
from pydantic_ai.models.function import AgentInfo, DeltaToolCall, DeltaToolCalls, FunctionModel
from pydantic_ai.usage import RequestUsage


class Script:
    """A model that calls tools, then answers with their results; it counts its requests.

    calls: for each request, the tools to call: name, and arguments.
    """

    def __init__(self, *calls: list[tuple[str, dict[str, Any]]]) -> None:
        self.calls = calls
        self.counts: Counter[str] = Counter()

    @property
    def model(self) -> FunctionModel:
        return FunctionModel(self.respond, stream_function=self.stream)

    def _parts(self, messages: list[ModelMessage]) -> list[ToolCallPart] | str:
        self.counts["model"] += 1
        asked = sum(isinstance(message, ModelResponse) for message in messages)
        if asked < len(self.calls):
            return [
                ToolCallPart(name, arguments, tool_call_id=f"call-{asked}-{number}")
                for number, (name, arguments) in enumerate(self.calls[asked])
            ]
        return " ".join(tool_results(messages)) or "done"

    def respond(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        del info
        parts = self._parts(messages)
        found = [TextPart(parts)] if isinstance(parts, str) else parts
        return ModelResponse(parts=found, usage=RequestUsage(input_tokens=10, output_tokens=5))

    async def stream(self, messages: list[ModelMessage], info: AgentInfo) -> AsyncIterator[str | DeltaToolCalls]:
        del info
        parts = self._parts(messages)
        if isinstance(parts, str):
            for word in parts.split(" "):
                yield f"{word} "
            return
        for number, part in enumerate(parts):
            yield {number: DeltaToolCall(part.tool_name, part.args_as_json_str(), tool_call_id=part.tool_call_id)}


def tool_results(messages: list[ModelMessage]) -> list[str]:
    """Return the results of tools, and what the model reads in their place."""
    return [
        str(part.content)
        for message in messages
        if isinstance(message, ModelRequest)
        for part in message.parts
        if isinstance(part, ToolReturnPart | RetryPromptPart)
    ]
