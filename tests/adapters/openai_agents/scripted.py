"""A scripted model of the OpenAI Agents SDK for tests, and a counter of what its agents call."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from agents import Model, ModelResponse, Usage
from agents.testing import assistant_message, function_call
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseTextDeltaEvent,
    ResponseUsage,
)
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails


class Script(Model):
    """A model that calls tools, then answers with their results; it counts its requests.

    It knows its place in the script by the input, as another process may have made the first requests.

    calls: for each request, the tools to call: name, and arguments.
    """

    def __init__(self, *calls: list[tuple[str, dict[str, Any]]], counts: Counter[str] | None = None) -> None:
        self.calls = calls
        self.counts: Counter[str] = Counter() if counts is None else counts
        self.inputs: list[Any] = []

    def output(self, given: Any) -> list[Any]:
        self.counts["model"] += 1
        self.inputs.append(given)
        items = given if isinstance(given, list) else []
        last_user = max((number for number, item in enumerate(items) if item.get("role") == "user"), default=-1)
        turn = items[last_user + 1 :]
        called = {item["call_id"] for item in turn if item.get("type") == "function_call"}
        asked = len({call_id.split("-")[1] for call_id in called})
        if asked < len(self.calls):
            users = sum(item.get("role") == "user" for item in items)
            turn_name = f"-{users}" if users > 1 else ""  # the id of a call is used once in a conversation
            return [
                function_call(name, json.dumps(arguments), call_id=f"call-{asked}-{number}{turn_name}")
                for number, (name, arguments) in enumerate(self.calls[asked])
            ]
        results = [str(item["output"]) for item in turn if item.get("type") == "function_call_output"]
        return [assistant_message(" ".join(results) or "done")]

    async def get_response(self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any) -> ModelResponse:
        usage = Usage(requests=1, input_tokens=10, output_tokens=5, total_tokens=15)
        return ModelResponse(output=self.output(input), usage=usage, response_id=None)

    async def stream_response(
        self, system_instructions: Any, input: Any, *args: Any, **kwargs: Any
    ) -> AsyncIterator[Any]:
        output = self.output(input)
        number = 0
        for item in output:
            for word in item.content[0].text.split(" ") if item.type == "message" else ():
                number += 1
                yield ResponseTextDeltaEvent(
                    type="response.output_text.delta",
                    content_index=0,
                    output_index=0,
                    item_id=item.id,
                    delta=f"{word} ",
                    logprobs=[],
                    sequence_number=number,
                )
        response = Response(
            id="resp",
            created_at=0,
            model="script",
            object="response",
            output=output,
            tool_choice="auto",
            tools=[],
            parallel_tool_calls=True,
            usage=ResponseUsage(
                input_tokens=10,
                output_tokens=5,
                total_tokens=15,
                input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            ),
        )
        yield ResponseCompletedEvent(type="response.completed", response=response, sequence_number=number + 1)
